"""Live sources: network streams, capture devices, and files that are read at their own speed."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ..errors import ImageError, MissingPackageError
from ..system import usable_cores
from .addresses import without_secrets
from .images import IMAGE_SUFFIXES, MAX_PIXELS, VIDEO_SUFFIXES
from .raw_image import LoadedImage
from .video import CPU_THREADS, DEMUXERS, image_of, import_av, open_video, stream_of

_SCHEMES = ("rtsp", "rtsps", "rtmp", "rtmps", "srt", "udp", "tcp", "rtp", "http", "https")
# What FFmpeg may read a network source as, and how it may get there, also where a playlist names further addresses: no list of files (concat),
# no description of other hosts (sdp, dash), no file of this machine.
_NETWORK_DEMUXERS = (
    *DEMUXERS,
    "rtsp",
    "rtp",
    "hls",
    "live_flv",
    "mpjpeg",
    "mjpeg",
    "jpeg_pipe",
    "h264",
    "hevc",
    "vvc",
    "obu",
    "ivf",
    "nut",
)
_PROTOCOLS = ("rtp", "srtp", "udp", "udplite", "tcp", "tls", "http", "https", "httpproxy", "srt", "crypto", "data")
_PROTOCOLS += ("rtmp", "rtmps", "rtmpt", "rtmpts", "rtmpe", "ffrtmpcrypt", "ffrtmphttp")
_CONTROL = re.compile(r"[\x00-\x20\x7f]")
_DEVICE = re.compile(r"/dev/video\d+")
# USER:PA/SS@HOST and USER:1/2@HOST:PORT: what is before the first slash is neither a host and port nor all of a password
_SPLIT_PASSWORD = re.compile(r"(?!\[)[^/?#@]*:(?:(?!\d*[/?#])[^/?#@]*[/?#].*@|\d*[/?#].*@[^/@]+:\d+(?:/|$))")
# A clock that a camera runs faster or slower by, and a jump of its time stamps that is no delay.
_CLOCK_DRIFT, _JUMP_S = 1e-3, 10.0
_MOST_REORDERED = 64  # packets whose frames are still to come; more have none


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A camera, a network stream, or a file that is read like one.

    address: what is opened; it may hold a password. kind: "network", "device" or "file".
    """

    address: str
    kind: str

    @property
    def path(self) -> str:
        """The address without a password, for outputs and messages."""
        return without_secrets(self.address)

    @property
    def name(self) -> str:
        """As `Input.name`."""
        return self.path


@dataclass(frozen=True, slots=True)
class LiveFrame:
    """A frame that has arrived.

    arrived_s: when it could have been read, on the clock of `time.monotonic`. time_s: its time stamp in seconds, which starts
    anywhere; None: it has none. convert: returns the image, or raises ImageError; None: it was not decoded, because newer ones
    had arrived or it is `damaged`.
    """

    arrived_s: float
    time_s: float | None = None
    convert: Callable[[], LoadedImage] | None = None
    damaged: bool = False


def live_source(name: str, *, files: bool = False) -> LiveSource | None:
    """What an input names, if it is live; None for other inputs.

    files: whether a file is.

    Raises:
        ImageError: files, and there is no such file; a password that ends the host of an address, or a space or control character in it.
    """
    scheme, colon, rest = name.partition("://")
    if colon and scheme.lower() in _SCHEMES:
        if found := _CONTROL.search(name):
            raise ImageError(
                f"the address {without_secrets(name)!r} has the character {found[0]!r}; write it as {quote(found[0])}, or leave it out"
            )
        if _SPLIT_PASSWORD.match(rest):
            raise ImageError(
                f"the user name or password in {scheme}://...@{rest.rpartition('@')[2]} has '/', '?' or '#', which end the host of an "
                "address; write them as %2F, %3F and %23"
            )
        suffix = Path(re.split(r"[?#]", rest)[0]).suffix.lower()
        is_file = scheme.lower() in ("http", "https") and suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES
        return None if is_file else LiveSource(name, "network")
    if _DEVICE.fullmatch(name):
        return LiveSource(name, "device")
    if not files:
        return None
    if not Path(name).is_file():
        raise ImageError(f"there is no video file '{name}' to read as a camera; check the path")
    return LiveSource(name, "file")


def live_frames(
    source: LiveSource, *, timeout_s: float, transport: str = "tcp", max_lag_s: float = 1.0, planar: bool = False
) -> Iterator[LiveFrame]:
    """The frames of a source as they arrive. Ends where the source ends.

    Args:
        source: is opened.
        timeout_s: longest time without data.
        transport: of RTSP, one of `stream_config.TRANSPORTS`.
        max_lag_s: a decoder that is later than this goes on with the next key frame.
        planar: leave frames in 4:2:0, see `raw_frames`.

    Raises:
        ImageError: it cannot be reached or read, or sends nothing for `timeout_s`.
        MissingPackageError: PyAV is not installed, or nothing that reads devices.
    """
    if source.kind == "device" and "v4l2" not in import_av("reading cameras").formats_available:
        yield from _opencv_frames(source)
        return
    with _open(source, timeout_s, transport) as (av, container, stream):
        context = stream.codec_context
        # Threads for frames would hold back as many frames as there are threads.
        context.thread_type, context.thread_count = "SLICE", min(CPU_THREADS, usable_cores())
        context.flags |= av.codec.context.Flags.low_delay
        started, lag = time.monotonic(), _Lag()
        start: float | None = None  # the first time stamp; recordings begin at any
        skipping: tuple[float, float] | None = None  # when it began, and the lag of that moment
        arrived: dict[int | None, float] = {}  # by time stamp: frames may leave the decoder in another order
        for packet in container.demux(stream):
            stamp = _seconds(packet.pts if packet.dts is None else packet.dts, packet.time_base)
            if source.kind == "file" and stamp is not None:
                start = stamp if start is None else start
                time.sleep(max(0.0, started + stamp - start - time.monotonic()))
            now = time.monotonic()
            late = lag.after(now, stamp)
            if packet.size:
                if skipping is not None and packet.is_keyframe:
                    late = lag.after_skipping(*skipping)
                    if late <= max_lag_s:
                        skipping = None
                        arrived.clear()
                        context.flush_buffers()
                elif skipping is None and late > max_lag_s:
                    skipping = now, late
                if skipping is not None:
                    yield LiveFrame(now - late)
                    continue
                arrived[packet.pts] = now - late
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                yield LiveFrame(now - late, damaged=True)
                continue
            for frame in frames:
                _check_size(source, frame)
                came = arrived.pop(frame.pts, now - late)
                yield LiveFrame(came, frame.time, lambda frame=frame: image_of(frame, planar=planar))
            if len(arrived) > _MOST_REORDERED:
                arrived.clear()


