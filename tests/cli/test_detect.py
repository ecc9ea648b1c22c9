"""detrt detect on a bundle: every kind of input, every output. Options and rules: test_detect.py."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, place, run_process, write_images  # noqa: F401 - fixtures
from engine_graphs import rtx
from web_support import web

from detrt.data.video import video_writer


def labels(row):
    return [found["label"] for found in row["detections"] if found["score"] > 0.7]


def test_images_folders_and_patterns(cli, place):
    write_images(place / "more" / "deep")
    rows = cli("detect", "bundle", "in/blue.png", "more", "in/b*.png", "--json", "-", "-q").lines
    assert [row["image"] for row in rows] == [
        "in/blue.png",
        "more/deep/black.png",
        "more/deep/blue.png",
        "in/black.png",
    ]
    assert [labels(row) for row in rows] == [["blue", "blue"], [], ["blue", "blue"], []]
    assert (rows[0]["width"], rows[0]["height"]) == (24, 16)


def test_addresses(cli, place, monkeypatch):
    """An address that is typed is one more image; outputs are named after it, without its secrets."""
    monkeypatch.chdir(place)
    cli("detect", "bundle", "in/blue.png", "--json", "file.jsonl", "-q")
    file = json.load(open("file.jsonl"))
    with web(place / "in") as at:
        named = [f"{at}/blue.png", f"{at}/blue.png?token=hidden&x=1", "in/black.png", f"{at}/./black.png", f"{at}/blue.png"]
        options = ("--save-dir", "runs", "--save-txt", "txt", "--save-crops", "crops", "-t", 0.7)
        rows = cli("detect", "bundle", *named, "--json", "-", "-q", *options).lines
        assert [row["image"] for row in rows] == [named[0], f"{at}/blue.png?token=...&x=1", "in/black.png", named[3]]
        assert [labels(row) for row in rows] == [labels(file), labels(file), [], []]
        written = [path.name for path in (place / "runs").rglob("*.png")] + [path.name for path in (place / "txt").rglob("*.txt")]
        assert len(written) == 8 and "hidden" not in "".join(written) and len(list((place / "crops").rglob("*.jpg"))) == 4
        two = cli("detect", "bundle", *named, "--json", "-", "-q", "-t", 0.7, "--device", "cpu,cpu").lines
        assert two == rows
        cli("detect", "bundle", f"{at}/none.png", "in/blue.png", "--skip-bad", "--json", "left.jsonl", code=2)
        assert json.loads(open("left.jsonl").read())["image"] == "in/blue.png"
        refusal = cli("detect", "bundle", f"{at}/none.png", code=2).err
        assert f"'{at}/none.png' cannot be fetched" in refusal and "check the address" in refusal
        cli.refused("detect", "bundle", f"{at}/film.mp4", names=f"{at}/film.mp4", advice="download it first")
        (place / "in" / "text.jpg").write_text("no image")
        refusal = cli("detect", "bundle", f"{at}/text.jpg", code=2).err
        assert f"'{at}/text.jpg': the image (8 bytes)" in refusal and "save it as PNG or JPEG" in refusal
        cli.refused("verify", "bundle", "--images", f"{at}/blue.png", names="blue.png", advice="download it first")


def test_standard_output_is_json_alone(place):
    """In a process of its own, so that nothing that a library prints is missed."""
    result = run_process("detect", "bundle", "in", "--json", "-", cwd=place)
    assert result.code == 0 and len(result.lines) == 2
    assert "note:" not in result.err and "ran on" in result.err
    assert "\x1b" not in result.err and "━" not in result.err, "a progress bar where nobody looks"


UNUSED = (
    *("torch", "transformers", "onnx", "tokenizers", "av", "detrt.models.load", "detrt.models.families", "PIL.TiffImagePlugin"),
    *(
        f"detrt.backends.{name}"
        for name in ("compare", "engine_check", "openvino.session", "tensorrt.opening", "inductor.session")
    ),
)


def test_what_a_bundle_does_not_need_is_not_imported(place):
    """Start-up time and memory: the families, other backends than the one that runs, decoders of other formats."""
    code = (
        "import sys; from detrt.cli import main\n"
        "assert main(['detect', 'bundle', 'in', '--json', '-', '-q']) == 0\n"
        f"found = [name for name in {UNUSED!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=place)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_every_output_at_once(cli, place):
    cli("detect", "bundle", "in", "-t", 0.7, "--json", "o.jsonl", "--csv", "o.csv", "--coco", "o.json", "--save-dir", "runs")
    assert [len(json.loads(line)["detections"]) for line in open("o.jsonl")] == [0, 2]
    assert [row["label"] for row in csv.DictReader(open("o.csv"))] == ["blue", "blue"]
    assert [(row["image_id"], row["category_id"]) for row in json.load(open("o.json"))] == [(2, 2), (2, 2)]
    assert sorted(os.listdir("runs")) == ["black.png", "blue.png", "detections.jsonl"]


def test_video(cli, place):
    pytest.importorskip("av", reason="av is not installed")
    with video_writer(place / "clip.mp4", fps=5, size=(16, 24)) as write:
        for index in range(6):
            write(np.full((16, 24, 3), (0, 0, 255 * (index >= 3)), np.uint8))
    rows = cli("detect", "bundle", "clip.mp4", "--json", "-", "-q", "--every", 2).lines
    assert [row["frame"] for row in rows] == [0, 2, 4] and [bool(labels(row)) for row in rows] == [False, False, True]


def test_labels_and_crops(cli, place):
    """What the JSON lines hold, as YOLO's labels and as pixels; inputs of one name keep their suffix."""
    Image.open("in/blue.png").save("in/blue.bmp")
    done = cli("detect", "bundle", "in", "--json", "out.jsonl", "--save-txt", "labels", "--save-crops", "crops", "-q")
    rows = {row["image"]: row for row in map(json.loads, (place / "out.jsonl").read_text().splitlines())}
    assert done.code == 0 and sorted(path.name for path in (place / "labels").iterdir()) == [
        "black.txt",
        "blue.bmp.txt",
        "blue.png.txt",
    ]
    found = rows["in/blue.png"]["detections"]
    lines = (place / "labels/blue.png.txt").read_text().splitlines()
    assert len(lines) == len(found) > 0
    for line, one in zip(lines, found, strict=True):
        class_id, x, y, w, h = map(float, line.split())
        corners = [(x - w / 2) * 24, (y - h / 2) * 16, (x + w / 2) * 24, (y + h / 2) * 16]
        assert class_id == one["class_id"] and corners == pytest.approx(one["box_xyxy"], abs=1e-3)
    crops = sorted(path.relative_to(place / "crops").as_posix() for path in (place / "crops").rglob("*.jpg"))
    assert [name for name in crops if "blue.png" in name] == [f"{one['label']}/blue.png-{i}.jpg" for i, one in enumerate(found)]


