"""Latency and throughput of `detrt detect` on simulated cameras, beside a plain loop over the same video.

    python benchmarks/measure_streams.py BUNDLE VIDEO [--cameras 4] [--seconds 30] [--repeats 3] [--track]

VIDEO is played in a loop by one process for all cameras, as H.264 in NUT over TCP (MPEG-TS would add two frames of delay), without encoding it again. The plain loop is
`detect_inputs` over the same file with the same batch size. Latency is from the time at which the sender wrote a frame to its
detections: both processes read the same clock, and frames are told by their time stamps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np


def play(video: str, count: int, pipe: Connection) -> None:
    """Serve `count` clients with the packets of a video at its speed; sends the ports, then the time of each frame by index."""
    import av

    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    pipe.send([server.getsockname()[1] for server in servers])
    clients = [server.accept()[0] for server in servers]
    with av.open(video) as source:
        outputs = [av.open(client.makefile("wb", buffering=0), "w", format="nut") for client in clients]
        streams = [output.add_stream_from_template(source.streams.video[0]) for output in outputs]
        rate, base, started, number, sent = (
            source.streams.video[0].average_rate,
            source.streams.video[0].time_base,
            time.monotonic(),
            0,
            [],
        )
        ticks = round(1 / rate / base)
        with contextlib.suppress(OSError, av.FFmpegError):
            while True:
                source.seek(0)
                for packet in source.demux(source.streams.video[0]):
                    if not packet.size:
                        continue
                    time.sleep(max(0.0, started + number / float(rate) - time.monotonic()))
                    sent.append(time.monotonic())
                    number += 1
                    for output, stream in zip(outputs, streams, strict=True):
                        packet.pts = packet.dts = number * ticks
                        packet.time_base, packet.stream = base, stream
                        output.mux(packet)
    pipe.send(sent)


@contextlib.contextmanager
def playing(video: Path, count: int) -> Iterator[tuple[list[str], Connection]]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=play, args=(str(video), count, there), daemon=True)
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
    from detrt.jobs.run import detect_inputs
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
            done = []
            with LiveStreams([live_source(address) for address in addresses]) as streams, short_collections():
                started = time.monotonic()
                found = detect_streams(detector, streams)
                for result in track_objects(found, Tracker()) if track else found:
                    now = time.monotonic()
                    done.append((result.record.frame, now, result.record.latency_s))
                    if now - started > seconds:
                        break
                spent = time.monotonic() - started
                counts = list(streams.counts.values())
            sent = pipe.recv()
    settled = [(index, now, latency) for index, now, latency in done if now - started > 2]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("video", type=Path)
    parser.add_argument("--cameras", type=int, default=4)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--track", action="store_true")
    given = parser.parse_args()
    for _ in range(given.repeats):
        print(
            json.dumps(
                measure(given.bundle, given.video, given.cameras, given.batch or given.cameras, given.seconds, given.track)
            ),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
