"""Worker processes: one protocol for device workers, server workers, builders and measurements.

A worker is started as `COMMAND... FD`, where FD is its end of a socket pair. Both ends send pickled objects. Their large buffers
(arrays, `Bulk`) follow the pickle, so that they are copied piece by piece: an event loop stands still while a copy of many MiB is
made. The first message is the request of the parent; a worker that cannot continue sends `Failed` and ends. When either side ends,
its socket closes, which the other side reads as the end of the messages.

Pickle is safe here, because only parent and child can write to a socket pair.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ..errors import DetrtError, SessionError, missing_package
from ..system import lose_unwritten_messages

HEAD = struct.Struct("<QI")  # bytes of the pickle, and the number of its buffers, whose lengths follow
_SMALL = 64 * 1024  # bytes of a buffer that stays in the pickle
_EXIT_SECONDS = 10.0
# A task that was lost with this many workers is not tried again.
MAX_DEATHS = 2


@dataclass(frozen=True, slots=True)
class Failed:
    """Last message of a worker that cannot continue.

    error: a DetrtError or an OSError as it was raised; trace: the traceback where the error is a bug instead.
    """

    error: Exception
    trace: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """The message for an error that was raised; only those of the user and the system travel as they are."""
        if isinstance(error, ModuleNotFoundError):
            error = missing_package(error, "this") or error
        if isinstance(error, (DetrtError, OSError)):
            return cls(error)
        return cls(RuntimeError(f"{type(error).__name__}: {error}"), "".join(traceback.format_exception(error)))

    def exception(self) -> Exception:
        """What the parent raises."""
        return WorkerBug(self) if self.trace else self.error


class ParentGone(Exception):
    """The other end of the socket is closed."""


class WorkerBug(RuntimeError):
    """A worker raised what is none of the user's errors. summary: type and message of it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"a worker process failed:\n{failed.trace}")
        self.summary = str(failed.error)


class HasDeaths(Protocol):
    """Work that counts the workers which ended while they held it."""

    deaths: int


Work = TypeVar("Work", bound=HasDeaths)


def after_death(held: Iterable[Work]) -> tuple[list[Work], list[Work]]:
    """Sort the work that a worker died with.

    Returns:
        What is to be run again, and what `MAX_DEATHS` workers have ended with.
    """
    again: list[Work] = []
    given_up: list[Work] = []
    for work in held:
        work.deaths += 1
        (given_up if work.deaths >= MAX_DEATHS else again).append(work)
    return again, given_up


class Bulk(bytearray):
    """Bytes that go beside the pickle of a message where they are large, and are never copied as a whole on their way."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_bulk, (pickle.PickleBuffer(self),))


def _bulk(buffer: Any) -> Bulk:
    return buffer if isinstance(buffer, Bulk) else Bulk(buffer)


def packed(message: Any) -> Iterator[memoryview]:
    """The bytes of a message, in parts."""
    buffers: list[memoryview] = []

    def beside(buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer stays in the pickle."""
        view = buffer.raw()
        if view.nbytes > _SMALL:
            buffers.append(view)
        return view.nbytes <= _SMALL

    body = pickle.dumps(message, protocol=5, buffer_callback=beside)
    yield memoryview(HEAD.pack(len(body), len(buffers)) + lengths_format(len(buffers)).pack(*map(len, buffers)) + body)
    yield from buffers


def lengths_format(count: int) -> struct.Struct:
    """Of the lengths of so many buffers."""
    return struct.Struct(f"<{count}Q")


class Channel:
    """One end of the socket pair, with messages that block.

    write: takes a part of a message; another than the socket's does not block, and keeps it until it is written.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.write: Callable[[memoryview], Any] = sock.sendall

    def send(self, message: Any) -> None:
        for part in packed(message):
            self.write(part)

    def receive(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is closed.
        """
        length, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = lengths_format(count)
        sizes = lengths.unpack(self._exactly(lengths.size))
        body = self._exactly(length)
        return pickle.loads(body, buffers=[self._exactly(size) for size in sizes])

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, count: int) -> Bulk:
        buffer = Bulk(count)
        view = memoryview(buffer)
        while view:
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return buffer


