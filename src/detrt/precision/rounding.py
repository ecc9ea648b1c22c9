"""Weights of FP8, rounded together for the inputs that a layer reads.

E4M3 has four binary digits, so that rounding each weight to its nearest value is half of the noise of a layer. The error of one
weight is spread over those that are not rounded yet, so that the errors of a result cancel on the inputs of calibration (GPTQ, Frantar
et al., arXiv:2210.17323). Before, the weights are moved to those that give the exact result from rounded inputs with the smallest
mean square.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..spec import Precision
from .quantize import round_to_precision, weight_scales

# Added to the diagonal of the covariance, relative to its mean, beside the inputs for each position: on images that DEIMv2-Atto was not
# fitted to it leaves less noise than 0.003 to 0.03 (docs/results/figures/precision.jsonl).
DAMPING = 0.1
BLOCK = 128  # columns whose updates of later ones are made in one product


def round_weights(
    weight: NDArray[np.float32],
    inputs: NDArray[np.float32],
    errors: NDArray[np.float32],
    axis: int | None,
    low: Precision,
    *,
    has_bias: bool,
) -> tuple[NDArray[np.float32], NDArray[np.float16]] | None:
    """Rounded weights (channels, inputs) and their scales, (channels,) or (); None for inputs that are all zero.

    weight: (channels, inputs). inputs: (positions, inputs) as the layer reads them. errors: of these, rounded minus exact. axis: 0, or
    None for one scale. has_bias: the mean error of a channel does not count, because the bias takes it.
    """
    inputs, errors = inputs.astype(np.float64), errors.astype(np.float64)
    if has_bias:
        inputs, errors = inputs - inputs.mean(0), errors - errors.mean(0)
    moments = inputs.T @ inputs / len(inputs)
    damping = (DAMPING + weight.shape[1] / len(inputs)) * float(np.diag(moments).mean())
    if damping <= 0:
        return None
    moments[np.diag_indices_from(moments)] += damping
    target = weight - np.linalg.solve(moments, inputs.T @ (errors @ weight.T) / len(inputs)).T
    order = np.argsort(-np.diag(moments), kind="stable")
    spread = np.linalg.cholesky(np.linalg.inv(moments[np.ix_(order, order)])).T  # upper triangle
    scale = weight_scales(target.astype(np.float32), axis, low)
    result = np.empty_like(weight)
    result[:, order] = _round(target[:, order], scale.astype(np.float64).reshape(-1, 1), spread, low)
    return result, scale


def _round(
    weight: NDArray[np.float64], scale: NDArray[np.float64], spread: NDArray[np.float64], low: Precision
) -> NDArray[np.float64]:
    """weight: (channels, inputs), overwritten. scale: (channels, 1) or (1, 1)."""
    for start in range(0, weight.shape[1], BLOCK):
        stop = min(start + BLOCK, weight.shape[1])
        errors = np.empty((len(weight), stop - start))
        for i in range(start, stop):
            exact = weight[:, i : i + 1].copy()
            weight[:, i : i + 1] = round_to_precision(exact / scale, low) * scale
            errors[:, i - start : i - start + 1] = error = (exact - weight[:, i : i + 1]) / spread[i, i]
            weight[:, i + 1 : stop] -= error * spread[i, i + 1 : stop]
        weight[:, stop:] -= errors @ spread[start:stop, stop:]
    return weight
