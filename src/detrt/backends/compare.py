"""The only comparison of tensors of two runs: one norm, one rule for masked classes, padding, NaN and queries that change places, and one
way to let a reference compute with what the candidate selected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.preprocess import preprocess
from ..errors import GateError
from ..spec import BEST_SCORES, BOXES, GIVEN_SCORES, LOGITS, PRED_BOXES
from ..text.tensors import ATTENTION_MASK, CLASS_MASK, PHRASE_FEATURES, PHRASE_MASK
from .base import Choices, Feeds, Outputs, Session

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
    """Output -> `relative_error`; `got` may have more outputs, and the scores that a run with `force` tells are no outputs.

    Models that select queries by rank may swap two whose scores tie within rounding. If outputs differ by more than `limit`,
    each query is therefore compared with the nearest one, provided that this is a one-to-one assignment. Masks follow the queries
    that the other outputs have paired.
    """
    want = {name: array for name, array in want.items() if not name.endswith((GIVEN_SCORES, BEST_SCORES))}
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


def largest_differences(expected: Sequence[Outputs], got: Sequence[Outputs], limit: float) -> dict[str, float]:
    """Output -> the largest of its `output_differences` in several batches."""
    worst: dict[str, float] = {}
    for want, have in zip(expected, got, strict=True):
        found = output_differences(want, have, limit)
        worst = {name: max(error, worst.get(name, 0.0)) for name, error in found.items()}
    return worst


Follow = Callable[[], tuple[Sequence[Outputs], Sequence[Outputs]] | None]


def differences_of_runs(expected: Sequence[Outputs], got: Sequence[Outputs], limit: float, follow: Follow) -> dict[str, float]:
    """`largest_differences`; where one is beyond `limit`, those with the selections of the candidate, which ties may have changed.

    expected, got: outputs of the reference and of the candidate for the same batches.
    follow: runs the candidate again so that it tells what it selects, and the reference with that: (outputs of the reference, of the
        candidate). The candidate must give then what it gave before. None: nothing tells or takes selections.
    """
    errors = largest_differences(expected, got, limit)
    if max(errors.values()) <= limit or (followed := follow()) is None:
        return errors
    following, told = followed
    pairs = largest_differences(following, told, limit), largest_differences(got, told, limit)
    return {name: max(one[name] for one in pairs) for name in errors}


def drawn_batches(session: Session, counts: Sequence[int] = (1, 2)) -> list[Feeds]:
    """Feeds of so many drawn scenes, at the usual size; of a model with a fixed batch, one of these."""
    # Not with the module: Pillow's drawing takes a megabyte.
    from ..data.scenes.scene import draw_images

    counts, spec = counts if session.info.fixed_batch is None else (session.info.fixed_batch,), session.spec
    return [preprocess(draw_images(count, spec.input.size_hw), spec).feeds for count in counts]


Opener = Callable[[], AbstractContextManager[Session]]


def compare_opened(
    reference: Opener, candidate: Opener, batches_for: Callable[[Session], Sequence[Feeds]], limit: float, *, exact: bool = True
) -> dict[str, float]:
    """Output -> largest difference of two models, relative to the largest value; see `differences_of_runs`.

    reference, candidate: open the sessions. One is closed before the other is opened: large models need gigabytes in each.
    batches_for: what is run, from the opened reference.
    exact: follow the selections of the candidate. Below FP32 nothing is near enough for that, and detections are judged.

    Raises:
        SessionError: one of them cannot run.
    """
    with reference() as session:
        batches = batches_for(session)
        expected = [session.run(feeds) for feeds in batches]
    with candidate() as session:
        got = [session.run(feeds) for feeds in batches]

    def follow() -> tuple[Sequence[Outputs], Sequence[Outputs]] | None:
        with candidate() as session:
            if not exact or not session.tells_selections:
                return None
            told = [session.selections(feeds) for feeds in batches]
        if not any(choices.selections for _, choices in told):
            return None
        with reference() as session:
            if not session.takes_selections:
                return None
            following = [session.run(feeds, choices) for feeds, (_, choices) in zip(batches, told, strict=True)]
        return following, [outputs for outputs, _ in told]

    return differences_of_runs(expected, got, limit, follow)


def forced_differences(
    reference: Session, got: Outputs, choices: Choices, feeds: Feeds, *, padding: Feeds | None = None
) -> list[tuple[str, float, str]]:
    """(output, error, explanation) of each output that both have, both with the selections of the candidate.

    got, choices: of the candidate, as its `selections` gives them. feeds: of the reference. padding: feeds with the masks of columns that
    are left out, see `unpadded`.

    Raises:
        SessionError: the reference cannot run, or selects another number of times.
    """
    want = reference.run(feeds, choices)
    names = [name for name in want if name in got]
    return [(name, *difference(*unpadded(want[name], got[name], padding or {}, name), name)) for name in names]


def can_follow(reference: Session, candidate: Session) -> bool:
    """Whether the reference can compute with what the candidate selects; both the sessions that run the graphs."""
    return candidate.tells_selections and reference.takes_selections


def selection_error(outputs: Outputs, count: int) -> float:
    """By how much the scores of what a model was given are below the best ones, relative to the largest. In whatever order, because scores
    may tie.

    outputs: of a run of `count` images with `force`.
    """
    names = [name.removesuffix(BEST_SCORES) for name in outputs if name.endswith(BEST_SCORES)]
    pairs = [[np.sort(outputs[name + end].reshape(count, -1)) for end in (BEST_SCORES, GIVEN_SCORES)] for name in names]
    return max((relative_error(best, given) for best, given in pairs), default=0.0)


def unpadded(expected: NDArray, got: NDArray, feeds: Mapping[str, Any], name: str) -> tuple[NDArray, NDArray]:
    """Both without the columns of padding, whose -10000 would be the scale that errors are compared with.

    They must be equal there, or nothing is. Of padded phrases boxes and masks are left out as well.
    """
    if expected.shape != got.shape:
        return expected, got
    if PHRASE_FEATURES in feeds and expected.shape[:2] == feeds[PHRASE_MASK].shape[:2]:
        real = feeds[PHRASE_MASK].any(-1)
        equal = name != LOGITS or np.array_equal(expected[~real], got[~real])
        return expected[real], got[real] if equal else np.full_like(got[real], np.inf)
    mask = feeds.get(ATTENTION_MASK, feeds.get(CLASS_MASK))
    if name != LOGITS or mask is None:
        return expected, got
    real = np.broadcast_to(mask[:, None, :] > 0, expected.shape)
    if not np.array_equal(expected[~real], got[~real]):
        return expected, np.full_like(got, np.inf)
    return expected[real], got[real]


def require_near(errors: Iterable[tuple[str, float, str]], limit: float, differs: str, advice: str = "") -> None:
    """Raise GateError for the largest error that is beyond `limit` or no finite number, before a file is written.

    errors: (output in words, error, explanation or ""). differs: what differs from what. advice: how to go on.
    """
    bad = [one for one in errors if not one[1] <= limit or not np.isfinite(one[1])]
    if bad:
        output, error, text = max(bad, key=lambda one: one[1] if np.isfinite(one[1]) else np.inf)
        why = f": {text}" if text else ""
        raise GateError(f"{differs} by {error:.2g} (relative, allowed {limit}) in {output}{why}; no file was written{advice}")


def apart(scores: NDArray, gap: float) -> NDArray[np.bool_]:
    """(batch, queries) scores in descending order -> whether neither neighbour is within `gap`, so that the rank is no matter of rounding."""
    gaps = np.abs(np.diff(scores.astype(np.float32), axis=1))
    alone = np.pad(gaps > gap, ((0, 0), (1, 1)), constant_values=True)
    return alone[:, 1:] & alone[:, :-1]
