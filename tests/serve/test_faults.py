"""The server when things go wrong: full queues, slow and rude clients, workers that die, and being stopped."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import psutil
import pytest

httpx = pytest.importorskip("httpx", reason="needs the 'dev' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from cli_support import check_refusal, run_process, write_onnx
from serve_support import Server, png, together, wait_until

# The model of cli_support names the channel that is brightest, so that every answer tells its image.
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
FILES = {name: png(np.full((8, 12, 3), rgb, np.uint8)) for name, rgb in COLOURS.items()}
NAMES = list(FILES)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_onnx(tmp_path_factory.mktemp("served") / "toy.onnx")


@pytest.fixture(scope="module")
def server(model):
    """Small limits, so that they are met: 4 images wait, and a request 20 s."""
    limits = ("--queue", 4, "--max-batch", 1, "--timeout", 20, "--max-body-mib", 2, "--max-held-mib", 3)
    with Server(model, "--workers", 2, *limits) as running:
        yield running


def ask(server: Server, name: str, **params):
    with httpx.Client(timeout=60) as client:
        return client.post(f"{server.address}/v1/detect", content=FILES[name], params=params)


def label_of(answer) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["images"][0]["detections"][0]["label"]


def test_a_full_queue_is_429_and_what_was_taken_is_answered(server):
    with server.frozen():
        results: list = [None] * 20
        threads = [
            threading.Thread(target=lambda i=i: results.__setitem__(i, ask(server, NAMES[i % 3]))) for i in range(len(results))
        ]
        for thread in threads:
            thread.start()
        # Two workers hold two images each, and four wait.
        wait_until(lambda: sum(r is not None for r in results) == 12)
        refused = [r for r in results if r is not None]
        assert {r.status_code for r in refused} == {429}
        assert all(1 <= int(r.headers["Retry-After"]) <= 60 for r in refused)
        assert "4 of at most 4 images wait already" in refused[0].json()["error"]["message"]
        assert server.metric("detrt_queue_images") == 4 and server.metric("detrt_running_images") == 4
    for thread in threads:
        thread.join()
    answered = [(i, r) for i, r in enumerate(results) if r.status_code == 200]
    assert len(answered) == 8
    assert all(label_of(r) == NAMES[i % 3] for i, r in answered)
    assert server.metric("detrt_held_body_bytes") == 0


def test_deadlines(server):
    with server.frozen():
        start = time.monotonic()
        late = ask(server, "red", timeout_ms=300)
        assert late.status_code == 408 and "300 ms" in late.text and 0.2 < time.monotonic() - start < 15
    wait_until(lambda: server.metric("detrt_running_images") == 0)
    assert label_of(ask(server, "green", timeout_ms=19_000)) == "green"
    assert "never retrieved" not in server.log


def test_the_longest_times_of_the_server(model):
    with Server(model, "--workers", 1, "--timeout", 0.5, "--body-timeout", 1) as server:
        with server.frozen():
            late = ask(server, "red")
            assert late.status_code == 504 and "0.5 s" in late.text
        start = time.monotonic()
        head = b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        with socket.create_connection((server.host, server.port), timeout=40) as client:
            client.sendall(head + b"x")
            answer = b"".join(iter(lambda: client.recv(65536), b""))  # until the server closes
        assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 1 s" in answer and time.monotonic() - start > 0.9
        assert b"connection: close" in answer.lower()


def test_clients_that_leave_are_forgotten(server):
    before = server.metric('detrt_refused_total{reason="disconnected"}')
    with server.frozen():
        head = f"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(FILES['red'])}\r\n\r\n".encode()
        clients = [socket.create_connection((server.host, server.port)) for _ in range(8)]
        for client in clients:
            client.sendall(head + FILES["red"])
        wait_until(lambda: server.metric("detrt_queue_images") == 4)
        for client in clients:
            client.close()
        wait_until(lambda: server.metric("detrt_queue_images") == 0)
        wait_until(lambda: server.metric('detrt_refused_total{reason="disconnected"}') == before + 8)
    assert label_of(ask(server, "blue")) == "blue"


def exchange(server: Server, *pieces: bytes, pause: float = 0.0) -> bytes:
    """What the server answers to raw bytes, until it closes the connection."""
    with socket.create_connection((server.host, server.port), timeout=40) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
                time.sleep(pause)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the server has closed already; its answer can still be read
        answer = b""
        try:
            while data := client.recv(65536):
                answer += data
        except ConnectionError:
            pass  # a reset behind the answer
        return answer


def test_heads_have_a_limit(server):
    endless = exchange(server, b"GET /healthz HTTP/1.1\r\n", *[b"X-A: " + b"a" * 8000 + b"\r\n" for _ in range(40)])
    assert endless.startswith(b"HTTP/1.1 431")
    one_header = exchange(server, b"GET /healthz HTTP/1.1\r\nX-A: ", *[b"a" * 30_000 for _ in range(40)], pause=0.002)
    assert one_header.startswith(b"HTTP/1.1 431")
    assert exchange(server, b"\x16\x03\x01 no http at all\r\n\r\n").startswith(b"HTTP/1.1 400")
    address = exchange(server, "POST /v1/detect?prompt=кот HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())  # as curl sends it
    assert address.startswith(b"HTTP/1.1 400") and b"write what is not ASCII in the address as %XX" in address
    assert exchange(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


FRAMES = {
    "trailers": (b"1\r\na\r\n0\r\n", b"X: y\r\n" * 10_000),
    "one trailer": (b"1\r\na\r\n0\r\nX: ", b"y" * 50_000),
    "extension of a chunk": (b"1;", b"x" * 50_000),
    "size of a chunk": (b"", b"0" * 50_000),
}


@pytest.mark.parametrize("name", FRAMES)
def test_what_frames_a_body_has_a_limit(server, name):
    """Each header that was kept took twenty times its size, and one that goes on was copied with each piece."""
    begin, piece = FRAMES[name]
    front = psutil.Process(server.process.pid)
    before = front.memory_info().rss
    head = b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(server, head + begin, *[piece] * 300)
    assert answer.startswith(b"HTTP/1.1 431 ") and front.memory_info().rss - before < 16 * 2**20


def until_closed(server: Server, sent: bytes) -> bytes:
    with socket.create_connection((server.host, server.port), timeout=40) as client:
        threading.Thread(target=client.sendall, args=(sent,)).start()
        return b"".join(iter(lambda: client.recv(65536), b""))


DETECT = b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\n"
LAST = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_trailers_are_no_headers(server):
    body = b"%x\r\n%b\r\n0\r\nContent-Type: text/html\r\nHost: attacker.example\r\n\r\n" % (len(FILES["red"]), FILES["red"])
    answer = until_closed(server, DETECT + b"Transfer-Encoding: chunked\r\n\r\n" + body + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and b'"red"' in answer


def test_many_requests_in_one_piece(server):
    """Pieces end within a head, which is no long one."""
    answer = until_closed(server, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4000 + LAST)
    assert answer.count(b"HTTP/1.1 200 OK") == 4001


def test_requests_wait_outside_until_those_before_them_are_answered(server):
    """Each takes 2 KiB in the front process, so that 25000 of them would be 60 MiB and more."""
    front = psutil.Process(server.process.pid)
    before = most = front.memory_info().rss
    with socket.create_connection((server.host, server.port), timeout=40) as client:
        sender = threading.Thread(target=client.sendall, args=(LAST.replace(b"Connection: close\r\n", b"") * 25_000 + LAST,))
        sender.start()
        answers = 0
        while data := client.recv(1 << 20):
            answers += data.count(b"HTTP/1.1 200 OK")
            most = max(most, front.memory_info().rss)
        sender.join()
    assert answers > 24_000 and most - before < 32 * 2**20, (answers, (most - before) / 2**20)


@pytest.mark.parametrize("framing", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"])
def test_offers_of_other_protocols_are_left_and_bodies_read(server, framing):
    """As curl --http2 and Java make them; the body is none, or a request to somebody else, where the offer ends the request."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    request = DETECT + offer + framing % (len(FILES["red"]), FILES["red"])
    nobody = b"GET /none HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    hidden = DETECT + offer + framing % (len(nobody), nobody)
    answer = until_closed(server, request + nobody + request + hidden + LAST)
    found = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert found == [b"200", b"404", b"200", b"400", b"200"]
    with socket.create_connection((server.host, server.port), timeout=40) as client:
        for at in range(0, len(request), 7):  # the head and the body arrive in many pieces
            client.sendall(request[at : at + 7])
        assert client.recv(65536).startswith(b"HTTP/1.1 200")


