"""Clean-up of a traced graph: folded, no dead or duplicate constants, readable names, shapes inferred."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ..errors import GraphError, MissingPackageError
from .view import attribute

# The exported wrapper calls the detector "model"; without it, paths are those of the checkpoint's keys.
_WRAPPER = "/model"
# Weights above this many bytes are set aside while the simplifier copies the model over and over.
_LARGE_BYTES = 1 << 16


def simplify(model: onnx.ModelProto, optimize: Callable[[bytes], bytes]) -> onnx.ModelProto:
    """Fold constants, merge equal nodes and initializers, drop dead ones, infer shapes.

    ONNX Runtime's own optimizer removes most of what tracing leaves behind and is fast; onnxslim's time
    grows with the square of the nodes, and it knows symbolic shapes, so it comes second. Convolutions
    take in the frozen BatchNorm behind them (`fold_affine`).

    optimize: ONNX Runtime's basic optimizations of a serialized graph (`backends.onnxruntime.session.optimize_basic`).

    Raises:
        GraphError: the simplifier or the checker refuses the graph.
    """
    try:
        import onnxslim
    except ImportError:
        raise MissingPackageError("onnxslim", "export", "simplifying a graph") from None
    aside = set_aside(model)
    noise = io.StringIO()
    try:
        folded = onnx.load_from_string(optimize(model.SerializeToString()))
        with contextlib.redirect_stdout(noise), _equal_by_name():
            slim = onnxslim.slim(folded, skip_fusion_patterns=_fusions())
        put_back(slim, aside)
        fold_constants(slim)
        fold_affine(slim)
        merge_equal_tensors(slim)
        drop_dead(slim)
        drop_unused_domains(slim)
        drop_default_reduction(slim)
        onnx.checker.check_model(slim)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise GraphError(f"the traced graph does not simplify: {error}") from error
    return slim


def _fusions() -> list[str]:
    """onnxslim's patterns that compute with weights: those are set aside, and ours come after."""
    from onnxslim.core.pattern.registry import DEFAULT_FUSION_PATTERNS

    return [name for name, found in DEFAULT_FUSION_PATTERNS.items() if ".fusion." in type(found[0]).__module__]


