"""The work of the detect command: many inputs through a Detector, and annotated copies of them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.images import Input
from ..data.prefetch import Item, read_ahead
from ..data.raw_image import Picture, as_array
from ..data.sinks import Record
from ..data.video import Frame
from ..detections import Detections
from ..detector import MOST_DECODERS, MOST_READERS, Detector
from ..errors import ImageError
from ..system import usable_cores


@dataclass(frozen=True, slots=True)
class Found:
    """One image or frame and its detections. picture: None where a worker process of `DevicePool` has it."""

    input: Input
    record: Record
    picture: NDArray[np.uint8] | Picture | None

    @property
    def image(self) -> NDArray[np.uint8] | None:
        """(H, W, 3) uint8 RGB; made now where the model took the picture in another form."""
        return None if self.picture is None else as_array(self.picture)


@dataclass(frozen=True, slots=True)
class Bad:
    """An input that could not be read, or a video that broke off."""

    input: Input
    error: ImageError


def detect_inputs(detector: Detector, inputs: Sequence[Input], *, every: int = 1) -> Iterator[Found | Bad]:
    """Detect in images and videos, in order, decoding ahead in other threads: one beside a model that runs on the CPU,
    several where a GPU would wait for them.

    every: take every n-th frame of a video.

    Raises:
        SessionError: the model failed. MissingPackageError: a video, and PyAV is not installed.
    """
    on_cpu = detector.session.backend.endswith("cpu")
    most = MOST_DECODERS if detector.decoder is None else MOST_READERS
    threads = 1 if on_cpu else max(1, min(most, usable_cores() - 1))
    ahead = 2 * detector.batch_size + (0 if on_cpu else threads)
    items = read_ahead(inputs, every=every, threads=threads, ahead=ahead, planar=detector.planar, decoder=detector.decoder)
    waiting: deque[tuple[list[Item], Callable[[], list[Detections]]]] = deque()
    with contextlib.closing(items):  # type: ignore[type-var]  # it is a generator
        while chunk := list(itertools.islice(items, detector.batch_size)):
            images = [frame.image for _, frame in chunk if isinstance(frame, Frame)]
            waiting.append((chunk, detector.submit(images) if images else list))
            if len(waiting) > detector.ahead:
                yield from _records(*waiting.popleft())
        for chunk, finish in waiting:
            yield from _records(chunk, finish)


def _records(chunk: list[Item], finish: Callable[[], list[Detections]]) -> Iterator[Found | Bad]:
    found = iter(finish())
    for source, frame in chunk:
        if isinstance(frame, ImageError):
            yield Bad(source, frame)
            continue
        moving = source.kind == "video"
        record = Record(str(source.path), next(found), frame.index if moving else None, frame.time_s if moving else None)
        yield Found(source, record, frame.image)


def outside_of(folder: Path | str, inputs: Sequence[Input], named: Sequence[str]) -> list[Input]:
    """Inputs without those that a search found in the output folder of an earlier run.

    named: what the user wrote; a file that is named there stays.

    Raises:
        ImageError: nothing is left.
    """
    inside = Path(os.path.abspath(folder))
    explicit = {Path(name) for name in named}
    kept = [source for source in inputs if source.path in explicit or inside not in Path(os.path.abspath(source.path)).parents]
    if not kept:
        raise ImageError(f"all inputs lie in the output folder '{folder}'; give another --save-dir")
    return kept
