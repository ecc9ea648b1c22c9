"""Annotation files: ids of images by path, categories by name, and what is refused."""

from __future__ import annotations

import json

import pytest
from runtime_cases import make_spec

from detrt.data.coco import load_coco, match_categories
from detrt.errors import ImageError, OutputError, SpecError


def test_ids(truth):
    images = load_coco(truth, annotations=False)
    assert images.image_id("/data/x/one.jpg") == 40 == images.image_id("one.jpg")
    assert images.image_id("/data/right/same.jpg") == 42
    with pytest.raises(OutputError, match=r"no image with the file name 'three.jpg'"):
        images.image_id("x/three.jpg")
    with pytest.raises(OutputError, match=r"several images with the file name 'same.jpg'; got 'x/same.jpg'"):
        images.image_id("x/same.jpg")
    assert images.category_ids(make_spec(labels={0: "aeroplane", 1: "hot dog", 2: "cat"})) == {0: 5, 1: 6}
    with pytest.raises(SpecError, match=r"no class of the model.*cow.*airplane"):
        images.category_ids(make_spec(labels={0: "cow"}))


def test_91_ids_and_voc_names():
    names = {0: "N/A", 1: "person", 4: "motorbike", 12: "N/A", 90: "toothbrush"}
    spec = make_spec(decode={"num_classes": 91}, labels=names)
    categories = [{"id": 1, "name": "person"}, {"id": 4, "name": "motorcycle"}, {"id": 90, "name": "toothbrush"}]
    assert match_categories(spec.labels, categories) == {1: 1, 4: 4, 90: 90}


def test_an_exact_name_comes_before_its_alias():
    categories = [{"id": 1, "name": "couch"}, {"id": 2, "name": "sofa"}]
    assert match_categories({0: "sofa", 1: "couch"}, categories) == {0: 2, 1: 1}
    assert match_categories({0: "sofa", 1: "couch"}, categories[::-1]) == {0: 2, 1: 1}


CATEGORIES = {
    "an exact name before a folded one": (["Dog", "dog"], {0: "dog", 1: "Dog"}, (), {0: 1, 1: 0}),
    "several classes of one name": (["dog", "cat"], {0: "dog", 1: "dog", 2: "cat"}, (), {0: 0, 1: 0, 2: 1}),
    "a group that is called as its class": (["raccoon", "raccoon"], {0: "raccoon"}, (1,), {0: 1}),
    "folded, and unique": (["Traffic_Light"], {0: "traffic light"}, (), {0: 0}),
    "several of one name": (["dog", "dog"], {0: "dog"}, (), "ids 0, 1"),
    "several of one name, all in use": (["dog", "dog"], {0: "dog"}, (0, 1), "ids 0, 1"),
    "folded, and not unique": (["Dog", "dog"], {0: "DOG"}, (), "exactly"),
}


@pytest.mark.parametrize("case", CATEGORIES)
def test_categories_are_found_by_the_rule_of_names(case):
    names, labels, used, expected = CATEGORIES[case]
    categories = [{"id": i, "name": name} for i, name in enumerate(names)]
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            match_categories(labels, categories, used)
    else:
        assert match_categories(labels, categories, used) == expected


