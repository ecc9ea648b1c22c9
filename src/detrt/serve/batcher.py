"""Dynamic batching queue: tasks wait for others that can share a run of the model. Without processes and clock.

Tasks that can share a run wait in one lane: the same model, for images also the same size after resizing if the model
cannot mix sizes, for tensors the same shapes. Lanes are first in, first out; the lane whose first task has waited longest
goes first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .messages import Answer, ImageTask, TensorTask

# First element of the lane of a task that runs alone, because a worker died with it.
ALONE = "alone"


class QueueFull(Exception):
    """The queue has no room for a request."""


@dataclass(eq=False, slots=True)
class Item:
    """A task in the queue or in a worker.

    rows: its batch size. lane: tasks of one lane may share a run. group: of the workers that may run it. since, started: time of the loop, seconds, when it was
    queued and sent. deaths: workers that died while running it. state: "waiting", "running" or "left" (finished or cancelled).
    """

    model: str
    task: ImageTask | TensorTask | None
    lane: Hashable
    future: asyncio.Future[Answer]
    rows: int = 1
    since: float = 0.0
    started: float = 0.0
    deaths: int = 0
    state: str = field(default="new")
    group: int = 0


@dataclass(slots=True)
class _Lane:
    """rows: of the waiting items."""

    items: deque[Item] = field(default_factory=deque)
    rows: int = 0


class Batcher:
    """max_batch: of the model of an item. capacity: largest number of waiting images. max_delay: max queue delay, seconds."""

    def __init__(self, max_batch: Callable[[Item], int], *, capacity: int, max_delay: float) -> None:
        self.capacity, self.max_delay = capacity, max_delay
        self._max_batch = max_batch
        self._lanes: dict[Hashable, _Lane] = {}
        self.waiting = 0  # images

    def add(self, items: list[Item], now: float) -> None:
        """Queue all items or none.

        Raises:
            QueueFull: the queue has no room for them.
        """
        rows = sum(item.rows for item in items)
        # A request larger than the queue is accepted if the queue is empty; otherwise it could never run.
        if self.waiting and self.waiting + rows > self.capacity:
            raise QueueFull
        for item in items:
            item.since, item.state = now, "waiting"
            lane = self._lanes.setdefault(item.lane, _Lane())
            lane.items.append(item)
            lane.rows += item.rows
        self.waiting += rows

    def requeue(self, item: Item) -> None:
        """Queue an item again whose worker died; it runs first and alone, so that it cannot affect others."""
        item.lane, item.state = (ALONE, id(item)), "waiting"
        self._lanes[item.lane] = _Lane(deque([item]), item.rows)
        self.waiting += item.rows

    def leave(self, item: Item) -> None:
        """Cancel an item."""
        if item.state == "waiting":
            self._lanes[item.lane].rows -= item.rows
            self.waiting -= item.rows
        item.state, item.task = "left", None  # the item may remain in its lane, but not its image

    def take(self, now: float, *, idle: bool, group: int = 0) -> list[Item]:
        """The next batch for a worker of a group, or nothing if it should wait for more items.

        idle: the worker is idle. A busy one gets full batches only, because more items may arrive until it is idle.
        """
        best: _Lane | None = None
        for lane in self._live_lanes(group):
            head = lane.items[0]
            if head.lane[0] == ALONE:  # type: ignore[index]  # lanes are tuples
                due = idle  # after another batch it could die of that one
            else:
                due = lane.rows >= self._max_batch(head) or (idle and now - head.since >= self.max_delay)
            if due and (best is None or head.since < best.items[0].since):
                best = lane
        batch: list[Item] = []
        rows = 0
        while best is not None and best.items:
            item = best.items[0]
            if item.state == "waiting":
                if batch and rows + item.rows > self._max_batch(item):
                    break
                item.state = "running"
                rows += item.rows
                batch.append(item)
            best.items.popleft()
        if best is not None:
            best.rows -= rows
            self.waiting -= rows
        return batch

    def due(self, group: int = 0) -> float | None:
        """Time at which the next batch is due for an idle worker of a group."""
        return min((lane.items[0].since + self.max_delay for lane in self._live_lanes(group)), default=None)

    def items(self) -> list[Item]:
        return [item for lane in self._lanes.values() for item in lane.items if item.state == "waiting"]

    def _live_lanes(self, group: int) -> list[_Lane]:
        """Lanes of a group with a waiting item in front; drops cancelled items before it, and empty lanes."""
        for key, lane in list(self._lanes.items()):
            while lane.items and lane.items[0].state != "waiting":
                lane.items.popleft()
            if not lane.items:
                del self._lanes[key]
        return [lane for lane in self._lanes.values() if lane.items[0].group == group]
