from __future__ import annotations

import json

import pytest
from runtime_cases import make_spec

from detrt.errors import SpecError
from detrt.spec import ModelSpec, parse_size


def test_json_round_trip():
    spec = make_spec(mean=(0.1, 0.2, 0.3), mask=True, labels={"2": "Vogel", 0: "猫"})
    again = ModelSpec.from_json(spec.to_json())
    assert again == spec and again.labels == {0: "猫", 2: "Vogel"} and list(again.labels) == [0, 2]
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_labels():
    spec = make_spec(labels={0: "Cat", 2: "teddy bear"})
    assert spec.label(0) == "Cat" and spec.label(1) == "1"


def test_changes_are_checked():
    assert make_spec().with_input(height=16).input.size_hw == (16, 12)
    assert make_spec().with_decode(in_graph=True).decode.in_graph
    with pytest.raises(SpecError, match="got 0"):
        make_spec().with_input(height=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resize": "crop"}, ["input.resize", "stretch", "'crop'"]),
        ({"resample": "area"}, ["'area'", "bicubic"]),
        ({"dtype": "float16"}, ["'float16'", "uint8"]),
        ({"height": -1}, ["input.height", "-1"]),
        ({"width": 2.5}, ["input.width", "2.5"]),
        ({"height": True}, ["True"]),
        ({"height": 99999}, ["99999", "16384"]),
        ({"multiple_of": 3}, ["multiple of 3", "8"]),
        ({"resize": "shortest_edge", "dynamic": True}, ["shortest_edge", "None"]),
        ({"resize": "shortest_edge", "shortest_edge": 8}, ["symbolic"]),
        (
            {"resize": "shortest_edge", "shortest_edge": 8, "longest_edge": 4, "dynamic": True},
            ["longest_edge", "4"],
        ),
        ({"mean": (1, 2)}, ["input.mean", "3"]),
        ({"mean": (1, 2, float("nan"))}, ["input.mean", "finite"]),
        ({"std": (1, 0, 1)}, ["input.std", "(1.0, 0.0, 1.0)"]),
        ({"rescale": 0}, ["input.rescale", "0"]),
        ({"normalize_in_graph": False}, ["float32"]),
        ({"decode": {"activation": "relu"}}, ["'relu'"]),
        ({"decode": {"select": "nms"}}, ["'nms'"]),
        ({"decode": {"max_detections": 13}}, ["1 to 12", "13"]),
        ({"decode": {"select": "query", "max_detections": 5}}, ["1 to 4", "5"]),
        ({"labels": {3: "cow"}}, ["class id 3", "'cow'", "0..2"]),
        *(
            ({"labels": {key: "cow"}}, ["must be integers", repr(key)])
            for key in ("x", "+1", " 1", "1_0", "\u0661", "", 1.5, True)
        ),
        ({"labels": {"1": "cow", "01": "dog"}}, ["class 1 is there twice", "'01'"]),
        ({"labels": {1: None}}, ["class 1", "None"]),
        ({"shortest_edge": "x"}, ["input.shortest_edge", "'x'"]),
    ],
    ids=str,
)
def test_bad_values(changes, words):
    with pytest.raises(SpecError) as caught:
        make_spec(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


def changed(path, value):
    data = make_spec().to_dict()
    node = data
    for key in path[:-1]:
        node = node[key]
    if value is None:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not JSON"]),
        ("{", ["not JSON"]),
        ("[]", ["list"]),
        ("null", ["NoneType"]),
        (changed(["schema"], 2), ["schema 2", "reads 1"]),
        (changed(["schema"], None), ["None"]),
        (changed(["input"], None), ["'input'"]),
        (changed(["input"], 5), ["spec.input", "int"]),
        (changed(["input", "height"], None), ["spec.input", "height"]),
        (changed(["input", "heigth"], 5), ["heigth", "allowed"]),
        (changed(["input", "height"], "8"), ["'8'"]),
        (changed(["decode", "num_queries"], None), ["num_queries"]),
        (changed(["extra"], 1), ["extra"]),
        (changed(["labels"], ["a"]), ["labels"]),
        (changed(["family"], ""), ["family"]),
        (changed(["input", "mean"], "abc"), ["input.mean"]),
        (changed(["input", "mean"], 3), ["input.mean", "got 3"]),
        (changed(["input", "mean"], ["a", 0, 0]), ["input.mean", "'a'"]),
        (changed(["input", "mask"], "false"), ["input.mask", "'false'"]),
        (changed(["decode", "in_graph"], 1), ["decode.in_graph", "1"]),
        (changed(["name"], 5), ["name", "5"]),
        (changed(["input", "rescale"], "x"), ["input.rescale"]),
        (changed(["input", "resize"], []), ["input.resize"]),
    ],
    ids=lambda v: v[:40] if isinstance(v, str) else "",
)
def test_bad_json(text, words):
    with pytest.raises(SpecError) as caught:
        ModelSpec.from_json(text)
    assert all(word in str(caught.value) for word in words), caught.value


def test_parse_size():
    assert parse_size("480x640") == (480, 640) and parse_size("640") == (640, 640)
    for text in ("", "x", "-5", "1x2x3", "12.5", "0x5", "480,640"):
        with pytest.raises(SpecError, match="`size`"):
            parse_size(text)