@contextlib.contextmanager
def _equal_by_name() -> Iterator[None]:
    """Compare onnxslim's variables by name, which is unique in a graph, inside the block.

    It looks each input up in a list by comparing names, types, shapes, producers and consumers, which
    is a third of its time on these graphs. Without the class, nothing is changed and it is slower.
    """
    try:
        from onnxslim.third_party.onnx_graphsurgeon.ir.tensor import Variable
    except ImportError:
        yield
        return
    original = Variable.__eq__
    Variable.__eq__ = lambda a, b: a is b or (isinstance(b, Variable) and a.name == b.name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Variable.__eq__ = original  # type: ignore[method-assign]


def set_aside(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Turn large initializers into inputs, in place, and return them by name."""
    graph, aside = model.graph, {}
    kept = []
    for tensor in graph.initializer:
        if len(tensor.raw_data) > _LARGE_BYTES:
            aside[tensor.name] = tensor
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            kept.append(tensor)
    copies = [onnx.TensorProto.FromString(t.SerializeToString()) for t in kept]
    aside = {name: onnx.TensorProto.FromString(t.SerializeToString()) for name, t in aside.items()}
    del graph.initializer[:]
    graph.initializer.extend(copies)
    return aside


def put_back(model: onnx.ModelProto, aside: dict[str, onnx.TensorProto]) -> None:
    graph = model.graph
    inputs = [value for value in graph.input if value.name not in aside]
    del graph.input[:]
    graph.input.extend(inputs)
    graph.initializer.extend(aside.values())  # `drop_dead` removes what the folding made needless


def readable_names(model: onnx.ModelProto) -> None:
    """Name every node by its module path and operator, unique, in place; tensor names stay."""
    seen: dict[str, int] = {}
    for index, node in enumerate(model.graph.node):
        name = node.name or f"/{node.op_type}_{index}"
        if re.search(r"_output_\d+$", name):  # a node that a fusion named after a tensor
            name = f"{name.rsplit('/', 1)[0]}/{node.op_type}"
        if name.startswith(_WRAPPER + "/"):
            name = name[len(_WRAPPER) :]
        count = seen.get(name, 0)
        seen[name] = count + 1
        node.name = f"{name}.{count}" if count else name


def fold_constants(model: onnx.ModelProto) -> None:
    """Compute nodes whose inputs are all initializers, in place, unless that makes the file larger."""
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    outputs = {value.name for value in graph.output}
    kept = []
    for node in graph.node:
        inputs = [name for name in node.input if name]
        constant = inputs and all(name in tensors for name in inputs) and not outputs.intersection(node.output)
        if not constant or node.domain or len(node.output) != 1:
            kept.append(node)
            continue
        values = {name: numpy_helper.to_array(tensors[name]) for name in inputs}
        part = helper.make_graph([node], "fold", [], [onnx.ValueInfoProto(name=node.output[0])])
        result = ReferenceEvaluator(helper.make_model(part, opset_imports=model.opset_import)).run(None, values)[0]
        if result.nbytes > max(sum(v.nbytes for v in values.values()), 1024):
            kept.append(node)
            continue
        folded = numpy_helper.from_array(result, node.output[0])
        tensors[folded.name] = folded
        graph.initializer.append(folded)
    if len(kept) != len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)


def fold_affine(model: onnx.ModelProto) -> int:
    """Fold `Conv -> Mul -> Add` with one constant a channel into the Conv, in place; returns how many.

    This is a frozen BatchNorm. Only where the convolution has a single consumer.
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
        after = multiply.output[0] if multiply is not None and scale is not None else output
        add = only_consumer(after, "Add")
        shift = per_channel(add, after, channels) if add is not None else None
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
    kept = [node for node in graph.node if id(node) not in removed]
    count = len(removed)
    if count:
        del graph.node[:]
        graph.node.extend(kept)
    return count


def merge_equal_tensors(model: onnx.ModelProto) -> None:
    """Let nodes share the first of several equal initializers, in place."""
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
    needed = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(node.input)
    kept.reverse()
    if len(kept) != len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    tensors = [tensor for tensor in graph.initializer if tensor.name in needed]
    if len(tensors) != len(graph.initializer):
        copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
        del graph.initializer[:]
        graph.initializer.extend(copies)


def drop_unused_domains(model: onnx.ModelProto) -> None:
    """Remove operator sets that no node is of, in place: ONNX Runtime's optimizer imports all that it knows."""
    used = {"", *(node.domain for node in model.graph.node)} - {"ai.onnx"}
    kept = [entry for entry in model.opset_import if entry.domain in used or entry.domain == "ai.onnx"]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def drop_default_reduction(model: onnx.ModelProto) -> None:
    """Remove `reduction="none"` from ScatterND and ScatterElements nodes, in place: TensorRT before 10.9 refuses the attribute."""
    for node in model.graph.node:
        if node.op_type not in ("ScatterND", "ScatterElements"):
            continue
        for position, entry in enumerate(node.attribute):
            if entry.name == "reduction" and entry.s == b"none":
                del node.attribute[position]
                break


def declare_outputs(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Give outputs their known shapes, in place; shape inference loses those behind a Gather or a TopK."""
    for value in model.graph.output:
        if value.name in shapes:
            elem_type = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, list(shapes[value.name])))


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Turn Constant nodes into initializers, in place, so that passes look in one place."""
    graph = model.graph
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def topk_outputs(model: onnx.ModelProto) -> list[str]:
    """Names of the index outputs of all TopK nodes, in graph order."""
    return [node.output[1] for node in model.graph.node if node.op_type == "TopK" and len(node.output) > 1]


def with_outputs(model: onnx.ModelProto, names: list[str], dtype: int = onnx.TensorProto.INT64) -> onnx.ModelProto:
    """A copy of the graph with more outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {value.name for value in copy.graph.output}
    for name in names:
        if name not in present:
            copy.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    return copy


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


def lower_opset(model: onnx.ModelProto, version: int) -> None:
    """Lower the default opset in place, for parsers that read no newer one.

    Raises:
        GraphError: a node that the older opset cannot express.
    """
    entry = next(e for e in model.opset_import if e.domain in ("", "ai.onnx"))
    if entry.version <= version:
        return
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        if version < 18 and node.op_type in _AXES_BECAME_INPUT and len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
            node.attribute.append(onnx.helper.make_attribute("axes", axes))
            del node.input[1:]
        if version < 18 and node.op_type == "Split" and len(node.input) < 2:
            _drop_attribute(node, "num_outputs")
        if version < 20 and node.op_type == "GridSample":
            mode = {b"linear": "bilinear", b"cubic": "bicubic"}.get(attribute(node, "mode", b"linear"), "nearest")
            _drop_attribute(node, "mode")
            node.attribute.append(onnx.helper.make_attribute("mode", mode))
        _check_expressible(node, entry.version, version)
    entry.version = version
    drop_dead(model)


def _check_expressible(node: onnx.NodeProto, new: int, old: int) -> None:
    """Drop attributes that an older opset lacks where they have their default value; refuse other values and more inputs."""
    refusal = f"node '{node.name}' ({node.op_type}) cannot be expressed in opset {old}; export the model with --opset {old}"
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
