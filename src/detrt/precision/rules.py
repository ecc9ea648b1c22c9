"""Rules for the nodes that must stay in FP32; the same for every family.

*Coordinates* are tensors that become positions, indices or rankings. *Movement* is an operator that only rearranges values, and
has the type of its input.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..graph.names import matches
from ..graph.operators import (
    BARRIER,
    COMPARE,
    DECIDE,
    DECIDING_INPUT,
    ELEMENTWISE,
    FILL_LIMIT,
    GEMM,
    MOVEMENT,
    MSDA,
    NVIDIA_MSDA,
    PLUGIN_NODES,
    WIDE,
)  # fmt: skip
from ..graph.view import BF16, FLOAT, HALF, GraphView, attribute
from ..spec import Precision

BF16_OPSET = 22  # of graphs in BF16


class Rules:
    """keep: node index -> why it stays FP32. free: movement nodes, which have the type of their input.

    precision: FP16 or BF16. patterns: of node names that stay FP32. extra: node name -> reason, from calibration.
    """

    def __init__(
        self,
        view: GraphView,
        precision: Precision,
        patterns: tuple[str, ...] = (),
        extra: dict[str, str] | None = None,
    ) -> None:
        self.view, self.precision = view, Precision(precision)
        self.keep: dict[int, str] = {}
        self.coordinates: set[int] = set()
        self._walk_back()
        self._walk_forward()
        for index, node in enumerate(view.nodes):
            reason = (extra or {}).get(node.name) or self._reason(node)
            if matches(node.name, patterns):
                reason = "matches `keep_fp32`"
            if reason and self._touches_floats(node):
                self.keep.setdefault(index, reason)
        self.free = {i for i, n in enumerate(view.nodes) if self._moves(n) and i not in self.keep}

    def _touches_floats(self, node: onnx.NodeProto) -> bool:
        return any(self.view.is_float(name) for name in (*node.input, *node.output) if name)

    def _moves(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Resize":
            return attribute(node, "mode", b"nearest") == b"nearest"
        if node.op_type in ("Cast", "ConstantOfShape"):
            return not self.view.float_inputs(node)
        return node.op_type in MOVEMENT

    def _reason(self, node: onnx.NodeProto) -> str:
        view = self.view
        if node.op_type in WIDE.onnx:
            return f"{node.op_type} needs the range or the precision of FP32"
        if node.op_type == "TopK":
            return "ranking of scores"
        if node.op_type in COMPARE.onnx:
            return "comparison of exact values"
        if node.op_type == "Cast" and view.float_inputs(node):
            return "type of the original graph"
        if node.op_type == "Div" and view.float_inputs(node) and node.input[1] not in view.constants:
            return "division by a computed value"
        if node.op_type == "Resize" and attribute(node, "mode", b"nearest") == b"cubic":
            return "cubic interpolation of positions"
        if node.op_type == "GridSample":
            return "GridSample takes values and FP32 coordinates in one type"
        if node.op_type == NVIDIA_MSDA:
            return "NVIDIA's plugin takes values and coordinates in one type"
        if self._has_lossy_constant(node):
            return f"a constant that {self.precision} cannot hold"
        if self.precision == Precision.BF16 and not _takes_bf16(node):
            return f"ONNX has no BF16 {node.op_type}"
        if self.precision == Precision.BF16 and node.op_type == "ConvTranspose":
            return "TensorRT has no BF16 ConvTranspose"
        return ""

    def _has_lossy_constant(self, node: onnx.NodeProto) -> bool:
        """Whether a constant underflows (an epsilon), or overflows without being a fill."""
        for position, name in enumerate(node.input):
            if name not in self.view.constants or not self.view.is_float(name) or position in fixed_inputs(node):
                continue
            values = np.abs(self.view.array(name)).reshape(-1)
            values = values[np.isfinite(values) & (values > 0)]
            if not values.size:
                continue
            largest = float(values.max())
            # A bias is added to sums that are larger than what it loses.
            is_bias = position == 2 and node.op_type in ("Conv", "ConvTranspose", "Gemm")
            if (largest < self.precision.min_normal and not is_bias) or (self.precision.max_value < largest < FILL_LIMIT):
                return True
        return False

    def _walk_back(self) -> None:
        """Mark nodes between the last matmuls and outputs, indices, rankings and angles."""
        view = self.view
        todo = [name for name in view.outputs if view.is_float(name)]
        for node in view.nodes:
            if node.op_type in DECIDE.onnx:
                todo += [n for p, n in enumerate(node.input) if n and DECIDING_INPUT.get(node.op_type, p) == p]
            elif node.op_type == "Cast" and attribute(node, "to") not in (FLOAT, HALF, BF16):
                todo += list(node.input)
        visited: set[str] = set()
        while todo:
            name = todo.pop()
            if name in visited or not view.is_float(name) or name not in view.index:
                continue
            visited.add(name)
            index = view.index[name]
            node = view.nodes[index]
            if (
                node.op_type in BARRIER.onnx
                or (node.op_type in GEMM.onnx and not is_dot_product(view, node))
                or is_bias(view, node)
            ):
                continue
            if not self._moves(node):
                self.keep[index] = "coordinates or scores: " + _EXACT_REASON
                self.coordinates.add(index)
            todo += [n for p, n in enumerate(node.input) if n and p not in fixed_inputs(node)]

    def _walk_forward(self) -> None:
        """Mark arithmetic on coordinates: a difference of two positions cancels their leading digits."""
        view = self.view
        exact: set[str] = set()
        for index, node in enumerate(view.nodes):
            inputs = view.float_inputs(node)
            if index in self.keep or node.op_type in WIDE.onnx or node.op_type == "Cast":
                is_exact = index in self.keep or node.op_type in WIDE.onnx or (not inputs and self._from_input(node))
            elif node.op_type in ELEMENTWISE or self._moves(node):
                is_exact = bool(inputs) and all(name in exact for name in inputs)
                if is_exact and not self._moves(node):
                    self.keep[index] = "arithmetic on coordinates or raw pixels"
            else:
                is_exact = False
            if is_exact:
                exact.update(node.output)

    def _from_input(self, node: onnx.NodeProto) -> bool:
        """Whether a node casts pixels, a mask or another tensor that is not float."""
        return node.op_type == "Cast" and not self.view.float_inputs(node)


_EXACT_REASON = "an index, an order, an angle or an output depends on every digit"


# The coordinates of detrt's plugin are FP32, whatever the type of its values.
_FP32_INPUTS = {"Resize": (1, 2), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), MSDA: (2,)}


def fixed_inputs(node: onnx.NodeProto) -> tuple[int, ...]:
    """Input positions that are FP32, whatever the type of the node."""
    return _FP32_INPUTS.get(node.op_type, ())


def is_dot_product(view: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a matmul multiplies a softmax with one vector, such as the expected distance of D-FINE, which is not a layer."""
    if node.op_type not in ("MatMul", "Gemm"):
        return False
    weight = view.constants.get(node.input[1])
    if weight is None or len(weight.dims) > 2:
        return False
    transposed = node.op_type == "Gemm" and attribute(node, "transB", 0)
    columns = 1 if len(weight.dims) == 1 else weight.dims[0 if transposed else 1]
    producer = producer_behind_reshapes(view, node.input[0])
    return columns == 1 and producer is not None and producer.op_type == "Softmax"


