"""Resizing of an image in a black square around it, as OWLv2's processor does it. NumPy only.

The image lies at the top left of a square of its longer side. Where the square becomes smaller it is blurred by a Gaussian of
(factor - 1) / 2 pixels; then each pixel is interpolated between its two neighbours of each axis. Outside of the square both see its
mirror image. Rows and columns are independent, so that each axis is one band matrix; black adds nothing, and is never stored.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_RADIUS = 4.0  # standard deviations at which the Gaussian ends, as in SciPy
_BLOCK = 32  # rows of a band matrix that are multiplied together


def resize_in_square(image: NDArray[np.uint8], size_hw: tuple[int, int]) -> NDArray[np.float32]:
    """(H, W, 3) uint8 -> (h, w, 3) float32 of 0..255, the whole square."""
    height, width = image.shape[:2]
    side = max(height, width)
    pixels = image.transpose(2, 0, 1).astype(np.float32)
    rows = np.empty((3, size_hw[0], width), np.float32)
    for first, last, start, weights in _bands(side, size_hw[0]):
        np.matmul(weights[:, : max(height - start, 0)], pixels[:, start : start + weights.shape[1]], out=rows[:, first:last])
    found = np.empty((3, *size_hw), np.float32)
    for first, last, start, weights in _bands(side, size_hw[1]):
        found[:, :, first:last] = rows[:, :, start : start + weights.shape[1]] @ weights[:, : max(width - start, 0)].T
    return found.transpose(1, 2, 0)


@lru_cache(maxsize=16)
def _bands(length: int, side: int) -> list[tuple[int, int, int, NDArray[np.float32]]]:
    """The resize of an axis in blocks: (first, last) of the results, the first pixel that they see, their weights (results, pixels)."""
    whole = _matrix(length, side)
    found = []
    for first in range(0, side, _BLOCK):
        rows = whole[first : first + _BLOCK]
        seen = np.flatnonzero(rows.any(0))
        found.append((first, first + len(rows), int(seen[0]), np.ascontiguousarray(rows[:, seen[0] : seen[-1] + 1], np.float32)))
    return found


def _matrix(length: int, side: int) -> NDArray[np.float64]:
    """(side, length): the weights of all pixels of an axis in each result."""
    place = np.abs((np.arange(side) + 0.5) * (length / side) - 0.5)
    place = np.where(place > length - 1, 2 * (length - 1) - place, place) if length > 1 else np.zeros(side)
    low = np.floor(place).astype(np.int64)
    weight_of_next = place - low
    sigma = max(0.0, (length / side - 1) / 2)
    radius = int(_RADIUS * sigma + 0.5)
    steps = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (steps / sigma) ** 2) if radius else np.ones(1)
    kernel /= kernel.sum()
    matrix = np.zeros((side, length))
    for step, weight in zip(steps, kernel, strict=True):
        for pixel, part in ((low, 1 - weight_of_next), (low + 1, weight_of_next)):
            # A neighbour outside has no part in the result; the blur of one inside sees the mirror image.
            inner = np.minimum(pixel, length - 1)
            np.add.at(matrix, (np.arange(side), _mirrored(inner + step, length)), weight * part)
    return matrix


def _mirrored(index: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Indices of an axis that goes on as its mirror image on both sides, the pixels at its ends once."""
    period = max(2 * (length - 1), 1)
    index = np.abs(index) % period
    return np.minimum(index, period - index) if length > 1 else index * 0
