"""Resizing without antialiasing, as PyTorch's `interpolate` without align_corners does it on a CPU. NumPy only."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..spec import InputSpec

_CUBIC = -0.75  # PyTorch's a of the cubic convolution


def interpolate(image: NDArray[np.uint8], size_hw: tuple[int, int], given: InputSpec) -> NDArray[np.float32]:
    """(H, W, 3) uint8 -> (h, w, 3) float32: between the nearest pixels of each axis, without a filter for smaller sizes.

    Bilinear is what RF-DETR's processor in transformers does; bicubic, kept in 0..255, that of PP-DocLayoutV4, and with `rounded`
    those of V2 and V3.
    """
    if given.rounded:
        return _bicubic_of_integers(image, size_hw).astype(np.float32)
    if given.resample == "bicubic":
        return np.clip(_bicubic(image, size_hw), 0, 255)
    pixels = image.astype(np.float32)
    for axis, side in enumerate(size_hw):
        length = image.shape[axis]
        # Float64 holds the product whole, so that it is rounded once: PyTorch multiplies and adds in one instruction (AVX2, CUDA).
        place = ((np.arange(side) + 0.5) * np.float64(np.float32(length / side)) - 0.5).astype(np.float32)
        place = np.maximum(place, 0)
        first = place.astype(np.int64)
        weight = (place - first).reshape(_along(axis, side))
        second = np.minimum(first + 1, length - 1)
        pixels = pixels.take(first, axis) * (1 - weight) + pixels.take(second, axis) * weight
    return pixels


def _bicubic(image: NDArray[np.uint8], size_hw: tuple[int, int]) -> NDArray[np.float32]:
    """In float32, over four pixels of each axis; pixels outside the image are those at its edge."""
    pixels = image.astype(np.float32)
    for axis in (1, 0):
        length, side = image.shape[axis], size_hw[axis]
        place = ((np.arange(side) + 0.5) * np.float64(np.float32(length / side)) - 0.5).astype(np.float32)
        first = np.floor(place).astype(np.int64)
        total = np.zeros((), np.float32)
        for tap in range(-1, 3):
            weight = _weight(np.abs(place - first - np.float32(tap)).astype(np.float32)).reshape(_along(axis, side))
            total = total + pixels.take(np.clip(first + tap, 0, length - 1), axis) * weight
        pixels = total
    return pixels


def _bicubic_of_integers(image: NDArray[np.uint8], size_hw: tuple[int, int]) -> NDArray[np.int32]:
    """The same with weights of 16 bits, rounded to 0..255 after each axis, rows first: PyTorch's own form for images of integers."""
    pixels = image.astype(np.int32)
    for axis in (1, 0):
        length, side = image.shape[axis], size_hw[axis]
        if length == side:
            continue
        index, weights, bits = _integer_weights(length, side)
        taps = (pixels.take(index[:, i], axis) * weights[:, i].reshape(_along(axis, side)) for i in range(4))
        pixels = np.clip((sum(taps) + (1 << (bits - 1))) >> bits, 0, 255)
    return pixels


@lru_cache(maxsize=64)
def _integer_weights(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int32], int]:
    """(side, 4) pixels, (side, 4) weights of `bits` fractional bits, bits: as many as the largest weight leaves of 16."""
    place = (np.arange(side) + 0.5) * (length / side) - 0.5
    first = np.floor(place).astype(np.int64)
    index = np.clip(first[:, None] + np.arange(-1, 3), 0, length - 1)
    # A pixel at the edge stands for those outside: its weights are summed before they are rounded.
    weights = np.zeros((side, 4))
    for tap in range(4):
        np.add.at(weights, (np.arange(side), index[:, tap] - index[:, 0]), _weight(np.abs(place - first - (tap - 1))))
    bits = next(one for one in range(22) if int(0.5 + weights.max() * (1 << (one + 1))) >= 1 << 15)
    scaled = weights * (1 << bits)
    whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    return np.minimum(index[:, :1] + np.arange(4), length - 1), whole, bits


def _weight(distance: NDArray) -> NDArray:
    """Cubic convolution (Keys, 1981) of a pixel at a distance of 0 to 2 pixels, in the type of the distance."""
    a = _CUBIC
    inner = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, inner, outer)


def _along(axis: int, side: int) -> list[int]:
    return [side if one == axis else 1 for one in range(3)]
