"""Bad models: each is refused with one error that names it and a next step, and nothing is written."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from checkpoint_folders import save_folder
from cli_support import cli, place, snapshot, write_onnx  # noqa: F401 - fixtures
from onnx_models import make_model, make_spec

BUILD = ("build", "{}", "-o", "bundle", "--target", "onnx")
EXPORT = ("export", "{}", "-o", "new/x.onnx")
INFO = ("info", "{}")
DETECT = ("detect", "{}", "in", "--json", "o.jsonl")


def refused(cli, place, command, model, names, advice):
    """The existing bundle and everything else in the working folder stay as they were."""
    before = snapshot(place)
    message = cli.refused(*(part.format(model) for part in command), names=names, advice=advice)
    assert snapshot(place) == before
    return message


@pytest.mark.parametrize("command", [BUILD, EXPORT, DETECT, INFO], ids=lambda c: c[0])
@pytest.mark.parametrize(
    ("reference", "names", "advice"),
    [
        ("gone", "'gone'", "hf:org|give hf:"),
        ("random:nope", "random:nope", "write random:<name>"),
        ("embedded:nope", "embedded:nope", "allowed: embedded:shapes"),
        ("hf:only-one-part", "hf:only-one-part", "write hf:<organisation>/<model>"),
        ("ckpt:x.pth", "ckpt:x.pth", "e.g. ckpt:detr-r50-e632da11.pth"),
        ("in/blue.png", "in/blue.png", "config.json|expected .onnx"),
    ],
)
def test_unknown_references(cli, place, command, reference, names, advice):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    refused(cli, place, command, reference, names, advice)


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return save_folder(tiny("yolos"), folder)


def change_config(name="config.json", **changes):
    def change(folder):
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**data, **changes}))

    return change


def nan_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def cut(name, keep):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


CHECKPOINTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "neither config.json|neither detrt.json", "give|nor config.json"),
    "empty config": (cut("config.json", 0), "config.json", "JSON"),
    "cut config": (cut("config.json", 100), "config.json", "JSON"),
    "unknown family": (change_config(model_type="faster_rcnn"), "faster_rcnn", "detr.*rt_detr"),
    "bad architectures": (change_config(architectures=[{"a": 1}]), "says architectures [{'a': 1}]", "not a list of names"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights", "expected one of model.safetensors"),
    "empty weights": (cut("model.safetensors", 0), "ckpt", "cannot be loaded|damaged"),
    "cut weights": (cut("model.safetensors", 5000), "ckpt", "cannot be loaded|damaged"),
    "other shapes": (change_config(hidden_size=16), "weights", "incomplete or of another family"),
    "no image processor": (
        lambda f: (f / "preprocessor_config.json").unlink(),
        "neither preprocessor_config.json nor",
        "--resize HEIGHTxWIDTH.*--preprocess family-default",
    ),
    "images that are not resized": (change_config("preprocessor_config.json", do_resize=False), "do_resize false", "--resize"),
    "nan weights": (nan_weights, "NaN", "damaged or its training diverged"),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_damaged_checkpoints(cli, place, checkpoint, kind):
    damage, names, advice = CHECKPOINTS[kind]
    damage(shutil.copytree(checkpoint, place / "ckpt"))
    before = snapshot(place)
    for command in (BUILD, EXPORT):
        message = cli.refused(*(part.format("ckpt") for part in command), names="", advice=advice)
        assert any(name in message for name in names.split("|")), message
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("file", "content", "names"),
    [
        ("l.txt", "a\nb\n", "7 classes"),
        ("l.txt", "", "0 names"),
        ("l.json", "{", "l.json"),
        ("l.json", '{"9": "a"}', "ids up to 9"),
        ("l.json", '{"x": "a"}', "'x'"),
        ("l.json", "3", "got int"),
        ("l.txt", "\udcff", "is not UTF-8"),
        ("gone.txt", None, "gone.txt"),
    ],
)
def test_labels_that_do_not_fit(cli, place, file, content, names):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    if content is not None:
        (place / file).write_bytes(content.encode("utf-8", "surrogateescape"))
    for command in (BUILD, EXPORT):
        refused(cli, place, (*command, "--labels", file), "random:yolos/tiny", names, "labels")


def lowered_not(domain="detrt"):
    return make_model(make_spec(), node="MSDeformAttn", domain=domain)


def with_spec_text(change):
    """The model with its embedded spec changed as JSON."""
    model = onnx.load_from_string(make_model(make_spec()))
    for entry in model.metadata_props:
        data = json.loads(entry.value)
        change(data)
        entry.value = json.dumps(data)
    return model.SerializeToString()


def missing_data():
    model = onnx.load_from_string(make_model(make_spec()))
    tensor = next(t for t in model.graph.initializer if t.name == "boxes")
    onnx.external_data_helper.set_external_data(tensor, "gone.data")
    tensor.ClearField("raw_data")
    return model.SerializeToString()


WHOLE = make_model(make_spec())
MODELS = {
    "missing": (None, "bad.onnx", "detrt export"),
    "empty": (b"", "bad.onnx", "export (it|or download it) again|export it again"),
    "text": (b"hello\n", "bad.onnx", "give an .onnx file|export it again|complete ONNX file"),
    "half": (WHOLE[: len(WHOLE) // 2], "bad.onnx", "export it again|not a complete ONNX"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "bad.onnx", "git lfs pull|export it again"),
    "no spec": (make_model(None), "bad.onnx", "give --layout"),
    "newer spec": (with_spec_text(lambda d: d.update(schema=99)), "99", "export again"),
    "unknown field": (with_spec_text(lambda d: d.update(flavour=1)), "flavour", "allowed: "),
    "unknown input": (with_spec_text(lambda d: d["input"].update(flip=1)), "flip", "allowed: "),
    "no labels": (with_spec_text(lambda d: d.pop("labels")), "'labels'", "no field"),
    "labels beyond": (with_spec_text(lambda d: d["labels"].update({"7": "x"})), "class id 7", "give labels"),
    "weights gone": (missing_data(), "gone.data", "beside"),
}


@pytest.mark.parametrize("command", [BUILD, INFO, DETECT], ids=lambda c: c[0])
@pytest.mark.parametrize("kind", MODELS)
def test_bad_onnx_files(cli, place, command, kind):
    content, names, advice = MODELS[kind]
    if content is not None:
        (place / "bad.onnx").write_bytes(content)
    if kind == "weights gone" and command is INFO:
        pytest.skip("info describes the graph, whose weights it does not read")
    if kind == "no spec" and command is INFO:
        pytest.skip("info describes the graph, and says what is not known")
    refused(cli, place, command, "bad.onnx", names, advice)


def test_nodes_that_were_not_lowered(cli, place):
    (place / "bad.onnx").write_bytes(lowered_not())
    refused(cli, place, DETECT, "bad.onnx", "detrt::MSDeformAttn", "lower them")
    if pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra"):
        refused(
            cli,
            place,
            ("build", "{}", "-o", "bundle", "--target", "tensorrt-rtx", "--sm", "89"),
            "bad.onnx",
            "MSDeformAttn",
            "--msda gather",
        )


def test_model_that_gives_nan(cli, place):
    """Finding nothing would hide that the model overflowed."""
    model = onnx.load_from_string(make_model(make_spec()))
    shift = next(t for t in model.graph.initializer if t.name == "shift")
    shift.CopyFrom(onnx.numpy_helper.from_array(np.array(np.nan, np.float32), "shift"))
    (place / "nan.onnx").write_bytes(model.SerializeToString())
    refused(cli, place, DETECT, "nan.onnx", "logits", "NaN.*(export|overflow|precision|check)")
    cli("build", "nan.onnx", "-o", "nan", "--target", "onnx")
    refused(cli, place, ("detect", "{}", "in", "--save-dir", "runs", "--no-draw"), "nan", "logits", "NaN")
    result = cli("verify", "nan", "--against", "model.onnx", "--images", "in", code=None)
    assert result.code in (2, 3) and "NaN" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(
    ("model", "options", "names", "advice"),
    [
        ("random:rf_detr/tiny", ["--size", "63"], "got 63", "try 56 or 84"),
        ("random:rt_detr/tiny", ["--size", "100"], "got 100", "multiple of 32"),
        ("random:detr/tiny", ["--size", "20000"], "20000", "from 1 to 16384 pixels; got"),
        (
            "random:rf_detr/tiny",
            ["--target", "tensorrt-rtx", "--height", "56,84,112", "--width", "56,84,112"],
            "RF-DETR",
            "give one number",
        ),
        ("model.onnx", ["--target", "tensorrt-rtx", "--size", "32"], "32", "8|12"),
        ("random:yolos/tiny", ["--max-detections", "1000"], "got 1000", "at most"),
        ("model.onnx", ["--target", "tensorrt-rtx", "--batch", "4,2,1"], "(4, 2, 1)", "--batch 1,4,8"),
        ("model.onnx", ["--batch", "many"], "'many'", "such as 1,4,8"),
        ("model.onnx", ["--target", "tensorrt-rtx", "--sm", "61"], "61", "--sm 86,89"),
        ("model.onnx", ["--sm", "new"], "'new'", "86"),
        ("model.onnx", ["--size", "0"], "'0'", "such as 640"),
        ("model.onnx", ["--size", "64", "--height", "3"], "--size", "not both"),
        ("model.onnx", ["--target", "onnxruntime"], "onnxruntime", "is now --target onnx"),
        ("model.onnx", ["--width", "64"], "--width", "both --height and --width"),
        ("model.onnx", ["--target", "tensorrt-rtx", "--timeout", "-1"], "-1", "number of seconds of more than 0"),
        ("model.onnx", ["--target", "tensorrt-rtx", "--optimization-level", "9"], "got 9", "from 0 to 5"),
        ("model.onnx", ["--target", "tensorrt-rtx", "--workspace-mib", "0"], "got 0", "from 1 to"),
        ("model.onnx", ["--target", "gpu"], "'gpu'", "tensorrt-rtx, tensorrt, inductor, openvino, onnx"),
        ("model.onnx", ["--target", ","], "got nothing", "tensorrt-rtx, tensorrt, inductor, openvino, onnx"),
        ("model.onnx", ["--target", "auto,onnx"], "auto,onnx", "one of the two"),
        ("model.onnx", ["--sm", "86"], "--sm 86", "--target tensorrt-rtx"),
        ("model.onnx", ["--target", "onnx", "--sm", "86"], "--sm", "--target tensorrt-rtx"),
        ("model.onnx", ["--target", "tensorrt-rtx,tensorrt-rtx"], "tensorrt-rtx", "once"),
        ("model.onnx", ["--target", "onnx", "--batch", "1,2,4"], "1,2,4", "no effect without --target .*inductor"),
        ("model.onnx", ["--target", "onnx", "--height", "8,16,32", "--width", "12"], "8,16,32", "leave it out"),
        ("model.onnx", ["--timing-cache", "cache.bin"], "cache.bin", "--target tensorrt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_choices_that_do_not_fit(cli, place, model, options, names, advice):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    if model.startswith("random:"):
        pytest.importorskip("transformers", reason="needs the 'export' extra")
    before = snapshot(place)
    cli.refused("build", model, "-o", "bundle", *options, names=names, advice=advice)
    assert snapshot(place) == before
