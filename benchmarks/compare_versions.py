"""Time and memory of whole commands of two checkouts of detrt, in turn on one machine, and whether they detect the same.

    git worktree add /tmp/before 107a94a
    python benchmarks/compare_versions.py /tmp/before . --json versions.json

Every command runs in a process of its own, before and after in turn, with the packages of this interpreter. Peak memory is that
of the largest single process. CPU time is that of a command and the processes that it waits for, of a server's run divided by its
images; other work on the machine changes it less than the clock. Prints median, least and largest of each, and the ratio of the
medians.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

CLIENTS = 4
SERVE_SECONDS = 15


@dataclass(frozen=True)
class Measured:
    """What one run took: seconds, or images per second; peak memory of its largest process in MiB; CPU seconds, or CPU
    milliseconds an image."""

    value: float
    memory_mib: float
    cpu: float


def environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout / "src"), "HF_HUB_OFFLINE": "1"}


def start(checkout: Path, log: Path, *arguments: str | Path) -> subprocess.Popen:
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "detrt", *map(str, arguments)], env=environment(checkout), stdout=output, stderr=output
        )


def finish(process: subprocess.Popen, log: Path, allowed: tuple[int, ...] = (0,)) -> tuple[float, float]:
    """Peak memory in MiB of a process and its children, the largest of them, and CPU seconds of all, once it has ended."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in allowed:
        raise SystemExit(f"{' '.join(map(str, process.args))} ended with {process.returncode}:\n{log.read_text()}")
    return usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def timed(checkout: Path, log: Path, *arguments: str | Path) -> Measured:
    begin = time.perf_counter()
    memory, cpu_s = finish(start(checkout, log, *arguments), log)
    return Measured(time.perf_counter() - begin, memory, cpu_s)


def served(checkout: Path, log: Path, model: Path, images: list[bytes]) -> Measured:
    """Images per second of `detrt serve` with CLIENTS connections, each of which sends its next image when it has its answer."""
    process = start(checkout, log, "serve", model, "--port", "0")
    while not (found := re.search(r"ready at http://([\d.]+):(\d+)", log.read_text())):
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    counts = [0] * CLIENTS
    end = time.perf_counter() + SERVE_SECONDS

    def client(number: int) -> None:
        connection = HTTPConnection(found[1], int(found[2]))
        while time.perf_counter() < end:
            connection.request(
                "POST", "/v1/detect", images[(number + counts[number]) % len(images)], {"Content-Type": "image/jpeg"}
            )
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise SystemExit(f"the server answered {answer.status}")
            counts[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    begin = time.perf_counter()
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    seconds = time.perf_counter() - begin
    process.send_signal(signal.SIGTERM)
    memory, cpu_s = finish(process, log)
    return Measured(sum(counts) / seconds, memory, cpu_s * 1e3 / sum(counts))


def detections(path: Path) -> list:
    """The detections of each image, as written."""
    return [json.loads(line)["detections"] for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--large", default="random:rt_detr_v2", help="a full-size model for export")
    parser.add_argument(
        "--after-option",
        action="append",
        default=[],
        help="for exports and builds of embedded:shapes by AFTER, such as --no-masks",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    extra = {"before": [], "after": options.after_option}
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    rows: dict[str, dict[str, list[Measured]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        log = work / "log"
        timed(checkouts["after"], log, "demo-data", work / "scenes", "--count", str(options.images))
        files = sorted((work / "scenes").rglob("*.jpg"))
        images = [one.read_bytes() for one in files]
        for name, checkout in checkouts.items():
            timed(checkout, log, "build", "embedded:shapes", *extra[name], "-o", work / name, "--sm", "80")

        def compare(row: str, repeats: int, run) -> None:
            values: dict[str, list[Measured]] = {"before": [], "after": []}
            for turn in range(repeats):
                for name in sorted(checkouts, reverse=turn % 2 == 0):
                    values[name].append(run(name, checkouts[name]))
            rows[row] = values
            for name, runs in values.items():
                times = [run.value for run in runs]
                print(
                    f"{row}, {name}: {statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f}), "
                    f"{statistics.median(run.memory_mib for run in runs):.0f} MiB, "
                    f"CPU {statistics.median(run.cpu for run in runs):.2f} ({min(run.cpu for run in runs):.2f} to "
                    f"{max(run.cpu for run in runs):.2f})"
                )
            of_value, of_memory, of_cpu = (
                statistics.median(getattr(run, key) for run in values["after"])
                / statistics.median(getattr(run, key) for run in values["before"])
                for key in ("value", "memory_mib", "cpu")
            )
            print(f"{row}: after / before {of_value:.3f}, memory {of_memory:.3f}, CPU {of_cpu:.3f}", flush=True)

        compare("detrt --help, s", 3 * options.repeats, lambda name, checkout: timed(checkout, log, "--help"))
        compare(
            f"detect {len(files)} images, s",
            options.repeats,
            lambda name, checkout: timed(checkout, log, "detect", work / name, work / "scenes", "--json", work / f"{name}.jsonl"),
        )
        same = detections(work / "before.jsonl") == detections(work / "after.jsonl")
        print("detections of both:", "equal to the digit" if same else "DIFFERENT")
        compare("serve, images/s", options.repeats, lambda name, checkout: served(checkout, log, work / name, images))
        compare(
            "export embedded:shapes, s",
            options.repeats,
            lambda name, checkout: timed(checkout, log, "export", "embedded:shapes", *extra[name], "-o", work / f"{name}.onnx"),
        )
        compare(
            "build embedded:shapes --sm 80, s",
            options.repeats,
            lambda name, checkout: timed(
                checkout, log, "build", "embedded:shapes", *extra[name], "-o", work / f"{name}-again", "--sm", "80"
            ),
        )
        compare(
            f"export {options.large}, s",
            2,
            lambda name, checkout: timed(
                checkout, log, "export", options.large, "--size", "640", "-o", work / f"{name}-large.onnx"
            ),
        )
    if options.json is not None:
        data = {row: {name: [vars(run) for run in runs] for name, runs in values.items()} for row, values in rows.items()}
        options.json.write_text(json.dumps({"same_detections": same, "rows": data}, indent=1))
    return 0 if same else 3


if __name__ == "__main__":
    sys.exit(main())
