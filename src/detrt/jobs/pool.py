"""One detector process for each device; results in the order of the inputs."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ..backends.base import SessionInfo
from ..backends.search import SessionOptions
from ..backends.worker_process import Worker, after_death, module_command
from ..data.images import Input
from ..data.sinks import Record
from ..detections import Detections
from ..detector import DetectorOptions
from ..errors import ImageError, SessionError
from ..system import CPU, cpu_threads
from .run import ImageFailure, ImageResult
from .worker import Answer, Opening

_TASK_IMAGES = 8  # smallest task: with fewer images, messages cost more than detection
_TASKS_PER_WORKER = 2  # tasks per worker: one that runs, one whose images are being decoded
_CLOSE_SECONDS = 10.0


@dataclass(eq=False, slots=True)
class _Task:
    """Inputs of one task. answers: None until they arrive. deaths: workers that died while running it."""

    inputs: list[Input]
    answers: list[Answer] | None = None
    deaths: int = 0


class _DeviceWorker(Worker):
    """tasks: unfinished ones, in order; the first one runs. facts: of its model, once it is open."""

    def __init__(self, opening: Opening) -> None:
        # OpenMP reads it when a library is loaded; a value set by the user is kept.
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(opening.threads))}
        super().__init__(module_command("detrt.jobs.worker"), environment=threads)
        self.send(opening)
        self.opening = opening
        self.tasks: deque[_Task] = deque()
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        facts = self.receive()
        if facts is None:
            raise SessionError(f"{self.ending()} while it opened the model; is there enough memory for one copy a device?")
        self.facts = facts

    def ending(self) -> str:
        return f"the worker on {self.opening.session.device} (process {self.process.pid}) {super().ending()}"


class DevicePool:
    """Detectors on several devices of this machine, each in a process of its own that also decodes its images.

    ref: as for `open_session`. devices: see `parse_devices`. session: how it is opened, beside the device;
    detector: what is done with images. categories: of a COCO file, the prompt of a model that takes one.
    copies: arguments of `AnnotatedCopies`, if workers save copies. every: take every n-th frame of a video.

    A worker that dies is replaced, and its unfinished tasks run again; if the same images kill a second worker, an error
    names them.

    Raises:
        SessionError: a worker died. DetrtError: errors of opening or running the model.
    """

    def __init__(
        self,
        ref: str | os.PathLike,
        devices: Sequence[str],
        *,
        session: SessionOptions | None = None,
        detector: DetectorOptions | None = None,
        categories: list[dict[str, Any]] | None = None,
        copies: Mapping[str, Any] | None = None,
        every: int = 1,
    ) -> None:
        if not devices:
            raise SessionError("no devices; give at least one, e.g. `device=0,1`")
        threads = cpu_threads(devices)
        options = session or SessionOptions()
        if CPU in devices and options.threads is None:
            options = replace(options, threads=threads)
        opening = Opening(
            ref=os.fspath(ref),
            threads=threads,
            session=options,
            detector=detector or DetectorOptions(),
            categories=categories,
            copies=None if copies is None else dict(copies),
            every=every,
        )
        self._workers: list[_DeviceWorker] = []
        self.replaced = 0
        try:
            for device in devices:
                self._workers.append(_DeviceWorker(replace(opening, session=replace(options, device=device))))
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

    def detect_inputs(self, inputs: Sequence[Input]) -> Iterator[ImageResult | ImageFailure]:
        """As `detect.detect_inputs`; the images stay in the workers (`ImageResult.image` is None)."""
        for task, answers in self._run(_tasks(inputs, self.task_size)):
            for index, result in answers:
                if isinstance(result, str):
                    yield ImageFailure(task[index], ImageError(result))
                else:
                    yield ImageResult(task[index], result, None)

    @property
    def task_size(self) -> int:
        """Images per task: a multiple of the batch size, so that batches do not depend on the number of devices."""
        return self.batch_size * -(-_TASK_IMAGES // self.batch_size)

    def detect_batches(self, batches: Iterable[Sequence[Path]]) -> Iterator[list[Detections]]:
        """Detections of every batch of image files, in order. Raises ImageError for a file that cannot be read."""
        for _, answers in self._run([Input(path) for path in batch] for batch in batches):
            yield [_detections(result) for _, result in answers]

    def _run(self, tasks: Iterable[list[Input]]) -> Iterator[tuple[list[Input], list[Answer]]]:
        """Each task and its results, in order."""
        source = (_Task(inputs) for inputs in tasks)
        started: deque[_Task] = deque()
        retries: deque[_Task] = deque()
        window = 8 * len(self._workers)  # tasks in flight, including finished ones that wait for an earlier one
        while True:
            for worker in self._workers:
                while len(worker.tasks) < _TASKS_PER_WORKER:
                    if retries:
                        task = retries.popleft()
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
                self._receive(retries)
            else:
                task = started.popleft()
                yield task.inputs, task.answers or []

    def _receive(self, retries: deque[_Task]) -> None:
        """Receive results; replace dead workers, and add their tasks to `retries`."""
        ready = wait([worker.channel for worker in self._workers])
        for worker in [worker for worker in self._workers if worker.channel in ready]:
            answers = worker.receive()
            if answers is not None:
                worker.tasks.popleft().answers = answers
                continue
            running, waiting = list(worker.tasks)[:1], list(worker.tasks)[1:]
            repeated, lost = after_death(running)
            if lost:
                names = ", ".join(source.name for source in lost[0].inputs[:8])
                raise SessionError(
                    f"{worker.ending()}, the second one to end while it detected in {names}; leave these out, or use a "
                    "smaller batch or size if it ran out of memory"
                )
            retries += [*repeated, *waiting]
            worker.stop(time.monotonic())
            self.replaced += 1
            fresh = _DeviceWorker(worker.opening)
            self._workers[self._workers.index(worker)] = fresh
            fresh.wait_until_ready()

    def close(self) -> None:
        """Stop the workers, after the batch that each of them runs."""
        until = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            if not worker.tasks:  # otherwise closing the connection stops it immediately
                worker.send(None)
        for worker in self._workers:
            worker.stop(until)
        self._workers = []

    def __enter__(self) -> DevicePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tasks(inputs: Sequence[Input], size: int) -> Iterator[list[Input]]:
    """Groups of `size` images; each video alone."""
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


def _detections(result: Record | str) -> Detections:
    if isinstance(result, str):
        raise ImageError(result)
    return result.detections
