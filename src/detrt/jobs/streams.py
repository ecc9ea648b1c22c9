"""Detection in live sources: the newest frame of each, several sources in one batch."""

from __future__ import annotations

import contextlib
import datetime
import gc
from collections.abc import Iterator

from ..data.sinks import Record
from ..data.streams import LiveStreams
from ..detector import Detector
from .run import ImageFailure, ImageResult


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Leave what is loaded by now out of Python's garbage collections: one over all modules holds frames up for 60 to 120 ms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def detect_streams(detector: Detector, streams: LiveStreams) -> Iterator[ImageResult | ImageFailure]:
    """Detect in the newest frames of live sources until they end or `streams.stop` is called.

    A batch has at most one frame of each source. A source that is lost for good is an `ImageFailure`; the others go on.

    Raises:
        SessionError: the model failed.
    """
    while True:
        frames = streams.next_frames(detector.batch_size)
        found = detector.submit([frame.image for frame in frames]).result() if frames else []
        for frame, detections in zip(frames, found, strict=True):
            latency_s = streams.done(frame)
            arrived = datetime.datetime.fromtimestamp(frame.wall_time, datetime.timezone.utc)
            record = Record(frame.source.path, detections, frame.index, frame.time_s, arrived, latency_s)
            yield ImageResult(frame.source, record, frame.image)
        ended = streams.ended  # before `lost`, which has by then whatever ended
        while (lost := streams.lost()) is not None:
            yield ImageFailure(*lost)
        if not frames and ended:
            return
