"""Clean-up of a traced graph: constant folding, dead-code elimination, deduplication, readable names, shape inference."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from .io import name_nodes, to_bytes
from .nodes import DEFAULT_DOMAINS, GraphBuilder, default_opset, drop_attribute, replace_nodes, subgraphs
from .view import GraphView, attribute

# The exported wrapper calls the detector "model"; without it, paths are those of the checkpoint's keys.
_WRAPPER = "/model"


def readable_names(model: onnx.ModelProto) -> None:
    """Give every node a unique name of module path and operator, in place; tensor names are not changed."""
    for node in model.graph.node:
        name = node.name
        if re.search(r"_output_\d+$", name):  # a node that a fusion named after a tensor
            name = f"{name.rsplit('/', 1)[0]}/{node.op_type}"
        node.name = name[len(_WRAPPER) :] if name.startswith(_WRAPPER + "/") else name
    name_nodes(model)


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
    view = GraphView(model)

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
        if weight.ndim != 4:  # the constants have the axes of images
            continue
        multiply = view.only_reader(output, "Mul")
        scale = per_channel(multiply, output, channels) if multiply is not None else None
        scaled = multiply.output[0] if multiply is not None and scale is not None else output
        add = view.only_reader(scaled, "Add")
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
            places = len(node.output) > 1  # of the maxima, in the padded image
            if places or any(own) or not whole or not narrow or source is None or source.op_type != "Relu":
                continue
        node.input[0] = pad.input[0]
        drop_attribute(node, "pads")
        node.attribute.append(helper.make_attribute("pads", pads))
        folded += 1
    if folded:
        drop_dead(model)
    return folded


def _spatial_zeros(pad: onnx.NodeProto, tensors: Mapping[str, onnx.TensorProto]) -> tuple[list[int], list[int]]:
    """Zeros that a Pad adds before and after each spatial axis; empty where it does something else, or it is not known."""
    sides, value, axes = ([*pad.input, "", "", ""][place] for place in (1, 2, 3))
    if attribute(pad, "mode", b"constant") != b"constant" or axes or sides not in tensors or (value and value not in tensors):
        return [], []
    if value and numpy_helper.to_array(tensors[value]).any():
        return [], []
    amounts = numpy_helper.to_array(tensors[sides]).tolist()
    before, after = amounts[: len(amounts) // 2], amounts[len(amounts) // 2 :]
    if any([*before[:2], *after[:2]]) or min(amounts) < 0:
        return [], []
    return before[2:], after[2:]


def multiply_outer_products(model: onnx.ModelProto) -> int:
    """Write outer products of two vectors ("i,j->ij" of Einsum) as a column times a row, in place, which is the same number; returns how many.

    Parsers make matmuls of them, which TensorRT-RTX does not have in FP32 for compute capability 75. RT-DETR's position embedding of a
    symbolic size has two.
    """
    if default_opset(model) < 13:  # Unsqueeze has its axes in an attribute
        return 0
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        equation = re.fullmatch(rb"(\w),(\w)->(?:(\1\2)|\2\1)", bytes(attribute(node, "equation", b"")).replace(b" ", b""))
        if node.op_type != "Einsum" or equation is None or equation[1] == equation[2]:
            nodes.append(node)
            continue
        builder = GraphBuilder(node.name)
        column = 0 if equation[3] else 1
        factors = list(node.input)
        factors[column] = builder.op("Unsqueeze", factors[column], builder.ints(1))
        model.graph.initializer.extend(builder.initializers)
        nodes += [*builder.nodes, helper.make_node("Mul", factors, node.output, node.name)]
        count += 1
    if count:
        replace_nodes(model, nodes)
    return count


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
        drop_attribute(node, "reduction")
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
