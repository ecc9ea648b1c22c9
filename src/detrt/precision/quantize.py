"""Explicit Q/DQ pairs for INT8 and FP8, placed for detection transformers.

Symmetric, zero point 0; one scale for an activation, one a channel for weights. Scales are FP16, like the graph
around them: FP32 scales would make every DequantizeLinear, and all that follows it, FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..graph.clean import replace_nodes, set_opset
from ..graph.operators import ELEMENTWISE, MOVEMENT
from ..graph.view import ELEMENT_TYPE, GraphView, attribute
from ..spec import Precision
from .calibrate import round_fp8
from .rules import Rules

# Kernels of the tensor cores read channels in groups of so many.
CHANNEL_MULTIPLE = {Precision.INT8: 4, Precision.FP8: 16}
SCALE_CANDIDATES = 8  # scales that are tried for a channel of FP8 weights
# The smallest scale with all digits of FP16.
MIN_SCALE = 2.0**-14


@dataclass(slots=True)
class QuantPlan:
    """activations: node name -> tensor to quantize, by its name in the FP32 graph. left_out: node -> why not."""

    activations: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def plan_quantization(view: GraphView, rules: Rules, low: Precision) -> QuantPlan:
    """Choose the layers. Matmuls of two computed tensors (both of an attention) are never quantized.

    Left out are: what `rules` keep in FP32; layers whose result is an output, an order, an angle or a position
    (class and box heads, query selection, sampling offsets), with the layers that lead only to them; what
    deformable attention samples from or weighs with; stems of 3 channels and channels the kernels cannot group.
    """
    plan = QuantPlan()
    layers = [i for i, node in enumerate(view.nodes) if _is_layer(view, node)]
    reached = {i: _reached(view, rules, i) for i in layers}
    heads: set[int] = set()
    grown = True
    while grown:
        before = len(heads)
        for i in layers:
            found = reached[i]
            if i not in heads and found and all(t == "exact" or (t.isdecimal() and int(t) in heads) for t in found):
                heads.add(i)
        grown = len(heads) > before
    for i in layers:
        node = view.nodes[i]
        reason = _shape_reason(view, node, low)
        if i in rules.keep:
            reason = rules.keep[i]
        elif i in heads or "exact" in reached[i]:
            reason = "its result is an output, an order or a position"
        elif "sampled" in reached[i]:
            reason = "deformable attention samples from it"
        elif "softmax" in reached[i]:
            reason = "weights of deformable attention"
        if reason:
            plan.left_out[node.name] = reason
        else:
            plan.activations[node.name] = node.input[0]
    return plan


def last_gemms(view: GraphView, rules: Rules, counts: Mapping[str, int], share: float) -> dict[str, str]:
    """Layers whose result is an output, an order or a position -> why they stay in FP32, the ones with the least work first,
    for at most `share` (0..1) of all MACs.

    BF16 has eight digits: a logit of 4 in steps of 1/32, a box in steps of a pixel or more.
    """
    total, spent = sum(counts.values()), 0
    found = [n.name for i, n in enumerate(view.nodes) if _is_layer(view, n) and "exact" in _reached(view, rules, i)]
    chosen: dict[str, str] = {}
    for name in sorted(found, key=lambda n: counts.get(n, 0)):
        spent += counts.get(name, 0)
        if spent > share * total:
            break
        chosen[name] = "BF16 is too coarse for what an output, an order or a position is made of"
    return chosen


def _is_layer(view: GraphView, node: onnx.NodeProto) -> bool:
    return (
        node.op_type in ("Conv", "MatMul", "Gemm")
        and node.input[1] in view.constants
        and view.is_float(node.input[1])
        and node.input[0] not in view.constants
    )


def _shape_reason(view: GraphView, node: onnx.NodeProto, low: Precision) -> str:
    dims = list(view.constants[node.input[1]].dims)
    step = CHANNEL_MULTIPLE[low]
    if node.op_type == "Conv":
        if attribute(node, "group", 1) != 1:
            return "grouped convolution"
        if dims[1] < 4:
            return f"a stem of {dims[1]} channels"
        sides = dims[:2]
    elif len(dims) != 2:
        return "weights that are not one matrix"
    else:
        sides = dims
        if node.op_type == "Gemm" and attribute(node, "transA", 0):
            return "transposed input"
    return "" if all(side % step == 0 for side in sides) else f"channels {sides} are no multiples of {step}"


def _reached(view: GraphView, rules: Rules, start: int) -> set[str]:
    """Where a layer's result arrives, through activations and movement: "exact", "sampled", "softmax", "sum",
    "norm", or the index of the next layer."""
    found: set[str] = set()
    todo, seen = list(view.nodes[start].output), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in view.outputs:
            found.add("exact")
        for index, position in view.readers.get(name, ()):
            node = view.nodes[index]
            if index in rules.coordinates or node.op_type == "TopK":
                found.add("exact")
            elif node.op_type == "Softmax":
                found.add("softmax")
            elif node.op_type == "GridSample" or (
                node.op_type.startswith("Gather") and position == 0 and node.input[1] not in view.constants
            ):
                found.add("sampled")
            elif _is_layer(view, node):
                found.add(str(index))
            elif node.op_type in ("Add", "Sub") and not any(n in view.constants or n in seen for n in node.input if n != name):
                found.add("sum")
            elif node.op_type in ELEMENTWISE or node.op_type in MOVEMENT or node.op_type in ("Erf", "Gelu", "HardSigmoid"):
                todo += node.output
            else:
                found.add("norm")
    return found


def weight_scales(weight: NDArray[np.float32], axis: int, low: Precision) -> NDArray[np.float16]:
    """One FP16 scale for each channel along `axis`, rounded up so that no weight is clipped.

    For FP8, whose steps double with every power of two, the scale within a factor of two that rounds the channel best.
    """
    other = tuple(i for i in range(weight.ndim) if i != axis)
    best = _half_up(np.maximum(np.abs(weight).max(other) / low.max_value, MIN_SCALE))
    if low == Precision.INT8:
        return best
    shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
    errors = np.full(best.shape, np.inf)
    for scale in [_half_up(best.astype(np.float64) * 2.0 ** (step / SCALE_CANDIDATES)) for step in range(SCALE_CANDIDATES)]:
        units = scale.astype(np.float32).reshape(shape)
        found = ((rounded(weight / units, low) * units - weight) ** 2).sum(other)
        best, errors = np.where(found < errors, scale, best), np.minimum(found, errors)
    return best


def activation_scale(threshold: float, low: Precision) -> NDArray[np.float16]:
    """The FP16 scale that makes `threshold` the largest value of the type; rounded up."""
    return _half_up(np.maximum(threshold / low.max_value, MIN_SCALE))


def rounded(values: NDArray, low: Precision) -> NDArray[np.float32]:
    """Values in units of their scale, rounded and clipped to what the type has."""
    if low == Precision.INT8:
        return np.clip(np.rint(values), -127, 127).astype(np.float32)
    return (np.sign(values) * round_fp8(np.abs(values))).astype(np.float32)


def _half_up(values: NDArray) -> NDArray[np.float16]:
    rounded = np.asarray(values, np.float16)
    return np.where(rounded.astype(np.float64) < values, np.nextafter(rounded, np.float16(np.inf)), rounded)


def centred_threshold(threshold: float, centre: NDArray[np.float32]) -> float:
    """The threshold of a tensor from which a centre was subtracted: nothing more is clipped than before."""
    return threshold + float(np.abs(centre).max())


def channel_axis(node: onnx.NodeProto) -> int:
    """The axis of a quantized layer's input that holds its channels."""
    return 1 if node.op_type == "Conv" else -1