def test_tiles(cli, place):
    (whole,) = cli("detect", "bundle", "in/blue.png", "--json", "-", "-q", "--tile", "24").lines
    (plain,) = cli("detect", "bundle", "in/blue.png", "--json", "-", "-q").lines
    assert whole == plain  # one tile holds it
    (tiled,) = cli("detect", "bundle", "in/blue.png", "--json", "-", "-q", "--tile", "8x12", "--overlap", "0").lines
    assert tiled == plain  # the pieces in tiles belong to what the whole image shows
    cli.refused("detect", "bundle", "in", "--tile", "8", "--overlap", "1", names="overlap", advice="0 to 0.9")


def test_thresholds_of_classes(cli, place):
    """Blue images score 0.92, 0.82, 0.62 and 0.38 for blue, and 0.08 and less for the others."""

    def found(*options):
        rows = cli("detect", "bundle", "in/blue.png", "--json", "-", "-q", *options).lines
        return [d["label"] for d in rows[0]["detections"]]

    assert found() == ["blue"] * 3 and found("--class-thresholds", "blue=0.9") == ["blue"]
    assert found("--class-thresholds", "Blue=0.3, 0=0.05") == ["blue"] * 4 + ["red"]
    for text in ("blue", "blue=2", "=0.5", "blue=0.1,blue=0.2"):
        cli.refused("detect", "bundle", "in", "--class-thresholds", text, names=repr(text), advice="CLASS=SCORE|twice")
    cli.refused("detect", "bundle", "in", "--class-thresholds", "blu=0.5", names="'blu'", advice="did you mean blue")


