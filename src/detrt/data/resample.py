"""Pillow's resampling as tables of integers, for exact Pillow pixels on any processor. NumPy and Pillow only.

Pillow resizes 8-bit images in two passes, each a weighted sum of neighbours with weights of 22 fractional bits, rounded
to 8 bits. `axis_table` computes the neighbours and weights of one pass, `down_first` the order of the two; `resized` is the
reference for kernels that read the same tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

BITS = 22  # fractional bits of a weight: 32, less 8 for a pixel and 2 for sums that overshoot


@dataclass(frozen=True, slots=True)
class AxisTable:
    """One pass along an axis. first: (out,) int32, the first neighbour of each result. weights: (taps, out) int32; those
    of neighbours beyond the edge are 0."""

    first: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def taps(self) -> int:
        return self.weights.shape[0]


@lru_cache(maxsize=256)
def axis_table(length: int, result: int, resample: str) -> AxisTable:
    """The table of a resize from `length` to `result` pixels. resample: one of `spec.RESAMPLES`."""
    if length == result:
        return AxisTable(np.arange(result, dtype=np.int32), np.full((1, result), 1 << BITS, np.int32))
    if resample == "nearest":
        return _nearest(length, result)
    function, support = _FILTERS[resample]
    scale = length / result
    stretch = max(scale, 1.0)
    support *= stretch
    centre = (np.arange(result) + 0.5) * scale
    first = np.maximum(np.trunc(centre - support + 0.5), 0)
    last = np.minimum(np.trunc(centre + support + 0.5), length)
    taps = int((last - first).max())
    weights = np.zeros((taps, result))
    total = np.zeros(result)
    for tap in range(taps):  # in the order of Pillow
        weight = function((tap + first - centre + 0.5) * (1.0 / stretch))
        weights[tap] = np.where(tap < last - first, weight, 0.0)
        total += weights[tap]
    weights = np.divide(weights, total, out=weights, where=total != 0.0)
    whole = np.trunc(weights * (1 << BITS) + np.where(weights < 0, -0.5, 0.5))
    return AxisTable(first.astype(np.int32), whole.astype(np.int32))


def resized(image: NDArray[np.uint8], size_hw: tuple[int, int], resample: str) -> NDArray[np.uint8]:
    """(H, W, 3) uint8 -> (h, w, 3) uint8, equal to Pillow's."""
    tables = [axis_table(image.shape[axis], size_hw[axis], resample) for axis in (0, 1)]
    for axis in (0, 1) if down_first((image.shape[0], image.shape[1]), size_hw) else (1, 0):
        image = _passed(image, tables[axis], axis)
    return image


def down_first(original_hw: tuple[int, int], size_hw: tuple[int, int]) -> bool:
    """Whether the installed Pillow resizes the columns first, which affects rounding: Pillow 13 does if it removes more than
    twice as many rows as columns, older versions never."""
    fewer_rows, fewer_columns = (before - after for before, after in zip(original_hw, size_hw, strict=True))
    return 0 < fewer_rows > 2 * fewer_columns and _chooses_order()


@lru_cache(maxsize=1)
def _chooses_order() -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (64, 8, 3), np.uint8)
    expected = np.asarray(Image.fromarray(noise).resize((24, 5), Image.Resampling.LANCZOS))
    down, across = axis_table(64, 5, "lanczos"), axis_table(8, 24, "lanczos")
    return bool((_passed(_passed(noise, down, 0), across, 1) == expected).all())


def _passed(image: NDArray[np.uint8], table: AxisTable, axis: int) -> NDArray[np.uint8]:
    shape = [1, 1, 1]
    shape[axis] = -1
    total: NDArray | int = 1 << (BITS - 1)
    for tap in range(table.taps):
        position = np.minimum(table.first + tap, image.shape[axis] - 1)
        total = total + np.take(image, position, axis).astype(np.int32) * table.weights[tap].reshape(shape)
    return np.clip(np.right_shift(total, BITS), 0, 255).astype(np.uint8)


def _nearest(length: int, result: int) -> AxisTable:
    scale = length / result
    steps = np.full(result, scale)
    steps[0] = scale * 0.5
    position = np.trunc(np.add.accumulate(steps))  # Pillow accumulates the step
    return AxisTable(np.minimum(position, length - 1).astype(np.int32), np.full((1, result), 1 << BITS, np.int32))


def _bilinear(x: NDArray) -> NDArray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def _bicubic(x: NDArray) -> NDArray:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2.0) * x - (a + 3.0)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _box(x: NDArray) -> NDArray:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _hamming(x: NDArray) -> NDArray:
    x = np.abs(x)
    turn = np.where(x == 0.0, 1.0, x) * np.pi
    window = float(np.float32(0.54)) + float(np.float32(0.46)) * np.cos(turn)  # single precision in Pillow
    return np.where(x == 0.0, 1.0, np.where(x >= 1.0, 0.0, np.sin(turn) / turn * window))


def _sinc(x: NDArray) -> NDArray:
    turn = np.where(x == 0.0, 1.0, x) * np.pi
    return np.where(x == 0.0, 1.0, np.sin(turn) / turn)


def _lanczos(x: NDArray) -> NDArray:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3.0), 0.0)


_FILTERS: dict[str, tuple[Callable[[NDArray], NDArray], float]] = {
    "lanczos": (_lanczos, 3.0),
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "box": (_box, 0.5),
    "hamming": (_hamming, 1.0),
}
