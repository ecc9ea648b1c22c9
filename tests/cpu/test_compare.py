"""Pairing the detections of two models on one image."""

from __future__ import annotations

import numpy as np

from detrt.compare import Gate, match
from detrt.detections import Detections


def found(*rows: tuple[float, tuple[float, float, float, float]]) -> Detections:
    """Detections of one class from (score, box)."""
    scores = np.array([score for score, _ in rows], np.float32)
    boxes = np.array([box for _, box in rows], np.float32)
    return Detections(boxes, scores, np.zeros(len(rows), np.int64), ("star",) * len(rows), (300, 300))


CLEAR = [(0.9, (10.0, 10.0, 50.0, 50.0)), (0.8, (100.0, 10.0, 150.0, 60.0))]


def test_what_nobody_compares_does_not_count():
    """Two queries of hardly any score that trade places: 40 px apart, below what is compared, but near enough to be partners of it."""
    gate = Gate(box_px=4.0, score=0.02, at_least=3)
    third = (0.026, (200.0, 200.0, 250.0, 250.0))
    before, after = (found(*CLEAR, third, (0.007, (0.0, 0.0, 100.0, end))) for end in (200.0, 240.0))
    same = match(before, after, gate)
    assert (same.compared, same.missing, same.extra, same.box_px, same.score) == (3, 0, 0, 0.0, 0.0)


def test_a_partner_below_the_cut_counts():
    """It is within the gate's score of the cut, and so is what was compared."""
    gate = Gate(threshold=0.3, at_least=1, box_px=4.0, score=0.02)
    before = found(*CLEAR, (0.305, (0.0, 100.0, 100.0, 200.0)))
    after = found(*CLEAR, (0.295, (0.0, 100.0, 100.0, 230.0)))
    result = match(before, after, gate)
    assert result.compared == 3 and result.missing == result.extra == 0 and result.box_px == 30.0
    # The other way round the reference is below the cut, and the candidate within the gate's score of it.
    assert match(after, before, gate).box_px == 0.0
    sure = found(*CLEAR, (0.33, (0.0, 100.0, 100.0, 200.0)))
    assert match(after, sure, gate).box_px == 30.0


def test_the_best_few_are_compared_whatever_their_score():
    gate = Gate(at_least=3, box_px=4.0, score=0.02)
    before, after = (found(*CLEAR, (0.007, (0.0, 0.0, 100.0, end))) for end in (200.0, 240.0))
    result = match(before, after, gate)
    assert result.compared == 3 and result.box_px == 40.0
