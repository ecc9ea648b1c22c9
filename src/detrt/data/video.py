"""Reading of video frames and writing of videos, with PyAV."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ImageError, MissingPackageError, OutputError
from ..files import writing
from ..system import usable_cores
from .frames import DamageWarning
from .images import MAX_PIXELS
from .raw_image import ORIENTATIONS, Colours, LoadedImage, YuvImage, upright

_thread = threading.local()
# The demuxers of FFmpeg that hold the files of `VIDEO_SUFFIXES`, whichever of them a file says it is. Others read a list that names
# further files or addresses (concat, hls, dash, imf), or what is no video.
DEMUXERS = ("mov", "matroska", "avi", "flv", "asf", "mpeg", "mpegvideo", "mpegts", "ogg", "m4v", "yuv4mpegpipe")
# Of written time stamps: exact for 25, 30, 50 and 60 frames a second and for 30000/1001; MPEG-4 has 16 bits for it.
_TICK = Fraction(1, 60000)
_CLOCK_MAY_JUMP = 0x200  # AVFMT_TS_DISCONT of a container
_CLOCK_JUMP_S = 10  # FFmpeg's limit (-dts_delta_threshold) for a clock that was set again
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
    """fps: average frames per second; frames: their number, 0 if it was not counted.

    pixel_aspect: width of a pixel of the upright frames over its height, as a player shows it.
    """

    fps: float
    frames: int
    pixel_aspect: Fraction = Fraction(1)


def video_facts(path: str | os.PathLike, *, count: bool = True) -> VideoFacts:
    """Rate and length of a video; raises what `read_frames` raises.

    count: read a file without the number of frames in its header to its end, without decoding it. The duration in a header is no help:
    it is a length in some files and the clock at the end in others.
    """
    with open_video(Path(path)) as (container, stream):
        frames = int(stream.frames or 0)
        if count and not frames:
            frames = sum(1 for packet in container.demux(stream) if packet.size)
        facts = VideoFacts(float(_rate(stream)), frames)
        aspect = stream.sample_aspect_ratio
    if not aspect or aspect == 1:
        return facts
    with open_video(Path(path)) as (container, stream):
        turned = any(_orientation(frame) > 4 for frame in itertools.islice(container.decode(stream), 1))
    return replace(facts, pixel_aspect=1 / Fraction(aspect) if turned else Fraction(aspect))


def _rate(stream: Any) -> Fraction:
    return stream.average_rate or stream.guessed_rate or Fraction(25)


class _FileClock:
    """Times of the frames of a file in seconds from its start, as a player shows them: recordings start at any time of their clock.

    Times never go back. Where the clock does, as in recordings that were joined, they continue after the frame before; and, in
    containers whose clock may be set again (MPEG), where it jumps ahead as far as FFmpeg takes for that.
    """

    def __init__(self, container: Any, stream: Any) -> None:
        self._start = None if container.start_time is None else Fraction(container.start_time, 1_000_000)
        self._step = 1 / _rate(stream)
        self._may_jump = bool(int(container.format.flags) & _CLOCK_MAY_JUMP)
        self._last: Fraction | None = None

    def time(self, frame: Any) -> float:
        """Called with every frame, in order."""
        stamp = None if frame.pts is None or frame.time_base is None else frame.pts * frame.time_base
        if self._last is None:
            now = Fraction(0)
            if stamp is not None:
                self._start = stamp if self._start is None else min(self._start, stamp)
                now = stamp - self._start
        else:
            follows = self._last + self._step
            now = follows if stamp is None or self._start is None else stamp - self._start
            if now <= self._last or (self._may_jump and now > self._last + _CLOCK_JUMP_S):
                now = follows
                if stamp is not None:
                    self._start = stamp - now
        self._last = now
        return float(now)


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
        clock = _FileClock(container, stream)
        damaged = threading.Event()
        for index, frame in enumerate(_decoded(container, stream, damaged)):
            on_gpu = frame.format.name == "cuda"
            if gpu is not None and not count:
                gpu.count_video(on_gpu)
            count += 1
            time_s = clock.time(frame)
            if index % every:
                continue
            if on_gpu and _suits(frame):
                yield Frame(index, time_s, _planar(frame, gpu.mark() if gpu is not None else None))
            elif planar and _is_planar(frame):
                yield Frame(index, time_s, image_of(frame, planar=True))
            else:
                yield lambda index=index, time_s=time_s, frame=frame: Frame(index, time_s, image_of(frame))
        if not count:
            raise ImageError(f"'{path}' has no frame that can be decoded; it is damaged or truncated")
        if damaged.is_set():
            text = f"'{path}' is damaged or truncated: what was found in the frames near that may be wrong; copy or download it again"
            warnings.warn(DamageWarning(text), stacklevel=2)


def _decoded(container: Any, stream: Any, damaged: threading.Event) -> Iterator[Any]:
    """The frames of a stream. damaged: set where FFmpeg says that something is, which it decodes as far as it can."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            damaged.set()
        for frame in packet.decode():
            if frame.is_corrupt:
                damaged.set()
            yield frame


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
def video_writer(
    path: str | os.PathLike, *, fps: float, size: tuple[int, int], pixel_aspect: Fraction = Fraction(1)
) -> Iterator[Callable[..., None]]:
    """Write an MP4; yields a function that takes a frame, (H, W, 3) uint8 RGB of `size`, and its time in seconds.

    pixel_aspect: see `VideoFacts`.

    Frames without times follow each other at `fps`, which is otherwise the rate that the header names. The video starts with its
    first frame. An odd side loses its last row or column, because the codec needs even ones. The file appears when the block ends
    without an error.

    Raises:
        OutputError: it cannot be written. MissingPackageError: PyAV is not installed.
    """
    av = import_av("writing videos")
    height, width = (side - side % 2 for side in size)
    if min(height, width) < 2:
        raise OutputError(f"cannot write '{path}': a video needs frames of 2x2 or more; got {size}")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with writing(path) as temporary:
        try:
            with av.open(str(temporary), "w", format="mp4") as container:
                stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
                stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
                stream.codec_context.time_base = _TICK
                stream.codec_context.sample_aspect_ratio = pixel_aspect
                start_s, last, count = 0.0, -1, 0

                def write(image: NDArray[np.uint8], time_s: float | None = None) -> None:
                    nonlocal start_s, last, count
                    if image.shape[:2] != tuple(size):
                        raise OutputError(f"'{path}' has frames of {size}; got one of {image.shape[:2]}")
                    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image[:height, :width]), "rgb24")
                    time_s = count / fps if time_s is None else time_s
                    start_s = start_s if count else time_s
                    frame.pts = last = max(last + 1, round((time_s - start_s) / _TICK))
                    frame.time_base = _TICK
                    count += 1
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
            stream = stream_of(container, f"'{path}'")
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
    return av.open(str(path), container_options={"format_whitelist": ",".join(DEMUXERS)}, **choices)


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


