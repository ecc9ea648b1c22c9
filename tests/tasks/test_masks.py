"""Masks from mask logits, against PyTorch's interpolation and pycocotools."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from runtime_cases import make_spec

from detrt.data.draw import class_colour, draw_detections
from detrt.data.postprocess import Candidates, decode
from detrt.data.sinks import Record, coco_writer, csv_writer, jsonl_writer
from detrt.detections import Detections
from detrt.errors import SessionError, SpecError
from detrt.spec import ModelSpec
from detrt.tasks.masks import Masks, encode_masks, mask_iou

# (map, image): enlarged, shrunk, equal, one value, one column
SIZES = [((27, 27), (480, 640)), ((40, 30), (17, 23)), ((5, 7), (5, 7)), ((1, 1), (9, 4)), ((9, 1), (4, 30)), ((2, 3), (64, 64))]
SPEC = make_spec(task="instance-segmentation")


def logits(count: int, map_hw: tuple[int, int], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(count, *map_hw)).astype(np.float32)
    values[0], values[1] = -1, 1  # nowhere, everywhere
    return values


@pytest.mark.parametrize(("map_hw", "size_hw"), SIZES)
def test_masks_are_those_of_torch_interpolate(map_hw, size_hw):
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    maps = logits(6, map_hw)
    large = torch.nn.functional.interpolate(
        torch.from_numpy(maps)[:, None].double(), size=size_hw, mode="bilinear", align_corners=False
    )
    want = (large[:, 0] > 0).numpy()
    found = encode_masks(maps, size_hw)
    np.testing.assert_array_equal(found.to_array(), want)
    np.testing.assert_array_equal(found.areas, want.sum((1, 2)))
    assert all(counts.sum() == size_hw[0] * size_hw[1] and (counts[1:] > 0).all() for counts in found.counts)
    assert all((a == b).all() for a, b in zip(Masks.from_array(want).counts, found.counts, strict=True))


@pytest.mark.parametrize(("map_hw", "size_hw"), SIZES)
def test_the_text_form_is_that_of_pycocotools(map_hw, size_hw):
    mask_api = pytest.importorskip("pycocotools.mask", reason="needs the 'eval' extra")
    masks = encode_masks(logits(6, map_hw, seed=1), size_hw)
    for text, pixels in zip(masks.to_coco(), masks.to_array(), strict=True):
        want = mask_api.encode(np.asfortranarray(pixels.astype(np.uint8)))
        assert text == {"size": list(size_hw), "counts": want["counts"].decode()}
    again = Masks.from_coco(masks.to_coco(), size_hw)
    assert all((a == b).all() for a, b in zip(again.counts, masks.counts, strict=True))
    others = masks.take([4, 1, 3])
    want = mask_api.iou(masks.to_coco(), others.to_coco(), [0, 0, 0])
    want[np.ix_(masks.areas == 0, others.areas == 0)] = 1  # both empty, where pycocotools says 0
    np.testing.assert_allclose(mask_iou(masks, others), want, atol=1e-12)
    with pytest.raises(ValueError, match="different sizes"):
        mask_iou(masks, Masks(masks.counts, (1, 2)))


def test_one_mask_is_its_pixels():
    masks = encode_masks(logits(3, (5, 7)), (9, 11))
    for found, pixels in zip(masks, masks.to_array(), strict=True):  # an index ends an iteration with its IndexError
        assert np.array_equal(found, pixels) and found.dtype == bool
    assert np.array_equal(masks[-1], masks.to_array()[-1])
    with pytest.raises(IndexError):
        masks[3]
    with pytest.raises(AttributeError, match=r"use to_array\(\)"):
        _ = masks.data


def outputs(**changes: np.ndarray) -> dict[str, np.ndarray]:
    """Two objects among four queries: query 2 (dog) in the upper half of the image, query 1 (cat) in its left half."""
    scores = np.full((1, 4, 3), -9, np.float32)
    scores[0, 2, 1], scores[0, 1, 0] = 3, 2
    maps = np.full((1, 4, 4, 6), -1, np.float32)
    maps[0, 2, :2], maps[0, 1, :, :3] = 1, 1
    return {"logits": scores, "pred_boxes": np.full((1, 4, 4), 0.5, np.float32), "mask_logits": maps, **changes}


def halves(height: int, width: int) -> list[np.ndarray]:
    upper, left = np.zeros((height, width), bool), np.zeros((height, width), bool)
    upper[: height // 2], left[:, : width // 2] = True, True
    return [upper, left]


def test_each_detection_has_the_mask_of_its_query():
    (found,) = decode(outputs(), SPEC, [(40, 60)])
    assert found.labels == ("dog", "cat") and found.masks is not None
    np.testing.assert_array_equal(found.masks.to_array(), halves(40, 60))
    (cat,) = decode(outputs(), SPEC, [(40, 60)], class_ids=[0])
    np.testing.assert_array_equal(cat.masks.to_array(), halves(40, 60)[1:])
    np.testing.assert_array_equal(found[[1, 0]].masks.to_array(), halves(40, 60)[::-1])
    assert len(found[found.scores > 0.9].masks) == 1
    (nothing,) = decode(outputs(), SPEC, [(40, 60)], threshold=0.99)
    assert len(nothing.masks) == 0 and nothing.to_list() == []


def test_candidates_and_decoded_graphs_have_the_same_masks():
    raw = outputs()
    (want,) = decode(raw, SPEC, [(40, 60)])
    flat = np.array([[1 * 3 + 0, 2 * 3 + 1]])
    values = np.array([[2, 3]], np.float32)
    (found,) = decode(
        Candidates(values, flat, raw["pred_boxes"][:, :2], extras={"mask_logits": raw["mask_logits"]}), SPEC, [(40, 60)]
    )
    assert found.to_list() == want.to_list()
    decoded = {
        "boxes": np.repeat(want.boxes_xyxy[None], 2, 1),
        "scores": np.array([[*want.scores, 0, 0]], np.float32),
        "labels": np.array([[1, 0, 0, 0]]),
        "num_detections": np.array([2]),
        "mask_logits": raw["mask_logits"][:, [2, 1, 0, 0]],
    }
    (found,) = decode(decoded, SPEC.with_decode(in_graph=True), [(40, 60)])
    assert [row["segmentation"] for row in found.to_list()] == [row["segmentation"] for row in want.to_list()]


@pytest.mark.parametrize(
    ("maps", "words"),
    [
        (np.full((1, 4, 4, 6), np.nan, np.float32), "NaN or infinite values in 'mask_logits'"),
        (np.zeros((1, 3, 4, 6), np.float32), r"'mask_logits' with shape \(1, 3, 4, 6\)"),
        (np.zeros((1, 4, 24), np.float32), r"promises \(1, 4, 4, 6\)"),
    ],
)
def test_wrong_maps_are_refused(maps, words):
    with pytest.raises(SessionError, match=words):
        decode(outputs(mask_logits=maps), SPEC, [(40, 60)])


def test_a_model_without_its_masks_is_refused():
    raw = outputs()
    del raw["mask_logits"]
    with pytest.raises(SessionError, match="promises 'mask_logits'"):
        decode(raw, SPEC, [(40, 60)])


def test_outputs_for_files(tmp_path):
    (found,) = decode(outputs(), SPEC, [(40, 60)])
    record = Record("street.jpg", found)
    with jsonl_writer(tmp_path / "a.jsonl") as write:
        write(record)
    row = json.loads((tmp_path / "a.jsonl").read_text())["detections"][0]
    assert row["segmentation"] == found.masks.to_coco()[0]
    with csv_writer(tmp_path / "a.csv") as write:
        write(record)
    assert "segmentation" not in (tmp_path / "a.csv").read_text() and (tmp_path / "a.csv").read_text().count("\n") == 3
    with coco_writer(tmp_path / "a.json", SPEC) as write:
        write(record)
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [one["segmentation"] for one in rows] == found.masks.to_coco() and rows[0]["bbox"]


def test_supervision_gets_masks():
    pytest.importorskip("supervision", reason="needs the 'supervision' extra")
    (found,) = decode(outputs(), SPEC, [(40, 60)])
    theirs = found.to_supervision()
    np.testing.assert_array_equal(theirs.mask, halves(40, 60))
    np.testing.assert_array_equal(theirs.area, found.masks.areas)


def test_masks_are_drawn_in_the_colours_of_their_classes():
    (found,) = decode(outputs(), SPEC, [(40, 60)], class_ids=[1])
    drawn = np.asarray(draw_detections(np.zeros((40, 60, 3), np.uint8), found))
    plain = np.asarray(draw_detections(np.zeros((40, 60, 3), np.uint8), replace(found, masks=None)))
    assert (drawn[2, 2] == np.rint(np.array(class_colour(1)) * 0.45)).all()  # in the mask, outside the box
    np.testing.assert_array_equal(drawn[21:], plain[21:])


def test_counts_and_sizes_must_fit():
    (found,) = decode(outputs(), SPEC, [(40, 60)])
    with pytest.raises(ValueError, match=r"masks must be 2 of \(40, 60\); got 1 of"):
        Detections(found.boxes_xyxy, found.scores, found.class_ids, found.labels, (40, 60), masks=found.masks.take([0]))


def test_the_spec_of_a_box_model_is_as_before():
    data = make_spec().to_dict()
    assert "task" not in data and "mask_stride" not in data["decode"]
    assert ModelSpec.from_dict(data) == make_spec() and not make_spec().has_masks
    assert ModelSpec.from_dict(SPEC.to_dict()) == SPEC and SPEC.to_dict()["task"] == "instance-segmentation"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "panoptic"}, "task must be one of detection, instance-segmentation"),
        ({"decode": {"mask_stride": 4}}, "task 'detection' does not fit decode.mask_stride 4"),
        ({"task": "instance-segmentation", "decode": {"mask_stride": 0}}, "does not fit decode.mask_stride 0"),
        ({"task": "instance-segmentation", "mask": True, "dynamic": True}, "without padding mask"),
    ],
)
def test_specs_that_cannot_be(changes, words):
    with pytest.raises(SpecError, match=words):
        make_spec(**changes)
