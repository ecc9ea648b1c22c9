"""`detrt detect` in cameras: its options, the run, and what is printed at the end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DetrtError, ImageError, check_range
from .options import Given
from .outputs import OutputOptions, open_writers, reader_may_leave, summary, write_all

if TYPE_CHECKING:
    from ..data.images import Input
    from ..data.live import LiveSource
    from ..data.stream_config import StreamConfig
    from ..data.streams import LiveStreams, StreamCounts
    from ..detector import Detector
    from ..jobs.track import Tracker


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "9100" or "0.0.0.0:9100" -> (host, port). Raises DetrtError."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise DetrtError(f"--metrics takes PORT or HOST:PORT, e.g. 9100; got {text!r}")
    return host or "127.0.0.1", int(port)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What is read like a camera, and for how long."""

    live: bool = field(
        default=False,
        metadata={"help": "Read videos like cameras: at their own speed, newest frame first.", "panel": "Cameras"},
    )
    duration: float | None = field(
        default=None, metadata={"help": "Stop after so many seconds; default: Ctrl-C.", "panel": "Cameras", "min": 0}
    )
    metrics: tuple[str, int] | None = field(
        default=None,
        metadata={
            "help": "Serve counts and latencies for Prometheus at PORT or HOST:PORT.",
            "panel": "Cameras",
            "parse": parse_endpoint,
        },
    )


@dataclass(frozen=True, slots=True)
class TrackOptions:
    """Ids of objects across frames.

    Raises:
        DetrtError: out of range.
    """

    track: bool = field(
        default=False, metadata={"help": "Track objects in videos and cameras: an id for each.", "panel": "Cameras"}
    )
    track_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Lowest score that starts a track; default: that of --threshold.",
            "panel": "Cameras",
            "needs": {"track": ()},
        },
    )

    def __post_init__(self) -> None:
        if self.track_threshold is not None:
            check_range("--track-threshold", self.track_threshold, 0, 1, DetrtError)

    def make(self) -> Tracker | None:
        """A tracker, if there is to be one. Raises MissingPackageError."""
        from ..jobs.track import Tracker

        return Tracker(self.track_threshold or 0.0) if self.track else None

    def make_for_files(self, inputs: Sequence[Input], device: Sequence[str]) -> Tracker | None:
        """As `make`. Raises DetrtError where there is nothing to track, or where several devices share the frames."""
        if self.track and not any(source.kind == "video" for source in inputs):
            raise DetrtError("--track is for videos and cameras, and there is none among the inputs; leave it out")
        if self.track and len(device) > 1:
            raise DetrtError(f"--track runs on one device; got --device {','.join(device)}")
        return self.make()


def find_sources(names: Sequence[str], live: Given[LiveOptions], stream: Given[StreamConfig]) -> list[LiveSource]:
    """The inputs, if they are cameras or read like cameras; else [].

    Raises:
        ImageError: cameras and other inputs together, or one twice.
        DetrtError: an option for cameras, and there is none.
    """
    from ..data.images import IMAGE_SUFFIXES
    from ..data.live import live_source

    if live.live:
        for name in names:
            if "://" not in name and Path(name).suffix.lower() in IMAGE_SUFFIXES:
                raise DetrtError(f"--live reads videos like cameras, and '{name}' is an image; leave it out")
    found = [live_source(name, files=live.live) for name in names]
    sources = [source for source in found if source is not None]
    if not sources:
        for flag, _ in [*live.flags(), *stream.flags()]:
            raise DetrtError(
                f"{flag} is for cameras, and there is none among the inputs; leave it out, or read files with --live"
            )
        return []
    if len(sources) < len(names):
        other = next(name for name, source in zip(names, found, strict=True) if source is None)
        raise ImageError(
            f"'{other}' is no camera, but '{sources[0].path}' is; detect in files in a run of their own, or add --live"
        )
    paths = [source.path for source in sources]
    if len(set(paths)) < len(paths):
        raise ImageError(f"'{max(paths, key=paths.count)}' is named twice; name each camera once")
    return sources


