"""IO binding through ONNX Runtime's own CPU tensors, and what is said where a CUDA graph cannot be."""

from __future__ import annotations

import types

import numpy as np
import onnxruntime
import pytest

from detrt.detector import Detector
from detrt.export.inputs import example_feeds
from detrt.onnx_binding import Binding, is_fixed
from detrt.onnx_session import OnnxSession
from detrt.session import TensorInfo


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("torch")
    from detrt.export import ExportConfig, export_onnx
    from detrt.sources import load_source

    path = tmp_path_factory.mktemp("binding") / "model.onnx"
    export_onnx(load_source("random:lw_detr/tiny"), path, ExportConfig(height=64, width=64, check=False))
    return path


def test_a_binding_gives_what_run_gives(model):
    with OnnxSession(model) as session:
        bound = Binding(session._session, onnxruntime.OrtValue, "cpu", 0, session.outputs, fixed=False)
        # The second and third run of a shape reuse its memory; another batch has its own.
        for batch, seed in ((1, 1), (1, 2), (2, 3), (1, 4)):
            feeds = example_feeds(session.spec, batch, (64, 64), seed=seed)
            want, got = session.run(feeds), bound.run(feeds)
            assert set(want) == set(got)
            for name in want:
                np.testing.assert_array_equal(want[name], got[name])


def test_fixed_memory_for_outputs(model):
    with OnnxSession(model) as session:
        outputs = tuple(
            TensorInfo(o.name, o.dtype, tuple(1 if axis == "batch" else axis for axis in o.shape)) for o in session.outputs
        )
        assert is_fixed(outputs) and not is_fixed(session.outputs)
        bound = Binding(session._session, onnxruntime.OrtValue, "cpu", 0, outputs, fixed=True)
        for seed in (1, 2):
            feeds = example_feeds(session.spec, 1, (64, 64), seed=seed)
            for name, array in session.run(feeds).items():
                np.testing.assert_array_equal(array, bound.run(feeds)[name])


def test_a_graph_that_cannot_be_captured_is_said(model):
    def refuse(*_args, **_options):
        raise RuntimeError("control flow cannot be captured")

    fake = types.SimpleNamespace(InferenceSession=refuse, OrtValue=onnxruntime.OrtValue)
    with OnnxSession(model) as session:
        providers = [("CUDAExecutionProvider", {"device_id": "0"}), "CPUExecutionProvider"]
        session._bind(fake, str(model), None, providers)
        assert "symbolic" in session.note
        session.inputs = session.outputs = (TensorInfo("x", "float32", (1, 2)),)
        session._bind(fake, str(model), None, providers)
        assert "without a CUDA graph: control flow cannot be captured" in session.note


def test_detection_is_the_same_through_a_binding(model):
    picture = np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8)
    with Detector.open(model, threshold=0.0) as detector:
        plain = detector([picture])[0]
        session = detector.session
        session._binding = Binding(session._session, onnxruntime.OrtValue, "cpu", 0, session.outputs, fixed=False)
        np.testing.assert_array_equal(plain.boxes_xyxy, detector([picture])[0].boxes_xyxy)
