"""A model in a process that was forked after it was opened: refused at once, where a run would wait for threads that are not there."""

from __future__ import annotations

import multiprocessing
import os
import sys

import numpy as np
import pytest

from detrt.backends.base import BaseSession
from detrt.backends.open import open_session
from detrt.backends.torch.session import TorchSession
from detrt.errors import ClosedSessionError
from detrt.pipeline import build

BACKENDS = ("torch", "onnxruntime", "openvino")


@pytest.fixture
def opened(request, exported, tiny, tmp_path):
    """(an open session, feeds of it)."""
    report = exported("yolos")
    if request.param == "torch":
        session: BaseSession = TorchSession(tiny("yolos"))
    else:
        if request.param == "openvino":
            pytest.importorskip("openvino", reason="needs the 'openvino' extra")
        build(report.path, tmp_path / "bundle", targets=["onnx" if request.param == "onnxruntime" else request.param])
        session = open_session(tmp_path / "bundle", backend=request.param, threads=4)
    height, width = report.spec.input.size_hw
    with session:
        yield session, {"pixel_values": np.zeros((1, 3, height, width), np.uint8)}


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("opened", BACKENDS, indirect=True)
def test_a_forked_process_is_told(opened):
    session, feeds = opened
    session.run(feeds)

    def child(end):
        try:
            end.send(f"ran: {list(session.run(feeds))}")
        except BaseException as error:
            end.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    try:
        assert ours.poll(60), "the forked process waits for ever"
        answer = ours.recv()
    finally:
        process.kill()
        process.join()
    assert answer.startswith("ClosedSessionError") and "'spawn'" in answer and "was opened before" in answer
    session.run(feeds)  # that of this process goes on


@pytest.mark.parametrize("opened", BACKENDS, indirect=True)
def test_a_closed_session_says_so(opened):
    session, feeds = opened
    session.close()
    with pytest.raises(ClosedSessionError, match="is closed"):
        session.run(feeds)
