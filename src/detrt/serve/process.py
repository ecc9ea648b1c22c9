"""A child process whose messages the event loop of the front process reads and writes."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import signal
from collections.abc import Callable
from typing import Any

from ..backends.worker_process import HEAD, Bulk, Worker, lengths_format, module_command
from .child import OF_THE_GROUP

# Otherwise freed images remain in a heap per thread, and memory grows for hours.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}
_PIECE = 256 * 1024  # bytes that are copied at a time


class LoopWorker(Worker):
    """A process `python -m detrt.serve.MODULE FD`; the caller limits what is on its way.

    Raises:
        OSError: no process can be started.
    """

    _writer: asyncio.StreamWriter | None = None
    _reading: asyncio.Task[None] | None = None

    def __init__(self, module: str) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_GROUP)  # the process inherits the mask
        try:
            super().__init__(module_command(f"detrt.serve.{module}"), environment=_ENVIRONMENT)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def connect(self, on_message: Callable[[Any], None], on_exit: Callable[[], None]) -> None:
        """Read the process's messages in the running loop from now on.

        on_exit: called when the socket is closed: the process has ended, or is about to.
        """
        reader, self._writer = await asyncio.open_connection(sock=self.channel.socket)
        self.channel.write = self._writer.write
        self._reading = asyncio.create_task(self._read(reader, on_message, on_exit))

    async def disconnect(self) -> None:
        """`stop` for the event loop; `on_exit` is not called."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        if self._writer is not None:
            self._writer.close()
        await asyncio.to_thread(self.stop)

    async def _read(self, reader: asyncio.StreamReader, on_message: Callable[[Any], None], on_exit: Callable[[], None]) -> None:
        assert self._writer is not None
        try:
            while True:
                length, count = HEAD.unpack(await reader.readexactly(HEAD.size))
                lengths = lengths_format(count)
                sizes = lengths.unpack(await reader.readexactly(lengths.size))
                body = await _exactly(reader, length)
                on_message(pickle.loads(body, buffers=[await _exactly(reader, size) for size in sizes]))
        except (asyncio.IncompleteReadError, OSError):
            self._writer.close()
            on_exit()


async def _exactly(reader: asyncio.StreamReader, count: int) -> Bulk:
    """So many bytes, piece by piece. Raises asyncio.IncompleteReadError."""
    found = Bulk()
    while more := count - len(found):
        if not (piece := await reader.read(min(more, _PIECE))):
            raise asyncio.IncompleteReadError(b"", count)
        found += piece
    return found
