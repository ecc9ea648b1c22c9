"""Pairs of QuantizeLinear and DequantizeLinear taken out of a graph: some of them, or all of its quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from .clean import drop_dead, fold_pads
from .nodes import replace_nodes
from .view import GraphView, attribute


def remove_pairs(model: onnx.ModelProto, chosen: Callable[[GraphView, onnx.NodeProto], bool] = lambda view, node: True) -> int:
    """Let all nodes that read a chosen pair read what it quantizes, in place.

    chosen: called with the DequantizeLinear of each pair. A pair whose result is an output of the graph stays for that output.

    Returns:
        The number of pairs that are gone.
    """
    view, removed = GraphView(model), 0
    for node in view.nodes:
        source = view.producer.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if source is None or source.op_type != "QuantizeLinear" or not chosen(view, node):
            continue
        for reader in view.consumers(node.output[0]):
            reader.input[:] = [source.input[0] if name == node.output[0] else name for name in reader.input]
        removed += node.output[0] not in view.outputs
    if removed:
        drop_dead(model)
    return removed


def remove_quantization(model: onnx.ModelProto) -> int:
    """Remove every pair, and store quantized weights as what they are dequantized to, in place.

    All other tensors keep their types: FP16 around an INT8 convolution stays FP16.

    Returns:
        The number of pairs and weights.
    """
    pairs = remove_pairs(model)
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    weights = [node for node in model.graph.node if node.op_type == "DequantizeLinear" and node.input[0] in constants]
    for node in weights:
        kind = onnx.helper.tensor_dtype_to_np_dtype(constants[node.input[1]].data_type)
        value = _dequantized(node, constants).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    if weights:
        names = {node.output[0] for node in weights}
        replace_nodes(model, [node for node in model.graph.node if names.isdisjoint(node.output)])
        drop_dead(model)
    return pairs + len(weights)


CENTRE = "/Centre"  # ends the names of nodes that subtract the mean of each channel before it is rounded to FP8


def skip_centres(model: onnx.ModelProto) -> int:
    """Let layers read what a mean was subtracted from, in place, padding included; returns how many means.

    The graph takes the time of the one that was quantized, but computes other values: the layers' biases stay those for the mean.
    """
    sources = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Sub" and node.name.endswith(CENTRE)}
    for node in model.graph.node:
        node.input[:] = [sources.get(name, name) for name in node.input]
    if sources:
        drop_dead(model)
        fold_pads(model)
    return len(sources)


def _dequantized(node: onnx.NodeProto, constants: Mapping[str, TensorProto]) -> NDArray[np.float32]:
    """The value of a symmetric DequantizeLinear of a constant."""
    values, scale = (numpy_helper.to_array(constants[name]).astype(np.float32) for name in node.input[:2])
    axis = int(attribute(node, "axis", 1))
    if scale.ndim:
        scale = scale.reshape([-1 if i == axis % values.ndim else 1 for i in range(values.ndim)])
    return values * scale
