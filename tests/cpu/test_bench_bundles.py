"""`detrt bench` on bundles and their files: every back end that runs here, and honest figures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("onnx")

from detrt.bench_bundles import RunConfig, bench_bundles, is_built, write_plot
from detrt.cli import app
from detrt.errors import DetrtError, SessionError


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    from detrt.export import ExportConfig
    from detrt.pipeline import build

    folder = tmp_path_factory.mktemp("bench") / "bundle"
    build("random:lw_detr/tiny", folder, export=ExportConfig(height=64, width=64, check=False), engines=())
    return folder


def test_figures_of_a_bundle(bundle, tmp_path):
    report = bench_bundles([str(bundle), str(bundle / "model.onnx")], RunConfig(batches=(1, 2), repeats=5, warmup=1))
    assert len(report["rows"]) == 8 and report["machine"]["versions"]
    for row in report["rows"]:
        assert len(row["samples_ms"]) == 5 and 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
        assert row["images_per_s"] == pytest.approx(row["batch"] * 1e3 / row["p50_ms"], rel=0.01)
        assert row["backend"] == "onnxruntime-cpu" and (row["height"], row["width"]) == (64, 64)
    write_plot(report, tmp_path / "plot.svg")
    texts = [e.text for e in ET.parse(tmp_path / "plot.svg").iter() if e.tag.endswith("text")]
    assert any("onnxruntime-cpu" in str(text) for text in texts)


def test_the_command(bundle, tmp_path):
    plot = tmp_path / "plot.svg"
    done = CliRunner().invoke(app, ["bench", str(bundle), "--batches", "1,2", "--repeats", "2", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    assert "forward" in done.output and "end to end" in done.output and plot.is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--batches", "1,x"], "whole numbers"),
        (["--batches", "0"], "from 1 to 256"),
        (["--backends", "tpu"], "got tpu"),
        (["embedded:shapes"], "not both"),
    ],
)
def test_bad_choices(bundle, arguments, says):
    done = CliRunner().invoke(app, ["bench", str(bundle), *arguments])
    assert isinstance(done.exception, (DetrtError, SystemExit))
    assert says in (str(done.exception) + done.output).replace("\n", " ")


def test_what_is_for_bundles_only():
    done = CliRunner().invoke(app, ["bench", "embedded:shapes", "--plot", "x.svg"])
    assert "is for bundles" in str(done.exception) + done.output


def test_a_back_end_that_is_not_there(bundle):
    with pytest.raises(SessionError, match="nothing of"):
        bench_bundles([str(bundle)], RunConfig(backends=("inductor",)))
    assert is_built(str(bundle)) and not is_built("embedded:shapes") and not is_built("no such file.onnx.x")
