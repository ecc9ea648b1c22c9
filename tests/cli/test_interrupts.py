"""Ctrl-C and SIGTERM in the middle of real builds: no traceback, nothing left, the old bundle as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import cli, place, snapshot  # noqa: F401 - fixtures
from engine_graphs import rtx
from onnx_models import endless_model, make_spec

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to see child processes")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
LIMIT_S = 90


def children(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue  # the thread has ended
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def workers(pid: int) -> list[int]:
    return [child for child in children(pid) if "detrt.backends.tensorrt.worker" in command_of(child)]


def interrupt(process, ready, number):
    """Send a signal as soon as `ready` says so; (stdout, stderr)."""
    until = time.monotonic() + LIMIT_S
    while not ready():
        assert process.poll() is None, f"ended by itself: {process.communicate()}"
        assert time.monotonic() < until, "the stage to be interrupted did not come"
        time.sleep(0.005)
    os.kill(process.pid, number)
    return process.communicate(timeout=LIMIT_S)


def start_build():
    """A build of an engine whose parent process does not end before it is stopped, however quick its builder is."""
    hook = (
        "import sys, time; from detrt.backends.worker_process import Worker; from detrt.cli import main\n"
        "real = Worker.receive\n"
        "def receive(self): message = real(self); time.sleep(60); return message\n"
        "Worker.receive = receive\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", hook, "build", "model.onnx", "-o", "bundle", "--target", "tensorrt-rtx", "--sm", "89"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def begun(code):
    """A process that runs code, once that has printed "begun"."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def check(process, out, err, number):
    assert process.returncode == CODES[number], err
    assert out == "" and "Traceback" not in err
    assert err.splitlines()[-1].endswith("nothing half-written was left")


def temporaries(place):
    return list((place / "bundle").glob(".bundle.*.tmp"))


@rtx
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_the_engine_build(place, number):
    before = snapshot(place)
    process = start_build()
    seen: list[int] = []

    def ready():
        seen[:] = workers(process.pid)
        return bool(seen)

    check(process, *interrupt(process, ready, number), number)
    assert snapshot(place) == before
    until = time.monotonic() + LIMIT_S
    while command_of(seen[0]) and time.monotonic() < until:
        time.sleep(0.05)
    assert not command_of(seen[0]), "the builder process went on"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_during_the_export(place, number):
    """While the model is traced: the temporary folder is there, its graph is not."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    before = snapshot(place)
    hook = (
        "import sys, detrt.export.onnx as stage; from pathlib import Path; from detrt.cli import main\n"
        "real = stage.trace\n"
        "def trace(*a, **k): Path('in/tracing').touch(); return real(*a, **k)\n"
        "stage.trace = trace\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", hook, "build", "random:yolos/tiny", "-o", "bundle", "--target", "onnx"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    flag = place / "in" / "tracing"
    out, err = interrupt(process, lambda: flag.exists() and temporaries(place), number)
    flag.unlink()
    check(process, out, err, number)
    assert snapshot(place) == before


def test_ctrl_c_during_detect(place):
    """Outputs of a run that was stopped do not appear, and those of an earlier run stay."""
    (place / "old.jsonl").write_text("of an earlier run\n")
    hook = (
        "import sys, time, detrt.detector as stage; from pathlib import Path; from detrt.cli import main\n"
        "def slow(self, images, **more): Path('in/running').touch(); time.sleep(60)\n"
        "stage.Detector.submit = slow\n"
        "sys.exit(main())"
    )
    before = snapshot(place)
    command = [sys.executable, "-c", hook, "detect", "bundle", "in", "--json", "old.jsonl", "--save-dir", "runs"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    flag = place / "in" / "running"
    out, err = interrupt(process, flag.exists, signal.SIGINT)
    flag.unlink()
    check(process, out, err, signal.SIGINT)
    assert snapshot(place) == before


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_model_that_never_ends(place, number, times):
    """A second signal ends it at once, and one alone after a while, which is short here. For a black image it would end."""
    (place / "endless.onnx").write_bytes(endless_model(make_spec()))
    hook = (
        "import sys, detrt.detector as stage; from pathlib import Path; from detrt.cli import main\n"
        "real = stage.Detector.submit\n"
        "def submit(*given, **more): begun = real(*given, **more); Path('in/running').touch(); return begun\n"
        "stage.Detector.submit = submit\n"
        "sys.modules['detrt.cli.stopping']._GRACE_S = float(sys.argv.pop(1))\n"
        "sys.exit(main())"
    )
    grace_s = "60" if times == 2 else "0.5"
    command = [sys.executable, "-c", hook, grace_s, "detect", "endless.onnx", "in/blue.png", "--json", "found.jsonl"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not (place / "in" / "running").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        for _ in range(times):
            process.send_signal(number)
            time.sleep(0.1)
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()  # it would never end
    assert process.returncode == CODES[number] and out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith("detrt: stopped while a model ran that did not end")


def test_kill_leaves_only_a_hidden_temporary_folder(cli, place):
    """SIGKILL cannot be cleaned up after. The old bundle is whole, and the next build is not disturbed."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    before = snapshot(place)
    process = start_build()
    interrupt(process, lambda: workers(process.pid), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    after = snapshot(place)
    left = {name for name in after if name not in before}
    assert {name: after[name] for name in before} == before
    assert left and all(name.startswith("bundle/.bundle.") and ".tmp/" in name for name in left)
    cli("build", "model.onnx", "-o", "bundle", "--target", "onnx")
    assert len(cli("detect", "bundle", "in", "--json", "-", "-q").lines) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_not_lost_where_python_takes_no_exception(number):
    """In `__del__`, which garbage collection calls anywhere: an export went on to its end after Ctrl-C, and said that an exception was ignored."""
    code = (
        "import sys, time\n"
        "from detrt.cli.stopping import INTERRUPTED, TERMINATED, Terminated, stopping\n"
        "class Torn:\n"
        "    def __del__(self):\n"
        "        print('begun', flush=True)\n"
        "        until = time.monotonic() + 60\n"
        "        while time.monotonic() < until: pass\n"
        "torn = Torn()\n"
        "try:\n"
        "    with stopping():\n"
        "        try:\n"
        "            del torn\n"
        "            until = time.monotonic() + 60\n"
        "            while time.monotonic() < until: pass\n"
        "        finally: print('cleaned up')\n"
        "except KeyboardInterrupt: sys.exit(INTERRUPTED)\n"
        "except Terminated: sys.exit(TERMINATED)\n"
    )
    process = begun(code)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (CODES[number], "cleaned up\n", "")


def test_a_cleanup_that_never_ends_is_ended():
    """One signal is enough where what is cleaned up waits for a thread that reads a pipe without a writer."""
    code = (
        "import sys, time, detrt.cli.stopping; s = sys.modules['detrt.cli.stopping']; s._GRACE_S = 2; s._UNWIND_S = 0.5\n"
        "with s.stopping():\n"
        "    try: print('begun', flush=True); time.sleep(60)\n"
        "    finally: time.sleep(60)\n"
    )
    process = begun(code)
    process.terminate()
    _, words = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143 and "stopped while a file was read or closed" in words
