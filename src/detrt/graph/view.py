"""A read-only view of an ONNX graph: producers, readers, tensor types, module paths, depth."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ..errors import GraphError, number_of
from ..spec import Precision
from .names import module_path
from .operators import GEMM, PLUGIN_NODES, STEPS

FLOAT, HALF, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
# The ONNX element type of each precision.
ELEMENT_TYPE = {
    Precision.FP32: FLOAT,
    Precision.FP16: HALF,
    Precision.BF16: BF16,
    Precision.INT8: TensorProto.INT8,
    Precision.FP8: TensorProto.FLOAT8E4M3FN,
}
FLOATS = {ELEMENT_TYPE[kind]: kind.value for kind in (Precision.FP32, Precision.FP16, Precision.BF16)} | {
    TensorProto.DOUBLE: "fp64"
}
_TYPE_NAMES = {
    **FLOATS,
    **{element_type: kind.value for kind, element_type in ELEMENT_TYPE.items()},
    TensorProto.UINT8: "uint8",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.BOOL: "bool",
}
_SHAPES = ("Shape", "Size")


class GraphView:
    """Indexes of one graph; valid until the graph changes.

    nodes: in graph order. constants: initializers by name. producer: tensor -> node. index: tensor -> position of its
    producer in `nodes`. readers: tensor -> [(position of the node, position of the input)]. types: tensor -> ONNX
    element type, if it is known.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = graph = model.graph
        self.nodes: list[onnx.NodeProto] = list(graph.node)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.outputs = {value.name for value in graph.output}
        self.inputs = {value.name for value in graph.input} - set(self.constants)
        self.producer: dict[str, onnx.NodeProto] = {}
        self.index: dict[str, int] = {}
        self.readers: dict[str, list[tuple[int, int]]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.output:
                self.producer[name], self.index[name] = node, index
            for position, name in enumerate(node.input):
                if name:
                    self.readers.setdefault(name, []).append((index, position))
        self.types = element_types(model)

    @classmethod
    def typed(cls, model: onnx.ModelProto) -> GraphView:
        """A view in which the type of every tensor is known, so that types can be changed.

        Raises:
            GraphError: control flow inside the graph, or a tensor whose type cannot be inferred.
        """
        view = cls(model)
        for node in view.nodes:
            if any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute):
                raise GraphError(f"node '{node.name}' ({node.op_type}) contains a subgraph, whose types cannot be changed")
        unknown = [n.output[0] for n in view.nodes if n.output and n.output[0] and not view.types.get(n.output[0])]
        if unknown:
            raise GraphError(
                f"the types of {number_of(len(unknown), 'tensor')} cannot be inferred, e.g. '{unknown[0]}'; export the model with detrt export"
            )
        return view

    @cached_property
    def depth(self) -> dict[str, int]:
        """Tensor -> number of nodes on the longest path from an input; 0 if it depends on no input (weights, shapes)."""
        depth = dict.fromkeys(self.inputs, 1)
        for node in self.nodes:
            deepest = max((depth.get(name, 0) for name in node.input), default=0)
            depth.update(dict.fromkeys(node.output, 0 if node.op_type in _SHAPES or not deepest else deepest + 1))
        return depth

    def tensors(self) -> list[str]:
        """Outputs of all nodes, in graph order."""
        return [name for node in self.nodes for name in node.output if name]

    def is_float(self, name: str) -> bool:
        """Whether a tensor is FP32."""
        return self.types.get(name) == FLOAT

    def float_inputs(self, node: onnx.NodeProto) -> list[str]:
        """FP32 inputs that are computed, not constants."""
        return [name for name in node.input if name and name not in self.constants and self.is_float(name)]

    def array(self, name: str) -> np.ndarray | None:
        """Value of a constant, or None."""
        return numpy_helper.to_array(self.constants[name]) if name in self.constants else None

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        """Nodes that read a tensor, once per input that reads it."""
        return [self.nodes[index] for index, _ in self.readers.get(name, ())]

    def only_reader(self, name: str, kind: str | None = None, *, of_values: bool = False) -> onnx.NodeProto | None:
        """The node that alone reads a tensor, once, if it is of a kind; None for an output of the graph.

        of_values: who reads the shape alone does not count, for changes that keep it.
        """
        readers = [node for node in self.consumers(name) if not (of_values and node.op_type in _SHAPES)]
        only = readers[0] if len(readers) == 1 and name not in self.outputs else None
        return only if only is None or kind in (None, only.op_type) else None

    def module_of(self, node: onnx.NodeProto) -> str:
        """Module path of a node; if its name has none, that of the nearest node before it."""
        visited: set[int] = set()
        current: onnx.NodeProto | None = node
        while current is not None and id(current) not in visited:
            visited.add(id(current))
            if path := module_path(current.name):
                return path
            if current.name.startswith("/"):
                return ""  # the wrapper itself: normalization before the model, post-processing after it
            current = next((self.producer[name] for name in current.input if name in self.producer), None)
        return ""

    def dependents(self, node: onnx.NodeProto) -> set[str]:
        """All tensors that depend on a node, its own outputs included."""
        result: set[str] = set()
        todo = list(node.output)
        while todo:
            name = todo.pop()
            if name not in result:
                result.add(name)
                todo.extend(out for user in self.consumers(name) for out in user.output)
        return result

    def discontinuities(self) -> list[onnx.NodeProto]:
        """Nodes whose output is discontinuous, so that rounding can change it by a step, in graph order."""
        result = []
        for node in self.nodes:
            if not node.input or not self.depth.get(node.output[0]):
                continue
            from_float = self.types.get(node.input[0]) in FLOATS
            to_integer = node.op_type == "Cast" and self.types.get(node.output[0], TensorProto.FLOAT) not in FLOATS
            if node.op_type == "TopK" or (from_float and (node.op_type in STEPS or to_integer)):
                result.append(node)
        return result


