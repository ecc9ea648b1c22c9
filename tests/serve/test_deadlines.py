"""A deadline ends work: a worker is free again soon after nobody waits for what it does, whatever that is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from cli_support import COMMAND, write_onnx
from onnx_models import endless_model, make_spec
from serve_support import Server, in_base64, png, together
from slow_images import SLOW, qoi
from text_models import write_text_bundle

MIB = 2**20
IMAGE = png(np.full((8, 12, 3), (255, 0, 0), np.uint8))
FREE_S = 5  # a worker is free again after so long


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_onnx(tmp_path_factory.mktemp("served") / "toy.onnx")


@pytest.fixture(scope="module")
def server(model):
    with Server(model, "--workers", 1, "--timeout", 30) as running:
        yield running


def post(server: Server, body: bytes, seconds: float = 60, **params):
    return httpx.post(server.address + "/v1/detect", content=body, params=params, timeout=seconds)


def seconds_until_free(server: Server) -> float:
    """How long another request waits for the only worker."""
    start = time.monotonic()
    assert post(server, IMAGE).status_code == 200
    return time.monotonic() - start


# Slow: the worker is killed there, and the start of another one is as long as the machine is busy.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "TIFF of strips")) for name in SLOW])
def test_images_that_take_long_are_left_at_the_deadline(server, name):
    (worker,) = server.workers()
    answer = post(server, SLOW[name](24 * MIB), timeout_ms=300)
    assert answer.status_code in (400, 408), answer.text
    assert seconds_until_free(server) < FREE_S
    # Pillow makes a list of all strips of a TIFF file without asking for a byte: the worker is killed there, if need be.
    assert server.workers() == [worker] or name == "TIFF of strips"


def test_images_that_take_long_are_left_when_their_client_leaves(server):
    (worker,) = server.workers()
    with contextlib.suppress(httpx.TimeoutException):
        post(server, SLOW["PNG of chunks"](24 * MIB), seconds=0.5)
    assert seconds_until_free(server) < FREE_S
    assert server.workers() == [worker]


def test_neighbours_of_an_image_that_takes_long_are_answered(server):
    """It shares a batch with them."""

    def ask(number: int) -> int:
        return post(
            server, IMAGE if number else SLOW["PNG of chunks of pixels"](24 * MIB), timeout_ms=25_000 if number else 1000
        ).status_code

    assert together(ask, 5) == [408, 200, 200, 200, 200]


def test_a_format_that_is_decoded_slowly_is_not_read_unless_it_is_named(model, server):
    body = qoi()
    answer = post(server, body)
    assert answer.status_code == 400 and "formats JPEG, PNG, WEBP" in answer.text
    with Server(model, "--workers", 1, "--image-formats", "png,QOI,.jpg") as other:
        assert "formats PNG, QOI, JPEG" in post(other, b"GIF89a").text
        assert post(other, body, timeout_ms=300).status_code == 408  # it would take a minute
        assert seconds_until_free(other) < FREE_S


@pytest.mark.parametrize(
    ("formats", "words"), [("", "--image-formats is '' (empty)"), ("png,eps", "'EPS'"), ("png;gif", "'PNG;GIF'")]
)
def test_formats_that_do_not_exist(model, formats, words):
    ended = subprocess.run([*COMMAND, "serve", model, "--image-formats", formats], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and words in ended.stderr and "known are" in ended.stderr + "known are" * (not formats)


def test_prompts_are_bounded_in_runs_of_the_model(tmp_path):
    names = [f"thing number {number} of many" for number in range(1000)]
    with Server(write_text_bundle(tmp_path / "prompted"), "--workers", 1, "--max-prompt-runs", 2) as server:

        def ask(count: int):
            body = json.dumps({"images": [in_base64(IMAGE)], "prompt": names[:count]})
            headers = {"Content-Type": "application/json"}
            return httpx.post(server.address + "/v1/detect", content=body, headers=headers, timeout=60)

        refused = ask(1000)
        assert refused.status_code == 400 and "1000 names" in refused.text and "at most 2" in refused.text, refused.text
        assert ask(2).status_code == 200


def worker_of(process: subprocess.Popen) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):  # one that ends meanwhile
        return next((p for p in psutil.Process(process.pid).children() if "detrt.serve.worker" in p.cmdline()), None)
    return None


@pytest.mark.slow
def test_a_model_that_never_ends(tmp_path):
    path = tmp_path / "endless.onnx"
    path.write_bytes(endless_model(make_spec()))
    with Server(path, "--workers", 1) as running:
        (worker,) = running.workers()
        assert post(running, IMAGE, timeout_ms=1500).status_code == 408
        assert post(running, png(np.zeros((8, 12, 3), np.uint8))).status_code == 200
        assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_workers_that_hang_while_they_open_are_given_up(model):
    command = [*COMMAND, "serve", str(model), "--port", "0", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        stopped: set[int] = set()
        end = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < end:
            worker = worker_of(process)
            if worker is not None and worker.pid not in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGSTOP)
                    stopped.add(worker.pid)
            time.sleep(0.02)
        errors = process.stderr.read() if process.poll() is not None else ""
        process.kill()
    assert process.returncode == 2 and "workers end before they are ready" in errors and "Traceback" not in errors
    assert 2 <= len(stopped) <= 6


def test_workers_that_cannot_be_started_are_given_up(model):
    code = (
        "import subprocess, sys\n"
        "class Refusing(subprocess.Popen):\n"
        "    def __init__(self, command, *rest, **more):\n"
        "        if 'detrt.serve.worker' in command:\n"
        "            raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "        super().__init__(command, *rest, **more)\n"
        "subprocess.Popen = Refusing\n"
        "from detrt.cli import main\n"
        f"sys.argv = ['detrt', 'serve', {str(model)!r}, '--port', '0', '--workers', '2']\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert ended.returncode == 2, ended.stderr
    assert "no worker process can be started" in ended.stderr and "Traceback" not in ended.stderr
