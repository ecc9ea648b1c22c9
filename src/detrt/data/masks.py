"""From mask logits to masks of the image's size: the one definition of upsampling and threshold.

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

import numpy as np
from numpy.typing import NDArray

from ..detections import Masks


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
