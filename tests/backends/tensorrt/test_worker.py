"""The builder process: crashes, time-outs, Ctrl-C and full disks leave a message and no half-written file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_graphs import EDGE, detector, left_over, rtx

from detrt.backends import child_process
from detrt.backends.tensorrt import EngineConfig, build, build_engine
from detrt.backends.tensorrt import worker as trt_worker
from detrt.backends.tensorrt.bindings import Trt
from detrt.backends.tensorrt.diagnose import activation_bytes, large_activation
from detrt.backends.tensorrt.rewrite import Rewritten
from detrt.errors import EngineError, OutputError
from detrt.spec import SELECTION


def worker(monkeypatch, code: str) -> None:
    monkeypatch.setattr(build, "WORKER_COMMAND", (sys.executable, "-c", code))


@rtx
@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("import os; os.abort()", "SIGABRT"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "lack of memory"),
        ("import sys; print('last words'); sys.exit(7)", "exit code 7"),
    ],
)
def test_a_crash_of_the_builder_is_a_message(tmp_path, monkeypatch, code, part):
    worker(monkeypatch, code)
    with pytest.raises(EngineError, match=part):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(), EDGE)
    assert left_over(tmp_path) == ["m.onnx"]


@rtx
def test_timeout_ends_the_builder(tmp_path, monkeypatch):
    begun = []

    class Seen(child_process.Worker):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            begun.append(self.process.pid)

    monkeypatch.setattr(child_process, "Worker", Seen)
    worker(monkeypatch, "import time; time.sleep(60)")
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"longer than 0\.2 seconds"):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(timeout_seconds=0.2), EDGE)
    assert time.monotonic() - started < 30
    assert len(begun) == 1 and not alive(begun[0])
    assert left_over(tmp_path) == ["m.onnx"]


@rtx
def test_a_short_write_is_noticed(tmp_path, monkeypatch):
    worker(
        monkeypatch,
        "import sys; from pathlib import Path; from detrt.backends.child_process import answer_parent\n"
        "answer_parent(int(sys.argv[1]), lambda r, progress: {'size': Path(r['engine']).write_bytes(b'half') + 396})",
    )
    with pytest.raises(EngineError, match="not written whole"):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(), EDGE)
    assert left_over(tmp_path) == ["m.onnx"]


@rtx
def test_a_full_disk_in_the_builder_is_an_output_error(tmp_path, monkeypatch):
    worker(
        monkeypatch,
        "import sys, errno; from detrt.backends.child_process import answer_parent\n"
        "def full(request, progress):\n    raise OSError(errno.ENOSPC, '')\n"
        "answer_parent(int(sys.argv[1]), full)",
    )
    with pytest.raises(OutputError, match="disk is full"):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(), EDGE)


@rtx
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_ends_the_builder_and_leaves_nothing(tmp_path):
    model, pid_file = detector(tmp_path / "m.onnx"), tmp_path / "pid"
    # The request has come: the caller is back from Popen, and ends the child itself.
    begun = "select.select([int(sys.argv[1])], [], [])"
    child = f"import os, select, sys, time; {begun}; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from detrt.backends.tensorrt import build, EngineConfig; from detrt.spec import ModelSpec\n"
        f"build.WORKER_COMMAND = (sys.executable, '-c', {child!r})\n"
        f"build.build_engine({str(model)!r}, {str(tmp_path / 'o.engine')!r}, EngineConfig(), "
        f"ModelSpec.from_json({EDGE.to_json()!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: pid_file.is_file() and pid_file.read_text())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert not alive(int(pid_file.read_text()))
    assert left_over(tmp_path) == ["m.onnx", "pid"]


@rtx
@pytest.mark.skipif(os.name != "posix", reason="kills the parent")
def test_the_builder_ends_when_its_caller_was_killed(tmp_path):
    child = (
        "import sys, time, os; from detrt.backends.tensorrt import worker; worker.build = lambda request, progress: "
        "(open('model.onnx', 'w').close(), time.sleep(60)); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
        "worker.main(sys.argv[1:])"
    )
    code = (
        "import sys; from detrt.backends.child_process import run_child; "
        f"run_child((sys.executable, '-c', {child!r}), {{}}, what='builder')"
    )
    (tmp_path / "temporary").mkdir()
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})
    wait_for(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text())
    wait_for(lambda: list(tmp_path.glob("temporary/*/model.onnx")))
    parent.kill()
    parent.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid))
    assert not list((tmp_path / "temporary").iterdir())


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_layer_types_are_those_of_the_tensors():
    """TensorRT 10 answers `ILayer.get_output_type` with FLOAT for every layer of a strongly typed network."""
    types = [SimpleNamespace(dtype=SimpleNamespace(name=name)) for name in ("HALF", "HALF", "INT64")]
    layer = SimpleNamespace(
        num_outputs=3, get_output=types.__getitem__, get_output_type=lambda index: SimpleNamespace(name="FLOAT")
    )
    network = SimpleNamespace(num_layers=1, get_layer=lambda index: layer)
    assert trt_worker._layer_types(network) == {"HALF": 2, "INT64": 1}


def test_activation_memory_is_read_from_the_log_and_warned_about():
    assert activation_bytes(["Total Activation Memory: 12 bytes", "Total Activation Memory: 9895936 bytes"]) == 9895936
    assert activation_bytes(["Engine generation completed"]) == 0
    told = large_activation(5 << 30, {"pixel_values": {"min": [1], "opt": [1], "max": [8, 3, 800, 1066]}})
    assert "5.0 GiB" in told and "8x3x800x1066" in told and "`batch`" in told


@rtx
def test_activation_memory_is_in_the_sidecar(tmp_path):
    built = build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(), EDGE)
    assert built.facts.activation_bytes > 0
    assert json.loads(built.sidecar.read_text())["engine"]["activation_bytes"] == built.facts.activation_bytes


@rtx
def test_a_model_without_selections_says_so(tmp_path):
    built = build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(return_selections=True), EDGE)
    assert built.notes == ("`return_selections` has no effect: the model selects no queries by their scores",)


@rtx
def test_an_engine_returns_its_selections(exported, tmp_path):
    report = exported("rt_detr_v2")
    config = EngineConfig(sms=(89,), batch=(1, 1, 1), height=(96, 96, 96), width=(128, 128, 128), return_selections=True)
    built = build_engine(report.path, tmp_path / "m.engine", config, report.spec)
    queries = report.spec.decode.num_queries
    (returned,) = (tensor for tensor in built.facts.outputs if tensor["name"] == f"{SELECTION}0")
    assert returned == {"name": "selection.0", "dtype": "int64", "shape": [-1, queries]}
    assert built.facts.options["return_selections"] is True and not built.notes


class Cache(SimpleNamespace):
    def create_timing_cache(self, data):
        return data

    def set_timing_cache(self, cache, mismatch):
        self.used = cache
        if cache and self.complaint:
            self.trt._note("ERROR", self.complaint)
        return True


@pytest.mark.parametrize("complaint", ["", "1: [myelinCache.h::deserializeFromBuffer::52] Myelin error"])
def test_a_timing_cache_that_cannot_be_read_is_started_anew(tmp_path, complaint):
    """TensorRT 8.5 logs an error for caches with Myelin graphs, also for those that it wrote itself."""
    trt = Trt(trt_worker_module(), "8.5.3", "tensorrt")
    path = tmp_path / "t.cache"
    path.write_bytes(b"tactics")
    builder_config = Cache(trt=trt, complaint=complaint, used=None)
    notes = trt_worker._load_timing_cache(trt, builder_config, EngineConfig(target="tensorrt", timing_cache=path))
    assert builder_config.used == (b"" if complaint else b"tactics")
    assert [complaint in note and str(path) in note for note in notes] == ([True] if complaint else [])


def test_what_a_long_build_says_last_is_kept():
    """Grounding DINO at batch size 8 logged so many remarks that its activation memory and its warnings were not recorded."""
    trt = Trt(trt_worker_module(), "8.5.3", "tensorrt")
    with trt.capture() as messages:
        trt._note("WARNING", "the first warning")
        for number in range(5000):
            trt._note("INFO", f"remark {number}")
            trt._note("WARNING", "a weight was clamped")
        trt._note("INFO", "Total Activation Memory: 4096")
        trt._note("ERROR", "Could not find any implementation")
    assert messages.warnings == ["the first warning", "a weight was clamped"]
    assert messages.errors == ["Could not find any implementation"]
    assert activation_bytes(messages.of("INFO")) == 4096
    assert len(messages.entries) == 2000


def trt_worker_module():
    """Bindings with a logger and nothing else."""

    class ILogger:
        pass

    return SimpleNamespace(ILogger=ILogger)


@pytest.mark.parametrize(("low", "name"), [(False, "fp32"), (True, "fp16+fp32")])
def test_an_engine_whose_inspector_names_no_types_says_what_the_builder_may_choose(low, name):
    assert trt_worker._allowed(Rewritten(Path("m.onnx"), low)) == name
