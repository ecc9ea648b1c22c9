"""A 16-bit graph as FP32 that rounds where the graph stores 16 bits, for runtimes without such kernels.

ONNX Runtime's CPU kernels compute an FP16 graph in FP32 and drop the casts between two of them, so that
an overflow of FP16 does not show there; BF16 graphs do not run at all. This copy rounds after every
operation, as tensor cores do: products of 16-bit values summed in FP32, and the result rounded.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .view import GraphView

_LOW = {TensorProto.FLOAT16: "half", TensorProto.BFLOAT16: "brain"}


def has_low(view: GraphView) -> bool:
    """Whether a graph holds FP16 or BF16."""
    return any(kind in _LOW for kind in view.types.values())


def rounded(view: GraphView) -> onnx.ModelProto:
    """A copy in FP32 with the same tensor names; every former 16-bit value is one that 16 bits can hold."""
    model = onnx.ModelProto()
    model.CopyFrom(view.model)
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type in _LOW:
            tensor.CopyFrom(numpy_helper.from_array(_float32(tensor), tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _LOW:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i in _LOW:
                attribute.i = TensorProto.FLOAT
            elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type in _LOW:
                attribute.t.CopyFrom(numpy_helper.from_array(_float32(attribute.t)))
        nodes.append(node)
        for index, name in enumerate(node.output):
            kind = view.types.get(name)
            if not name or kind not in _LOW:
                continue
            node.output[index] = f"{name}/exact"
            bits = f"{name}/{_LOW[kind]}"
            nodes.append(helper.make_node("Cast", [node.output[index]], [bits], name=f"{name}/round", to=kind))
            nodes.append(helper.make_node("Cast", [bits], [name], name=f"{name}/widen", to=TensorProto.FLOAT))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    del graph.value_info[:]
    return model


def _float32(tensor: TensorProto) -> np.ndarray:
    return np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
