"""The detect command and the work behind it: images and videos in, files out."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from onnx_models import make_model, make_spec

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.cli.detect import detect
from detrt.cli.spellings import spelled
from detrt.data.images import Input, expand_inputs
from detrt.data.video import read_frames, video_facts, video_writer
from detrt.detector import Detector
from detrt.errors import DetrtError, ImageError, MissingPackageError, OutputError
from detrt.jobs.annotate import AnnotatedCopies
from detrt.jobs.run import detect_inputs, exclude_outputs

app = typer.Typer()
app.command()(detect)
BLUE = ["blue", "blue"]
DATA = Path(__file__).parents[3] / "shared/data"
AUTHORS = DATA / "weights/deimv2/deimv2_hgnetv2_atto_coco.onnx"
CHECKPOINT = DATA / "checkpoints/deimv2-atto-coco"
IMAGES = DATA / "images/coco_permissive"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model and images: blue ones have two detections above 0.7."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(make_model(make_spec()))
    for name, colour in {
        "img2.png": "blue",
        "img10.png": "black",
        "sub/a.gif": "blue",
        "sub/b.jpg": "red",
    }.items():
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (24, 16), colour).save(path)
    return tmp_path


def run(*arguments, code=0):
    """Standard output, and the error that left the command."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    error = result.exception
    if isinstance(error, DetrtError):
        assert error.exit_code == code, error
    elif error is not None and not isinstance(error, SystemExit):
        raise error
    else:
        assert result.exit_code == code, result.output
    return result, spelled(str(error or ""))


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_lines_for_people(folder):
    result, _ = run("model.onnx", "in", "-t", 0.7)
    assert result.stdout.splitlines() == [
        "in/img2.png: 2 blue",
        "in/img10.png: nothing",
        "in/sub/a.gif: 2 blue",
        "in/sub/b.jpg: 2 red",
    ]
    assert "onnxruntime-cpu" in result.stderr and "6: 4 blue, 2 red" in result.stderr


def test_json_on_stdout_is_alone(folder):
    result, _ = run("model.onnx", "in", "-t", 0.7, "--json", "-", "--batch", 3)
    found = lines(result.stdout)
    assert [row["image"] for row in found] == ["in/img2.png", "in/img10.png", "in/sub/a.gif", "in/sub/b.jpg"]
    assert [d["label"] for d in found[0]["detections"]] == BLUE
    assert found[0]["detections"][1]["box_xyxy"] == [0, 0, 12, 16] and found[0]["width"] == 24


def test_quiet(folder):
    result, _ = run("model.onnx", "in", "-q")
    assert result.stdout == "" == result.stderr


def test_reader_of_stdout_leaves(folder):
    code = "import sys; from detrt.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "detect",
        "model.onnx",
        *["in"] * 5,
        "--json",
        "-",
        "--csv",
        "o.csv",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    assert not (folder / "o.csv").exists()


def test_all_outputs(folder):
    arguments = ("-t", 0.7, "--csv", "o.csv", "--coco", "o.json", "--json", "o.jsonl", "--save-dir", "out")
    run("model.onnx", "in", *arguments)
    found = lines((folder / "o.jsonl").read_text())
    assert (folder / "o.jsonl").read_text() == (folder / "out/detections.jsonl").read_text()
    assert len(list(csv.DictReader((folder / "o.csv").open()))) == sum(len(row["detections"]) for row in found) == 6
    assert {row["image_id"] for row in json.loads((folder / "o.json").read_text())} == {1, 3, 4}
    copies = sorted(p.relative_to(folder / "out").as_posix() for p in (folder / "out").rglob("*.*"))
    assert copies == ["detections.jsonl", "img10.png", "img2.png", "sub/a.gif.png", "sub/b.jpg"]
    assert Image.open(folder / "out/img2.png").size == (24, 16)
    before = len(found)
    run("model.onnx", ".", "-t", 0.7, "--save-dir", "out", "--no-draw")  # does not read its own copies
    assert len(lines((folder / "out/detections.jsonl").read_text())) == before


def test_no_draw(folder):
    run("model.onnx", "in/img2.png", "--save-dir", "out", "--no-draw")
    assert os.listdir(folder / "out") == ["detections.jsonl"]


def test_classes_and_count(folder):
    result, _ = run("model.onnx", "in/img2.png", "--classes", "Red, blue", "--max-detections", 1, "--json", "-")
    assert [d["label"] for d in lines(result.stdout)[0]["detections"]] == ["blue"]
    _, error = run("model.onnx", "in", "--classes", "horse", code=2)
    assert "'horse'" in error


