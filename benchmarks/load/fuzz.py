"""Wrong requests to `detrt serve`: none may crash it, be answered 5xx, or make its memory grow.

    python benchmarks/load/fuzz.py MODEL IMAGES --count 10000

One part is made by schemathesis from the OpenAPI document; the others are damaged images, bombs, giant sizes, wrong
types, broken HTTP and slow bodies. Prints a JSON line for each kind, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import random
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
from load import Served  # which puts the folder above on the path
from PIL import Image
from program import at_least, make_parser, run

from detrt.data.images import expand_inputs

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "TGA")
Request = dict[str, object]


def damaged(chance: random.Random, files: list[bytes]) -> bytes:
    """An image file in some format, cut off, with other bytes in it, or with parts of another one."""
    data = bytearray(chance.choice(files))
    kind = chance.randrange(4)
    if kind == 0:
        del data[chance.randrange(len(data)) :]
    elif kind == 1:
        for _ in range(chance.choice((1, 3, 30, 300))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == 2:  # the header, where sizes and offsets are
        for _ in range(chance.choice((1, 2, 8))):
            data[chance.randrange(min(64, len(data)))] = chance.randrange(256)
    else:
        other = chance.choice(files)
        cut = chance.randrange(len(data))
        data[cut:] = other[chance.randrange(len(other)) :]
    return bytes(data)


def png_of(width: int, height: int, rows: bytes) -> bytes:
    """A PNG that says this size, whatever its rows are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def images(chance: random.Random, files: list[bytes]) -> Request:
    return {"content": damaged(chance, files)}


BOMB = zlib.compress(bytes(7000 * 21_001), 9)  # rows of an image of 7000x7000, 49 million pixels: just allowed


def bombs(chance: random.Random, files: list[bytes]) -> Request:
    kind = chance.randrange(20)
    if kind == 0:
        return {"content": png_of(7000, 7000, BOMB)}
    if kind < 10:
        sizes = (1, 2, 65_535, 2**31 - 1, 2**32 - 1, 7000, 100_000)
        return {"content": png_of(chance.choice(sizes), chance.choice(sizes), zlib.compress(bytes(10_000)))}
    if kind < 14:
        body = gzip.compress(bytes(chance.choice((10, 40)) * 2**20), 9)
        return {"content": body, "headers": {"Content-Encoding": chance.choice(("gzip", "deflate"))}}
    if kind < 17:  # text blocks of a PNG that unpack to a lot
        return {"content": png_of(8, 8, zlib.compress(bytes(200))).replace(b"IDAT", b"zTXt", 1)}
    return {"content": b"GIF89a" + chance.randbytes(4) + b"\xf7\0\0" + chance.randbytes(chance.randrange(2000))}


def wrong_json(chance: random.Random, files: list[bytes]) -> Request:
    def value(depth: int = 0) -> object:
        simple: list[object] = [
            None,
            True,
            -1,
            0,
            1e308,
            2**70,
            "",
            "x" * 300,
            "\ud800",
            "https://a/b.jpg",
            "../../etc/passwd",
            0.5,
            [],
            {},
        ]
        if depth < 3 and chance.random() < 0.3:
            return [value(depth + 1) for _ in range(chance.randrange(5))]
        if depth < 3 and chance.random() < 0.2:
            return {chance.choice(("data", "name", "url", "a")): value(depth + 1) for _ in range(3)}
        return chance.choice(simple)

    image = base64.b64encode(chance.choice(files)).decode()
    data: dict[str, object] = {"images": chance.choice([[image], [image[:-5]], [image] * 40, value(), [value()]])}
    for name in ("threshold", "classes", "max_detections", "prompt", "task", "model", "timeout_ms", "other"):
        if chance.random() < 0.15:
            data[name] = value()
    text = json.dumps(data)
    if chance.random() < 0.2:
        text = text[: chance.randrange(len(text))]
    if chance.random() < 0.03:
        text = chance.choice(("[", '{"a":')) * 50_000
    return {"content": text.encode("utf-8", "surrogatepass"), "headers": {"Content-Type": "application/json"}}


def wrong_forms(chance: random.Random, files: list[bytes]) -> Request:
    body = bytearray()
    for _ in range(chance.randrange(1, 40)):
        name = chance.choice(("images", "file", "threshold", "prompt", "x" * 500, '"', "\r\n", "é"))
        file = f'; filename="{chance.choice(("a.jpg", "", "../../x", "é" * 200))}"' if chance.random() < 0.7 else ""
        body += f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode()
        body += chance.choice((damaged(chance, files)[:5000], b"0.5", b"", chance.randbytes(300))) + b"\r\n"
    body += chance.choice((b"--b--\r\n", b"--b", b"", b"--c--"))
    kind = chance.choice(
        ("multipart/form-data; boundary=b", "multipart/form-data; boundary=", "multipart/form-data; charset=x; boundary=b")
    )
    return {"content": bytes(body), "headers": {"Content-Type": kind}}