# What `python -m` does, but for the current folder in the search of modules: a json.py there would be run in place of Python's own.
_RUN = (
    "import sys; sys.path = [path for path in sys.path if path]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(module: str) -> tuple[str, ...]:
    """The command that runs a module of this environment; arguments are appended."""
    return (sys.executable, "-c", _RUN, module)


class Worker:
    """A worker process as its parent sees it.

    Args:
        command: program and arguments, e.g. `module_command("detrt.jobs.worker")`; the descriptor is appended.
        environment: variables to add.
        popen: further arguments of `subprocess.Popen`.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, **popen: Any) -> None:
        if sys.platform == "win32":
            raise SessionError(
                "this needs a worker process with an inherited socket, which Windows does not have; run it in WSL 2, or detect in this "
                "process with ONNX Runtime or OpenVINO (docs/guide/windows.md)"
            )
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": _python_path(), **(environment or {})},
                    **popen,
                )
        except BaseException:
            ours.close()
            raise
        self.channel = Channel(ours)

    def send(self, message: Any) -> None:
        """Send a message; one to a process that has ended is lost, which `receive` then says."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def receive(self) -> Any:
        """The next message, or None where the process has ended.

        Raises:
            DetrtError, OSError: what the worker raised. WorkerBug: any other error in the worker, with its traceback.
        """
        try:
            message = self.channel.receive()
        except (EOFError, OSError):
            return None
        if isinstance(message, Failed):
            raise message.exception()
        return message

    def ending(self) -> str:
        """How the process ended: "was killed by SIGKILL", "ended with exit code 1", "closed its connection"."""
        code = self.exit_code(_EXIT_SECONDS)
        return "closed its connection" if code is None else how_ended(code)

    def exit_code(self, wait_s: float = 0.2) -> int | None:
        """Exit code of a process whose socket is closed; None where it still runs after `wait_s` seconds."""
        try:
            return self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(OSError):
            self.process.kill()

    def stop(self, until: float | None = None) -> None:
        """Close the socket, which ends the worker, and wait for it; terminate, then kill it where it stays.

        until: `time.monotonic()` seconds to wait for it; None: ten seconds from now.
        """
        until = time.monotonic() + _EXIT_SECONDS if until is None else until
        self.channel.close()
        for end in (None, self.process.terminate, self.process.kill):
            if end is not None:
                end()
            try:
                self.process.wait(max(0.1, until - time.monotonic()))
                return
            except subprocess.TimeoutExpired:
                continue


def work_for_parent(
    descriptor: int,
    work: Callable[[Channel], None],
    *,
    ignored: Sequence[int] = (signal.SIGINT,),
    parent_gone: Callable[[], None] = lambda: time.sleep(_EXIT_SECONDS),
) -> None:
    """In the worker: call `work(channel)`, which receives the request first, and tell the parent what it raises.

    ignored: signals that reach the whole process group and that the parent deals with, by closing the socket.
    parent_gone: called in a thread when the parent has gone; where the process still runs then, such as in a model that never ends, it is
    ended.
    """
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the parent's results
    lose_unwritten_messages()
    sys.stdout = sys.stderr
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_parent, args=(os.dup(descriptor), parent_gone), name="detrt-parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        work(channel)
    except (EOFError, BrokenPipeError, ConnectionResetError, ParentGone):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(Failed.of(error))


def _end_with_parent(connection: int, parent_gone: Callable[[], None]) -> None:
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(connection, 0)  # that the other end is closed is told always
        poll.poll()
        parent_gone()
        os._exit(1)


def answer_ahead(
    channel: Channel,
    prepare: Callable[[Any], Any],
    answer: Callable[[Any, Any], Any],
    parent_gone: Callable[[], None],
    noted: Callable[[Any], bool] = lambda message: False,
) -> None:
    """In the worker: send `answer(task, prepare(task))` for each task, `prepare` being called in a thread as soon as it arrives.

    So images of a task are decoded while an earlier one runs. The parent limits how many tasks it sends ahead; a task None is
    the last one. `parent_gone` is called in that thread when the parent's socket closes. `noted` is given each message there first, and
    says whether that was all: a message which is no task.

    Raises:
        ParentGone: after that call. Exception: what `prepare` or `answer` raised.
    """
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while (task := channel.receive()) is not None:
                if not noted(task):
                    waiting.put((task, prepare(task)))
            waiting.put(None)
        except (EOFError, OSError):
            parent_gone()
            waiting.put(ParentGone())
        except Exception as error:
            waiting.put(error)

    threading.Thread(target=read, name="detrt-receive", daemon=True).start()
    while (item := waiting.get()) is not None:
        if isinstance(item, Exception):
            raise item
        channel.send(answer(*item))


def how_ended(code: int) -> str:
    """An exit code of `subprocess` as text."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _python_path() -> str:
    """PYTHONPATH with which a worker finds the detrt that is running here."""
    package_parent = str(Path(__file__).resolve().parents[2])
    paths = [package_parent, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(os.path.abspath(path) for path in paths)
