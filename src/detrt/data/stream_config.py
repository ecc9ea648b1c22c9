"""How live sources are read. Options are derived from it, so it loads no library."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import DetrtError

TRANSPORTS = ("tcp", "udp")


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How live sources are read.

    reconnect_s: None: without end. max_lag_s: see `live_frames`.

    Raises:
        DetrtError: out of range.
    """

    timeout_s: float = field(
        default=5.0,
        metadata={"help": "A camera is lost after so many seconds without data.", "flag": "timeout", "panel": "Cameras"},
    )
    reconnect_s: float | None = field(
        default=None,
        metadata={
            "help": "Connect to a lost camera for so many seconds; 0: not at all; default: without end.",
            "flag": "reconnect",
            "panel": "Cameras",
        },
    )
    transport: str = field(default="tcp", metadata={"help": "Of RTSP: tcp or udp.", "panel": "Cameras"})
    max_lag_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise DetrtError(f"`timeout_s` must be above 0 seconds; got {self.timeout_s:g}")
        if self.reconnect_s is not None and not self.reconnect_s >= 0:
            raise DetrtError(f"`reconnect_s` must be at least 0 seconds; got {self.reconnect_s:g}")
        if self.transport not in TRANSPORTS:
            raise DetrtError(f"`transport` must be {' or '.join(TRANSPORTS)}; got {self.transport!r}")
