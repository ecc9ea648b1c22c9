"""Whatever clients send, the server stays: it answers its probes, its memory is bounded, and its workers are free again."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import os
import subprocess
import threading
import time
from collections import Counter

import numpy as np
import psutil
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")

from cli_support import COMMAND, write_onnx
from PIL import Image
from random_bodies import RandomBodies, RandomRequest
from serve_support import HealthProbe, Server, in_base64, png, together, wait_until
from text_models import write_text_bundle

MIB = 2**20
IMAGE = png(np.full((8, 12, 3), (255, 0, 0), np.uint8))
CLIENTS, TIMEOUT_S, FREE_S = 3, 5, 30
# What the guide lists, without 500: of 5xx only what says that the server is busy or ends.
STATUSES = {200, 400, 404, 405, 408, 413, 415, 421, 422, 429, 431, 503, 504} - {422}
PART = 2500  # requests between two looks at the workers


@pytest.fixture
def server(tmp_path):
    write_onnx(tmp_path / "toy.onnx")
    write_text_bundle(tmp_path / "prompted")
    with Server(tmp_path / "toy.onnx", f"prompted={tmp_path / 'prompted'}", "--workers", 1, "--timeout", TIMEOUT_S) as running:
        yield running


class Clients:
    """Clients that send requests one after the other, each with a pause behind it.

    Attributes:
        statuses: how often each status was answered. wrong: requests with a status that is not allowed, or without an answer.
        times: (when it was sent, seconds until the answer), of those that were answered 200.
    """

    def __init__(self, server: Server, pause: float = 0.005) -> None:
        self.server, self.pause = server, pause
        self.statuses: Counter[int] = Counter()
        self.wrong: list[tuple[int | str, RandomRequest]] = []
        self.times: list[tuple[float, float]] = []

    def run(self, requests) -> None:
        """Send requests, with `CLIENTS` at a time."""
        lock = threading.Lock()

        def work(_: int) -> None:
            connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
            while True:
                with lock:
                    asked = next(requests, None)
                if asked is None:
                    break
                start = time.monotonic()
                try:
                    connection.request("POST", asked.path, asked.body, asked.headers)
                    answer = connection.getresponse()
                    answer.read()
                    status: int | str = answer.status
                except (OSError, http.client.HTTPException) as error:
                    # The server closes behind a refusal that it sends before the body is there; the answer may be lost then.
                    connection.close()
                    status = (
                        413
                        if isinstance(error, (BrokenPipeError, ConnectionResetError)) and len(asked.body) > MIB
                        else repr(error)
                    )
                with lock:
                    if status not in STATUSES:
                        self.wrong.append((status, asked))
                    self.statuses[status] += 1  # type: ignore[index]
                    if status == 200:
                        self.times.append((start, time.monotonic() - start))
                time.sleep(self.pause)
            connection.close()

        assert together(work, CLIENTS) == [None] * CLIENTS


def mixed(count: int):
    """Requests as they come on a usual day: images, JSON, forms and tensors, one in ten of them wrong."""
    for number, bodies in enumerate(itertools.repeat(RandomBodies(1, MIB), count)):
        rng = bodies.rng
        picture = png(
            rng.randbytes(1)[0] * np.ones((8 + number % 5, 12, 3), np.uint8) if number % 50 else np.zeros((480, 640, 3), np.uint8)
        )
        tensor = {"name": "pixel_values", "shape": [1, 3, 8, 12], "datatype": "UINT8", "data": [number % 256] * 288}
        kinds = (
            ("/v1/detect?model=toy", picture, "image/png"),
            ("/v1/detect?model=prompted&prompt=red.%20blue.", picture, "image/png"),
            ("/v1/detect", json.dumps({"images": [in_base64(picture)] * 3, "model": "toy"}).encode(), "application/json"),
            (
                "/v1/detect?model=toy",
                b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + picture + b"\r\n--b--\r\n",
                "multipart/form-data; boundary=b",
            ),
            ("/v2/models/toy:graph/infer", json.dumps({"inputs": [tensor]}).encode(), "application/json"),
        )
        path, body, kind = kinds[number % len(kinds)]
        yield RandomRequest("mixed", path, body[: len(body) // 2] if number % 10 == 9 else body, {"Content-Type": kind})


@pytest.mark.slow
def test_memory_is_flat_over_twenty_thousand_requests(server):
    clients, marks = Clients(server, pause=0.0), []
    for _ in range(5):
        clients.run(mixed(4000))
        wait_until(lambda: server.metric("detrt_running_images") == 0, FREE_S)
        marks.append(server.memory_mib())
    assert clients.wrong == [] and clients.statuses.total() == 20_000
    assert set(clients.statuses) == {200, 400} and clients.statuses[200] >= 0.9 * 20_000
    assert marks[-1] - marks[0] < 16, marks
    times = [[seconds for _, seconds in sorted(clients.times)][part * 3600 : (part + 1) * 3600] for part in (0, 4)]
    first, last = (sorted(one)[int(0.99 * len(one))] for one in times)
    assert last < 2 * first + 0.05, (first, last)


@pytest.mark.slow
def test_memory_is_flat_over_five_thousand_images(tmp_path):
    """`detect` over a folder; the size of the images changes, and so does what is found in them."""
    write_onnx(tmp_path / "toy.onnx")
    (tmp_path / "in").mkdir()
    for number in range(5000):
        Image.new("RGB", (200 + number % 97, 150), (0, 0, number % 256)).save(tmp_path / "in" / f"{number:04}.jpg")
    command = [*COMMAND, "detect", str(tmp_path / "toy.onnx"), str(tmp_path / "in"), "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
        assert process.stdout is not None
        marks = [
            psutil.Process(process.pid).memory_info().rss / MIB
            for number, _ in enumerate(process.stdout)
            if number in (1000, 4900)
        ]
    assert process.returncode == 0 and len(marks) == 2 and marks[1] - marks[0] < 16, marks


def test_the_front_lives_within_a_limit_of_memory(tmp_path):
    """Beyond what bodies may hold, four times for their copies, it needs no more than 256 MiB, whatever is sent to it at once."""
    held_mib = 64
    with Server(write_onnx(tmp_path / "toy.onnx"), "--workers", 1, "--max-held-mib", held_mib, "--timeout", TIMEOUT_S) as limited:
        front = psutil.Process(limited.process.pid)
        largest = front.memory_info().vms + (4 * held_mib + 256) * MIB
        front.rlimit(psutil.RLIMIT_AS, (largest, largest))
        statuses: set[int] = set()

        def flood(number: int) -> None:
            bodies = (bytes(31 * MIB), b'{"images":["' + b"A" * (31 * MIB), gzip.compress(bytes(31 * MIB), 1))
            kinds = ({"Content-Type": "image/png"}, {"Content-Type": "application/json"}, {"Content-Encoding": "gzip"})
            for _ in range(3):
                answer = httpx.post(
                    f"{limited.address}/v1/detect", content=bodies[number % 3], headers=kinds[number % 3], timeout=90
                )
                statuses.add(answer.status_code)

        with contextlib.closing(HealthProbe(limited)) as probe, probe:
            assert together(flood, 9) == [None] * 9
        assert statuses <= {400, 429, 503, 504} and {400, 429} <= statuses, statuses
        assert limited.process.poll() is None and "MemoryError" not in limited.log and probe.times[-1] < 1
        assert httpx.post(f"{limited.address}/v1/detect", content=IMAGE, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("count", "largest"), [(500, 2 * MIB), pytest.param(50_000, 33 * MIB, marks=pytest.mark.slow)], ids=["some", "50000"]
)
def test_random_bodies(server, count, largest):
    bodies = RandomBodies(20261127, largest)
    clients = Clients(server)
    with contextlib.closing(HealthProbe(server)) as probe, probe:
        for first in range(0, count, PART):
            clients.run(bodies.request() for _ in range(min(PART, count - first)))
            # Every deadline has passed or is near: what nobody waits for any more must end.
            wait_until(lambda: server.metric("detrt_running_images") == 0, FREE_S)
            start = time.monotonic()
            found = httpx.post(f"{server.address}/v1/detect?model=toy", content=IMAGE, timeout=60)
            assert found.status_code == 200 and time.monotonic() - start < FREE_S
    assert clients.wrong == [], [(status, one.kind, one.path, one.headers, one.body[:300]) for status, one in clients.wrong[:3]]
    assert "Traceback" not in server.log, server.log[-3000:]
    assert min(clients.statuses[status] for status in (200, 400, 404)) > count / 100, clients.statuses
    assert probe.at(0.999) < 0.25 and probe.times[-1] < 1, (probe.at(0.999), probe.times[-3:], len(probe.times))
    assert probe.grown_mib < 256
