"""Deformable attention as one plugin node for TensorRT: detrt's plugin, or the one that TensorRT includes.

ONNX Runtime and the simplifiers do not support such nodes, so they are detached while a graph is simplified (`cut`, `rejoin`), and
a graph is checked with its nodes lowered to standard operators. See docs/guide/plugin.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError, check_one_of, number_of
from .lower_msda import level_starts, lower_msda
from .nodes import GraphBuilder, drop_domain, import_domain, replace_nodes, subgraphs
from .operators import MSDA, MSDA_DOMAIN, NVIDIA_DOMAIN, NVIDIA_MSDA
from .view import attribute, element_types

PLUGINS = ("plugin", "nvidia-plugin")
_INPUT_TYPES = {
    (MSDA_DOMAIN, MSDA): (TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT),
    (NVIDIA_DOMAIN, NVIDIA_MSDA): (
        TensorProto.FLOAT,
        TensorProto.INT32,
        TensorProto.INT32,
        TensorProto.FLOAT,
        TensorProto.FLOAT,
    ),
}
_CUT = "/detrt_cut"


def plugin_nodes(model: onnx.ModelProto) -> dict[str, int]:
    """Operator -> number of its nodes, for operators that only a TensorRT plugin runs; empty for standard operators."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if (node.domain, node.op_type) == (MSDA_DOMAIN, MSDA) or node.op_type == NVIDIA_MSDA:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with plugin nodes lowered to standard operators, for any runtime; the graph itself if it has none.

    16-bit values are sampled and summed in FP32 and the result is rounded, as in detrt's plugin.

    Raises:
        GraphError: a node without the inputs or attributes that detrt writes.
    """
    if not plugin_nodes(model):
        return model
    types = element_types(model)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    producer = {name: node for node in graph.node for name in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if (node.domain, node.op_type) != (MSDA_DOMAIN, MSDA) and node.op_type != NVIDIA_MSDA:
            nodes.append(node)
            continue
        if len(node.input) != (5 if node.op_type == NVIDIA_MSDA else 4):
            raise GraphError(
                f"node '{node.name}' ({node.op_type}) has {number_of(len(node.input), 'input')}; detrt did not write it"
            )
        b = GraphBuilder(f"{node.name or '/' + MSDA}/plugin")
        produced, kind = node.output[0], types[node.input[0]]
        msda = node if node.op_type == MSDA else _from_nvidia(node, b, producer, constants, types)
        for position in (0, 2, 3):
            if types.get(msda.input[position], TensorProto.FLOAT) != TensorProto.FLOAT:
                msda.input[position] = b.op("Cast", msda.input[position], to=TensorProto.FLOAT)
        b.nodes.append(msda)
        if msda is not node:
            msda.output[0] = f"{b.prefix}_rows"
            b.op("Reshape", msda.output[0], b.ints(0, 0, _size(msda, "heads"), _size(msda, "head_dim")), output=produced)
        if kind != TensorProto.FLOAT:
            b.nodes[-1].output[0] = f"{b.prefix}_exact"
            b.op("Cast", b.nodes[-1].output[0], output=produced, to=kind)
        nodes.extend(b.nodes)
        graph.initializer.extend(b.initializers)
    replace_nodes(copy, nodes)
    lower_msda(copy, "gather")
    return copy


def _size(node: onnx.NodeProto, name: str) -> int:
    value = attribute(node, name)
    if value is None:
        raise GraphError(f"node '{node.name}' ({node.op_type}) has no attribute '{name}'; detrt did not write it")
    return int(value)


def _from_nvidia(
    node: onnx.NodeProto,
    b: GraphBuilder,
    producer: dict[str, onnx.NodeProto],
    constants: dict[str, TensorProto],
    types: dict[str, int],
) -> onnx.NodeProto:
    """The MSDeformAttn node that a node of NVIDIA's plugin was converted from; its sizes are in the reshapes around it."""

    refusal = GraphError(f"node '{node.name}' ({NVIDIA_MSDA}) was not written by detrt: its sizes are not in the graph")

    def shape_of(name: str) -> list[int]:
        node_before = producer.get(name)
        while node_before is not None and node_before.op_type == "Cast":
            node_before = producer.get(node_before.input[0])
        if node_before is None or node_before.op_type != "Reshape" or node_before.input[1] not in constants:
            raise refusal
        return [int(side) for side in numpy_helper.to_array(constants[node_before.input[1]])]

    value, shapes, _, places, shares = node.input
    _, _, heads, levels, points, _ = shape_of(places)
    readers = [n for n in producer.values() if n.op_type in ("Reshape", "Cast") and n.input[0] == node.output[0]]
    while readers and readers[0].op_type == "Cast":
        readers = [n for n in producer.values() if n.op_type in ("Reshape", "Cast") and n.input[0] == readers[0].output[0]]
    dim = shape_of(readers[0].output[0])[-1] // heads if readers else 0
    if dim < 1:
        raise refusal
    if types.get(shapes) != TensorProto.INT64:
        shapes = b.op("Cast", shapes, to=TensorProto.INT64)
    places = b.reshape(places, 0, 0, heads, levels * points, 2)
    shares = b.reshape(shares, 0, 0, heads, levels * points)
    attributes = {"heads": heads, "head_dim": dim, "points_per_level": [points] * levels, "discrete": 0}
    return helper.make_node(
        MSDA, [value, shapes, places, shares], [node.output[0]], f"{b.prefix}/sum", domain=MSDA_DOMAIN, **attributes
    )


