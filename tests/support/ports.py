"""Ports for programs that cannot be given port 0, or do not say which one they took."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the first and the last port that Linux gives to those who ask for any


def free_port() -> int:
    """A port of this machine that nobody has, and that nobody gets who asks for port 0 or connects, until a program binds it."""
    first = int(_GIVEN.read_text().split()[0]) if _GIVEN.is_file() else 32768
    for port in random.SystemRandom().sample(range(max(1024, first // 2), first), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError("of a hundred ports none is free")
