"""Nodes in front of and behind a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper


class NodeWriter:
    """Makes nodes with names of their own; their constants go into the model. prefix: of the names."""

    def __init__(self, model: onnx.ModelProto, prefix: str = "detrt") -> None:
        self.model, self._prefix = model, prefix
        self._count = 0

    def constant(self, value: object, dtype: type) -> str:
        """The name of a new initializer."""
        self._count += 1
        tensor = numpy_helper.from_array(np.array(value, dtype), f"{self._prefix}.constant_{self._count}")
        self.model.graph.initializer.append(tensor)
        return str(tensor.name)

    def node(self, op: str, inputs: Sequence[str], output: str = "", **attributes: object) -> onnx.NodeProto:
        """A node of one output, which is named after it where `output` is empty. The caller adds it to the graph."""
        self._count += 1
        name = f"{self._prefix}/{op}_{self._count}"
        return helper.make_node(op, list(inputs), [output or f"{name}_output_0"], name, **attributes)
