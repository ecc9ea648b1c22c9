"""The work of the detect command: many inputs through a Detector, and annotated copies of them."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.images import Input
from ..data.prefetch import Begun, Item, Prefetcher, Source
from ..data.raw_image import LoadedImage, as_array
from ..data.sinks import Record
from ..detector import MAX_DECODERS, MAX_READERS, Detector, PendingDetections
from ..errors import ImageError
from ..system import CPU, usable_cores


@dataclass(frozen=True, slots=True)
class Found:
    """One image or frame and its detections. image: None where a worker process of `DevicePool` has it."""

    input: Any  # an `Input`, or another source of images
    record: Record
    image: LoadedImage | None

    def rgb(self) -> NDArray[np.uint8]:
        """(H, W, 3) uint8; converted now where the model took the image in another form."""
        assert self.image is not None
        return as_array(self.image)


@dataclass(frozen=True, slots=True)
class Bad:
    """An input that could not be read, or a video that broke off."""

    input: Any
    error: ImageError


def detect_inputs(
    detector: Detector, inputs: Iterable[Source], *, every: int = 1, threads: int | None = None
) -> Iterator[Found | Bad]:
    """Detect in images and videos, in order, with images decoded ahead in threads.

    Args:
        detector: what detects.
        inputs: images and videos.
        every: take every n-th frame of a video.
        threads: that decode; None: one beside a model that runs on the CPU, several where a GPU would wait for them.

    Raises:
        SessionError: the model failed. MissingPackageError: a video, and PyAV is not installed.
    """
    with Prefetcher(threads or decoding_threads(detector), decoder=detector.decoder) as prefetcher:
        yield from detect_prefetched(detector, prefetcher, inputs, every=every, ahead=images_ahead(detector, threads))


def detect_prefetched(
    detector: Detector, prefetcher: Prefetcher, inputs: Iterable[Source | Begun], *, ahead: int, every: int = 1
) -> Iterator[Found | Bad]:
    """As `detect_inputs`, with a prefetcher that may have begun with some inputs."""
    items = prefetcher.items(inputs, every=every, ahead=ahead, planar=detector.planar)
    waiting: deque[tuple[list[Item], PendingDetections]] = deque()
    with contextlib.closing(items):  # type: ignore[type-var]  # it is a generator
        while some := list(itertools.islice(items, detector.batch_size)):
            images = [item.image for item in some if not isinstance(item.image, ImageError)]
            waiting.append((some, detector.submit(images)))
            if len(waiting) > detector.ahead:
                yield from _results(*waiting.popleft())
        for some, pending in waiting:
            yield from _results(some, pending)


def decoding_threads(detector: Detector) -> int:
    """Threads that decode images for a detector by default."""
    if detector.session.info.device == CPU:
        return 1
    most = MAX_DECODERS if detector.decoder is None else MAX_READERS
    return max(1, min(most, usable_cores() - 1))


def images_ahead(detector: Detector, threads: int | None = None) -> int:
    """Images that wait for a detector at most."""
    on_cpu = detector.session.info.device == CPU
    return 2 * detector.batch_size + (threads or (0 if on_cpu else decoding_threads(detector)))


def _results(items: list[Item], pending: PendingDetections) -> Iterator[Found | Bad]:
    detections = iter(pending.result())
    for item in items:
        if isinstance(item.image, ImageError):
            yield Bad(item.input, item.image)
        else:
            record = Record(str(item.input.path), next(detections), item.frame, item.time_s)
            yield Found(item.input, record, item.image)


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
