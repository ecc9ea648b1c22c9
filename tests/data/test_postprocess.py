from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from runtime_cases import make_spec

from detrt.data.postprocess import decode, sigmoid, softmax
from detrt.errors import SessionError
from detrt.spec import ModelSpec

CASES = Path(__file__).parents[1] / "data/decode_cases.json"
CENTRE = np.tile(np.array([0.5, 0.5, 0.5, 0.5], np.float32), (1, 4, 1))


def outputs(rows, boxes=CENTRE):
    return {"logits": np.array([rows], np.float32), "pred_boxes": boxes}


def logit(p):
    return float(np.log(p / (1 - p)))


def test_topk_order_labels_and_pixels():
    rows = np.full((4, 3), -5.0)
    rows[2, 1], rows[0, 0], rows[2, 2] = logit(0.9), logit(0.8), logit(0.7)
    boxes = CENTRE.copy()
    boxes[0, 2] = [0.25, 0.5, 0.5, 1.0]
    (found,) = decode(outputs(rows, boxes), make_spec(), [(10, 40)])
    assert found.labels == ("dog", "cat", "bird") and found.class_ids.tolist() == [1, 0, 2]
    np.testing.assert_allclose(found.scores, [0.9, 0.8, 0.7], atol=1e-6)
    assert found.boxes_xyxy.tolist() == [[0, 0, 20, 10], [10, 2.5, 30, 7.5], [0, 0, 20, 10]]
    assert found.image_size_hw == (10, 40) and found.boxes_xyxy.dtype == np.float32


def test_ties_keep_the_flat_order():
    (found,) = decode(outputs(np.zeros((4, 3))), make_spec(decode={"max_detections": 7}), [(8, 8)], threshold=0.1)
    assert found.class_ids.tolist() == [0, 1, 2, 0, 1, 2, 0]
    spec = make_spec(decode={"select": "query", "max_detections": 4})
    (found,) = decode(outputs(np.zeros((4, 3))), spec, [(8, 8)], threshold=0.1)
    assert found.class_ids.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("select", ["topk", "query"])
def test_thresholds_of_classes(select):
    rows = np.full((4, 3), -9.0)
    rows[0, 0], rows[1, 1], rows[2, 2], rows[3, 1] = (logit(p) for p in (0.7, 0.4, 0.6, 0.2))
    spec = make_spec(decode={"select": select, "max_detections": 4})
    (found,) = decode(outputs(rows), spec, [(8, 8)], threshold=0.5, class_thresholds={0: 0.8, 1: 0.3})
    assert found.labels == ("bird", "dog")
    np.testing.assert_allclose(found.scores, [0.6, 0.4], atol=1e-6)
    (found,) = decode(outputs(rows), spec, [(8, 8)], threshold=0.5, class_thresholds={1: 0.3}, class_ids=[1])
    assert found.labels == ("dog",)


def test_saturated_scores_are_ties():
    rows = np.full((4, 3), -50.0)
    rows[0, 2], rows[3, 0] = 60, 90  # both are 1 in float32
    (found,) = decode(outputs(rows), make_spec(), [(8, 8)])
    assert found.class_ids.tolist() == [2, 0] and found.scores.tolist() == [1, 1]


def test_softmax_drops_no_object_after_normalising():
    spec = make_spec(decode={"activation": "softmax", "select": "query", "max_detections": 4})
    rows = np.zeros((4, 4))
    rows[1] = np.log([0.2, 0.1, 0.3, 0.4])
    rows[2] = [0, 0, 0, 50]
    (found,) = decode(outputs(rows), spec, [(8, 8)], threshold=0.2)
    np.testing.assert_allclose(found.scores, [0.3, 0.25, 0.25], atol=1e-6)
    assert found.class_ids.tolist() == [2, 0, 0]


def test_threshold_is_exclusive_and_cut_comes_before_classes():
    rows = np.full((4, 3), -20.0)
    rows[0, 0], rows[1, 0], rows[2, 1] = logit(0.9), logit(0.8), logit(0.6)
    rows[3, 2] = 0  # exactly 0.5
    spec = make_spec(decode={"max_detections": 2})
    assert len(decode(outputs(rows), make_spec(), [(8, 8)], threshold=0.5)[0]) == 3
    assert decode(outputs(rows), spec, [(8, 8)], class_ids=[1])[0].labels == ()
    assert decode(outputs(rows), make_spec(), [(8, 8)], class_ids={1})[0].labels == ("dog",)
    assert decode(outputs(rows), make_spec(), [(8, 8)], class_ids=[])[0].labels == ()
    assert decode(outputs(rows), make_spec(), [(8, 8)], max_detections=1)[0].labels == ("cat",)
    assert len(decode(outputs(rows), make_spec(), [(8, 8)], threshold=1.0)[0]) == 0
    assert len(decode(outputs(rows), make_spec(decode={"max_detections": 12}), [(8, 8)], threshold=0)[0]) == 12


def test_boxes_are_clipped():
    boxes = np.tile(np.array([0.9, 0.1, 0.6, 0.6], np.float32), (1, 4, 1))
    rows = np.full((4, 3), -20.0)
    rows[0, 0] = 3
    (found,) = decode(outputs(rows, boxes), make_spec(), [(100, 200)])
    np.testing.assert_allclose(found.boxes_xyxy, [[120, 0, 200, 40]], atol=1e-4)


