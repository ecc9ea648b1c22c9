"""Clean-up of a traced graph: constant folding, dead-code elimination, deduplication, readable names, shape inference."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..errors import GraphError, MissingPackageError
from .branches import merge_convolutions, read_past_stacks
from .io import to_bytes
from .nodes import DEFAULT_DOMAINS, replace_nodes, subgraphs
from .view import attribute

# The exported wrapper calls the detector "model"; without it, paths are those of the checkpoint's keys.
_WRAPPER = "/model"
# Larger weights, in bytes, are detached while the simplifier copies the model repeatedly.
_LARGE_BYTES = 1 << 16


def simplify(model: onnx.ModelProto, optimize: Callable[[bytes], bytes]) -> onnx.ModelProto:
    """Fold constants, merge equal nodes and initializers, drop dead ones, infer shapes.

    ONNX Runtime's optimizer is fast and removes most redundant nodes of the trace. onnxslim runs second: it handles symbolic shapes,
    but its time is quadratic in the number of nodes. Frozen BatchNorms and zero padding are folded into convolutions (`fold_affine`, `fold_pads`),
    parallel convolutions become one (`merge_convolutions`), and class heads that nothing reads go (`read_past_stacks`).

    optimize: ONNX Runtime's basic optimizations of a serialized graph (`backends.onnxruntime.session.optimize_basic`).

    Raises:
        GraphError: the simplifier or the checker rejects the graph.
    """
    try:
        import onnxslim
    except ImportError:
        raise MissingPackageError("onnxslim", "export", "simplifying a graph") from None
    weights = detach_weights(model)
    output = io.StringIO()
    try:
        folded = onnx.load_from_string(optimize(model.SerializeToString()))
        with contextlib.redirect_stdout(output), _quick_onnxslim(), _same_names():
            slim = onnxslim.slim(folded, skip_fusion_patterns=_fusions())
        attach_weights(slim, weights)
        fold_constants(slim)
        fold_affine(slim)
        fold_pads(slim)
        merge_convolutions(slim)
        read_past_stacks(slim)
        merge_equal_tensors(slim)
        drop_dead(slim)
        drop_repeated_shapes(slim)
        drop_unused_domains(slim)
        for node in slim.graph.node:
            drop_default_reduction(node)
        _check(slim)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise GraphError(f"the traced graph does not simplify: {error}") from error
    return slim


def _check(model: onnx.ModelProto) -> None:
    """onnx's checker, without large weights, which it copies twice."""
    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    graph = light.graph
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) > _LARGE_BYTES:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            graph.initializer.append(tensor)
    onnx.checker.check_model(light)


def _fusions() -> list[str]:
    """onnxslim's patterns that compute with weights, which are detached; detrt's own folding runs afterwards."""
    from onnxslim.core.pattern.registry import DEFAULT_FUSION_PATTERNS

    return [name for name, found in DEFAULT_FUSION_PATTERNS.items() if ".fusion." in type(found[0]).__module__]


