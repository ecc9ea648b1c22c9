"""Timing of engines against each other, over the fake runtime."""

from __future__ import annotations

import time

import numpy as np
import pytest
from fake_tensorrt import FakeCuda, fake_engine_bytes, fake_trt

from detrt import bundle
from detrt.backends.tensorrt import TensorRTSession, speed
from detrt.bundle import EngineFacts
from detrt.errors import SessionError
from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TensorInfo

SPEC = ModelSpec("detr", InputSpec("stretch", 8, 8), DecodeSpec("softmax", "query", 3, 2, 3), {0: "cat"})
INPUTS = (TensorInfo("pixel_values", "uint8", ("batch", 3, 8, 8)),)
OUTPUTS = (TensorInfo("logits", "float32", ("batch", 3, 3)), TensorInfo("pred_boxes", "float32", ("batch", 3, 4)))
PROFILE = {"pixel_values": {"min": [1, 3, 8, 8], "opt": [2, 3, 8, 8], "max": [4, 3, 8, 8]}}


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Two engine files, slow.engine and quick.engine; the batch sizes that they ran are in the list `batches`."""
    batches = []

    def open_session(path):
        def model(feeds):
            batches.append(len(feeds["pixel_values"]))
            time.sleep(0.004 if path.stem == "slow" else 0.001)
            return {info.name: np.zeros((len(feeds["pixel_values"]), *info.shape[1:]), np.float32) for info in OUTPUTS}

        cuda = FakeCuda(90)
        return TensorRTSession(path, trt=fake_trt("tensorrt", cuda, model), cuda=cuda)

    monkeypatch.setattr(speed, "TensorRTSession", open_session)
    facts = EngineFacts("tensorrt", "10.13.3.9", (90,), "int8", PROFILE, onnx_sha256="")
    paths = [tmp_path / "slow.engine", tmp_path / "quick.engine"]
    for path in paths:
        path.write_bytes(fake_engine_bytes(INPUTS, OUTPUTS, PROFILE))
        bundle.write_sidecar(path, SPEC, facts)
    return paths, batches, open_session


def test_each_engine_gets_its_own_median(engines):
    paths, batches, _ = engines
    slow, quick = speed.median_times(paths)
    assert 4 <= slow < 40 and 1 <= quick < slow
    assert set(batches) == {2} and len(batches) == 2 * (speed.WARM_UP + speed.ROUNDS * speed.RUNS)


def test_a_session_that_has_run_nothing_has_no_time(engines):
    paths, _, open_session = engines
    with open_session(paths[0]) as session, pytest.raises(SessionError, match="call run first"):
        session.forward_times(1)


def test_times_of_layers(engines):
    """The profiler of one context does not reach into later runs, whose results stay the same."""
    paths, batches, open_session = engines
    with open_session(paths[1]) as session:
        feeds = {"pixel_values": np.ones((2, 3, 8, 8), np.uint8)}
        for _ in range(3):  # the third replays a CUDA graph
            before = session.run(feeds)
        assert session.layer_times(4) == {
            f"/model/layer.{n}/{name}": 1.0 + n for n, name in enumerate(("pixel_values", "logits", "pred_boxes"))
        }
        assert len(batches) == 7
        after = session.run(feeds)
        assert all(np.array_equal(before[name], after[name]) for name in before)
