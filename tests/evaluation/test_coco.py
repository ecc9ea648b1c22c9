"""COCO evaluation: perfect and empty detections, categories by name, and errors that name the entry."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

from PIL import Image
from runtime_cases import make_session, make_spec

from detrt.errors import ImageError, MissingPackageError, SessionError, SpecError
from detrt.evaluation import coco as evaluate
from detrt.evaluation.coco import METRICS, evaluate_coco, evaluate_results
from detrt.evaluation.results import write_results

GOOD = {
    "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
    "categories": [{"id": 90, "name": "Cat"}, {"id": 3, "name": "lamp"}],
    # The session of `runtime_cases` finds class 0 in the middle half of every image.
    "annotations": [{"image_id": 7, "category_id": 90, "bbox": [25, 20, 50, 40]}],
}


@pytest.fixture
def coco(tmp_path):
    """(write, folder): `write(data)` gives the annotation file."""
    for name in ("a.png", "b.png"):
        Image.fromarray(np.full((80, 100, 3), 128, np.uint8)).save(tmp_path / name)

    def write(data):
        path = tmp_path / "instances.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return path

    return write, tmp_path


def test_found_exactly(coco, capsys):
    write, folder = coco
    seen = []
    report = evaluate_coco(make_session(make_spec()), write(GOOD), folder, batch_size=1, progress=lambda *n: seen.append(n))
    assert tuple(report.metrics) == METRICS
    assert report.metrics["AP"] == pytest.approx(1.0)
    assert report.metrics["APlarge"] is None and report.metrics["APmedium"] == pytest.approx(1.0)
    assert report.per_class == {"lamp": None, "Cat": pytest.approx(1.0)}
    assert (report.images, report.without_class, seen) == (2, (), [(1, 2), (2, 2)])
    assert json.loads(json.dumps(report.to_dict()))["images"] == 2
    assert capsys.readouterr().out == ""


MASKED = make_spec(task="instance-segmentation", decode={"mask_stride": 1})


def with_masks(segmentation) -> dict:
    """`GOOD` with sizes, and this mask for its object."""
    data = copy.deepcopy(GOOD)
    data["images"] = [{**image, "height": 80, "width": 100} for image in data["images"]]
    data["annotations"][0] |= {"segmentation": segmentation, "area": 2000}
    return data


POLYGON = [[25, 20, 75, 20, 75, 60, 25, 60]]
PART = [[25, 20, 57, 20, 57, 60, 25, 60]]


@pytest.mark.parametrize(("polygon", "ap50", "ap"), [(POLYGON, 1.0, 1.0), (PART, 1.0, 0.3)], ids=["whole", "part"])
def test_masks_are_compared(coco, polygon, ap50, ap):
    """The mask of a part of the box has IoU 0.64: above the first three of ten thresholds."""
    write, folder = coco
    truth = write(with_masks(polygon))
    report = evaluate_coco(make_session(MASKED), truth, folder)
    assert report.iou_type == "segm" and tuple(report.metrics) == METRICS
    assert (report.metrics["AP50"], report.metrics["AP"]) == (pytest.approx(ap50), pytest.approx(ap))
    boxes = evaluate_coco(make_session(MASKED), truth, folder, iou_type="bbox")
    assert boxes.iou_type == "bbox" and boxes.metrics["AP"] == pytest.approx(1.0)
    results = folder / "results.json"
    write_results(report.rows, results)
    again = evaluate_results(results, truth)
    assert (again.iou_type, again.metrics) == ("segm", report.metrics)


@pytest.mark.parametrize(
    ("spec", "data", "words"),
    [
        (make_spec(), with_masks(POLYGON), "compares masks, and this model has boxes alone"),
        (MASKED, GOOD, r"images\[0\] has no height and width"),
        (MASKED, with_masks([]), r"annotations\[0\] has no mask"),
        (MASKED, with_masks({"size": [80, 99], "counts": "0"}), r"annotations\[0\] has no mask"),
        (MASKED, with_masks({"size": [80, 100], "counts": [5, 5]}), r"annotations\[0\] has no mask"),
        (MASKED, with_masks({"size": 80, "counts": [8000]}), r"annotations\[0\] has no mask"),
        (MASKED, with_masks({"size": [80, 100], "counts": "55"}), r"annotations\[0\] has no mask"),
        (MASKED, with_masks({"size": [80, 100], "counts": "o"}), r"annotations\[0\] has no mask"),
        (MASKED, with_masks([[1e30, 1e30, -1e30, 5, 6, 1e30]]), r"annotations\[0\] has no mask"),  # pycocotools would crash
        (MASKED, with_masks([[float("nan")] * 6]), r"annotations\[0\] has no mask"),
    ],
)
def test_masks_that_cannot_be_compared(coco, spec, data, words):
    write, folder = coco
    with pytest.raises((SessionError, ImageError), match=words):
        evaluate_coco(make_session(spec), write(data), folder, iou_type="segm")


def test_annotations_of_boxes_alone_are_compared_as_boxes(coco):
    """Tools for boxes write an empty segmentation."""
    write, folder = coco
    report = evaluate_coco(make_session(MASKED), write(with_masks([])), folder)
    assert report.iou_type == "bbox" and report.metrics["AP"] == pytest.approx(1.0)


def test_saved_masks_that_cannot_be_compared(coco):
    write, folder = coco
    truth = write(with_masks(POLYGON))
    rows = [{"image_id": 7, "category_id": 90, "bbox": [25, 20, 50, 40], "score": 0.5}]
    write_results(rows, folder / "results.json")
    assert evaluate_results(folder / "results.json", truth).iou_type == "bbox"
    with pytest.raises(SessionError, match="has entries without segmentation"):
        evaluate_results(folder / "results.json", truth, iou_type="segm")
    write_results([{**rows[0], "segmentation": {"size": [80, 100], "counts": "\x7f"}}], folder / "results.json")
    with pytest.raises(ImageError, match="entry 0 has a segmentation that is no mask of its image"):
        evaluate_results(folder / "results.json", truth)


@pytest.mark.parametrize("mask", [POLYGON, {"size": [80, 100], "counts": [0, 8000]}], ids=["polygons", "list"])
def test_saved_masks_in_other_forms(coco, mask):
    """As other tools write them; detrt writes run lengths as text."""
    write, folder = coco
    write_results(
        [{"image_id": 7, "category_id": 90, "bbox": [25, 20, 50, 40], "segmentation": mask, "score": 0.9}], folder / "r.json"
    )
    report = evaluate_results(folder / "r.json", write(with_masks(mask)))
    assert report.iou_type == "segm" and report.metrics["AP"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"category_id": 89}, "categories that .* does not name: id 89; .* `coco_images=ANNOTATIONS`"),
        ({"category_id": "90"}, "categories that .* does not name: id 90"),
        ({"category_id": [90]}, r"entry 0 has the image_id 7 and category_id \[90\], which are no ids"),
        ({"image_id": {}}, "which are no ids"),
    ],
    ids=str,
)
def test_saved_results_of_other_categories(coco, change, words):
    write, folder = coco
    rows = [{"image_id": 7, "category_id": 90, "bbox": [25, 20, 50, 40], "score": 0.5, **change}]
    write_results(rows, folder / "results.json")
    with pytest.raises(ImageError, match=words):
        evaluate_results(folder / "results.json", write(GOOD))


@pytest.fixture
def voc(coco):
    """`GOOD` as a folder of Pascal VOC, which has no ids."""
    _, folder = coco
    for name, box in (("a", (25, 20, 75, 60)), ("b", (0, 0, 9, 9))):
        sides = "".join(f"<{key}>{value}</{key}>" for key, value in zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True))
        found = f"<filename>{name}.png</filename><object><name>Cat</name><bndbox>{sides}</bndbox></object>"
        (folder / f"{name}.xml").write_text(f"<annotation>{found}</annotation>")
    return folder


def test_results_of_annotations_without_ids(voc):
    report = evaluate_coco(make_session(make_spec()), voc)
    write_results(report.rows, voc / "results.json")
    assert evaluate_results(voc / "results.json", voc).metrics == report.metrics


def test_results_whose_ids_are_of_other_annotations(voc, coco):
    """Ids 1 and 2 are those of nearly every data set; what stands in a larger image is of another one."""
    rows = [{"image_id": 1, "category_id": 1, "bbox": [300, 20, 50, 40], "score": 0.9}]
    write_results(rows, voc / "results.json")
    with pytest.raises(
        ImageError, match=r"entry 0 has the box \[300, 20, 50, 40\] outside of image 1 .* 100x80 pixels, .* eval `save`"
    ):
        evaluate_results(voc / "results.json", voc)
    data = copy.deepcopy(GOOD)  # a COCO file has ids, and its results may come from anywhere
    data["images"][0] |= {"id": 1, "height": 80, "width": 100}
    data["annotations"][0] |= {"image_id": 1, "category_id": 1}
    data["categories"][0]["id"] = 1
    write, folder = coco
    for file in folder.glob("*.xml"):
        file.unlink()
    assert evaluate_results(folder / "results.json", write(data)).metrics["AP"] == 0


def test_category_without_class_counts_as_not_found(coco):
    write, folder = coco
    data = copy.deepcopy(GOOD)
    data["annotations"].append({"image_id": 9, "category_id": 3, "bbox": [1, 1, 9, 9]})
    report = evaluate_coco(make_session(make_spec()), write(data), folder)
    assert report.without_class == ("lamp",)
    assert report.metrics["AP"] == pytest.approx(0.5)


BROKEN = {
    "text": ("not json", ImageError, r"instances\.json' cannot be read as JSON"),
    "list": ([1], ImageError, "has no list 'images'"),
    "no annotations": ({**GOOD, "annotations": []}, ImageError, "the list 'annotations' .*is empty"),
    "no box": ({**GOOD, "annotations": [{"image_id": 7, "category_id": 90}]}, ImageError, r"annotations\[0\] has no bbox"),
    "short box": (
        {**GOOD, "annotations": [{"image_id": 7, "category_id": 90, "bbox": [1, 2, 3]}]},
        ImageError,
        r"annotations\[0\] has the bbox \[1, 2, 3\]",
    ),
    "unknown image": (
        {**GOOD, "annotations": [{"image_id": 5, "category_id": 90, "bbox": [1, 2, 3, 4]}]},
        ImageError,
        "unknown image_id 5",
    ),
    "image that is not there": (
        {**GOOD, "images": [*GOOD["images"], {"id": 1, "file_name": "gone.png"}]},
        ImageError,
        r"1 of 3 .*gone\.png",
    ),
    "image of another size": (
        {**GOOD, "images": [GOOD["images"][0], {**GOOD["images"][1], "height": 160, "width": 200}]},
        ImageError,
        r"'b\.png' has 100x80 pixels, .*instances\.json' says 200x160",
    ),
    "other classes": ({**GOOD, "categories": [{"id": 90, "name": "sun"}]}, SpecError, "'cat', 'dog', 'bird'.*'sun'"),
}


@pytest.mark.parametrize(("data", "kind", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_data_is_named(data, kind, words, coco):
    write, folder = coco
    with pytest.raises(kind, match=words):
        evaluate_coco(make_session(make_spec()), write(data), folder)


def test_missing_file_and_missing_package(coco, monkeypatch):
    _, folder = coco
    with pytest.raises(ImageError, match=r"no annotation file .*gone\.json"):
        evaluate_coco(make_session(make_spec()), folder / "gone.json", folder)

    monkeypatch.setitem(__import__("sys").modules, "pycocotools.coco", None)
    with pytest.raises(MissingPackageError, match=r"pycocotools.*\.\[eval\]"):
        evaluate._pycocotools()