@contextlib.contextmanager
def _quick_onnxslim() -> Iterator[None]:
    """Replace nine slow parts of onnxslim inside the block, by what leaves the same nodes; they take most of its time on these graphs.

    onnxslim searches inputs in lists and compares names, types, shapes, producers and consumers; names are unique in a graph. It
    imports each result into a graph of objects to see whether anything changed; bytes show that. It sorts nodes by a recursion,
    although most of them are in order. It looks for subgraphs in every node in every pass, and lists the tensors of a graph with
    three calls for each. It tries each pattern on each node, whatever its operator, and looks each input, which detached weights are,
    up in a list of all tensors. Its inference of symbolic shapes begins again wherever inputs of a node name equal axes differently, eight
    times in DINO, and then raises at the first LayerNormalization, as on every graph that has one. onnx's inference takes the graph
    then, so that one pass is enough. Does nothing if this version of onnxslim has no such names.
    """
    try:
        import onnxslim.utils as utils
        from onnxslim.core.pattern import PatternMatcher
        from onnxslim.core.shape_inference import ShapeInferencer
        from onnxslim.third_party.onnx_graphsurgeon.ir.graph import Graph
        from onnxslim.third_party.onnx_graphsurgeon.ir.node import Node
        from onnxslim.third_party.onnx_graphsurgeon.ir.tensor import Variable

        toposort, subgraphs, tensors, used = Graph.toposort, Node.subgraphs, Graph.tensors, Graph._get_used_node_ids
        match, infer = PatternMatcher.match, ShapeInferencer._infer_impl
    except (ImportError, AttributeError):
        yield
        return

    def quick_subgraphs(node: Any, recursive: bool = False) -> Iterable[Any]:
        for value in node.attrs.values():
            if isinstance(value, Graph):
                return subgraphs(node, recursive)
        return ()

    def quick_graphs(graph: Any, recursive: bool = False) -> Iterator[Any]:
        for node in graph.nodes:
            if node.attrs:
                yield from quick_subgraphs(node, recursive)

    def quick_tensors(graph: Any, check_duplicates: bool = False) -> dict[str, Any]:
        if check_duplicates:
            return tensors(graph, check_duplicates)
        groups = [graph.inputs, *(group for node in graph.nodes for group in (node.inputs, node.outputs)), graph.outputs]
        return {name: tensor for group in groups for tensor in group if (name := tensor.name)}

    def quick_match(matcher: Any, node: Any) -> bool:
        return node.op == matcher.get_match_point().op and match(matcher, node)

    def quick_used(graph: Any) -> tuple[Any, _Named]:
        nodes, found = used(graph)
        return nodes, _Named(found)

    def quick_inference(inferencer: Any, context: Any, *args: Any) -> Any:
        complete = infer(inferencer, context, *args)
        if context.run_ and any(node.op_type == "LayerNormalization" for node in context.out_mp_.graph.node):
            raise ValueError("another pass would raise at a LayerNormalization")
        return complete

    replaced = [
        (Variable, "__eq__", lambda a, b: a is b or (isinstance(b, Variable) and a.name == b.name)),
        (Graph, "toposort", lambda graph, *args, **options: _toposort(graph) or toposort(graph, *args, **options)),
        (Graph, "tensors", quick_tensors),
        (Graph, "subgraphs", quick_graphs),
        (Graph, "_get_used_node_ids", quick_used),
        (Node, "subgraphs", quick_subgraphs),
        (PatternMatcher, "match", quick_match),
        (ShapeInferencer, "_infer_impl", quick_inference),
        (utils, "check_point", lambda model: model.SerializeToString(deterministic=True)),
    ]
    with _replacing(replaced):
        yield


@contextlib.contextmanager
def _same_names() -> Iterator[None]:
    """Let onnxslim give equal axes the same name in every process, so that equal exports are equal files.

    Of several names it prefers those of inputs, then plain ones, and among these the first of a set of strings, whose order differs from process
    to process. Does nothing if this version of onnxslim has no such names.
    """
    try:
        from onnxslim.core.shape_inference.context import InferenceContext

        merge = InferenceContext.add_suggested_merge
    except (ImportError, AttributeError):
        yield
        return

    def merge_in_order(context: Any, symbols: Iterable[Any], apply: bool = False) -> None:
        names, inputs = list(symbols), context.input_symbols_
        merged = {str(context.suggested_merge_.get(name, name)) for name in names}
        context.input_symbols_ = {min(merged, key=lambda name: (name not in inputs, not name.isidentifier(), len(name), name))}
        try:
            merge(context, names, apply)
        finally:
            context.input_symbols_ = inputs

    with _replacing([(InferenceContext, "add_suggested_merge", merge_in_order)]):
        yield


