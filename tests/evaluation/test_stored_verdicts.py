"""Verdicts of `verify` on planted faults, as commit 4de2d35 gave them: before all comparisons became one."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from onnx import helper, numpy_helper

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


def planted(model, fault, size):
    if fault != "noise":
        for node in model.graph.node:
            for position, name in enumerate(node.output):
                if name == fault:
                    node.output[position] = "right"
        model.graph.initializer.append(numpy_helper.from_array(np.float32(size), "size"))
        model.graph.node.append(helper.make_node("Mul", ["right", "size"], [fault], "wrong"))
        return model
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.size > 4096:
            values = values + generator.standard_normal(values.shape, np.float32) * np.float32(size * values.std())
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


@pytest.mark.parametrize(
    ("fault", "size", "worst", "fp32", "fp16"),
    [pytest.param(*row, marks=[] if row[:2] in QUICK else pytest.mark.slow) for row in STORED],
)
def test_verdicts_stay(exported, tmp_path, fault, size, worst, fp32, fp16):
    path = exported("embedded:shapes").path
    onnx.save(planted(onnx.load(path), fault, size), tmp_path / "model.onnx")
    with OnnxSession(path) as reference, OnnxSession(tmp_path / "model.onnx") as candidate:
        for precision, passed in (("fp32", fp32), ("fp16", fp16)):
            report = verify(reference, candidate, [draw_scene(1).image], gate=gate_for(precision), slots=False)
            assert report.passed is passed and report.compared == 5, report.verdict
            assert report.worst_tensor == pytest.approx(worst, rel=0.1)
