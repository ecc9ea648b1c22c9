"""Frames of a video and annotated videos, through PyAV (the only module that imports `av`)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from .errors import ImageError, MissingPackageError, OutputError
from .files import writing
from .images import MAX_PIXELS

_thread = threading.local()


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. index: from 0 in the file; time_s: seconds from its start; image: (H, W, 3) uint8 RGB."""

    index: int
    time_s: float
    image: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """fps: average frames a second; frames: number in the header, 0 where it does not say."""

    fps: float
    frames: int


def video_facts(path: str | os.PathLike) -> VideoFacts:
    """Read the header of a video; raises what `read_frames` raises."""
    with _opened(Path(path)) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        frames = int(stream.frames or 0)
        if not frames and container.duration:
            frames = round(container.duration / 1_000_000 * rate)
        return VideoFacts(float(rate), frames)


def read_frames(path: str | os.PathLike, *, every: int = 1) -> Iterator[Frame]:
    """The frames of a video, upright, in order; every `every`-th one, starting with the first.

    Raises:
        ImageError: missing, empty, damaged or cut off file, no video in it, or frames that are too large.
        MissingPackageError: PyAV is not installed.
        ValueError: every is below 1.
    """
    for frame in raw_frames(path, every=every):
        yield frame()


def raw_frames(path: str | os.PathLike, *, every: int = 1) -> Iterator[Callable[[], Frame]]:
    """As `read_frames`; a call turns a frame to RGB, also in another thread, while the next ones are decoded."""
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}")
    path = Path(path)
    count = 0
    with _opened(path) as (container, stream):
        stream.thread_type = "AUTO"
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        for index, frame in enumerate(container.decode(stream)):
            count += 1
            if index % every:
                continue
            time_s = float(frame.time) if frame.time is not None else float(index / rate)
            yield lambda index=index, time_s=time_s, frame=frame: Frame(index, time_s, _upright(frame))
        if not count:
            raise ImageError(f"'{path}' has no frame that can be decoded; it is damaged or cut off")


@contextlib.contextmanager
def video_writer(
    path: str | os.PathLike, *, fps: float, size_hw: tuple[int, int]
) -> Iterator[Callable[[NDArray[np.uint8]], None]]:
    """Write an MP4: the block gets a function that takes (H, W, 3) uint8 RGB frames of `size_hw`.

    An odd side loses its last row or column, which the codec does not allow. The file appears when
    the block ends without an error.

    Raises:
        OutputError: it cannot be written. MissingPackageError: PyAV is not installed.
    """
    av = _import_av("writing videos")
    height, width = (side - side % 2 for side in size_hw)
    if min(height, width) < 2:
        raise OutputError(f"cannot write '{path}': a video needs frames of 2x2 or more; got {size_hw}")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with writing(path) as temporary:
        try:
            with av.open(str(temporary), "w", format="mp4") as container:
                stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"

                def write(image: NDArray[np.uint8]) -> None:
                    if image.shape[:2] != tuple(size_hw):
                        raise OutputError(f"'{path}' has frames of {size_hw}; got one of {image.shape[:2]}")
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), "rgb24")
                    container.mux(stream.encode(frame))

                yield write
                container.mux(stream.encode())
        except av.FFmpegError as error:
            raise OutputError(f"cannot write '{path}': {error}") from error


def _import_av(purpose: str) -> ModuleType:
    try:
        import av
    except ImportError:
        raise MissingPackageError("av", "video", purpose) from None
    return av


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple]:
    """Container and first video stream; errors of PyAV inside the block become ImageError."""
    av = _import_av(f"reading the video '{path}'")
    if not path.is_file():
        raise ImageError(f"there is no video file '{path}'; check the path")
    if path.stat().st_size == 0:
        raise ImageError(f"'{path}' is empty (0 bytes); copy or download it again")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ImageError(f"'{path}' has no video stream")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise ImageError(f"'{path}' has frames of {stream.width}x{stream.height}; allowed are {MAX_PIXELS} pixels")
            yield container, stream
    except av.FFmpegError as error:
        raise ImageError(f"'{path}' cannot be read as a video: {error.strerror or error}; it is damaged or cut off") from error


def _upright(frame) -> NDArray[np.uint8]:
    if not hasattr(_thread, "reformatter"):  # one a thread: a frame's own is made anew for each frame
        _thread.reformatter = _import_av("reading videos").video.reformatter.VideoReformatter()
    image = _thread.reformatter.reformat(frame, format="rgb24").to_ndarray()
    # Phones store the sensor's frame and a display rotation, in degrees counter-clockwise.
    quarter = round(getattr(frame, "rotation", 0) / 90) % 4
    return np.ascontiguousarray(np.rot90(image, quarter)) if quarter else image
