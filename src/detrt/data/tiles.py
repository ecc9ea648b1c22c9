"""Tiles of large images: which parts of an image are detected in, and how their detections become those of the image.

The rules:

    windows     of equal size, spread evenly, so that neighbours share at least `overlap` of a side; and the whole image as one more
    size        an object up to the shared width, less 4 % of a side, lies whole and off the edges in some window: of those the whole
                image's detections are left out
    cut         a box within 2 % of a window's side of an edge that is not the image's edge may be a piece of an object. One that is no
                longer across that edge than such an object is left out: its object lies whole, or longer, in the neighbour
    same        two detections of one class and of different windows are one object where their IoU is at least 0.5; and where one of them
                is cut, also by the IoU of their parts in what both windows show, or where a cut one lies in the other by at least 0.6
    box         the one with the best score, a cut one counting half; a cut one is joined with the other pieces of its object, one from
                each window with at least half its score, and so are their masks
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..detections import Detections
from ..errors import SessionError, is_finite
from ..tasks import TASKS
from ..tasks.base import Window
from .arguments import pixel_size, refuse

SAME_IOU, SAME_SMALLER = 0.5, 0.6
MOST_TILES = 10_000  # of an image, the whole image among them: 178 million pixels in tiles of 320 that share half
_EDGE, _CUT_WEIGHT, _SURE = 0.02, 0.5, 0.5


@dataclass(frozen=True, slots=True)
class Tiling:
    """Size of tiles, (height, width) in pixels of the image, and the least part of a side that neighbours share."""

    size_hw: tuple[int, int]
    overlap: float = 0.2

    def __str__(self) -> str:
        return f"{self.size_hw[0]}x{self.size_hw[1]}, overlap {self.overlap:g}"

    def count(self, size_hw: tuple[int, int]) -> int:
        """How many windows an image has, without making them."""
        tiles = math.prod(len(_starts(side, tile, self.overlap)) for side, tile in zip(size_hw, self.size_hw, strict=True))
        return tiles if tiles == 1 else tiles + 1

    def check(self, size_hw: tuple[int, int], most: int = MOST_TILES) -> None:
        """Raise SessionError where an image would be more than `most` windows."""
        if (count := self.count(size_hw)) > most:
            raise SessionError(
                f"an image of {size_hw[0]}x{size_hw[1]} pixels would be {count} tiles of {self}, and at most {most} are taken; give "
                "larger tiles, or a smaller overlap"
            )

    def windows(self, size_hw: tuple[int, int]) -> list[Window]:
        """The windows of an image, the whole image last; one, where it is not larger than a tile. Raises SessionError, as `check`."""
        self.check(size_hw)
        rows, columns = (_spread(side, tile, self.overlap) for side, tile in zip(size_hw, self.size_hw, strict=True))
        tiles = [(y0, x0, y1, x1) for y0, y1 in rows for x0, x1 in columns]
        whole = (0, 0, *size_hw)
        return tiles if tiles == [whole] else [*tiles, whole]


def make_tiling(tile: Any, overlap: Any = None) -> Tiling | None:
    """The tiling of what a caller gives: one number, (height, width) or "480x640", and a part from 0 to 0.9; None: no tiles.

    Raises:
        ArgumentError: another type, or out of range; an overlap without tiles.
    """
    size_hw = pixel_size(tile, "tile")
    if overlap is not None and not (is_finite(overlap) and 0 <= overlap <= 0.9):
        raise refuse("`overlap`", "the part of a tile's side that neighbours share, from 0 to 0.9", overlap)
    if size_hw is None:
        if overlap is not None:
            raise refuse("`overlap`", "left out where there are no tiles, or given with the size of tiles", overlap)
        return None
    return Tiling(size_hw, 0.2 if overlap is None else float(overlap))


def _starts(side: int, tile: int, overlap: float) -> range:
    """Numbers of the tiles along a side."""
    tile = min(side, tile)
    return range(1 + math.ceil((side - tile) / max(1, math.floor(tile * (1 - overlap)))))


def _spread(side: int, tile: int, overlap: float) -> list[tuple[int, int]]:
    """(first, last) pixel of each tile along a side; all tiles are equal."""
    tile, numbers = min(side, tile), _starts(side, tile, overlap)
    starts = [round(i * (side - tile) / max(1, len(numbers) - 1)) for i in numbers]
    return [(start, start + tile) for start in starts]


def _shared(side: int, tile: int, overlap: float) -> float:
    """How long an object may be to lie whole in a tile, off its edges; all of a side that has one tile."""
    starts = [start for start, _ in _spread(side, tile, overlap)]
    if len(starts) == 1:
        return math.inf
    return tile - max(b - a for a, b in itertools.pairwise(starts)) - 2 * _EDGE * tile


def merge(parts: Sequence[tuple[Window, Detections]], tiling: Tiling, size_hw: tuple[int, int]) -> Detections:
    """The detections of an image from those of its windows, best score first; the rules are those of this module.

    parts: each window with its detections, in its own pixels; the whole image last.
    """
    if len(parts) == 1:
        return parts[0][1]
    *tiles, (window, whole) = parts
    shared = np.array([_shared(side, tile, tiling.overlap) for side, tile in zip(size_hw, tiling.size_hw, strict=True)])[::-1]
    large = (whole.boxes_xyxy[:, 2:] - whole.boxes_xyxy[:, :2] > shared).any(1)
    parts = [*((window, found[_long(window, found, size_hw, shared)]) for window, found in tiles), (window, whole[large])]
    windows = np.repeat(np.arange(len(parts)), [len(found) for _, found in parts])
    boxes = np.concatenate([found.boxes_xyxy + np.tile(window[1::-1], 2) for window, found in parts]).astype(np.float32)
    cut = np.concatenate([_cut(window, found.boxes_xyxy, size_hw).any(1) for window, found in parts])
    scores = np.concatenate([found.scores for _, found in parts])
    ids = np.concatenate([found.class_ids for _, found in parts])
    shown = np.array([(x0, y0, x1, y1) for (y0, x0, y1, x1), _ in parts])[windows]
    kept: list[int] = []
    members: dict[int, list[int]] = {}
    for class_id in np.unique(ids).tolist():
        own = np.flatnonzero(ids == class_id)
        for first, pieces in _objects(boxes[own], scores[own], cut[own], windows[own], shown[own]):
            kept.append(int(own[first]))
            members[int(own[first])] = own[pieces].tolist()
    kept.sort(key=lambda index: (-scores[index], index))
    for index in kept:
        boxes[index, :2] = boxes[members[index], :2].min(0)
        boxes[index, 2:] = boxes[members[index], 2:].max(0)
    flat = _joined([found for _, found in parts], kept, size_hw)
    return replace(flat, boxes_xyxy=boxes[kept], **_in_image(parts, kept, members, size_hw))


def _cut(window: Window, boxes: NDArray, size_hw: tuple[int, int]) -> NDArray[np.bool_]:
    """(n, 2) which boxes, in pixels of the window, lie at a left or right, and at an upper or lower edge of it that is not the image's."""
    y0, x0, y1, x1 = window
    size = np.array([x1 - x0, y1 - y0])
    low = (boxes[:, :2] < _EDGE * size) & (np.array([x0, y0]) > 0)
    high = (boxes[:, 2:] > size - _EDGE * size) & (np.array([x1, y1]) < size_hw[::-1])
    return low | high


