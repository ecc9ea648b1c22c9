"""Explicit Q/DQ pairs for INT8 and FP8, placed for detection transformers.

Symmetric, zero point 0; activations and FP8 weights of matmuls are quantized per tensor, other weights per channel. Scales are FP16,
like the rest of the graph: FP32 scales would make every DequantizeLinear and its readers FP32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..graph.dequantize import CENTRE
from ..graph.nodes import drop_attribute, replace_nodes
from ..graph.operators import ELEMENTWISE, MOVEMENT, PLUGIN_NODES
from ..graph.opset import set_opset
from ..graph.unsigned import RESULT
from ..graph.view import ELEMENT_TYPE, GraphView, attribute
from ..spec import Precision
from .calibrate import fp8_exponent, largest_step, round_fp8
from .rules import Rules, producer_behind_reshapes

# Tensor core kernels need a multiple of so many channels.
CHANNEL_MULTIPLE = {Precision.INT8: 4, Precision.FP8: 16}
# TensorRT's INT8 formats hold so many channels together; others are padded (rf-detr 1.12, `_tensorrt/quantize.py`).
CHANNELS_TOGETHER = 32
# Smallest fraction of the MACs of a group of INT8 layers. It leaves the decoders of detectors with a ResNet or HGNetV2 in FP16.
MIN_STAGE = 0.02
PASSED = ELEMENTWISE | MOVEMENT | {"Erf", "Gelu", "HardSigmoid"}  # on the way from a layer to those that read its result
SCALE_CANDIDATES = 8  # of each scale of FP8 weights
# Smallest normal number of FP16.
MIN_SCALE = 2.0**-14


@dataclass(slots=True)
class QuantPlan:
    """activations: node name -> tensor to quantize, by its name in the FP32 graph. excluded: node -> why not.
    residuals: Add -> its input to quantize, as (position, tensor). results: layer -> its result, which is quantized too."""

    activations: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    residuals: dict[str, tuple[int, str]] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, None]:
        """The tensors that need a threshold, each once."""
        added = [tensor for _, tensor in self.residuals.values()]
        return dict.fromkeys([*self.activations.values(), *added, *self.results.values()])


def plan_quantization(view: GraphView, rules: Rules, low: Precision, *, fuses: bool) -> QuantPlan:
    """Choose the layers. Matmuls of two computed tensors (both of an attention) are never quantized.

    Excluded are: nodes that `rules` keep in FP32; layers whose result is an output, an order, an angle or a position (class and box
    heads, query selection, sampling offsets), with the layers that lead only to them; values and weights of deformable attention;
    first convolutions of 3 channels, and layers with a number of channels that the kernels do not support.

    fuses: for TensorRT, also the projections into and out of an attention are excluded. TensorRT 11 computes an INT8 output
    projection behind an FP16 attention wrongly, and INT8 projections around one are slower than FP16 (rf-detr 1.12,
    `_tensorrt/quantize.py`, measured with TensorRT 10.16 and 11.3).
    """
    plan = QuantPlan()
    layers = [i for i, node in enumerate(view.nodes) if _is_layer(view, node)]
    consumers = {i: _consumers(view, rules, i) for i in layers}
    heads: set[int] = set()
    changed = True
    while changed:
        before = len(heads)
        for i in layers:
            result = consumers[i]
            if i not in heads and result and all(t == "exact" or (t.isdecimal() and int(t) in heads) for t in result):
                heads.add(i)
        changed = len(heads) > before
    for i in layers:
        node = view.nodes[i]
        reason = _shape_reason(view, node, low)
        if i in rules.keep:
            reason = rules.keep[i]
        elif i in heads or "exact" in consumers[i]:
            reason = "its result is an output, an order or a position"
        elif "sampled" in consumers[i]:
            reason = "deformable attention samples from it"
        elif "softmax" in consumers[i]:
            reason = "weights of deformable attention"
        elif fuses and ("attention" in consumers[i] or _is_attention(view, node.input[0])):
            reason = "a projection of an attention, whose matmuls stay in 16 bits"
        if reason:
            plan.excluded[node.name] = reason
        else:
            plan.activations[node.name] = node.input[0]
    return plan


def conv_results(view: GraphView, plan: QuantPlan) -> dict[str, str]:
    """Convolution of a plan, or the ReLU behind it -> its result, unless quantized layers alone read that.

    ONNX Runtime has integer convolutions only between a pair of the input and one of the result, which may follow a ReLU.
    """
    found = {}
    for node in view.nodes:
        if node.op_type != "Conv" or node.name not in plan.activations:
            continue
        readers = view.consumers(node.output[0])
        if [reader.op_type for reader in readers] == ["Relu"]:
            node, readers = readers[0], view.consumers(readers[0].output[0])
        if not readers or any(reader.name not in plan.activations for reader in readers):
            found[node.name] = node.output[0]
    return found


def exclude_halves(view: GraphView, rules: Rules, plan: QuantPlan) -> None:
    """Exclude the first layers of MLPs whose second one is excluded, in place.

    An INT8 matmul with bias and GELU in front of an FP16 layer gives NaN in TensorRT 10.16 and 11.3 (rf-detr 1.12, as above).
    """
    matmuls = [i for i, node in enumerate(view.nodes) if node.op_type in ("MatMul", "Gemm") and _is_layer(view, node)]
    for i in reversed(matmuls):  # the last layer of several decides
        name = view.nodes[i].name
        seconds = [view.nodes[int(c)].name for c in _consumers(view, rules, i) if c.isdecimal() and int(c) in matmuls]
        if name in plan.activations and any(second not in plan.activations for second in seconds):
            del plan.activations[name]
            plan.excluded[name] = "the next layer of its MLP stays in 16 bits"


def stages(view: GraphView, plan: QuantPlan, counts: Mapping[str, int]) -> list[list[str]]:
    """The layers of a plan in groups, each to be quantized as a whole.

    Groups below `MIN_STAGE` of the MACs, those with most of their work in padded channels, and single matmuls, are excluded, in place.

    Between INT8 and FP16 layers TensorRT converts types, a pass over the whole tensor. A group are layers that read each other's
    results through activations, movement and residual additions. A convolution with a stride, a pooling, a resize, a normalization
    and an attention end it: a stage of a backbone is one group, and so is an MLP. A convolution and a matmul are never of one group:
    TensorRT compiles the matmul into a node of Myelin, and the two have different INT8 layouts. counts: node -> MACs, of the whole graph.
    """
    group = {name: [name] for name in plan.activations}
    convolutions = {node.name for node in view.nodes if node.op_type == "Conv"}
    for node in view.nodes:
        if node.name not in group:
            continue
        todo, seen = [node.output[0]], set()
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for reader in view.consumers(name):
                if reader.name in group:
                    one, other = group[node.name], group[reader.name]
                    alike = (node.name in convolutions) == (reader.name in convolutions)
                    if one is not other and alike and all(step == 1 for step in attribute(reader, "strides", [1])):
                        one += other
                        group.update(dict.fromkeys(other, one))
                elif reader.op_type in PASSED and reader.op_type != "MaxPool":
                    todo += reader.output
    padded = {node.name for node in view.nodes if node.name in group and _is_padded(view, node)}
    total, result = sum(counts.values()), []
    for one in {id(one): one for one in group.values()}.values():
        work = sum(counts.get(name, 0) for name in one)
        if work < MIN_STAGE * total:
            reason = f"its stage has less than {MIN_STAGE:.0%} of the work, which conversions around it would cost"
        elif len(one) == 1 and one[0] not in convolutions:
            reason = "a matmul on its own: its input and its result would each be converted"
        elif sum(counts.get(name, 0) for name in one if name in padded) > work / 2:
            reason = f"most input channels of its stage are no multiple of {CHANNELS_TOGETHER}"
        else:
            result.append(one)
            continue
        for name in one:
            del plan.activations[name]
            plan.excluded[name] = reason
    return result


def residual_inputs(view: GraphView, rules: Rules, plan: QuantPlan) -> dict[str, tuple[int, str]]:
    """Add -> its input to quantize, as (position, tensor), where the other one is the result of a quantized convolution.

    TensorRT and OpenVINO add inside the kernel of that convolution, and pass INT8 on, only where what is added is INT8 too
    (TensorRT's developer guide, "Q/DQ placement recommendations").
    """
    found: dict[str, tuple[int, str]] = {}
    for i, node in enumerate(view.nodes):
        if node.op_type != "Add" or i in rules.keep or not all(view.depth.get(name) for name in node.input):
            continue
        fused = [
            one is not None and one.op_type == "Conv" and one.name in plan.activations and view.only_reader(name) is not None
            for name, one in zip(node.input, map(view.producer.get, node.input), strict=True)
        ]
        if any(fused):
            position = 0 if fused == [False, True] else 1
            found[node.name] = (position, node.input[position])
    return found


def output_layers(view: GraphView, rules: Rules, counts: Mapping[str, int], fraction: float) -> dict[str, str]:
    """Layers whose result is an output, an order or a position -> why they stay in FP32.

    BF16 has eight significant bits: a logit of 4 has steps of 1/32, a box coordinate steps of a pixel or more. Layers with the least
    work come first, up to `fraction` (0..1) of all MACs.
    """
    total, work = sum(counts.values()), 0
    result = [n.name for i, n in enumerate(view.nodes) if _is_layer(view, n) and "exact" in _consumers(view, rules, i)]
    chosen: dict[str, str] = {}
    for name in sorted(result, key=lambda n: counts.get(n, 0)):
        work += counts.get(name, 0)
        if work > fraction * total:
            break
        chosen[name] = "BF16 is too coarse for an output, an order or a position"
    return chosen


def _is_layer(view: GraphView, node: onnx.NodeProto) -> bool:
    return (
        node.op_type in ("Conv", "MatMul", "Gemm")
        and node.input[1] in view.constants
        and view.is_float(node.input[1])
        and node.input[0] not in view.constants
    )


def _is_matmul_of_two(view: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a matmul multiplies two computed tensors, as both of an attention do."""
    return node.op_type == "MatMul" and not any(name in view.constants for name in node.input)


def _is_attention(view: GraphView, tensor: str) -> bool:
    """Whether a tensor is the result of an attention, which the output projection reads."""
    producer = producer_behind_reshapes(view, tensor)
    if producer is None:
        return False
    if producer.op_type == "Add":  # the corners or levels of deformable attention
        return all(_is_attention(view, name) for name in producer.input)
    return _is_matmul_of_two(view, producer) or producer.op_type == "ReduceSum" or producer.op_type in PLUGIN_NODES


def _shape_reason(view: GraphView, node: onnx.NodeProto, low: Precision) -> str:
    dims = list(view.constants[node.input[1]].dims)
    step = CHANNEL_MULTIPLE[low]
    if node.op_type == "Conv":
        if attribute(node, "group", 1) != 1:
            return "grouped convolution"
        if len(dims) != 4:
            return "a convolution that is not over height and width"
        if dims[1] < 4:
            return f"a first convolution of {dims[1]} channels"
        sides = dims[:2]
    elif len(dims) != 2:
        return "weights that are not one matrix"
    else:
        sides = dims
        if node.op_type == "Gemm" and (attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0):
            return "transposed or scaled input"
    return "" if all(side % step == 0 for side in sides) else f"channels {sides} are not multiples of {step}"


def _is_padded(view: GraphView, node: onnx.NodeProto) -> bool:
    """Whether TensorRT pads the input channels of a layer for INT8."""
    dims = view.constants[node.input[1]].dims
    return bool(dims[int(node.op_type == "Conv" or attribute(node, "transB", 0))] % CHANNELS_TOGETHER)


def _consumers(view: GraphView, rules: Rules, start: int) -> set[str]:
    """The consumers of a layer's result, through activations and movement: "exact", "sampled", "softmax", "attention", "sum",
    "norm", or the index of the next layer."""
    result: set[str] = set()
    todo, seen = list(view.nodes[start].output), set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in view.outputs:
            result.add("exact")
        for index, position in view.readers.get(name, ()):
            node = view.nodes[index]
            if index in rules.coordinates or node.op_type == "TopK":
                result.add("exact")
            elif node.op_type == "Softmax":
                result.add("softmax")
            elif node.op_type == "GridSample" or (
                node.op_type.startswith("Gather") and position == 0 and node.input[1] not in view.constants
            ):
                result.add("sampled")
            elif _is_layer(view, node):
                result.add(str(index))
            elif _is_matmul_of_two(view, node):
                result.add("attention")
            elif node.op_type in ("Add", "Sub") and not any(n in view.constants or n in seen for n in node.input if n != name):
                result.add("sum")
            elif node.op_type in PASSED:
                todo += node.output
            else:
                result.add("norm")
    return result


def scale_axis(node: onnx.NodeProto, low: Precision) -> int | None:
    """Axis of the channels that each have a scale in the weight of a layer; None: one scale.

    TensorRT-RTX 1.6.1 writes sums of FP8 values of a matmul with scales of channels in FP16, which ends at 65504, and scales them in
    the next kernel; one scale it multiplies by in FP32. Of convolutions it is right with scales of channels, which write FP32, and
    wrong with one scale (docs/results/tensorrt-rtx-graphs.md). The steps of FP8 double with every power of two: small channels do not need
    a scale of their own.
    """
    if node.op_type == "Conv":
        return 0
    return None if low == Precision.FP8 else 1 - int(bool(attribute(node, "transB", 0)))


def weight_scales(weight: NDArray[np.float32], axis: int | None, low: Precision) -> NDArray[np.float16]:
    """FP16 scales, one for each channel along `axis` or, without one, the scale of all, (); rounded up so that no weight is clipped.

    For FP8, whose steps double with every power of two, the scale within a factor of two with the smallest rounding error.
    """
    other = tuple(i for i in range(weight.ndim) if i != axis)
    best = _round_up(np.maximum(np.abs(weight).max(other) / low.max_value, MIN_SCALE))
    if low == Precision.INT8:
        return best
    errors = np.full(best.shape, np.inf)
    for scale in [_round_up(best.astype(np.float64) * 2.0 ** (step / SCALE_CANDIDATES)) for step in range(SCALE_CANDIDATES)]:
        divisors = _along(scale, axis, weight.ndim)
        result = ((round_to_precision(weight / divisors, low) * divisors - weight) ** 2).sum(other)
        best, errors = np.where(result < errors, scale, best), np.minimum(result, errors)
    return best


def _along(scale: NDArray, axis: int | None, dimensions: int) -> NDArray[np.float32]:
    """FP32 scales in a shape that divides a weight of `dimensions` axes."""
    return scale.astype(np.float32).reshape([-1 if i == axis else 1 for i in range(dimensions)])


def activation_scale(threshold: float, low: Precision, *, positive: bool = False) -> NDArray[np.float16]:
    """The FP16 scale that maps `threshold` to the largest value of the type; rounded up. positive: of unsigned INT8."""
    return _round_up(np.maximum(threshold / largest_step(low, positive), MIN_SCALE))


def round_to_precision(values: NDArray, low: Precision, *, positive: bool = False) -> NDArray[np.float32]:
    """Values in units of their scale, rounded and clipped to the values of the type. positive: of unsigned INT8."""
    if positive or low == Precision.INT8:
        largest = largest_step(low, positive)
        return np.clip(np.rint(values), 0 if positive else -largest, largest).astype(np.float32)
    return (np.sign(values) * round_fp8(np.abs(values))).astype(np.float32)


def _round_up(values: NDArray) -> NDArray[np.float16]:
    rounded = np.asarray(values, np.float16)
    return np.where(rounded.astype(np.float64) < values, np.nextafter(rounded, np.float16(np.inf)), rounded)


def centred_threshold(threshold: float, centre: NDArray[np.float32]) -> float:
    """The threshold of a tensor after subtracting a centre: clips no more values than before."""
    return threshold + float(np.abs(centre).max())


def channel_axis(node: onnx.NodeProto) -> int:
    """The channel axis of the input of a quantized layer."""
    return 1 if node.op_type == "Conv" else -1


def weight_rows(node: onnx.NodeProto, weight: NDArray) -> NDArray:
    """The weight of a layer as (channels, inputs)."""
    if node.op_type == "Conv":
        return weight.reshape(len(weight), -1)
    return weight if attribute(node, "transB", 0) else weight.T


def insert_qdq(
    model: onnx.ModelProto,
    plan: QuantPlan,
    thresholds: dict[str, float],
    low: Precision,
    centres: Mapping[str, NDArray[np.float32]] | None = None,
    *,
    weights: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float16]]] | None = None,
    base: Precision = Precision.FP16,
    positive: Collection[str] = (),
) -> int:
    """Insert the pairs of a plan into a graph of the type `base`, in place; returns the number of quantized layers.

    thresholds: tensor of the FP32 graph -> the |x| that maps to the largest value of the type.
    centres: node -> (inputs,) subtracted from its input channels first; its bias compensates for that.
    weights: node -> its rounded weight, (channels, inputs), and scales; others are rounded to their nearest values.
    base: FP16, or FP32. positive: tensors of the FP32 graph that are stored unsigned.
    Layers that read a tensor in the same way share one pair. For FP16, raises the opset to 19, the first with FP16 scales.
    """
    if base == Precision.FP16:
        set_opset(model, 19)
    kind = np.dtype(base.dtype)
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    pairs: dict[tuple[str, tuple[int, ...]], str] = {}
    weights_done: dict[tuple[str, int | None, str], str] = {}
    nodes: list[onnx.NodeProto] = []

    def add_pair(source: str, target: str, tensor: str, limit: float, label: str) -> None:
        unsigned = tensor in positive
        scale = activation_scale(limit, low, positive=unsigned).astype(kind)
        stored = TensorProto.UINT8 if unsigned else ELEMENT_TYPE[low]
        nodes.extend(_activation_pair(graph, source, target, scale, stored, label))

    for node in graph.node:
        if node.name in plan.residuals:
            position, tensor = plan.residuals[node.name]
            name = node.input[position]
            if (name, ()) not in pairs:
                pairs[name, ()] = f"{name}/{low}"
                add_pair(name, pairs[name, ()], tensor, thresholds[tensor], node.name)
            node.input[position] = pairs[name, ()]
        if node.name in plan.activations:
            name, limit = node.input[0], thresholds[plan.activations[node.name]]
            centre = (centres or {}).get(node.name)
            pads = _padding(node) if centre is not None else ()
            if (name, pads) not in pairs:
                pairs[name, pads] = f"{name}/{low}" if centre is None else f"{name}/centred{len(pairs)}/{low}"
                source = name
                if centre is not None:
                    limit = centred_threshold(limit, centre)
                    source = f"{pairs[name, pads]}/centred"
                    nodes += _subtract_centre(graph, node, name, source, centre)
                add_pair(source, pairs[name, pads], plan.activations[node.name], limit, node.name)
            if any(pads):
                drop_attribute(node, "pads")
            axis = scale_axis(node, low)
            given = (weights or {}).get(node.name)
            key = (node.input[1], axis, node.name if given else "")
            if key not in weights_done:
                weights_done[key] = f"{node.name if given else node.input[1]}/{'weight/' if given else ''}{low}"
                weight = numpy_helper.to_array(constants[node.input[1]]).astype(np.float32)
                weight, scale = (
                    (_from_rows(node, given[0], weight.shape), given[1]) if given else (weight, weight_scales(weight, axis, low))
                )
                nodes.append(_weight_pair(graph, weight, scale.astype(kind), axis, weights_done[key], low, node.name))
            node.input[0], node.input[1] = pairs[name, pads], weights_done[key]
        nodes.append(node)
        if node.name in plan.results:
            name, tensor = node.output[0], plan.results[node.name]
            node.output[0] = f"{name}/exact"
            add_pair(node.output[0], name, tensor, thresholds[tensor], node.name + RESULT)
            pairs[name, ()] = name  # those that read it need no other pair
    replace_nodes(model, nodes)
    names_read = {name for node in graph.node for name in node.input}
    remaining = [tensor for tensor in graph.initializer if tensor.name in names_read]
    copies = [TensorProto.FromString(tensor.SerializeToString()) for tensor in remaining]
    del graph.initializer[:]
    graph.initializer.extend(copies)
    del graph.value_info[:]
    return len(plan.activations)


