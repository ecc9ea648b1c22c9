"""A graph in the dialect of an ONNX parser: what the parser lacks is written out in operators that it reads.

The outputs stay equal in ONNX Runtime. `write_out` changes operators, `widen` takes the types out of a graph for builders that
choose types themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ....errors import GraphError
from ....graph.clean import drop_dead, drop_default_reduction, drop_unused_domains, merge_equal_tensors
from ....graph.msda_plugin import cut, rejoin, runnable
from ....graph.nodes import DEFAULT_DOMAINS, GraphBuilder, default_opset, import_domain, replace_nodes
from ....graph.operators import NVIDIA_DOMAIN, PLUGIN_NODES
from ....graph.slim import attach_weights, detach_weights
from ....graph.view import GraphView, attribute, element_types

INTEGER_ARGMAX = "ArgMax of integers"
LAYER_NORM = "LayerNorm"  # NVIDIA's plugin, in TensorRT 8.5.2 and newer
_FEWEST_NORMALISED = 33  # values in a row; up to 32 its kernel divides once too often
_LARGEST_INT = np.iinfo(np.int32).max  # of a slice's end: parsers that have no INT64 clamp it
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


class Written(NamedTuple):
    """One node that was written out: its operator, its output, and the tensors that the nodes in its place give."""

    operator: str
    output: str
    parts: tuple[str, ...]


@dataclass(slots=True)
class Widened:
    """What `widen` took out of a typed graph.

    Attributes:
        low: whether the graph computed in FP16.
        fp32: tensors that nodes give which must compute in FP32 although the builder may use FP16; empty where `low` is False.
    """

    low: bool = False
    fp32: set[str] = field(default_factory=set)


def write_out(
    model: onnx.ModelProto,
    lacks: Collection[str],
    *,
    also: Collection[str] = (),
) -> list[Written]:
    """Write out what a parser lacks, in place: also `start` and `end` of Shape, and the attribute `reduction` of ScatterND.

    Args:
        lacks: operators without an importer; `INTEGER_ARGMAX` stands for ArgMax and ArgMin of integers.
        also: outputs of nodes that are written out although the parser reads them.

    Returns:
        What was changed, in graph order.

    Raises:
        GraphError: an operator that cannot be written out.
    """
    unknown = set(lacks) - set(_WRITERS) - {INTEGER_ARGMAX}
    if unknown:
        raise GraphError(f"{', '.join(sorted(unknown))} cannot be written out; known: {', '.join(sorted(_WRITERS))}")
    graph = model.graph
    kinds = element_types(model)
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    opset = default_opset(model)
    done: list[Written] = []
    nodes: list[onnx.NodeProto] = []
    prefixes: Counter[str] = Counter()

    def write(node: onnx.NodeProto, writer: Callable[[_Site], None], kind: str) -> None:
        name = node.name or f"/{node.op_type}"
        prefixes[name] += 1
        builder = GraphBuilder(f"{name}/written" + (f".{prefixes[name]}" if prefixes[name] > 1 else ""))
        writer(_Site(node, builder, kinds, shapes, opset))
        nodes.extend(builder.nodes)
        graph.initializer.extend(builder.initializers)
        done.append(Written(kind, node.output[0], tuple(name for n in builder.nodes for name in n.output)))

    for node in graph.node:
        integers = node.op_type in ("ArgMax", "ArgMin") and kinds.get(node.input[0]) not in _FLOATS
        wanted = node.op_type in lacks or any(name in also for name in node.output)
        if wanted and node.domain in DEFAULT_DOMAINS:
            write(node, _WRITERS[node.op_type], node.op_type)
        elif integers and INTEGER_ARGMAX in lacks:
            write(node, _argmax, INTEGER_ARGMAX)
        elif node.op_type == "Shape" and any(a.name in ("start", "end") for a in node.attribute):
            write(node, _shape, "Shape")
        else:
            if drop_default_reduction(node):
                done.append(Written(node.op_type, node.output[0], ()))
            nodes.append(node)
    if done:
        replace_nodes(model, nodes)
        merge_equal_tensors(model)
        drop_dead(model)
    return done


def scale_before_matmul(model: onnx.ModelProto, fp32: set[str]) -> int:
    """Move the scale behind a MatMul of computed tensors, as attention has it, in front of it, in place; returns how many.

    fp32: tensors that overflow FP16, of which the product must be one. TensorRT 8.5 may store it in FP16 all the same; scaled, it fits.
    """
    view = GraphView(model)
    products = fp32 - view.outputs
    moved: dict[int, onnx.NodeProto] = {}  # position of a MatMul -> the scale in front of it
    dropped: set[int] = set()
    for position, node in enumerate(view.nodes):
        readers = view.readers.get(node.output[0], ())
        if node.op_type != "MatMul" or node.output[0] not in products or not view.depth.get(node.input[1]) or len(readers) != 1:
            continue
        ((reader, side),) = readers
        scale = view.nodes[reader]
        factor = view.array(scale.input[1 - side]) if scale.op_type == "Mul" or (scale.op_type == "Div" and not side) else None
        if factor is None or factor.size != 1:
            continue
        small = f"{node.output[0]}/scaled"
        moved[position] = helper.make_node(scale.op_type, [node.input[0], scale.input[1 - side]], [small], f"{node.name}/scale")
        node.input[0], node.output[0] = small, scale.output[0]
        dropped.add(reader)
    if moved:
        nodes: list[onnx.NodeProto] = []
        for position, node in enumerate(view.nodes):
            nodes += [moved[position]] if position in moved else []
            nodes += [] if position in dropped else [node]
        replace_nodes(model, nodes)
    return len(moved)


def use_layer_norm_plugin(model: onnx.ModelProto, fp32: Collection[str]) -> int:
    """Replace LayerNormalization over the last axis by NVIDIA's plugin, in place; returns how many.

    The plugin takes FP16 and sums in FP32. fp32: outputs of nodes that must not run in FP16, which stay.
    """
    shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
    count = 0
    for node in model.graph.node:
        if node.op_type != "LayerNormalization" or node.domain not in DEFAULT_DOMAINS or len(node.output) != 1:
            continue
        if len(node.input) != 3 or attribute(node, "axis", -1) != -1 or node.output[0] in fp32:
            continue
        if np.prod(shapes.get(node.input[1], [0])) < _FEWEST_NORMALISED:
            continue
        fields = {"epsilon": float(attribute(node, "epsilon", 1e-5)), "axis": -1, "plugin_version": "1", "plugin_namespace": ""}
        node.CopyFrom(helper.make_node(LAYER_NORM, node.input, node.output, node.name, domain=NVIDIA_DOMAIN, **fields))
        count += 1
    if count:
        import_domain(model, NVIDIA_DOMAIN)
    return count


def widen(model: onnx.ModelProto) -> Widened:
    """Make all floats FP32, in place, and say which nodes were FP32 in a graph that computes in FP16.

    Weights keep the values that FP16 gave them; inputs and outputs keep their types. Casts between floats go.

    Raises:
        GraphError: BF16 and FP8, which a builder without strong typing does not have, or INT8, which was never faster in one.
    """
    graph = model.graph
    kinds = element_types(model)
    names = {TensorProto.BFLOAT16: "BF16", TensorProto.FLOAT8E4M3FN: "FP8"}
    strange = {names[kind] for kind in kinds.values() if kind in names}
    strange |= {"INT8" for node in graph.node if node.op_type == "QuantizeLinear"}
    if strange:
        raise GraphError(f"with this TensorRT detrt builds no {' and no '.join(sorted(strange))}; build with `precision=fp16`")
    done = Widened(any(kind == TensorProto.FLOAT16 for kind in kinds.values()))
    if not done.low:
        return done
    outer = {value.name for value in (*graph.input, *graph.output) if kinds.get(value.name) == TensorProto.FLOAT16}
    if outer:
        raise GraphError(f"'{sorted(outer)[0]}' is an FP16 input or output; export the model with float32 or uint8 inputs")
    outputs = {value.name for value in graph.output}
    renamed: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        floats = [name for name in (*node.input, *node.output) if kinds.get(name) in _FLOATS]
        cast = node.op_type == "Cast" and kinds.get(node.input[0]) in _FLOATS and kinds.get(node.output[0]) in _FLOATS
        for position, name in enumerate(node.input):
            node.input[position] = renamed.get(name, name)
        if cast and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
            continue
        if cast:
            node.op_type = "Identity"
            del node.attribute[:]
        elif floats and not any(kinds.get(name) == TensorProto.FLOAT16 for name in floats):
            done.fp32.update(node.output)
        for entry in node.attribute:
            if node.op_type == "Cast" and entry.name == "to" and entry.i == TensorProto.FLOAT16:
                entry.i = TensorProto.FLOAT
            elif entry.type == onnx.AttributeProto.TENSOR and entry.t.data_type == TensorProto.FLOAT16:
                entry.t.CopyFrom(_wide(entry.t))
        nodes.append(node)
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT16:
            tensor.CopyFrom(_wide(tensor))
    replace_nodes(model, nodes)
    del graph.value_info[:]
    drop_dead(model)
    return done


# Operators that give values of their inputs and nothing new, and which of their inputs are values; None: all.
_MOVES: dict[str, tuple[int, ...] | None] = {
    "Concat": None, "Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2), "Pad": (0, 2),
    **dict.fromkeys(
        ("Reshape", "Flatten", "Transpose", "Slice", "Gather", "GatherND", "GatherElements", "Unsqueeze", "Squeeze", "Expand",
         "Tile", "Split", "Identity"),
        (0,),
    ),
}  # fmt: skip


def move_integers(model: onnx.ModelProto) -> int:
    """Move integers where a graph moves booleans, in place, for builders whose kernels move none (TensorRT 8).

    A boolean is cast to INT32 before it is moved, and compared with zero where something needs a boolean again.

    Returns:
        How many nodes move integers now.
    """
    graph = model.graph
    kinds = element_types(model)
    integers: dict[str, str] = {}  # boolean -> the INT32 tensor with its values
    constants = {tensor.name for tensor in graph.initializer}
    zero = numpy_helper.from_array(np.zeros((), np.int32), "detrt/zero")
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        positions = _MOVES.get(node.op_type, ()) if node.domain in DEFAULT_DOMAINS else ()
        positions = tuple(range(len(node.input))) if positions is None else positions
        values = [i for i in positions if i < len(node.input) and kinds.get(node.input[i]) == TensorProto.BOOL]
        if not values or kinds.get(node.output[0]) != TensorProto.BOOL:
            nodes.append(node)
            continue
        count += 1
        moved = onnx.NodeProto()
        moved.CopyFrom(node)
        for i in values:
            name = node.input[i]
            if name not in integers:
                integers[name] = f"{name}/int32"
                cast = helper.make_node("Cast", [name], [integers[name]], f"{name}/int32", to=TensorProto.INT32)
                nodes.insert(0, cast) if name in constants else nodes.append(cast)
            moved.input[i] = integers[name]
        for i, name in enumerate(node.output):
            integers[name] = moved.output[i] = f"{name}/int32"
        nodes.append(moved)
        for name in node.output:
            nodes.append(helper.make_node("Greater", [integers[name], zero.name], [name], f"{name}/bool"))
    if count:
        graph.initializer.append(zero)
        replace_nodes(model, nodes)
        drop_dead(model)
    return count


def fix_axes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | None]], optimize: Callable[[bytes], bytes]) -> None:
    """Give axes of inputs their only length and compute what depends on it alone, in place.

    Args:
        shapes: input -> its shape, None for an axis that stays symbolic; inputs that are left out stay as they are.
        optimize: ONNX Runtime's basic optimisations of a serialised graph.
    """
    for value in model.graph.input:
        for dim, length in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            if length is not None:
                dim.dim_value = length
    del model.graph.value_info[:]
    aside = detach_weights(model)
    plugins = cut(model, _shapes_of_plugins(model, optimize))
    folded = onnx.load_from_string(optimize(model.SerializeToString()))
    attach_weights(folded, aside)
    rejoin(folded, plugins)
    drop_dead(folded)
    drop_unused_domains(folded)
    model.CopyFrom(folded)


def _shapes_of_plugins(model: onnx.ModelProto, optimize: Callable[[bytes], bytes]) -> dict[str, list[int]]:
    """Output of a plugin node -> its shape, where the shapes of a graph's inputs decide it.

    The optimiser makes a Gemm of MatMul and Add only where it knows the shape, and does not know the plugins.
    """
    outputs = {node.output[0] for node in model.graph.node if node.op_type in PLUGIN_NODES}
    if not outputs:
        return {}
    standard = runnable(model)
    standard.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in sorted(outputs))
    inferred = onnx.load_from_string(optimize(standard.SerializeToString())).graph.output
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in inferred}
    return {name: shape for name, shape in shapes.items() if name in outputs and shape and all(shape)}


def _wide(tensor: TensorProto) -> TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


@dataclass(slots=True)
class _Site:
    """One node that is written out, with the builder that takes the nodes in its place."""

    node: onnx.NodeProto
    b: GraphBuilder
    kinds: dict[str, int]
    shapes: dict[str, list[int]]
    opset: int

    def only_first_output(self) -> None:
        if any(self.node.output[1:]):
            raise GraphError(
                f"node '{self.node.name}' ({self.node.op_type}) gives more than one output, which is not written out"
            )

    def constant(self, value: float, like: str) -> str:
        """A scalar of the type of tensor `like`."""
        return self.b.const(value, helper.tensor_dtype_to_np_dtype(self.kinds[like]))

    def reduce_mean(self, name: str, axes: list[int]) -> str:
        if self.opset >= 18:
            return self.b.op("ReduceMean", name, self.b.ints(*axes), keepdims=1)
        return self.b.op("ReduceMean", name, axes=axes, keepdims=1)

    def normalized(self, name: str, axes: list[int], epsilon: float) -> str:
        """(x - mean) / sqrt(variance + epsilon) over axes."""
        b = self.b
        centred = b.op("Sub", name, self.reduce_mean(name, axes))
        variance = self.reduce_mean(b.op("Mul", centred, centred), axes)
        return b.op("Div", centred, b.op("Sqrt", b.op("Add", variance, b.const(epsilon, np.float32))))

    def check_fp32(self) -> None:
        if self.kinds.get(self.node.input[0]) != TensorProto.FLOAT:
            raise GraphError(f"node '{self.node.name}' ({self.node.op_type}) can be written out in FP32 only")


def _layer_normalization(site: _Site) -> None:
    site.only_first_output()
    site.check_fp32()
    node, b = site.node, site.b
    x, scale = node.input[:2]
    rank = len(site.shapes.get(scale, []))
    if not rank:
        raise GraphError(f"node '{node.name}' (LayerNormalization) has a computed scale, which is not written out")
    normal = site.normalized(x, list(range(-rank, 0)), float(attribute(node, "epsilon", 1e-5)))
    if len(node.input) > 2 and node.input[2]:
        b.op("Add", b.op("Mul", normal, scale), node.input[2], output=node.output[0])
    else:
        b.op("Mul", normal, scale, output=node.output[0])


def _group_normalization(site: _Site) -> None:
    """Also InstanceNormalization, whose groups are the channels: 0 keeps their axis."""
    site.check_fp32()
    node, b = site.node, site.b
    x, scale, bias = node.input
    rows = b.reshape(x, 0, int(attribute(node, "num_groups", 0)), -1)
    normal = site.normalized(rows, [-1], float(attribute(node, "epsilon", 1e-5)))
    if node.op_type == "GroupNormalization" and site.opset >= 21:  # scale and bias of each channel; before, of each group
        back = b.op("Reshape", normal, b.op("Shape", x))
        flat = b.reshape(back, 0, site.shapes[scale][0], -1)
        scaled = b.op("Add", b.op("Mul", flat, b.reshape(scale, 1, -1, 1)), b.reshape(bias, 1, -1, 1))
    else:
        scaled = b.op("Add", b.op("Mul", normal, b.reshape(scale, 1, -1, 1)), b.reshape(bias, 1, -1, 1))
    b.op("Reshape", scaled, b.op("Shape", x), output=node.output[0])


def _mod(site: _Site) -> None:
    """Remainder of a truncating division; ONNX's integer Mod has the sign of the divisor, so twice."""
    node, b = site.node, site.b
    x, divisor = node.input

    def remainder(value: str, **output: str) -> str:
        return b.op("Sub", value, b.op("Mul", b.op("Div", value, divisor), divisor), **output)

    if attribute(node, "fmod", 0):
        raise GraphError(f"node '{node.name}' (Mod with fmod) is not written out")
    remainder(b.op("Add", remainder(x), divisor), output=node.output[0])


