"""Several live sources at once: each is read in a thread that holds its newest frame, and connects again where it was lost."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import ImageError
from .live import LiveFrame, LiveSource, live_frames
from .raw_image import LoadedImage
from .stream_config import StreamConfig

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0  # before connecting again: doubled after each attempt
_FIRST_FRAME_S = 30.0  # cameras send a key frame every few seconds
_LATENCIES = 1000  # that percentiles are of
_STOP_CHECK_S = 0.2


@dataclass(slots=True)
class StreamCounts:
    """Counts of one source. Every received frame is processed, dropped or damaged, or is the newest one that waits.

    received: frames that arrived. processed: detected in. dropped: a newer one arrived first. damaged: could not be decoded.
    connections: 1, and one more for each time that it was lost and came back. latencies_s: of the last frames, from arrival to
    result.
    """

    received: int = 0
    processed: int = 0
    dropped: int = 0
    damaged: int = 0
    connections: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))


@dataclass(frozen=True, slots=True)
class StreamFrame:
    """The newest frame of a source.

    index: of the frame, from 0, counting those that were dropped. time_s: seconds since the first frame of the source, by its
    time stamps. arrived_s: on the clock of `time.monotonic`; wall_time: the same as seconds since 1970.
    """

    source: LiveSource
    index: int
    time_s: float
    arrived_s: float
    wall_time: float
    image: LoadedImage


class LiveStreams:
    """Reads live sources; use it as a context manager, which connects to all of them.

    Args:
        sources: are read.
        config: how.
        planar: leave frames in 4:2:0, see `raw_frames`.

    Raises:
        ImageError: on entering, a source that cannot be reached or read, or none.
        MissingPackageError: on entering, see `live_frames`.
    """

    def __init__(self, sources: Sequence[LiveSource], config: StreamConfig | None = None, *, planar: bool = False) -> None:
        if not sources:
            raise ImageError("no live sources: give addresses of cameras")
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._lost: deque[tuple[LiveSource, BaseException]] = deque()
        self._readers = [
            _Reader(source, config or StreamConfig(), planar, self._changed, self._stop, self._lost) for source in sources
        ]
        self.counts: dict[LiveSource, StreamCounts] = {reader.source: reader.counts for reader in self._readers}

    def snapshot(self) -> dict[LiveSource, StreamCounts]:
        """The counts of one moment, from any thread."""
        with self._changed:
            return {source: replace(one, latencies_s=one.latencies_s.copy()) for source, one in self.counts.items()}

    def next_frames(self, most: int) -> list[StreamFrame]:
        """Wait for new frames; the newest of up to `most` sources, those first that have waited longest. [] if a source was lost
        meanwhile, or if no more will come: see `lost` and `ended`."""
        with self._changed:
            # `stop` wakes nobody: a signal handler may have interrupted the holder of the lock.
            while not self._changed.wait_for(self._is_new, _STOP_CHECK_S):
                pass
            waiting = [reader for reader in self._readers if reader.newest is not None][:most]
            taken = [(reader, reader.take()) for reader in waiting]
            # The others come first next time.
            self._readers = sorted(self._readers, key=lambda reader: reader in waiting)
        return [frame for reader, one in taken if (frame := reader.load(*one)) is not None]

    def _is_new(self) -> bool:
        return bool(self._lost) or self.ended or any(reader.newest for reader in self._readers)

    def lost(self) -> tuple[LiveSource, ImageError] | None:
        """A source that was given up since the last call, and why. Raises what is no fault of the source."""
        if not self._lost:
            return None
        source, error = self._lost.popleft()
        if not isinstance(error, ImageError):
            raise error
        return source, error

    @property
    def ended(self) -> bool:
        """Whether no more frames will come."""
        return self._stop.is_set() or not any(reader.alive or reader.newest for reader in self._readers)

    def done(self, frame: StreamFrame) -> float:
        """Count a frame as processed; its latency in seconds."""
        counts, latency = self.counts[frame.source], time.monotonic() - frame.arrived_s
        counts.processed += 1
        counts.latencies_s.append(latency)
        return latency

    def stop(self) -> None:
        """Let `next_frames` return; from any thread or signal handler."""
        self._stop.set()

    def __enter__(self) -> LiveStreams:
        for reader in self._readers:
            reader.start()
        try:
            for reader in self._readers:
                reader.wait_connected()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for reader in self._readers:
            reader.join()


class _Reader:
    """The thread of one source. `newest` and counts are changed under the lock of `changed`."""

    def __init__(
        self,
        source: LiveSource,
        config: StreamConfig,
        planar: bool,
        changed: threading.Condition,
        stop: threading.Event,
        lost: deque[tuple[LiveSource, BaseException]],
    ) -> None:
        self.source, self.counts = source, StreamCounts()
        self.newest: tuple[int, float, LiveFrame] | None = None
        self.alive = True
        self._config, self._planar, self._changed, self._stop, self._lost = config, planar, changed, stop, lost
        self._error: BaseException | None = None
        self._clock = _StreamClock()
        self._thread = threading.Thread(target=self._run, name="detrt-stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def wait_connected(self) -> None:
        """Until the first frame. Raises what prevents it."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self.counts.connections or not self.alive, self._config.timeout_s + _FIRST_FRAME_S
            )
        if self._error is not None and not self.counts.connections:
            raise self._error
        if not there:
            raise ImageError(
                f"'{self.source.path}' sent no frame that can be decoded in {_FIRST_FRAME_S:g} s; check its settings"
            )

    def take(self) -> tuple[int, float, LiveFrame]:
        assert self.newest is not None
        one, self.newest = self.newest, None
        return one

    def load(self, index: int, time_s: float, frame: LiveFrame) -> StreamFrame | None:
        """The frame as an image; None if it is damaged."""
        assert frame.convert is not None
        try:
            image = frame.convert()
        except ImageError:
            with self._changed:
                self.counts.damaged += 1
            return None
        wall_time = time.time() - (time.monotonic() - frame.arrived_s)
        return StreamFrame(self.source, index, time_s, frame.arrived_s, wall_time, image)

    def _run(self) -> None:
        """Read until the source ends, is given up or is stopped."""
        wait_s, lost_at = _FIRST_WAIT_S, 0.0
        try:
            while not self._stop.is_set():
                before = self.counts.received
                try:
                    self._read()
                    error = ImageError(f"'{self.source.path}' has ended")
                    if self.source.kind == "file":
                        if not self.counts.connections:
                            raise ImageError(f"'{self.source.path}' has no frame that can be decoded; it is damaged or truncated")
                        return
                except ImageError as one:
                    error = one
                    if not self.counts.connections or self.source.kind == "file":
                        raise
                if self.counts.received > before or not lost_at:
                    wait_s, lost_at = _FIRST_WAIT_S, time.monotonic()
                outage_s = time.monotonic() - lost_at + wait_s
                if self._config.reconnect_s is not None and outage_s > self._config.reconnect_s:
                    raise error
                self._stop.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except BaseException as error:  # raised again in the consumer
            self._error = error
            if self.counts.connections:
                self._lost.append((self.source, error))
        finally:
            with self._changed:
                self.alive = False
                self._changed.notify_all()

    def _read(self) -> None:
        """Read until the connection ends."""
        config, connected = self._config, False
        frames = live_frames(
            self.source,
            timeout_s=config.timeout_s,
            transport=config.transport,
            max_lag_s=config.max_lag_s,
            planar=self._planar,
        )
        for frame in frames:
            if self._stop.is_set():
                return
            with self._changed:
                index, counts = self.counts.received, self.counts
                counts.received += 1
                if frame.convert is None:
                    counts.damaged += frame.damaged
                    counts.dropped += not frame.damaged
                    continue
                if not connected:
                    connected = True
                    counts.connections += 1
                    self._clock.connect()
                if self.newest is not None:
                    counts.dropped += 1
                self.newest = (index, self._clock.seconds(frame), frame)
                self._changed.notify_all()


class _StreamClock:
    """Seconds since the first frame of a source: by time stamps, and across connections by their arrival."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._base: float | None = None
        self._last = 0.0

    def connect(self) -> None:
        self._base = None

    def seconds(self, frame: LiveFrame) -> float:
        if self._started is None:
            self._started = frame.arrived_s
        by_arrival = frame.arrived_s - self._started
        if frame.time_s is None:
            found = by_arrival
        else:
            if self._base is None or frame.time_s + self._base < self._last:
                self._base = max(by_arrival, self._last) - frame.time_s
            found = frame.time_s + self._base
        self._last = max(self._last, found)
        return self._last