def test_many_offers_in_one_piece(server):
    offered = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert until_closed(server, offered * 3000 + LAST).count(b"HTTP/1.1 200 OK") == 3001


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_that_offers_http2(server, tmp_path):
    (tmp_path / "red.png").write_bytes(FILES["red"])
    form = ["-F", f"images=@{tmp_path / 'red.png'}", f"{server.address}/v1/detect"]
    done = subprocess.run(["curl", "-sS", "--http2", *form], capture_output=True, text=True, timeout=60)
    if "HTTP/2" in done.stderr:
        pytest.skip("this curl has no HTTP/2")
    assert done.returncode == 0 and '"red"' in done.stdout, done.stderr


def test_bodies_have_limits(server):
    def post(**request):
        return httpx.post(f"{server.address}/v1/detect", timeout=60, **request)

    assert post(content=bytes(2**21 + 1)).status_code == 413
    assert post(content=(bytes(2**16) for _ in range(40))).status_code == 413  # chunked: the length is not said
    bomb = gzip.compress(bytes(50 * 2**20))
    answer = post(content=bomb, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 413 and "unpacked" in answer.text
    # Three MiB in all: of bodies that arrive slowly, one of 2 MiB fits, and a second one does not.
    with socket.create_connection((server.host, server.port), timeout=20) as first:
        first.sendall(b"POST /v1/detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2097152\r\n\r\n" + bytes(2_000_000))
        wait_until(lambda: server.metric("detrt_held_body_bytes") >= 2_000_000)
        refused = post(content=bytes(2**21))
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "memory_full" and refused.headers["Retry-After"]
    wait_until(lambda: server.metric("detrt_held_body_bytes") == 0)


def hammer(server: Server, stop: threading.Event, results: list) -> None:
    """Requests on one connection until told to stop; (wanted, answer or exception)."""
    with httpx.Client(timeout=60) as client:
        number = threading.get_ident()
        while not stop.is_set():
            number += 1
            name = NAMES[number % 3]
            try:
                answer = client.post(f"{server.address}/v1/detect", content=FILES[name])
            except httpx.HTTPError as error:
                results.append((name, error))
                return
            results.append((name, answer))


def test_killed_workers_lose_nothing(model):
    with Server(model, "--workers", 2) as server:
        stop, results = threading.Event(), []
        threads = [threading.Thread(target=hammer, args=(server, stop, results)) for _ in range(12)]
        for thread in threads:
            thread.start()
        for killed in (1, 2):
            seen = len(results)
            wait_until(lambda seen=seen: len(results) > seen + 50)
            victim = server.workers()[0]
            victim.kill()
            # Two are ready, too, before the server knows of its end.
            wait_until(lambda killed=killed: server.metric("detrt_worker_restarts_total") == killed)
            wait_until(lambda: server.metric("detrt_workers_ready") == 2, 60)
        stop.set()
        for thread in threads:
            thread.join()
        assert len(results) > 100
        assert [r for _, r in results if isinstance(r, Exception)] == []
        assert {r.status_code for _, r in results} == {200}
        assert all(label_of(r) == name for name, r in results)
        assert server.process.poll() is None


def test_what_kills_two_workers_is_refused_and_others_are_answered(model, monkeypatch):
    """Real worker processes, of which each is killed as soon as it is given the poisoned image."""
    from detrt.backends.worker_process import Channel
    from detrt.serve import ServeConfig, named_models
    from detrt.serve import messages as wire
    from detrt.serve.errors import Refused
    from detrt.serve.metrics import Metrics
    from detrt.serve.scheduler import Pool

    send, pools = Channel.send, []

    def sending(self, message):
        if isinstance(message, wire.Batch) and any(task.data == b"poison" for task in message.tasks):
            next(worker for worker in pools[0].workers if worker.channel is self).kill()
        send(self, message)

    monkeypatch.setattr(Channel, "send", sending)

    async def run():
        pool = Pool(ServeConfig(named_models([str(model)]), workers=2), Metrics())
        pools.append(pool)
        pool.start()
        await asyncio.wait_for(pool.all_ready.wait(), 60)
        tasks = [wire.ImageTask(FILES["red"], 0.5), wire.ImageTask(b"poison", 0.5), wire.ImageTask(FILES["blue"], 0.5)]
        items = pool.submit("toy", tasks, ["images"] * 3)
        found = await asyncio.wait_for(asyncio.gather(*(item.future for item in items), return_exceptions=True), 60)
        await pool.close()
        return found

    red, poison, blue = asyncio.run(run())
    assert b'"red"' in red.value and b'"blue"' in blue.value
    assert isinstance(poison, Refused) and poison.status == 503 and poison.code == "worker_died"


def refuses_connections(server: Server) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=5).close()
    except ConnectionError:
        return True
    return False


