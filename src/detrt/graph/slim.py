"""Simplification of a traced graph: ONNX Runtime's optimizer and onnxslim, then the passes of `clean.py`. The only module that imports `onnxslim`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import onnx
from onnx import helper

from ..errors import GraphError, MissingPackageError
from .branches import merge_convolutions, read_past_stacks
from .clean import (
    drop_dead,
    drop_default_reduction,
    drop_repeated_shapes,
    drop_unused_domains,
    fold_affine,
    fold_constants,
    fold_pads,
    merge_equal_tensors,
    multiply_outer_products,
)

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
        multiply_outer_products(slim)
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
