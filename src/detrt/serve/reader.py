"""Parsing of request bodies: small ones at once, large ones in processes of their own, `python -m detrt.serve.reader FD`.

Threads share the interpreter, so that a large body in a thread would stop the front process for as long as it is parsed. A
reader process has a limit of memory, and is killed and replaced where it takes longer than a request may.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..backends.worker_process import MAX_DEATHS, Bulk, Channel, Failed
from ..errors import number_of
from ..spec import TensorInfo
from .child import work_for_server
from .config import ServeConfig
from .errors import Refused
from .kserve import InferRequest, parse_infer
from .messages import Alive
from .process import LoopWorker
from .request import DetectRequest, read_detect

log = logging.getLogger("detrt.serve")

# Bytes that the front process parses by itself, in a few milliseconds whatever they are. A reader costs a millisecond.
SMALL = 64 * 1024
_START_S = 60.0  # a process that cannot read by then is stuck
# At most: one that is busy with a very large body leaves another. Each takes 58 MiB, and starts when it is needed first.
_READERS = 2
# Memory of a reader beyond that of its start, and more for each byte of the largest body: a number in JSON has up to 8 times
# its size as a Python object.
_FREE_MEMORY, _MEMORY_FACTOR = 2**30, 24


@dataclass(frozen=True, slots=True)
class ReadDetect:
    """The body of POST /v1/detect. query: options of the address."""

    content_type: str
    query: tuple[tuple[str, str], ...]
    body: Bulk
    max_images: int

    def read(self) -> DetectRequest:
        return read_detect(self.content_type, self.query, self.body, self.max_images)


@dataclass(frozen=True, slots=True)
class ReadInfer:
    """The body of an inference request of the KServe protocol, for a model with these tensors, as `parse_infer` takes them."""

    body: Bulk
    header_length: int | None
    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    optional: bool = False

    def read(self) -> InferRequest:
        return parse_infer(self.body, self.header_length, self.inputs, self.outputs, optional=self.optional)


Read = TypeVar("Read", covariant=True)


class Reading(Protocol[Read]):
    """A body to read.

    Raises:
        Refused: by `read`, a body that cannot be understood.
    """

    @property
    def body(self) -> Bulk: ...

    def read(self) -> Read: ...


def main(descriptor: int) -> None:
    work_for_server(descriptor, serve_parent)


def serve_parent(channel: Channel) -> None:
    """Say `Alive`, then read bodies until the front process ends; the first message is the size of the largest one in bytes."""
    _limit_memory(channel.receive())
    channel.send(Alive())
    while True:
        asked = channel.receive()
        result: Any
        try:
            result = asked.read()
        except Refused as refusal:
            result = refusal
        except MemoryError:
            result = Refused(413, "too_large", "reading this body takes too much memory; send fewer or smaller images or tensors")
        del asked
        channel.send(result)


def _limit_memory(max_body: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such module; it has no server either
        return
    with contextlib.suppress(OSError, ValueError):  # where the system has no /proc, or a lower limit already
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = used + _FREE_MEMORY + _MEMORY_FACTOR * max_body
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class Readers:
    """The reader processes of the front process. Runs in one event loop, without locks."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        # That can read; some may have ended meanwhile. None: one ended before it could.
        self._idle: asyncio.Queue[LoopWorker | None] = asyncio.Queue()
        self._all: set[LoopWorker] = set()
        self._starting: set[LoopWorker] = set()
        self._waiting: dict[LoopWorker, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wanting = 0  # bodies for which no process is free

    async def read(self, asked: Reading[Read]) -> Read:
        """What the body says; within the time limit of a request.

        Raises:
            Refused: a body that cannot be understood; no answer in time (504); no reader process (503).
        """
        if len(asked.body) <= SMALL:
            return asked.read()
        limit = self._config.timeout_s
        try:
            return await asyncio.wait_for(self._in_process(asked), limit)
        except asyncio.TimeoutError:
            raise Refused(504, "deadline", f"the body could not be read within {limit:g} s; send a smaller one") from None

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(reader.disconnect() for reader in self._all))

    async def _in_process(self, asked: Reading[Read]) -> Read:
        begun = 0  # how many of the processes read it when they ended
        for _ in range(MAX_DEATHS):
            if (reader := await self._free()) is None:
                continue
            begun += 1
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._waiting[reader] = future
            try:
                reader.send(asked)
                found = await future
            except BaseException:  # nobody waits any more
                reader.kill()
                raise
            finally:
                self._waiting.pop(reader, None)
            if isinstance(found, Failed):
                raise RuntimeError(f"a reader failed:\n{found.trace or found.error}")
            if found is not None:
                self._idle.put_nowait(reader)
                if isinstance(found, Refused):
                    raise found
                result: Read = found
                return result
        if begun == MAX_DEATHS:
            raise Refused(
                503,
                "reader_died",
                f"{number_of(begun, 'process')} ended while they read this body; check it, and the log",
                retry_after=1,
            )
        text = f"of {MAX_DEATHS} processes that were to read this body {MAX_DEATHS - begun} ended before they could; see the log, and try again"
        raise Refused(503, "no_reader", text, retry_after=1)

    async def _free(self) -> LoopWorker | None:
        """A process that can read, however long it takes to start; None: one ended before it could. Raises Refused: none can be started."""
        while True:
            reader = await self._next() if self._idle.empty() else self._idle.get_nowait()
            # One that has ended in idleness has not ended because of this body.
            if reader is None or (reader in self._all and reader.process.poll() is None):
                return reader

    async def _next(self) -> LoopWorker | None:
        """The next process that is free, or None, where none is now. Raises Refused: none can be started."""
        self._wanting += 1
        try:
            try:
                await self._fill()
            except OSError as error:
                if not self._all:
                    text = f"no process can be started to read the body ({error})"
                    raise Refused(503, "no_reader", text, retry_after=1) from None
            return await self._idle.get()
        finally:
            self._wanting -= 1

    async def _fill(self) -> None:
        """Start what is missing: one process, and one for each body that waits, as far as they may be. Raises OSError."""
        while not self._all or (len(self._starting) < self._wanting and len(self._all) < _READERS):
            reader = LoopWorker("reader")
            self._all.add(reader)
            self._starting.add(reader)
            reader.send(self._config.max_body)
            await reader.connect(partial(self._on_message, reader), partial(self._on_exit, reader))
            asyncio.get_running_loop().call_later(_START_S, self._check_started, reader)

    def _check_started(self, reader: LoopWorker) -> None:
        if reader in self._starting:
            reader.kill()

    def _on_message(self, reader: LoopWorker, message: Any) -> None:
        if isinstance(message, Alive):
            self._starting.discard(reader)
            self._idle.put_nowait(reader)
        elif (future := self._waiting.get(reader)) is not None and not future.done():
            future.set_result(message)

    def _on_exit(self, reader: LoopWorker) -> None:
        doing = "started" if reader in self._starting else "read a body" if reader in self._waiting else "waited"
        self._on_message(reader, None)
        self._all.discard(reader)
        if reader in self._starting:
            self._starting.discard(reader)
            self._idle.put_nowait(None)
        task = asyncio.get_running_loop().create_task(self._bury(reader, doing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury(self, reader: LoopWorker, doing: str) -> None:
        """Wait for the end of a process whose socket is closed, and say what it did."""
        code = await asyncio.to_thread(reader.exit_code)
        await asyncio.to_thread(reader.stop)
        # One that was killed at a deadline, or with its client, has nothing to read any more.
        log.warning("a process for the bodies of requests is gone (exit code %s) while it %s", code, doing)


if __name__ == "__main__":
    main(int(sys.argv[1]))