def insert_qdq(
    model: onnx.ModelProto,
    plan: QuantPlan,
    thresholds: dict[str, float],
    low: Precision,
    centres: Mapping[str, NDArray[np.float32]] | None = None,
) -> int:
    """Put the pairs of a plan into a typed FP16 graph, in place; returns the number of quantized layers.

    thresholds: tensor of the FP32 graph -> the |x| that becomes the largest value of the type.
    centres: node -> (inputs,) what is subtracted from its input channels first; its bias makes up for that.
    One pair serves all layers that read a tensor in the same way. Raises the opset to 19, the first with FP16 scales.
    """
    set_opset(model, 19)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    pairs: dict[tuple[str, tuple[int, ...]], str] = {}
    stored: dict[tuple[str, int], str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.name in plan.activations:
            name, limit = node.input[0], thresholds[plan.activations[node.name]]
            centre = (centres or {}).get(node.name)
            way = _padding(node) if centre is not None else ()
            if (name, way) not in pairs:
                pairs[name, way] = f"{name}/{low}" if centre is None else f"{name}/centred{len(pairs)}/{low}"
                source = name
                if centre is not None:
                    limit = centred_threshold(limit, centre)
                    source = f"{pairs[name, way]}/centred"
                    nodes += _centred(graph, node, name, source, centre)
                nodes += _activation_pair(graph, source, pairs[name, way], activation_scale(limit, low), low, node.name)
            if any(way):
                _without_padding(node)
            axis = 0 if node.op_type == "Conv" else 1 - int(bool(attribute(node, "transB", 0)))
            key = (node.input[1], axis)
            if key not in stored:
                stored[key] = f"{node.input[1]}/{low}"
                weight = numpy_helper.to_array(constants[node.input[1]]).astype(np.float32)
                nodes.append(_weight_pair(graph, weight, axis, node.input[1], stored[key], low, node.name))
            node.input[0], node.input[1] = pairs[name, way], stored[key]
        nodes.append(node)
    replace_nodes(model, nodes)
    used = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
    del graph.initializer[:]
    graph.initializer.extend(copies)
    del graph.value_info[:]
    return len(plan.activations)


def _padding(node: onnx.NodeProto) -> tuple[int, ...]:
    """(top, left, bottom, right) of a convolution; zeros of a product, so that its pairs differ from uncentred ones."""
    return tuple(attribute(node, "pads", [0] * 4)) if node.op_type == "Conv" else (0,) * 4


def _without_padding(node: onnx.NodeProto) -> None:
    kept = [entry for entry in node.attribute if entry.name != "pads"]
    del node.attribute[:]
    node.attribute.extend(kept)


def _centred(
    graph: onnx.GraphProto, node: onnx.NodeProto, name: str, target: str, centre: NDArray[np.float32]
) -> list[onnx.NodeProto]:
    """Subtract a centre. What a convolution pads with is zero before the subtraction, so the padding comes first."""
    nodes, pads = [], _padding(node)
    if any(pads):
        constant = f"{target}/pads"
        graph.initializer.append(numpy_helper.from_array(np.array([0, 0, *pads[:2], 0, 0, *pads[2:]], np.int64), constant))
        nodes.append(helper.make_node("Pad", [name, constant], [f"{target}/padded"], name=f"{node.name}/Pad"))
        name = f"{target}/padded"
    shape = [1, -1, 1, 1] if node.op_type == "Conv" else [-1]
    constant = f"{target}/centre"
    graph.initializer.append(numpy_helper.from_array(centre.astype(np.float16).reshape(shape), constant))
    return [*nodes, helper.make_node("Sub", [name, constant], [target], name=f"{node.name}/Centre")]


def _activation_pair(
    graph: onnx.GraphProto, name: str, target: str, scale: NDArray[np.float16], low: Precision, layer: str
) -> list[onnx.NodeProto]:
    names = (f"{target}/scale", f"{target}/zero", f"{target}/q")
    graph.initializer.append(numpy_helper.from_array(np.asarray(scale, np.float16), names[0]))
    graph.initializer.append(helper.make_tensor(names[1], ELEMENT_TYPE[low], [], b"\0", raw=True))
    return [
        helper.make_node("QuantizeLinear", [name, *names[:2]], [names[2]], name=f"{layer}/Quantize"),
        helper.make_node("DequantizeLinear", [names[2], *names[:2]], [target], name=f"{layer}/Dequantize"),
    ]


def _weight_pair(
    graph: onnx.GraphProto,
    weight: NDArray[np.float32],
    axis: int,
    name: str,
    target: str,
    low: Precision,
    layer: str,
) -> onnx.NodeProto:
    scale = weight_scales(weight, axis, low)
    shape = [-1 if i == axis else 1 for i in range(weight.ndim)]
    scaled = weight / scale.astype(np.float32).reshape(shape)
    if low == Precision.INT8:
        raw = rounded(scaled, low).astype(np.int8).tobytes()
    else:
        raw = fp8_bits(scaled).tobytes()
    names = (f"{target}/q", f"{target}/scale", f"{target}/zero")
    graph.initializer.append(helper.make_tensor(names[0], ELEMENT_TYPE[low], weight.shape, raw, raw=True))
    graph.initializer.append(numpy_helper.from_array(scale, names[1]))
    graph.initializer.append(helper.make_tensor(names[2], ELEMENT_TYPE[low], [len(scale)], bytes(len(scale)), raw=True))
    return helper.make_node("DequantizeLinear", list(names), [target], name=f"{layer}/Weight", axis=axis)


def fp8_bits(values: NDArray) -> NDArray[np.uint8]:
    """E4M3FN bit patterns of values of at most 448, rounded to nearest even; same shape."""
    size = round_fp8(np.abs(values).astype(np.float64))
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 1e-30))), -6.0)
    mantissa = np.rint(size / 2.0 ** (exponent - 3)).astype(np.int64)  # 8..15 normal, below 8 subnormal
    normal = mantissa >= 8
    bits = np.where(normal, ((exponent.astype(np.int64) + 7) << 3) + (mantissa - 8), mantissa)
    return (bits | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)