def stream_of(container: Any, what: str) -> Any:
    """The first video stream. Raises ImageError: there is none, or FFmpeg does not know how it is coded."""
    if not container.streams.video:
        raise ImageError(f"{what} has no video stream")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise ImageError(f"{what} has a video stream of an unknown codec, or it is damaged; save it as H.264 in .mp4")
    return stream


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
        _orientation(frame),
        bool(frame.interlaced_frame),
        ready,
    )


def _rgb(frame: Any) -> NDArray[np.uint8]:
    return _upright(_download(frame) if frame.format.name == "cuda" else frame, _orientation(frame))


def _download(frame: Any) -> Any:
    """A frame of a GPU in host memory, with three planes: FFmpeg converts two planes, with U and V interleaved, differently."""
    return frame.reformat(format="yuv420p")


def _orientation(frame: Any) -> int:
    """Phones store the sensor's frame and a matrix that says how it is shown: 1 to 8, as in EXIF, the nearest for other angles."""
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return 1
    # A stored point (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d, *_ = np.frombuffer(data, np.int32).tolist()
    exchanged = abs(b) + abs(c) > abs(a) + abs(d)
    turned = (exchanged, b < 0, c < 0) if exchanged else (exchanged, d < 0, a < 0)
    return next(number for number, flips in ORIENTATIONS.items() if flips == turned)


def _upright(frame: Any, orientation: int) -> NDArray[np.uint8]:
    av = import_av("reading videos")
    if not hasattr(_thread, "reformatter"):  # one per thread: that of a frame is created for each frame
        _thread.reformatter = av.video.reformatter.VideoReformatter()
    try:
        image = _thread.reformatter.reformat(frame, format="rgb24").to_ndarray()
    except av.FFmpegError as error:
        raise ImageError(
            f"a frame in the pixel format {frame.format.name} cannot be converted to RGB: {error.strerror}"
        ) from error
    return upright(image, orientation)
