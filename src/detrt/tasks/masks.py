"""Masks of objects: their run-length form, and the one definition of upsampling and threshold from mask logits.

The rule, which every other runtime follows:

    logits      bilinear between the centres of the map's values, as PyTorch's `interpolate` with align_corners=False: the value of
                output column X is that at map column s = (X + 0.5) * map width / width - 0.5, clipped to the map; rows alike;
                where the input has padding, "map width" is the width of the part that the image covers, which may be a fraction
    mask        pixels whose logit is above 0 (a probability above 0.5)

No map is enlarged. Along a column of the image the logit is linear between two rows of the map, so that one division finds where
it crosses 0, and the crossings are the ends of the runs. All numbers are float64, without fused multiply-add, so that runtimes
agree to the pixel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import no_attribute
from ..spec import MASK_LOGITS
from .base import AreaTask, SizeHW, Window

if TYPE_CHECKING:
    from ..spec import ModelSpec


_ARRAYS = ("data", "xy", "xyn", "numpy", "cpu", "shape", "polygons", "array")  # what other libraries call it
_OPACITY = 0.45  # of a mask that is drawn


def equal(a: object, b: object) -> bool:
    """Whether two values are the same, arrays in all of their elements, also inside of tuples and of the classes below."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Masks:
    """The masks of the objects of one image, run-length encoded: a few kilobytes each, where pixels of a photograph take millions.

    counts: of each mask the lengths of its runs, of zeros and of ones in turn, zeros first, column by column, as in COCO.
    size_hw: of the image in pixels.
    """

    counts: tuple[NDArray[np.int64], ...]
    size_hw: tuple[int, int]

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> NDArray[np.bool_]:
        """(height, width) pixels of one mask. Raises IndexError."""
        return self.take([index]).to_array()[0]

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, "use to_array()" if name in _ARRAYS else "")

    def __repr__(self) -> str:
        height, width = self.size_hw
        return f"<Masks: {len(self)} of {height}x{width} pixels>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks):
            return NotImplemented
        return self.size_hw == other.size_hw and equal(self.counts, other.counts)

    @property
    def areas(self) -> NDArray[np.int64]:
        """(n,) pixels of each mask."""
        return np.array([counts[1::2].sum() for counts in self.counts], np.int64)

    def take(self, indices: Sequence[int] | NDArray) -> Masks:
        """The masks at these indices, in this order."""
        return Masks(tuple(self.counts[i] for i in indices), self.size_hw)

    @classmethod
    def from_array(cls, pixels: NDArray) -> Masks:
        """Masks of an array (n, height, width), zero outside the objects."""
        size = (int(pixels.shape[1]), int(pixels.shape[2]))
        counts = []
        for mask in pixels:
            column_by_column = np.concatenate([[False], mask.T.reshape(-1) != 0])
            ends = np.flatnonzero(column_by_column[1:] != column_by_column[:-1])
            counts.append(np.diff(np.concatenate([[0], ends, [mask.size]])).astype(np.int64))
        return cls(tuple(counts), size)

    @classmethod
    def from_coco(cls, rows: Sequence[Mapping[str, Any]], size_hw: tuple[int, int]) -> Masks:
        """Masks of an image from their compressed form, see `to_coco`."""
        return cls(tuple(_expanded(row["counts"]) for row in rows), size_hw)

    def to_array(self) -> NDArray[np.bool_]:
        """(n, height, width) pixels of all masks; n * height * width bytes."""
        height, width = self.size_hw
        pixels = np.zeros((len(self), width, height), bool)
        for mask, counts in zip(pixels, self.counts, strict=True):
            mask.reshape(-1)[:] = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        return pixels.transpose(0, 2, 1)

    def to_coco(self) -> list[dict[str, Any]]:
        """The compressed form of COCO, as pycocotools reads it: {"size": [height, width], "counts": "..."}."""
        return [{"size": list(self.size_hw), "counts": text} for text in _compressed(self.counts)]


def _compressed(masks: Sequence[NDArray[np.int64]]) -> list[str]:
    """Run lengths as texts, after `rleToString` of pycocotools: differences to the run but one before, six bits a letter.

    All masks in one pass: a hundred small ones would take ten times as long one by one.
    """
    if not masks:
        return []
    rest = np.concatenate(masks)
    stops = np.cumsum([len(counts) for counts in masks])
    index = np.arange(len(rest)) - np.repeat(stops - [len(counts) for counts in masks], [len(counts) for counts in masks])
    rest[2:] -= np.where(index[2:] > 2, rest[:-2], 0)
    letters = []
    open_ = np.ones(len(rest), bool)
    while open_.any():
        low, rest = rest & 31, rest >> 5
        more = np.where(low & 16, rest != -1, rest != 0)
        letters.append(np.where(open_, low + 48 + 32 * more, 0).astype(np.uint8))
        open_ &= more
    table = np.stack(letters, 1)
    text = table[table > 0].tobytes().decode("ascii")
    ends = np.cumsum((table > 0).sum(1))[stops - 1].tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _expanded(text: str) -> NDArray[np.int64]:
    """Run lengths from their text; the reverse of `_compressed`."""
    letters = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(letters & 32 == 0) + 1
    starts = np.concatenate([[0], ends[:-1]])
    shifts = 5 * (np.arange(len(letters)) - np.repeat(starts, ends - starts))
    counts = np.add.reduceat((letters & 31) << shifts, starts)
    counts -= np.where(letters[ends - 1] & 16, 32 << shifts[ends - 1], 0)
    for first in (1, 2):
        counts[first::2] = np.cumsum(counts[first::2])
    return counts


