"""A model in a process that was forked after it was opened: refused at once, where a run would wait for threads that are not there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_folders import save_folder

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


# Runs a model, and forks children that end as gunicorn's do, with the session in them, or that open it themselves.
CHILDREN = """
import os, signal, sys
import numpy as np
from detrt.backends.open import open_session
path, backend = sys.argv[1:]
def opened():
    session = open_session(path, backend=backend, threads=4)
    shape = (1, 3, session.spec.input.height, session.spec.input.width)
    return session, {"pixel_values": np.zeros(shape, np.uint8)}
session, feeds = opened()
session.run(feeds)
for what in ("exit", "exit", "exit", "close", "open"):
    pid = os.fork()
    if not pid:
        signal.alarm(40)
        if what == "close":
            session.close()
        if what == "open":
            own, feeds = opened()
            own.run(feeds)
            print(own.info.note, flush=True)
        sys.exit(0)
    print(what, os.waitpid(pid, 0)[1], flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forked_process_ends_and_opens_models_of_its_own(backend, exported, tiny, tmp_path):
    """It waited for threads that are not there: where Python ended with a model of ONNX Runtime, and where it opened one of PyTorch."""
    path = tmp_path / "model"
    if backend == "torch":
        save_folder(tiny("yolos"), path)
    else:
        if backend == "openvino":
            pytest.importorskip("openvino", reason="needs the 'openvino' extra")
        build(exported("yolos").path, path, targets=["onnx" if backend == "onnxruntime" else backend])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILDREN, path, backend], capture_output=True, text=True, timeout=300, check=True
    )
    *_, last = lines = done.stdout.splitlines()
    assert [line for line in lines if line[-1:].isdecimal()] == ["exit 0", "exit 0", "exit 0", "close 0", "open 0"], done.stdout
    assert last == "open 0" and ("one thread, because PyTorch ran" in done.stdout) == (backend == "torch")


@pytest.mark.parametrize("opened", BACKENDS, indirect=True)
def test_a_closed_session_says_so(opened):
    session, feeds = opened
    session.close()
    with pytest.raises(ClosedSessionError, match="is closed"):
        session.run(feeds)
