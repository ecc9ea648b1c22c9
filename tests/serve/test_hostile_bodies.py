"""Bodies that are made to cost the front process time or memory: it refuses them, and answers others meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import signal
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import psutil
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from cli_support import write_onnx
from serve_support import HealthProbe, Server, in_base64, png, together, wait_until

from detrt.backends.worker_process import Bulk
from detrt.serve import reader
from detrt.serve.config import ServeConfig, ServedModel
from detrt.serve.errors import Refused
from detrt.serve.process import LoopWorker

MIB = 2**20
IMAGE = png(np.zeros((8, 12, 3), np.uint8))
FORM = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
JSON, BINARY = "application/json", "application/octet-stream"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(write_onnx(tmp_path_factory.mktemp("served") / "toy.onnx"), "--workers", 1) as running:
        yield running


@pytest.fixture(scope="module")
def probe(server):
    with contextlib.closing(HealthProbe(server)) as probe:
        yield probe


def infer(data: str, shape: list[int] | None = None, more: str = "") -> bytes:
    tensor = f'{{"name":"pixel_values","shape":{shape or [1, 3, 8, 12]},"datatype":"UINT8"{more},"data":{data}}}'
    return f'{{"inputs":[{tensor}]}}'.encode()


def fill(piece: str | bytes, size: int = 0):
    """A piece again and again, up to `size` bytes, or to the size of this test."""
    return piece * ((size or SIZE) // len(piece))


SIZE = 4 * MIB  # bytes of a body; the slow tests send bodies near the limit of 32 MiB


# name -> (path, content type, body, statuses)
V1, V2 = "/v1/detect", "/v2/models/toy:graph/infer"
BODIES = {
    "numbers for images": (V1, JSON, lambda: b'{"images":[' + fill(b"1,") + b"1]}", {413}),
    "small numbers for images": (V1, JSON, lambda: b'{"images":[' + fill(b"1,", 60_000) + b"1]}", {413}),
    "empty objects": (V1, JSON, lambda: b'{"images":[' + fill(b"{},") + b"{}]}", {413}),
    "unknown keys": (V1, JSON, lambda: json.dumps({f"k{i}": 1 for i in range(8000)}).encode(), {400}),
    "many unknown keys": (V1, JSON, lambda: json.dumps({f"k{i}": 1 for i in range(SIZE // 12)}).encode(), {413}),
    "wrong classes": (V1, JSON, lambda: b'{"images":["AAAA"],"classes":[' + fill(b"[],", 60_000) + b"[]]}", {400}),
    "wrong prompt": (V1, JSON, lambda: b'{"images":["AAAA"],"prompt":[' + fill(b"1,", 60_000) + b"1]}", {400}),
    "nested": (V1, JSON, lambda: fill(b"["), {413}),
    "nested objects": (V1, JSON, lambda: fill(b'{"a":'), {413}),
    "nested, small": (V1, JSON, lambda: fill(b"[", 60_000), {400}),
    "one long text": (V1, JSON, lambda: b'{"images":["' + fill(b"A") + b'"]}', {400}),
    "escapes": (V1, JSON, lambda: b'{"images":["' + fill(rb"\u0041") + b'"]}', {400}),
    "no end": (V1, JSON, lambda: b'{"images":["' + fill(b"A"), {400}),
    "spaces": (V1, JSON, lambda: fill(b" "), {400}),
    "long number": (V1, JSON, lambda: b'{"images":[' + fill(b"9") + b"]}", {400}),
    "no UTF-8": (V1, JSON, lambda: b'{"images":["' + fill(b"\xff") + b'"]}', {400}),
    "parts without end": (V1, FORM, lambda: PART + fill(b"\r\n-"), {400}),
    "almost boundaries": (V1, FORM, lambda: PART + fill(b"\r\n--\r\n--"), {400}),
    "thousands of parts": (V1, FORM, lambda: fill(PART + b"\r\n") + b"--b--\r\n", {400}),
    "thousands of fields": (V1, FORM, lambda: fill(b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n'), {400}),
    "headers of a part": (V1, FORM, lambda: b"--b\r\n" + fill(b"a: b\r\n") + b"\r\n", {400}),
    "long header of a part": (V1, FORM, lambda: b"--b\r\na: " + fill(b"b") + b"\r\n\r\n", {400}),
    "text for numbers": (V2, JSON, lambda: infer(json.dumps(["x" * 400_000] + [""] * 5000)), {400}),
    "long text for numbers": (V2, JSON, lambda: infer('["' + fill("x") + '",1]'), {400}),
    "too many numbers": (V2, JSON, lambda: infer("[" + fill("1,") + "1]"), {400}),
    "too many fractions": (V2, JSON, lambda: infer("[" + fill("0.5,") + "1]"), {400}),
    "too many long numbers": (V2, JSON, lambda: infer("[" + fill("9" * 4000 + ",") + "1]"), {400}),
    "nested rows": (V2, JSON, lambda: infer("[" + fill("[1],") + "[1]]"), {400}),
    "objects for numbers": (V2, JSON, lambda: infer("[" + fill('{"a":1},') + "1]"), {400}),
    "nested tensor": (V2, JSON, lambda: infer(fill("[")), {400}),
    "long shape": (V2, JSON, lambda: infer("[1]", [1] * 5_000_000), {400}),
    "huge declared size": (V2, JSON, lambda: infer("[1]", [1, 3, 2**18, 2**18]), {400}),
    "huge binary size": (V2, JSON, lambda: infer("[]", None, ',"parameters":{"binary_data_size":4398046511104}'), {400}),
    "many inputs": (V2, JSON, lambda: b'{"inputs":[' + fill(b"{},") + b"{}]}", {400}),
    "a large file that is none": (V1, BINARY, lambda: fill(b"\xff\xe0\x00\x02"), {400}),
}


def send(server: Server, path: str, kind: str, body: bytes, **headers: str):
    return httpx.post(server.address + path, content=body, headers={"Content-Type": kind, **headers}, timeout=90)


@pytest.mark.parametrize("size", [4 * MIB, pytest.param(31 * MIB, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BODIES)
def test_costly_bodies_are_refused_at_little_cost(server, probe, name, size, monkeypatch):
    monkeypatch.setitem(globals(), "SIZE", size)
    path, kind, make, statuses = BODIES[name]
    body = make()
    with probe:
        answer = send(server, path, kind, body)
    assert answer.status_code in statuses, answer.text[:300]
    assert len(answer.content) < 2000 and "Traceback" not in server.log
    assert probe.times[-1] < 1 and probe.grown_mib < 256, (probe.times[-1], probe.grown_mib)


def test_compressed_bodies_are_counted_while_they_are_unpacked(tmp_path):
    """Each of 31 MiB from 32 KiB: at most two fit at a time, whatever number of clients sends them."""
    packed = gzip.compress(bytes(31 * MIB), 9)
    with (
        Server(write_onnx(tmp_path / "toy.onnx"), "--workers", 1, "--max-held-mib", 64) as server,
        contextlib.closing(HealthProbe(server)) as probe,
        probe,
    ):
        answers = together(lambda _: send(server, V1, BINARY, packed, **{"Content-Encoding": "gzip"}).status_code, 12)
    assert set(answers) <= {400, 429} and 400 in answers, answers
    assert probe.times[-1] < 1 and probe.grown_mib < 256, (probe.times[-1], probe.grown_mib)


def test_a_reader_that_dies_is_replaced(server):
    """Its body is read once more by another one, and requests go on."""
    large = json.dumps({"images": [in_base64(IMAGE)] + [in_base64(bytes(50_000))]}).encode()
    for _ in range(4):
        answer = send(server, V1, JSON, large)
        assert answer.status_code == 400 and answer.text.count("image 1") == 1, answer.text
        found = readers(server)
        assert found
        for one in found:
            one.kill()


def test_readers_are_started_when_they_are_needed(tmp_path):
    """Each takes 58 MiB, which a server of single images never needs: one with the first large body, a second where it is busy."""
    large = json.dumps({"images": [in_base64(bytes(100_000))]}).encode()
    noise = png(np.random.default_rng(0).integers(0, 256, (200, 200, 3), np.uint8))
    assert len(noise) > reader.SMALL
    with Server(write_onnx(tmp_path / "toy.onnx"), "--workers", 1) as server:
        assert send(server, V1, BINARY, noise).status_code == 200 and not readers(server)
        assert send(server, V1, JSON, large).status_code == 400
        (first,) = readers(server)
        assert send(server, V1, JSON, large).status_code == 400 and readers(server) == [first]
        first.suspend()
        with ThreadPoolExecutor() as threads:
            asked = [threads.submit(send, server, V1, JSON, large) for _ in range(2)]
            try:
                (answered,), (waiting,) = wait(asked, return_when=FIRST_COMPLETED)
                assert answered.result().status_code == 400 and len(readers(server)) == 2
            finally:
                first.resume()
            assert waiting.result().status_code == 400


def readers(server: Server) -> list[psutil.Process]:
    return [p for p in psutil.Process(server.process.pid).children() if "detrt.serve.reader" in p.cmdline()]


def test_a_reader_that_hangs_is_ended_at_the_deadline(tmp_path):
    with Server(write_onnx(tmp_path / "toy.onnx"), "--workers", 1, "--timeout", 1) as server:
        large = json.dumps({"images": [in_base64(bytes(100_000))]}).encode()
        # A new reader needs longer than a second to start at times; it is not killed for that.
        wait_until(lambda: send(server, V1, JSON, large).status_code == 400)
        hung = readers(server)
        for reader in hung:
            reader.suspend()
        answer = send(server, V1, JSON, large)
        assert answer.status_code == 504 and "could not be read within 1 s" in answer.text
        wait_until(lambda: not any(reader.is_running() for reader in hung))
        wait_until(lambda: send(server, V1, JSON, large).status_code == 400)
        wait_until(lambda: send(server, V1, BINARY, IMAGE).status_code == 200)


def test_a_body_that_ends_two_readers_is_refused_and_logged(monkeypatch, caplog):
    """Each is killed as soon as it has the body, as Linux does where memory runs out."""

    class Dying(LoopWorker):
        def send(self, message):
            if isinstance(message, reader.ReadDetect):
                self.process.send_signal(signal.SIGSTOP)  # or it may have answered before it is killed
            super().send(message)
            if isinstance(message, reader.ReadDetect):
                self.kill()

    monkeypatch.setattr(reader, "LoopWorker", Dying)
    large = json.dumps({"images": [in_base64(bytes(100_000))]}).encode()

    async def run() -> Refused:
        every = reader.Readers(ServeConfig(models=(ServedModel("m", "m"),), timeout_s=60))
        try:
            with pytest.raises(Refused) as refused:
                await every.read(reader.ReadDetect(JSON, (), Bulk(large), 4))
            while caplog.text.count("exit code -9") < 2:
                await asyncio.sleep(0.05)
            return refused.value
        finally:
            await every.close()

    refusal = asyncio.run(asyncio.wait_for(run(), 60))
    assert (refusal.status, refusal.code) == (503, "reader_died") and "while they read this body" in str(refusal)
    assert caplog.text.count("is gone (exit code -9) while it read a body") == 2


def test_readers_that_are_stuck_while_they_start_are_given_up(monkeypatch):
    """Two are stopped before they can read, and killed after a limit, which is short here; the body is refused, and read when it comes again."""
    made: list[LoopWorker] = []

    class Stopping(LoopWorker):
        def __init__(self, module: str) -> None:
            super().__init__(module)
            made.append(self)
            if len(made) <= 2:
                self.process.send_signal(signal.SIGSTOP)
            else:
                monkeypatch.setattr(reader, "_START_S", 60.0)

    monkeypatch.setattr(reader, "_START_S", 0.3)
    monkeypatch.setattr(reader, "LoopWorker", Stopping)
    large = json.dumps({"images": [in_base64(bytes(100_000))]}).encode()

    async def run() -> int:
        every = reader.Readers(ServeConfig(models=(ServedModel("m", "m"),), timeout_s=60))
        try:
            with pytest.raises(Refused) as refused:
                await every.read(reader.ReadDetect(JSON, (), Bulk(large), 4))
            assert (refused.value.status, refused.value.code) == (503, "no_reader")
            assert "2 ended before they could" in str(refused.value)
            return len((await every.read(reader.ReadDetect(JSON, (), Bulk(large), 4))).images)
        finally:
            await every.close()

    assert asyncio.run(run()) == 1
    assert [one.process.poll() for one in made[:2]] == [-signal.SIGKILL] * 2 and 3 <= len(made) <= 4
