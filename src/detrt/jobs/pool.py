"""One detector process for each device; results in the order of the inputs."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..backends.base import SessionInfo
from ..backends.worker_process import Worker, after_death
from ..data.images import Input
from ..data.sinks import Record
from ..detections import Detections
from ..errors import ImageError, SessionError
from ..system import CPU, cpu_threads
from .run import Bad, Found
from .worker import Answer, Opening

_TASK_IMAGES = 8  # images in a task at least: below that, messages cost more than they carry
_AHEAD = 2  # tasks a worker holds: one that runs, one whose images are being decoded
_CLOSE_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class _Task:
    """Inputs that one worker detects in. answers: None until they are there; deaths: workers that ended while running it."""

    inputs: list[Input]
    answers: list[Answer] | None = None
    deaths: int = 0


class _DeviceWorker(Worker):
    """tasks: those it has not answered, in order; the first one runs. facts: of its model, once that is open."""

    def __init__(self, opening: Opening) -> None:
        # OpenMP reads it when a library loads; a value of the user's stays.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(opening.threads))}
        super().__init__((sys.executable, "-m", "detrt.jobs.worker"), opening, environment=threads)
        self.opening = opening
        self.tasks: deque[_Task] = deque()
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        facts = self.receive()
        if facts is None:
            raise SessionError(f"{self.ending()} while it opened the model; is there enough memory for one copy a device?")
        self.facts = facts

    def ending(self) -> str:
        return f"the worker on {self.opening.device} (process {self.process.pid}) {super().ending()}"


class DevicePool:
    """Detectors on several devices of this machine, each in a process of its own that also decodes its images.

    ref: as for `open_session`. devices: see `parse_devices`. session: further arguments of `open_session`;
    detector: of `Detector`. categories: of a COCO file, the prompt of a model that takes one.
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
            raise SessionError("no devices; give at least one, e.g. --device 0,1")
        threads = cpu_threads(devices)
        options = dict(session or {})
        if CPU in devices and options.get("threads") is None:
            options["threads"] = threads
        opening = Opening(
            ref=os.fspath(ref),
            device=devices[0],
            threads=threads,
            session=options,
            detector=dict(detector or {}),
            categories=categories,
            copies=None if copies is None else dict(copies),
            every=every,
        )
        self._workers: list[_DeviceWorker] = []
        self.replaced = 0
        try:
            for device in devices:
                self._workers.append(_DeviceWorker(replace(opening, device=device)))
            for worker in self._workers:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise
        facts = self._workers[0].facts
        self.devices = tuple(devices)
        self.spec = facts["spec"]
        self.batch_size: int = facts["batch_size"]
        info: SessionInfo = facts["info"]
        self.info = replace(info, name=f"{info.name} on {', '.join(devices)}")

    def detect_inputs(self, inputs: Sequence[Input]) -> Iterator[Found | Bad]:
        """As `detect.detect_inputs`; the images stay in the workers (`Found.image` is None)."""
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
        """Each task and its answers, in order."""
        source = (_Task(inputs) for inputs in tasks)
        started: deque[_Task] = deque()
        again: deque[_Task] = deque()
        window = 8 * len(self._workers)  # tasks that are started, with answers that wait for those of an earlier one
        while True:
            for worker in self._workers:
                while len(worker.tasks) < _AHEAD:
                    if again:
                        task = again.popleft()
                    elif len(started) < window and (fresh := next(source, None)) is not None:
                        task = fresh
                        started.append(task)
                    else:
                        break
                    worker.tasks.append(task)
                    worker.send(task.inputs)
            if not started:
                return
            if started[0].answers is None:
                self._receive(again)
            else:
                task = started.popleft()
                yield task.inputs, task.answers or []

    def _receive(self, again: deque[_Task]) -> None:
        """Take the answers that are there; replace workers that have died, and add their tasks to `again`."""
        ready = wait([worker.channel for worker in self._workers])
        for worker in [worker for worker in self._workers if worker.channel in ready]:
            answers = worker.receive()
            if answers is not None:
                worker.tasks.popleft().answers = answers
                continue
            running, waiting = list(worker.tasks)[:1], list(worker.tasks)[1:]
            repeated, lost = after_death(running)
            if lost:
                names = ", ".join(str(source.path) for source in lost[0].inputs[:8])
                raise SessionError(
                    f"{worker.ending()}, the second one to end while it detected in {names}; leave these out, or use a "
                    "smaller batch or size if it ran out of memory"
                )
            again += [*repeated, *waiting]
            worker.stop(time.monotonic())
            self.replaced += 1
            fresh = _DeviceWorker(worker.opening)
            self._workers[self._workers.index(worker)] = fresh
            fresh.wait_until_ready()

    def close(self) -> None:
        """End the workers; waits for the batch that each of them runs."""
        until = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            if not worker.tasks:  # else only the closed connection tells it to stop at once
                worker.send(None)
        for worker in self._workers:
            worker.stop(until)
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
