"""Deformable attention as one plugin node, for TensorRT 10 and 11: detrt's own plugin, or the one that TensorRT ships.

Neither ONNX Runtime nor the simplifiers know such nodes, so they are cut out of a graph while it is simplified
(`cut`, `rejoin`) and a graph is checked with its nodes lowered to standard operators. See docs/guide/plugin.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError
from .lower_msda import DOMAIN, OP_TYPE, GraphBuilder, lower_msda
from .view import element_types

PLUGINS = ("plugin", "nvidia-plugin")
NVIDIA_DOMAIN, NVIDIA_OP_TYPE = "trt.plugins", "MultiscaleDeformableAttnPlugin_TRT"
_INPUT_TYPES = (TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT, TensorProto.FLOAT)
_CUT = "/detrt_cut"


def plugin_nodes(model: onnx.ModelProto) -> dict[str, int]:
    """Operator -> how many nodes of it only a TensorRT plugin can run; empty for a graph of standard operators."""
    counts: dict[str, int] = {}
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE) or node.op_type == NVIDIA_OP_TYPE:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its plugin nodes as standard operators, which every runtime takes; itself where it has none.

    Values of 16 bits are sampled and summed in FP32 and the result is rounded, as detrt's plugin does.

    Raises:
        GraphError: a node of NVIDIA's plugin that `emit` did not write.
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
        if (node.domain, node.op_type) != (DOMAIN, OP_TYPE) and node.op_type != NVIDIA_OP_TYPE:
            nodes.append(node)
            continue
        b = GraphBuilder(f"{node.name or '/' + OP_TYPE}/plugin")
        made, kind = node.output[0], types[node.input[0]]
        ours = node if node.op_type == OP_TYPE else _from_nvidia(node, b, producer, constants, types)
        for place in (0, 2, 3):
            if types.get(ours.input[place], TensorProto.FLOAT) != TensorProto.FLOAT:
                ours.input[place] = b.op("Cast", ours.input[place], to=TensorProto.FLOAT)
        b.nodes.append(ours)
        if ours is not node:
            ours.output[0] = f"{b.prefix}_rows"
            b.op("Reshape", ours.output[0], b.ints(0, 0, _size(ours, "heads"), _size(ours, "head_dim")), output=made)
        if kind != TensorProto.FLOAT:
            b.nodes[-1].output[0] = f"{b.prefix}_exact"
            b.op("Cast", b.nodes[-1].output[0], output=made, to=kind)
        nodes.extend(onnx.NodeProto.FromString(n.SerializeToString()) for n in b.nodes)
        graph.initializer.extend(b.initializers)
    del graph.node[:]
    graph.node.extend(nodes)
    lower_msda(copy, "gather")
    return copy


def _size(node: onnx.NodeProto, name: str) -> int:
    return next(int(a.i) for a in node.attribute if a.name == name)


def _from_nvidia(
    node: onnx.NodeProto,
    b: GraphBuilder,
    producer: dict[str, onnx.NodeProto],
    constants: dict[str, TensorProto],
    types: dict[str, int],
) -> onnx.NodeProto:
    """The MSDeformAttn node that a node of NVIDIA's plugin was made from; its sizes stand in the reshapes around it."""

    def shape_of(name: str) -> list[int]:
        maker = producer.get(name)
        while maker is not None and maker.op_type == "Cast":
            maker = producer.get(maker.input[0])
        if maker is None or maker.op_type != "Reshape" or maker.input[1] not in constants:
            raise GraphError(f"node '{node.name}' ({NVIDIA_OP_TYPE}) was not written by detrt: its sizes are not in the graph")
        return [int(side) for side in numpy_helper.to_array(constants[maker.input[1]])]

    value, shapes, _, places, shares = node.input
    _, _, heads, levels, points, _ = shape_of(places)
    behind = [n for n in producer.values() if n.op_type in ("Reshape", "Cast") and n.input[0] == node.output[0]]
    while behind and behind[0].op_type == "Cast":
        behind = [n for n in producer.values() if n.op_type in ("Reshape", "Cast") and n.input[0] == behind[0].output[0]]
    dim = shape_of(behind[0].output[0])[-1] // heads if behind else 0
    if dim < 1:
        raise GraphError(f"node '{node.name}' ({NVIDIA_OP_TYPE}) was not written by detrt: its sizes are not in the graph")
    if types.get(shapes) != TensorProto.INT64:
        shapes = b.op("Cast", shapes, to=TensorProto.INT64)
    places = b.reshape(places, 0, 0, heads, levels * points, 2)
    shares = b.reshape(shares, 0, 0, heads, levels * points)
    attributes = {"heads": heads, "head_dim": dim, "points_per_level": [points] * levels, "discrete": 0}
    return helper.make_node(
        OP_TYPE, [value, shapes, places, shares], [node.output[0]], f"{b.prefix}/sum", domain=DOMAIN, **attributes
    )


