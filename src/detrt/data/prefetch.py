"""Images and frames of many inputs, in order, decoded ahead of the one who asks by several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import ImageError
from .images import Input
from .video import Frame, raw_frames

if TYPE_CHECKING:
    from ..backends.gpu.decoder import GpuDecoder

Item = tuple[Input, Frame | ImageError]
# Files that a GPU decodes at a time at most, and their pixels; a file beyond is decoded alone.
TOGETHER, PIXELS_TOGETHER = 16, 64_000_000


def read_ahead(
    inputs: Sequence[Input],
    *,
    every: int = 1,
    threads: int = 1,
    ahead: int = 2,
    planar: bool = False,
    decoder: GpuDecoder | None = None,
) -> Iterator[Item]:
    """The images and frames of `inputs`, or what was wrong with them.

    every: take every n-th frame of a video. threads: that decode image files and turn frames to RGB; the frames of one
    video are read by one more. ahead: how many images may wait. planar: leave frames in 4:2:0, see `raw_frames`.
    decoder: decodes JPEG files and videos instead, the files that have been read meanwhile together.

    Raises:
        MissingPackageError: a video, and PyAV is not installed; or what `decoder` needs is not.
    """
    with ThreadPoolExecutor(threads, "detrt-decode") as pool:
        steps = [_Step("detrt-read", max(1, ahead)), _Step("detrt-gpu-decode", TOGETHER)][: 1 if decoder is None else 2]
        try:
            jobs = _jobs(inputs, every, planar, decoder)
            read = ((source, work if isinstance(work, Frame) else pool.submit(work)) for source, work in jobs)
            steps[0].start(read)
            if decoder is None:
                for source, future in steps[0]:
                    yield source, _result(future)
            else:
                steps[1].start(_decoded(steps[0], decoder))
                yield from steps[1]
        finally:
            for step in steps:
                step.stop()
            pool.shutdown(cancel_futures=True)


class _Step:
    """What an iterator gives, taken from it by a thread ahead of the one who asks.

    When `ahead` items wait, the thread sleeps until half of them are gone: two threads that hand over every item one by one
    spend more time on waking each other than on the items.
    """

    def __init__(self, name: str, ahead: int) -> None:
        self._name, self._ahead, self._gone = name, ahead, False
        self._waiting: deque[tuple[Any, BaseException | None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, items: Iterator[Any]) -> None:
        def produce() -> None:
            try:
                for item in items:
                    if not self._put(item, None):
                        return
                self._put(None, None)
            except BaseException as error:  # raised again where the results are asked for
                self._put(None, error)

        self._thread = threading.Thread(target=produce, name=self._name, daemon=True)
        self._thread.start()

    def _put(self, item: Any, error: BaseException | None) -> bool:
        with self._changed:
            if len(self._waiting) >= self._ahead:
                self._changed.wait_for(lambda: self._gone or len(self._waiting) <= self._ahead // 2)
            self._waiting.append((item, error))
            if len(self._waiting) == 1:
                self._changed.notify_all()
            return not self._gone

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._gone or self._waiting)
                if self._gone:
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
            self._gone = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()


def _decoded(step: _Step, decoder: GpuDecoder) -> Iterator[Item]:
    """Items whose files are decoded in groups: as many as are there, so that nobody waits for a group to fill."""
    group: list[Item] = []
    pixels = 0
    for source, future in step:
        one = _result(future)
        size = 0 if isinstance(one, ImageError) else one.image.shape[0] * one.image.shape[1]
        if group and pixels + size > PIXELS_TOGETHER:
            yield from _decode(group, decoder)
            group, pixels = [], 0
        group.append((source, one))
        pixels += size
        if len(group) == TOGETHER or step.empty:
            yield from _decode(group, decoder)
            group, pixels = [], 0
    yield from _decode(group, decoder)


def _decode(group: list[Item], decoder: GpuDecoder) -> Iterator[Item]:
    pictures = decoder.pictures([one if isinstance(one, ImageError) else one.image for _, one in group])
    for (source, one), picture in zip(group, pictures, strict=True):
        if isinstance(one, ImageError) or isinstance(picture, ImageError):
            yield source, picture if isinstance(picture, ImageError) else one
        else:
            yield source, Frame(one.index, one.time_s, picture)


def _result(future: Frame | Future[Frame]) -> Frame | ImageError:
    try:
        return future if isinstance(future, Frame) else future.result()
    except ImageError as error:
        return error


def _jobs(
    inputs: Sequence[Input], every: int, planar: bool, decoder: GpuDecoder | None
) -> Iterator[tuple[Input, Frame | Callable[[], Frame]]]:
    for source in inputs:
        if source.kind != "video":
            yield source, lambda source=source: Frame(0, 0.0, _opened(source, decoder))
            continue
        try:
            for frame in raw_frames(source.path, every=every, planar=planar, gpu=decoder):
                yield source, frame
        except ImageError as error:
            yield source, lambda error=error: _raise(error)


def _opened(source: Input, decoder: GpuDecoder | None) -> Any:
    # What a worker process gives has its own way of loading, and has begun already.
    return source.load() if decoder is None or not isinstance(source, Input) else decoder.open(source.path)


def _raise(error: ImageError) -> Frame:
    raise error
