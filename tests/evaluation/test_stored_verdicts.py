"""Verdicts of `verify` on planted faults, as commit 4de2d35 gave them: before all comparisons became one."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from planted_faults import disturb, multiply

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.matching import gate_for
from detrt.data.scenes.scene import draw_scene
from detrt.evaluation.parity import verify

# Fault, its size (noise in deviations of a weight, a factor of an output) -> worst tensor, and whether FP32 and FP16 pass.
STORED = [
    ("noise", 1e-5, 9.0e-5, True, True),
    ("noise", 1e-3, 8.1e-3, False, True),
    ("noise", 8e-2, 0.25, False, True),
    ("pred_boxes", 1.0005, 5.2e-4, True, True),
    ("pred_boxes", 1.02, 0.02, False, False),
    ("logits", np.nan, np.inf, False, False),
    ("logits", 1.05, 0.05, False, True),
]
QUICK = (("noise", 1e-3), ("pred_boxes", 1.02), ("logits", 1.05))


@pytest.mark.parametrize(
    ("fault", "size", "worst", "fp32", "fp16"),
    [pytest.param(*row, marks=[] if row[:2] in QUICK else pytest.mark.slow) for row in STORED],
)
def test_verdicts_stay(exported, tmp_path, fault, size, worst, fp32, fp16):
    path = exported("embedded:shapes").path
    model = onnx.load(path)
    disturb(model, size) if fault == "noise" else multiply(model, fault, size)
    onnx.save(model, tmp_path / "model.onnx")
    with OnnxSession(path) as reference, OnnxSession(tmp_path / "model.onnx") as candidate:
        for precision, passed in (("fp32", fp32), ("fp16", fp16)):
            report = verify(reference, candidate, [draw_scene(1).image], gate=gate_for(precision), slots=False)
            assert report.passed is passed and report.compared == 5, report.verdict
            assert report.worst_tensor == pytest.approx(worst, rel=0.1)
