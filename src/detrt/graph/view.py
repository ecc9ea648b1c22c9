"""A read-only view of a graph: producers, tensor types, module paths, depth, what depends on the pictures."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import onnx
from onnx import TensorProto

FLOATS = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.DOUBLE: "fp64",
}
_NAMES = {
    **FLOATS,
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "uint8",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.BOOL: "bool",
    TensorProto.FLOAT8E4M3FN: "fp8",
}
# Where a value jumps: rounding may send two equal computations to two sides of the step.
_STEPS = frozenset(("Floor", "Ceil", "Round", "ArgMax", "ArgMin", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal"))
_SHAPES = ("Shape", "Size")
# Operators that give values of their inputs, their negative or zero, and nothing new.
MOVEMENT = frozenset((
    "Reshape", "Transpose", "Concat", "Slice", "Gather", "GatherElements", "GatherND", "Unsqueeze", "Squeeze",
    "Expand", "Tile", "Pad", "Split", "Flatten", "Identity", "ScatterND", "ScatterElements", "DepthToSpace",
    "SpaceToDepth", "MaxPool", "Relu", "Neg", "Abs", "Where",
))  # fmt: skip
# Operators of deformable attention that only a TensorRT plugin runs, and how many axes their output has.
PLUGIN_NODES = {"MSDeformAttn": 3, "MultiscaleDeformableAttnPlugin_TRT": 4}
# The leaf of a node's name: an operator, perhaps numbered ("MatMul_3", "Unsqueeze.2").
_WRAPPER = re.compile(r"^/?(.*)/[^/]+$")


@dataclass(slots=True)
class GraphView:
    """Built once from a model that does not change while the view is used.

    producer: tensor -> node. depth: tensor -> number of nodes on the longest way from a picture, 0 where
    it depends on none (weights, shapes). types: tensor -> ONNX element type, where it is known.
    """

    model: onnx.ModelProto
    producer: dict[str, onnx.NodeProto] = field(default_factory=dict)
    consumers: dict[str, list[onnx.NodeProto]] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)
    depth: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: onnx.ModelProto) -> GraphView:
        view = cls(model, types=element_types(model))
        view.constants = {tensor.name for tensor in model.graph.initializer}
        view.depth = {value.name: 1 for value in model.graph.input if value.name not in view.constants}
        for node in model.graph.node:
            for name in node.input:
                view.consumers.setdefault(name, []).append(node)
            below = max((view.depth.get(name, 0) for name in node.input), default=0)
            deep = 0 if node.op_type in _SHAPES or not below else below + 1
            for name in node.output:
                view.producer[name] = node
                view.depth[name] = deep
        return view

    def tensors(self) -> list[str]:
        """Outputs of all nodes, in graph order."""
        return [name for node in self.model.graph.node for name in node.output if name]

    def module_of(self, node: onnx.NodeProto) -> str:
        """Module path of a node; that of the nearest node before it where its own name has none."""
        seen: set[int] = set()
        current: onnx.NodeProto | None = node
        while current is not None and id(current) not in seen:
            seen.add(id(current))
            if path := module_path(current.name):
                return path
            if current.name.startswith("/"):
                return ""  # the wrapper itself: normalisation before the model, decoding after it
            current = next((self.producer[name] for name in current.input if name in self.producer), None)
        return ""

    def behind(self, node: onnx.NodeProto) -> set[str]:
        """All tensors that depend on a node, its own outputs included."""
        found: set[str] = set()
        todo = list(node.output)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(out for user in self.consumers.get(name, []) for out in user.output)
        return found

    def jumps(self) -> list[onnx.NodeProto]:
        """Nodes whose output jumps where rounding moves a value across a step, in graph order."""
        found = []
        for node in self.model.graph.node:
            if not node.input or not self.depth.get(node.output[0]):
                continue
            from_float = self.types.get(node.input[0]) in FLOATS
            to_whole = node.op_type == "Cast" and self.types.get(node.output[0], TensorProto.FLOAT) not in FLOATS
            if node.op_type == "TopK" or (from_float and (node.op_type in _STEPS or to_whole)):
                found.append(node)
        return found


def module_path(name: str) -> str:
    """ "/model/encoder/layers.0/self_attn/MatMul" -> "model.encoder.layers.0.self_attn"; "" at the top.

    A trace writes the members of a Sequential as "layer/layer.0"; the checkpoint's key is "layer.0".
    """
    match = _WRAPPER.match(name) if name.startswith("/") else None
    parts = match[1].strip("/").split("/") if match else []
    kept = [
        part
        for i, part in enumerate(parts)
        if i + 1 == len(parts) or not re.match(re.escape(part) + r"\.\d+(_\d+)?$", parts[i + 1])
    ]
    return ".".join(kept)


def element_types(model: onnx.ModelProto) -> dict[str, int]:
    """Tensor name -> ONNX element type, by the file's own notes and by inference."""
    graph = model.graph
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    light = onnx.ModelProto()
    light.ir_version = model.ir_version
    light.opset_import.extend(model.opset_import)
    light.graph.name = "types"
    light.graph.node.extend(_standing_in(light.graph, node) for node in graph.node)
    light.graph.input.extend(graph.input)
    # Weights stay behind, because inference copies the whole model; small ones may hold shapes.
    for tensor in graph.initializer:
        if len(tensor.raw_data) <= 4096:
            light.graph.initializer.append(tensor)
        else:
            light.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    for value in graph.output:
        copy = light.graph.output.add(name=value.name)
        copy.type.tensor_type.elem_type = value.type.tensor_type.elem_type
    for known in (graph, onnx.shape_inference.infer_shapes(light).graph):
        for value in (*known.input, *known.value_info, *known.output):
            if value.type.tensor_type.elem_type:
                found[value.name] = value.type.tensor_type.elem_type
    return found


