"""Probe copies of a graph: extra outputs, and tensors that are forced to given values, such as the indices of a TopK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError
from .clean import drop_dead
from .io import weight_bytes
from .nodes import replace_nodes
from .view import FLOATS, GraphView

COMPUTED = "own/"  # prefix of the computed value of a forced tensor
_AS_FLOAT = "probe/"  # prefix of a tensor cast to float32
MAX_PROBED_BYTES = 2_000_000_000  # of protobuf


def probe(
    view: GraphView, names: Sequence[str], forced: Mapping[str, NDArray | None] | None = None, *, without_outputs: bool = False
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a graph that also returns `names`.

    Args:
        view: the graph.
        names: tensors to return.
        forced: tensor name -> its value, or None: it becomes an input, of the type that `value_info` has. Of a TopK, the indices are forced, and its values are gathered
            with them. The value that the node computes is the tensor COMPUTED + name, which can be returned as well.
        without_outputs: replace the outputs of the model by constants, so that the part before a faulty node runs.

    Returns:
        The copy, and the output name of each tensor of `names`; 16-bit floats are returned as float32.

    Raises:
        GraphError: a graph of 2 GB or more, or a name that is not in the graph.
    """
    model = onnx.ModelProto()
    if weight_bytes(view.model) >= MAX_PROBED_BYTES:
        raise GraphError("graphs of 2 GB and more cannot be probed; compare a smaller model of the same family")
    model.CopyFrom(view.model)
    forced = dict(forced or {})
    replacements: list[onnx.NodeProto] = []
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        forced_outputs = [name for name in node.output if name in forced]
        if forced_outputs:
            replacements = _force(node, forced_outputs[0], forced[forced_outputs[0]], model)
            nodes.extend(replacements)
    replace_nodes(model, nodes)
    forced_names = set(forced)
    remaining = [v for v in model.graph.value_info if v.name not in forced_names]
    if len(remaining) != len(model.graph.value_info):
        copies_of_info = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in remaining]
        del model.graph.value_info[:]
        model.graph.value_info.extend(copies_of_info)
    if without_outputs:
        _replace_outputs(model)
    outputs = _add_outputs(model, view, names)
    if without_outputs:
        drop_dead(model)
    return model, outputs


def _replace_outputs(model: onnx.ModelProto) -> None:
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name in outputs:
                node.output[i] = COMPUTED + name
    # Other nodes may read an output.
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name in outputs:
                node.input[i] = COMPUTED + name
    for value in model.graph.output:
        kind = value.type.tensor_type.elem_type
        zero = helper.make_tensor("value", kind, [1], [0])
        model.graph.node.append(helper.make_node("Constant", [], [value.name], name=f"cut/{value.name}", value=zero))
        value.type.CopyFrom(helper.make_tensor_value_info(value.name, kind, None).type)


def _force(node: onnx.NodeProto, name: str, value: NDArray | None, model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Rename the output of a node and put the forced value in its place; returns nodes to insert after it.

    value: None: an input; `value_info` has its type.
    """
    if value is None:
        model.graph.input.append(next(one for one in model.graph.value_info if one.name == name))
    else:
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
    if node.op_type != "TopK":
        node.output[0] = COMPUTED + name
        return []
    values, indices = node.output[0], node.output[1]
    axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
    node.output[0], node.output[1] = COMPUTED + (values or f"{indices}/values"), COMPUTED + indices
    if not values:
        return []
    return [helper.make_node("GatherElements", [node.input[0], indices], [values], name=f"{node.name}/given", axis=axis)]


def _add_outputs(model: onnx.ModelProto, view: GraphView, names: Sequence[str]) -> dict[str, str]:
    produced = {name for node in model.graph.node for name in node.output}
    present = {value.name for value in model.graph.output}
    outputs: dict[str, str] = {}
    for name in names:
        if name not in produced:
            raise GraphError(f"the graph has no tensor '{name}'")
        kind = view.types.get(name.removeprefix(COMPUTED), TensorProto.UNDEFINED)
        output = name
        if kind in FLOATS and kind != TensorProto.FLOAT:
            output, kind = _AS_FLOAT + name, TensorProto.FLOAT
            model.graph.node.append(helper.make_node("Cast", [name], [output], name=output, to=kind))
        outputs[name] = output
        if output not in present:
            present.add(output)
            model.graph.output.append(helper.make_tensor_value_info(output, kind, None))
    return outputs