def _mish(site: _Site) -> None:
    (x,) = site.node.input
    site.b.op("Mul", x, site.b.op("Tanh", site.b.op("Softplus", x)), output=site.node.output[0])


def _gelu(site: _Site) -> None:
    node, b = site.node, site.b
    (x,) = node.input
    half, one = site.constant(0.5, x), site.constant(1.0, x)
    if attribute(node, "approximate", b"none") == b"tanh":
        cube = b.op("Mul", b.op("Mul", x, x), x)
        inner = b.op("Add", x, b.op("Mul", cube, site.constant(0.044715, x)))
        bell = b.op("Tanh", b.op("Mul", inner, site.constant(float(np.sqrt(2.0 / np.pi)), x)))
    else:
        bell = b.op("Erf", b.op("Mul", x, site.constant(float(np.sqrt(0.5)), x)))
    b.op("Mul", b.op("Mul", x, half), b.op("Add", bell, one), output=node.output[0])


def _is_inf(site: _Site) -> None:
    node, b = site.node, site.b
    (x,) = node.input
    if not attribute(node, "detect_negative", 1) or not attribute(node, "detect_positive", 1):
        raise GraphError(f"node '{node.name}' (IsInf of one sign) is not written out")
    b.op("Greater", b.op("Abs", x), site.constant(float(np.finfo(np.float32).max), x), output=node.output[0])


