"""Run a graph on images and look at every tensor: how large it gets, and what FP16 would do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ..backends.base import Feeds
from ..backends.onnxruntime.session import OnnxSession
from ..data.images import ImageSource, load_image
from ..data.preprocess import preprocess
from ..graph.clean import with_outputs
from ..graph.type_view import FLOAT, GraphView
from ..spec import ModelSpec
from .images import Prompted
from .rules import GEMM
from .shapes import run_shapes

# Bytes of extra outputs that one run may hold.
CHUNK_BYTES = 256 << 20
_LOWEST, _HIGHEST = -40, 24  # exponents of the histogram
_FILL = 1e30
# From here on the rounding step of FP16 is 1/8: a softmax turns that into 12 % of a weight.
SOFTMAX_LIMIT = 128.0

# Operators whose result holds values of their first input and nothing else.
_MOVES = frozenset(
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

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class TensorRange:
    """What a tensor held over all images. Fills (finfo.min) and infinities are counted apart.

    absmax: largest finite |x|. exponents: how many values lie in [2**e, 2**(e+1)), for e = -40 .. 23.
    """

    node: str
    absmax: float = 0.0
    values: int = 0
    fills: int = 0
    zeros: int = 0
    exponents: list[int] = field(default_factory=lambda: [0] * (_HIGHEST - _LOWEST))

    def add(self, array: np.ndarray) -> None:
        size = np.abs(array, dtype=np.float32).reshape(-1)
        known = size < _FILL  # NaN and infinities compare false
        self.fills += int(size.size - known.sum())
        size = size[known]
        self.values += int(size.size)
        if size.size:
            self.absmax = max(self.absmax, float(size.max()))
            # The maximum is exact; the histogram of a large tensor is that of every n-th value.
            size = size[:: max(1, size.size >> 15)]
            self.zeros += int((size == 0).sum())
            exponent = np.clip(np.frexp(size[size > 0])[1] - 1, _LOWEST, _HIGHEST - 1) - _LOWEST
            counts = np.bincount(exponent, minlength=_HIGHEST - _LOWEST)
            self.exponents = [a + int(b) for a, b in zip(self.exponents, counts, strict=True)]

    def percentile(self, share: float) -> float:
        """A power of two that at least `share` (0..1) of the values stay below."""
        seen = self.zeros
        total = seen + sum(self.exponents)
        for index, count in enumerate(self.exponents):
            seen += count
            if seen >= share * total:
                return min(2.0 ** (index + _LOWEST + 1), self.absmax)
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


def image_feeds(images: Sequence[ImageSource], spec: ModelSpec) -> Iterator[Feeds]:
    """Inputs of the model, one image a run; `Prompted` images bring their text."""
    for index, image in enumerate(images):
        feeds = preprocess([load_image(image)], spec).feeds
        yield {**feeds, **images.text_of(index)} if isinstance(images, Prompted) else feeds


def run_tensors(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    names: Sequence[str],
    visit: Callable[[str, np.ndarray], None],
    progress: Progress | None = None,
) -> None:
    """Call `visit(name, array)` for FP32 tensors of a graph on every image, in chunks of bounded memory.

    Raises:
        SessionError, ImageError: the graph does not run, or an image cannot be read.
    """
    first = next(image_feeds(images, spec))
    sizes = _bytes_of(model, first)
    chunks: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = sizes.get(name, 0)
        if chunks[-1] and held + size > CHUNK_BYTES:
            chunks.append([])
            held = 0
        chunks[-1].append(name)
        held += size
    for number, chunk in enumerate(chunks):
        if not chunk:
            continue
        session = OnnxSession(with_outputs(model, chunk, FLOAT).SerializeToString(), spec)
        try:
            for index, feeds in enumerate(image_feeds(images, spec)):
                found = session.run(feeds)
                for name in chunk:
                    visit(name, found[name])
                if progress:
                    progress(number * len(images) + index + 1, len(chunks) * len(images))
        finally:
            session.close()


def scan(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    progress: Progress | None = None,
) -> dict[str, TensorRange]:
    """Ranges of every computed FP32 tensor of a graph.

    What only moves values has the range of what it moves, so the large gathers of deformable attention are
    not run for it.
    """
    view = GraphView(model)
    ranges: dict[str, TensorRange] = {}
    names = []
    for node in view.nodes:
        for name in node.output:
            if not name or not view.is_float(name):
                continue
            if node.op_type in _MOVES and node.input[0] in ranges:
                ranges[name] = ranges[node.input[0]]
            else:
                ranges[name] = TensorRange(node.name)
                names.append(name)
    run_tensors(model, spec, images, names, lambda name, array: ranges[name].add(array), progress)
    return ranges


def lost_in_fp16(view: GraphView, ranges: dict[str, TensorRange], margin: float) -> dict[str, str]:
    """Node name -> why its numbers do not survive FP16.

    A tensor above 65504 / margin may overflow on another picture; one that stays below 2**-14 everywhere has
    only subnormal numbers; the input of a softmax above SOFTMAX_LIMIT is rounded to steps of 1/8 and more.
    """
    limit, least = 65504.0 / margin, 2.0**-14
    found: dict[str, str] = {}
    for node in view.nodes:
        names = [n for n in (*node.input, *node.output) if n in ranges]
        for name in names:
            top = ranges[name].absmax
            if top > limit:
                found[node.name] = f"overflow: values up to {top:.4g} in '{name}', over 65504 / {margin:g}"
            elif 0.0 < top < least:
                found.setdefault(node.name, f"underflow: no value above {top:.2g} in '{name}'")
        if node.op_type == "Softmax" and node.input[0] in ranges and ranges[node.input[0]].absmax > SOFTMAX_LIMIT:
            top = ranges[node.input[0]].absmax
            for name in _score_nodes(view, node):
                found.setdefault(name, f"softmax of values up to {top:.4g}, which FP16 rounds to steps of {_step(top):g}")
    return found


def _score_nodes(view: GraphView, softmax: onnx.NodeProto) -> list[str]:
    """The softmax and everything before it up to the product that its input comes from."""
    names, todo = [softmax.name], [softmax.input[0]]
    while todo:
        node = view.node_of(todo.pop())
        if node is None or node.name in names or node.op_type == "LayerNormalization":
            continue
        names.append(node.name)
        if node.op_type not in GEMM:
            todo += view.float_inputs(node)
    return names


def _step(value: float) -> float:
    return 2.0 ** (math.floor(math.log2(value)) - 10)


def _bytes_of(model: onnx.ModelProto, feeds: Feeds) -> dict[str, int]:
    shapes = run_shapes(model, feeds)
    sizes: dict[str, int] = {}
    for node in model.graph.node:
        for name, shape in zip(node.output, shapes.get(node.name, ([], []))[1], strict=False):
            sizes[name] = 4 * math.prod(shape)
    return sizes