def queries(chance: random.Random, files: list[bytes]) -> Request:
    names = ("threshold", "classes", "max_detections", "prompt", "task", "model", "timeout_ms", "\0", "a" * 2000)
    values = ("", "nan", "inf", "-1", "1e999", "9" * 400, "0.5", "\0", "é", "person", "0,1,2", "1", "../x", "%00", "true")
    return {"content": files[0], "params": [(chance.choice(names), chance.choice(values)) for _ in range(chance.randrange(1, 6))]}


def tensors(chance: random.Random, files: list[bytes]) -> Request:
    """KServe requests with wrong shapes, types and lengths."""
    shape = [chance.choice((1, 0, 3, -1, 320, 2**40, 7, "3", None, 1.5)) for _ in range(chance.choice((0, 1, 4, 4, 4, 5)))]
    if chance.random() < 0.3:
        shape = [1, 3, chance.choice((1, 7, 32, 320, 5000)), chance.choice((1, 7, 32, 320, 5000))]
    tail = chance.randbytes(chance.choice((0, 10, 3072)))
    entry: dict[str, object] = {
        "name": chance.choice(("pixel_values", "x", 7)),
        "shape": shape,
        "datatype": chance.choice(("UINT8", "FP32", "BYTES", 1)),
    }
    if chance.random() < 0.5:
        entry["parameters"] = {"binary_data_size": chance.choice((len(tail), 0, -1, 2**63, "9"))}
    else:
        entry["data"] = chance.choice(([], [1] * 3072, "x", [[1], [2, 3]], [None], [1e400], {}))
    head = json.dumps({"inputs": chance.choice(([entry], entry, [], [entry, entry]))}).encode()
    length = chance.choice((len(head), len(head) - 1, 0, -5, 10**12, "x"))
    headers = {"Inference-Header-Content-Length": str(length)} if chance.random() < 0.6 else {}
    return {
        "path": chance.choice(("/v2/models/{}/infer", "/v2/models/{}:graph/infer", "/v2/models/{}/versions/9/infer")),
        "content": head + tail,
        "headers": headers,
    }


KINDS: dict[str, tuple[Callable[[random.Random, list[bytes]], Request], float]] = {
    "damaged images": (images, 0.30),
    "bombs and giant sizes": (bombs, 0.08),
    "wrong JSON": (wrong_json, 0.14),
    "wrong forms": (wrong_forms, 0.10),
    "wrong queries": (queries, 0.08),
    "wrong tensors": (tensors, 0.10),
}
SCHEMATHESIS, RAW, SLOW = 0.15, 0.04, 0.01