def _cast_like(site: _Site) -> None:
    node = site.node
    site.b.op("Cast", node.input[0], output=node.output[0], to=site.kinds[node.input[1]])


def _argmax(site: _Site) -> None:
    """Integers below 2^24, such as token ids, are exact in FP32."""
    node, b = site.node, site.b
    options = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    b.op(node.op_type, b.op("Cast", node.input[0], to=TensorProto.FLOAT), output=node.output[0], **options)


def _shape(site: _Site) -> None:
    node, b = site.node, site.b
    start, end = int(attribute(node, "start", 0)), int(attribute(node, "end", _LARGEST_INT))
    b.op("Slice", b.op("Shape", node.input[0]), b.ints(start), b.ints(end), b.ints(0), output=node.output[0])


def _sigmoid(site: _Site) -> None:
    """1 / (1 + exp(-x)); an infinite exponential gives zero."""
    node, b = site.node, site.b
    (x,) = node.input
    one = b.const(1.0, np.float32)  # the only graphs in which it is written out are FP32 throughout
    b.op("Div", one, b.op("Add", b.op("Exp", b.op("Neg", x)), one), output=node.output[0])


_WRITERS: dict[str, Callable[[_Site], None]] = {
    "LayerNormalization": _layer_normalization,
    "GroupNormalization": _group_normalization,
    "InstanceNormalization": _group_normalization,
    "Mod": _mod,
    "Mish": _mish,
    "Gelu": _gelu,
    "IsInf": _is_inf,
    "CastLike": _cast_like,
    "Sigmoid": _sigmoid,
}
