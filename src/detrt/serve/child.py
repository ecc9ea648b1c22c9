"""The other end of a `LoopWorker`: what every process of the server does first. Without asyncio, which no worker needs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from pathlib import Path

from ..backends.worker_process import Channel, work_for_parent

_FIRST_VICTIM = "500"  # of 1000
# Signals that reach the whole group, from a terminal, `timeout` or `systemctl kill`. The server process drains or loads the models
# again, and needs its processes meanwhile, also those that it has just started.
OF_THE_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def work_for_server(descriptor: int, work: Callable[[Channel], None]) -> None:
    """In the process: `work(channel)`, until the server process closes the socket, whatever signals the group gets."""
    _be_first_victim()
    for number in OF_THE_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_GROUP)  # for the processes that this one starts
    work_for_parent(descriptor, work, ignored=())


def _be_first_victim() -> None:
    """In a child: let the system end this process before the front process where memory runs out; children are replaced."""
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
