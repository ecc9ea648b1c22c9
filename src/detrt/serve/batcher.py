"""Dynamic batching queue: tasks wait for others that can share a run of the model. No processes, no clock of its own.

Tasks that can share a run wait in one lane: the same model, and for images the same size after resizing where the model
cannot mix sizes, for tensors the same shapes. Lanes are first in, first out; of several, the one whose first task waited
longest goes first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .messages import Answer, ImageTask, TensorTask

# First part of the lane of a task that runs alone, because a worker died with it.
ALONE = "alone"


class QueueFull(Exception):
    """The queue has no room for a request."""


@dataclass(eq=False, slots=True)
class Item:
    """A task in the queue or in a worker.

    rows: its batch size. lane: tasks of one lane may share a run. since, started: seconds of the loop's clock when it was
    queued and sent. deaths: workers that ended while they held it. state: "waiting", "running" or "left" (answered, or nobody
    waits for it any more).
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


@dataclass(slots=True)
class _Lane:
    """rows: of the items that still wait."""

    items: deque[Item] = field(default_factory=deque)
    rows: int = 0


class Batcher:
    """max_batch: of a model. capacity: images that may wait. max_delay: max queue delay, seconds."""

    def __init__(self, max_batch: Callable[[str], int], *, capacity: int, max_delay: float) -> None:
        self.capacity, self.max_delay = capacity, max_delay
        self._max_batch = max_batch
        self._lanes: dict[Hashable, _Lane] = {}
        self.waiting = 0  # images

    def add(self, items: list[Item], now: float) -> None:
        """Queue all items or none.

        Raises:
            QueueFull: there is no room for them.
        """
        rows = sum(item.rows for item in items)
        # A request larger than the whole queue is taken when nothing waits; it could never be otherwise.
        if self.waiting and self.waiting + rows > self.capacity:
            raise QueueFull
        for item in items:
            item.since, item.state = now, "waiting"
            lane = self._lanes.setdefault(item.lane, _Lane())
            lane.items.append(item)
            lane.rows += item.rows
        self.waiting += rows

    def again(self, item: Item) -> None:
        """Queue an item that a worker died with; it goes first and alone, so that it cannot take others with it."""
        item.lane, item.state = (ALONE, id(item)), "waiting"
        self._lanes[item.lane] = _Lane(deque([item]), item.rows)
        self.waiting += item.rows

    def leave(self, item: Item) -> None:
        """Forget an item that nobody waits for any more."""
        if item.state == "waiting":
            self._lanes[item.lane].rows -= item.rows
            self.waiting -= item.rows
        item.state, item.task = "left", None  # it may stay in its lane for a while; its image need not

    def take(self, now: float, *, idle: bool) -> list[Item]:
        """The next batch, or nothing where it is better to wait.

        idle: the worker has nothing to do. A busy one is given full batches only, because a batch that leaves early runs
        with fewer images than it could have.
        """
        best: _Lane | None = None
        for lane in self._live_lanes():
            head = lane.items[0]
            if head.lane[0] == ALONE:  # type: ignore[index]  # lanes are tuples
                due = idle  # behind another batch it could die of that one
            else:
                due = lane.rows >= self._max_batch(head.model) or (idle and now - head.since >= self.max_delay)
            if due and (best is None or head.since < best.items[0].since):
                best = lane
        batch: list[Item] = []
        rows = 0
        while best is not None and best.items:
            item = best.items[0]
            if item.state == "waiting":
                if batch and rows + item.rows > self._max_batch(item.model):
                    break
                item.state = "running"
                rows += item.rows
                batch.append(item)
            best.items.popleft()
        if best is not None:
            best.rows -= rows
            self.waiting -= rows
        return batch

    def due(self) -> float | None:
        """When the next batch is due for an idle worker."""
        return min((lane.items[0].since for lane in self._live_lanes()), default=0.0) + self.max_delay if self.waiting else None

    def items(self) -> list[Item]:
        return [item for lane in self._lanes.values() for item in lane.items if item.state == "waiting"]

    def _live_lanes(self) -> list[_Lane]:
        """Lanes with an item that somebody waits for in front; those before it, and empty lanes, are dropped."""
        for key, lane in list(self._lanes.items()):
            while lane.items and lane.items[0].state != "waiting":
                lane.items.popleft()
            if not lane.items:
                del self._lanes[key]
        return list(self._lanes.values())
