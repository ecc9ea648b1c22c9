"""Calibration: images through a graph, the range of every tensor, and the scales of quantized activations.

In the order of use: the images (`find_images`), running the graph on them (`run_shapes`, `run_tensors`), ranges and failures of
FP16 (`scan`, `fp16_failures`), and thresholds from histograms (`histograms`, `threshold`). Histograms are exact counts
of |x| in 2048 equal bins up to the largest value, so that two runs over the same images give the same scales, bit for bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np
import onnx
from numpy.typing import NDArray

from .. import files
from ..backends.base import Feeds
from ..backends.onnxruntime.session import OnnxSession, profiled_run
from ..data.coco import file_in
from ..data.datasets import image_folder, is_dataset, load_dataset
from ..data.images import IMAGE_SUFFIXES, ImageSource, load_image
from ..data.preprocess import preprocess
from ..errors import ImageError
from ..graph.clean import serialized
from ..graph.emulate_low_precision import emulate, needs_emulation
from ..graph.operators import FILL_LIMIT, GEMM
from ..graph.view import FLOAT, GraphView
from ..spec import ModelSpec, Precision
from ..system import CountProgress
from .summaries import SAMPLE, Summary, serialized_with_summaries

# Largest size of the extra outputs of one run.
# The whole graph runs once per chunk: all 8.4 GiB of Deformable DETR at 800x1066 took 9 runs an image instead of 35 with 256 MiB.
MAX_CHUNK_BYTES = 1 << 30
_MIN_EXPONENT, _MAX_EXPONENT = -40, 24  # exponents of the histogram

# From this value on FP16 rounds to steps of 1/8, which change a softmax weight by 12 %.
MAX_SOFTMAX_INPUT = 128.0

# Operators that only rearrange values of their first input.
_REARRANGING = frozenset(
    [
        "Reshape",
        "Transpose",
        "Slice",
        "Gather",
        "GatherElements",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Tile",
        "Split",
        "Flatten",
        "Identity",
    ]
)
BINS = 2048
_LEVELS = 128  # of INT8 on one side of zero
# Node name -> (shapes of its inputs, shapes of its outputs).
Shapes = dict[str, tuple[list[list[int]], list[list[int]]]]


class PromptedImages(Sequence[ImageSource]):
    """Calibration images of a model that takes a prompt, with the text inputs of each.

    texts: text inputs of the detector for one image; several of them (a prompt in chunks) are used by the images in turn.
    """

    def __init__(self, images: Sequence[ImageSource], texts: Sequence[Feeds]) -> None:
        self.images, self.texts = images, texts

    def __len__(self) -> int:
        return len(self.images)

    @overload
    def __getitem__(self, index: int) -> ImageSource: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[ImageSource]: ...

    def __getitem__(self, index: int | slice) -> ImageSource | Sequence[ImageSource]:
        return PromptedImages(self.images[index], self.texts) if isinstance(index, slice) else self.images[index]

    def text_of(self, index: int) -> Feeds:
        return self.texts[index % len(self.texts)]


def find_images(path: Path, limit: int) -> tuple[list[Path], Path | None]:
    """(calibration images in name order, at most `limit`, evenly spread; the annotations if `path` is such a file or data set).

    The images of a COCO file are searched beside it, in `images/`, in the folder that the file is
    named after (instances_val2017.json: val2017/), also one level up.

    Raises:
        ImageError: no images, or images of the COCO file are missing.
    """
    if is_dataset(path):
        dataset = load_dataset(path, annotations=False)
        return _spread(dataset.files(dataset.folder or path.parent), limit), path
    if path.is_dir():
        results = sorted(p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
        if not results:
            raise ImageError(f"the calibration folder '{path}' has no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
        return _spread(results, limit), None
    if not path.is_file():
        raise ImageError(f"there is no calibration folder or COCO file '{path}'; give `calibration=DIR` or FILE.json")
    if path.suffix.lower() in IMAGE_SUFFIXES:
        raise ImageError(f"'{path}' is one image; give the folder that it is in, `calibration={path.parent}`, or a COCO file")
    try:
        data = files.read_json(path, "COCO file", ImageError, most=files.LONGEST_DATA_SET)
        names = [str(image["file_name"]) for image in data["images"]]
    except (KeyError, TypeError) as error:
        raise ImageError(f"'{path}' is not a COCO annotation file ({error!r}); give one, or a folder of images") from None
    folder = image_folder(path, names)
    return _spread([file_in(folder, name) for name in names], limit), path


def _spread(paths: list[Path], limit: int) -> list[Path]:
    if len(paths) <= limit:
        return paths
    return [paths[i * len(paths) // limit] for i in range(limit)]


def run_shapes(model: onnx.ModelProto, feeds: Feeds) -> Shapes:
    """Node name -> (shapes of its inputs, shapes of its outputs), from one profiled run, so that symbolic shapes are exact.

    Raises:
        SessionError: the graph does not run on these feeds.
    """
    runnable = emulate(model) if needs_emulation(model) else model
    with files.scratch() as folder:
        rows = json.loads(profiled_run(runnable.SerializeToString(), feeds, folder).read_text("utf-8"))
    results: Shapes = {}
    for row in rows:
        arguments = row.get("args", {})
        if "input_type_shape" in arguments:
            inputs, outputs = (
                [shape for entry in arguments[key] for shape in entry.values()]
                for key in ("input_type_shape", "output_type_shape")
            )
            results[str(row.get("name", "")).removesuffix("_kernel_time")] = (inputs, outputs)
    return results


def image_feeds(images: Sequence[ImageSource], spec: ModelSpec) -> Iterator[Feeds]:
    """Inputs of the model, one image per run; `PromptedImages` include their text."""
    for index, image in enumerate(images):
        feeds = preprocess([load_image(image)], spec).feeds
        yield {**feeds, **images.text_of(index)} if isinstance(images, PromptedImages) else feeds


def run_tensors(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    names: Sequence[str],
    visit: Callable[[str, np.ndarray], None],
    progress: CountProgress | None = None,
    sizes: Mapping[str, int] | None = None,
) -> None:
    """Call `visit(name, array)` for FP32 tensors of a graph on every image, in chunks of bounded memory.

    sizes: of `bytes_of`, for a graph that is run several times.

    Raises:
        SessionError, ImageError: the graph does not run, or an image cannot be read.
    """
    sizes = bytes_of(model, spec, images) if sizes is None else sizes
    chunks: list[list[str]] = [[]]
    chunk_bytes = 0
    for name in names:
        size = sizes.get(name, 0)
        if chunks[-1] and chunk_bytes + size > MAX_CHUNK_BYTES:
            chunks.append([])
            chunk_bytes = 0
        chunks[-1].append(name)
        chunk_bytes += size
    for number, chunk in enumerate(chunks):
        if not chunk:
            continue
        session = OnnxSession(serialized(model, chunk, FLOAT), spec)
        try:
            for index, feeds in enumerate(image_feeds(images, spec)):
                results = session.run(feeds)
                for name in chunk:
                    visit(name, results[name])
                if progress:
                    progress(number * len(images) + index + 1, len(chunks) * len(images))
        finally:
            session.close()


def bytes_of(model: onnx.ModelProto, spec: ModelSpec, images: Sequence[ImageSource]) -> dict[str, int]:
    """Tensor -> its bytes in FP32, on the first image."""
    shapes = run_shapes(model, next(image_feeds(images, spec)))
    sizes: dict[str, int] = {}
    for node in model.graph.node:
        for name, shape in zip(node.output, shapes.get(node.name, ([], []))[1], strict=False):
            sizes[name] = 4 * math.prod(shape)
    return sizes


@dataclass(slots=True)
class TensorRange:
    """Statistics of a tensor over all images. Fills (finfo.min) and infinities are counted separately.

    absmax: largest finite |x|. minimum: smallest finite x, or 0. exponents: number of values in [2**e, 2**(e+1)), for e = -40 .. 23.
    """

    node: str
    absmax: float = 0.0
    minimum: float = 0.0
    values: int = 0
    fills: int = 0
    zeros: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (_MAX_EXPONENT - _MIN_EXPONENT))

    def add(self, array: np.ndarray) -> None:
        flat = np.asarray(array, np.float32).reshape(-1)
        size = np.abs(flat)
        finite = size < FILL_LIMIT  # NaN and infinities compare false
        self.fills += int(size.size - finite.sum())
        size = size[finite]
        if size.size:
            # The maximum is exact; the histogram of a large tensor counts every n-th value.
            sample = size[:: max(1, size.size // SAMPLE)]
            self.add_summary(Summary(float(size.max()), float(flat.min(initial=0.0, where=finite)), size.size, sample))

    def add_summary(self, one: Summary) -> None:
        """One run, of an `ordinary` tensor."""
        self.values += one.count
        self.absmax = max(self.absmax, one.largest, -one.smallest)
        self.minimum = min(self.minimum, one.smallest)
        size = np.abs(one.sample)
        self.zeros += int((size == 0).sum())
        exponent = np.clip(np.frexp(size[size > 0])[1] - 1, _MIN_EXPONENT, _MAX_EXPONENT - 1) - _MIN_EXPONENT
        counts = np.bincount(exponent, minlength=_MAX_EXPONENT - _MIN_EXPONENT)
        self.exponents = [a + int(b) for a, b in zip(self.exponents, counts, strict=True)]

    def percentile(self, fraction: float) -> float:
        """A power of two that is above at least `fraction` (0 to 1) of the values."""
        count_below = self.zeros
        total = count_below + sum(self.exponents)
        for index, count in enumerate(self.exponents):
            count_below += count
            if count_below >= fraction * total:
                return min(2.0 ** (index + _MIN_EXPONENT + 1), self.absmax)
        return self.absmax

    def to_dict(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "absmax": round(self.absmax, 6),
            "p99.9": round(self.percentile(0.999), 6),
            "p50": round(self.percentile(0.5), 6),
            "values": self.values,
            "fills": self.fills,
        }


def scan(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    progress: CountProgress | None = None,
    sizes: Mapping[str, int] | None = None,
    wanted: Collection[str] | None = None,
) -> dict[str, TensorRange]:
    """Ranges of the computed FP32 tensors of a graph: of all, or of those `wanted`. sizes: see `run_tensors`.

    Operators that only rearrange values have the range of their input, so that the large gathers of deformable attention are not
    outputs of the scan. The graph runs once for each image, and again for tensors with fills, such as masked scores.
    """
    view = GraphView.typed(model)
    source: dict[str, str] = {}  # tensor -> that whose range it has
    for node in view.nodes:
        for name in node.output:
            if name and view.is_float(name):
                source[name] = source.get(node.input[0], name) if node.op_type in _REARRANGING else name
    if wanted is not None:
        read = {source[name] for name in wanted if name in source}
        source = {name: measured for name, measured in source.items() if measured in read}
    ranges = {name: TensorRange(view.producer[name].name) for name in source if name == source[name]}
    if not ranges:
        return {}
    with_fills: set[str] = set()
    with OnnxSession(serialized_with_summaries(model, ranges), spec, in_order=True) as session:
        for done, feeds in enumerate(image_feeds(images, spec)):
            outputs = session.run(feeds)
            for name, found in ranges.items():
                if (one := Summary.of(name, outputs)).ordinary:
                    found.add_summary(one)
                else:
                    with_fills.add(name)
            if progress:
                progress(done + 1, len(images))
    if with_fills:
        ranges |= {name: TensorRange(ranges[name].node) for name in with_fills}
        again = [name for name in ranges if name in with_fills]
        run_tensors(model, spec, images, again, lambda name, array: ranges[name].add(array), progress, sizes)
    return {name: ranges[measured] for name, measured in source.items()}


def fp16_failures(view: GraphView, ranges: dict[str, TensorRange], margin: float) -> dict[str, str]:
    """Node name -> why its values do not fit FP16.

    A tensor above 65504 / margin may overflow on another image; one that stays below 2**-14 everywhere has
    only subnormal numbers; the input of a softmax above MAX_SOFTMAX_INPUT is rounded to steps of 1/8 and more.
    """
    limit, smallest = Precision.FP16.max_value / margin, Precision.FP16.min_normal
    results: dict[str, str] = {}
    for node in view.nodes:
        names = [n for n in (*node.input, *node.output) if n in ranges]
        for name in names:
            largest = ranges[name].absmax
            if largest > limit:
                results[node.name] = f"overflow: values up to {largest:.4g} in '{name}', over 65504 / {margin:g}"
            elif 0.0 < largest < smallest:
                results.setdefault(node.name, f"underflow: no value above {largest:.2g} in '{name}'")
        if node.op_type == "Softmax" and node.input[0] in ranges and ranges[node.input[0]].absmax > MAX_SOFTMAX_INPUT:
            largest = ranges[node.input[0]].absmax
            for name in _score_nodes(view, node):
                results.setdefault(
                    name, f"softmax of values up to {largest:.4g}, which FP16 rounds to steps of {_step(largest):g}"
                )
    return results


def _score_nodes(view: GraphView, softmax: onnx.NodeProto) -> list[str]:
    """The softmax and all nodes between it and the last matmul before it."""
    names, todo = [softmax.name], [softmax.input[0]]
    while todo:
        node = view.producer.get(todo.pop())
        if node is None or node.name in names or node.op_type == "LayerNormalization":
            continue
        names.append(node.name)
        if node.op_type not in GEMM.onnx:
            todo += view.float_inputs(node)
    return names


def _step(value: float) -> float:
    return 2.0 ** (math.floor(math.log2(value)) - 10)


def histograms(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    absmax: dict[str, float],
    progress: CountProgress | None = None,
    axes: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.float32]]]:
    """Tensor -> counts of |x| in BINS equal bins of 0 .. absmax[tensor], and for the tensors of `axes` -> (channels,)
    mean over all other axes. sizes: see `run_tensors`."""
    counts = {name: np.zeros(BINS, np.int64) for name in absmax}
    sums: dict[str, NDArray[np.float64]] = {}
    values: dict[str, int] = {}

    def visit(name: str, array: NDArray[np.float32]) -> None:
        if axes is not None and name in axes:
            rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
            sums[name] = sums.get(name, np.zeros(rows.shape[1])) + rows.sum(0, dtype=np.float64)
            values[name] = values.get(name, 0) + len(rows)
        largest = absmax[name]
        if largest > 0:
            index = np.minimum((np.abs(array).reshape(-1) * (BINS / largest)).astype(np.int64), BINS - 1)
            counts[name] += np.bincount(index, minlength=BINS)

    run_tensors(model, spec, images, sorted(absmax), visit, progress, sizes)
    return counts, {name: (total / max(values[name], 1)).astype(np.float32) for name, total in sums.items()}


def threshold(
    counts: NDArray[np.int64],
    absmax: float,
    method: str,
    low: Precision,
    percentile: float = 99.99,
    *,
    positive: bool = False,
) -> float:
    """The |x| that maps to the largest value of the low type; larger values are clipped.

    counts: (BINS,) of |x| up to absmax. low: INT8 or FP8. positive: of unsigned INT8.
    """
    if method == "auto":
        method = "mse"
    if absmax <= 0 or counts.sum() == 0:
        return max(absmax, 1.0)
    if method == "minmax":
        return absmax
    if method == "percentile":
        total = np.cumsum(counts) / counts.sum()
        return float((np.searchsorted(total, percentile / 100.0) + 1) / BINS * absmax)
    if method == "entropy":
        return _entropy(counts, absmax, 2 * _LEVELS if positive else _LEVELS)
    return _mse(counts, absmax, low, largest_step(low, positive))


def _mse(counts: NDArray[np.int64], absmax: float, low: Precision, largest: float) -> float:
    """The threshold whose rounding and clipping errors have the smallest mean square."""
    centres = (np.arange(BINS) + 0.5) / BINS * absmax

    def round_to(values: NDArray) -> NDArray:
        return round_fp8(values) if low == Precision.FP8 else np.minimum(np.rint(values), largest)

    best, best_error = absmax, np.inf
    for fraction in np.linspace(1.0, 0.1, 91):
        step = fraction * absmax / largest
        error = float((counts * (round_to(centres / step) * step - centres) ** 2).sum())
        if error < best_error * 0.9999:  # a tie keeps the wider range
            best, best_error = float(fraction * absmax), error
    return best


def largest_step(low: Precision, positive: bool) -> float:
    """The largest value of INT8 or FP8 in units of its scale. positive: of unsigned INT8."""
    return 255.0 if positive else low.max_value


def fp8_exponent(values: NDArray) -> NDArray[np.int32]:
    """Exponents of non-negative values in E4M3, from -6, that of subnormal numbers."""
    return np.frexp(np.maximum(values, 2.0**-6))[1] - 1


def round_fp8(values: NDArray) -> NDArray:
    """Non-negative values rounded to E4M3: 3 bits after the point, exponents from -6, at most 448."""
    step = np.ldexp(values.dtype.type(1), fp8_exponent(values) - 3)
    return np.minimum(np.rint(values / step) * step, Precision.FP8.max_value)


def _entropy(counts: NDArray[np.int64], absmax: float, levels: int) -> float:
    """The threshold with the smallest Kullback-Leibler divergence, as TensorRT's entropy calibrator finds it."""
    full = counts.astype(np.float64)
    best, best_divergence = BINS, np.inf
    for size in range(levels, BINS + 1, 16):
        clipped = full[:size].copy()
        reference = clipped.copy()
        reference[-1] += full[size:].sum()
        groups = np.minimum(np.arange(size) * levels // size, levels - 1)
        nonzero = clipped > 0
        sums = np.bincount(groups, weights=clipped, minlength=levels)
        slots = np.bincount(groups, weights=nonzero, minlength=levels)
        spread = np.where(nonzero, (sums / np.maximum(slots, 1))[groups], 0.0)
        if spread.sum() == 0:
            continue
        p, q = reference / reference.sum(), spread / spread.sum()
        positive = p > 0
        divergence = float((p[positive] * np.log(p[positive] / np.maximum(q[positive], 1e-12))).sum())
        if divergence < best_divergence:
            best, best_divergence = size, divergence
    return best / BINS * absmax
