"""The only comparison of tensors of two runs: one norm, and one rule for masked classes, NaN and queries that change places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..spec import BOXES, LOGITS, PRED_BOXES
from .base import Outputs

_LEAST = 1e-6  # scale of a tensor of zeros
_FILL = 1e30  # a fill value such as finfo.min; a narrower type has another one
_MASKED = 1e4  # the fill value of the narrowest type is beyond it


def difference(expected: NDArray, actual: NDArray, output: str = "", metric: str = "max") -> tuple[float, str]:
    """(error, explanation where a number is not enough) of one tensor; inf where shapes or finiteness differ.

    The error is the largest absolute difference over the largest absolute expected value. Of integers it is 1 where one differs.

    Args:
        expected: of the reference.
        actual: of the candidate.
        output: name of an output of a model: boxes must be finite, and NaN is none of its values on either side. Minus infinity in
            logits, of a masked class, may be the least number of a type. "": any tensor in a model, whose fill values may be those of
            another type.
        metric: "max", or "rms" for the root mean square in place of both maxima.
    """
    if expected.shape != actual.shape:
        return np.inf, f"shape {actual.shape}, the reference has {expected.shape}"
    if expected.dtype.kind in "iub" and actual.dtype.kind in "iub":
        wrong = int((expected != actual).sum())
        return (1.0, f"{wrong} of {expected.size} integers differ") if wrong else (0.0, "")
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    if output and (np.isnan(a).any() or np.isnan(b).any()):
        return np.inf, f"{int(np.isnan(b).sum())} of {b.size} values are NaN, {int(np.isnan(a).sum())} of the reference"
    if output in (PRED_BOXES, BOXES) and not np.isfinite(b).all():
        return np.inf, f"{int((~np.isfinite(b)).sum())} of {b.size} values are not finite"
    if not output:
        filled = (np.abs(a) >= _FILL) & (np.sign(a) == np.sign(b)) & (np.abs(b) >= _MASKED)
    else:
        filled = np.isneginf(a) & (b < -_MASKED) & (output == LOGITS)
    a, b = a[~filled], b[~filled]
    lost = np.isfinite(a) & ~np.isfinite(b)
    if lost.any():
        kind = "NaN" if np.isnan(b[lost]).all() else "infinite"
        largest = float(np.abs(a[np.isfinite(a)]).max())
        return np.inf, f"{int(lost.sum())} of {a.size} values are {kind}; the reference reaches {largest:.3g}"
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return np.inf, "the reference has infinite values or NaN that the candidate does not have"
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf, "infinite values have another sign, or are NaN on one side"
    a, b = a[finite], b[finite]
    if not a.size:
        return 0.0, ""
    if metric == "rms":
        return float(np.sqrt(((b - a) ** 2).mean()) / max(np.sqrt((a**2).mean()), _LEAST)), ""
    return float(np.abs(b - a).max() / max(np.abs(a).max(), _LEAST)), ""


def relative_error(expected: NDArray, actual: NDArray, output: str = "", metric: str = "max") -> float:
    """The number of `difference`."""
    return difference(expected, actual, output, metric)[0]


def output_differences(want: Outputs, got: Outputs, limit: float) -> dict[str, float]:
    """Output -> `relative_error`; `got` may have more outputs.

    Models that select queries by rank may swap two whose scores tie within rounding. If outputs differ by more than `limit`,
    each query is therefore compared with the nearest one, provided that this is a one-to-one assignment. Masks follow the queries
    that the other outputs have paired.
    """
    errors = {name: relative_error(array, got[name], name) for name, array in want.items()}
    rows = [name for name, array in want.items() if array.ndim == 3]
    queries = {side[name].shape[:2] for side in (want, got) for name in want if want[name].ndim >= 3}
    if max(errors.values()) <= limit or len(queries) != 1 or not rows or any(a.ndim < 3 for a in want.values()):
        return errors
    # Scaled, so that logits do not outweigh boxes; infinite values (masked classes) are equal or not.
    scales = {name: max(float(np.abs(a[np.isfinite(a)]).max(initial=0.0)), 1e-9) for name, a in want.items()}
    before, after = (
        np.concatenate([np.nan_to_num(side[name] / scales[name], nan=0.0, posinf=1e3, neginf=-1e3) for name in rows], -1)
        for side in (want, got)
    )
    partner = np.stack([_nearest(a, b) for a, b in zip(before, after, strict=True)])
    if any(len(set(row.tolist())) != len(row) for row in partner):
        return errors
    image = np.arange(len(partner))[:, None]
    return {name: relative_error(a, got[name][image, partner], name) for name, a in want.items()}


def _nearest(rows: NDArray, others: NDArray) -> NDArray:
    """For each row the index of the nearest other row."""
    return np.array([int(np.square(others - row).sum(-1).argmin()) for row in rows])
