"""`detrt report`: one table of what was built and measured, and rows for what could not be."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

from PIL import Image
from typer.testing import CliRunner

from detrt.backends.open import open_session
from detrt.bundle import Bundle
from detrt.cli import app, run_report
from detrt.cli.report_page import sentences
from detrt.data.scenes.scene import draw_images, write_dataset
from detrt.detector import Detector
from detrt.errors import DetrtError, EngineError, GateError
from detrt.evaluation.coco import evaluate_coco
from detrt.export import ExportConfig
from detrt.system import has_driver

SMALL = ("random:yolos/tiny", "--size", "64")


def detrt(*arguments, code=0):
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    refused = done.exception if isinstance(done.exception, DetrtError) else None
    assert (refused.exit_code if refused else done.exit_code) == code, done.output
    return f"{done.output}{refused or ''}"


def test_a_report_measures_what_the_commands_measure(tmp_path):
    scenes = tmp_path / "scenes"
    write_dataset(scenes, 4, seed=5)
    truth, images = scenes / "annotations.json", scenes / "images"
    files = ("--keep", tmp_path / "kept", "-o", tmp_path / "r.md", "--json", tmp_path / "r.json")
    data = ("--ground-truth", truth, "--images", images)
    told = detrt(
        "embedded:shapes", "--target", "onnx", "--precisions", "fp32", "--batches", "2,1", "--repeats", "2", *data, *files
    )
    first, second = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (first["batch"], second["batch"]) == (2, 1) and second["AP"] is None
    with open_session(tmp_path / "kept" / "embedded-shapes.fp32") as session:
        assert first["AP"] == evaluate_coco(session, truth, images).metrics["AP"] > 0.5
        assert first["bytes"] == session.info.path.stat().st_size
    assert min(first["p50_ms"], second["p50_ms"]) > 0
    page = (tmp_path / "r.md").read_text()
    assert f"| {first['AP']:.4f} | +0.0000 |" in page and f"{first['AP']:.4f}" in told


def test_a_report_goes_on_and_ends_in_a_page(monkeypatch, tmp_path):
    arguments = (*SMALL, "--target", "onnx", "--precisions", "fp32", "--batches", "1", "--repeats", "2")
    kept = ("--keep", tmp_path / "kept", "--json", tmp_path / "r.json")
    detrt(*arguments, *kept)
    measured = json.loads((tmp_path / "r.json").read_text())["rows"]
    ran: list[str] = []
    machine = run_report.machine()
    monkeypatch.setattr(run_report, "machine", lambda: machine | {"disk_free_gib": 0.1})
    rows_of = run_report._rows
    monkeypatch.setattr(run_report, "_rows", lambda *given: ran.append(given[1]) or rows_of(*given))
    detrt(*arguments, *kept, "-o", tmp_path / "r.html")
    assert not ran and json.loads((tmp_path / "r.json").read_text())["rows"] == measured
    page = (tmp_path / "r.html").read_text()
    assert f"batch 1: {measured[0]['p50_ms']:.1f} ms" in page and "1 row built and timed" in page and "http" not in page.lower()
    detrt(*arguments[:-1], "3", *kept)  # another choice is measured
    assert ran == ["fp32"]
    ran.clear()
    file = tmp_path / "kept" / run_report.DONE
    for damaged in ("[", '{"a": 1, "b": [2]}', json.dumps({key: [{"x": 1}] for key in json.loads(file.read_text("utf-8"))})):
        file.write_text(damaged, "utf-8")
        detrt(*arguments, *kept)
    assert ran == ["fp32"] * 3


def test_two_reports_keep_their_rows_in_one_folder(tmp_path):
    first, second = (run_report._Done(tmp_path / run_report.DONE) for _ in range(2))
    rows = {name: [{"model": name, "precision": "fp32", "batch": 1, "check": ""}] for name in "ab"}
    first.add("a", rows["a"])
    second.add("b", rows["b"])
    assert run_report._Done(tmp_path / run_report.DONE).rows == rows
    assert run_report._name("hf:x/a", "fp32") == "hf-x-a.fp32" and run_report._name("..", "fp32") == "model.fp32"
    assert len({run_report._name("x" * count, "fp32") for count in (300, 301)}) == 2


def test_what_a_report_goes_on_with_is_of_the_same_content(monkeypatch, tmp_path):
    """A file that was touched changes nothing; one with other bytes, of the same size and time, is measured again."""
    write_dataset(tmp_path / "scenes", 2, seed=5)
    truth, images = tmp_path / "scenes" / "annotations.json", tmp_path / "scenes" / "images"
    data = ("--ground-truth", truth, "--images", images, "--keep", tmp_path / "kept")
    arguments = ("embedded:shapes", "--target", "onnx", "--precisions", "fp32", "--batches", "1", "--repeats", "1", *data)
    detrt(*arguments)
    ran: list[str] = []
    rows_of = run_report._rows
    monkeypatch.setattr(run_report, "_rows", lambda *given: ran.append(given[1]) or rows_of(*given))
    for path in (truth, *images.iterdir()):
        os.utime(path, (1, 1))
    detrt(*arguments)
    assert not ran
    before, text = truth.stat(), truth.read_text("utf-8")
    place = re.search(r'"bbox": \[\d+', text).end() - 1
    truth.write_text(text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :], "utf-8")
    os.utime(truth, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert truth.stat().st_size == before.st_size
    detrt(*arguments)
    assert ran == ["fp32"]


def test_a_model_is_exported_once(monkeypatch, tmp_path):
    """Other precisions are built of the graph in FP32, and are those that the checkpoint itself gives."""
    from detrt.pipeline import build
    from detrt.precision.config import PrecisionConfig

    exported: list[str] = []
    real = run_report.build
    monkeypatch.setattr(
        run_report, "build", lambda model, *given, **more: exported.append(str(model)) or real(model, *given, **more)
    )
    arguments = (*SMALL, "--target", "onnx", "--precisions", "fp32,fp16", "--batches", "1", "--repeats", "1")
    detrt(*arguments, "--keep", tmp_path / "kept")
    assert exported == ["random:yolos/tiny", str(tmp_path / "kept" / "random-yolos-tiny.fp32")]
    alone = build(
        "random:yolos/tiny",
        tmp_path / "alone",
        targets=("onnx",),
        precision=PrecisionConfig(precision="fp16"),
        export=ExportConfig(height=64, width=64),
    )
    kept = Bundle.open(tmp_path / "kept" / "random-yolos-tiny.fp16")
    assert kept.provenance.checkpoint_sha256 == alone.bundle.provenance.checkpoint_sha256
    image = draw_images(1, (240, 320))[0]
    with Detector(kept.folder, threshold=0.01) as detector, Detector(alone.bundle.folder, threshold=0.01) as other:
        found, wanted = detector(image), other(image)
    assert len(found) > 1 and np.array_equal(found.boxes_xyxy, wanted.boxes_xyxy) and np.array_equal(found.scores, wanted.scores)


def test_sentences_say_what_a_precision_gains_and_costs():
    row = {"model": "m", "batch": 1, "images_per_s": 50.0, "bytes": 100}
    rows = [
        {**row, "precision": "fp32", "p50_ms": 20.0, "AP": 0.3},
        {**row, "precision": "fp16", "p50_ms": 10.0, "bytes": 50, "AP": 0.298, "AP change": -0.002},
        {**row, "precision": "int8", "error": "no room"},
    ]
    said = sentences({"rows": rows, "config": {"precisions": ["fp32", "fp16", "int8"]}})
    assert said[0] == "m in fp32, batch 1: 20.0 ms, 50.0 images/s; AP 0.3000"
    assert "2.00 times the speed of fp32, 50 % of its size; AP 0.2980, -0.0020 against fp32 (small)" in said[1]
    assert said[2] == "m in int8, batch 1: failed: no room"


def test_the_change_of_ap_is_against_the_first_precision_alone(monkeypatch, tmp_path):
    measured = {"fp32": {"error": "no | room\nat all"}, "fp16": {"AP": 0.0, "height": 64, "width": 96}}

    def rows(model, precision, *rest):
        return [{"model": model, "precision": precision, "batch": 1, "check": "", **measured[precision]}]

    monkeypatch.setattr(run_report, "_rows", rows)
    arguments = ("x", "--target", "onnx", "--queries", 100, "-o", tmp_path / "r.md")
    detrt(*arguments, code=2)
    page = (tmp_path / "r.md").read_text()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    heads, _, failed, reduced = cells
    assert dict(zip(heads, failed, strict=True))["check"] == "no / room at all" and ", queries 100" in page
    shown = dict(zip(heads, reduced, strict=True))
    assert (shown["size"], shown["AP"], shown["AP change"]) == ("64x96", "0.0000", "")
    measured["fp32"] = {"AP": 0.25}
    detrt(*arguments)
    assert "| 0.0000 | -0.2500 |" in (tmp_path / "r.md").read_text()


@pytest.mark.slow
def test_a_model_that_takes_a_prompt(tmp_path):
    """The prompt is that of the calibration images and of what is timed; AP has the names of the categories."""
    scenes = tmp_path / "scenes"
    write_dataset(scenes, 3, seed=5)
    truth, images = scenes / "annotations.json", scenes / "images"
    arguments = ("random:owlv2/tiny", "--target", "onnx", "--precisions", "fp32,fp16", "--batches", "2", "--repeats", "1")
    files = ("--calibration", images, "--ground-truth", truth, "--images", images, "--keep", tmp_path / "kept", "--json", "-")
    assert "takes a prompt; say what to look for" in detrt(*arguments, *files[2:], code=2)
    told = json.loads(detrt(*arguments, *files, "--prompt", "circle. striped star."))
    for row in told["rows"]:
        with open_session(tmp_path / "kept" / f"random-owlv2-tiny.{row['precision']}") as session:
            assert row["AP"] == evaluate_coco(session, truth, images).metrics["AP"] and row["p50_ms"] > 0


@pytest.mark.parametrize(
    ("error", "code"), [(GateError("a wrong engine"), 3), pytest.param(EngineError("no memory"), 2, marks=pytest.mark.slow)]
)
def test_a_failure_leaves_a_row_and_the_others_go_on(monkeypatch, tmp_path, error, code):
    real = run_report.build

    def build(model, output, **options):
        if options["precision"].precision == "fp16":
            raise error
        return real(model, output, **options)

    monkeypatch.setattr(run_report, "build", build)
    told = detrt(*SMALL, "--target", "onnx", "--precisions", "fp16,fp32", "--batches", "1", "--repeats", "1", code=code)
    assert f"random:yolos/tiny in fp16, batch 1: {error}" in told.splitlines() and "fp32" in told and " failed" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "trt"], "--target must be one of tensorrt-rtx, tensorrt, openvino, onnx; got 'trt'"),
        (["--target", "onnx", "--precisions", "fp32,half"], "got 'half'"),
        (["--target", "onnx", "--precisions", "fp32,fp32"], "--precisions has one of fp32, fp32 twice"),
        (["--target", "onnx", "--batches", "1,4,1"], "--batches has one of 1, 4, 1 twice"),
        (["--target", "onnx", "--precisions", "fp32,int8"], "int8 needs images like those of the deployment"),
        (["--target", "tensorrt-rtx", "--precisions", "fp32,int8"], "TensorRT-RTX has INT8 for the weights of matmuls only"),
        pytest.param(
            ["--target", "tensorrt-rtx"],
            "--target tensorrt-rtx, which runs what it builds, needs an NVIDIA GPU, and there is no CUDA device",
            marks=pytest.mark.skipif(has_driver(), reason="a driver is here"),
        ),
        (["--target", "onnx", "--batches", "0"], "--batches must be comma-separated integers above 0, such as 1,4,8; got '0'"),
        (["--target", "onnx", "--coco", "."], "annotations/instances_val2017.json and val2017/"),
        (["--target", "onnx", "--coco", ".", "--images", "."], "not both"),
        (["--target", "onnx", "--images", "."], "needs both --ground-truth"),
        (["--target", "onnx", "-o", "."], "a folder has that name"),
        (["--target", "onnx", "--ground-truth", "wrong.json", "--images", "."], "'a.png' has 9x9 pixels, 'wrong.json' says 9x8"),
    ],
)
def test_bad_choices_are_refused_before_any_work(arguments, said, monkeypatch, capfd, tmp_path):
    from detrt import cli

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (9, 9)).save("a.png")
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "width": 9, "height": 8}],
        "categories": [{"id": 1, "name": "circle"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1, 1, 3, 3]}],
    }
    Path("wrong.json").write_text(json.dumps(truth))
    monkeypatch.setattr("sys.argv", ["detrt", "report", "embedded:shapes", *arguments])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main())
    assert ended.value.code == 2 and said in capfd.readouterr().err
