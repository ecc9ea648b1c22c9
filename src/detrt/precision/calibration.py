"""Scales of activations from histograms over calibration images: entropy, percentile, MSE or the maximum.

The histograms are exact counts of |x| in 2048 equal bins up to the largest value, so that two runs over the
same images give the same scales, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray

from ..data.images import ImageSource
from ..errors import GraphError
from ..spec import ModelSpec
from .calibrate import Progress, run_tensors

BINS = 2048
_LEVELS = 128  # of INT8 on one side of zero
FP8_MAX = 448.0


def histograms(
    model: onnx.ModelProto,
    spec: ModelSpec,
    images: Sequence[ImageSource],
    absmax: dict[str, float],
    progress: Progress | None = None,
    axes: Mapping[str, int] | None = None,
) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.float32]]]:
    """Tensor -> counts of |x| in BINS equal bins of 0 .. absmax[tensor], and for the tensors of `axes` -> (channels,)
    mean over everything but that axis."""
    counts = {name: np.zeros(BINS, np.int64) for name in absmax}
    sums: dict[str, NDArray[np.float64]] = {}
    values: dict[str, int] = {}

    def visit(name: str, array: NDArray[np.float32]) -> None:
        if axes is not None and name in axes:
            rows = np.moveaxis(array, axes[name], -1).reshape(-1, array.shape[axes[name]])
            sums[name] = sums.get(name, np.zeros(rows.shape[1])) + rows.sum(0, dtype=np.float64)
            values[name] = values.get(name, 0) + len(rows)
        top = absmax[name]
        if top > 0:
            index = np.minimum((np.abs(array).reshape(-1) * (BINS / top)).astype(np.int64), BINS - 1)
            counts[name] += np.bincount(index, minlength=BINS)

    run_tensors(model, spec, images, sorted(absmax), visit, progress)
    return counts, {name: (total / max(values[name], 1)).astype(np.float32) for name, total in sums.items()}


def threshold(counts: NDArray[np.int64], absmax: float, method: str, low: str, percentile: float = 99.99) -> float:
    """The |x| that becomes the largest value of the low type; what is above it is clipped.

    counts: (BINS,) of |x| up to absmax. low: "int8" or "fp8".

    Raises:
        GraphError: entropy for FP8, whose steps are not equal.
    """
    if method == "auto":
        method = "mse"
    if method == "entropy" and low == "fp8":
        raise GraphError("entropy calibration measures equal steps, which FP8 does not have; choose mse, percentile or minmax")
    if absmax <= 0 or counts.sum() == 0:
        return max(absmax, 1.0)
    if method == "minmax":
        return absmax
    if method == "percentile":
        total = np.cumsum(counts) / counts.sum()
        return float((np.searchsorted(total, percentile / 100.0) + 1) / BINS * absmax)
    return (_entropy if method == "entropy" else _mse)(counts, absmax, low)


def _mse(counts: NDArray[np.int64], absmax: float, low: str) -> float:
    """The threshold whose rounding and clipping errors have the smallest mean square."""
    centres = (np.arange(BINS) + 0.5) / BINS * absmax
    round_to: Callable[[NDArray], NDArray] = round_fp8 if low == "fp8" else _round_int8
    largest = FP8_MAX if low == "fp8" else 127.0
    best, best_error = absmax, np.inf
    for share in np.linspace(1.0, 0.1, 91):
        step = share * absmax / largest
        error = float((counts * (round_to(centres / step) * step - centres) ** 2).sum())
        if error < best_error * 0.9999:  # a tie keeps the wider range
            best, best_error = float(share * absmax), error
    return best


def _round_int8(values: NDArray) -> NDArray:
    return np.minimum(np.rint(values), 127.0)


def round_fp8(values: NDArray) -> NDArray:
    """Non-negative values rounded to E4M3: 3 bits after the point, exponents from -6, at most 448."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(values, 1e-30))), -6.0)
    step = 2.0 ** (exponent - 3)
    return np.minimum(np.rint(values / step) * step, FP8_MAX)


def _entropy(counts: NDArray[np.int64], absmax: float, low: str) -> float:
    """The threshold with the smallest Kullback-Leibler divergence, as TensorRT's entropy calibrator finds it."""
    full = counts.astype(np.float64)
    best, best_divergence = BINS, np.inf
    for size in range(_LEVELS, BINS + 1, 16):
        kept = full[:size].copy()
        reference = kept.copy()
        reference[-1] += full[size:].sum()
        groups = np.minimum(np.arange(size) * _LEVELS // size, _LEVELS - 1)
        filled = kept > 0
        sums = np.bincount(groups, weights=kept, minlength=_LEVELS)
        slots = np.bincount(groups, weights=filled, minlength=_LEVELS)
        spread = np.where(filled, (sums / np.maximum(slots, 1))[groups], 0.0)
        if spread.sum() == 0:
            continue
        p, q = reference / reference.sum(), spread / spread.sum()
        used = p > 0
        divergence = float((p[used] * np.log(p[used] / np.maximum(q[used], 1e-12))).sum())
        if divergence < best_divergence:
            best, best_divergence = size, divergence
    return best / BINS * absmax
