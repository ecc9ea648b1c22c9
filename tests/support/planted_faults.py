"""Faults in the weights and in the outputs of a graph, which a comparison is to find."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper


def disturb(model: onnx.ModelProto, noise: float) -> None:
    """Put large weights off, in place, by noise in units of their deviation."""
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.size > 4096:
            values = values + generator.standard_normal(values.shape, np.float32) * np.float32(noise * values.std())
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def multiply(model: onnx.ModelProto, output: str, factors: np.ndarray | float) -> None:
    """Multiply an output, in place, which passes through one more node."""
    for node in model.graph.node:
        for position, name in enumerate(node.output):
            if name == output:
                node.output[position] = "right"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(factors), "factors"))
    model.graph.node.append(helper.make_node("Mul", ["right", "factors"], [output], "wrong"))
