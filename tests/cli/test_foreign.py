"""ONNX files of other exporters on the command line: what is printed, and what is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
import foreign_models as made
import onnx
from cli_support import cli, snapshot, write_images, write_onnx  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    for layout in made.LAYOUTS:
        made.write(folder / f"{layout}.onnx", layout)
    return folder


@pytest.fixture
def place(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in written.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_onnx(tmp_path / "own.onnx")
    write_images(tmp_path / "in")
    (tmp_path / "labels.txt").write_text("\n".join(made.NAMES))
    (tmp_path / "three.txt").write_text("a\nb\nc")
    return tmp_path


SAID = ("--labels", "labels.txt", "--preprocess", "family-default")


def test_every_command_takes_one(cli, place):
    facts = cli("info", "rt-detr.onnx", *SAID, "--json", "-").json
    assert facts["layout"] == "rt-detr" and facts["inputs"]["images"].startswith("float32") and len(facts["loading"]) == 3
    assert "normalised" in cli("info", "rt-detr.onnx", "--labels", "labels.txt", "--json", "-").json["not known"]
    built = cli("build", "rt-detr.onnx", "-o", "b", "--target", "onnx", *SAID)
    words = " ".join(built.out.split())
    assert "layout rt-detr, equal to the original" in words and "times 1/255, no normalisation" in words
    assert "5 class names of 'labels.txt'" in built.err
    exported = cli("export", "rt-detr.onnx", "-o", "out.onnx", *SAID)
    assert "equal to the original" in exported.out and "pixel_values: uint8" in exported.out
    lines = [
        cli("detect", model, "in", "--json", "-", "-q", "--threshold", "0.1", *more).lines
        for model, more in (("rt-detr.onnx", SAID), ("b", ()), ("out.onnx", ()))
    ]
    assert lines[0] == lines[1] == lines[2] and any(row["detections"] for row in lines[0])
    (place / "rt-detr.onnx.json").write_text(json.dumps({"labels": made.NAMES, "preprocess": "family-default"}))
    assert cli("detect", "rt-detr.onnx", "in", "--json", "-", "-q", "--threshold", "0.1").lines == lines[0]
    # A bundle of it is compared with the file by default.
    report = cli("verify", "b", "--images", "in", "--threshold", "0.1", "--json", "-").json
    assert report["passed"] and any("another exporter: layout rt-detr" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["rt-detr.onnx"], "5 classes", "--labels FILE"),
        (["rt-detr.onnx", "--labels", "labels.txt"], "rt-detr.onnx", "--preprocess family-default"),
        (["rt-detr.onnx", "--labels", "three.txt", "--preprocess", "family-default"], "three.txt", "5 classes"),
        (["rt-detr.onnx", *SAID, "--layout", "rf-detr"], "rt-detr.onnx", r"not the layout rf-detr \(input -> dets, labels\)"),
        (["rt-detr.onnx", *SAID, "--layout", "yolo"], "'yolo'", "transformers, rt-detr, rf-detr, ultralytics"),
        (["rt-detr.onnx", *SAID, "--resize", "128x128"], "128x128", "--resize 64x96"),
        (["rt-detr.onnx", *SAID, "--resize", "shortest:64,128"], "shortest:64,128", "--resize HEIGHTxWIDTH"),
        (["rt-detr.onnx", *SAID, "--mean", "1,2"], "'1,2'", "three comma-separated numbers"),
        (["rt-detr.onnx", *SAID, "--mean", "0,0,0"], "--std", "or neither"),
        (["rt-detr.onnx", *SAID, "--family", "detrr"], "'detrr'", "must be one of"),
        (["rt-detr.onnx", *SAID, "--family", "grounding_dino"], "grounding_dino", "export its checkpoint"),
        (["rt-detr.onnx", *SAID, "--opset", "18"], "--opset 18", "leave it out"),
        (["rt-detr.onnx", *SAID, "--size", "320"], "--size 320", "leave it out"),
        (["rt-detr.onnx", *SAID, "--trust-remote-code"], "--trust-remote-code", "leave it out"),
        (["rf-detr.onnx", "--labels", "labels.txt", "--preprocess", "default"], "'default'", "family-default"),
        (["own.onnx", "--layout", "rt-detr"], "--layout rt-detr", "leave it out"),
        (["own.onnx", "--mean", "0,0,0"], "--mean", "leave it out"),
        (["random:detr/tiny", "--layout", "transformers"], "--layout", "leave it out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusals(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused("build", *arguments, "-o", "out", "--target", "onnx", names=names, advice=advice)
    assert snapshot(place) == before


def test_the_file_that_is_exported_stays(cli, place):
    before = snapshot(place)
    for more in ((), ("--precision", "fp16")):
        cli.refused(
            "export",
            "rt-detr.onnx",
            "-o",
            "../" + place.name + "/rt-detr.onnx",
            *SAID,
            *more,
            names="rt-detr.onnx",
            advice="another output",
        )
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("{", "cannot be read as JSON"),
        ('{"colour": 1}', "some of layout, tensors, family"),
        ('{"labels": "names.txt"}', "wrong type"),
        ('{"labels": {"a": "x"}}', "class ids as keys"),
        ('{"labels": ["a", "b", "c", "d", "e", "f"]}', "--labels FILE"),
        ('{"layout": "mine"}', "must be one of"),
        ('{"labels": ["a", "b", "c", "d", "e"], "mean": [0, 0], "std": [1, 1]}', "3 finite numbers"),
        ('{"labels": ["a", "b", "c", "d", "e"], "resample": "best"}', "must be one of nearest"),
    ],
)
def test_wrong_sidecars(cli, place, text, advice):
    (place / "rf-detr.onnx.json").write_text(text)
    before = snapshot(place)
    cli.refused("build", "rf-detr.onnx", "-o", "out", "--target", "onnx", names="", advice=advice)
    assert snapshot(place) == before


FACTS = {
    "rt-detr": ("5 classes", "how its images are normalised"),
    "rf-detr": ("5 classes",),
    "ultralytics": ("5 classes",),
    "transformers": ("how its logits become scores", "5 classes", "--resize"),
}


@pytest.mark.parametrize("layout", FACTS)
def test_one_refusal_has_all_facts_that_are_missing(layout, cli, place):
    if layout == "transformers":  # the tensors of optimum, whose neighbours are not here
        model = onnx.load(place / "rf-detr.onnx")
        names = {"input": "pixel_values", "dets": "pred_boxes", "labels": "logits"}
        for value in (*model.graph.input, *model.graph.output):
            value.name = names[value.name]
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        onnx.save(model, place / "transformers.onnx")
    error = cli("build", f"{layout}.onnx", "-o", "b", "--target", "onnx", code=2).err
    assert error.count("\n") == 1 and error.count(f"{layout}.onnx'") == 1
    for fact in FACTS[layout]:
        assert fact in error, fact
    assert error.count("(2)") == (len(FACTS[layout]) > 1)
