"""NMS and soft-NMS by DecodeSpec, against a loop in the manner of mmcv's."""

from __future__ import annotations

import numpy as np
import pytest

from detrt.data.postprocess import decode, sigmoid, suppress
from detrt.errors import SpecError
from detrt.spec import DecodeSpec, InputSpec, ModelSpec


def rule(**changes):
    return DecodeSpec("sigmoid", "topk", 60, 3, 40, **changes)


def iou(a, b):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    inner = width * height
    return inner / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inner)


def loop(boxes, scores, ids, spec):
    """mmcv's batched rule: classes are moved apart, the best of the rest is taken, the others are weighted."""
    apart = boxes.astype(np.float64) + (ids * (boxes.max() + 1))[:, None]
    rest = [(i, float(s)) for i, s in enumerate(scores)]
    kept = []
    while rest:
        best = max(rest, key=lambda pair: (pair[1], -pair[0]))
        kept.append(best)
        left = []
        for i, score in rest:
            if i == best[0]:
                continue
            overlap = iou(apart[i], apart[best[0]])
            if spec.nms == "nms":
                if overlap <= spec.nms_iou:
                    left.append((i, score))
            else:
                score *= 1 - overlap if overlap >= spec.nms_iou else 1
                if score >= spec.nms_min_score:
                    left.append((i, score))
        rest = left
    return [i for i, _ in kept], [s for _, s in kept]


def crowd(seed=0, count=60):
    rng = np.random.default_rng(seed)
    centres = rng.uniform(20, 80, (6, 2))[rng.integers(0, 6, count)] + rng.normal(0, 2, (count, 2))
    sides = rng.uniform(18, 24, (count, 2))
    boxes = np.concatenate([centres - sides / 2, centres + sides / 2], 1).astype(np.float32)
    scores = -np.sort(-rng.uniform(0.0005, 1, count)).astype(np.float32)
    return boxes, scores, rng.integers(0, 3, count)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spec", (rule(nms="nms", nms_iou=0.5), rule(nms="soft_nms"), rule(nms="soft_nms", nms_iou=0.3)), ids=str)
def test_equals_the_loop(spec, seed):
    boxes, scores, ids = crowd(seed)
    stay, left = suppress(boxes, scores, ids, spec)
    want, want_scores = loop(boxes, scores, ids, spec)
    assert stay.tolist() == want
    np.testing.assert_allclose(left, want_scores, rtol=1e-5)
    assert (np.diff(left) <= 0).all()
    assert spec.nms == "soft_nms" or 0 < len(stay) < len(scores)  # something was suppressed
    assert spec.nms == "nms" or (left < np.sort(scores)[::-1][: len(left)]).any()


def test_none_and_nothing():
    boxes, scores, ids = crowd()
    stay, left = suppress(boxes, scores, ids, rule())
    assert stay.tolist() == list(range(60)) and left is scores
    assert [len(part) for part in suppress(boxes[:0], scores[:0], ids[:0], rule(nms="soft_nms"))] == [0, 0]


def test_boxes_without_area_suppress_nothing():
    boxes = np.zeros((3, 4), np.float32)
    stay, _ = suppress(boxes, np.array([0.9, 0.8, 0.7], np.float32), np.zeros(3, int), rule(nms="nms", nms_iou=0.1))
    assert stay.tolist() == [0, 1, 2]


def spec_of(**changes):
    return ModelSpec("co_dino", InputSpec("stretch", 64, 64), DecodeSpec("sigmoid", "topk", 4, 2, 3, **changes), {})


def test_decode_looks_at_as_many_candidates_as_queries_and_keeps_max_detections():
    # Two objects with two near copies each: the copies are candidates 2 and 4.
    boxes = np.array(
        [[[0.3, 0.3, 0.2, 0.2], [0.301, 0.3, 0.2, 0.2], [0.7, 0.7, 0.2, 0.2], [0.7, 0.701, 0.2, 0.2]]],
        np.float32,
    )
    logits = np.full((1, 4, 2), -9.0, np.float32)
    logits[0, :, 0] = (3, 2, 1, 0)
    outputs = {"logits": logits, "pred_boxes": boxes}
    found = decode(outputs, spec_of(nms="nms", nms_iou=0.8), [(100, 200)], threshold=0.1)[0]
    np.testing.assert_allclose(found.scores, sigmoid(np.array([3.0, 1.0])), rtol=1e-6)
    plain = decode(outputs, spec_of(), [(100, 200)], threshold=0.1)[0]
    assert len(plain) == 3
    soft = decode(outputs, spec_of(nms="soft_nms"), [(100, 200)], threshold=0.0)[0]
    assert len(soft) == 3 and soft.scores[1] == pytest.approx(1 / (1 + np.exp(-1)), rel=1e-6)
    assert soft.scores[2] < 0.1 * plain.scores[1]
    # A threshold cuts what is reported and changes nothing before it.
    high = decode(outputs, spec_of(nms="soft_nms"), [(100, 200)], threshold=0.3)[0]
    np.testing.assert_array_equal(high.scores, soft.scores[soft.scores > 0.3])


def test_other_classes_stay():
    boxes = np.tile(np.array([[[0.5, 0.5, 0.2, 0.2]]], np.float32), (1, 4, 1))
    logits = np.full((1, 4, 2), -9.0, np.float32)
    logits[0, 0] = (3, 2)
    found = decode({"logits": logits, "pred_boxes": boxes}, spec_of(nms="nms"), [(10, 10)], threshold=0.1)[0]
    assert found.class_ids.tolist() == [0, 1]


def test_spec_reads_files_without_nms_and_refuses_nonsense():
    data = spec_of().to_dict()
    for name in ("nms", "nms_iou", "nms_min_score"):
        del data["decode"][name]
    assert ModelSpec.from_dict(data) == spec_of()
    assert ModelSpec.from_json(spec_of(nms="soft_nms").to_json()).decode.nms == "soft_nms"
    for changes in (
        {"nms": "hard"},
        {"nms": 1},
        {"nms_iou": 1.5},
        {"nms_iou": "a"},
        {"nms_min_score": float("nan")},
    ):
        with pytest.raises(SpecError, match=r"decode\.nms"):
            spec_of(**changes)
