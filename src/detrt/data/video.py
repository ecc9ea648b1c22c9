"""Reading of video frames and writing of videos, with PyAV."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ImageError, MissingPackageError, OutputError
from ..files import writing
from ..system import usable_cores
from .images import MAX_PIXELS
from .raw_image import Colours, LoadedImage, YuvImage

_thread = threading.local()
# The demuxers of FFmpeg that hold the files of `VIDEO_SUFFIXES`, whichever of them a file says it is. Others read a list that names
# further files or addresses (concat, hls, dash, imf), or what is no video.
_DEMUXERS = ("mov", "matroska", "avi", "flv", "asf", "mpeg", "mpegvideo", "mpegts", "ogg", "m4v", "yuv4mpegpipe")
_NOMINAL_FPS, _MILLISECOND = 30, Fraction(1, 1000)  # of videos whose frames have times
# On a GPU one thread would wait for every frame; more keep the decoder busy. On a CPU more threads decode hardly faster, and leave
# less for the model.
_GPU_THREADS, CPU_THREADS = 4, 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. index: from 0 in the file; time_s: seconds from its start; image: (H, W, 3) uint8 RGB, or a raw
    image."""

    index: int
    time_s: float
    image: LoadedImage


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """fps: average frames per second; frames: number in the header, 0 if it has none."""

    fps: float
    frames: int


def video_facts(path: str | os.PathLike) -> VideoFacts:
    """Read the header of a video; raises what `read_frames` raises."""
    with open_video(Path(path)) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        frames = int(stream.frames or 0)
        if not frames and container.duration:
            frames = round(container.duration / 1_000_000 * rate)
        return VideoFacts(float(rate), frames)


def read_frames(path: str | os.PathLike, *, every: int = 1) -> Iterator[Frame]:
    """The frames of a video, upright, in order; every `every`-th one, starting with the first.

    Raises:
        ImageError: missing, empty, damaged or truncated file, no video in it, or frames that are too large.
        MissingPackageError: PyAV is not installed.
        ValueError: every is below 1.
    """
    for frame in raw_frames(path, every=every):
        yield frame if isinstance(frame, Frame) else frame()