def test_bad_images_are_skipped_and_counted(folder):
    (folder / "in/bad.jpg").write_bytes(b"nope")
    (folder / "in/empty.png").touch()
    result, error = run("model.onnx", "in", "--json", "o.jsonl", code=2)
    assert "2 of 6 inputs could not be read: in/bad.jpg, in/empty.png" in error
    assert "in/bad.jpg" in result.stderr and "0 bytes" in result.stderr
    assert len(lines((folder / "o.jsonl").read_text())) == 4
    _, error = run("model.onnx", "in", "--strict", "--json", "strict.jsonl", code=2)
    assert "in/bad.jpg" in error and not (folder / "strict.jsonl").exists()


def test_coco_with_annotations(folder):
    truth = {"images": [{"id": 7, "file_name": "img2.png"}], "categories": [{"id": 70, "name": "Blue"}]}
    (folder / "truth.json").write_text(json.dumps(truth))
    run("model.onnx", "in/img2.png", "--coco", "o.json", "--coco-images", "truth.json")
    rows = json.loads((folder / "o.json").read_text())
    assert {(row["image_id"], row["category_id"]) for row in rows} == {(7, 70)}
    _, error = run("model.onnx", "in", "--coco", "p.json", "--coco-images", "truth.json", code=2)
    assert "in/img10.png" in error and not (folder / "p.json").exists()


def test_spec_file_and_size(folder):
    (folder / "bare.onnx").write_bytes(make_model(None))
    _, error = run("bare.onnx", "in", code=2)
    assert "--spec FILE" in error
    (folder / "spec.json").write_text(make_spec(dynamic=True).to_json())
    run("bare.onnx", "in", "--spec", "spec.json", "--size", "16x8")
    _, error = run("model.onnx", "in", "--size", "16x8", code=2)
    assert "16x8" in error and "8x12" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["in", "--threshold", "1.5"], "1.5"),
        (["in", "--threshold", "nan"], "nan"),
        (["in", "--batch", "0"], "--batch must be at least 1; got 0"),
        (["in", "--max-detections", "-2"], "-2"),
        (["in", "--size", "big"], "'big'"),
        (["in", "--size", "0x5"], "'0x5'"),
        (["in", "--json", "-", "--csv", "-"], "two outputs have the name '-'"),
        (["in", "--coco-images", "x.json"], "--coco FILE"),
        (["in", "--coco", "c.json", "--coco-images", "x.json"], "x.json"),
        (["missing.jpg"], "missing.jpg"),
        (["in", "--backend", "cuda"], "'cuda'"),
        (["in", "--device", "tpu"], "'tpu'"),
        (["in", "--spec", "no.json"], "no.json"),
        (["in/img2.png", "--save-dir", "in"], "replace the input 'in/img2.png'"),
        (["in", "--json", "model.onnx/x.json"], "model.onnx/x.json"),
        (["in", "--save-dir", "out", "--font", "no.ttf"], "no.ttf"),
    ],
    ids=" ".join,
)
def test_bad_arguments(folder, arguments, word):
    before = sorted(p for p in folder.rglob("*") if p.is_file())
    _, error = run("model.onnx", *arguments, code=2)
    assert word in error
    assert sorted(p for p in folder.rglob("*") if p.is_file()) == before


def test_bad_model(folder):
    _, error = run("gone.onnx", "in", code=2)
    assert "gone.onnx" in error


def test_outside_of(folder):
    inputs = expand_inputs(["in"])
    assert exclude_outputs("in/sub", inputs, ["in"]) == inputs[:2]
    assert exclude_outputs("in/sub", expand_inputs(["in/sub/b.jpg"]), ["in/sub/b.jpg"])
    with pytest.raises(ImageError, match="'in'"):
        exclude_outputs("in", inputs, ["in"])


@pytest.fixture
def clip(folder):
    pytest.importorskip("av", reason="av is not installed")
    path = folder / "clip.mp4"
    with video_writer(path, fps=10, size=(33, 48)) as write:
        for index in range(12):
            image = np.zeros((33, 48, 3), np.uint8)
            image[..., 2] = 255 if index >= 6 else 0
            write(image)
    return path


def test_video_round_trip(clip):
    assert video_facts(clip) == type(video_facts(clip))(10.0, 12)
    frames = list(read_frames(clip))
    assert [f.index for f in frames] == list(range(12)) and frames[0].image.shape == (32, 48, 3)
    np.testing.assert_allclose([f.time_s for f in frames], np.arange(12) / 10, atol=1e-6)
    assert frames[11].image[..., 2].mean() > 240 and frames[0].image.mean() < 10
    assert [f.index for f in read_frames(clip, every=5)] == [0, 5, 10]


