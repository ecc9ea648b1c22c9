"""`detrt report`: one table of what was built and measured, and rows for what could not be."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("pycocotools", reason="needs the 'eval' extra")

from typer.testing import CliRunner

from detrt.backends.open import open_session
from detrt.cli import app, run_report
from detrt.data.scenes.scene import write_dataset
from detrt.errors import EngineError, GateError
from detrt.evaluation.coco import evaluate_coco


def detrt(*arguments, code=0):
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


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
    told = detrt(
        "random:yolos/tiny", "--target", "onnx", "--precisions", "fp16,fp32", "--batches", "1", "--repeats", "1", code=code
    )
    assert str(error) in told and "fp32" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "trt"], "--target must be one of tensorrt-rtx, tensorrt, openvino, onnx; got 'trt'"),
        (["--target", "onnx", "--precisions", "fp32,half"], "got 'half'"),
        (["--target", "onnx", "--precisions", "fp32,int8"], "int8 needs images like those of the deployment"),
        (["--target", "onnx", "--batches", "0"], "--batches must be comma-separated integers above 0, such as 1,4,8; got '0'"),
        (["--target", "onnx", "--coco", "."], "annotations/instances_val2017.json and val2017/"),
        (["--target", "onnx", "--coco", ".", "--images", "."], "not both"),
        (["--target", "onnx", "--images", "."], "needs both --ground-truth"),
        (["--target", "onnx", "-o", "."], "a folder has that name"),
    ],
)
def test_bad_choices_are_refused_before_any_work(arguments, said, monkeypatch, capfd):
    from detrt import cli

    monkeypatch.setattr("sys.argv", ["detrt", "report", "embedded:shapes", *arguments])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main())
    assert ended.value.code == 2 and said in capfd.readouterr().err
