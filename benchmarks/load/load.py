"""Load on `detrt serve`: throughput against the in-process loop, many clients, killed workers, and SIGTERM under load.

    python benchmarks/load/load.py MODEL IMAGES                                      # all of it
    python benchmarks/load/load.py MODEL IMAGES --only clients --clients 200 --seconds 60

Every answer is compared with what a Detector found in that very image, so that a crossed answer is seen. The load comes
from the same machine as the server, and shares its cores with it. Prints JSON lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from program import at_least, make_parser, run

from detrt import Detector
from detrt.data.images import expand_inputs
from detrt.jobs.run import detect_inputs

BATCH = 8
THRESHOLD = 0.3


@dataclass
class Sample:
    """An image file and what a Detector finds in it: (label, score), best first."""

    data: bytes
    found: list[tuple[str, float]]
    size: tuple[int, int]


@dataclass
class Tally:
    """What clients saw. lost: a request was sent, and the connection ended without an answer."""

    statuses: Counter = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: int = 0
    refused_connections: int = 0
    codes: Counter = field(default_factory=Counter)


def samples_of(model: str, paths: list[Path]) -> list[Sample]:
    with Detector.open(model, threads=1, threshold=THRESHOLD, batch_size=1) as detector:
        made = []
        for path in paths:
            (found,) = detector([path])
            rows = [(label, float(score)) for label, score in zip(found.labels, found.scores, strict=True)]
            made.append(Sample(path.read_bytes(), rows, found.image_size_hw))
    return made


def matches(sample: Sample, body: bytes) -> bool:
    """Whether an answer is about this image. Scores of a batch differ in the last digits, so boxes near the threshold may miss."""
    (image,) = json.loads(body)["images"]
    if (image["height"], image["width"]) != sample.size:
        return False
    sure = [row for row in sample.found if row[1] > THRESHOLD + 0.01]
    got = [(row["label"], row["score"]) for row in image["detections"] if row["score"] > THRESHOLD + 0.01]
    if abs(len(sure) - len(got)) > 1:
        return False
    return all(abs(a[1] - b[1]) < 0.01 for a, b in zip(sure, got, strict=False))


class Served:
    """`detrt serve MODEL` on a free port."""

    def __init__(self, model: str, *options: str) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [sys.executable, "-c", "import sys; from detrt.cli import main; sys.exit(main())"]
        self.process = subprocess.Popen(
            [*command, "serve", model, "--port", "0", "--max-batch", str(BATCH), *options], stdout=self.log, stderr=self.log
        )
        while not (found := re.search(r"ready at http://([\d.]+):(\d+)", Path(self.log.name).read_text())):
            if self.process.poll() is not None:
                raise SystemExit(Path(self.log.name).read_text())
            time.sleep(0.1)
        self.host, self.port = found[1], int(found[2])

    def workers(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "detrt.serve.worker" in p.cmdline()]

    def memory_mib(self) -> float:
        total = 0
        for process in [psutil.Process(self.process.pid), *self.workers()]:
            total += process.memory_info().rss
        return round(total / 2**20, 1)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes, bool]:
    """Status and body of an answer, and whether the connection stays open."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return int(head[9:12]), await reader.readexactly(int(length[1])), b"connection: close" not in head


async def client(number: int, served: Served, samples: list[Sample], tally: Tally, running: Callable[[], bool]) -> None:
    """One client: a request, its answer, the next request, on one connection as long as it stays open."""
    connection = None
    turn = number
    while running():
        sample = samples[turn % len(samples)]
        turn += 7
        if connection is None:
            try:
                connection = await asyncio.open_connection(served.host, served.port)
            except OSError:
                tally.refused_connections += 1
                return
        reader, writer = connection
        head = (
            f"POST /v1/detect?threshold={THRESHOLD} HTTP/1.1\r\nHost: {served.host}\r\nContent-Type: image/jpeg\r\n"
            f"Content-Length: {len(sample.data)}\r\n\r\n"
        )
        start = time.perf_counter()
        try:
            writer.write(head.encode() + sample.data)
            status, body, stays = await answer_of(reader)
        except (OSError, asyncio.IncompleteReadError):
            tally.lost += 1
            connection = None
            continue
        tally.times.append(time.perf_counter() - start)
        tally.statuses[status] += 1
        if status == 200:
            tally.wrong += not matches(sample, body)
        else:
            tally.codes[json.loads(body)["error"]["code"]] += 1
        if not stays:
            writer.close()
            connection = None
    if connection is not None:
        connection[1].close()


async def load(
    served: Served, samples: list[Sample], clients: int, seconds: float, events: Sequence[tuple[float, Callable[[], None]]] = ()
) -> tuple[Tally, float]:
    """Clients for some seconds; events: (seconds from the start, what happens then)."""
    tally = Tally()
    start = time.perf_counter()
    end = start + seconds
    tasks = [asyncio.create_task(client(i, served, samples, tally, lambda: time.perf_counter() < end)) for i in range(clients)]
    for when, happens in events:
        await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
        happens()
    await asyncio.gather(*tasks)
    return tally, time.perf_counter() - start