@contextlib.contextmanager
def _replacing(parts: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes inside the block: (owner, name, value) of each."""
    original = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
    try:
        for owner, name, value in parts:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in original:
            setattr(owner, name, value)


class _Named(list):
    """Tensors of a graph, in which one is found by its name."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__(tensors)
        self._names = {tensor.name for tensor in self}

    def __contains__(self, tensor: Any) -> bool:
        return tensor.name in self._names


def _toposort(graph: Any) -> Any | None:
    """Sort nodes by their longest path from an input, as onnxslim does; None if a node precedes one that it reads."""
    if graph.functions or any(True for _ in graph.subgraphs()):
        return None
    levels: dict[int, int] = {}
    for node in graph.nodes:
        before = [levels.get(id(producer)) for tensor in node.inputs for producer in tensor.inputs]
        if None in before:
            return None
        levels[id(node)] = max(before, default=-1) + 1  # type: ignore[type-var, operator]
    graph.nodes = sorted(graph.nodes, key=lambda node: levels[id(node)])
    return graph


def detach_weights(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Turn large initializers into inputs, in place, and return them by name."""
    graph, weights = model.graph, {}
    remaining = []
    for tensor in graph.initializer:
        if len(tensor.raw_data) > _LARGE_BYTES:
            weights[tensor.name] = tensor
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            remaining.append(tensor)
    copies = [onnx.TensorProto.FromString(t.SerializeToString()) for t in remaining]
    weights = {name: onnx.TensorProto.FromString(t.SerializeToString()) for name, t in weights.items()}
    del graph.initializer[:]
    graph.initializer.extend(copies)
    return weights


def attach_weights(model: onnx.ModelProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Turn inputs into initializers again, in place; `weights` is emptied."""
    graph = model.graph
    inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    for name in list(weights):  # `drop_dead` removes those that folding made unused
        graph.initializer.append(weights.pop(name))


def readable_names(model: onnx.ModelProto) -> None:
    """Give every node a unique name of module path and operator, in place; tensor names are not changed."""
    counts: dict[str, int] = {}
    for index, node in enumerate(model.graph.node):
        name = node.name or f"/{node.op_type}_{index}"
        if re.search(r"_output_\d+$", name):  # a node that a fusion named after a tensor
            name = f"{name.rsplit('/', 1)[0]}/{node.op_type}"
        if name.startswith(_WRAPPER + "/"):
            name = name[len(_WRAPPER) :]
        count = counts.get(name, 0)
        counts[name] = count + 1
        node.name = f"{name}.{count}" if count else name


def fold_constants(model: onnx.ModelProto) -> None:
    """Compute nodes whose inputs are all initializers, in place, unless that makes the file larger."""
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    remaining = []
    for node in graph.node:
        inputs = [name for name in node.input if name]
        constant = inputs and all(name in tensors for name in inputs) and not outputs.intersection(node.output)
        if not constant or node.domain or len(node.output) != 1:
            remaining.append(node)
            continue
        values = {name: numpy_helper.to_array(tensors[name]) for name in inputs}
        subgraph = helper.make_graph([node], "fold", [], [onnx.ValueInfoProto(name=node.output[0])])
        result = ReferenceEvaluator(helper.make_model(subgraph, opset_imports=model.opset_import)).run(None, values)[0]
        if result.nbytes > max(sum(v.nbytes for v in values.values()), 1024):
            remaining.append(node)
            continue
        folded = numpy_helper.from_array(result, node.output[0])
        tensors[folded.name] = folded
        graph.initializer.append(folded)
    if len(remaining) != len(graph.node):
        replace_nodes(model, remaining)


def fold_affine(model: onnx.ModelProto) -> int:
    """Fold `Conv -> Mul -> Add` with one constant per channel, a frozen BatchNorm, into the Conv, in place.

    Only if the result of the convolution has a single reader. Returns the number of removed nodes.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    consumers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            consumers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}

    def only_consumer(name: str, kind: str) -> onnx.NodeProto | None:
        users = consumers.get(name, [])
        return users[0] if len(users) == 1 and users[0].op_type == kind and name not in outputs else None

    def per_channel(node: onnx.NodeProto, data: str, channels: int) -> np.ndarray | None:
        other = node.input[1] if node.input[0] == data else node.input[0]
        if other not in tensors or other == data:
            return None
        array = numpy_helper.to_array(tensors[other])
        return array.reshape(-1) if array.shape in ((1, channels, 1, 1), (channels, 1, 1)) else None

    removed: set[int] = set()
    for conv in graph.node:
        if conv.op_type != "Conv" or conv.input[1] not in tensors:
            continue
        weight = numpy_helper.to_array(tensors[conv.input[1]])
        channels, output = weight.shape[0], conv.output[0]
        multiply = only_consumer(output, "Mul")
        scale = per_channel(multiply, output, channels) if multiply is not None else None
        scaled = multiply.output[0] if multiply is not None and scale is not None else output
        add = only_consumer(scaled, "Add")
        shift = per_channel(add, scaled, channels) if add is not None else None
        if scale is None and shift is None:
            continue
        has_bias = len(conv.input) > 2 and conv.input[2] in tensors
        if len(conv.input) > 2 and not has_bias:
            continue
        bias = numpy_helper.to_array(tensors[conv.input[2]]) if has_bias else np.zeros(channels, weight.dtype)
        if scale is not None and multiply is not None:
            weight, bias = weight * scale.reshape(-1, *[1] * (weight.ndim - 1)), bias * scale
            removed.add(id(multiply))
            conv.output[0] = multiply.output[0]
        if shift is not None and add is not None:
            bias = bias + shift
            removed.add(id(add))
            conv.output[0] = add.output[0]
        names = (f"{conv.name}/weight", f"{conv.name}/bias")
        for name, array in zip(names, (weight, bias), strict=True):
            tensors[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
            graph.initializer.append(tensors[name])
        del conv.input[1:]
        conv.input.extend(names)
    remaining = [node for node in graph.node if id(node) not in removed]
    count = len(removed)
    if count:
        replace_nodes(model, remaining)
    return count


def fold_pads(model: onnx.ModelProto) -> int:
    """Fold padding with zeros into the convolutions and poolings of maxima that read it, in place; returns how many nodes read less.

    A MaxPool pads with the lowest number, which gives the same where the data is the output of a Relu and every window has some of it.
    Engines of TensorRT-RTX 1.6 with a MaxPool and a convolution behind one Pad, the stem of HGNetV2, differ from run to run.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    folded = 0
    for node in graph.node:
        pad = producers.get(node.input[0]) if node.input else None
        if pad is None or pad.op_type != "Pad" or node.op_type not in ("Conv", "MaxPool"):
            continue
        before, after = _spatial_zeros(pad, tensors)
        if not before or attribute(node, "auto_pad", b"NOTSET") != b"NOTSET":
            continue
        own: Any = attribute(node, "pads", [0] * (2 * len(before)))
        pads = [a + b for a, b in zip(own, [*before, *after], strict=True)]
        if node.op_type == "MaxPool":
            kernel: Any = attribute(node, "kernel_shape")
            steps: Any = attribute(node, "strides", [1])
            source = producers.get(pad.input[0])
            whole = not attribute(node, "ceil_mode", 0) or all(step == 1 for step in steps)
            narrow = all(width < side for width, side in zip(pads, [*kernel, *kernel], strict=True))
            if any(own) or not whole or not narrow or source is None or source.op_type != "Relu":
                continue
        node.input[0] = pad.input[0]
        _drop_attribute(node, "pads")
        node.attribute.append(helper.make_attribute("pads", pads))
        folded += 1
    if folded:
        drop_dead(model)
    return folded


def _spatial_zeros(pad: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> tuple[list[int], list[int]]:
    """Zeros that a Pad adds before and after each spatial axis; empty where it does something else, or it is not known."""
    value, axes = ([*pad.input, "", ""][place] for place in (2, 3))
    if (
        attribute(pad, "mode", b"constant") != b"constant"
        or axes
        or pad.input[1] not in tensors
        or (value and value not in tensors)
    ):
        return [], []
    if value and numpy_helper.to_array(tensors[value]).any():
        return [], []
    amounts = numpy_helper.to_array(tensors[pad.input[1]]).tolist()
    before, after = amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :]
    if any([*before[:2], *after[:2]]) or min(amounts) < 0:
        return [], []
    return before[2:], after[2:]


def merge_equal_tensors(model: onnx.ModelProto) -> None:
    """Replace equal initializers by the first of them, in place."""
    first: dict[tuple[int, tuple[int, ...], str], str] = {}
    renamed: dict[str, str] = {}
    for tensor in model.graph.initializer:
        content = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
        key = (tensor.data_type, tuple(tensor.dims), hashlib.sha256(content).hexdigest())
        if first.setdefault(key, tensor.name) != tensor.name:
            renamed[tensor.name] = first[key]
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name in renamed:
                node.input[index] = renamed[name]


def drop_dead(model: onnx.ModelProto) -> None:
    """Remove nodes and initializers that no output needs, in place."""
    graph = model.graph
    live = {value.name for value in graph.output}
    remaining = []
    for node in reversed(graph.node):
        if live.intersection(node.output):
            remaining.append(node)
            live.update(_names_used(node))
    remaining.reverse()
    if len(remaining) != len(graph.node):
        replace_nodes(model, remaining)
    # One by one: a list of those that stay would copy them, gigabytes of a large model.
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in live:
            del graph.initializer[index]


def drop_repeated_shapes(model: onnx.ModelProto) -> None:
    """Keep the last shape of each tensor in `value_info`, in place: each pass of onnxslim's shape inference adds another, ten in DINO."""
    found = model.graph.value_info
    last = {value.name: value for value in found}
    if len(last) < len(found):
        kept = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in last.values()]
        del found[:]
        found.extend(kept)


def _names_used(node: onnx.NodeProto) -> Iterator[str]:
    """Inputs of a node, and what the nodes of its subgraphs take."""
    yield from node.input
    for inner in subgraphs(node):
        yield from (value.name for value in inner.output)
        for one in inner.node:
            yield from _names_used(one)


def drop_unused_domains(model: onnx.ModelProto) -> None:
    """Remove unused operator sets, in place: ONNX Runtime's optimizer imports all that it supports."""
    domains = {*DEFAULT_DOMAINS, *(node.domain for node in model.graph.node)}
    remaining = [entry for entry in model.opset_import if entry.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(remaining)


def drop_default_reduction(node: onnx.NodeProto) -> bool:
    """Remove `reduction="none"` from a ScatterND or ScatterElements node, in place: TensorRT before 10.9 refuses the attribute.

    Returns whether it was there. Another reduction stays, for the parser to refuse.
    """
    found = node.op_type in ("ScatterND", "ScatterElements") and attribute(node, "reduction") == b"none"
    if found:
        _drop_attribute(node, "reduction")
    return found


def declare_outputs(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Set the shapes of outputs, in place; shape inference loses them after a Gather or a TopK."""
    for value in model.graph.output:
        if value.name in shapes:
            elem_type = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(shapes[value.name])))


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Convert Constant nodes to initializers, in place, so that passes handle one form of constants."""
    graph = model.graph
    remaining = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
        else:
            remaining.append(node)
    replace_nodes(model, remaining)


def with_outputs(model: onnx.ModelProto, names: list[str], dtype: int = onnx.TensorProto.INT64) -> onnx.ModelProto:
    """A copy of the graph with extra outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _add_outputs(copy, names, dtype)
    return copy


def serialized(model: onnx.ModelProto, names: list[str], dtype: int = onnx.TensorProto.INT64) -> bytes:
    """The bytes of the graph with extra outputs, for a session: without a copy of its weights, which may be gigabytes."""
    own = len(model.graph.output)
    _add_outputs(model, names, dtype)
    try:
        return to_bytes(model)
    finally:
        del model.graph.output[own:]


def _add_outputs(model: onnx.ModelProto, names: list[str], dtype: int) -> None:
    present = {value.name for value in model.graph.output}
    model.graph.output.extend(helper.make_tensor_value_info(name, dtype, None) for name in names if name not in present)


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Raise the default opset in place; rewrites only operators that occur in detector graphs.

    Raises:
        GraphError: an operator whose semantics change and that is not rewritten here.
    """
    entry = next(e for e in model.opset_import if e.domain in DEFAULT_DOMAINS)
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
            raise GraphError(f"node '{node.name}' (GroupNormalization) has other semantics since opset 21; export again")
    entry.version = version
    # IR version of an opset; onnxruntime and TensorRT reject newer operators in older formats.
    model.ir_version = max(model.ir_version, {19: 9, 20: 9, 21: 10, 22: 10}.get(version, 8))


def lower_opset(model: onnx.ModelProto, version: int) -> None:
    """Lower the default opset in place, for parsers that read no newer one.

    Raises:
        GraphError: a node that the older opset cannot express.
    """
    entry = next(e for e in model.opset_import if e.domain in DEFAULT_DOMAINS)
    if entry.version <= version:
        return
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.domain not in DEFAULT_DOMAINS:
            continue
        if version < 18 and node.op_type in _AXES_BECAME_INPUT and len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
            node.attribute.append(onnx.helper.make_attribute("axes", axes))
            del node.input[1:]
        if version < 18 and node.op_type == "Split" and len(node.input) < 2:
            _drop_attribute(node, "num_outputs")
        if version < 20:
            _name_mode_as_before(node)
        _check_expressible(node, entry.version, version)
    entry.version = version
    drop_dead(model)


def name_modes_as_before(model: onnx.ModelProto) -> int:
    """Give the modes of GridSample their names before opset 20 ("bilinear", "bicubic"), in place; returns how many changed.

    For parsers that know the old names only and take any other for the nearest pixel, whatever the opset. The graph itself is then
    invalid ONNX from opset 20 on.
    """
    return sum(_name_mode_as_before(node) for node in model.graph.node if node.domain in DEFAULT_DOMAINS)


def _name_mode_as_before(node: onnx.NodeProto) -> bool:
    mode = attribute(node, "mode", b"linear")
    before = {b"linear": "bilinear", b"cubic": "bicubic"}
    if node.op_type != "GridSample" or mode not in before:
        return False
    _drop_attribute(node, "mode")
    node.attribute.append(onnx.helper.make_attribute("mode", before[mode]))
    return True


def _check_expressible(node: onnx.NodeProto, new: int, old: int) -> None:
    """Drop attributes that an older opset lacks where they have their default value; refuse other values and more inputs."""
    refusal = f"node '{node.name}' ({node.op_type}) cannot be expressed in opset {old}; export the model with `opset={old}`"
    try:
        schema = onnx.defs.get_schema(node.op_type, old)
        newer = onnx.defs.get_schema(node.op_type, new)
    except onnx.defs.SchemaError:
        raise GraphError(refusal) from None
    if schema.deprecated or len(node.input) > schema.max_input or len(node.output) > schema.max_output:
        raise GraphError(refusal)
    for entry in list(node.attribute):
        if entry.name in schema.attributes:
            continue
        default = newer.attributes[entry.name].default_value if entry.name in newer.attributes else None
        if default is None or onnx.helper.get_attribute_value(default) != onnx.helper.get_attribute_value(entry):
            raise GraphError(refusal)
        _drop_attribute(node, entry.name)


_AXES_BECAME_INPUT = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip


def _drop_attribute(node: onnx.NodeProto, name: str) -> None:
    remaining = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend(remaining)
