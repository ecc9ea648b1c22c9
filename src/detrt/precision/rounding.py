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
BLOCK = 128  # inputs whose updates of later ones are made in one product


class Moments:
    """What the inputs of a layer say about its weights: sums of products, whose size does not depend on the number of positions.

    weight: (channels, inputs). has_bias: the mean error of a channel does not count, because the bias takes it.
    """

    def __init__(self, weight: NDArray[np.float32], *, has_bias: bool) -> None:
        channels, inputs = weight.shape
        self.weight, self.has_bias = weight.astype(np.float64), has_bias
        self.count = 0
        self._products = np.zeros((inputs, inputs))
        self._crossed = np.zeros((inputs, channels))  # of the inputs and the errors that they make in the result
        self._sums, self._error_sums = np.zeros(inputs), np.zeros(channels)
        self._origin: NDArray[np.float64] | None = None

    def add(self, inputs: NDArray[np.float32], errors: NDArray[np.float32]) -> None:
        """Both (positions, inputs). inputs: as the layer reads them. errors: of these, rounded minus exact."""
        read, made = inputs.astype(np.float64), errors @ self.weight.T
        if self.has_bias:
            # Distances from about the mean: squares of a mean would hide a small variance, or make one of rounding.
            if self._origin is None:
                self._origin = read.mean(0)
            read -= self._origin
            self._sums += read.sum(0)
            self._error_sums += made.sum(0)
        self.count += len(read)
        self._products += read.T @ read
        self._crossed += read.T @ made

    def covariances(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Covariance of the inputs, (inputs, inputs), and of them and the errors that they make, (inputs, channels); without a bias mean
        products. The sums are gone then."""
        self._products /= self.count
        self._crossed /= self.count
        self._products -= np.outer(self._sums, self._sums / self.count**2)
        self._crossed -= np.outer(self._sums, self._error_sums / self.count**2)
        return self._products, self._crossed


def round_weights(moments: Moments, axis: int | None, low: Precision) -> tuple[NDArray[np.float32], NDArray[np.float16]] | None:
    """Rounded weights (channels, inputs) and their scales, (channels,) or (); None for inputs that are all zero, or constant
    beside a bias. axis: 0, or None for one scale."""
    covariance, crossed = moments.covariances()
    diagonal = np.einsum("ii->i", covariance)  # a view
    damping = (DAMPING + len(covariance) / moments.count) * float(diagonal.mean())
    if not damping > 0:
        return None
    diagonal += damping
    order = np.argsort(-diagonal, kind="stable")
    # Upper triangle; its product with its own transpose is the covariance in this order.
    factor = np.linalg.cholesky(covariance[np.ix_(order[::-1], order[::-1])])[::-1, ::-1]
    target = moments.weight.T.copy()
    target[order] -= _solve(factor, crossed[order])
    scale = weight_scales(target.T.astype(np.float32), axis, low)
    result = np.empty(target.shape[::-1], np.float32)
    result[:, order] = _round(target[order], scale.astype(np.float64), factor, low).T
    return result, scale


def _solve(factor: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """x with factor @ factor.T @ x = right, (inputs, channels), by substitution. factor: upper triangle."""
    x = right.copy()
    blocks = [slice(start, min(start + BLOCK, len(x))) for start in range(0, len(x), BLOCK)]
    for one in reversed(blocks):
        x[one] = np.linalg.solve(factor[one, one], x[one] - factor[one, one.stop :] @ x[one.stop :])
    for one in blocks:
        x[one] = np.linalg.solve(factor[one, one].T, x[one] - factor[: one.start, one].T @ x[: one.start])
    return x


def _round(
    weight: NDArray[np.float64], scale: NDArray[np.float64], factor: NDArray[np.float64], low: Precision
) -> NDArray[np.float64]:
    """weight: (inputs, channels). scale: (channels,) or (). factor: upper triangle, see `round_weights`; overwritten.

    The mean square of a channel is that of `factor.T @ (rounded - weight)`, whose value i depends on the inputs up to i alone. Input i is
    rounded to the value nearest to where that is zero. These are the updates of GPTQ, which writes them with the inverse covariance.
    """
    factor /= np.diag(factor).copy()
    result = weight.copy()
    for start in range(0, len(weight), BLOCK):
        stop = min(start + BLOCK, len(weight))
        for i in range(start, stop):
            result[i] = round_to_precision(result[i] / scale, low) * scale
            result[i + 1 : stop] -= np.outer(factor[i, i + 1 : stop], result[i] - weight[i])
        result[stop:] -= factor[start:stop, stop:].T @ (result[start:stop] - weight[start:stop])
    return result