def producer_behind_reshapes(view: GraphView, tensor: str) -> onnx.NodeProto | None:
    """The node that computes the values of a tensor; None for an input or a constant."""
    producer = view.producer.get(tensor)
    while producer is not None and producer.op_type in ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"):
        producer = view.producer.get(producer.input[0])
    return producer


def is_bias(view: GraphView, node: onnx.NodeProto) -> bool:
    """Whether an Add of one constant per channel follows a layer as its bias."""
    if node.op_type != "Add":
        return False
    for data, other in (node.input, reversed(node.input)):
        producer = view.producer.get(data)
        if other in view.constants and producer is not None and producer.op_type in GEMM.onnx:
            return sum(side > 1 for side in view.constants[other].dims) <= 1 and len(view.readers[data]) == 1
    return False


def _takes_bf16(node: onnx.NodeProto) -> bool:
    """Whether the first input of an operator may be BF16."""
    if node.op_type in PLUGIN_NODES:
        return True
    schema = onnx.defs.get_schema(node.op_type, BF16_OPSET)
    if not schema.inputs:
        return True
    kind = schema.inputs[0].type_str
    for constraint in schema.type_constraints:
        if constraint.type_param_str == kind:
            allowed = constraint.allowed_type_strs
            return "tensor(bfloat16)" in allowed or "tensor(float)" not in allowed
    return True
