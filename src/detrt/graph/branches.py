"""Branches that a trained model does not need any more: parallel convolutions become one, and results that nothing reads go.

RepVGG blocks train a 3x3 and a 1x1 convolution side by side; their sum is one 3x3 convolution. The decoders of the RT-DETR line stack
the results of all layers and read the last one, so that the class heads of the other layers compute for nothing.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from .nodes import rename_values, replace_nodes
from .operators import kernel_margins
from .view import GraphView, attribute


def merge_convolutions(model: onnx.ModelProto) -> int:
    """Replace `Conv(x) + Conv(x)` by one Conv with the sum of both kernels, in place; the smaller kernel is padded with zeros.

    Both need the same strides, dilations and groups, paddings that centre the smaller kernel in the larger one, constant weights, and
    no reader but the Add. Returns the number of removed convolutions.
    """
    view = GraphView(model)
    removed: set[int] = set()
    for add in view.nodes:
        if add.op_type != "Add" or add.input[0] == add.input[1]:
            continue
        first, second = (view.producer.get(name) for name in add.input)
        if first is None or second is None or not (_is_branch(view, first) and _is_branch(view, second)):
            continue
        if first.input[0] != second.input[0] or _steps(first) != _steps(second):
            continue
        merged = _sum(view, first, second)
        if merged is None:
            continue
        weight, bias, pads = merged
        target = max((first, second), key=lambda node: view.index[node.output[0]])  # where both inputs are known
        names = (f"{add.output[0]}/weight", f"{add.output[0]}/bias")
        model.graph.initializer.extend(
            numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in zip(names, (weight, bias), strict=True)
        )
        kept = [entry for entry in target.attribute if entry.name not in ("pads", "kernel_shape", "auto_pad")]
        del target.attribute[:], target.input[1:]
        target.attribute.extend(kept)
        target.attribute.append(onnx.helper.make_attribute("pads", pads))
        target.attribute.append(onnx.helper.make_attribute("kernel_shape", weight.shape[2:]))
        target.input.extend(names)
        target.output[0] = add.output[0]
        removed |= {id(add), id(first if target is second else second)}
    if removed:
        replace_nodes(model, [node for node in view.nodes if id(node) not in removed])
    return len(removed) // 2


def _is_branch(view: GraphView, node: onnx.NodeProto) -> bool:
    """A convolution with constant weights that one node reads."""
    return (
        node.op_type == "Conv"
        and all(name in view.constants for name in node.input[1:] if name)
        and attribute(node, "auto_pad", b"NOTSET") in (b"NOTSET", b"")
        and len(view.readers.get(node.output[0], ())) == 1
        and node.output[0] not in view.outputs
    )


def _steps(conv: onnx.NodeProto) -> tuple[object, ...]:
    """Strides, dilations and groups, without defaults that are written out."""

    def of(name: str) -> tuple[int, ...]:
        values = tuple(attribute(conv, name) or ())  # type: ignore[arg-type]
        return () if all(value == 1 for value in values) else values

    return of("strides"), of("dilations"), attribute(conv, "group", 1)


def _sum(view: GraphView, first: onnx.NodeProto, second: onnx.NodeProto) -> tuple[np.ndarray, np.ndarray, list[int]] | None:
    """(weight, bias, pads) of the one convolution, or None where the kernels do not lie on each other."""
    rows = [(view.array(node.input[1]), node) for node in (first, second)]
    (wide, outer), (narrow, inner) = sorted(rows, key=lambda row: -row[0].size)  # type: ignore[union-attr]
    if wide is None or narrow is None or wide.shape[:2] != narrow.shape[:2] or wide.ndim != narrow.ndim:
        return None
    spatial = wide.ndim - 2
    dilations = list(attribute(first, "dilations") or [1] * spatial)  # type: ignore[call-overload]
    wide_pads, narrow_pads = _pads(outer, spatial), _pads(inner, spatial)
    margins = kernel_margins(wide.shape[2:], narrow.shape[2:], wide_pads, narrow_pads, dilations)
    if margins is None:
        return None
    # In FP64, because two roundings of a weight would be one more than a model that was trained so has.
    weight = wide.astype(np.float64) + np.pad(narrow.astype(np.float64), [(0, 0), (0, 0), *margins])
    bias = np.zeros(len(weight))
    for node in (first, second):
        if len(node.input) > 2 and node.input[2]:
            bias = bias + view.array(node.input[2])  # type: ignore[operator]
    return weight.astype(wide.dtype), bias.astype(wide.dtype), [side for sides in zip(*wide_pads, strict=True) for side in sides]


def _pads(conv: onnx.NodeProto, spatial: int) -> list[tuple[int, int]]:
    """(before, after) of each spatial axis; ONNX lists what is before all of them first."""
    pads = list(attribute(conv, "pads") or [0] * 2 * spatial)  # type: ignore[call-overload]
    return list(zip(pads[:spatial], pads[spatial:], strict=True))


def read_past_stacks(model: onnx.ModelProto) -> int:
    """Let `Gather(Concat(Unsqueeze(a), Unsqueeze(b), ...), index)` read the tensor that it selects, in place.

    Returns the number of removed Gathers. What only the stack read is dead afterwards (`drop_dead`).
    """
    view = GraphView(model)
    renamed: dict[str, str] = {}
    removed: set[int] = set()
    for gather in view.nodes:
        if gather.op_type != "Gather":
            continue
        stack, index = view.producer.get(gather.input[0]), view.array(gather.input[1])
        axis = attribute(gather, "axis", 0)
        if stack is None or stack.op_type != "Concat" or index is None or index.ndim or attribute(stack, "axis") != axis:
            continue
        parts = [view.producer.get(name) for name in stack.input]
        if not -len(parts) <= int(index) < len(parts) or not all(_adds_axis(view, part, axis) for part in parts):
            continue
        chosen, output = parts[int(index)].input[0], gather.output[0]  # type: ignore[union-attr]
        if output in view.outputs:  # keeps its name, so the tensor takes it
            if chosen not in view.producer or chosen in view.outputs or chosen in renamed:
                continue
            chosen, output = output, chosen
        renamed[output] = chosen
        removed.add(id(gather))
    if removed:
        replace_nodes(model, [node for node in view.nodes if id(node) not in removed])
        rename_values(model.graph, {name: _last(renamed, name) for name in renamed})
    return len(removed)


def _last(renamed: dict[str, str], name: str) -> str:
    while name in renamed:
        name = renamed[name]
    return name


def _adds_axis(view: GraphView, node: onnx.NodeProto | None, axis: object) -> bool:
    """Whether a node is an Unsqueeze of exactly this axis, which counts from the front."""
    if node is None or node.op_type != "Unsqueeze":
        return False
    axes = view.array(node.input[1]) if len(node.input) > 1 else np.asarray(attribute(node, "axes"))
    return axes is not None and axes.tolist() == [axis] and isinstance(axis, int) and axis >= 0