def _from_rows(node: onnx.NodeProto, rows: NDArray, shape: tuple[int, ...]) -> NDArray:
    """The weight of a layer from its `weight_rows`."""
    return rows.reshape(shape) if node.op_type == "Conv" else weight_rows(node, rows)


def _padding(node: onnx.NodeProto) -> tuple[int, ...]:
    """(top, left, bottom, right) of a convolution; zeros for a matmul, so that its pairs differ from uncentred ones."""
    return tuple(attribute(node, "pads", [0] * 4)) if node.op_type == "Conv" else (0,) * 4


def _subtract_centre(
    graph: onnx.GraphProto, node: onnx.NodeProto, name: str, target: str, centre: NDArray[np.float32]
) -> list[onnx.NodeProto]:
    """Subtract a centre. A convolution pads its input with zeros, so that the padding must come before the subtraction."""
    nodes, pads = [], _padding(node)
    if any(pads):
        constant = f"{target}/pads"
        graph.initializer.append(numpy_helper.from_array(np.array([0, 0, *pads[:2], 0, 0, *pads[2:]], np.int64), constant))
        nodes.append(helper.make_node("Pad", [name, constant], [f"{target}/padded"], name=f"{node.name}/Pad"))
        name = f"{target}/padded"
    shape = [1, -1, 1, 1] if node.op_type == "Conv" else [-1]
    constant = f"{target}/centre"
    graph.initializer.append(numpy_helper.from_array(centre.astype(np.float16).reshape(shape), constant))
    return [*nodes, helper.make_node("Sub", [name, constant], [target], name=f"{node.name}{CENTRE}")]