def _check_size(source: LiveSource, frame: Any) -> None:
    if frame.width * frame.height > MAX_PIXELS:
        raise ImageError(f"'{source.path}' has frames of {frame.width}x{frame.height}; allowed are {MAX_PIXELS} pixels")


class _Lag:
    """How late packets are read: time since their time stamp, compared with the packet that was read the soonest."""

    def __init__(self) -> None:
        self._soonest = self._before = self._now = 0.0
        self._drift = _CLOCK_DRIFT
        self._started = False

    def after(self, now: float, stamp: float | None) -> float:
        """Seconds that a packet is late, which is read at `now`; 0 for one without a time stamp."""
        if stamp is None:
            return 0.0
        if not self._started or not 0 <= stamp - self._before <= _JUMP_S:
            self._started, self._soonest = True, now - stamp
        else:
            self._soonest = min(self._soonest + (now - self._now) * self._drift, now - stamp)
        self._before, self._now = stamp, now
        return now - stamp - self._soonest

    def after_skipping(self, since: float, before: float) -> float:
        """The lag of the last packet, after packets were read but not decoded `since` a time when it was `before`.

        Packets that waited are read much faster than they came. If the lag did not shrink so, nothing waited: the stream paused, or
        its time stamps are slower than the clock. It is then zero, and follows the speed of the time stamps.
        """
        late, seconds = self._now - self._before - self._soonest, self._now - since
        if seconds <= 0 or before - late > seconds / 2:
            return late
        self._drift += max(0.0, late - before) / seconds
        self._soonest = self._now - self._before
        return 0.0


def _seconds(stamp: int | None, base: Any) -> float | None:
    return None if stamp is None or base is None else float(stamp * base)


@contextlib.contextmanager
def _open(source: LiveSource, timeout_s: float, transport: str) -> Iterator[tuple]:
    """PyAV, container and first video stream; errors of PyAV inside the block become ImageError."""
    av = import_av(f"reading the camera '{source.path}'")
    if source.kind == "file":
        with open_video(Path(source.address)) as (container, stream):
            yield av, container, stream
        return
    allowed = {"format_whitelist": ",".join(_NETWORK_DEMUXERS), "protocol_whitelist": ",".join(_PROTOCOLS)}
    options = {"flags": "low_delay", "analyzeduration": "1000000", "fpsprobesize": "0"}
    if source.address.lower().startswith("rtsp"):
        options["rtsp_transport"] = transport
    opened = False
    try:
        with av.open(
            source.address,
            format="v4l2" if source.kind == "device" else None,
            options=options,
            container_options=allowed if source.kind == "network" else {},
            timeout=(timeout_s, timeout_s),
        ) as container:
            opened = True
            yield av, container, stream_of(container, f"'{source.path}'")
    except (av.error.HTTPUnauthorizedError, av.error.HTTPForbiddenError):
        raise ImageError(_REFUSED.format(source.path)) from None
    except av.FFmpegError as error:
        if isinstance(error, av.error.ExitError):  # the timeout of PyAV
            what = f"sent nothing for {timeout_s:g} s" if opened else f"did not answer in {timeout_s:g} s"
        else:
            what = f"was lost ({error.strerror})" if opened else f"cannot be opened ({error.strerror})"
        raise ImageError(f"'{source.path}' {what}; check the address, and that the camera is on") from None


def _opencv_frames(source: LiveSource) -> Iterator[LiveFrame]:
    """Frames of a capture device through OpenCV: PyAV's wheels come without Video4Linux."""
    if not Path(source.address).exists():
        raise ImageError(f"there is no camera '{source.path}'; `ls /dev/video*` lists those of this machine")
    try:
        import cv2
    except ImportError:
        raise MissingPackageError("opencv-python-headless", "", f"reading the camera '{source.path}'") from None
    capture = cv2.VideoCapture(source.address)
    try:
        if not capture.isOpened():
            raise ImageError(f"'{source.path}' cannot be opened as a camera; another program may use it, or you may not read it")
        while True:
            there, bgr = capture.read()
            now = time.monotonic()
            if not there:
                raise ImageError(f"'{source.path}' was lost; check that the camera is connected")
            yield LiveFrame(now, None, lambda bgr=bgr: np.ascontiguousarray(bgr[..., ::-1]))
    finally:
        capture.release()


_REFUSED = "'{}' refused the user name or password; write them into the address: rtsp://USER:PASSWORD@HOST/..."
