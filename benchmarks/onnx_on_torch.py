"""Run an ONNX graph with PyTorch kernels in the graph's own types: real FP16 and BF16 arithmetic on a GPU.

Only the operators of detector graphs. It exists because ONNX Runtime on a CPU computes FP16 in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

KIND = {
    TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64, TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32,
    TensorProto.UINT8: torch.uint8, TensorProto.INT8: torch.int8, TensorProto.BOOL: torch.bool,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
}  # fmt: skip


class TorchGraph:
    """`run(feeds, more)` -> outputs, and the tensors named in `more`, as NumPy arrays in FP32."""

    def __init__(self, model: onnx.ModelProto, device: str = "cpu") -> None:
        self.graph, self.device = model.graph, device
        self.constants = {t.name: self._tensor(t) for t in model.graph.initializer}
        self.attributes = [{a.name: helper.get_attribute_value(a) for a in n.attribute} for n in model.graph.node]
        self.last: dict[str, int] = {}
        for index, node in enumerate(model.graph.node):
            for name in node.input:
                self.last[name] = index

    def _tensor(self, proto: TensorProto) -> torch.Tensor:
        if proto.data_type == TensorProto.BFLOAT16:
            bits = np.frombuffer(proto.raw_data, np.int16).reshape(list(proto.dims)).copy()
            return torch.from_numpy(bits).view(torch.bfloat16).to(self.device)
        if proto.data_type == TensorProto.FLOAT8E4M3FN:
            bits = np.frombuffer(proto.raw_data, np.uint8).reshape(list(proto.dims)).copy()
            return torch.from_numpy(bits).to(self.device).view(torch.float8_e4m3fn)
        array = np.array(numpy_helper.to_array(proto))
        # Shapes and axes stay on the host, where their values are read.
        place = "cpu" if array.dtype == np.int64 and array.size <= 16 else self.device
        return torch.from_numpy(array).to(place)

    @torch.inference_mode()
    def run(self, feeds: Mapping[str, np.ndarray], more: Iterable[str] = (), visit=None) -> dict[str, np.ndarray]:
        """visit(name, array): called with every tensor named in `more` as it is made, instead of keeping it."""
        values = dict(self.constants)
        values |= {name: torch.from_numpy(np.ascontiguousarray(a)).to(self.device) for name, a in feeds.items()}
        kept = frozenset(more)
        wanted = {o.name for o in self.graph.output} | kept
        found = {}
        for index, node in enumerate(self.graph.node):
            inputs = [values[name] if name else None for name in node.input]
            made = _run(node.op_type, inputs, self.attributes[index], len(node.output), self.device)
            for name, value in zip(node.output, made if isinstance(made, (list, tuple)) else [made], strict=False):
                values[name] = value
                if name in wanted:
                    array = (value.float() if value.is_floating_point() else value).cpu().numpy()
                    if visit is not None and name in kept:
                        visit(name, array)
                    else:
                        found[name] = array
            for name in node.input:
                if self.last.get(name) == index and name not in self.constants:
                    values.pop(name, None)
        return found


def _ints(value) -> list[int]:
    return [int(v) for v in value.reshape(-1).tolist()]


def _same_place(a, b):
    if a.device != b.device:
        a, b = (a.to(b.device), b) if a.device.type == "cpu" else (a, b.to(a.device))
    return a, b


_TWO = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Pow": torch.pow, "MatMul": torch.matmul, "Min": torch.minimum,
    "Max": torch.maximum, "Equal": torch.eq, "Greater": torch.gt, "Less": torch.lt, "GreaterOrEqual": torch.ge,
    "LessOrEqual": torch.le, "And": torch.logical_and, "Or": torch.logical_or, "Mod": torch.remainder,
}  # fmt: skip
_ONE = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Log": torch.log, "Exp": torch.exp, "Sqrt": torch.sqrt, "Sin": torch.sin,
    "Cos": torch.cos, "Erf": torch.erf, "Floor": torch.floor, "Not": torch.logical_not, "Neg": torch.neg, "Abs": torch.abs,
    "Tanh": torch.tanh, "Identity": lambda x: x, "Reciprocal": torch.reciprocal, "Softplus": F.softplus,
}  # fmt: skip


def _run(op, x, a, outputs, device):  # one operator a branch: a table of the ONNX standard
    if op in _TWO:
        left, right = _same_place(x[0], x[1])
        if op in ("Min", "Max", "MatMul") or left.dtype == right.dtype:
            return _TWO[op](left, right)
        return _TWO[op](left, right.to(left.dtype))
    if op in _ONE:
        return _ONE[op](x[0])
    if op == "Div":
        left, right = _same_place(x[0], x[1])
        return torch.div(left, right) if left.is_floating_point() else torch.div(left, right, rounding_mode="trunc")
    if op == "Cast":
        return x[0].to(KIND[a["to"]])
    if op in ("QuantizeLinear", "DequantizeLinear"):  # symmetric, zero point 0
        scale = x[1].reshape([-1 if i == a.get("axis", 1) % x[0].ndim else 1 for i in range(x[0].ndim)]) if x[1].ndim else x[1]
        if op == "DequantizeLinear":
            return x[0].to(scale.dtype) * scale
        if x[2].dtype == torch.float8_e4m3fn:
            return (x[0] / scale).float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return torch.round(x[0] / scale).clamp(-128, 127).to(torch.int8)
    if op == "Shape":
        shape = list(x[0].shape)[a.get("start", 0) : a.get("end", x[0].ndim)]
        return torch.tensor(shape, dtype=torch.int64)
    if op == "Reshape":
        sides = _ints(x[1])
        return x[0].reshape(tuple(x[0].shape[i] if side == 0 else side for i, side in enumerate(sides)))
    if op == "Flatten":
        axis = a.get("axis", 1)
        return x[0].reshape(int(np.prod(x[0].shape[:axis])), -1)
    if op == "Transpose":
        return x[0].permute(*a.get("perm", range(x[0].ndim - 1, -1, -1)))
    if op == "Concat":
        place = next((t.device for t in x if t.device.type != "cpu"), x[0].device)
        return torch.cat([t.to(place) for t in x], a["axis"])
    if op == "Unsqueeze":
        for axis in sorted(_ints(x[1])):
            x[0] = x[0].unsqueeze(axis)
        return x[0]
    if op == "Squeeze":
        for axis in sorted(_ints(x[1]), reverse=True) if len(x) > 1 else []:
            x[0] = x[0].squeeze(axis)
        return x[0] if len(x) > 1 else x[0].squeeze()
    if op == "Gather":
        axis, index = a.get("axis", 0) % x[0].ndim, x[1].to(x[0].device)
        index = torch.where(index < 0, index + x[0].shape[axis], index)
        picked = x[0].index_select(axis, index.reshape(-1))
        return picked.reshape((*x[0].shape[:axis], *index.shape, *x[0].shape[axis + 1 :]))
    if op == "GatherElements":
        return x[0].gather(a.get("axis", 0), x[1])
    if op == "Expand":
        return (
            x[0] * torch.ones(_ints(x[1]), dtype=x[0].dtype, device=x[0].device)
            if x[0].dtype != torch.bool
            else x[0].expand(torch.broadcast_shapes(x[0].shape, tuple(_ints(x[1]))))
        )
    if op == "Tile":
        return x[0].repeat(*_ints(x[1]))
    if op == "Slice":
        starts, ends = _ints(x[1]), _ints(x[2])
        axes = _ints(x[3]) if len(x) > 3 and x[3] is not None else range(len(starts))
        steps = _ints(x[4]) if len(x) > 4 and x[4] is not None else [1] * len(starts)
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            chosen = range(x[0].shape[axis])[start:end:step]
            x[0] = x[0].index_select(axis, torch.tensor(list(chosen), dtype=torch.int64, device=x[0].device))
        return x[0]
    if op == "Split":
        return list(torch.split(x[0], _ints(x[1]), a.get("axis", 0)))
    if op == "Where":
        place = next((t.device for t in x if t.device.type != "cpu"), x[0].device)
        return torch.where(*(t.to(place) for t in x))
    if op == "Range":
        start, end, step = (t.item() for t in x)
        return torch.arange(start, end, step, dtype=x[0].dtype, device=device)
    if op == "ConstantOfShape":
        proto = a.get("value")
        value = float(np.asarray(numpy_helper.to_array(proto)).astype(np.float64).item()) if proto else 0.0
        return torch.full(_ints(x[0]), value, dtype=KIND[proto.data_type if proto else TensorProto.FLOAT], device=device)
    if op == "ScatterND":
        out, index = x[0].clone().to(x[2].device), x[1].to(x[2].device)
        out[tuple(index.unbind(-1))] = x[2]
        return out
    if op == "CumSum":
        total = torch.cumsum(x[0], int(x[1]), dtype=x[0].dtype)
        return total - x[0] if a.get("exclusive") else total
    if op == "TopK":
        values, index = torch.topk(x[0], int(x[1]), a.get("axis", -1))
        return [values, index]
    if op == "Softmax":
        return torch.softmax(x[0], a.get("axis", -1))
    if op in ("ReduceMean", "ReduceSum", "ReduceMax"):
        axes = list(a["axes"]) if "axes" in a else _ints(x[1])
        call = {"ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax}[op]
        return call(x[0], dim=axes, keepdim=bool(a.get("keepdims", 1)))
    if op == "GlobalAveragePool":
        return x[0].mean((2, 3), keepdim=True)
    if op == "Clip":
        low, high = ((x[i].to(x[0].device) if len(x) > i and x[i] is not None else None) for i in (1, 2))
        return torch.clamp(x[0], low, high)
    if op == "LayerNormalization":
        return F.layer_norm(x[0], x[1].shape, x[1], x[2] if len(x) > 2 else None, a.get("epsilon", 1e-5))
    if op == "InstanceNormalization":
        return F.instance_norm(x[0], weight=x[1], bias=x[2], eps=a.get("epsilon", 1e-5))
    if op == "Gemm":
        left, right = (x[0].T if a.get("transA") else x[0]), (x[1].T if a.get("transB") else x[1])
        return left @ right + (x[2] if len(x) > 2 else 0)
    if op == "Conv":
        pads, rank = a.get("pads", [0] * 4), x[1].ndim - 2
        if pads[:rank] != pads[rank:]:
            x[0], pads = F.pad(x[0], [pads[1], pads[3], pads[0], pads[2]]), [0] * 4
        bias = x[2] if len(x) > 2 else None
        return F.conv2d(x[0], x[1], bias, a.get("strides", 1), pads[:rank], a.get("dilations", 1), a.get("group", 1))
    if op in ("MaxPool", "AveragePool"):
        pads = a.get("pads", [0] * 4)
        value = -torch.inf if op == "MaxPool" else 0.0
        padded = F.pad(x[0], [pads[1], pads[3], pads[0], pads[2]], value=value) if any(pads) else x[0]
        ceil = bool(a.get("ceil_mode"))
        if op == "MaxPool":
            return F.max_pool2d(padded, a["kernel_shape"], a.get("strides", 1), ceil_mode=ceil)
        if any(pads) and not a.get("count_include_pad"):
            raise NotImplementedError("AveragePool with padding that does not count")
        return F.avg_pool2d(padded, a["kernel_shape"], a.get("strides", 1), ceil_mode=ceil)
    if op == "Pad":
        pads = _ints(x[1])
        half = len(pads) // 2
        order = [side for i in reversed(range(half)) for side in (pads[i], pads[i + half])]
        mode = {b"constant": "constant", b"edge": "replicate"}[a.get("mode", b"constant")]
        return F.pad(
            x[0],
            order,
            mode,
            **({"value": float(x[2]) if len(x) > 2 and x[2] is not None else 0.0} if mode == "constant" else {}),
        )
    if op == "Resize":
        size = (
            _ints(x[3])[2:]
            if len(x) > 3 and x[3] is not None
            else [int(s * f) for s, f in zip(x[0].shape[2:], x[2].tolist()[2:], strict=True)]
        )
        mode = {b"nearest": "nearest", b"linear": "bilinear", b"cubic": "bicubic"}[a.get("mode", b"nearest")]
        extra = {} if mode == "nearest" else {"align_corners": False}
        kind = x[0].dtype
        return F.interpolate(x[0].float(), size=size, mode=mode, **extra).to(kind)
    if op == "Einsum":
        return torch.einsum(a["equation"].decode(), *x)
    raise NotImplementedError(op)
