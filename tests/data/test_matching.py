"""Matching detections of two models: what counts as the same, and what does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detrt.data.matching import Gate, ImageMatch, cutoff, gate_for, match, match_classes, match_pairs, within
from detrt.detections import Detections
from detrt.errors import DetrtError
from detrt.evaluation.report import VerifyReport
from detrt.tasks.masks import Masks

A, B, C = (10, 10, 60, 60), (100, 10, 160, 90), (10, 120, 90, 190)


def found(*rows) -> Detections:
    """Rows of (box, score, class id)."""
    rows = sorted(rows, key=lambda row: -row[1])
    boxes, scores, ids = ([row[i] for row in rows] for i in range(3))
    return Detections(np.array(boxes, np.float32), np.array(scores), np.array(ids), tuple(map(str, ids)), (200, 200))


def moved(box, by):
    return tuple(v + by for v in box)


THREE = ((A, 0.9, 0), (B, 0.8, 1), (C, 0.7, 0))
CASES = {
    # name: reference, candidate, (compared, missing, extra), box_px, score
    "equal": (THREE, THREE, (3, 0, 0), 0, 0),
    "both empty": ((), (), (0, 0, 0), 0, 0),
    "nothing found": (THREE, (), (3, 3, 0), 0, 0),
    "found in nothing": ((), THREE, (0, 0, 3), 0, 0),
    "one missing": (THREE, THREE[:2], (3, 1, 0), 0, 0),
    "one extra": (THREE[:2], THREE, (2, 0, 1), 0, 0),
    "another class": (THREE, (*THREE[:2], (C, 0.7, 1)), (3, 1, 1), 0, 0),
    "another place": (THREE, (*THREE[:2], (moved(C, 70), 0.7, 0)), (3, 1, 1), 0, 0),
    "a little moved": (THREE, (*THREE[:2], (moved(C, 0.25), 0.7, 0)), (3, 0, 0), 0.25, 0),
    "far, yet the same object": (THREE, (*THREE[:2], (moved(C, 4), 0.7, 0)), (3, 0, 0), 4, 0),
    "another score": (THREE, (*THREE[:2], (C, 0.65, 0)), (3, 0, 0), 0, 0.05),
    "swapped order of a tie": (
        ((A, 0.8, 0), (B, 0.8, 1)),
        ((B, 0.8, 1), (A, 0.8, 0)),
        (2, 0, 0),
        0,
        0,
    ),
    "duplicates keep their partners": (
        ((A, 0.9, 0), (moved(A, 2), 0.85, 0)),
        ((moved(A, 2), 0.9005, 0), (A, 0.8495, 0)),
        (2, 0, 0),
        2,
        0.0005,
    ),
    "one of two duplicates is gone": (((A, 0.9, 0), (A, 0.9, 0)), ((A, 0.9, 0),), (2, 1, 0), 0, 0),
    # Only what is above the cut of 0.3 counts (both sides have the five best above it).
    "differences below the cut": (
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.2, 3)),
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.1, 4)),
        (5, 0, 0),
        0,
        0,
    ),
    "just above the cut here, just below it there": (
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.3004, 3)),
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.2996, 3)),
        (6, 0, 0),
        0,
        0.0008,
    ),
    "just below the cut here, just above it there": (
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.2996, 3)),
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.3004, 3)),
        (5, 0, 0),
        0,
        0.0008,
    ),
    "gone just below the cut": (
        (*THREE, (A, 0.6, 2), (B, 0.5, 2), (C, 0.2996, 3)),
        (*THREE, (A, 0.6, 2), (B, 0.5, 2)),
        (5, 0, 0),
        0,
        0,
    ),
    # Two queries of hardly any score that traded places, in an image with few objects.
    "far, but neither side is compared": (
        (*THREE, (A, 0.05, 2), (B, 0.04, 2), (C, 0.0395, 3)),
        (*THREE, (A, 0.05, 2), (B, 0.04, 2), (moved(C, 4), 0.0395, 3)),
        (5, 0, 0),
        0,
        0,
    ),
    "far, and one side is compared": (
        (*THREE, (A, 0.05, 2), (B, 0.04, 2), (C, 0.0395, 3)),
        (*THREE, (A, 0.05, 2), (B, 0.04, 2), (moved(C, 4), 0.0405, 3)),
        (5, 0, 0),
        4,
        0.001,
    ),
    "weak images are compared by their best": (((A, 0.05, 0), (B, 0.04, 1)), ((A, 0.05, 0),), (2, 1, 0), 0, 0),
}


@pytest.mark.parametrize(("reference", "candidate", "counts", "box", "score"), CASES.values(), ids=CASES)
def test_match(reference, candidate, counts, box, score):
    result = match(found(*reference), found(*candidate), Gate())
    assert (result.compared, result.missing, result.extra) == counts
    assert result.box_px == pytest.approx(box, abs=1e-4)
    assert result.score == pytest.approx(score, abs=1e-6)


def test_match_as_data():
    assert ImageMatch(3, 0, 1, 0.5, 0.001).to_dict() == {
        "compared": 3,
        "missing": 0,
        "extra": 1,
        "box_px": 0.5,
        "score": 0.001,
        "beyond": 0,
    }


@pytest.mark.parametrize(
    ("scores", "gate", "cut"),
    [
        ((), Gate(), 0.3),
        ((0.9, 0.8), Gate(), 0.3),
        ((0.9, 0.2), Gate(), 0.2),
        ((0.9, 0.2, 0.1), Gate(at_least=2), 0.2),
        ((0.9, 0.8, 0.1), Gate(at_least=2), 0.3),
        ((0.9, 0.2), Gate(threshold=0.0), 0.0),
    ],
)
def test_cutoff(scores, gate, cut):
    assert cutoff(found(*((A, s, 0) for s in scores)), gate) == pytest.approx(cut)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold", -0.1),
        ("box_px", float("nan")),
        ("score", float("inf")),
        ("tensor", "tight"),
        ("box_px", None),
        ("at_least", 0),
        ("mismatched", 5.0),
        ("unmatched", 2),
    ],
)
def test_gate_refuses(field, value):
    with pytest.raises(DetrtError, match=rf"gate\.{field} .*got {value!r}"):
        Gate(**{field: value})


def test_masks_of_pairs_are_compared():
    pixels = np.zeros((2, 200, 200), bool)
    pixels[0, 10:60, 10:60], pixels[1, 10:60, 100:160] = True, True
    both = replace(found((A, 0.9, 0), (B, 0.8, 1)), masks=Masks.from_array(pixels))
    assert match(both, both, Gate()).mask_iou == 1.0
    pixels[1, 10:20] = False
    less = replace(both, masks=Masks.from_array(pixels))
    assert match(both, less, Gate()).mask_iou == pytest.approx(0.8)
    # In another order the pairs are the same.
    assert match(both, less[[1, 0]], Gate()).mask_iou == pytest.approx(0.8)
    assert match(both, both[:0], Gate()).mask_iou == 1.0 and match(found(), found(), Gate()).mask_iou is None
    # Below FP32 the mask of a query that found nothing is not judged, that of an object is.
    weak = [replace(one, scores=np.array([0.9, 0.1], np.float32)) for one in (both, less)]
    low = gate_for("fp16")
    assert match(*weak, Gate()).mask_iou == pytest.approx(0.8) and match(*weak, low).mask_iou == 1.0
    assert match(both, less, low).mask_iou == pytest.approx(0.8) and not within(match(both, less, low), low)
    assert match(both, less, low).beyond == 1
    assert match(*(one[[1]] for one in weak), low).mask_iou is None
    images = (match(both, less, Gate()),)
    report = VerifyReport("a", "b", Gate(), images)
    assert any("a mask has IoU 0.8, at least 0.99 is allowed" in text for text in report.failures)
    assert [check.ok for check in report.checks if check.name == "lowest mask IoU"] == [False]
    assert VerifyReport("a", "b", Gate(mask_iou=0.8), images).passed


def test_classes_over_all_images():
    """Of two images: class 0 moved, class 1 once missing, class 2 once extra; names, most compared first."""
    pairs = [
        (found(*THREE), found((moved(A, 0.25), 0.9, 0), (C, 0.65, 0))),
        (found(*THREE), found(*THREE, (moved(A, 80), 0.9, 2))),
    ]
    classes = match_classes(match_pairs(*pair, Gate()) for pair in pairs)
    assert list(classes) == ["0", "1", "2"]
    assert (classes["0"].compared, classes["0"].missing, classes["0"].extra) == (4, 0, 0)
    assert (classes["0"].box_px, round(classes["0"].score, 3)) == (0.25, 0.05)
    assert (classes["1"].compared, classes["1"].missing, classes["2"].compared, classes["2"].extra) == (2, 1, 0, 1)
    for field in ("compared", "missing", "extra"):
        assert sum(getattr(m, field) for m in classes.values()) == sum(getattr(match(*p, Gate()), field) for p in pairs)
