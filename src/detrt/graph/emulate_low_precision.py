"""Emulation of FP16, BF16 and FP8 graphs in FP32, for runtimes without such kernels.

ONNX Runtime's CPU kernels compute an FP16 graph in FP32 and drop the casts between two of them, so that neither the rounding nor
an overflow shows; BF16 and FP8 do not run at all. The emulation rounds after every operator, as tensor cores do: products of low
values are summed in FP32, and the result is rounded. Outputs of DequantizeLinear are not rounded, because a fused matmul scales
its sum once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .nodes import replace_nodes
from .operators import MOVEMENT
from .view import element_types

_LOW = {TensorProto.FLOAT16: "half", TensorProto.BFLOAT16: "brain"}
_FP8 = TensorProto.FLOAT8E4M3FN


def has_16_bit(types: Mapping[str, int]) -> bool:
    """Whether any of these element types is FP16 or BF16."""
    return any(kind in _LOW for kind in types.values())


def needs_emulation(model: onnx.ModelProto) -> bool:
    """Whether a graph has BF16 or FP8, which ONNX Runtime does not run on a CPU."""
    kinds = (TensorProto.BFLOAT16, _FP8)
    if any(t.data_type in kinds for t in model.graph.initializer):
        return True
    return any(a.name == "to" and a.i in kinds for n in model.graph.node if n.op_type == "Cast" for a in n.attribute)


def emulate(model: onnx.ModelProto, types: Mapping[str, int] | None = None, *, rounded: bool = True) -> onnx.ModelProto:
    """A copy in FP32 with the same tensor names, whose low-precision values are rounded to their type.

    types: tensor -> ONNX element type, if known. An FP32 graph is copied unchanged. rounded: False for what the graph computes without
    rounding to 16 bits, but for its constants.
    """
    types = element_types(model) if types is None else types
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for tensor in graph.initializer:
        if tensor.data_type in _LOW:
            tensor.CopyFrom(numpy_helper.from_array(_float32(tensor), tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _LOW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            is_fp8 = len(node.input) > 2 and constants[node.input[2]].data_type == _FP8
            nodes.extend(_fp8(graph, node, constants) if is_fp8 else [node])
            continue
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _LOW:
                attribute.i = TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _LOW:
                attribute.t.CopyFrom(numpy_helper.from_array(_float32(attribute.t), attribute.t.name))
        nodes.append(node)
        if node.op_type in MOVEMENT or node.op_type in ("Constant", "ConstantOfShape"):
            continue  # rounded values stay rounded
        for position, name in enumerate(node.output):
            kind = types.get(name)
            if not name or kind not in _LOW or not rounded:
                continue
            exact, bits = f"{name}/exact", f"{name}/{_LOW[kind]}"
            node.output[position] = exact
            nodes.append(helper.make_node("Cast", [exact], [bits], name=f"{name}/round", to=kind))
            nodes.append(helper.make_node("Cast", [bits], [name], name=f"{name}/widen", to=TensorProto.FLOAT))
    replace_nodes(copy, nodes)
    del graph.value_info[:]
    return copy


def _fp8(graph: onnx.GraphProto, node: onnx.NodeProto, constants: dict[str, TensorProto]) -> list[onnx.NodeProto]:
    """FP8 Q and DQ as Div or Mul and Cast, because ONNX Runtime moves FP8 pairs across nodes that do not support them."""
    source, scale, output = node.input[0], node.input[1], node.output[0]
    inner = f"{output}/fp8"
    if node.op_type == "QuantizeLinear":
        return [
            helper.make_node("Div", [source, scale], [inner], name=f"{node.name}/Div"),
            helper.make_node("Cast", [inner], [output], name=f"{node.name}/Cast", to=_FP8),
        ]
    if constants[scale].dims:  # weights: one scale per channel
        weight = numpy_helper.to_array(constants[source]).astype(np.float32)
        axis = next(a.i for a in node.attribute if a.name == "axis")
        shape = [-1 if i == axis % weight.ndim else 1 for i in range(weight.ndim)]
        array = weight * _float32(constants[scale]).reshape(shape)
        graph.initializer.append(numpy_helper.from_array(array, output))
        return []
    return [
        helper.make_node("Cast", [source], [inner], name=f"{node.name}/Cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", [inner, scale], [output], name=f"{node.name}/Mul"),
    ]


def _float32(tensor: TensorProto) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
