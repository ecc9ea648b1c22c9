"""Which class a caller means: the table that Python and C++ share, and every front end by the same rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx_models import make_spec

from detrt.class_names import class_thresholds, parse_class_thresholds, shared_names, split_classes
from detrt.errors import SpecError

TABLE = json.loads((Path(__file__).parent / "data" / "class_names.json").read_text("utf-8"))["cases"]
CASES = [(row["labels"], row["num_classes"], case) for row in TABLE if "labels" in row for case in row["cases"]]
TEXTS = [case for row in TABLE for case in row.get("texts", ())]


def spec_of(labels, count):
    spec = make_spec()
    return replace(
        spec,
        labels={int(key): name for key, name in labels.items()},
        decode=replace(spec.decode, num_classes=count, max_detections=1),
    )


@pytest.mark.parametrize(
    ("labels", "count", "case"), CASES, ids=lambda value: str(value.get("wanted", ""))[:30] if isinstance(value, dict) else ""
)
def test_classes_are_found(labels, count, case):
    spec = spec_of(labels, count)
    if "error" in case:
        with pytest.raises(SpecError) as refused:
            spec.class_ids(case["wanted"])
        assert case["error"] in str(refused.value)
    else:
        assert spec.class_ids(case["wanted"]) == case["ids"]


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: case["text"])
def test_texts_are_split(case):
    if "error" in case:
        with pytest.raises(SpecError, match=case["error"]):
            split_classes(case["text"])
    else:
        assert list(split_classes(case["text"])) == case["names"]


@pytest.mark.parametrize("wrong", [True, 1.0, None, b"car", ["car"], np.float32(1)])
def test_other_types_are_no_class(wrong):
    with pytest.raises(SpecError, match="name or an id"):
        spec_of({0: "car"}, 2).class_ids([wrong])


@pytest.mark.parametrize("wrong", ["car", b"car", 1, True])
def test_one_class_is_no_list(wrong):
    with pytest.raises(SpecError, match="list"):
        spec_of({0: "car"}, 2).class_ids(wrong)


def test_numbers_of_numpy_are_ids():
    assert spec_of({0: "1", 1: "2"}, 2).class_ids(np.array([1, 0])) == [1, 0]
    assert spec_of({0: "1", 1: "2"}, 2).class_ids(name for name in ("2", "1")) == [1, 0]


def test_thresholds_hold_for_all_ids_of_a_name():
    spec = spec_of({0: "dog", 1: "dog", 2: "a,b", 3: "x=y"}, 4)
    pairs = parse_class_thresholds('dog=0.25, "a,b"=1,x=y=0.5')
    assert pairs == (("dog", 0.25), ("a,b", 1.0), ("x=y", 0.5))
    assert spec.class_thresholds(pairs) == {0: 0.25, 1: 0.25, 2: 1.0, 3: 0.5}
    assert spec.class_thresholds({1: 0.5}.items()) == {1: 0.5}
    with pytest.raises(SpecError, match="two thresholds"):
        spec.class_thresholds([("dog", 0.5), (1, 0.7)])


@pytest.mark.parametrize(
    "text", ["", " ", "dog", "dog=", "dog=x", "dog=2", "dog=nan", "=0.5", "dog=0.5,dog=0.6", '"dog"0.5', '"dog']
)
def test_wrong_thresholds_are_refused(text):
    with pytest.raises(SpecError):
        parse_class_thresholds(text)


@pytest.mark.parametrize("score", [True, "0.5", None, -0.1, 1.1, float("nan")])
def test_a_threshold_is_a_score(score):
    with pytest.raises(SpecError, match="0 to 1"):
        spec_of({0: "dog"}, 1).class_thresholds([("dog", score)])


def test_scores_of_numpy_are_thresholds():
    assert class_thresholds({0: "cat"}, 1, [("cat", np.float32(0.25))]) == {0: 0.25}


def test_names_that_are_not_unique_are_told():
    assert shared_names({0: "dog", 1: "cat", 2: "dog", 3: "Dog"}) == {"dog": [0, 2]}