def _long(window: Window, found: Detections, size_hw: tuple[int, int], shared: NDArray) -> NDArray[np.bool_]:
    """Which detections are not cut, or longer across the edge than the shared width (x, y)."""
    boxes = found.boxes_xyxy
    return ~(_cut(window, boxes, size_hw) & (boxes[:, 2:] - boxes[:, :2] <= shared)).any(1)


def _objects(
    boxes: NDArray, scores: NDArray, cut: NDArray[np.bool_], windows: NDArray[np.int64], shown: NDArray
) -> list[tuple[int, list[int]]]:
    """(index of the best detection, indices of all pieces that its box takes in) of each object of one class.

    shown: (n, 4) xyxy of the window of each.
    """
    order = np.argsort(-scores * np.where(cut, _CUT_WEIGHT, 1.0), kind="stable")
    alive = np.ones(len(boxes), bool)
    found = []
    near: dict[int, NDArray[np.int64]] = {}  # window -> what lies in it or in one that shares pixels with it
    for best in order.tolist():
        if not alive[best]:
            continue
        alive[best] = False
        pieces, next_ = [best], 0
        while next_ < len(pieces):
            piece = pieces[next_]
            next_ += 1
            if (window := int(windows[piece])) not in near:
                meets = np.maximum(shown[:, :2], shown[piece, :2]) < np.minimum(shown[:, 2:], shown[piece, 2:])
                near[window] = np.flatnonzero(meets.all(1))
            others = near[window]
            others = others[alive[others] & ~np.isin(windows[others], windows[pieces])]
            iou, smaller = _overlaps(boxes[others], boxes[piece])
            both = np.concatenate(
                [np.maximum(shown[others, :2], shown[piece, :2]), np.minimum(shown[others, 2:], shown[piece, 2:])], 1
            )
            in_both, _ = _overlaps(_clipped(boxes[others], both), _clipped(boxes[piece][None], both))
            inside = np.where(_area(boxes[others]) <= _area(boxes[piece]), cut[others], cut[piece]) & (smaller >= SAME_SMALLER)
            part = (cut[others] | cut[piece]) & (in_both >= SAME_IOU)
            same = others[(iou >= SAME_IOU) | inside | part]
            alive[same] = False
            if cut[piece]:
                sure = same[scores[same] >= _SURE * scores[best]]
                ranked = sure[np.argsort(-scores[sure], kind="stable")]
                first = np.unique(windows[ranked], return_index=True)[1]
                pieces += ranked[first].tolist()  # the better one of a window
        found.append((best, pieces))
    return found