def cut(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]] | None = None) -> list[onnx.NodeProto]:
    """Detach the nodes of deformable attention from a graph, in place, those of NVIDIA's plugin as well.

    shapes: of their outputs, where those are known.

    Returns:
        The nodes. Their inputs are outputs of the graph now, and their outputs are inputs of it.
    """
    graph, nodes, remaining = model.graph, [], []
    for node in graph.node:
        if (node.domain, node.op_type) in _INPUT_TYPES:
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        else:
            remaining.append(node)
    prefix = _CUT
    while any(name.startswith(prefix) for node in graph.node for name in node.output):  # a graph that was cut before
        prefix += "_"
    ends = []
    for index, node in enumerate(nodes):
        axes: list[int | str] = [f"msda_{index}_batch", f"msda_{index}_queries"]
        if node.op_type == NVIDIA_MSDA:
            axes += [f"msda_{index}_heads", f"msda_{index}_channels"]
        else:
            axes.append(_size(node, "heads") * _size(node, "head_dim"))
        shape = (shapes or {}).get(node.output[0], axes)
        graph.input.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, shape))
        for position, kind in enumerate(_INPUT_TYPES[node.domain, node.op_type]):
            end = f"{prefix}_{index}_{position}"
            # An Identity, because a tensor may be read by several nodes, or be an initializer.
            ends.append(helper.make_node("Identity", [node.input[position]], [end], name=end))
            graph.output.append(helper.make_tensor_value_info(end, kind, None))
            node.input[position] = end
    replace_nodes(model, [*remaining, *ends])
    return nodes