def test_sigterm_answers_what_was_accepted(model):
    with Server(model, "--workers", 1) as server:
        with server.frozen():
            results: list = [None] * 30
            threads = [
                threading.Thread(target=lambda i=i: results.__setitem__(i, ask(server, NAMES[i % 3])))
                for i in range(len(results))
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.metric("detrt_queue_images") + server.metric("detrt_running_images") == len(results))
            workers = server.workers()
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses_connections(server))
        for thread in threads:
            thread.join()
        assert [label_of(r) for r in results] == [NAMES[i % 3] for i in range(len(results))]
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log
        wait_until(lambda: not any(worker.is_running() for worker in workers))


def test_sigterm_refuses_what_has_no_time_left(model):
    with Server(model, "--workers", 1, "--drain", 1) as server:
        with server.frozen():
            results: list = [None] * 3
            threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, ask(server, "red"))) for i in range(3)]
            for thread in threads:
                thread.start()
            wait_until(lambda: server.metric("detrt_queue_images") + server.metric("detrt_running_images") == 3)
            server.process.send_signal(signal.SIGTERM)
            for thread in threads:
                thread.join()
        assert [(r.status_code, r.json()["error"]["code"]) for r in results] == [(503, "stopping")] * 3
        assert server.process.wait(30) == 0


