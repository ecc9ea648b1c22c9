"""The graph without its quantization: the same model where nothing is INT8."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from .clean import drop_dead
from .nodes import replace_nodes
from .view import GraphView, attribute


def remove_quantization(model: onnx.ModelProto) -> int:
    """Remove every pair of QuantizeLinear and DequantizeLinear, and store quantized weights as what they are dequantized to, in place.

    All other tensors keep their types: FP16 around an INT8 convolution stays FP16.

    Returns:
        The number of pairs and weights.
    """
    view = GraphView(model)
    renamed: dict[str, str] = {}
    removed: set[str] = set()
    for node in view.nodes:
        if node.op_type != "DequantizeLinear":
            continue
        source = view.producer.get(node.input[0])
        if source is not None and source.op_type == "QuantizeLinear":
            renamed[node.output[0]] = renamed.get(source.input[0], source.input[0])
        elif node.input[0] in view.constants:
            scale_type = view.constants[node.input[1]].data_type
            value = dequantized_weight(node, view.constants).astype(onnx.helper.tensor_dtype_to_np_dtype(scale_type))
            model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
        else:
            continue
        removed.add(node.output[0])
    if removed:
        nodes = [node for node in view.nodes if removed.isdisjoint(node.output)]
        for node in nodes:
            names = [renamed.get(name, name) for name in node.input]
            del node.input[:]
            node.input.extend(names)
        replace_nodes(model, nodes)
        drop_dead(model)
    return len(removed)


def dequantized_weight(node: onnx.NodeProto, constants: Mapping[str, TensorProto]) -> NDArray[np.float32]:
    """The value of a symmetric DequantizeLinear of a constant."""
    values, scale = (numpy_helper.to_array(constants[name]).astype(np.float32) for name in node.input[:2])
    axis = int(attribute(node, "axis", 1))
    if scale.ndim:
        scale = scale.reshape([-1 if i == axis % values.ndim else 1 for i in range(values.ndim)])
    return values * scale