def cut(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Take the MSDeformAttn nodes out of a graph, in place: their inputs become outputs of it, their outputs inputs."""
    graph, nodes, kept = model.graph, [], []
    for node in graph.node:
        if (node.domain, node.op_type) == (DOMAIN, OP_TYPE):
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
        else:
            kept.append(node)
    ends = []
    for index, node in enumerate(nodes):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        channels = int(attributes["heads"]) * int(attributes["head_dim"])
        axes = [f"msda_{index}_batch", f"msda_{index}_queries", channels]
        graph.input.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, axes))
        for place, name in enumerate(node.input):
            end = f"{_CUT}_{index}_{place}"
            # An Identity, since one tensor may go to several nodes, or be an initializer.
            ends.append(helper.make_node("Identity", [name], [end], name=end))
            graph.output.append(helper.make_tensor_value_info(end, _INPUT_TYPES[place], None))
    del graph.node[:]
    graph.node.extend(kept + ends)
    return nodes


def rejoin(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Put nodes that `cut` took out back into their places, in place."""
    if not nodes:
        return
    graph = model.graph
    made = {node.output[0] for node in nodes}
    for values, gone in ((graph.input, lambda name: name in made), (graph.output, lambda name: name.startswith(_CUT))):
        kept = [value for value in values if not gone(value.name)]
        del values[:]
        values.extend(kept)
    source = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity" and node.output[0].startswith(_CUT)
    }
    rest = [node for node in graph.node if not (node.op_type == "Identity" and node.output[0] in source)]
    for index, node in enumerate(nodes):
        ends = [f"{_CUT}_{index}_{place}" for place in range(len(node.input))]
        del node.input[:]
        node.input.extend(source.get(end, end) for end in ends)
    ordered = _ordered([*rest, *nodes], {v.name for v in graph.input} | {t.name for t in graph.initializer})
    del graph.node[:]
    graph.node.extend(ordered)
    _import(model, DOMAIN)


def emit(model: onnx.ModelProto, how: str) -> int:
    """Turn MSDeformAttn nodes into what a plugin takes, in place; returns how many.

    "plugin": libdetrt_plugin.so, the node as it is with the plugin's version and namespace. "nvidia-plugin": TensorRT's
    MultiscaleDeformableAttnPlugin_TRT, version 2, whose levels must all have as many points.

    Raises:
        GraphError: another choice, or a node that NVIDIA's plugin cannot compute.
    """
    if how not in PLUGINS:
        raise GraphError(f"--msda must be one of {', '.join(PLUGINS)} for a plugin node; got {how!r}")
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        if (node.domain, node.op_type) != (DOMAIN, OP_TYPE):
            nodes.append(node)
            continue
        count += 1
        if how == "plugin":
            node.attribute.extend(
                [helper.make_attribute("plugin_version", "1"), helper.make_attribute("plugin_namespace", DOMAIN)]
            )
            nodes.append(node)
        else:
            builder = _nvidia(node, constants, f"{node.name or '/' + OP_TYPE}.{count}")
            nodes.extend(builder.nodes)
            graph.initializer.extend(builder.initializers)
    del graph.node[:]
    graph.node.extend(nodes)
    if count and how == "nvidia-plugin":
        kept = [entry for entry in model.opset_import if entry.domain != DOMAIN]
        del model.opset_import[:]
        model.opset_import.extend(kept)
        _import(model, NVIDIA_DOMAIN)
    return count


def _nvidia(node: onnx.NodeProto, constants: dict[str, TensorProto], prefix: str) -> GraphBuilder:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    points = [int(p) for p in attributes["points_per_level"]]
    heads, dim, levels = int(attributes["heads"]), int(attributes["head_dim"]), len(points)
    if attributes.get("discrete"):
        raise GraphError(
            f"node '{node.name}' reads nearest cells (discrete sampling), which NVIDIA's plugin cannot; "
            "choose --msda plugin or --msda gather"
        )
    if len(set(points)) != 1:
        raise GraphError(
            f"node '{node.name}' has {points} points in its levels; NVIDIA's plugin takes the same number in each; "
            "choose --msda plugin or --msda gather"
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
        starts = b.op("CumSum", areas, b.const(0, np.int64), exclusive=1)
    places = b.reshape(locations, 0, 0, heads, levels, points[0], 2)
    shares = b.reshape(weights, 0, 0, heads, levels, points[0])
    made = f"{prefix}_output"  # (batch, queries, heads, head_dim)
    b.nodes.append(
        helper.make_node(
            NVIDIA_OP_TYPE,
            [value, shapes, starts, places, shares],
            [made],
            name=prefix,
            domain=NVIDIA_DOMAIN,
            plugin_version="2",
            plugin_namespace="",
        )
    )
    b.op("Reshape", made, b.ints(0, 0, heads * dim), output=node.output[0])
    return b


def _import(model: onnx.ModelProto, domain: str) -> None:
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(domain, 1))


def _ordered(nodes: Sequence[onnx.NodeProto], known: set[str]) -> list[onnx.NodeProto]:
    """Nodes so that each comes after what it reads; otherwise in the order that they have."""
    made = {name for node in nodes for name in node.output}
    waiting, ordered, known = list(nodes), [], set(known) | {""}
    while waiting:
        later = []
        for node in waiting:
            inner = {name for a in node.attribute if a.HasField("g") for inside in a.g.node for name in inside.input}
            if all(name in known or name not in made for name in (*node.input, *inner)):
                ordered.append(node)
                known.update(node.output)
            else:
                later.append(node)
        if len(later) == len(waiting):
            raise GraphError(f"the graph has a circle at node '{waiting[0].name}'; this is a bug in detrt")
        waiting = later
    return ordered
