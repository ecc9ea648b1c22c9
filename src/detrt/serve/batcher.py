"""What waits, and which of it makes the next batch. No processes, no clock of its own.

Tasks that can share a run of the model wait in one lane: the same model, and for images the same size after resizing
where the model cannot mix sizes, for tensors the same shapes. Lanes are first in, first out; of several, the one whose
first task waited longest goes first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .messages import Answer, ImageTask, TensorTask


class QueueFull(Exception):
    """No place for more."""


@dataclass(eq=False, slots=True)
class Item:
    """A task on its way. rows: images in it. lane: who it may share a run with. since, started: seconds of
    the loop's clock.

    attempts: workers that died with it. state: "waiting", "running" or "left" (answered, or nobody waits for it any more).
    """

    model: str
    task: ImageTask | TensorTask | None
    lane: Hashable
    future: asyncio.Future[Answer]
    rows: int = 1
    since: float = 0.0
    started: float = 0.0
    attempts: int = 0
    state: str = field(default="new")


class Batcher:
    """max_batch: of a model. capacity: images that may wait. max_delay: seconds that an image waits for company."""

    def __init__(self, max_batch: Callable[[str], int], *, capacity: int, max_delay: float) -> None:
        self.capacity, self.max_delay = capacity, max_delay
        self._max_batch = max_batch
        self._lanes: dict[Hashable, deque[Item]] = {}
        self._rows: dict[Hashable, int] = {}
        self.waiting = 0  # images

    def add(self, items: list[Item], now: float) -> None:
        """Take all items or none.

        Raises:
            QueueFull: there is no place for them.
        """
        rows = sum(item.rows for item in items)
        # A request larger than the whole queue is taken when nothing waits; it could never be otherwise.
        if self.waiting and self.waiting + rows > self.capacity:
            raise QueueFull
        for item in items:
            item.since = now
            self._put(item, first=False)

    def again(self, item: Item) -> None:
        """Take back what a worker died with; it goes first and alone, so that it cannot take others with it."""
        item.lane = ("alone", id(item))
        self._put(item, first=True)

    def leave(self, item: Item) -> None:
        """Forget an item that nobody waits for any more."""
        if item.state == "waiting":
            self._count(item, -1)
        item.state, item.task = "left", None  # it may stay in its lane for a while; its picture need not

    def take(self, now: float, *, idle: bool) -> list[Item]:
        """The next batch, or nothing where it is better to wait.

        idle: the worker has nothing to do; a busy one is given full batches only, as an early one would cost the
        company that its images might still get.
        """
        best: Hashable = None
        oldest = float("inf")
        for lane in list(self._lanes):
            head = self._head(lane)
            if head is None:
                continue
            if lane_is_alone(lane):
                due = idle  # behind another batch it could die of that one
            else:
                due = self._rows[lane] >= self._max_batch(head.model) or (idle and now - head.since >= self.max_delay)
            if due and head.since < oldest:
                best, oldest = lane, head.since
        batch: list[Item] = []
        rows = 0
        while best is not None and (head := self._head(best)) is not None:
            if batch and rows + head.rows > self._max_batch(head.model):
                break
            self._lanes[best].popleft()
            self._count(head, -1)
            head.state = "running"
            rows += head.rows
            batch.append(head)
        return batch

    def due(self) -> float | None:
        """When the next batch is due for an idle worker."""
        heads = [head.since for lane in list(self._lanes) if (head := self._head(lane)) is not None]
        return min(heads) + self.max_delay if heads else None

    def items(self) -> list[Item]:
        return [item for lane in self._lanes.values() for item in lane if item.state == "waiting"]

    def _put(self, item: Item, *, first: bool) -> None:
        item.state = "waiting"
        lane = self._lanes.setdefault(item.lane, deque())
        (lane.appendleft if first else lane.append)(item)
        self._count(item, 1)

    def _head(self, lane: Hashable) -> Item | None:
        """The first item that somebody waits for; those before it, and a lane without any, are dropped."""
        items = self._lanes[lane]
        while items and items[0].state != "waiting":
            items.popleft()
        if not items:
            del self._lanes[lane], self._rows[lane]
            return None
        return items[0]

    def _count(self, item: Item, sign: int) -> None:
        self.waiting += sign * item.rows
        self._rows[item.lane] = self._rows.get(item.lane, 0) + sign * item.rows


def lane_is_alone(lane: Any) -> bool:
    return isinstance(lane, tuple) and bool(lane) and lane[0] == "alone"
