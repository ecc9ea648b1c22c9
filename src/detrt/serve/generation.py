"""Workers that opened the same content of the models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import DetrtError
from .batcher import Item
from .messages import ModelFacts, Setup
from .process import LoopWorker

FIRST_PAUSE_S = 0.1


@dataclass(slots=True)
class Sent:
    """A batch that a worker has.

    Times of the loop: since, when it was sent; first, since when it is the worker's first batch; abandoned, since when nobody waits
    for it. The latter two are infinite until then.
    """

    items: list[Item]
    since: float
    first: float = math.inf
    abandoned: float = math.inf


class ServerWorker(LoopWorker):
    """A worker process.

    running: its batches by number, the first of which it works on. state: "starting", "ready" or "gone".

    retrying: it runs tasks whose worker died, and gets nothing else meanwhile. begun, heard: times of the loop, when it was
    started and when it last sent anything.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, index: int, setup: Setup, generation: Generation) -> None:
        super().__init__("worker")
        self.send(setup)
        self.index, self.generation = index, generation
        self.state, self.retrying = "starting", False
        self.running: dict[int, Sent] = {}
        self.begun = self.heard = asyncio.get_running_loop().time()


class Generation:
    """The workers of a pool that opened the same content, and what they opened; a request is answered by those of one generation.

    Attributes:
        number: counts up.
        pinned: name of a model -> digest of the content that its workers must open; of all models once one of them is ready.
        models: facts of the models; empty until a worker is ready.
        workers: by their index; None: not started.
        pauses: seconds before the next start of each.
        error: why it cannot be opened, of one that replaces another.
        mixed: whether its workers opened different content, because a model was replaced meanwhile.
        decided: set once all of its workers were ready, or one failed.
    """

    def __init__(self, number: int, workers: int, pinned: Mapping[str, str]) -> None:
        self.number, self.pinned = number, dict(pinned)
        self.models: dict[str, ModelFacts] = {}
        self.workers: list[ServerWorker | None] = [None] * workers
        self.pauses = [FIRST_PAUSE_S] * workers
        self.error: DetrtError | None = None
        self.mixed = False
        self.decided = asyncio.Event()

    def live(self) -> Iterator[ServerWorker]:
        """Its processes."""
        return (worker for worker in self.workers if worker is not None and worker.state != "gone")

    @property
    def ready(self) -> int:
        return sum(worker.state == "ready" for worker in self.live())

    def fail(self, error: DetrtError) -> None:
        """Say why it cannot be opened; the first reason counts."""
        self.error = self.error or error
        self.decided.set()