@rtx
def test_an_engine_that_cannot_run_here_gives_way_and_says_so(cli, place):
    """A bundle falls back to its ONNX file with a note; an engine by itself cannot."""
    cli("build", "model.onnx", "-o", "full", "--target", "tensorrt-rtx", "--sm", 89)
    if importlib.util.find_spec("cuda") is not None:
        pytest.skip("the engine may run here")
    result = cli("detect", "full", "in", "--json", "-")
    assert len(result.lines) == 2 and "nothing else of the bundle can run here" in result.err and "no CUDA device" in result.err
    engine = "full/model.tensorrt-rtx-sm89.engine"
    cli.refused("detect", engine, "in", names="no CUDA device", advice="--backend onnxruntime")
    cli.refused("detect", "full", "in", "--backend", "tensorrt", names="'full'", advice="--backend onnxruntime")
    assert len(cli("detect", "full", "in", "--backend", "onnxruntime", "--json", "-", "-q").lines) == 2


def test_the_same_as_pytorch(cli, place):
    """A checkpoint through its bundle and by itself: the same detections, to the digits that are written."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    images = place / "noise"
    images.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(images / "a.png")
    cli("build", "random:yolos/tiny", "-o", "whole", "--target", "onnx", "--size", 64, "--no-check")
    options = ["noise", "-t", 0, "--max-detections", 3, "--json", "-", "-q"]
    ours = cli("detect", "whole", *options).lines[0]["detections"]
    theirs = cli("detect", "random:yolos/tiny", *options, "--size", 64).lines[0]["detections"]
    assert len(ours) == 3 and [d["class_id"] for d in ours] == [d["class_id"] for d in theirs]
    np.testing.assert_allclose([d["score"] for d in ours], [d["score"] for d in theirs], atol=1e-5)
    np.testing.assert_allclose([d["box_xyxy"] for d in ours], [d["box_xyxy"] for d in theirs], atol=0.02)


@pytest.mark.parametrize("size", ["8x12", "16x8"])
@rtx
def test_sizes_of_a_bundle(cli, place, size):
    from cli_support import write_onnx

    write_onnx(place / "wide.onnx", dynamic=True)
    cli("build", "wide.onnx", "-o", "wide", "--target", "tensorrt-rtx", "--sm", 89, "--height", "8,16,32", "--width", "8,8,16")
    assert len(cli("detect", "wide", "in", "--size", size, "--json", "-", "-q").lines) == 2


def test_few_images_load_no_package_of_a_gpu(cli, place, monkeypatch):
    """They are resized on the CPU, whatever resizes many of them, and videos, on the GPU."""
    pytest.importorskip("av", reason="av is not installed")
    from detrt.detector import Detector

    given, opened = [], Detector.with_options.__func__
    monkeypatch.setattr(Detector, "with_options", classmethod(lambda cls, *args: given.append(args[1]) or opened(cls, *args)))
    monkeypatch.setattr("detrt.cli.detect.FEW_IMAGES", 2)
    cli("detect", "bundle", "in/blue.png", "in/black.png", "-q")
    write_images(place / "more")
    cli("detect", "bundle", "in", "more", "-q")
    with video_writer(place / "film.mp4", fps=5, size=(16, 24)) as write:
        write(np.zeros((16, 24, 3), np.uint8))
    cli("detect", "bundle", "film.mp4", "-q")
    assert [one.on_device for one in given] == [False, True, True]