def send_all(served: Served, model: str, make: Callable, files: list[bytes], count: int, seed: int) -> tuple[Counter, list[str]]:
    statuses: Counter = Counter()
    wrong: list[str] = []
    lock = threading.Lock()

    def some(part: int) -> None:
        chance = random.Random(f"{seed}-{part}")
        with httpx.Client(base_url=f"http://{served.host}:{served.port}", timeout=60) as client:
            for _ in range(count // 8):
                request = make(chance, files)
                path = str(request.pop("path", "/v1/detect")).format(model)
                try:
                    status = str(client.post(path, **request).status_code)
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    status = type(error).__name__
                with lock:
                    statuses[status] += 1
                    if status.startswith("5") or "Error" in status or "Timeout" in status:
                        wrong.append(f"{path} {status}: {str(request)[:300]}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some, range(8)))
    return statuses, wrong


def by_schema(served: Served, model: str, count: int) -> tuple[Counter, list[str]]:
    import schemathesis
    from hypothesis import HealthCheck, given, settings
    from schemathesis.core.result import Ok

    statuses: Counter = Counter()
    wrong: list[str] = []
    found = schemathesis.openapi.from_url(f"http://{served.host}:{served.port}/openapi.json").get_all_operations()
    operations = [one.ok() for one in found if isinstance(one, Ok)]
    weights = [20 if operation.path == "/v1/detect" else 10 if "infer" in operation.path else 1 for operation in operations]
    for operation, weight in zip(operations, weights, strict=True):
        modes = [schemathesis.GenerationMode.POSITIVE]
        if weight > 1:  # nothing can be wrong about an address without parameters
            modes.append(schemathesis.GenerationMode.NEGATIVE)
        for mode in modes:
            share = max(5, count * weight // sum(weights) // len(modes))
            # Any other name of a model is 404, which would be most of what is sent.
            if weight > 1 and "{model}" in operation.path:
                strategy = operation.as_strategy(generation_mode=mode, path_parameters={"model": model})
            else:
                strategy = operation.as_strategy(generation_mode=mode)

            @given(case=strategy)
            @settings(max_examples=share, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def send(case):
                status = case.call(timeout=60).status_code
                statuses[str(status)] += 1
                if status >= 500:
                    wrong.append(f"{status}: {case.as_curl_command()[:300]}")

            try:
                send()
            except Exception as error:
                print(json.dumps({"note": f"{operation.label}, {mode}: {type(error).__name__} {str(error)[:200]}"}), flush=True)
    return statuses, wrong


def raw(served: Served, count: int, seed: int) -> tuple[Counter, list[str]]:
    """Bytes that are not HTTP, or only nearly."""
    chance = random.Random(seed)
    statuses: Counter = Counter()
    heads = (
        b"POST /v1/detect HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        b"POST /v1/detect HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/detect HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"GET http://other/ HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    )
    for _ in range(count):
        with socket.create_connection((served.host, served.port), timeout=5) as client:
            try:
                head = chance.choice(heads)
                client.sendall(head if chance.random() < 0.7 else head[: chance.randrange(len(head))] + chance.randbytes(50))
                client.settimeout(0.05)
                answer = client.recv(200)
                statuses[answer[9:12].decode("ascii", "replace") or "closed"] += 1
            except OSError:
                statuses["no answer yet"] += 1  # an unfinished head; the client leaves first
    return statuses, [f"raw: {status}" for status in statuses if status.startswith("5")]


def slow(served: Served, count: int) -> tuple[Counter, list[str]]:
    """Bodies that come a byte at a time, all at once, until the server has enough of them."""
    clients = [socket.create_connection((served.host, served.port), timeout=60) for _ in range(count)]
    statuses: Counter = Counter()
    for client in clients:
        client.sendall(b"POST /v1/detect HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n" + bytes(100_000))
    end = time.monotonic() + 8
    while time.monotonic() < end:
        for client in clients:
            with contextlib.suppress(OSError):  # refused already; its answer is read below
                client.sendall(b"x")
        time.sleep(0.5)
    for client in clients:
        try:
            statuses[client.recv(200)[9:12].decode()] += 1
        except OSError:
            statuses["closed"] += 1
        client.close()
    return statuses, [f"slow: {status}" for status in statuses if status.startswith("5")]


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("images")
    parser.add_argument("--count", type=at_least(1), default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    files = []
    for source in expand_inputs([given.images])[:9]:
        files.append(source.path.read_bytes())
        with Image.open(source.path) as image:
            small = image.convert("RGB").resize((96, 64))
        for kind in FORMATS:
            buffer = io.BytesIO()
            small.save(buffer, kind)
            files.append(buffer.getvalue())
    served = Served(given.model, "--body-timeout", "5", "--max-body-mib", "32", "--max-held-mib", "128")
    name = httpx.get(f"http://{served.host}:{served.port}/v1/models").json()["models"][0]["name"]
    peak = [served.memory_mib()]
    watching = threading.Event()

    def watch() -> None:
        while not watching.wait(0.2):
            try:
                peak.append(served.memory_mib())
            except psutil.NoSuchProcess:
                continue  # a worker that ended between the list and the look; the pids below tell

    threading.Thread(target=watch, daemon=True).start()
    first = {worker.pid for worker in served.workers()}
    wrong: list[str] = []
    total = 0

    def done(kind: str, statuses: Counter, bad: list[str]) -> None:
        nonlocal total
        total += sum(statuses.values())
        wrong.extend(bad)
        print(
            json.dumps({"kind": kind, "statuses": dict(sorted(statuses.items())), "memory_mib": served.memory_mib()}), flush=True
        )

    done("schemathesis", *by_schema(served, name, int(given.count * SCHEMATHESIS)))
    for kind, (make, share) in KINDS.items():
        done(kind, *send_all(served, name, make, files, int(given.count * share), given.seed))
    done("broken HTTP", *raw(served, int(given.count * RAW), given.seed))
    done("slow bodies", *slow(served, int(given.count * SLOW)))
    time.sleep(2)
    same = {worker.pid for worker in served.workers()} == first
    healthy = httpx.get(f"http://{served.host}:{served.port}/readyz").status_code == 200
    watching.set()
    summary = {
        "requests": total,
        "5xx_or_no_answer": len(wrong),
        "workers_replaced": not same,
        "memory_mib_first": peak[0],
        "memory_mib_peak": max(peak),
        "memory_mib_last": served.memory_mib(),
        "exit_code": served.stop(),
    }
    print(json.dumps(summary), flush=True)
    for line in wrong[:20]:
        print(line, file=sys.stderr)
    return 1 if wrong or not same or not healthy or summary["exit_code"] else 0


if __name__ == "__main__":
    run(main)
