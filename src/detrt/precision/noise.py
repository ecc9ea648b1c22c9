"""Quantization noise of each layer, and the bias that quantization adds to its channels.

Both come from one pass of the FP32 graph over the calibration images. Every layer is computed twice on a seeded sample of its
input, exact and quantized, so that the cost does not grow with the size of the images.

 - The offset is the mean error of each output channel; subtracting it from the bias costs nothing at run time (bias correction:
   Nagel et al., arXiv:1906.04721, section 4.2).
 - The noise is the variance of the error over that of the result. It decides which layers stay in 16 bits.
 - FP8 has a relative error, so that after a ReLU the rounding error is as large as the mean. The mean of each channel is therefore
   subtracted before the rounding if this reduces the noise, and its product with the weights, a constant, is added to the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from ..data.images import ImageSource
from ..graph.view import GraphView, attribute
from ..spec import ModelSpec, Precision
from ..system import CountProgress
from .calibrate import run_tensors
from .quantize import QuantPlan, activation_scale, centred_threshold, round_to_precision, scale_axis, weight_scales

SAMPLES = 192  # positions of an image at which a layer is computed
MAX_CENTRED_NOISE = 0.8  # centring costs a subtraction: it must leave at most this fraction of the noise
NOISY_REASON = "most sensitive to 8 bits for its fraction of the work"


@dataclass(frozen=True, slots=True)
class LayerNoise:
    """noise: variance of the error over the variance of the result. offset: (channels,) mean error, to be subtracted from the
    bias. centre: (inputs,) subtracted from each input channel before rounding, or None; the offset then includes its product with
    the weights."""

    noise: float
    offset: NDArray[np.float32]
    centre: NDArray[np.float32] | None = None


@dataclass(slots=True)
class _Layer:
    node: onnx.NodeProto
    weight: NDArray[np.float32]  # (channels, inputs)
    low: NDArray[np.float32]  # the same, rounded
    kernel: tuple[int, ...]  # of a convolution, else empty
    sums: NDArray[np.float64]  # (6, channels): result, result^2, error, error^2, and the error and its square if centred
    centre: NDArray[np.float32] | None = None  # (inputs,)
    count: int = 0


def measure(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    plan: QuantPlan,
    thresholds: Mapping[str, float],
    low: Precision,
    progress: CountProgress | None = None,
    means: Mapping[str, NDArray[np.float32]] | None = None,
    positive: Collection[str] = (),
    sizes: Mapping[str, int] | None = None,
) -> dict[str, LayerNoise]:
    """Node name -> noise and offset, for the layers of a plan.

    thresholds: see `insert_qdq`. means: tensor -> (channels,) mean that a layer with a bias may subtract from its input.
    positive: tensors that are stored unsigned. sizes: see `run_tensors`.
    """
    view = GraphView.typed(model)
    by_name = {node.name: node for node in view.nodes}
    layers = {name: _layer(view, by_name[name], low) for name in plan.activations}
    for name, tensor in plan.activations.items():
        if means and tensor in means and _bias_of(view, by_name[name], len(layers[name].weight)) is not None:
            layers[name].centre = means[tensor].astype(np.float16).astype(np.float32)  # as stored in the graph
    readers: dict[str, list[str]] = {}
    for name, tensor in plan.activations.items():
        readers.setdefault(tensor, []).append(name)
    generator = np.random.default_rng(0)

    def visit(tensor: str, array: NDArray[np.float32]) -> None:
        unsigned = tensor in positive
        scale = float(activation_scale(thresholds[tensor], low, positive=unsigned))
        for name in readers[tensor]:
            layer = layers[name]
            exact = _sample(layer, np.asarray(array, np.float32), generator)
            result = exact @ layer.weight.T
            error = round_to_precision(exact / scale, low, positive=unsigned) * scale @ layer.low.T - result
            layer.sums[:4] += [result.sum(0), (result**2).sum(0), error.sum(0), (error**2).sum(0)]
            layer.count += len(exact)
            if layer.centre is not None:
                centred = exact - np.repeat(layer.centre, exact.shape[1] // len(layer.centre))
                step = float(activation_scale(centred_threshold(thresholds[tensor], layer.centre), low))
                error = round_to_precision(centred / step, low) * step @ layer.low.T - result
                layer.sums[4:] += [error.sum(0), (error**2).sum(0)]

    run_tensors(model, spec, images, sorted(readers), visit, progress, sizes)
    return {name: _result(layer) for name, layer in layers.items() if layer.count}


def _layer(view: GraphView, node: onnx.NodeProto, low: Precision) -> _Layer:
    weight = numpy_helper.to_array(view.constants[node.input[1]]).astype(np.float32)
    kernel = weight.shape[2:] if node.op_type == "Conv" else ()
    if node.op_type == "Conv":
        weight = weight.reshape(len(weight), -1)
    elif not attribute(node, "transB", 0):
        weight = weight.T
    axis = None if scale_axis(node, low) is None else 0  # outputs come first here
    scale = weight_scales(weight, axis, low).astype(np.float32).reshape(-1, 1)
    return _Layer(node, weight, round_to_precision(weight / scale, low) * scale, kernel, np.zeros((6, len(weight))))


def _sample(layer: _Layer, x: NDArray[np.float32], generator: np.random.Generator) -> NDArray[np.float32]:
    """Input patches of a layer at sampled positions: (positions, inputs)."""

    def choose(count: int) -> NDArray[np.int64]:
        return generator.choice(count, SAMPLES, replace=False) if count > SAMPLES else np.arange(count)

    if not layer.kernel:
        x = x.reshape(-1, x.shape[-1])
        return x[choose(len(x))]
    node, (tall, wide) = layer.node, layer.kernel
    strides, steps = attribute(node, "strides", [1, 1]), attribute(node, "dilations", [1, 1])
    top, left, bottom, right = attribute(node, "pads", [0, 0, 0, 0])
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    rows = (x.shape[2] - steps[0] * (tall - 1) - 1) // strides[0] + 1
    columns = (x.shape[3] - steps[1] * (wide - 1) - 1) // strides[1] + 1
    image, remainder = np.divmod(choose(len(x) * rows * columns), rows * columns)
    row, column = np.divmod(remainder, columns)
    down = row[:, None] * strides[0] + np.arange(tall) * steps[0]  # (positions, tall)
    along = column[:, None] * strides[1] + np.arange(wide) * steps[1]
    patches = x[image[:, None, None], :, down[:, :, None], along[:, None, :]]  # (positions, tall, wide, channels)
    return patches.transpose(0, 3, 1, 2).reshape(len(image), -1)


def _result(layer: _Layer) -> LayerNoise:
    mean, square, error, error_square, centred_error, centred_error_square = layer.sums / layer.count
    signal = float((square - mean**2).sum())
    noise = float((error_square - error**2).sum())
    centred_noise = float((centred_error_square - centred_error**2).sum())
    if layer.centre is not None and centred_noise < MAX_CENTRED_NOISE * noise:
        return LayerNoise(centred_noise / signal if signal > 0 else np.inf, centred_error.astype(np.float32), layer.centre)
    return LayerNoise(noise / signal if signal > 0 else np.inf, error.astype(np.float32))


def exclude_noisy(
    plan: QuantPlan,
    noise: Mapping[str, LayerNoise],
    counts: Mapping[str, int],
    fraction: float,
    groups: Sequence[Sequence[str]],
) -> None:
    """Exclude the noisiest groups of layers, relative to their work, from a plan, in place, down to `fraction` of all work.

    counts: node -> MACs of every matmul and convolution of the graph. fraction: 0..1; 1 excludes nothing. groups: the layers of the
    plan, those of a group excluded together; a group with a layer without `noise` stays.
    """
    total = sum(counts.values())
    work = [sum(counts.get(name, 0) for name in group) / total if total else 0.0 for group in groups]
    left = sum(work)
    known = [i for i, group in enumerate(groups) if all(name in noise for name in group)]
    # 1e-4 prevents that layers with hardly any work are ranked first.
    for i in sorted(known, key=lambda i: -sum(noise[name].noise for name in groups[i]) / (work[i] + 1e-4)):
        if left - work[i] >= fraction:
            left -= work[i]
            for name in groups[i]:
                del plan.activations[name]
                plan.excluded[name] = NOISY_REASON


def correct_biases(model: onnx.ModelProto, plan: QuantPlan, noise: Mapping[str, LayerNoise]) -> int:
    """Subtract the offsets from the biases of an FP32 graph, in place; returns the number of corrected layers.

    A layer without a bias (MatMul without an Add of a constant) is not corrected.
    """
    view = GraphView.typed(model)
    corrected = 0
    for node in model.graph.node:
        if node.name not in plan.activations or node.name not in noise:
            continue
        offset = noise[node.name].offset
        location = _bias_of(view, node, len(offset))
        if location is None:
            continue
        owner, position = location
        bias_name = owner.input[position] if position < len(owner.input) else ""
        old = numpy_helper.to_array(view.constants[bias_name]) if bias_name else np.zeros(len(offset), np.float32)
        name = f"{node.name}/corrected_bias"
        model.graph.initializer.append(numpy_helper.from_array((old - offset).astype(np.float32), name))
        if position < len(owner.input):
            owner.input[position] = name
        else:
            owner.input.append(name)
        corrected += 1
    return corrected


def _bias_of(view: GraphView, node: onnx.NodeProto, channels: int) -> tuple[onnx.NodeProto, int] | None:
    """(node, input position) of the bias of a layer, present or optional; None if it has none."""
    constants = view.constants
    is_bias: Callable[[str], bool] = lambda name: name in constants and list(constants[name].dims) == [channels]  # noqa: E731
    if node.op_type == "Gemm" and attribute(node, "beta", 1.0) != 1.0:
        return None
    if node.op_type in ("Conv", "Gemm"):
        if len(node.input) < 3 or not node.input[2] or is_bias(node.input[2]):
            return node, 2
        return None
    readers = view.readers.get(node.output[0], ())
    reader = view.nodes[readers[0][0]] if len(readers) == 1 and node.output[0] not in view.outputs else None
    if reader is None or reader.op_type != "Add":
        return None
    return next(((reader, p) for p, name in enumerate(reader.input) if is_bias(name)), None)