def test_workers_leave_with_a_server_that_is_killed(model):
    server = Server(model, "--workers", 2)
    workers = server.workers()
    assert len(workers) == 2
    server.process.kill()
    server.process.wait(10)
    wait_until(lambda: not any(worker.is_running() for worker in workers))


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced(model):
    with Server(model, "--workers", 1, "--timeout", 0.5) as server, server.frozen():
        (hung,) = server.workers()
        assert ask(server, "red").status_code == 504
        wait_until(lambda: not hung.is_running() or hung.status() == "zombie", 30)
        wait_until(lambda: server.metric("detrt_workers_ready") == 1, 60)
        assert label_of(ask(server, "green")) == "green"


def test_api_key(model):
    with Server(model, "--workers", 1, env={"DETRT_API_KEY": "swordfish-42"}) as server:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v2", "/v2/models/toy"):
            answer = httpx.get(server.address + path, timeout=60)
            assert answer.status_code == 401 and "API key" in answer.text and answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/healthz", "/readyz", "/", "/page.js", "/v2/health/ready"):
            assert httpx.get(server.address + path, timeout=60).status_code == 200
        for headers in ({"X-API-Key": "swordfish-42"}, {"Authorization": "Bearer swordfish-42"}):
            assert httpx.get(server.address + "/v1/models", headers=headers, timeout=60).status_code == 200
        for headers in ({"X-API-Key": "swordfish"}, {"Authorization": "Bearer é"}, {"Authorization": "Basic swordfish-42"}):
            raw = {name: value.encode("utf-8") for name, value in headers.items()}
            assert httpx.get(server.address + "/v1/models", headers=raw, timeout=60).status_code == 401
        assert "swordfish" not in server.log


@pytest.mark.parametrize(
    ("options", "names", "advice"),
    [
        (["nowhere"], "nowhere", "give a bundle folder"),
        (["toy.onnx", "--port", "70000"], "70000", "0 to 65535"),
        (["toy.onnx", "--max-batch", "0"], "0", "--max-batch must be a number from 1"),
        (["toy.onnx", "a/toy.onnx"], "toy", "give one of them another"),
        (["toy.onnx", "--host", "not an address"], "not an address", "127.0.0.1"),
        (["toy.onnx", "--device", "tpu"], "tpu", "numbers of GPUs"),
        (["toy.onnx", "--max-body-mib", "900"], "900", "--max-held-mib"),
        (["a b=toy.onnx"], "a b", "give another one"),
        (["toy.onnx", "--api-key-file", "none.txt"], "none.txt", "write the key"),
        (["broken.onnx"], "broken.onnx", "copy or export it again"),
    ],
)
def test_bad_starts(model, options, names, advice, tmp_path):
    (tmp_path / "toy.onnx").write_bytes(model.read_bytes())
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    port = [] if "--port" in options else ["--port", "0"]
    check_refusal(run_process("serve", *options, *port, cwd=tmp_path), names=names, advice=advice)


def test_a_port_that_is_taken(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refusal(run_process("serve", model, "--port", port), names=str(port), advice="another --port")


def test_models_with_a_fixed_batch(tmp_path):
    from onnx_models import make_model, make_spec

    path = tmp_path / "fixed.onnx"
    path.write_bytes(make_model(make_spec(), batch=4))
    with Server(path, "--workers", 1) as server:
        answers = together(lambda i: ask(server, NAMES[i % 3]), 9)
        assert [label_of(r) for r in answers] == [NAMES[i % 3] for i in range(9)]
        assert httpx.get(f"{server.address}/v1/models", timeout=60).json()["models"][0]["max_batch"] == 4


def test_cores_are_shared(model):
    from detrt.serve import ServeConfig, named_models

    cores = len(os.sched_getaffinity(0))
    models = named_models([str(model)])
    assert ServeConfig(models, workers=cores).threads_on("cpu") == 1
    assert ServeConfig(models, workers=1).threads_on("cpu") == cores
    assert ServeConfig(models, devices=("cuda:0", "cuda:1")).worker_devices == ("cuda:0", "cuda:1")
    assert ServeConfig(models, backend="tensorrt").worker_devices == ("cuda:0",)
    assert ServeConfig(models, backend="tensorrt", devices=("cuda:1",)).worker_devices == ("cuda:1",)
    assert set(ServeConfig(models).worker_devices) == {"cpu"}
    assert ServeConfig(models, devices=("cuda:0",), workers=2).worker_devices == ("cuda:0", "cuda:0")