def _area(boxes: NDArray) -> NDArray:
    return np.prod(np.clip(boxes[..., 2:] - boxes[..., :2], 0, None), axis=-1)


def _clipped(boxes: NDArray, inside: NDArray) -> NDArray:
    """The parts of boxes, xyxy, inside others."""
    return np.concatenate([np.maximum(boxes[:, :2], inside[:, :2]), np.minimum(boxes[:, 2:], inside[:, 2:])], 1)


def _overlaps(boxes: NDArray, other: NDArray) -> tuple[NDArray, NDArray]:
    """IoU, and intersection over the smaller one, of boxes and one or as many others; 0 of empty ones."""
    inner = _area(np.concatenate([np.maximum(boxes[:, :2], other[..., :2]), np.minimum(boxes[:, 2:], other[..., 2:])], 1))
    areas = _area(boxes), _area(other)
    parts = (areas[0] + areas[1] - inner, np.minimum(*areas))
    iou, smaller = (np.divide(inner, part, out=np.zeros(len(boxes)), where=part > 0) for part in parts)
    return iou, smaller


def _joined(parts: Sequence[Detections], kept: Sequence[int], size_hw: tuple[int, int]) -> Detections:
    """Chosen detections of several images as one, without what is in pixels."""
    labels = [label for found in parts for label in found.labels]
    spans = None
    if parts[0].phrase_spans is not None:
        all_spans = [span for found in parts for span in found.phrase_spans or ()]
        spans = tuple(all_spans[i] for i in kept)
    return Detections(
        np.zeros((len(kept), 4), np.float32),
        np.concatenate([found.scores for found in parts])[kept],
        np.concatenate([found.class_ids for found in parts])[kept],
        tuple(labels[i] for i in kept),
        size_hw,
        phrase_spans=spans,
        prompt=parts[0].prompt,
    )


def _in_image(
    parts: Sequence[tuple[Window, Detections]], kept: Sequence[int], members: Mapping[int, list[int]], size_hw: tuple[int, int]
) -> dict[str, Any]:
    """What detections have beside boxes, in pixels of the image."""
    found: dict[str, Any] = {}
    for task in TASKS:
        values = [(window, getattr(one, task.field)) for window, one in parts]
        if all(value is not None for _, value in values):
            found[task.field] = task.of_windows(values, kept, members, size_hw)
    return found