def test_detect_in_video(clip, folder):
    run(
        "model.onnx",
        clip,
        "in/img2.png",
        "-t",
        0.7,
        "--every",
        2,
        "--batch",
        4,
        "--save-dir",
        "out",
        "--json",
        "o.jsonl",
    )
    found = lines((folder / "o.jsonl").read_text())
    assert [row.get("frame") for row in found] == [0, 2, 4, 6, 8, 10, None]
    assert [len(row["detections"]) for row in found] == [0, 0, 0, 2, 2, 2, 2]
    assert found[3]["time_s"] == 0.6
    assert video_facts(folder / "out/clip.mp4") == type(video_facts(clip))(5.0, 6)


def test_bad_videos(clip, folder):
    data = clip.read_bytes()
    for name, content in {
        "cut.mp4": data[: len(data) // 2],
        "empty.mp4": b"",
        "text.mp4": b"no video",
    }.items():
        (folder / name).write_bytes(content)
        with pytest.raises(ImageError, match=name):
            list(read_frames(folder / name))
    with pytest.raises(ImageError, match=r"gone.mp4"):
        list(read_frames("gone.mp4"))
    with pytest.raises(ValueError, match="got 0"):
        list(read_frames(clip, every=0))
    _, error = run("model.onnx", "cut.mp4", clip, "--json", "o.jsonl", code=2)
    assert "1 of 2 inputs could not be read: cut.mp4" in error
    assert len(lines((folder / "o.jsonl").read_text())) == 12


def test_video_without_av(folder, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "av":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    (folder / "clip.mp4").write_bytes(b"x")
    with pytest.raises(MissingPackageError, match=r"\.\[video\]"):
        list(read_frames(folder / "clip.mp4"))


def test_video_writer_failures(clip, folder):
    with pytest.raises(ZeroDivisionError), video_writer("half.mp4", fps=5, size=(32, 48)) as write:
        write(np.zeros((32, 48, 3), np.uint8))
        raise ZeroDivisionError
    with (
        pytest.raises(OutputError, match=r"\(32, 48\).*\(4, 4\)"),
        video_writer("a.mp4", fps=5, size=(32, 48)) as w,
    ):
        w(np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(OutputError, match="1, 5"), video_writer("a.mp4", fps=5, size=(1, 5)):
        pass
    assert not list(folder.glob("*half*")) and not list(folder.glob("*a.mp4*"))


def test_interrupted_run_leaves_no_half_video(clip, folder):
    detector = Detector(OnnxSession("model.onnx"))
    inputs = [Input(clip, "video")]
    with pytest.raises(KeyboardInterrupt), AnnotatedCopies("out", inputs) as copies:
        for found in detect_inputs(detector, inputs):
            copies.save(found)
            raise KeyboardInterrupt
    assert not list((folder / "out").glob("*"))


@pytest.mark.skipif(not AUTHORS.is_file(), reason="the authors' ONNX files are not there")
@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason=f"the checkpoint {CHECKPOINT.name} is not there")
@pytest.mark.skipif(not IMAGES.is_dir(), reason=f"the images of {IMAGES.name} are not there")
def test_same_detections_as_the_authors():
    """The whole way, files to boxes, against the ONNX file that the authors of DEIMv2 published."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("transformers", reason="transformers is not installed")
    authors = onnxruntime.InferenceSession(AUTHORS)
    side = authors.get_inputs()[0].shape[2]
    listed = json.loads((IMAGES / "annotations/instances_val2017.json").read_text())["images"]
    paths = [IMAGES / "val2017" / row["file_name"] for row in listed[:6]]
    with Detector.open(CHECKPOINT, threshold=0.3, batch_size=3, trust_remote_code=True) as detector:
        results = detector(paths)
    assert sum(map(len, results)) > 20
    for path, found in zip(paths, results, strict=True):
        image = Image.open(path).convert("RGB")
        small = np.asarray(image.resize((side, side), Image.Resampling.BILINEAR), np.float32) / 255
        size = np.array([image.size])  # width, height
        labels, boxes, scores = authors.run(None, {"images": small.transpose(2, 0, 1)[None], "orig_target_sizes": size})
        keep = np.argsort(-scores[0], kind="stable")[: (scores[0] > 0.3).sum()]
        np.testing.assert_array_equal(found.class_ids, labels[0][keep])
        np.testing.assert_allclose(found.scores, scores[0][keep], atol=5e-3)
        np.testing.assert_allclose(found.boxes_xyxy, np.clip(boxes[0][keep], 0, [*size[0], *size[0]]), atol=0.2)