def attribute(node: onnx.NodeProto, name: str, default: object = None) -> object:
    """Value of an attribute, or `default`."""
    for entry in node.attribute:
        if entry.name == name:
            return onnx.helper.get_attribute_value(entry)
    return default


def over_last(softmax: onnx.NodeProto, opset: int, rank: int) -> bool:
    """Whether a Softmax of a tensor of known rank is over its last axis; before opset 13 the axis that is not named is the second."""
    return attribute(softmax, "axis", -1 if opset >= 13 else 1) in (-1, rank - 1)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Tensor name -> ONNX element type, from the file and from shape inference."""
    graph = model.graph
    result = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for source in (graph, inferred(model)):
        for value in (*source.input, *source.value_info, *source.output):
            if value.type.tensor_type.elem_type:
                result[value.name] = value.type.tensor_type.elem_type
    return result


def inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    """The graph after shape inference, without large weights, because inference copies the whole model; small ones may hold shapes."""
    graph = model.graph
    weightless = onnx.ModelProto()
    weightless.ir_version = model.ir_version
    weightless.opset_import.extend(model.opset_import)
    weightless.graph.name = "types"
    weightless.graph.node.extend(_typed_placeholder(weightless.graph, node) for node in graph.node)
    weightless.graph.input.extend(graph.input)
    for tensor in graph.initializer:
        if len(tensor.raw_data) <= 4096:
            weightless.graph.initializer.append(tensor)
        else:
            weightless.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    for value in graph.output:
        copy = weightless.graph.output.add(name=value.name)
        copy.type.tensor_type.elem_type = value.type.tensor_type.elem_type
    return onnx.shape_inference.infer_shapes(weightless).graph


def _typed_placeholder(graph: onnx.GraphProto, node: onnx.NodeProto) -> onnx.NodeProto:
    """A Reshape in place of a plugin node, which inference does not support, with an output of the same type and rank."""
    if node.op_type not in PLUGIN_NODES:
        return node
    shape = f"{node.output[0]}/shape"
    graph.input.append(onnx.helper.make_tensor_value_info(shape, TensorProto.INT64, [PLUGIN_NODES[node.op_type]]))
    return onnx.helper.make_node("Reshape", [node.input[0], shape], list(node.output), name=node.name)


def type_name(element_type: int) -> str:
    return _TYPE_NAMES.get(element_type, TensorProto.DataType.Name(element_type).lower())


def node_type(view: GraphView, node: onnx.NodeProto) -> str:
    """The type that a node computes in; int8 or fp8 if its first input comes from DequantizeLinear."""
    source = view.producer.get(node.input[0]) if node.input else None
    if source is not None and source.op_type == "DequantizeLinear":
        low = view.types.get(source.input[0])
        if low is not None and low not in FLOATS:
            return type_name(TensorProto.INT8 if low == TensorProto.UINT8 else low)  # unsigned activations, signed weights
    return type_name(view.types.get(node.output[0], TensorProto.UNDEFINED))


def precision_map(view: GraphView) -> dict[str, dict[str, int]]:
    """Module path -> type -> number of nodes that depend on the image and compute in that type, in graph order."""
    rows: dict[str, Counter[str]] = {}
    for node in view.nodes:
        if node.op_type in ("Cast", "QuantizeLinear", "DequantizeLinear", *_SHAPES) or not view.depth.get(node.output[0]):
            continue
        kind = node_type(view, node)
        if kind in (*FLOATS.values(), "int8", "fp8"):
            rows.setdefault(view.module_of(node), Counter())[kind] += 1
    return {module: dict(counts.most_common()) for module, counts in rows.items()}


def graph_precision(view: GraphView) -> Precision:
    """The lowest precision that a tenth of the matmuls and convolutions compute in."""
    gemms = [node for node in view.nodes if node.op_type in GEMM.onnx]
    counts = Counter(node_type(view, node) for node in gemms)
    low = (kind for kind in reversed(Precision) if kind.bits < 32 and counts[kind] * 10 >= len(gemms))
    return next(low, Precision.FP32) if gemms else Precision.FP32
