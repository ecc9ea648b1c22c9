"""The JSON schemas in docs/reference/schemas are those of the code, and fit the files that detrt writes."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest

pytest.importorskip("onnx", reason="needs the 'export' extra")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
from json_schemas import FOLDER, schemas, text
from runtime_cases import make_spec

from detrt import files
from detrt.bundle import Bundle, BundleFile, EngineFacts, Provenance, sidecar_path, write_sidecar
from detrt.errors import SpecError
from detrt.models.foreign import OnnxSidecar


def test_they_are_those_of_the_code():
    """Where this fails: python tests/support/json_schemas.py"""
    assert {path.name: path.read_text("utf-8") for path in FOLDER.iterdir()} == {name: text(s) for name, s in schemas().items()}


def errors(name, data):
    return [error.message for error in jsonschema.Draft202012Validator(schemas()[f"{name}.schema.json"]).iter_errors(data)]


def test_a_bundle_and_a_sidecar(tmp_path):
    (tmp_path / "m.engine").write_bytes(b"engine")
    profile = {"pixel_values": {"min": [1], "opt": [2], "max": [4]}}
    facts = EngineFacts("tensorrt-rtx", "1.2", (86, 89), "fp32", profile, "ab" * 32, inputs=({"name": "x"},))
    write_sidecar(tmp_path / "m.engine", make_spec(), facts)
    entry = BundleFile("engine", "m.engine", files.sha256_of(tmp_path / "m.engine"), 6, facts)
    Bundle(tmp_path, make_spec(), Provenance("hf:a/b@c", "cd", 12, {"opset": 17}, {"torch": "2"}), (entry,)).save()
    bundle = json.loads((tmp_path / "detrt.json").read_text())
    assert errors("bundle", bundle) == [] == errors("spec", bundle["spec"])
    assert errors("engine", json.loads(sidecar_path(tmp_path / "m.engine").read_text())) == []
    for change in (
        lambda d: d["spec"]["input"].update(resize="crop"),
        lambda d: d["files"][0].pop("sha256"),
        lambda d: d["spec"].update(colour=1),
        lambda d: d["provenance"].update(parameters="x"),
    ):
        wrong = deepcopy(bundle)
        change(wrong)
        assert errors("bundle", wrong)


@pytest.mark.parametrize(
    ("data", "right"),
    [
        ({}, True),
        ({"layout": "rt-detr", "labels": ["a", "b"], "preprocess": "family-default"}, True),
        ({"labels": {"1": "a"}, "mean": [0.5, 0.5, 0.5], "std": [1, 1, 1], "resize": "640x640"}, True),
        ({"layout": "transformers", "tensors": {"logits": "cls"}, "family": "detr"}, True),
        ({"colour": 1}, False),
        ({"labels": "names.txt"}, False),
        ({"rescale": "1/255"}, False),
        ({"mean": 0.5}, False),
    ],
)
def test_the_schema_of_a_sidecar_takes_what_detrt_takes(data, right, tmp_path):
    path = tmp_path / "m.onnx.json"
    path.write_text(json.dumps(data))
    assert (errors("onnx-sidecar", data) == []) is right
    if right:
        OnnxSidecar.read(path)
    else:
        with pytest.raises(SpecError, match=r"m\.onnx\.json"):
            OnnxSidecar.read(path)
