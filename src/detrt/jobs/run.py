"""Detection in many inputs with a `Detector`."""

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

from ..backends.batches import FoundInTiles, PendingDetections
from ..data.images import Input
from ..data.prefetch import Begun, MediaInput, Prefetcher, ReadImage
from ..data.raw_image import LoadedImage
from ..data.sinks import Record
from ..detections import Detections
from ..detector import MAX_DECODERS, MAX_READERS, Detector
from ..errors import ImageError, SessionError
from ..system import CPU, usable_cores


@dataclass(frozen=True, slots=True)
class ImageResult:
    """One image or frame and its detections. image: None if it is in a worker process of `DevicePool`."""

    input: Any  # an `Input`, or another source of images
    record: Record
    image: LoadedImage | None


@dataclass(frozen=True, slots=True)
class ImageFailure:
    """An input that could not be read, or that the model fails on, or a video that is truncated."""

    input: Any
    error: ImageError


def detect_inputs(
    detector: Detector,
    inputs: Iterable[MediaInput | Begun],
    *,
    every: int = 1,
    prefetcher: Prefetcher | None = None,
    ahead: int | None = None,
) -> Iterator[ImageResult | ImageFailure]:
    """Detect in images and videos, in order, with images decoded ahead in threads.

    Args:
        detector: detects.
        inputs: images and videos; with a `prefetcher`, also images that it is decoding.
        every: take every n-th frame of a video.
        prefetcher: decodes; None: one thread if the model runs on the CPU, several for a GPU.
        ahead: largest number of decoded images in the queue.

    Raises:
        SessionError: the model fails, and not on some of the images only. MissingPackageError: a video, and PyAV is not installed.
    """
    with contextlib.ExitStack() as stack:
        threads = decoding_threads(detector)
        if prefetcher is None:
            prefetcher = stack.enter_context(Prefetcher(threads, decoder=detector.decoder))
        if ahead is None:
            ahead = 2 * detector.batch_size + (0 if detector.session.info.device == CPU else threads)
        items = prefetcher.items(inputs, every=every, ahead=ahead, planar=detector.planar)
        stack.callback(items.close)  # type: ignore[attr-defined]  # it is a generator
        submitted: deque[tuple[list[ReadImage], PendingDetections | FoundInTiles | SessionError]] = deque()
        refused: set[Any] = set()  # videos with frames that fail: they are named once
        while True:
            if some := list(itertools.islice(items, detector.batch_size)):
                submitted.append((some, _begin(detector, [item for item in some if not isinstance(item.image, ImageError)])))
                if len(submitted) <= detector.ahead:
                    continue
            if not submitted:
                return
            done, pending = submitted.popleft()
            found = iter(_finish(detector, [item for item in done if not isinstance(item.image, ImageError)], pending))
            for item in done:
                result = item.image if isinstance(item.image, ImageError) else next(found)
                if not isinstance(result, ImageError):
                    assert not isinstance(item.image, ImageError)
                    yield ImageResult(item.input, Record(item.input.name, result, item.frame, item.time_s), item.image)
                elif item.frame is None or item.input not in refused:
                    refused.add(item.input)
                    yield ImageFailure(item.input, result)


def _begin(detector: Detector, items: Sequence[ReadImage]) -> PendingDetections | FoundInTiles | SessionError:
    """The detections of images, or the error of the model."""
    try:
        return detector.submit([item.image for item in items], beside=True)  # type: ignore[misc]  # they were read
    except SessionError as error:
        return error


def _finish(
    detector: Detector, items: Sequence[ReadImage], pending: PendingDetections | FoundInTiles | SessionError
) -> list[Detections | ImageError]:
    """The detections of each image, or why the model fails on it. Raises SessionError where it fails on any image."""
    try:
        if isinstance(pending, SessionError):
            raise pending
        return [*pending.result()]
    except SessionError as error:
        found: list[Detections | ImageError] = []
        for item in items:
            again = error
            try:
                if len(items) > 1:  # together with others: which of them is it?
                    found += detector.submit([item.image]).result()  # type: ignore[list-item]
                    continue
            except SessionError as own:
                again = own
            height, width, _ = item.image.shape  # type: ignore[union-attr]
            found.append(ImageError(f"'{item.input.name}', of {height}x{width} pixels, fails in the model: {again}"))
        if all(isinstance(one, ImageError) for one in found):
            try:
                detector.submit([np.zeros((*detector.spec.input.size_hw, 3), np.uint8)]).result()
            except SessionError:
                raise error from None
        return found


def decoding_threads(detector: Detector) -> int:
    """Default number of decoding threads for a detector."""
    if detector.session.info.device == CPU:
        return 1
    most = MAX_DECODERS if detector.decoder is None else MAX_READERS
    return max(1, min(most, usable_cores() - 1))


def exclude_outputs(folder: Path | str, inputs: Sequence[Input], named: Sequence[str]) -> list[Input]:
    """Inputs without those in the output folder of an earlier run.

    named: names given by the user; a file among them is not excluded.

    Raises:
        ImageError: nothing is left.
    """
    inside = Path(os.path.abspath(folder))
    explicit = {Path(name) for name in named}
    kept = [
        source
        for source in inputs
        if source.address or source.path in explicit or inside not in Path(os.path.abspath(source.path)).parents
    ]
    if not kept:
        raise ImageError(f"all inputs lie in the output folder '{folder}'; give another `save_dir`")
    return kept
