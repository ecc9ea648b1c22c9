"""Images and frames of many inputs, in order, decoded ahead of the one who asks by several threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from .errors import ImageError
from .images import Input
from .video import Frame, raw_frames

Item = tuple[Input, Frame | ImageError]
_PATIENCE_S = 0.1  # how often a thread that waits for room looks whether it is still wanted


def read_ahead(
    inputs: Sequence[Input], *, every: int = 1, threads: int = 1, ahead: int = 2, planar: bool = False
) -> Iterator[Item]:
    """The images and frames of `inputs`, or what was wrong with them.

    every: take every n-th frame of a video. threads: that decode image files and turn frames to RGB; the frames of one
    video are read by one more. ahead: how many images may wait. planar: leave frames in 4:2:0, see `raw_frames`.

    Raises:
        MissingPackageError: a video, and PyAV is not installed.
    """
    waiting: queue.Queue[tuple[Input, Future[Frame]] | BaseException | None] = queue.Queue(max(1, ahead))
    gone = threading.Event()

    def put(entry: Any) -> bool:
        while not gone.is_set():
            try:
                waiting.put(entry, timeout=_PATIENCE_S)
                return True
            except queue.Full:
                continue
        return False

    def produce(pool: ThreadPoolExecutor) -> None:
        try:
            for source, work in _jobs(inputs, every, planar):
                if not put((source, pool.submit(work))):
                    return
            put(None)
        except BaseException as error:  # raised again where the results are asked for
            put(error)

    with ThreadPoolExecutor(threads, "detrt-decode") as pool:
        reader = threading.Thread(target=produce, args=(pool,), name="detrt-read", daemon=True)
        reader.start()
        try:
            while (entry := waiting.get()) is not None:
                if isinstance(entry, BaseException):
                    raise entry
                source, future = entry
                try:
                    yield source, future.result()
                except ImageError as error:
                    yield source, error
        finally:
            gone.set()
            reader.join()
            pool.shutdown(cancel_futures=True)


def _jobs(inputs: Sequence[Input], every: int, planar: bool) -> Iterator[tuple[Input, Callable[[], Frame]]]:
    for source in inputs:
        if source.kind != "video":
            yield source, lambda source=source: Frame(0, 0.0, source.load())
            continue
        try:
            for frame in raw_frames(source.path, every=every, planar=planar):
                yield source, frame
        except ImageError as error:
            yield source, lambda error=error: _raise(error)


def _raise(error: ImageError) -> Frame:
    raise error
