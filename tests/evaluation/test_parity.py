"""Verification of exported graphs against PyTorch: what is equal passes, planted faults fail as text."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from onnx import helper, numpy_helper

from detrt import ExportConfig, build, graph
from detrt.backends.base import FakeSession
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.bundle import EngineFacts
from detrt.data.matching import Gate
from detrt.data.scenes.scene import draw_scene
from detrt.errors import DetrtError, GateError, SessionError
from detrt.evaluation.parity import require, verify
from detrt.evaluation.tensors import can_force, forced_rows
from detrt.graph.selections import return_selections
from detrt.models.load_options import LoadOptions
from detrt.precision import PrecisionConfig


@pytest.fixture(scope="module")
def images():
    return [draw_scene(seed).image for seed in (1, 2, 3)]


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        # Not the families that select proposals on a drawn image: ties, which rounding decides.
        ("yolos", {"height": 96, "width": 64, "normalize": False}),
        pytest.param("rf_detr", {"msda": "gridsample", "decode": "graph"}, marks=pytest.mark.slow),
        ("detr", {"height": 128, "width": 160}),
        pytest.param("rf_detr", {"normalize": False}, marks=pytest.mark.slow),
        pytest.param("detr", {}, marks=pytest.mark.slow),
        pytest.param("yolos", {"decode": "graph", "opset": 19}, marks=pytest.mark.slow),
    ],
)
def test_an_export_passes(name, choices, exported, tiny, images):
    seen = []
    report = verify(tiny(name), exported(name, **choices).path, images, progress=lambda *n: seen.append(n))
    assert report.failures == [] and report.passed
    require(report)
    assert report.compared >= 15  # the five best of every image at least
    assert len(report.images) == 3
    assert seen
    assert report.tensors and report.worst_tensor <= report.gate.tensor / 10
    assert (report.reference, report.candidate) == ("torch-cpu", "onnxruntime-cpu")
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


def scaled_weight(model):
    """The first convolution's weights, a fifth larger."""
    weight = next(node for node in model.graph.node if node.op_type == "Conv").input[1]
    tensor = next(t for t in model.graph.initializer if t.name == weight)
    array = numpy_helper.to_array(tensor).copy()
    array *= 1.2
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def regathered(name, index):
    """A fault that reorders the last axis of an output."""

    def fault(model):
        node = next(n for n in model.graph.node if name in n.output)
        node.output[list(node.output).index(name)] = "before"
        model.graph.initializer.append(numpy_helper.from_array(np.array(index, np.int64), "order"))
        model.graph.node.append(helper.make_node("Gather", ["before", "order"], [name], name="/fault", axis=-1))

    return fault


FAULTS = {
    "changed weight": (scaled_weight, "tensor differs|score differs|missing"),
    "swapped axes": (regathered("pred_boxes", [1, 0, 3, 2]), "box_px differs|missing"),
    "swapped width and height": (regathered("pred_boxes", [0, 1, 3, 2]), "box_px differs|missing"),
    "rolled classes": (regathered("logits", [6, 0, 1, 2, 3, 4, 5]), "missing"),
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_graph_fails(fault, words, exported, tiny, images, tmp_path):
    model = graph.load(exported("rf_detr").path)
    fault(model)
    graph.save(model, tmp_path / "faulty.onnx")
    report = verify(tiny("rf_detr"), tmp_path / "faulty.onnx", images)
    assert not report.passed
    with pytest.raises(GateError, match=f"onnxruntime-cpu.* does not detect what torch-cpu.*({words})"):
        require(report)


def verdict(*arguments):
    """What `verify` says as text, raised or reported."""
    try:
        return " ".join(verify(*arguments).failures)
    except DetrtError as error:
        return str(error)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.with_input(mean=(0.0, 0.0, 0.0)), ("mean", "score", "missing", "tensor")),
        (lambda s: s.with_input(std=(1.0, 1.0, 1.0)), ("std", "score", "missing", "tensor")),
        (lambda s: s.with_input(rescale=1.0), ("rescale", "score", "missing", "tensor")),
        (lambda s: type(s).from_dict({**s.to_dict(), "labels": {"0": "other"}}), ("class", "label")),
    ],
    ids=("mean", "std", "rescale", "labels"),
)
def test_a_wrong_fact_fails(change, words, exported, tiny, images, tmp_path):
    """The caller normalises by the spec, so a wrong fact in it gives wrong pixels to a right graph."""
    path = exported("rf_detr", normalize=False).path
    spec = change(graph.read_spec(path))
    graph.save(graph.with_spec(graph.load(path), spec), tmp_path / "faulty.onnx")
    said = verdict(tiny("rf_detr"), tmp_path / "faulty.onnx", images)
    assert any(word in said for word in words), said


def test_sessions_that_are_passed_in_stay_open(exported, tiny, images):
    ours = OnnxSession(exported("rf_detr").path)
    reference = TorchSession(tiny("rf_detr"))
    assert verify(reference, ours, images[:1]).passed
    assert verify(ours, ours, images[:1]).passed
    ours.close()
    with pytest.raises(SessionError, match="closed"):
        verify(reference, ours, images[:1])


def test_a_gate_of_zero_names_the_figure(exported, tiny, images):
    report = verify(tiny("rf_detr"), exported("rf_detr").path, images[:1], gate=Gate(tensor=0.0))
    assert not report.passed and "tensor" in " ".join(report.failures)


def test_no_images(exported, tiny):
    with pytest.raises(DetrtError, match="at least one image"):
        verify(tiny("rf_detr"), exported("rf_detr").path, [])


@pytest.mark.slow
def test_fp16_of_trained_weights_passes_without_ground_truth(real_data, tmp_path):
    """Its AP is that of FP32, and some of 242 detections of photographs are beyond 4 px or 0.02 for rounding alone."""
    checkpoint = str(real_data / "checkpoints/deimv2-femto-coco")
    choices = {"export": ExportConfig(height=416, width=416), "precision": PrecisionConfig("fp16")}
    build(checkpoint, tmp_path / "low", trust_remote_code=True, **choices)
    photographs = sorted((real_data / "images/coco_permissive/val2017").glob("*.jpg"))
    report = verify(checkpoint, tmp_path / "low", photographs, load=LoadOptions(trust_remote_code=True))
    assert report.passed and "beyond" in report.verdict and report.worst_box_px > report.gate.box_px
    assert not replace(report, gate=replace(report.gate, mismatched=0.0)).passed


def test_the_selections_that_an_engine_returns_are_forced(exported, images):
    """Tensors of an engine are compared where it was built to return its selections; ONNX Runtime stands in for it."""
    report = exported("rt_detr_v2")
    model = graph.load(report.path)
    return_selections(model)
    with OnnxSession(report.path) as reference, OnnxSession(graph.to_bytes(model), report.spec) as runs:
        for options, compared in (({"return_selections": True}, True), ({}, False)):
            facts = EngineFacts("tensorrt", "8.5.3", (90,), "fp32", {}, "", options=options)
            engine = FakeSession(report.spec, runs.inputs, runs.outputs, runs.run, facts=facts)
            rows = list(forced_rows(reference, engine, images[:1]))
            assert can_force(reference, engine) is compared
            assert {row["output"] for row in rows} == ({"logits", "pred_boxes"} if compared else set())
            assert all(row["error"] < 1e-4 for row in rows)
