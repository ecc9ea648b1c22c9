"""Latency and throughput of `detrt detect` on simulated cameras, beside a plain loop over the same video.

    python benchmarks/measure_streams.py BUNDLE VIDEO [--cameras 4] [--seconds 30] [--repeats 3] [--track]
    python benchmarks/measure_streams.py BUNDLE VIDEO --memory 30 [--fps 2]

VIDEO is played in a loop by one process for all cameras, as H.264 in NUT over TCP (MPEG-TS would add two frames of delay), without encoding it again. The plain loop is
`detect_inputs` over the same file with the same batch size. Latency is from the time at which the sender wrote a frame to its
detections: both processes read the same clock, and frames are told by their time stamps.

With --memory, `detrt detect` runs on the cameras for so many minutes, with tracking, annotated copies and JSON lines, and its resident memory
is printed at some of the minutes (Linux).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from program import at_least, file, make_parser, run, stop

MINUTES = (1, 5, 10, 20, 30)  # at which the memory is read
SETTLE_S = 2.0  # whose latencies do not count


def play(video: str, count: int, fps: float | None, pipe: Connection) -> None:
    """Serve `count` clients with the packets of a video; sends the ports, then the time of each frame by index.

    fps: frames per second; None: those of the video.
    """
    import av

    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    pipe.send([server.getsockname()[1] for server in servers])
    clients = [server.accept()[0] for server in servers]
    with av.open(video) as source:
        outputs = [av.open(client.makefile("wb", buffering=0), "w", format="nut") for client in clients]
        streams = [output.add_stream_from_template(source.streams.video[0]) for output in outputs]
        rate, base = source.streams.video[0].average_rate, source.streams.video[0].time_base
        assert rate is not None and base is not None
        started, number = time.monotonic(), 0
        sent: list[float] = []
        speed = fps or float(rate)
        ticks = round(1 / speed / base)
        with contextlib.suppress(OSError, av.FFmpegError):
            while True:
                source.seek(0)
                for packet in source.demux(source.streams.video[0]):
                    if not packet.size:
                        continue
                    time.sleep(max(0.0, started + number / speed - time.monotonic()))
                    sent.append(time.monotonic())
                    number += 1
                    for output, stream in zip(outputs, streams, strict=True):
                        packet.pts = packet.dts = number * ticks
                        packet.time_base, packet.stream = base, stream
                        output.mux(packet)
    pipe.send(sent)


@contextlib.contextmanager
def playing(video: Path, count: int, fps: float | None = None) -> Iterator[tuple[list[str], Connection]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=play, args=(str(video), count, fps, there), daemon=True)
    process.start()
    try:
        yield [f"tcp://127.0.0.1:{port}" for port in here.recv()], here
    finally:
        process.kill()
        process.join()


def measure(bundle: Path, video: Path, cameras: int, batch: int, seconds: float, track: bool) -> dict:
    from detrt import Detector
    from detrt.data.images import expand_inputs
    from detrt.data.live import live_source
    from detrt.data.streams import LiveStreams
    from detrt.jobs.run import ImageResult, detect_inputs
    from detrt.jobs.streams import detect_streams, short_collections
    from detrt.jobs.track import Tracker, track_objects

    with Detector(str(bundle), batch_size=batch) as detector:
        started, frames = time.monotonic(), 0
        while time.monotonic() - started < seconds / 2:
            for _ in detect_inputs(detector, expand_inputs([video])):
                frames += 1
                if time.monotonic() - started > seconds / 2:
                    break
        plain = frames / (time.monotonic() - started)
        with playing(video, cameras) as (addresses, pipe):
            done: list[tuple[int, float, float]] = []
            sources = [source for address in addresses if (source := live_source(address)) is not None]
            with LiveStreams(sources) as streams, short_collections():
                started = time.monotonic()
                found = detect_streams(detector, streams)
                for result in track_objects(found, Tracker()) if track else found:
                    now = time.monotonic()
                    assert isinstance(result, ImageResult)
                    frame, latency = result.record.frame, result.record.latency_s
                    assert frame is not None and latency is not None
                    done.append((frame, now, latency))
                    if now - started > seconds:
                        break
                spent = time.monotonic() - started
                counts = list(streams.counts.values())
            sent = pipe.recv()
    settled = [(index, now, latency) for index, now, latency in done if now - started > SETTLE_S]
    if not settled:
        stop(f"none of {len(done)} frames came later than {SETTLE_S:g} s; give more --seconds")
    ends = [now - sent[index] for index, now, _ in settled]
    reported = [latency for _, _, latency in settled]
    live = len(done) / spent
    return {
        "plain_fps": round(plain, 1),
        "live_fps": round(live, 1),
        "fraction": round(live / plain, 3),
        "latency_ms": {f"p{q}": round(1000 * float(np.percentile(ends, q))) for q in (50, 90, 99)},
        "reported_ms": {f"p{q}": round(1000 * float(np.percentile(reported, q))) for q in (50, 99)},
        "received": sum(one.received for one in counts),
        "processed": sum(one.processed for one in counts),
        "dropped": sum(one.dropped for one in counts),
        "damaged": sum(one.damaged for one in counts),
    }


def memory(bundle: Path, video: Path, cameras: int, fps: float | None, minutes: float) -> Iterator[dict]:
    """Resident memory of `detrt detect` at some of the minutes, then its own summary."""
    with playing(video, cameras, fps) as (addresses, _), tempfile.TemporaryDirectory() as folder:
        outputs = ("--json", f"{folder}/found.jsonl", "--save-dir", f"{folder}/saved", "--track")
        command = (sys.executable, "-m", "detrt", "detect", str(bundle), *addresses, *outputs, "--duration", str(60 * minutes))
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started = time.monotonic()
        for minute in (one for one in MINUTES if one <= minutes):
            # The last one is read a moment before the run ends.
            time.sleep(max(0.0, started + 60 * minute - (5 if minute == minutes else 0) - time.monotonic()))
            status = Path(f"/proc/{process.pid}/status").read_text()
            kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
            yield {"minute": minute, "resident_mib": round(kib / 1024, 1)}
        _, summary = process.communicate()
        yield {"exit_code": process.returncode, "summary": summary}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("video", type=file)
    parser.add_argument("--cameras", type=at_least(1), default=4)
    parser.add_argument("--batch", type=at_least(1))
    parser.add_argument("--seconds", type=at_least(SETTLE_S + 1.0), default=30, help="of the cameras; the first two do not count")
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--track", action="store_true")
    parser.add_argument("--memory", type=at_least(0.1), metavar="MINUTES")
    parser.add_argument(
        "--fps", type=at_least(0.1), help="frames per second of each camera with --memory; default: those of the video"
    )
    given = parser.parse_args()
    if given.memory is not None:
        for one in memory(given.bundle, given.video, given.cameras, given.fps, given.memory):
            print(json.dumps(one), flush=True)
        return
    for _ in range(given.repeats):
        print(
            json.dumps(
                measure(given.bundle, given.video, given.cameras, given.batch or given.cameras, given.seconds, given.track)
            ),
            flush=True,
        )


if __name__ == "__main__":
    run(main)
