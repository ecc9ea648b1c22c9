"""A long task in a child process, over the protocol of `worker_process`.

A crash, a signal or a time limit ends that process, and raises an error with the reason in the caller.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .. import files
from ..errors import DetrtError, EngineError
from ..system import Progress
from .worker_process import Channel, Worker, WorkerBug, how_ended, work_for_parent

# died(exit code, last lines of output) -> message
Died = Callable[[int, str], str]

_POLL_SECONDS = 0.05
_LOG_TAIL_BYTES = 4000
_PROGRESS_SECONDS = 0.1
_EXIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Step:
    fraction: float
    text: str


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any


def run_child(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    what: str,
    timeout_seconds: float | None = None,
    quicker: str = "a smaller size or batch",
    progress: Progress | None = None,
    environment: Callable[[Path], Mapping[str, str]] | None = None,
    died: Died | None = None,
    error: type[DetrtError] = EngineError,
    cwd: Path | None = None,
) -> Any:
    """Run the work behind `command` in a process, and return its answer. The process never outlives this call.

    Args:
        command: starts a process that calls `answer_parent`.
        request: what that process gets.
        what: name of the process in messages.
        timeout_seconds: None: any time. quicker: what would take less.
        progress: called from this thread.
        environment: empty folder of the process -> variables to add.
        died: words the end of a process that gave no answer.
        error: class of what is raised for the process itself.
        cwd: its working folder; None: an empty one, so that a json.py of the caller's does not shadow the library's. Paths in
            the request must then be absolute. Its temporary files are in that empty folder in any case.

    Raises:
        DetrtError: no answer, a bug in the process, or the time limit; else, like OSError, what the work raised.
    """
    with files.scratch() as folder:
        log = folder / "log.txt"
        with open(log, "wb") as log_file:
            worker = Worker(
                command,
                environment={"TMPDIR": str(folder), **(environment(folder) if environment else {})},
                stdout=log_file,
                stderr=subprocess.STDOUT,
                cwd=cwd or folder,
                # Ctrl-C in a terminal reaches this process, which then ends the child itself.
                start_new_session=True,
            )
        try:
            worker.send(request)
            answer = _answer(worker, timeout_seconds, progress)
        except WorkerBug as bug:
            raise error(f"the {what} process failed: {bug.summary}") from bug
        except subprocess.TimeoutExpired:
            raise error(
                f"the {what} process took longer than {timeout_seconds:g} seconds and was stopped; nothing was written. Raise "
                f"`timeout_seconds`, or use {quicker}"
            ) from None
        finally:
            worker.kill()
            worker.stop()
        if answer is None:
            raise error((died or _death_of(what))(worker.process.returncode, _tail(log)))
        return answer.value


def answer_parent(descriptor: int, work: Callable[[Any, Progress], Any]) -> None:
    """In the child: send `work(request, progress)` to the parent, or what it raises.

    `progress` may be called at any rate; ten calls per second are forwarded.
    """

    def answer(channel: Channel) -> None:
        request = channel.receive()
        next_s = 0.0

        def progress(fraction: float, text: str) -> None:
            nonlocal next_s
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + _PROGRESS_SECONDS
                channel.send(_Step(round(fraction, 4), text))

        channel.send(_Answer(work(request, progress)))

    work_for_parent(descriptor, answer, ignored=(), parent_gone=_remove_copies)


def _remove_copies() -> None:
    """Remove the folder of a killed caller, which has copies of a model; the process then ends at once."""
    folder = Path(os.environ.get("TMPDIR", ""))
    if folder.name.startswith(f".{files.SCRATCH}."):
        files.remove(folder)


def _answer(worker: Worker, timeout_seconds: float | None, progress: Progress | None) -> _Answer | None:
    """The answer, or None from a process that ended without one. Raises TimeoutExpired."""
    deadline_s = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        if deadline_s is not None and time.monotonic() > deadline_s:
            raise subprocess.TimeoutExpired(worker.process.args, timeout_seconds)
        # Other processes that the child forked may hold its end of the socket open, so its own end is searched for as well.
        ended = worker.process.poll() is not None
        if not wait([worker.channel], 0 if ended else _POLL_SECONDS):
            if ended:
                return None
            continue
        message = worker.receive()
        if not isinstance(message, _Step):
            if message is None:
                worker.exit_code(_EXIT_SECONDS)
            assert message is None or isinstance(message, _Answer)
            return message
        if progress:
            progress(message.fraction, message.text)


def _death_of(what: str) -> Died:
    def died(code: int, tail: str) -> str:
        advice = " (most likely for lack of memory: use a smaller batch or size)" if code == -signal.SIGKILL else ""
        lines = [line.strip()[:200] for line in tail.splitlines() if line.strip()][-3:]
        return "\n".join([f"the {what} process {how_ended(code)}{advice} and gave no answer", *(f"  {line}" for line in lines)])

    return died


def _tail(path: Path) -> str:
    return path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace")