def report(name: str, tally: Tally, seconds: float, **more: object) -> None:
    times = sorted(tally.times)

    def at(share: float) -> float:
        return round(1e3 * times[min(len(times) - 1, int(share * len(times)))], 1) if times else 0.0

    row = {
        "test": name,
        "seconds": round(seconds, 1),
        "statuses": dict(tally.statuses),
        "refusals": dict(tally.codes),
        "images_per_s": round(tally.statuses[200] / seconds, 1),
        "p50_ms": at(0.5),
        "p90_ms": at(0.9),
        "p99_ms": at(0.99),
        "longest_ms": at(1.0),
        "wrong": tally.wrong,
        "lost": tally.lost,
        "refused_connections": tally.refused_connections,
        **more,
    }
    print(json.dumps(row), flush=True)


def in_process(model: str, paths: list[Path], seconds: float) -> None:
    """The loop that a program without a server would run: as it comes, decoding ahead, and one loop for each core."""
    threads = len(os.sched_getaffinity(0))
    files = [path.read_bytes() for path in paths]
    inputs = expand_inputs([str(path) for path in paths])
    with Detector.open(model, threads=threads, threshold=THRESHOLD, batch_size=BATCH) as detector:

        def plain() -> int:
            return len(detector(files))

        def ahead() -> int:
            return sum(1 for _ in detect_inputs(detector, inputs))

        def timed(name: str, work: Callable[[], int]) -> None:
            work()
            start, images = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                images += work()
            took = time.perf_counter() - start
            row = {"test": name, "seconds": round(took, 1), "threads": threads, "images_per_s": round(images / took, 1)}
            print(json.dumps(row), flush=True)

        timed("in-process loop", plain)
        timed("in-process loop, decoding ahead", ahead)
    with contextlib.ExitStack() as stack:
        opened = [Detector.open(model, threads=1, threshold=THRESHOLD, batch_size=BATCH) for _ in range(threads)]
        for one in opened:
            stack.enter_context(one)
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        timed("in-process loops, a thread and a model for each core", lambda: sum(pool.map(lambda d: len(d(files)), opened)))


def throughput(model: str, samples: list[Sample], clients: int, seconds: float, options: list[str]) -> None:
    served = Served(model, *options)
    asyncio.run(load(served, samples, clients, 3))
    tally, took = asyncio.run(load(served, samples, clients, seconds))
    report("throughput", tally, took, clients=clients, exit_code=served.stop())


def many_clients(model: str, samples: list[Sample], clients: int, seconds: float, options: list[str]) -> None:
    served = Served(model, *options)
    asyncio.run(load(served, samples, clients, 5))
    memory: list[float] = []
    steps = [seconds * i / 12 for i in range(1, 12)]
    tally, took = asyncio.run(
        load(served, samples, clients, seconds, [(when, lambda: memory.append(served.memory_mib())) for when in steps])
    )
    third = len(memory) // 3
    growth = round(statistics.mean(memory[-third:]) - statistics.mean(memory[:third]), 1)
    report("clients", tally, took, clients=clients, memory_mib=memory, memory_growth_mib=growth, exit_code=served.stop())


def killed(model: str, samples: list[Sample], clients: int, seconds: float, options: list[str]) -> None:
    """kill -9 of a worker, three times."""
    served = Served(model, *options)
    events = [(seconds * share, lambda: served.workers()[0].send_signal(signal.SIGKILL)) for share in (0.2, 0.5, 0.8)]
    tally, took = asyncio.run(load(served, samples, clients, seconds, events))
    report("kill -9 of a worker, three times", tally, took, clients=clients, exit_code=served.stop())


def terminated(model: str, samples: list[Sample], clients: int, seconds: float, options: list[str]) -> None:
    served = Served(model, *options)
    tally, took = asyncio.run(load(served, samples, clients, seconds, [(seconds / 2, served.process.terminate)]))
    report("SIGTERM under load", tally, took, clients=clients, exit_code=served.process.wait(60))


TESTS = {"throughput": throughput, "clients": many_clients, "killed": killed, "terminated": terminated}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("images", help="a folder with photographs")
    parser.add_argument("--only", choices=["in-process", *TESTS], action="append")
    parser.add_argument("--clients", type=at_least(1), default=200)
    parser.add_argument("--seconds", type=at_least(0.1), default=60.0)
    parser.add_argument("--count", type=at_least(1), default=64, help="how many of the images")
    parser.add_argument("--option", action="append", default=[], help="for detrt serve, e.g. --option=--workers=1")
    given = parser.parse_args()
    paths = [source.path for source in expand_inputs([given.images])][: given.count]
    chosen = given.only or ["in-process", *TESTS]
    if "in-process" in chosen:
        in_process(given.model, paths, given.seconds)
    samples = samples_of(given.model, paths)
    for name in chosen:
        if name in TESTS:
            TESTS[name](given.model, samples, given.clients, given.seconds, given.option)


if __name__ == "__main__":
    run(main)
