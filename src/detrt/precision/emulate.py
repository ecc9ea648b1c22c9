"""A typed graph as FP32 with rounding, for runtimes that lack its kernels or quietly compute more exactly.

ONNX Runtime on a CPU has no BF16 kernels and few for FP16 and FP8; where it has none it computes in FP32 and drops
the casts in between, so that neither the rounding nor an overflow shows.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .rules import MOVEMENT, fixed_inputs
from .view import BF16, FLOAT, HALF, replace_nodes

_LOW = (HALF, BF16)
_FP8 = TensorProto.FLOAT8E4M3FN
_NO_FLOATS = (
    "Shape",
    "Equal",
    "Greater",
    "Less",
    "GreaterOrEqual",
    "LessOrEqual",
    "Size",
    "ArgMax",
    "ArgMin",
    "IsNaN",
    "IsInf",
)


def emulate(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes in FP32 and rounds to the stored type wherever the graph stores FP16, BF16 or FP8.

    That is what tensor cores do: products of low values summed in FP32, and the result rounded. Weights keep
    their rounded values, tensors their names. An FP32 graph comes back as an equal copy.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    kinds = {t.name: t.data_type for t in graph.initializer if t.data_type in _LOW}
    constants = {t.name: t for t in graph.initializer}
    for tensor in graph.initializer:
        if tensor.data_type in _LOW:
            tensor.CopyFrom(numpy_helper.from_array(_float32(tensor), tensor.name))
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        kind = next((kinds[n] for p, n in enumerate(node.input) if n in kinds and p not in fixed_inputs(node)), 0)
        moves = node.op_type in MOVEMENT
        for entry in node.attribute:
            if node.op_type == "Cast" and entry.name == "to":
                kind = entry.i if entry.i in _LOW else 0
                entry.i = FLOAT if kind else entry.i
            elif node.op_type == "ConstantOfShape" and entry.name == "value":
                kind = entry.t.data_type if entry.t.data_type in _LOW else 0
                moves = True
                if kind:
                    entry.t.CopyFrom(numpy_helper.from_array(_float32(entry.t), entry.t.name))
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            if len(node.input) > 2 and constants[node.input[2]].data_type == _FP8:
                nodes.extend(_fp8(graph, node, constants))
            else:
                nodes.append(node)
            if node.op_type == "DequantizeLinear" and node.input[1] in kinds:
                kinds[node.output[0]] = kinds[node.input[1]]
            continue
        nodes.append(node)
        if not kind or node.op_type in _NO_FLOATS:
            continue
        floats = node.output[:1] if node.op_type in ("TopK", "MaxPool") else node.output
        kinds.update(dict.fromkeys(floats, kind))
        if moves:
            continue
        for position, name in enumerate(floats):
            if name:
                exact, rounded = f"{name}/exact", f"{name}/bits"
                node.output[position] = exact
                nodes.append(helper.make_node("Cast", [exact], [rounded], name=f"{node.name}/round_{position}", to=kind))
                nodes.append(helper.make_node("Cast", [rounded], [name], name=f"{node.name}/widen_{position}", to=FLOAT))
    replace_nodes(copy, nodes)
    del graph.value_info[:]
    return copy


def needs_emulation(model: onnx.ModelProto) -> bool:
    """Whether a graph holds BF16 or FP8, which ONNX Runtime does not run on a CPU."""
    if any(t.data_type in (BF16, _FP8) for t in model.graph.initializer):
        return True
    return any(a.name == "to" and a.i == BF16 for n in model.graph.node if n.op_type == "Cast" for a in n.attribute)


def _fp8(graph: onnx.GraphProto, node: onnx.NodeProto, constants: dict[str, TensorProto]) -> list[onnx.NodeProto]:
    """FP8 Q and DQ as a division or product and a Cast: ONNX Runtime moves FP8 pairs over nodes that refuse them."""
    source, scale, output = node.input[0], node.input[1], node.output[0]
    inner = f"{output}/fp8"
    if node.op_type == "QuantizeLinear":
        return [
            helper.make_node("Div", [source, scale], [inner], name=f"{node.name}/Div"),
            helper.make_node("Cast", [inner], [output], name=f"{node.name}/Cast", to=_FP8),
        ]
    if constants[scale].dims:  # weights: one scale a channel
        weight = numpy_helper.to_array(constants[source]).astype(np.float32)
        axis = next(a.i for a in node.attribute if a.name == "axis")
        shape = [-1 if i == axis % weight.ndim else 1 for i in range(weight.ndim)]
        array = weight * _float32(constants[scale]).reshape(shape)
        graph.initializer.append(numpy_helper.from_array(array, output))
        return []
    return [
        helper.make_node("Cast", [source], [inner], name=f"{node.name}/Cast", to=FLOAT),
        helper.make_node("Mul", [inner, scale], [output], name=f"{node.name}/Mul"),
    ]


def _float32(tensor: onnx.TensorProto) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