def test_the_part_of_some_images(truth):
    data = json.loads(truth.read_text())
    data["annotations"] = [{"image_id": i, "category_id": 18, "bbox": [1, 2, 3, 4]} for i in (40, 42, 42)]
    truth.write_text(json.dumps(data))
    dataset = load_coco(truth)
    assert dataset.annotations[0]["area"] == 12 and dataset.annotations[0]["iscrowd"] == 0
    part, ids = dataset.subset(["/x/right/same.jpg", "unknown.jpg", "same.jpg"])
    assert ids == [42, None, None] and [image["id"] for image in part.images] == [42] and len(part.annotations) == 2
    assert [image["id"] for image in dataset.first(2).images] == [40, 41] and len(dataset.first(2).annotations) == 1
    with pytest.raises(ImageError, match=r"truth.json' names none of the images \(unknown.jpg"):
        dataset.subset(["unknown.jpg"])


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"images": [{"id": 1}], "categories": []}', '{"images": 3}'])
def test_bad_truth(tmp_path, text):
    path = tmp_path / "truth.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ImageError, match=r"truth.json"):
        load_coco(path, annotations=False)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("annotations", {"area": ""}, r"annotations\[0\] has the area '', not a number"),
        ("annotations", {"area": float("nan")}, r"annotations\[0\] has the area nan, not a number"),
        ("annotations", {"area": 10**400}, r"annotations\[0\] has the area 1000"),
        ("annotations", {"bbox": [1, 2, 10**400, 3]}, "not 4 finite numbers"),
        ("annotations", {"iscrowd": "no"}, r"annotations\[0\] has iscrowd 'no', not 0 or 1"),
        ("annotations", {"iscrowd": 1e99}, "not 0 or 1"),
        ("annotations", {"bbox": [1, 2, 3]}, "not 4 finite numbers"),
        ("annotations", {"bbox": [1, 2, -3, 4]}, "width and height cannot be negative"),
        ("annotations", {"bbox": [1, 2, float("nan"), 3]}, "not 4 finite numbers"),
        ("categories", {"id": 2}, "2 entries of 'categories' have the id 2"),
        ("categories", {"name": ["a"]}, r"categories\[0\] has the name \['a'\], not text"),
        ("categories", {"name": True}, r"categories\[0\] has the name True, not text"),
        ("categories", {"name": None}, r"categories\[0\] has the name None, not text"),
        ("images", {"file_name": None}, r"images\[0\] has the file_name None, not the name of a file"),
        ("images", {"file_name": ""}, r"images\[0\] has the file_name ''"),
        ("images", {"file_name": False}, r"images\[0\] has the file_name False"),
        ("images", {"file_name": ["a.png"]}, r"images\[0\] has the file_name \['a.png'\]"),
        ("images", {"file_name": {"path": "a.png"}}, r"images\[0\] has the file_name"),
        ("images", {"file_name": 1.5}, r"images\[0\] has the file_name 1.5"),
        ("categories", {"id": "1"}, "ids of 'categories' are numbers and text"),
    ],
)
def test_entries_that_pycocotools_does_not_take(part, change, words, tmp_path):
    truth = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "annotations": [{"image_id": 1, "category_id": 2, "bbox": [0, 0, 4, 4]}],
        "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
    }
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(truth))
    assert load_coco(path).annotations[0]["area"] == 16
    path.write_text(json.dumps({**truth, "categories": [{"id": 1, "name": "a"}, {"id": 2, "name": 7}]}))
    assert load_coco(path).categories[1]["name"] == "7"  # as messages and tables join them
    truth[part][0].update(change)
    path.write_text(json.dumps(truth))
    with pytest.raises(ImageError, match=words):
        load_coco(path)


def test_what_other_tools_write_is_read(tmp_path):
    truth = {
        "images": [
            {"id": 1, "file_name": "images\\train\\a.png"},
            {"id": 2, "file_name": 17},
            {"id": 3, "file_name": "odd/b\\c.png"},
        ],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 5], "area": None, "iscrowd": None}],
        "categories": [{"id": 1, "name": 7}],
    }
    path = tmp_path / "truth.json"
    path.write_text(json.dumps(truth))
    dataset = load_coco(path)
    assert [image["file_name"] for image in dataset.images] == ["images/train/a.png", "17", "odd/b\\c.png"]
    assert dataset.annotations[0]["area"] == 20 and dataset.annotations[0]["iscrowd"] == 0
    assert dataset.image_id("x/train/a.png") == 1 and dataset.image_id("a.png") == 1


def test_an_image_has_one_entry(tmp_path):
    images = [{"id": 4, "file_name": "a.png"}, {"id": 5, "file_name": "b.png"}, {"id": 4, "file_name": "a.png"}]
    (tmp_path / "truth.json").write_text(json.dumps({"images": images, "categories": [{"id": 1, "name": "a"}]}))
    with pytest.raises(ImageError, match="2 entries of 'images' have the id 4"):
        load_coco(tmp_path / "truth.json", annotations=False)


def test_an_empty_list_of_images(tmp_path):
    (tmp_path / "truth.json").write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(ImageError, match=r"list 'images' of the annotation file '.*truth.json' is empty"):
        load_coco(tmp_path / "truth.json", annotations=False)
