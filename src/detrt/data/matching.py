"""Matching of the detections of two models, robust to the order of ties, and the gates of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..detections import Detections, box_iou
from ..errors import DetrtError, check_one_of
from ..spec import Precision
from ..tasks import TASKS
from ..tasks.base import AreaTask

_FRACTIONS = ("threshold", "unmatched", "mismatched", "ap", "mask_iou", "mask_score")


@dataclass(frozen=True, slots=True)
class Gate:
    """Tolerances of a comparison.

    threshold: compare detections with at least this score; where an image has fewer than `at_least`
        such detections, its `at_least` best are compared, so that no image passes because it has too few boxes.
    box_px: largest difference of a box side, in pixels of the original image. score: of a score.
    tensor: largest difference of logits and boxes relative to their largest value, selections forced.
    unmatched: fraction of the compared detections that may be missing, and of those that may be extra.
    mismatched: fraction of the compared detections that may be beyond a tolerance or unmatched, and one in any case; 0: none, and no output
        beyond `tensor`. Rounding alone moves up to 6 % of them below FP32 (docs/guide/verify.md#gates).
    mask_iou: lowest IoU of the two masks of a pair, for models with masks. mask_score: pairs below this score are left out of it:
        rounding moves the mask of a query that found nothing anywhere.
    ap: largest loss of COCO AP (0..1), with ground truth. ap_decides: with ground truth, differences of
        boxes, scores and tensors are reported, but only the AP decides.
    """

    threshold: float = 0.3
    at_least: int = 5
    box_px: float = 0.5
    score: float = 1e-3
    tensor: float = Precision.FP32.output_tolerance
    unmatched: float = 0.0
    mismatched: float = 0.0
    ap: float = 1e-3
    ap_decides: bool = False
    mask_iou: float = 0.99
    mask_score: float = 0.0

    def __post_init__(self) -> None:
        for name in ("threshold", "box_px", "score", "tensor", "unmatched", "mismatched", "ap", "mask_iou", "mask_score"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < float("inf")):
                raise DetrtError(f"gate.{name} must be a number of at least 0; got {value!r}")
            if name in _FRACTIONS and value > 1:
                raise DetrtError(f"gate.{name} must be a fraction from 0 to 1, such as 0.05 for 5 %; got {value!r}")
        if self.at_least < 1:
            raise DetrtError(f"gate.at_least must be at least 1; got {self.at_least}")

    def exceeded(self, box_px: float, score: float, mask_iou: float = 1.0) -> bool:
        """Whether a pair of detections differs by more than a tolerance."""
        return box_px > self.box_px or score > self.score or mask_iou < self.mask_iou


# Tolerances for rounding, by the lowest precision of the candidate; measured in docs/guide/verify.md. A tie of two queries can move a
# detection in a crowd far, so that below FP32 the AP decides, if there is one. Masks: docs/results/average-precision.md.
_16_BITS = Gate(
    box_px=4.0, score=0.02, tensor=0.05, unmatched=0.02, mismatched=0.1, ap=0.002, ap_decides=True, mask_iou=0.9, mask_score=0.3
)
_8_BITS = replace(_16_BITS, box_px=32.0, score=0.25, tensor=0.5, unmatched=0.10, ap=0.010, mask_iou=0.5)
GATES = {
    Precision.FP32: Gate(),
    Precision.TF32: _16_BITS,
    Precision.FP16: _16_BITS,
    Precision.BF16: replace(_16_BITS, box_px=16.0, score=0.10, tensor=0.25, unmatched=0.05, mask_iou=0.85),
    Precision.INT8: _8_BITS,
    Precision.FP8: _8_BITS,
}
# In place of `Gate.mismatched` for one shape of an engine below FP32, because its images are few.
MISMATCHED_OF_SHAPE = 0.25


def gate_for(precision: str) -> Gate:
    """The gate of a precision: fp32, tf32, fp16, bf16, int8 or fp8.

    Raises:
        DetrtError: another name.
    """
    check_one_of("`precision`", precision, GATES, DetrtError)
    return GATES[Precision(precision)]


@dataclass(frozen=True, slots=True)
class ImageMatch:
    """One image: number of compared and of unmatched detections, and the largest differences.

    beyond: matched detections whose box, score or mask is beyond its tolerance.
    mask_iou: the lowest of the pairs; None of models without masks, and where no pair reaches `Gate.mask_score`.
    """

    compared: int
    missing: int
    extra: int
    box_px: float
    score: float
    mask_iou: float | None = None
    beyond: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def mismatched(found: Any) -> int:
    """Detections of an `ImageMatch`, or of a row with its fields, without one that is near enough, on the side that has more of them."""
    return max(found.missing, found.extra) + found.beyond


def few(count: int, compared: int, most: float) -> bool:
    """Whether so many of the compared detections may be mismatched; one may be in any case."""
    return count <= max(1, most * compared)


def within(found: Any, gate: Gate) -> bool:
    """Whether all differences of an `ImageMatch`, or of a row with its fields, are within the tolerances."""
    return (
        max(found.missing, found.extra) <= gate.unmatched * found.compared
        and found.box_px <= gate.box_px
        and found.score <= gate.score
        and (found.mask_iou is None or found.mask_iou >= gate.mask_iou)
    )


def match(reference: Detections, candidate: Detections, gate: Gate) -> ImageMatch:
    """Pair the detections of one image.

    Both sides must include all detections that the gate compares. A detection
    is paired with the nearest one of its class (largest side difference in pixels plus score
    difference in units of the gate). Detections within `gate.score` of the cut-off may be missing on one side; differences of pairs below the cut-off on both
    sides do not count.
    """
    return match_pairs(reference, candidate, gate).summary()


def match_classes(pairings: Iterable[Pairing]) -> dict[str, ImageMatch]:
    """What `Pairing.summary` says of each class, over all images: class name -> match, most compared first. Without masks."""
    rows: dict[str, dict[str, Any]] = {}

    def row_of(label: str) -> dict[str, Any]:
        return rows.setdefault(label, {"compared": 0, "missing": 0, "extra": 0, "box_px": 0.0, "score": 0.0, "beyond": 0})

    for pairing in pairings:
        ref, cand = pairing.ref, pairing.cand
        counted = {"compared": ref[ref.scores >= pairing.cut], "missing": ref[pairing.missing], "extra": cand[pairing.extra]}
        for field, found in counted.items():
            for label in found.labels:
                row_of(label)[field] += 1
        for r, c in pairing.compared:
            row, differences = row_of(ref.labels[r]), pairing.difference(r, c)
            row["beyond"] += pairing.gate.exceeded(*differences)
            for field, difference in zip(("box_px", "score"), differences, strict=True):
                row[field] = max(row[field], difference)
    ordered = sorted(rows.items(), key=lambda item: -item[1]["compared"])
    return {label: ImageMatch(**row) for label, row in ordered}


def cutoff(reference: Detections, gate: Gate) -> float:
    """The lowest score of the compared detections of an image."""
    if len(reference) == 0:
        return gate.threshold
    ordered = np.sort(reference.scores)[::-1]
    return float(min(gate.threshold, ordered[min(gate.at_least, len(ordered)) - 1]))


@dataclass(frozen=True, slots=True)
class Pairing:
    """Detections of both sides with about the cut-off score or more, and indices of pairs and of unmatched ones.

    gate: that they are judged by.
    """

    cut: float
    gate: Gate
    ref: Detections
    cand: Detections
    pairs: list[tuple[int, int]]
    missing: list[int]
    extra: list[int]

    @property
    def compared(self) -> list[tuple[int, int]]:
        """The pairs whose differences count: one of the two has the cut-off score."""
        return [(r, c) for r, c in self.pairs if max(self.ref.scores[r], self.cand.scores[c]) >= self.cut]

    def difference(self, r: int, c: int) -> tuple[float, float]:
        """(largest difference of a box side in pixels, difference of the scores) of a pair."""
        box = np.abs(self.ref.boxes_xyxy[r] - self.cand.boxes_xyxy[c]).max()
        return float(box), abs(float(self.ref.scores[r]) - float(self.cand.scores[c]))

    def overlaps(self) -> dict[tuple[int, int], float]:
        """Compared pair -> IoU of its masks, of those that reach `Gate.mask_score`; empty for models without masks."""
        best = [(r, c) for r, c in self.compared if max(self.ref.scores[r], self.cand.scores[c]) >= self.gate.mask_score]
        return {(r, c): task.overlap(ref, r, cand, c) for task, ref, cand in self._areas for r, c in best}

    @property
    def _areas(self) -> list[tuple[AreaTask, Any, Any]]:
        """What both have that covers pixels, with the values of both."""
        both = [
            (task, getattr(self.ref, task.field), getattr(self.cand, task.field)) for task in TASKS if isinstance(task, AreaTask)
        ]
        return [(task, ref, cand) for task, ref, cand in both if ref is not None and cand is not None]

    def summary(self) -> ImageMatch:
        """The counts and the largest differences."""
        differences = {pair: self.difference(*pair) for pair in self.compared}
        box, score = (max((one[i] for one in differences.values()), default=0.0) for i in (0, 1))
        compared = int((self.ref.scores >= self.cut).sum())
        overlap, overlaps = None, self.overlaps()
        if self._areas:
            overlap = min(overlaps.values(), default=None if differences else 1.0)
        beyond = sum(self.gate.exceeded(*difference, overlaps.get(pair, 1.0)) for pair, difference in differences.items())
        return ImageMatch(compared, len(self.missing), len(self.extra), box, score, overlap, beyond)

    def scores(self) -> list[tuple[float, float]]:
        """(score of the reference, of the candidate) of every pair; 0 where a detection is unmatched."""
        ref, cand = self.ref.scores.tolist(), self.cand.scores.tolist()
        pairs = [(ref[r], cand[c]) for r, c in self.pairs]
        return [*pairs, *((ref[r], 0.0) for r in self.missing), *((0.0, cand[c]) for c in self.extra)]


def match_pairs(reference: Detections, candidate: Detections, gate: Gate) -> Pairing:
    """The pairs that `match` judges."""
    cut = cutoff(reference, gate)
    ref = reference[reference.scores >= cut - 2 * gate.score]
    cand = candidate[candidate.scores >= cut - 2 * gate.score]
    pairs = _pair(ref, cand, gate)
    paired_ref, paired_cand = {r for r, _ in pairs}, {c for _, c in pairs}
    missing = [r for r, score in enumerate(ref.scores) if r not in paired_ref and score >= cut]
    extra = [c for c, score in enumerate(cand.scores) if c not in paired_cand and score >= cut + gate.score]
    return Pairing(cut, gate, ref, cand, pairs, missing, extra)


def _pair(ref: Detections, cand: Detections, gate: Gate) -> list[tuple[int, int]]:
    """Greedy pairing, nearest pair first; boxes that do not overlap are never a pair."""
    if not len(ref) or not len(cand):
        return []
    distance = np.abs(ref.boxes_xyxy[:, None] - cand.boxes_xyxy[None]).max(-1) / max(gate.box_px, 1e-9)
    distance = distance + np.abs(ref.scores[:, None] - cand.scores[None]) / max(gate.score, 1e-9)
    allowed = ref.class_ids[:, None] == cand.class_ids[None]
    overlapping = (box_iou(ref.boxes_xyxy, cand.boxes_xyxy) > 0.5) | (distance < 2)
    distance = np.where(allowed & overlapping, distance, np.inf)
    pairs = []
    for flat in np.argsort(distance, axis=None, kind="stable"):
        r, c = divmod(int(flat), len(cand))
        if not np.isfinite(distance[r, c]):  # not allowed, or one of the two is taken
            continue
        pairs.append((r, c))
        distance[r, :] = distance[:, c] = np.inf
        if len(pairs) == min(len(ref), len(cand)):
            break
    return pairs
