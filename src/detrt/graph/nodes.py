"""Nodes of ONNX graphs: writing them, putting them into a graph, and the operator sets that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

DEFAULT_DOMAINS = ("", "ai.onnx")


def default_opset(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators; 0 if the model imports none."""
    return next((entry.version for entry in model.opset_import if entry.domain in DEFAULT_DOMAINS), 0)


def import_domain(model: onnx.ModelProto, domain: str) -> None:
    """Import version 1 of an operator set, in place, unless a version is imported."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def drop_domain(model: onnx.ModelProto, domain: str) -> None:
    """Remove the import of an operator set, in place."""
    remaining = [entry for entry in model.opset_import if entry.domain != domain]
    del model.opset_import[:]
    model.opset_import.extend(remaining)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in the attributes of a node."""
    for entry in node.attribute:
        if entry.HasField("g"):
            yield entry.g
        yield from entry.graphs


def replace_nodes(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Replace the nodes of a graph, in place; they are copied first, because some of them belong to it."""
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del model.graph.node[:]
    model.graph.node.extend(copies)


class GraphBuilder:
    """Writer of ONNX nodes. Collects nodes and constants; every method returns the name of its output.

    Names start with `prefix`: nodes in place of another keep its module path.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix.rstrip("/")
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple, str] = {}

    def _name(self, kind: str) -> str:
        count = self._counts.get(kind, 0)
        self._counts[kind] = count + 1
        return f"{self.prefix}/{kind}" + (f"_{count}" if count else "")

    def const(self, value: Any, dtype: Any) -> str:
        """A constant tensor; equal ones are shared within this builder."""
        array: NDArray = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._name("const")
            self.initializers.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def ints(self, *values: int) -> str:
        return self.const(list(values), np.int64)

    def op(self, kind: str, *inputs: str, outputs: int = 1, output: str | None = None, **attributes: Any) -> Any:
        """Add a node; returns its output name, or a list of them when outputs > 1."""
        name = self._name(kind)
        names = [output] if output else [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=name, **attributes))
        return names if outputs > 1 else names[0]

    def reshape(self, x: str, *shape: int | str) -> str:
        """Reshape where a side is a number, 0 (copy), -1, or the name of a (1,) int64 tensor."""
        if all(isinstance(side, int) for side in shape):
            return self.op("Reshape", x, self.ints(*shape))  # type: ignore[arg-type]
        parts = [self.ints(side) if isinstance(side, int) else side for side in shape]
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    def slice(self, x: str, start: str, end: str, axis: int) -> str:
        return self.op("Slice", x, start, end, self.ints(axis))


def rename_values(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values in a graph and its subgraphs, in place."""
    if not names:
        return
    for node in graph.node:
        for side in (node.input, node.output):
            for index, name in enumerate(side):
                if name in names:
                    side[index] = names[name]
        for inner in subgraphs(node):
            rename_values(inner, names)
    for values in (graph.input, graph.output, graph.initializer, graph.value_info):
        for value in values:
            value.name = names.get(value.name, value.name)


def drop_attribute(node: onnx.NodeProto, name: str) -> None:
    """Remove an attribute of a node, in place, where it has it."""
    remaining = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend(remaining)
