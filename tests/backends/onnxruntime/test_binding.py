"""IO binding through ONNX Runtime's own CPU tensors, and what is said where a CUDA graph cannot be."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from detrt.backends.onnxruntime.binding import BINDINGS, NO_GRAPH, Binding, Graphs
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.detector import Detector
from detrt.models.example_inputs import example_feeds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("torch")
    from detrt.export import ExportConfig, export_onnx
    from detrt.models.load import load_source

    path = tmp_path_factory.mktemp("binding") / "model.onnx"
    export_onnx(load_source("random:lw_detr/tiny"), path, ExportConfig(height=64, width=64, check=False))
    return path


def test_a_binding_gives_what_run_gives(model):
    with OnnxSession(model) as session:
        bound = Binding(session._session, onnxruntime, "cpu", 0, session.inputs, session.outputs)
        # The second and third run of a shape reuse its memory; another batch has its own.
        for batch, seed in ((1, 1), (1, 2), (2, 3), (1, 4)):
            feeds = example_feeds(session.spec, batch, (64, 64), seed=seed)
            want, got = session.run(feeds), bound.run(feeds)
            assert set(want) == set(got)
            for name in want:
                np.testing.assert_array_equal(want[name], got[name])
        bound.wait()


def test_graphs_have_fixed_memory_for_outputs(model):
    """With graphs every shape has outputs that stay; here on a CPU, which ignores the numbers of graphs."""
    with OnnxSession(model) as session:
        graphs = Graphs(True)
        bound = Binding(session._session, onnxruntime, "cpu", 0, session.inputs, session.outputs, graphs)
        for batch, seed in ((1, 1), (1, 2), (2, 3), (1, 4), (2, 5), (1, 6), (2, 7), (3, 8), (2, 9)):
            feeds = example_feeds(session.spec, batch, (64, 64), seed=seed)
            got = bound.run(feeds)
            for name, array in session.run(feeds).items():
                np.testing.assert_array_equal(array, got[name])
        assert graphs.next() == 3, "one graph for each of the two shapes that came three times"


def test_no_more_graphs_than_memory_for_them():
    graphs = Graphs(True)
    numbers = [graphs.next() for _ in range(2 * BINDINGS + 2)]
    assert numbers[-3:] == [2 * BINDINGS, NO_GRAPH, NO_GRAPH]


def test_a_shape_that_comes_again_gets_a_session_of_its_own(model):
    """Where the symbolic graph cannot be captured; here on a CPU, which ignores the numbers of graphs."""
    opened = []

    def open_fixed(lengths):
        opened.append(dict(lengths))
        options = onnxruntime.SessionOptions()
        for axis, length in lengths.items():
            options.add_free_dimension_override_by_name(axis, length)
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    with OnnxSession(model) as session:
        graphs = Graphs(False, open_fixed)
        bound = Binding(session._session, onnxruntime, "cpu", 0, session.inputs, session.outputs, graphs)
        for batch, seed in ((1, 1), (1, 2), (2, 3), (1, 4), (1, 5), (2, 6), (3, 7), (3, 8), (2, 9), (3, 10), (1, 11)):
            feeds = example_feeds(session.spec, batch, (64, 64), seed=seed)
            got = bound.run(feeds)
            for name, array in session.run(feeds).items():
                np.testing.assert_allclose(array, got[name], atol=1e-4)
            if seed == 2:
                assert opened == []
        assert opened == [{"batch": 1}, {"batch": 2}], "the third shape goes on without"
        graphs = Graphs(False, lambda lengths: (_ for _ in ()).throw(RuntimeError("not even fixed")))
        bound = Binding(session._session, onnxruntime, "cpu", 0, session.inputs, session.outputs, graphs)
        for _ in range(4):
            bound.run(feeds)
        assert graphs.why == "not even fixed"


def test_a_graph_that_cannot_be_captured_is_said(model):
    """At opening, and at the first run of a shape: the model runs without, and the note says why."""
    opened = []

    class Fake:
        RunOptions = onnxruntime.RunOptions
        SessionOptions = onnxruntime.SessionOptions

        @staticmethod
        def InferenceSession(source, options, providers):
            opened.append(providers)
            if "enable_cuda_graph" in providers[0][1]:
                raise RuntimeError("control flow cannot be captured")
            return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])

    with OnnxSession(model) as session:
        session._ort, session._graphs = Fake, Graphs(True)
        session._open(str(model), onnxruntime.SessionOptions(), [("CUDAExecutionProvider", {"device_id": "0"})])
        assert len(opened) == 2 and not session._graphs.enabled
        assert session.info.note == "", "a session of one shape may still capture it"
        assert session._graphs.fixed_session(session.inputs, {"pixel_values": (1, 3, 64, 64), "pixel_mask": (1, 64, 64)}) is None
        assert "without a CUDA graph: control flow cannot be captured" in session.info.note
        session.add_note("chosen because")
        assert session.info.note.startswith("chosen because; ONNX Runtime runs")

        class Refusing:
            """Refuses the run that would be captured."""

            def __init__(self, inner):
                self.io_binding, self._inner = inner.io_binding, inner

            def run_with_iobinding(self, binding, options):
                if options.get_run_config_entry("gpu_graph_id") != str(NO_GRAPH):
                    raise RuntimeError("capture failed")
                self._inner.run_with_iobinding(binding, options)

        session._graphs = Graphs(True)
        feeds = example_feeds(session.spec, 1, (64, 64))
        want = session.run(feeds)
        session._binding = Binding(
            Refusing(session._session), onnxruntime, "cpu", 0, session.inputs, session.outputs, session._graphs
        )
        for _ in range(4):
            for name, array in session.run(feeds).items():
                np.testing.assert_array_equal(array, want[name])
        assert "without a CUDA graph: capture failed" in session.info.note


def test_detection_is_the_same_through_a_binding(model):
    image = np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8)
    with Detector.open(model, threshold=0.0) as detector:
        plain = detector([image])[0]
        session = detector.session
        session._binding = Binding(session._session, onnxruntime, "cpu", 0, session.inputs, session.outputs)
        np.testing.assert_array_equal(plain.boxes_xyxy, detector([image])[0].boxes_xyxy)
