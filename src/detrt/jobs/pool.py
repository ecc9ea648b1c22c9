"""One detector process for each device; results in the order of the inputs."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ..data.images import Input
from ..data.sinks import Record
from ..detections import Detections
from ..errors import ImageError, SessionError
from ..system import CPU, cpu_threads
from .run import Bad, Found
from .worker import Answer, rebuilt

_TASK_IMAGES = 8  # images in a task at least: below that, messages cost more than they carry
_AHEAD = 2  # tasks a worker holds: one that runs, one whose images are being decoded
_LEAVE_SECONDS = 10.0


class _Worker:
    """A process and the socket to it. tasks: numbers of those it has not answered, the oldest first."""

    def __init__(self, device: str, opening: dict[str, Any], threads: int) -> None:
        ours, theirs = socket.socketpair()
        # Set for libraries that read it when they load, and left alone where the user has set it.
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "detrt.jobs.worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self.pipe = Connection(ours.detach())
        self.device = device
        self.tasks: deque[int] = deque()
        self.facts: dict[str, Any] = {}
        self.pipe.send({**opening, "device": device})

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None: the process has ended. Raises what the worker raised."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            return None
        if message[0] == "failed":
            raise rebuilt(message[1], message[2])
        if message[0] == "bug":
            raise RuntimeError(f"the worker on {self.device} failed:\n{message[2]}")
        return message

    def wait_until_ready(self) -> None:
        message = self.receive()
        if message is None:
            raise SessionError(f"{self.ending()} while it opened the model; is there enough memory for one copy a device?")
        self.facts = message[1]

    def send(self, task: Any) -> None:
        try:
            self.pipe.send(task)
        except OSError:  # it has ended, which `receive` finds out and tells
            return

    def ending(self) -> str:
        """How the process ended, e.g. "the worker on cuda:1 (process 77) was killed by SIGKILL"."""
        try:
            code = self.process.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"the worker on {self.device} (process {self.process.pid}) closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the worker on {self.device} (process {self.process.pid}) {how}"

    def close(self, until: float) -> None:
        self.pipe.close()
        for stop in (None, self.process.terminate, self.process.kill):
            if stop is not None:
                stop()
            try:
                self.process.wait(max(0.1, until - time.monotonic()))
                return
            except subprocess.TimeoutExpired:
                continue


class DevicePool:
    """Detectors on several devices of this machine, each in a process of its own that also decodes its images.

    ref: as for `open_session`. devices: see `parse_devices`. session: further arguments of `devices.open_on`;
    detector: of `Detector`. categories: of a COCO file, which a model that takes a prompt is asked for.
    copies: arguments of `AnnotatedCopies`, which the workers then save. every: take every n-th frame of a video.

    A worker that dies is replaced, and what it had not answered is done again; when the same images end a second
    worker, that is an error which names them.

    Raises:
        SessionError: a worker died. DetrtError: what opening the model or running it raises.
    """

    def __init__(
        self,
        ref: str | os.PathLike,
        devices: Sequence[str],
        *,
        session: Mapping[str, Any] | None = None,
        detector: Mapping[str, Any] | None = None,
        categories: list[dict[str, Any]] | None = None,
        copies: Mapping[str, Any] | None = None,
        every: int = 1,
    ) -> None:
        if not devices:
            raise SessionError("no devices; give at least one, e.g. --devices 0,1")
        threads = cpu_threads(devices)
        options = dict(session or {})
        if CPU in devices and options.get("threads") is None:
            options["threads"] = threads
        self._threads = threads
        self._opening = {
            "ref": os.fspath(ref),
            "session": options,
            "detector": dict(detector or {}),
            "categories": categories,
            "copies": None if copies is None else dict(copies),
            "every": every,
            "decoders": threads,
        }
        self._workers: list[_Worker] = []
        self.replaced = 0
        try:
            self._workers += [self._start(device) for device in devices]
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise
        facts = self._workers[0].facts
        self.devices = tuple(devices)
        self.spec = facts["spec"]
        self.batch_size: int = facts["batch_size"]
        self.backend = f"{facts['backend']} on {', '.join(devices)}"
        self.note: str = facts["note"]
        self.path = Path(facts["path"]) if facts["path"] else None

    def _start(self, device: str) -> _Worker:
        return _Worker(device, self._opening, self._threads)

    def detect_inputs(self, inputs: Sequence[Input]) -> Iterator[Found | Bad]:
        """As `detect.detect_inputs`; the images of what is found stay in the workers (`Found.image` is None)."""
        for task, answers in self._run(_tasks(inputs, self.task_size)):
            for index, answer in answers:
                if isinstance(answer, str):
                    yield Bad(task[index], ImageError(answer))
                else:
                    yield Found(task[index], answer, None)

    @property
    def task_size(self) -> int:
        """Images a worker gets at a time: whole batches, so that an image has the same neighbours on any number of devices."""
        return self.batch_size * -(-_TASK_IMAGES // self.batch_size)

    def detect_batches(self, batches: Iterable[Sequence[Path]]) -> Iterator[list[Detections]]:
        """The detections of every batch of image files, in order. Raises ImageError for one that cannot be read."""
        for task, answers in self._run([Input(path) for path in batch] for batch in batches):
            yield [_detections(task[index], answer) for index, answer in answers]

    def _run(self, tasks: Iterable[list[Input]]) -> Iterator[tuple[list[Input], list[Answer]]]:
        source = enumerate(tasks)
        open_tasks: dict[int, list[Input]] = {}
        done: dict[int, list[Answer]] = {}
        again: deque[int] = deque()
        died: dict[int, int] = {}
        window = 8 * len(self._workers)  # answers that wait for an earlier one
        for number in itertools.count():
            while number not in done:
                for worker in self._workers:
                    while len(worker.tasks) < _AHEAD:
                        if again:
                            given = again.popleft()
                        elif len(open_tasks) < window and (fresh := next(source, None)) is not None:
                            given, task = fresh
                            open_tasks[given] = task
                        else:
                            break
                        worker.tasks.append(given)
                        worker.send((given, open_tasks[given]))
                if number not in open_tasks:
                    return
                self._receive(open_tasks, done, again, died)
            yield open_tasks.pop(number), done.pop(number)

    def _receive(
        self, open_tasks: dict[int, list[Input]], done: dict[int, list[Answer]], again: deque[int], died: dict[int, int]
    ) -> None:
        """Take the messages that are there; replace workers that have died."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe)):
            worker = by_pipe[pipe]  # type: ignore[index]
            message = worker.receive()
            if message is not None:
                worker.tasks.remove(message[1])
                done[message[1]] = message[2]
                continue
            if worker.tasks:
                suspect = worker.tasks[0]
                died[suspect] = died.get(suspect, 0) + 1
                if died[suspect] > 1:
                    names = ", ".join(str(source.path) for source in open_tasks[suspect][:8])
                    raise SessionError(
                        f"{worker.ending()}, the second one to end while it detected in {names}; leave these out, or use a "
                        "smaller batch or size if it ran out of memory"
                    )
            again.extend(worker.tasks)
            worker.close(time.monotonic())
            self.replaced += 1
            index = self._workers.index(worker)
            self._workers[index] = self._start(worker.device)
            self._workers[index].wait_until_ready()

    def close(self) -> None:
        """End the workers; waits for the batch that each of them runs."""
        until = time.monotonic() + _LEAVE_SECONDS
        for worker in self._workers:
            if not worker.tasks:  # else only the closed connection tells it to stop at once
                worker.send(None)
        for worker in self._workers:
            worker.close(until)
        self._workers = []

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tasks(inputs: Sequence[Input], size: int) -> Iterator[list[Input]]:
    """Images by `size` together; a video alone."""
    images: list[Input] = []
    for source in inputs:
        if source.kind == "video":
            if images:
                yield images
            yield [source]
            images = []
        else:
            images.append(source)
            if len(images) == size:
                yield images
                images = []
    if images:
        yield images


def _detections(source: Input, answer: Record | str) -> Detections:
    if isinstance(answer, str):
        raise ImageError(answer)
    return answer.detections
