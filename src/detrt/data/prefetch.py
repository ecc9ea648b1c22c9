"""Prefetching: threads decode images ahead, and one more reads video frames, in the order of the inputs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..errors import ImageError
from .given import fetch_image
from .images import Input, load_image
from .raw_image import LoadedImage, RawImage
from .video import Frame, raw_frames

if TYPE_CHECKING:
    from ..backends.gpu.decoder import GpuDecoder

Load = Callable[[Any], LoadedImage]  # of a path or of bytes
T = TypeVar("T")
# Largest batch of files for a GPU decoder, and its pixels; a larger file is decoded alone.
GPU_BATCH, GPU_BATCH_PIXELS = 16, 64_000_000


class MediaInput(Protocol):
    """An input: an image at a path, or a video. kind: "image" or "video"."""

    @property
    def path(self) -> Any: ...

    @property
    def name(self) -> str:
        """Of records and messages."""
        ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image or a frame of an input, or the error of reading it.

    frame, time_s: of a video: index from 0, and seconds from the start of the file; None of an image file.
    """

    input: Any  # a MediaInput, or an image that was given by itself
    image: LoadedImage | ImageError
    frame: int | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """An image that is being decoded."""

    input: MediaInput
    image: Future[LoadedImage]


class Prefetcher:
    """Threads that decode images ahead. Closing it cancels images that are not started.

    Args:
        threads: that decode image files, and convert frames to RGB.
        decoder: decodes JPEG files and videos on a GPU: threads only read the files, which are decoded in groups.
        load: reads one image; None: `decoder.open`, or `load_image`.
    """

    def __init__(self, threads: int = 1, *, decoder: GpuDecoder | None = None, load: Load | None = None) -> None:
        self._load = load or (load_image if decoder is None else decoder.open)
        self._decoder = decoder
        self._pool = ThreadPoolExecutor(threads, "detrt-decode")

    def begin(self, source: MediaInput) -> Begun:
        """Start to decode an image file."""
        return Begun(source, self._pool.submit(self._read, source))

    def _read(self, source: MediaInput) -> LoadedImage:
        address = source.address if isinstance(source, Input) else ""
        return fetch_image(address, self._load) if address else self._load(source.path)

    def load_batch(self, images: Sequence[Any]) -> list[LoadedImage]:
        """`try_batch`. Raises ImageError where one of them cannot be read."""
        loaded = []
        for image in self.try_batch(images):
            if isinstance(image, ImageError):
                raise image
            loaded.append(image)
        return loaded

    def try_batch(self, images: Sequence[Any]) -> list[LoadedImage | ImageError]:
        """Decode the images of a batch in parallel, and on a GPU as one batch; of what cannot be read, the error."""
        loaded = list(self._pool.map(self._open, images)) if len(images) > 1 else [self._open(image) for image in images]
        return loaded if self._decoder is None else self._decoder.decode(loaded)

    def _open(self, image: Any) -> LoadedImage | ImageError:
        try:
            return image if isinstance(image, RawImage) else self._load(image)
        except ImageError as error:
            return error

    def items(
        self, inputs: Iterable[MediaInput | Begun], *, ahead: int = 2, every: int = 1, planar: bool = False
    ) -> Iterator[ReadImage]:
        """The images and frames of `inputs` in order, decoded ahead.

        Args:
            inputs: images, videos, or images that are being decoded.
            ahead: largest number of decoded images in the queue.
            every: take every n-th frame of a video.
            planar: leave frames in 4:2:0, see `raw_frames`.

        Raises:
            MissingPackageError: a video, and PyAV is not installed; or a package of `decoder` is not.
        """
        steps: list[_ReadAhead[Any]] = []
        try:
            steps.append(_ReadAhead("detrt-read", max(1, ahead), self._submitted(inputs, every, planar)))
            if self._decoder is None:
                for read in steps[0]:
                    yield read if isinstance(read, ReadImage) else _finished(*read)
            else:
                steps.append(_ReadAhead("detrt-gpu-decode", GPU_BATCH, _in_groups(steps[0], self._decoder)))
                yield from steps[1]
        finally:
            for step in steps:
                step.stop()

    def _submitted(
        self, inputs: Iterable[MediaInput | Begun], every: int, planar: bool
    ) -> Iterator[ReadImage | tuple[MediaInput, Future[Any]]]:
        for source in inputs:
            if isinstance(source, Begun):
                yield source.input, source.image
            elif source.kind != "video":
                yield source, self._pool.submit(self._read, source)
            else:
                try:
                    for frame in raw_frames(source.path, every=every, planar=planar, gpu=self._decoder):
                        yield _frame_item(source, frame) if isinstance(frame, Frame) else (source, self._pool.submit(frame))
                except ImageError as error:
                    yield ReadImage(source, error)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReadAhead(Generic[T]):
    """Items of an iterator, produced by another thread.

    When `ahead` items are queued, the thread sleeps until half of them are consumed, because waking the other thread for every
    item costs more than the items.
    """

    def __init__(self, name: str, ahead: int, items: Iterator[T]) -> None:
        self._ahead, self._stopped = ahead, False
        self._waiting: deque[tuple[Any, BaseException | None]] = deque()
        self._changed = threading.Condition()

        def produce() -> None:
            try:
                for item in items:
                    if not self._put(item, None):
                        return
                self._put(None, None)
            except BaseException as error:  # raised again in the consumer
                self._put(None, error)

        self._thread = threading.Thread(target=produce, name=name, daemon=True)
        self._thread.start()

    def _put(self, item: Any, error: BaseException | None) -> bool:
        with self._changed:
            if len(self._waiting) >= self._ahead:
                self._changed.wait_for(lambda: self._stopped or len(self._waiting) <= self._ahead // 2)
            self._waiting.append((item, error))
            if len(self._waiting) == 1:
                self._changed.notify_all()
            return not self._stopped

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
                if self._stopped:
                    return
                item, error = self._waiting.popleft()
                if len(self._waiting) == self._ahead // 2:
                    self._changed.notify_all()
            if error is not None:
                raise error
            if item is None:
                return
            yield item

    @property
    def empty(self) -> bool:
        return not self._waiting

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()


def _finished(source: MediaInput, future: Future[Any]) -> ReadImage:
    try:
        image = future.result()
    except ImageError as error:
        return ReadImage(source, error)
    return _frame_item(source, image) if isinstance(image, Frame) else ReadImage(source, image)


def _frame_item(source: MediaInput, frame: Frame) -> ReadImage:
    return ReadImage(source, frame.image, frame.index, frame.time_s)


def _in_groups(step: _ReadAhead[Any], decoder: GpuDecoder) -> Iterator[ReadImage]:
    """Items whose files a GPU decoded in groups: as many as have been read, so that nothing waits for a group to fill."""
    group: list[ReadImage] = []
    pixels = 0
    for read in step:
        item = read if isinstance(read, ReadImage) else _finished(*read)
        size = 0 if isinstance(item.image, ImageError) else item.image.shape[0] * item.image.shape[1]
        if group and pixels + size > GPU_BATCH_PIXELS:
            yield from _decoded(group, decoder)
            group, pixels = [], 0
        group.append(item)
        pixels += size
        if len(group) == GPU_BATCH or step.empty:
            yield from _decoded(group, decoder)
            group, pixels = [], 0
    yield from _decoded(group, decoder)


def _decoded(group: list[ReadImage], decoder: GpuDecoder) -> Iterator[ReadImage]:
    for item, image in zip(group, decoder.decode([item.image for item in group]), strict=True):
        yield item if image is item.image else replace(item, image=image)
