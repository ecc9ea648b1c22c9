"""`detrt serve` as a process of its own, on a free port."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from cli_support import COMMAND
from PIL import Image

START_S = 120  # a loaded machine takes its time; only a hang takes so long


class Server:
    """A running server; `log` is what it printed so far. while_starting: called with it before it is ready."""

    def __init__(
        self,
        *arguments: object,
        env: dict[str, str] | None = None,
        one_thread: bool = True,
        while_starting: Callable[[Server], None] = lambda server: None,
    ) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(
            [*COMMAND, "serve", *map(str, arguments), "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": "1"} if one_thread else {}), **(env or {})},
        )
        while_starting(self)
        wait_until(lambda: "ready at" in self.log or self.process.poll() is not None, START_S)
        found = re.search(r"ready at (http://\S+)", self.log)
        assert found, f"the server did not start: {self.log}"
        self.address = found[1]
        self.host, port = self.address.removeprefix("http://").split(":")
        self.port = int(port)

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text("utf-8")

    def workers(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "detrt.serve.worker" in _command_of(p)]

    def metric(self, name: str) -> float:
        """Sum of the lines of /metrics that begin with a name."""
        text = urllib.request.urlopen(f"{self.address}/metrics", timeout=30).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    def memory_mib(self) -> float:
        """Resident memory of the server and its workers."""
        return sum(p.memory_info().rss for p in [psutil.Process(self.process.pid), *self.workers()]) / 2**20

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the workers without ending them, so that everything waits."""
        stopped = self.workers()
        for worker in stopped:
            worker.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for worker in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGCONT)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to stop, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def _command_of(process: psutil.Process) -> list[str]:
    """Empty for a process that has ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def wait_until(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def together(work: Callable[[int], object], count: int) -> list[object]:
    """Results of `work(i)` run in one thread each; an exception is a result."""
    results: list[object] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class HealthProbe:
    """Asks for /healthz all the time in a process of its own, so that it measures the server and not its clients.

    `with probe:` measures what is in the block, as often as wanted; afterwards:

    times: seconds until each answer, in order of length, without those in which the front process or the probe waited for a core:
        these are the share of a busy machine, whatever the server does.
    grown_mib: by which the front process grew at most.
    """

    def __init__(self, server: Server, pause: float = 0.01) -> None:
        arguments = (server.host, str(server.port), str(server.process.pid), str(pause))
        self.times: list[float] = []
        self.grown_mib = 0.0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROBE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def _measured(self) -> dict[str, Any]:
        """What was measured since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def __enter__(self) -> HealthProbe:
        self._measured()
        return self

    def __exit__(self, *_: object) -> None:
        found = self._measured()
        assert set(found["statuses"]) == {200}
        self.times, self.grown_mib = sorted(found["times"]), found["grown_mib"]

    def at(self, fraction: float) -> float:
        """A percentile of the times."""
        return self.times[min(len(self.times) - 1, int(fraction * len(self.times)))]

    def close(self) -> None:
        self._process.communicate("", timeout=120)  # the end of its input stops it


# The second number of schedstat: nanoseconds that a thread, here the only one of the probe and the one of the loop of the front process,
# was ready to run and had no core.
_PROBE = """
import contextlib, http.client, json, select, sys, time, psutil
host, port, pid, pause = sys.argv[1:]
front = psutil.Process(int(pid))
client = http.client.HTTPConnection(host, int(port), timeout=60)

def waited():
    with contextlib.suppress(OSError):
        return sum(int(open(f"/proc/{one}/schedstat").read().split()[1]) for one in ("self", pid)) / 1e9
    return 0.0

def measure():
    global most
    start, without = time.perf_counter(), waited()
    client.request("GET", "/healthz")
    answer = client.getresponse()
    answer.read()
    seconds = time.perf_counter() - start
    times.append(max(0.0, seconds - (waited() - without)))
    statuses.add(answer.status)
    most = max(most, front.memory_info().rss)

while True:
    times, statuses = [], set()
    first = most = front.memory_info().rss
    while not times or not select.select([sys.stdin], [], [], float(pause))[0]:
        measure()
    if not sys.stdin.readline():
        break
    print(json.dumps({"times": times, "statuses": sorted(statuses), "grown_mib": (most - first) / 2**20}), flush=True)
"""