def check_live(output: Given[OutputOptions], device: Sequence[str]) -> None:
    """Raise DetrtError for options that do nothing with cameras."""
    for flag, name in output.flags():
        if name in ("every", "coco_images", "save_txt", "save_crops"):
            raise DetrtError(f"{flag} has no effect on cameras; leave it out")
    if len(device) > 1:
        raise DetrtError(f"cameras run on one device; got --device {','.join(device)}. Run one process for each device")


def detect_live(
    detector: Detector,
    sources: Sequence[LiveSource],
    config: StreamConfig,
    live: LiveOptions,
    output: OutputOptions,
    tracker: Tracker | None,
    quiet: bool,
) -> None:
    """Detect in cameras until they end, the time is over, or Ctrl-C."""
    from rich.console import Console

    from ..data.sinks import LIVE_COLUMNS, TRACK_COLUMNS
    from ..data.streams import LiveStreams
    from ..jobs.annotate import StreamCopies
    from ..jobs.streams import detect_streams, short_collections
    from ..jobs.track import track_objects

    detector.check_prompt()
    if detector.decoder is not None:
        raise DetrtError("--image-decoder gpu is for files; cameras are decoded on the CPU: leave it out")
    console = Console(stderr=True, quiet=quiet)
    with contextlib.ExitStack() as stack:
        stack.enter_context(reader_may_leave())
        streams = stack.enter_context(LiveStreams(sources, config, planar=detector.planar))
        if live.metrics is not None:
            from ..serve.stream_metrics import serve_metrics

            stack.enter_context(serve_metrics(streams, *live.metrics))
        columns = LIVE_COLUMNS + (TRACK_COLUMNS if tracker is not None else [])
        writers = open_writers(stack, output, detector.spec, None, quiet, columns)
        stack.enter_context(_stop_on_signals(streams, live.duration))
        stack.enter_context(short_collections())
        started = time.perf_counter()
        found = detect_streams(detector, streams)
        if tracker is not None:
            found = track_objects(found, tracker)
        saves = []
        if output.save_dir is not None and output.draw:
            saves.append(stack.enter_context(StreamCopies(output.save_dir, sources, font=output.font)).save)
        tally = write_all(found, writers, saves, lambda source: None, strict=not output.skip_bad)
    seconds = time.perf_counter() - started
    summary(console, detector.session.info.name, tally, seconds, "")
    if not quiet:
        print_counts(console, streams.counts, seconds)
    tally.check(len(sources))


@contextlib.contextmanager
def _stop_on_signals(streams: LiveStreams, duration: float | None) -> Iterator[None]:
    """End the streams with Ctrl-C, SIGTERM or after `duration` seconds, so that the outputs are finished."""
    timer = None if duration is None else threading.Timer(duration, streams.stop)
    before: dict[int, Any] = {}

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, before[number])  # the second one ends the run without outputs
        streams.stop()

    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, stop)
    try:
        if timer is not None:
            timer.daemon = True
            timer.start()
        yield
    finally:
        if timer is not None:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def print_counts(console: Any, counts: Mapping[LiveSource, StreamCounts], seconds: float) -> None:
    """A table with one row for each camera."""
    import numpy as np

    from . import show

    heads = ("camera", "frames", "processed", "dropped", "damaged", "connections", "per s", "p50 ms", "p99 ms")
    rows = []
    for source, one in counts.items():
        latencies = [f"{1000 * np.percentile(one.latencies_s, q):.0f}" if one.latencies_s else "" for q in (50, 99)]
        numbers = (one.received, one.processed, one.dropped, one.damaged, one.connections)
        rows.append((source.path, *map(str, numbers), f"{one.processed / max(seconds, 1e-9):.1f}", *latencies))
    show.table("", heads, rows, right=range(1, len(heads)), console=console)
