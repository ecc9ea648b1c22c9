"""Probe copies of a graph: more outputs, and selections that are given instead of computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError
from .clean import drop_dead
from .view import FLOATS, GraphView

OWN = "own/"  # in a probe, the value that a given tensor would have had
_SHOWN = "probe/"  # a tensor as float32
_LIMIT = 2_000_000_000  # protobuf's


def probe(
    view: GraphView, names: Sequence[str], given: Mapping[str, NDArray] | None = None, *, cut: bool = False
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a graph that also returns `names`.

    given: tensor name -> its value. Of a TopK, the indices are given and the values follow from them.
    What the node would have computed itself is the tensor OWN + name, which may be asked for.
    cut: the model's own outputs are constants, so that a graph that does not run gives what it can.
    Returns the copy and the output name of each asked-for tensor; 16-bit floats come back as float32.

    Raises:
        GraphError: a graph of 2 GB and more, a name that is not in the graph, or a given value of
            another rank.
    """
    model = onnx.ModelProto()
    if view.model.ByteSize() >= _LIMIT:
        raise GraphError("graphs of 2 GB and more cannot be probed; compare a smaller model of the same family")
    model.CopyFrom(view.model)
    given = dict(given or {})
    extra: list[onnx.NodeProto] = []
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        wanted = [name for name in node.output if name in given]
        if wanted:
            extra = _give(node, wanted[0], given[wanted[0]], model)
            nodes.extend(extra)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    stale = set(given)
    kept = [v for v in model.graph.value_info if v.name not in stale]
    if len(kept) != len(model.graph.value_info):
        copies_of_info = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in kept]
        del model.graph.value_info[:]
        model.graph.value_info.extend(copies_of_info)
    if cut:
        _cut(model)
    shown = _show(model, view, names)
    if cut:
        drop_dead(model)
    return model, shown


def _cut(model: onnx.ModelProto) -> None:
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name in outputs:
                node.output[i] = OWN + name
    # Other nodes may read what was an output.
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name in outputs:
                node.input[i] = OWN + name
    for value in model.graph.output:
        kind = value.type.tensor_type.elem_type
        zero = helper.make_tensor("value", kind, [1], [0])
        model.graph.node.append(helper.make_node("Constant", [], [value.name], name=f"cut/{value.name}", value=zero))
        value.type.CopyFrom(helper.make_tensor_value_info(value.name, kind, None).type)


def _give(node: onnx.NodeProto, name: str, value: NDArray, model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Rename what a node computes and put the given value in its place; returns nodes to come after it."""
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
    if node.op_type != "TopK":
        node.output[0] = OWN + name
        return []
    values, indices = node.output[0], node.output[1]
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    node.output[0], node.output[1] = OWN + (values or f"{indices}/values"), OWN + indices
    if not values:
        return []
    return [helper.make_node("GatherElements", [node.input[0], indices], [values], name=f"{node.name}/given", axis=axis)]


def _show(model: onnx.ModelProto, view: GraphView, names: Sequence[str]) -> dict[str, str]:
    made = {name for node in model.graph.node for name in node.output}
    present = {value.name for value in model.graph.output}
    shown: dict[str, str] = {}
    for name in names:
        if name not in made:
            raise GraphError(f"the graph has no tensor '{name}'")
        kind = view.types.get(name.removeprefix(OWN), TensorProto.UNDEFINED)
        output = name
        if kind in FLOATS and kind != TensorProto.FLOAT:
            output, kind = _SHOWN + name, TensorProto.FLOAT
            model.graph.node.append(helper.make_node("Cast", [name], [output], name=output, to=kind))
        shown[name] = output
        if output not in present:
            present.add(output)
            model.graph.output.append(helper.make_tensor_value_info(output, kind, None))
    return shown
