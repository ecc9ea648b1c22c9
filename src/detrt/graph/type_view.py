"""A graph with its edges looked up: who makes a tensor, who reads it, and its element type."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..errors import GraphError
from .view import element_types as known_types
from .view import module_path

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
WIDTH = {"fp32": FLOAT, "fp16": HALF, "bf16": BF16}
NAME_OF = {value: name for name, value in WIDTH.items()} | {
    TensorProto.INT8: "int8",
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.DOUBLE: "fp64",
}
# Largest finite value, and smallest value that keeps all its digits.
LARGEST = {"fp16": 65504.0, "bf16": 3.3895e38}
SMALLEST = {"fp16": 2.0**-14, "bf16": 2.0**-126}


class GraphView:
    """Look-ups over one graph; valid until the graph changes.

    kinds: tensor -> ONNX element type. producer: tensor -> node index. readers: tensor -> [(node, position)].

    Raises:
        GraphError: control flow inside the graph, or a tensor whose type cannot be known.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = graph = model.graph
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.outputs = {value.name for value in graph.output}
        self.inputs = {value.name for value in graph.input} - set(self.constants)
        self.opset = next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx"))
        self.producer: dict[str, int] = {}
        self.readers: dict[str, list[tuple[int, int]]] = {}
        for index, node in enumerate(self.nodes):
            if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
                raise GraphError(f"node '{node.name}' ({node.op_type}) holds a graph of its own; its types are not changed")
            for name in node.output:
                self.producer[name] = index
            for position, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((index, position))
        self.kinds = element_types(model)

    def is_float(self, name: str) -> bool:
        """Whether a tensor is FP32; the types that this package changes."""
        return self.kinds.get(name) == FLOAT

    def float_inputs(self, node: onnx.NodeProto) -> list[str]:
        """FP32 inputs that are computed, not constants."""
        return [name for name in node.input if name and name not in self.constants and self.is_float(name)]

    def array(self, name: str) -> np.ndarray | None:
        """A constant's value, else None."""
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None

    def node_of(self, name: str) -> onnx.NodeProto | None:
        index = self.producer.get(name)
        return None if index is None else self.nodes[index]


def attribute(node: onnx.NodeProto, name: str, default: object = None) -> object:
    """Value of an attribute, or `default`."""
    for entry in node.attribute:
        if entry.name == name:
            return onnx.helper.get_attribute_value(entry)
    return default


def matches(node: str, patterns: Iterable[str]) -> bool:
    """Whether a node is inside a module path, or fits a glob pattern over its path."""
    full = node.strip("/").replace("/", ".")
    # A trace writes the names of a Sequential twice; either spelling is right.
    paths = {module_path("/" + node.strip("/")), full.rpartition(".")[0]}
    return any(
        fnmatch.fnmatchcase(full, p) or any(q == p or q.startswith(p + ".") or fnmatch.fnmatchcase(q, p) for q in paths)
        for p in patterns
    )


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Tensor -> ONNX element type, for every tensor.

    Raises:
        GraphError: a type that cannot be inferred.
    """
    kinds = known_types(model)
    unknown = [n.output[0] for n in model.graph.node if n.output and n.output[0] and not kinds.get(n.output[0])]
    if unknown:
        raise GraphError(
            f"the types of {len(unknown)} tensors cannot be inferred, e.g. '{unknown[0]}'; export the model with detrt export"
        )
    return kinds


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Raise the default opset in place; only what changed for operators of detector graphs is rewritten.

    Raises:
        GraphError: an operator whose meaning changes and that is not known here.
    """
    entry = next(e for e in model.opset_import if e.domain in ("", "ai.onnx"))
    if entry.version >= version:
        return
    old = entry.version
    graph = model.graph
    for node in graph.node:
        if old < 18 <= version and node.op_type in _AXES_BECAME_INPUT:
            axes = attribute(node, "axes")
            if axes is not None:
                name = f"{node.output[0]}/axes"
                graph.initializer.append(numpy_helper.from_array(np.asarray(axes, np.int64), name))
                node.input.append(name)
                _drop_attribute(node, "axes")
        if old < 18 <= version and node.op_type == "Split" and len(node.input) < 2:
            node.attribute.append(onnx.helper.make_attribute("num_outputs", len(node.output)))
        if old < 20 <= version and node.op_type == "GridSample":
            mode = {b"bilinear": "linear", b"bicubic": "cubic"}.get(attribute(node, "mode", b"bilinear"), "nearest")
            _drop_attribute(node, "mode")
            node.attribute.append(onnx.helper.make_attribute("mode", mode))
        if old < 21 <= version and node.op_type == "GroupNormalization":
            raise GraphError(f"node '{node.name}' (GroupNormalization) means something else since opset 21; export again")
    entry.version = version
    # The file format of an opset; onnxruntime and TensorRT refuse newer operators in older ones.
    model.ir_version = max(model.ir_version, {19: 9, 20: 9, 21: 10, 22: 10}.get(version, 8))


_AXES_BECAME_INPUT = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


def _drop_attribute(node: onnx.NodeProto, name: str) -> None:
    kept = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)


def replace_nodes(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Put other nodes into the graph; they are copied first, since some belong to it."""
    copies = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    del model.graph.node[:]
    model.graph.node.extend(copies)