def mask_iou(a: Masks, b: Masks) -> NDArray[np.float64]:
    """Pairwise IoU of masks of one image size: n and m masks -> (n, m). Two empty masks have IoU 1."""
    if a.size_hw != b.size_hw:
        raise ValueError(f"masks of images of different sizes have no IoU; got {a.size_hw} and {b.size_hw}")
    inter = np.zeros((len(a), len(b)))
    ends = [np.concatenate([[0], np.cumsum(counts)]) for counts in b.counts]
    # How many pixels of a mask of b lie before a position: linear between the ends of its runs.
    before = [np.concatenate([[0], np.cumsum(np.where(np.arange(len(c)) % 2, c, 0))]) for c in b.counts]
    for row, counts in zip(inter, a.counts, strict=True):
        edges = np.cumsum(counts)
        starts, stops = edges[0 : len(edges) // 2 * 2 : 2], edges[1::2]
        for j, (position, pixels) in enumerate(zip(ends, before, strict=True)):
            row[j] = (np.interp(stops, position, pixels) - np.interp(starts, position, pixels)).sum()
    union = a.areas[:, None] + b.areas[None] - inter
    return np.divide(inter, union, out=np.ones_like(inter), where=union > 0)


def encode_masks(logits: NDArray, size_hw: tuple[int, int], covered_hw: tuple[float, float] | None = None) -> Masks:
    """Masks of an image of `size_hw` from its mask logits, (n, map height, map width), all finite.

    covered_hw: the part of the maps that the image covers, in values; None for all.
    """
    covered = covered_hw or logits.shape[1:]
    taps = _taps(size_hw[1], logits.shape[2], covered[1])
    above = logits > 0
    rows, columns = above.any(2), above.any(1)
    return Masks(tuple(_encode(*one, taps, size_hw, covered[0]) for one in zip(logits, rows, columns, strict=True)), size_hw)


def _taps(size: int, map_size: int, covered: float) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """(left, right, weight of the right) of the two columns of the map that each of `size` output columns lies between."""
    position = np.clip((np.arange(size) + 0.5) * covered / size - 0.5, 0, map_size - 1)
    left = np.floor(position).astype(np.int64)
    return left, np.minimum(left + 1, map_size - 1), position - left


def _encode(
    logits: NDArray,
    rows: NDArray[np.bool_],
    columns: NDArray[np.bool_],
    taps: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]],
    size_hw: tuple[int, int],
    covered_height: float,
) -> NDArray[np.int64]:
    """Run lengths of one mask, see `Masks`.

    logits: (map height, map width). rows, columns: which of the map have a value above 0. taps: of all output columns.
    covered_height: of the map, see `encode_masks`.
    """
    height, width = size_hw
    map_height = len(logits)
    rows_above, columns_above = np.flatnonzero(rows), np.flatnonzero(columns)
    if not len(rows_above):
        return np.array([height * width], np.int64)
    # Only what lies beside a value above 0 can be above 0.
    top, bottom = max(rows_above[0] - 1, 0), min(rows_above[-1] + 2, map_height)
    left, right, weight = taps
    first = np.searchsorted(right, columns_above[0])
    if first == width:  # in the padding
        return np.array([height * width], np.int64)
    span = slice(first, np.searchsorted(left, columns_above[-1], side="right"))
    near = logits[top:bottom].T.astype(np.float64)
    t = weight[span, None]
    values = near[left[span]] * (1 - t) + near[right[span]] * t  # (output columns, rows of the map)
    above = np.zeros((len(values), bottom - top + 2), bool)
    above[:, 1:-1] = values > 0
    x, k = np.nonzero(above[:, 1:] != above[:, :-1])
    # Between rows k - 1 and k; at either end of the map the whole rest of the column is one run.
    last = bottom - top
    inside = (k > 0) & (k < last)
    p, q = values[x, np.maximum(k - 1, 0)], values[x, np.minimum(k, last - 1)]
    fraction = np.divide(p, p - q, out=np.zeros_like(p), where=inside)
    y = (top + k - 1 + fraction + 0.5) * height / covered_height - 0.5
    edge = np.where(p > 0, np.ceil(y), np.floor(y) + 1)
    edge = np.where(inside, np.clip(edge, 0, height), np.where(k == 0, 0, height)).astype(np.int64)
    ends = np.maximum.accumulate((first + x) * height + edge)
    if (ends[1:] == ends[:-1]).any():  # runs of length 0 between two ends at one pixel
        ends, times = np.unique(ends, return_counts=True)
        ends = ends[times % 2 == 1]
    tail = [] if len(ends) and ends[-1] == height * width else [height * width]
    return np.diff(np.concatenate([[0], ends, tail])).astype(np.int64)


