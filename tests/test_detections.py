from __future__ import annotations

import builtins
import pickle
from dataclasses import replace

import numpy as np
import pytest

from detrt.detections import Detections, Masks, box_iou, cxcywh_to_xyxy, mask_iou
from detrt.errors import MissingPackageError

THREE = Detections(
    [[0, 0, 10, 20], [5, 5, 6, 7], [1, 2, 3.5, 4]],
    [0.9, 0.5, 0.25],
    [3, 1, 3],
    ("dog", "cat", "dog"),
    (30, 40),
)


def test_arrays_have_fixed_types():
    assert THREE.boxes_xyxy.dtype == np.float32 and THREE.boxes_xyxy.shape == (3, 4)
    assert THREE.scores.dtype == np.float32 and THREE.class_ids.dtype == np.int64
    empty = Detections([], [], [], (), (1, 1))
    assert len(empty) == 0 and empty.boxes_xyxy.shape == (0, 4) and empty.to_list() == [] == empty.to_coco(1)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="got 1, 1, 1, 2"):
        Detections([[0, 0, 1, 1]], [0.5], [1], ("a", "b"), (4, 4))


def test_phrases():
    one = Detections([[0, 0, 1, 1]], [0.5], [1], ("a cat",), (4, 4), ((3, 8),), "on a cat.")
    assert one.to_list()[0]["phrase_span"] == [3, 8] and "phrase_span" not in THREE.to_list()[0]
    assert one[:0].phrase_spans == () and one[:0].prompt == "on a cat." and THREE[:1].phrase_spans is None
    with pytest.raises(ValueError, match="phrase_spans must have the length 1"):
        Detections([[0, 0, 1, 1]], [0.5], [1], ("a",), (4, 4), ())


def test_equality():
    """Of all that is found, also of masks, where NumPy would ask which of the elements is meant."""
    masks = Masks.from_array(np.eye(30, 40, dtype=bool)[None].repeat(3, 0))
    masked = replace(THREE, masks=masks)
    assert pickle.loads(pickle.dumps(masked)) == masked == masked[:] and THREE[:0] == THREE[:0]
    assert masked != THREE and THREE[:2] != THREE and replace(THREE, scores=THREE.scores + 1e-7) != THREE and THREE != "three"
    assert masked != replace(masked, masks=Masks((*masks.counts[:2], np.array([1200])), (30, 40)))
    assert masks != Masks(masks.counts, (40, 30))


@pytest.mark.parametrize("index", [0.5, [0.5], "x", None, [[0], [1]], False], ids=repr)
def test_indices_that_select_no_detections(index):
    with pytest.raises(TypeError, match=r"detections.scores > 0.5\]; .*; got"):
        THREE[index]


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, None), ("cat", "dog")),
        ([2, 0], ("dog", "dog")),
        ([], ()),
        (np.array([True, False, True]), ("dog", "dog")),
        (np.array([False] * 3), ()),
        (slice(5, 9), ()),
        ([-1], ("dog",)),
    ],
)
def test_selecting(index, expected):
    picked = THREE[index]
    assert picked.labels == expected and len(picked) == len(expected) and picked.image_size_hw == (30, 40)


def test_one_by_one():
    first, *_, last = THREE
    assert (first.label, first.class_id, first.score) == ("dog", 3, pytest.approx(0.9)) and last.box.tolist() == [1, 2, 3.5, 4]
    assert THREE[0].label == "dog" == THREE[-1].label and THREE[np.int64(1)].label == "cat" and first.mask is None
    assert [one.track_id for one in replace(THREE, track_ids=np.array([4, -1, 0]))] == [4, None, 0]
    pixels = np.zeros((3, 30, 40), bool)
    pixels[1, 2:4, 5:9] = True
    masked = replace(THREE, masks=Masks.from_array(pixels))
    assert all(np.array_equal(one.mask, mask) for one, mask in zip(masked, pixels, strict=True))
    for wrong in (3, -4, [7]):
        with pytest.raises(IndexError):
            THREE[wrong]


def test_yolo_labels():
    """As the definition has them: centre and size as fractions of width and height."""
    text = THREE.to_yolo()
    rows = np.array([line.split() for line in text.splitlines()], float)
    width, height = 40, 30
    x, y, w, h = (rows[:, 1:] * (width, height, width, height)).T
    assert np.allclose(np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1), THREE.boxes_xyxy, atol=1e-4)
    assert rows[:, 0].tolist() == [3, 1, 3] and THREE[:0].to_yolo() == ""
    assert np.array([line.split() for line in THREE.to_yolo(scores=True).splitlines()], float)[:, 5] == pytest.approx(
        [0.9, 0.5, 0.25]
    )


def test_dataframe():
    pytest.importorskip("pandas", reason="needs the 'pandas' extra")
    table = replace(THREE, track_ids=np.array([4, -1, 0])).to_dataframe()
    assert list(table.columns) == ["label", "class_id", "score", "x0", "y0", "x1", "y1", "track_id"]
    assert table[table.label == "dog"].x1.tolist() == [10, 3.5] and len(THREE[:0].to_dataframe()) == 0


def test_to_list_and_coco():
    assert THREE.to_list()[2] == {
        "label": "dog",
        "class_id": 3,
        "score": 0.25,
        "box_xyxy": [1.0, 2.0, 3.5, 4.0],
    }
    rows = THREE.to_coco(17)
    assert rows[1] == {"image_id": 17, "category_id": 1, "bbox": [5.0, 5.0, 1.0, 2.0], "score": 0.5}
    assert [row["category_id"] for row in THREE.to_coco(17, {3: 18})] == [18, 18]


def test_box_forms_and_iou():
    boxes = np.array([[5, 10, 10, 20]], np.float32)
    assert cxcywh_to_xyxy(boxes).tolist() == [[0, 0, 10, 20]]
    iou = box_iou(np.array([[0, 0, 10, 10], [3, 3, 3, 3]]), np.array([[0, 0, 10, 5], [20, 20, 30, 30], [3, 3, 3, 3]]))
    np.testing.assert_allclose(iou, [[0.5, 0, 0], [0, 0, 0]])
    assert box_iou(np.zeros((0, 4)), np.zeros((2, 4))).shape == (0, 2)


def test_to_supervision():
    pytest.importorskip("supervision", reason="supervision is not installed")
    found = THREE.to_supervision()
    np.testing.assert_array_equal(found.xyxy, THREE.boxes_xyxy)
    assert found.data["class_name"].tolist() == ["dog", "cat", "dog"]


def test_missing_supervision(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "supervision":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match=r"\.\[supervision\]"):
        THREE.to_supervision()


def test_numbers_in_json_are_rounded_as_python_rounds_them():
    rng = np.random.default_rng(5)
    halves = rng.integers(-8000, 8000, 4000) / 16  # in the middle between two numbers of three digits
    values = np.concatenate([halves, rng.random(4000) * 10.0 ** rng.integers(-7, 9, 4000)]).astype(np.float32)
    found = Detections(values.reshape(-1, 4), values[:2000], np.zeros(2000), ("a",) * 2000, (8, 8)).to_list()
    assert [row["box_xyxy"] for row in found] == [[round(float(v), 3) for v in box] for box in values.reshape(-1, 4)]
    assert [row["score"] for row in found] == [round(float(v), 6) for v in values[:2000]]


def test_documented_names_of_this_module():
    """docs/reference/python.md says where masks and their IoU are."""
    masks = Masks.from_array(np.eye(3)[None])
    assert mask_iou(masks, masks).tolist() == [[1.0]]
