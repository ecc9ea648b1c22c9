"""One worker process seen from the front: starting it, talking to it, noticing its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from . import messages as wire
from .batcher import Item
from .messages import Setup

# Freed images would otherwise stay in a heap for each thread; memory then grows for hours.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}


class WorkerProcess:
    """running: batch number -> (its items, when it was sent). state: "starting", "ready" or "gone".

    tries_again: what it runs died with another worker, so it is given nothing else meanwhile.
    """

    def __init__(self, index: int, setup: Setup) -> None:
        self.index, self.setup = index, setup
        self.state, self.tries_again = "starting", False
        self.running: dict[int, tuple[list[Item], float]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, on_message: Callable[[WorkerProcess, Any], None], on_exit: Callable[[WorkerProcess], None]) -> None:
        """Start the process; it answers with Ready or Failed when its models are open.

        Raises:
            OSError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        try:
            os.set_inheritable(theirs.fileno(), True)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "detrt.serve.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
            reader, self._writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.send(self.setup)
        self._reading = asyncio.create_task(self._read(reader, on_message, on_exit))

    def send(self, message: Any) -> None:
        """Hand a message over without waiting; at most two batches are on the way, so little is buffered."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(wire.packed(message))

    async def _read(
        self,
        reader: asyncio.StreamReader,
        on_message: Callable[[WorkerProcess, Any], None],
        on_exit: Callable[[WorkerProcess], None],
    ) -> None:
        try:
            while True:
                length = wire.length_of(await reader.readexactly(wire.HEAD_SIZE))
                on_message(self, wire.unpacked(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the worker has gone, which `on_exit` deals with
        finally:
            self.state = "gone"
            self._close()
            on_exit(self)

    def kill(self) -> None:
        """End it at once; its socket then closes, and `on_exit` is called."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.process.kill()

    def exit_code(self) -> int | None:
        """Of a process that has gone; waits a moment for it, as its socket closes first."""
        if self.process is None:
            return None
        try:
            return self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    async def stop(self) -> None:
        """Close the socket, which ends the worker, and see that it went."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        self._close()
        if self.process is not None:
            try:
                await asyncio.to_thread(self.process.wait, 5)
            except subprocess.TimeoutExpired:
                self.kill()
                await asyncio.to_thread(self.process.wait)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