def raw_frames(
    path: str | os.PathLike, *, every: int = 1, planar: bool = False, gpu: VideoGpu | None = None
) -> Iterator[Frame | Callable[[], Frame]]:
    """As `read_frames`, or functions that convert the frame, also in another thread, while the next ones are decoded.

    planar: leave frames in 4:2:0 if their conversion to RGB can run elsewhere with the same arithmetic. gpu: decodes the videos
    that it supports; such frames are planar and in its memory.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}")
    path = Path(path)
    count = 0
    with open_video(path, gpu) as (container, stream):
        stream.thread_type = "AUTO"
        hardware = getattr(stream.codec_context, "is_hwaccel", False)
        stream.codec_context.thread_count = _GPU_THREADS if hardware else min(CPU_THREADS, usable_cores())
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        for index, frame in enumerate(container.decode(stream)):
            on_gpu = frame.format.name == "cuda"
            if gpu is not None and not count:
                gpu.count_video(on_gpu)
            count += 1
            if index % every:
                continue
            time_s = float(frame.time) if frame.time is not None else float(index / rate)
            if on_gpu and _suits(frame):
                yield Frame(index, time_s, _planar(frame, gpu.mark() if gpu is not None else None))
            elif planar and _is_planar(frame):
                yield Frame(index, time_s, image_of(frame, planar=True))
            else:
                yield lambda index=index, time_s=time_s, frame=frame: Frame(index, time_s, image_of(frame))
        if not count:
            raise ImageError(f"'{path}' has no frame that can be decoded; it is damaged or truncated")


class VideoGpu(Protocol):
    """A GPU that decodes videos. index: of the CUDA device."""

    index: int

    def enter(self) -> None:
        """Make the CUDA context of the GPU current in this thread."""

    def mark(self) -> Any:
        """An event after which the last frame is written."""

    def count_video(self, on_gpu: bool) -> None:
        """Called once for each video, with its first frame."""


@contextlib.contextmanager
def video_writer(path: str | os.PathLike, *, fps: float | None, size_hw: tuple[int, int]) -> Iterator[Callable[..., None]]:
    """Write an MP4; yields a function that takes (H, W, 3) uint8 RGB frames of `size_hw`, and without fps their times in seconds.

    An odd side loses its last row or column, because the codec needs even ones. The file appears when
    the block ends without an error.

    Raises:
        OutputError: it cannot be written. MissingPackageError: PyAV is not installed.
    """
    av = import_av("writing videos")
    height, width = (side - side % 2 for side in size_hw)
    if min(height, width) < 2:
        raise OutputError(f"cannot write '{path}': a video needs frames of 2x2 or more; got {size_hw}")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with writing(path) as temporary:
        try:
            with av.open(str(temporary), "w", format="mp4") as container:
                stream = container.add_stream(codec, rate=_NOMINAL_FPS if fps is None else Fraction(fps).limit_denominator(1001))
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                if fps is None:
                    stream.codec_context.time_base = _MILLISECOND
                start_s, last = 0.0, -1

                def write(image: NDArray[np.uint8], time_s: float | None = None) -> None:
                    nonlocal start_s, last
                    if image.shape[:2] != tuple(size_hw):
                        raise OutputError(f"'{path}' has frames of {size_hw}; got one of {image.shape[:2]}")
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), "rgb24")
                    if fps is None:
                        assert time_s is not None
                        start_s = time_s if last < 0 else start_s
                        frame.pts = last = max(last + 1, round((time_s - start_s) / _MILLISECOND))
                        frame.time_base = _MILLISECOND
                    container.mux(stream.encode(frame))

                yield write
                container.mux(stream.encode())
        except av.FFmpegError as error:
            raise OutputError(f"cannot write '{path}': {error}") from error


def import_av(purpose: str) -> ModuleType:
    """PyAV. Raises MissingPackageError."""
    try:
        import av
    except ImportError:
        raise MissingPackageError("av", "video", purpose) from None
    return av


@contextlib.contextmanager
def open_video(path: Path, gpu: VideoGpu | None = None) -> Iterator[tuple]:
    """Container and first video stream; errors of PyAV inside the block become ImageError."""
    av = import_av(f"reading the video '{path}'")
    if not path.is_file():
        raise ImageError(f"there is no video file '{path}'; check the path")
    if path.stat().st_size == 0:
        raise ImageError(f"'{path}' is empty (0 bytes); copy or download it again")
    try:
        with _open(av, path) as container:
            if not container.streams.video:
                raise ImageError(f"'{path}' has no video stream")
            stream = container.streams.video[0]
            if stream.width * stream.height > MAX_PIXELS:
                raise ImageError(f"'{path}' has frames of {stream.width}x{stream.height}; allowed are {MAX_PIXELS} pixels")
            there = _open_on_gpu(av, path, gpu) if gpu is not None and _may_be_on_gpu(stream) else None
            if there is None:
                yield container, stream
                return
        with there:
            yield there, there.streams.video[0]
    except av.FFmpegError as error:
        raise ImageError(f"'{path}' cannot be read as a video: {error.strerror or error}; it is damaged or truncated") from error


def _open(av: ModuleType, path: Path, **choices: Any) -> Any:
    # Whole names of FFmpeg, such as "mov,mp4,m4a,3gp,3g2,mj2", are compared with each word of the list.
    return av.open(str(path), container_options={"format_whitelist": ",".join(_DEMUXERS)}, **choices)


def _open_on_gpu(av: ModuleType, path: Path, gpu: VideoGpu) -> Any:
    """The video with a decoder on a GPU; None if FFmpeg has none, e.g. without the video library of the driver."""
    if not hasattr(av.video.plane.VideoPlane, "__dlpack__"):  # access to frames on a GPU
        raise MissingPackageError("av>=17", "decode", f"decoding videos on the GPU (PyAV {av.__version__} is here)")
    from av.codec.hwaccel import HWAccel

    gpu.enter()
    # The context of PyTorch: FFmpeg would create one with other flags, and rejects one without them.
    context = {"primary_ctx": "0", "current_ctx": "1"}
    hardware = HWAccel("cuda", device=str(gpu.index), allow_software_fallback=True, options=context, is_hw_owned=True)
    try:
        return _open(av, path, hwaccel=hardware)
    except av.FFmpegError:
        return None


def _may_be_on_gpu(stream: Any) -> bool:
    """Whether a GPU decodes the same frames: 4:2:0 in 8 bits with even sides, as PyAV returns them."""
    context = stream.codec_context
    even = stream.width % 2 == 0 and stream.height % 2 == 0
    return (
        even
        and context.pix_fmt in _PLANAR
        and context.name in _EXACT
        and any(c.device_type.name == "cuda" for c in context.codec.hardware_configs)
    )


# Codecs that every decoder decodes to the same frames; older ones leave rounding open.
_EXACT = ("h264", "hevc", "vp8", "vp9", "av1")
# 4:2:0 in 8 bits with three planes; the second is an old name for full range.
_PLANAR = ("yuv420p", "yuvj420p")
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_MATRICES = (0, 1, 2, 4, 5, 6, 7, 9)  # those that FFmpeg converts by `Colours`


def _is_planar(frame: Any) -> bool:
    """Whether FFmpeg converts the frame with the arithmetic of `Colours`; it does not for an odd height of a frame or
    a field."""
    return frame.format.name in _PLANAR and _suits(frame)


def _suits(frame: Any) -> bool:
    return frame.height % (4 if frame.interlaced_frame else 2) == 0 and int(frame.colorspace) in _MATRICES


def image_of(frame: Any, *, planar: bool = False) -> LoadedImage:
    """A frame of PyAV as upright RGB; planar: in 4:2:0 where `_is_planar` allows it. Raises ImageError."""
    return _planar(frame, None) if planar and _is_planar(frame) else _rgb(frame)


def _planar(frame: Any, ready: Any) -> YuvImage:
    full = frame.format.name == "yuvj420p" or int(frame.color_range) == _FULL_RANGE
    planes: tuple[Any, ...] = tuple(frame.planes)
    if ready is None:
        planes = tuple(np.frombuffer(p, np.uint8).reshape(p.height, p.line_size)[:, : p.width] for p in planes)
    return YuvImage(
        planes,
        frame.height,
        frame.width,
        Colours.of(int(frame.colorspace), full),
        lambda: _rgb(frame),
        _turns(frame),
        bool(frame.interlaced_frame),
        ready,
    )


def _rgb(frame: Any) -> NDArray[np.uint8]:
    return _upright(_download(frame) if frame.format.name == "cuda" else frame, _turns(frame))


def _download(frame: Any) -> Any:
    """A frame of a GPU in host memory, with three planes: FFmpeg converts two planes, with U and V interleaved, differently."""
    return frame.reformat(format="yuv420p")


def _turns(frame: Any) -> int:
    # Phones store the sensor's frame and a display rotation, in degrees counter-clockwise.
    return round(getattr(frame, "rotation", 0) / 90) % 4


def _upright(frame: Any, turns: int | None = None) -> NDArray[np.uint8]:
    av = import_av("reading videos")
    if not hasattr(_thread, "reformatter"):  # one per thread: that of a frame is created for each frame
        _thread.reformatter = av.video.reformatter.VideoReformatter()
    try:
        image = _thread.reformatter.reformat(frame, format="rgb24").to_ndarray()
    except av.FFmpegError as error:
        raise ImageError(
            f"a frame in the pixel format {frame.format.name} cannot be converted to RGB: {error.strerror}"
        ) from error
    turns = _turns(frame) if turns is None else turns
    return np.ascontiguousarray(np.rot90(image, turns)) if turns else image