def _standing_in(graph: onnx.GraphProto, node: onnx.NodeProto) -> onnx.NodeProto:
    """A node whose output has the type of a plugin node's, which inference does not know: that of its first input."""
    if node.op_type not in PLUGIN_NODES:
        return node
    shape = f"{node.output[0]}/shape"
    graph.input.append(onnx.helper.make_tensor_value_info(shape, TensorProto.INT64, [PLUGIN_NODES[node.op_type]]))
    return onnx.helper.make_node("Reshape", [node.input[0], shape], list(node.output), name=node.name)


def type_name(element_type: int) -> str:
    return _NAMES.get(element_type, TensorProto.DataType.Name(element_type).lower())


def node_type(view: GraphView, node: onnx.NodeProto) -> str:
    """The type a node computes in: int8 or fp8 where its first input comes from DequantizeLinear."""
    source = view.producer.get(node.input[0]) if node.input else None
    if source is not None and source.op_type == "DequantizeLinear":
        low = view.types.get(source.input[0])
        if low is not None and low not in FLOATS:
            return type_name(low)
    return type_name(view.types.get(node.output[0], TensorProto.UNDEFINED))


def precision_map(view: GraphView) -> dict[str, dict[str, int]]:
    """Module path -> type -> number of nodes that depend on the picture and compute in it, in graph order."""
    rows: dict[str, Counter[str]] = {}
    for node in view.model.graph.node:
        if node.op_type in ("Cast", "QuantizeLinear", "DequantizeLinear", *_SHAPES) or not view.depth.get(node.output[0]):
            continue
        kind = node_type(view, node)
        if kind in (*FLOATS.values(), "int8", "fp8"):
            rows.setdefault(view.module_of(node), Counter())[kind] += 1
    return {module: dict(counts.most_common()) for module, counts in rows.items()}


def precision_of(view: GraphView) -> str:
    """ "fp32", "fp16", "bf16", "int8" or "fp8": the lowest type that a tenth of the heavy nodes compute in."""
    heavy = [n for n in view.model.graph.node if n.op_type in ("Conv", "MatMul", "Gemm", "ConvTranspose")]
    counts = Counter(node_type(view, node) for node in heavy)
    for kind in ("fp8", "int8", "bf16", "fp16"):
        if heavy and counts[kind] * 10 >= len(heavy):
            return kind
    return "fp32"