def test_float16_outputs_and_minus_infinity():
    rows = np.full((1, 4, 3), -np.inf, np.float16)
    rows[0, 1, 1] = 2
    values = {"logits": rows, "pred_boxes": CENTRE.astype(np.float16)}
    (found,) = decode(values, make_spec(decode={"max_detections": 12}), [(8, 8)], threshold=0)
    assert found.labels == ("dog",) and found.boxes_xyxy.dtype == np.float32
    spec = make_spec(decode={"activation": "softmax", "select": "query"})
    values["logits"] = np.full((1, 4, 4), -np.inf, np.float16)
    assert len(decode(values, spec, [(8, 8)], threshold=0)[0]) == 0


def test_sigmoid_and_softmax_do_not_overflow():
    with np.errstate(all="raise", under="ignore"):
        x = np.array([-1e4, -80, 0, 80, 1e4], np.float32)
        np.testing.assert_allclose(sigmoid(x), [0, 1.8e-35, 0.5, 1, 1], rtol=0.01)
        np.testing.assert_allclose(softmax(np.array([[1e4, 1e4], [-1e4, 0]], np.float32)), [[0.5, 0.5], [0, 1]])


def test_several_images_have_their_own_size():
    rows = np.full((2, 4, 3), -20.0, np.float32)
    rows[:, 0, 0] = 3
    values = {"logits": rows, "pred_boxes": np.tile(CENTRE, (2, 1, 1))}
    one, two = decode(values, make_spec(), [(8, 8), (80, 40)])
    assert one.boxes_xyxy.tolist() == [[2, 2, 6, 6]] and two.boxes_xyxy.tolist() == [[10, 20, 30, 60]]


def in_graph(**changes):
    return {
        "boxes": np.array([[[-3, 1, 5, 7], [0, 0, 2, 2], [1, 1, 3, 3], [0, 0, 0, 0]]], np.float32),
        "scores": np.array([[0.9, 0.6, 0.3, 0.2]], np.float32),
        "labels": np.array([[2, 0, 1, 0]]),
        "num_detections": np.array([3]),
        **changes,
    }


def test_decoded_in_the_graph():
    spec = make_spec(decode={"in_graph": True})
    (found,) = decode(in_graph(), spec, [(6, 4)], threshold=0.1)
    assert found.labels == ("bird", "cat", "dog")
    assert found.boxes_xyxy.tolist() == [[0, 1, 4, 6], [0, 0, 2, 2], [1, 1, 3, 3]]
    assert decode(in_graph(), spec, [(6, 4)], threshold=0.5, class_ids=[0])[0].labels == ("cat",)
    assert len(decode(in_graph(num_detections=np.array([0])), spec, [(6, 4)], threshold=0)[0]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_detections": np.array([5])}, ["num_detections = 5", "0 to 4"]),
        ({"num_detections": np.array([-1])}, ["num_detections = -1"]),
        ({"scores": np.full((1, 4), np.nan)}, ["NaN", "'scores'"]),
        ({"labels": np.zeros((1, 3), int)}, ["'labels'", "(1, 3)", "(1, 4)"]),
    ],
)
def test_bad_decoded_outputs(changes, words):
    with pytest.raises(SessionError) as caught:
        decode(in_graph(**changes), make_spec(decode={"in_graph": True}), [(6, 4)])
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["logits", "pred_boxes"])
def test_overflow_is_an_error(name, value):
    values = outputs(np.zeros((4, 3)))
    values[name] = values[name].copy()
    values[name][0, 3, 1] = value
    with pytest.raises(SessionError, match=rf"'{name}'.*`precision=fp32`"):
        decode(values, make_spec(), [(8, 8)])


@pytest.mark.parametrize(
    ("values", "sizes", "words"),
    [
        ({"logits": np.zeros((1, 4, 3))}, [(8, 8)], ["['logits']", "'pred_boxes'"]),
        (outputs(np.zeros((4, 2))), [(8, 8)], ["'logits'", "(1, 4, 2)", "(1, 4, 3)"]),
        (outputs(np.zeros((4, 3))), [(8, 8), (8, 8)], ["(1, 4, 3)", "(2, 4, 3)"]),
        (outputs(np.zeros((4, 3)), CENTRE[:, :3]), [(8, 8)], ["'pred_boxes'", "(1, 3, 4)"]),
    ],
)
def test_bad_outputs(values, sizes, words):
    with pytest.raises(SessionError) as caught:
        decode(values, make_spec(), sizes)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("options", [{"threshold": 1.5}, {"threshold": -0.1}, {"threshold": np.nan}, {"max_detections": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        decode(outputs(np.zeros((4, 3))), make_spec(), [(8, 8)], **options)


@pytest.mark.parametrize("case", json.loads(CASES.read_text())["cases"], ids=lambda case: case["name"])
def test_stored_cases(case):
    """The file that other runtimes are tested with still says what this one does."""
    values = {}
    for name, stored in case["outputs"].items():
        flat = [-np.inf if v is None else v for v in stored["values"]]
        kind = np.int64 if name in ("labels", "num_detections") else np.float32
        values[name] = np.array(flat, kind).reshape(stored["shape"])
    found = decode(
        values,
        ModelSpec.from_dict(case["spec"]),
        [tuple(size) for size in case["original_sizes_hw"]],
        threshold=case["threshold"],
        class_ids=case["class_ids"],
        max_detections=case["max_detections"],
    )
    for result, stored in zip(found, case["detections"], strict=True):
        assert list(result.labels) == stored["labels"] and result.class_ids.tolist() == stored["class_ids"]
        np.testing.assert_allclose(result.scores, stored["scores"], atol=2e-6)
        np.testing.assert_allclose(result.boxes_xyxy, np.reshape(stored["boxes_xyxy"], (-1, 4)), atol=2e-3)
        masks = None if result.masks is None else [mask["counts"] for mask in result.masks.to_coco()]
        assert masks == stored.get("masks")