class InstanceMasks(AreaTask):
    """A mask for each detection, not clipped to its box; values are `Masks`."""

    field = "masks"
    title = "masks"
    key = "segmentation"
    dtype = "bytes"
    nvinfer = True

    def outputs(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        rule = spec.decode
        return {MASK_LOGITS: (rule.max_detections if rule.in_graph else rule.num_queries,)} if spec.has_masks else {}

    def map_sides(self, spec: ModelSpec, size_hw: Sequence[int | str]) -> tuple[int | str, ...]:
        stride = spec.decode.mask_stride
        return tuple(f"mask_{side}" if isinstance(side, str) else int(side // stride) for side in size_hw)

    def decode(
        self, outputs: Mapping[str, NDArray], queries: NDArray[np.int64], size_hw: SizeHW, covered_hw: tuple[float, float] | None
    ) -> Masks:
        return encode_masks(outputs[MASK_LOGITS], size_hw, covered_hw)

    def check(self, values: Any, count: int, size_hw: SizeHW) -> None:
        if (len(values), values.size_hw) != (count, tuple(size_hw)):
            raise ValueError(f"masks must be {count} of {tuple(size_hw)}; got {len(values)} of {values.size_hw}")

    def overlap(self, ours: Any, i: int, theirs: Any, j: int) -> float:
        return float(mask_iou(ours.take([i]), theirs.take([j]))[0, 0])

    def draw(self, pixels: NDArray[np.uint8], values: Any, colours: Sequence[tuple[int, int, int]]) -> NDArray[np.uint8]:
        """A copy with masks mixed in, the best one last; one at a time, since each has the size of the image."""
        mixed = pixels.copy()
        for i in range(len(values) - 1, -1, -1):
            inside = values.take([i]).to_array()[0]
            mixed[inside] = np.rint(mixed[inside] * (1 - _OPACITY) + np.array(colours[i], float) * _OPACITY)
        return mixed

    def to_json(self, values: Any) -> list[Any]:
        found: list[Any] = values.to_coco()
        return found

    def from_json(self, values: Sequence[Any], size_hw: SizeHW) -> Masks:
        return Masks.from_coco(values, size_hw)

    def to_rows(self, values: Any) -> list[bytes]:
        return [row["counts"].encode() for row in values.to_coco()]

    def arrow(self, pa: Any) -> Any:
        return pa.struct([("size", pa.list_(pa.int32(), 2)), ("counts", pa.string())])

    def to_supervision(self, values: Any) -> dict[str, Any]:
        return {"mask": values.to_array()}

    def of_windows(
        self, parts: Sequence[tuple[Window, Any]], kept: Sequence[int], members: Mapping[int, list[int]], size_hw: SizeHW
    ) -> Masks:
        first = np.concatenate([[0], np.cumsum([len(values) for _, values in parts])])
        counts = []
        for index in kept:
            owners = [(int(np.searchsorted(first, i, side="right")) - 1, i) for i in members[index]]
            counts.append(_placed([(parts[n][0], parts[n][1].take([i - first[n]])) for n, i in owners], size_hw))
        return Masks(tuple(counts), size_hw)


def _placed(pieces: Sequence[tuple[Window, Any]], size_hw: tuple[int, int]) -> NDArray[np.int64]:
    """Run lengths, in the image, of the union of masks of windows."""
    y0, x0 = min(window[0] for window, _ in pieces), min(window[1] for window, _ in pieces)
    y1, x1 = max(window[2] for window, _ in pieces), max(window[3] for window, _ in pieces)
    pixels = np.zeros((y1 - y0 + 1, x1 - x0), bool)  # a row of zeros more ends the runs of each column
    for (top, left, bottom, right), mask in pieces:
        pixels[top - y0 : bottom - y0, left - x0 : right - x0] |= mask.to_array()[0]
    column = np.concatenate([[False], pixels.T.reshape(-1)])
    ends = np.flatnonzero(column[1:] != column[:-1])
    columns, rows = np.divmod(ends, len(pixels))
    edges = (x0 + columns) * size_hw[0] + y0 + rows
    if y0 == 0 and y1 == size_hw[0]:  # runs that go on in the next column
        joined = np.flatnonzero(edges[1:-1:2] == edges[2::2])
        edges = np.delete(edges, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    counts = np.diff(np.concatenate([[0], edges, [size_hw[0] * size_hw[1]]]))
    return (counts[:-1] if len(edges) and edges[-1] == size_hw[0] * size_hw[1] else counts).astype(np.int64)
