"""A badly conditioned model: two runs in FP32 are further apart than allowed, and FP64 decides."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

from detrt.backends.torch.session import TorchSession
from detrt.bundle import Bundle
from detrt.errors import GateError
from detrt.export import ExportConfig, export_onnx
from detrt.export import onnx as exporting
from detrt.models.load import load_source
from detrt.pipeline import build


@pytest.fixture
def apart(monkeypatch):
    """FP32 of PyTorch is 0.01 from the graph, whatever it computes."""
    monkeypatch.setattr(exporting, "forced_differences", lambda *_: [("logits", 0.01, ""), ("pred_boxes", 0.01, "")])


def test_fp64_decides_where_fp32_does_not(apart, tmp_path):
    report = export_onnx(load_source("random:rt_detr/tiny"), tmp_path / "x.onnx", ExportConfig())
    assert {row["output"] for row in report.errors} == {"logits", "pred_boxes"} and 0 < report.worst < 1e-4


def test_a_wrong_graph_is_refused_by_fp64_as_well(apart, tmp_path, monkeypatch):
    exact = TorchSession.in_double
    monkeypatch.setattr(TorchSession, "in_double", lambda *args: {k: v * 1.01 for k, v in exact(*args).items()})
    with pytest.raises(GateError, match=r"allowed 0\.001.*PyTorch in FP32 is .* from FP64 itself; no file was written"):
        export_onnx(load_source("random:rt_detr/tiny"), tmp_path / "x.onnx", ExportConfig())
    assert not list(tmp_path.iterdir())


PROCESSOR = {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 96, "longest_edge": 128}}


@pytest.mark.parametrize(
    "settings", [{"do_rescale": False, "do_normalize": False}, {"do_rescale": False}, {"do_pad": False}], ids=str
)
def test_processors_that_leave_a_step_out_are_built(settings, tmp_path):
    folder = tmp_path / "model"
    load_source("random:detr/tiny").module.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, **settings}))
    build(folder, tmp_path / "out")
    entry = Bundle.open(tmp_path / "out").spec.input
    assert entry.rescale == (1.0 if "do_rescale" in settings else pytest.approx(1 / 255))
