"""Quantization noise of each layer, and the bias that quantization adds to its channels.

Both come from one pass of the FP32 graph over the calibration images. Every layer is computed exact and quantized on a seeded
sample of its input, so that the cost does not grow with the size of the images. INT8 needs sums, to which positions
add a block at a time. FP8 reads all of its sample up to four times and keeps it: 2.1 GB at most for the layers of RT-DETRv2-R50, whose products
of inputs, which could replace it, take 1.6 GB with the mean of each channel subtracted and 1.6 GB without.

 - The offset is the mean error of each output channel; subtracting it from the bias costs nothing at run time (bias correction:
   Nagel et al., arXiv:1906.04721, section 4.2).
 - The noise is the variance of the error over that of the result. It decides which layers stay in 16 bits.
 - FP8 has a relative error, so that after a ReLU the rounding error is as large as the mean. The mean of each channel is therefore
   subtracted before the rounding if this reduces the noise, and its product with the weights, a constant, is added to the bias.
 - Half of the noise of FP8 is that of the weights: they are rounded together for the sampled inputs (`rounding.py`).
 - Two-stage detectors set the inputs of a layer to zero at anchors that they do not use, and normalize its result, which there is the bias
   alone. A small change of it is then a large one of the class scores of all these anchors, so that a layer with masked inputs has no
   offset and no centre: rounded, zero stays zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from ..data.images import ImageSource
from ..graph.view import GraphView, attribute
from ..spec import ModelSpec, Precision
from ..system import CountProgress
from .calibrate import run_tensors
from .quantize import QuantPlan, activation_scale, centred_threshold, round_to_precision, scale_axis, weight_rows, weight_scales
from .rounding import Moments, round_weights

SAMPLES = 192  # positions of an image at which a layer is computed
MAX_SAMPLES = 10_000  # of all images together
BLOCK = 512  # of them that are computed at once, at least
LARGEST = Precision.FP16.max_value  # of what is sampled
MASKED = 0.005  # fraction of positions whose inputs are all zero; fewer are chance. Of anchors at least 0.02 are masked, if any
MAX_CENTRED_NOISE = 0.8  # centring costs a subtraction: it must leave at most this fraction of the noise
NOISY_REASON = "most sensitive to 8 bits for its fraction of the work"


@dataclass(frozen=True, slots=True)
class LayerNoise:
    """noise: variance of the error over the variance of the result. offset: (channels,) mean error, to be subtracted from the
    bias; zero of a layer with masked inputs. centre: (inputs,) subtracted from each input channel before rounding, or None; the offset then includes its product with
    the weights. weight: rounded for these inputs, (channels, inputs), and its scales; None: each to its nearest value."""

    noise: float
    offset: NDArray[np.float32]
    centre: NDArray[np.float32] | None = None
    weight: tuple[NDArray[np.float32], NDArray[np.float16]] | None = None


@dataclass(slots=True)
class _Spread:
    """Mean and variance of every channel of values that come in blocks (Chan, Golub and LeVeque, 1979)."""

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(()))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(()))  # sums of squared distances from the mean

    def add(self, values: NDArray[np.float32]) -> None:
        """values: (positions, channels)."""
        if not len(values):
            return
        mean, total = values.mean(0, dtype=np.float64), self.count + len(values)
        step = mean - self.mean
        self.squares = self.squares + ((values - mean) ** 2).sum(0) + step**2 * (self.count * len(values) / total)
        self.mean = self.mean + step * (len(values) / total)
        self.count = total

    @property
    def variance(self) -> float:
        """Sum of the variances of all channels."""
        return float(self.squares.sum()) / self.count


@dataclass(slots=True)
class _Layer:
    node: onnx.NodeProto
    weight: NDArray[np.float32]  # (channels, inputs)
    kernel: tuple[int, ...]  # of a convolution, else empty
    has_bias: bool
    centre: NDArray[np.float32] | None = None  # (inputs,)
    images: int = 0  # that were sampled
    positions: int = 0  # of these images
    zeros: int = 0  # positions whose inputs are all zero

    def add(self, sample: NDArray[np.float16]) -> None:
        """sample: (positions, inputs) of one image."""
        self.images += 1
        self.positions += len(sample)
        self.zeros += int(np.sum(~sample.any(1)))

    @property
    def masked(self) -> bool:
        """Whether its result is the bias alone at some positions, and has to stay that."""
        return self.zeros > MASKED * self.positions


@dataclass(slots=True)
class _Rounding:
    """One way to round the inputs and weights of a layer, and what it costs on the blocks of exact inputs that it was given.

    weight: (channels, inputs) in units of `weight_scale`, (channels,) or (). scale: of the inputs. centre: see `LayerNoise`.
    """

    layer: _Layer
    low: Precision
    scale: float
    weight: NDArray
    weight_scale: NDArray[np.float32] | np.float32
    unsigned: bool = False
    centre: NDArray[np.float32] | None = None
    error: _Spread = field(default_factory=_Spread)
    result: _Spread = field(default_factory=_Spread)

    def inputs(self, exact: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(rounded, exact) inputs as the weights multiply them, both (positions, inputs)."""
        if self.centre is not None:
            exact = exact - np.repeat(self.centre, exact.shape[1] // len(self.centre))
        return round_to_precision(exact / self.scale, self.low, positive=self.unsigned) * self.scale, exact

    def add(self, exact: NDArray[np.float32], result: NDArray[np.float32] | None = None) -> None:
        """exact: (positions, inputs). result: (positions, channels), exact, if it is known."""
        if result is None:
            result = exact @ self.layer.weight.T
        self.result.add(result)
        self.error.add(self.inputs(exact)[0] @ self.weight.T.astype(np.float32) * self.weight_scale - result)

    @property
    def noise(self) -> float:
        signal = self.result.variance
        return self.error.variance / signal if signal > 0 else np.inf

    def found(self, weight: tuple[NDArray[np.float32], NDArray[np.float16]] | None = None) -> LayerNoise:
        offset = self.error.mean.astype(np.float32)
        return LayerNoise(self.noise, np.zeros_like(offset) if self.layer.masked else offset, self.centre, weight)


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
    layers = {name: _layer(view, by_name[name]) for name in plan.activations}
    for name, tensor in plan.activations.items():
        if means and tensor in means and layers[name].has_bias:
            layers[name].centre = means[tensor].astype(np.float16).astype(np.float32)  # as stored in the graph
    readers: dict[str, list[str]] = {}
    for name, tensor in plan.activations.items():
        readers.setdefault(tensor, []).append(name)
    generator = np.random.default_rng(0)
    positions = max(1, min(SAMPLES, MAX_SAMPLES // len(images)))
    roundings: dict[str, _Rounding] = {}
    samples: dict[str, list[NDArray[np.float16]]] = {name: [] for name in layers}  # (positions, inputs) of each image
    result: dict[str, LayerNoise] = {}

    def visit(tensor: str, array: NDArray[np.float32]) -> None:
        for name in readers[tensor]:
            layer, kept = layers[name], samples[name]
            kept.append(_sample(layer, array, positions, generator))
            layer.add(kept[-1])
            last = layer.images == len(images)
            if low == Precision.FP8:
                if last and any(map(len, kept)):
                    result[name] = _together(layer, thresholds[tensor], low, np.concatenate(samples.pop(name)))
            elif last or sum(map(len, kept)) >= BLOCK:
                if name not in roundings:
                    roundings[name] = _nearest(layer, thresholds[tensor], low, unsigned=tensor in positive)
                roundings[name].add(np.concatenate(kept).astype(np.float32))
                kept.clear()
                if last and roundings[name].error.count:
                    result[name] = roundings.pop(name).found()

    run_tensors(model, spec, images, sorted(readers), visit, progress, sizes)
    return result


def _layer(view: GraphView, node: onnx.NodeProto) -> _Layer:
    weight = numpy_helper.to_array(view.constants[node.input[1]]).astype(np.float32)
    rows = weight_rows(node, weight)
    kernel = weight.shape[2:] if node.op_type == "Conv" else ()
    return _Layer(node, rows, kernel, _bias_of(view, node, len(rows)) is not None)


def _sample(layer: _Layer, x: NDArray[np.float32], positions: int, generator: np.random.Generator) -> NDArray[np.float16]:
    """Input patches of a layer at sampled positions: (at most `positions`, inputs)."""

    def choose(count: int) -> NDArray[np.int64]:
        return generator.choice(count, positions, replace=False) if count > positions else np.arange(count)

    if not layer.kernel:
        x = x.reshape(-1, x.shape[-1])
        return _half(x[choose(len(x))])
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
    return _half(patches.transpose(0, 3, 1, 2).reshape(len(image), -1))


def _half(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """Half the memory; the graph has these values in FP16 too. NaN, which would make every number of a layer NaN, counts as 0."""
    return np.nan_to_num(x.clip(-LARGEST, LARGEST).astype(np.float16), copy=False)


def _nearest(layer: _Layer, threshold: float, low: Precision, *, unsigned: bool = False) -> _Rounding:
    """Inputs up to a threshold, and each weight at its nearest value."""
    scale = weight_scales(layer.weight, _axis(layer, low), low).astype(np.float32)
    units = round_to_precision(layer.weight / scale.reshape(-1, 1), low)
    if low == Precision.INT8:
        units = units.astype(np.int8)
    return _Rounding(layer, low, float(activation_scale(threshold, low, positive=unsigned)), units, scale, unsigned)


def _axis(layer: _Layer, low: Precision) -> int | None:
    """`scale_axis` of `layer.weight`, whose channels come first."""
    return None if scale_axis(layer.node, low) is None else 0


def _together(layer: _Layer, threshold: float, low: Precision, samples: NDArray[np.float16]) -> LayerNoise:
    """Inputs centred if that helps, and weights rounded together for them. samples: (positions, inputs)."""

    def measured(rounding: _Rounding) -> _Rounding:
        for block, result in zip(blocks(), results, strict=True):
            rounding.add(block, result)
        return rounding

    def blocks(size: int = BLOCK) -> Iterator[NDArray[np.float32]]:
        for start in range(0, len(samples), size):
            yield samples[start : start + size].astype(np.float32)

    results = [block @ layer.weight.T for block in blocks()]
    best = measured(_nearest(layer, threshold, low))
    if layer.centre is not None and not layer.masked:
        limit = centred_threshold(threshold, layer.centre)
        centred = measured(replace(_nearest(layer, limit, low), centre=layer.centre))
        if centred.noise < MAX_CENTRED_NOISE * best.noise:
            best = centred
    moments = Moments(layer.weight, has_bias=layer.has_bias and not layer.masked)
    # Each block is added to a matrix of (inputs, inputs), which takes as long as many positions.
    for block in blocks(max(BLOCK, layer.weight.shape[1] // 2)):
        inputs, exact = best.inputs(block)
        moments.add(inputs, inputs - exact)
    weight = round_weights(moments, _axis(layer, low), low)
    if weight is None:
        return best.found()
    rounded = replace(best, weight=weight[0], weight_scale=np.float32(1), error=_Spread(), result=_Spread())
    return measured(rounded).found(weight)


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
    reader = view.only_reader(node.output[0], "Add")
    return None if reader is None else next(((reader, p) for p, name in enumerate(reader.input) if is_bias(name)), None)