def rejoin(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Attach the nodes that `cut` detached, in place."""
    if not nodes:
        return
    graph = model.graph
    ends, produced = {name for node in nodes for name in node.input}, {node.output[0] for node in nodes}
    for values, detached in ((graph.input, produced), (graph.output, ends)):
        remaining = [value for value in values if value.name not in detached]
        del values[:]
        values.extend(remaining)
    source = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity" and node.output[0] in ends}
    others = [node for node in graph.node if node.output[0] not in source]
    for node in nodes:
        inputs = [source.get(end, end) for end in node.input]
        del node.input[:]
        node.input.extend(inputs)
        import_domain(model, node.domain)
    ordered = _topological_order([*others, *nodes], {v.name for v in graph.input} | {t.name for t in graph.initializer})
    replace_nodes(model, ordered)


def emit(model: onnx.ModelProto, how: str) -> int:
    """Convert MSDeformAttn nodes to plugin nodes, in place; returns their number.

    "plugin": libdetrt_plugin.so, the same node with the version and namespace of the plugin. "nvidia-plugin": TensorRT's
    MultiscaleDeformableAttnPlugin_TRT, version 2, whose levels must all have as many points.

    Raises:
        GraphError: another choice, or a node that NVIDIA's plugin does not support.
    """
    check_one_of("`msda` of a plugin node", how, PLUGINS, GraphError)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        if (node.domain, node.op_type) != (MSDA_DOMAIN, MSDA):
            nodes.append(node)
            continue
        count += 1
        if how == "plugin":
            node.attribute.extend(
                [helper.make_attribute("plugin_version", "1"), helper.make_attribute("plugin_namespace", MSDA_DOMAIN)]
            )
            nodes.append(node)
        else:
            builder = _nvidia(node, constants, f"{node.name or '/' + MSDA}.{count}")
            nodes.extend(builder.nodes)
            graph.initializer.extend(builder.initializers)
    replace_nodes(model, nodes)
    if count and how == "nvidia-plugin":
        drop_domain(model, MSDA_DOMAIN)
        import_domain(model, NVIDIA_DOMAIN)
    return count


def _nvidia(node: onnx.NodeProto, constants: dict[str, TensorProto], prefix: str) -> GraphBuilder:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    points = [int(p) for p in attributes["points_per_level"]]
    heads, dim, levels = int(attributes["heads"]), int(attributes["head_dim"]), len(points)
    if attributes.get("discrete"):
        raise GraphError(
            f"node '{node.name}' uses discrete sampling, which NVIDIA's plugin does not support; "
            "choose `msda=plugin` or `msda=gather`"
        )
    if len(set(points)) != 1:
        raise GraphError(
            f"node '{node.name}' has {points} points in its levels; NVIDIA's plugin needs the same number in each; "
            "choose `msda=plugin` or `msda=gather`"
        )
    value, shapes, locations, weights = node.input
    b = GraphBuilder(prefix)
    if shapes in constants:
        sizes = numpy_helper.to_array(constants[shapes]).reshape(levels, 2)
        starts = b.const(np.concatenate([[0], np.cumsum(sizes.prod(1))[:-1]]), np.int32)
        shapes = b.const(sizes, np.int32)
    else:
        shapes = b.op("Cast", shapes, to=TensorProto.INT32)
        height, width = b.op("Split", shapes, b.ints(1, 1), outputs=2, axis=1)
        areas = b.reshape(b.op("Mul", height, width), levels)
        starts = level_starts(b, areas, levels, np.int32)
    places = b.reshape(locations, 0, 0, heads, levels, points[0], 2)
    shares = b.reshape(weights, 0, 0, heads, levels, points[0])
    produced = f"{prefix}_output"  # (batch, queries, heads, head_dim)
    b.nodes.append(
        helper.make_node(
            NVIDIA_MSDA,
            [value, shapes, starts, places, shares],
            [produced],
            name=prefix,
            domain=NVIDIA_DOMAIN,
            plugin_version="2",
            plugin_namespace="",
        )
    )
    b.op("Reshape", produced, b.ints(0, 0, heads * dim), output=node.output[0])
    return b


def set_plugin_version(model: onnx.ModelProto, version: str) -> int:
    """Ask for another version of NVIDIA's plugin, in place: version 2 came with TensorRT 10.11 and takes the same inputs.

    Returns:
        How many nodes were changed.
    """
    count = 0
    for node in model.graph.node:
        for entry in node.attribute if node.op_type == NVIDIA_MSDA else ():
            if entry.name == "plugin_version" and entry.s != version.encode():
                entry.s = version.encode()
                count += 1
    return count


def _topological_order(nodes: Sequence[onnx.NodeProto], available: set[str]) -> list[onnx.NodeProto]:
    """Nodes in a stable topological order."""
    produced = {name for node in nodes for name in node.output}
    pending, ordered, available = list(nodes), [], set(available) | {""}
    while pending:
        later = []
        for node in pending:
            inner = {name for graph in subgraphs(node) for inside in graph.node for name in inside.input}
            if all(name in available or name not in produced for name in (*node.input, *inner)):
                ordered.append(node)
                available.update(node.output)
            else:
                later.append(node)
        if len(later) == len(pending):
            raise GraphError(f"the graph has a cycle at node '{pending[0].name}'; this is a bug in detrt")
        pending = later
    return ordered