def _activation_pair(
    graph: onnx.GraphProto, name: str, target: str, scale: NDArray, stored: int, layer: str
) -> list[onnx.NodeProto]:
    names = (f"{target}/scale", f"{target}/zero", f"{target}/q")
    graph.initializer.append(numpy_helper.from_array(scale, names[0]))
    graph.initializer.append(helper.make_tensor(names[1], stored, [], b"\0", raw=True))
    return [
        helper.make_node("QuantizeLinear", [name, *names[:2]], [names[2]], name=f"{layer}/Quantize"),
        helper.make_node("DequantizeLinear", [names[2], *names[:2]], [target], name=f"{layer}/Dequantize"),
    ]


def _weight_pair(
    graph: onnx.GraphProto,
    weight: NDArray[np.float32],
    scale: NDArray,
    axis: int | None,
    target: str,
    low: Precision,
    layer: str,
) -> onnx.NodeProto:
    scaled = weight / _along(scale, axis, weight.ndim)
    if low == Precision.INT8:
        raw = round_to_precision(scaled, low).astype(np.int8).tobytes()
    else:
        raw = fp8_bits(scaled).tobytes()
    names = (f"{target}/q", f"{target}/scale", f"{target}/zero")
    graph.initializer.append(helper.make_tensor(names[0], ELEMENT_TYPE[low], weight.shape, raw, raw=True))
    graph.initializer.append(numpy_helper.from_array(scale, names[1]))
    graph.initializer.append(helper.make_tensor(names[2], ELEMENT_TYPE[low], scale.shape, bytes(scale.size), raw=True))
    channels = {"axis": axis} if scale.ndim else {}
    return helper.make_node("DequantizeLinear", list(names), [target], name=f"{layer}/Weight", **channels)


def fp8_bits(values: NDArray) -> NDArray[np.uint8]:
    """E4M3FN bit patterns of values of at most 448, rounded to nearest even; same shape."""
    size = round_fp8(np.abs(values).astype(np.float64))
    exponent = fp8_exponent(size)
    mantissa = np.rint(size / 2.0 ** (exponent - 3)).astype(np.int64)  # 8..15 normal, below 8 subnormal
    normal = mantissa >= 8
    bits = np.where(normal, ((exponent.astype(np.int64) + 7) << 3) + (mantissa - 8), mantissa)
    return (bits | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint8)
