"""Which of what waits makes the next batch."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi", reason="needs the 'serve' extra")

from detrt.serve.batcher import Batcher, Item, QueueFull
from detrt.serve.messages import ImageTask

LOOP = asyncio.new_event_loop()


def item(lane="a", rows=1, model="m") -> Item:
    return Item(model, ImageTask(b"", 0.5), lane, LOOP.create_future(), rows)


def batcher(most=4, capacity=10, delay=1.0) -> Batcher:
    return Batcher(lambda model: most, capacity=capacity, max_delay=delay)


def test_a_full_batch_leaves_at_once_and_a_part_of_one_waits():
    queue = batcher()
    items = [item() for _ in range(6)]
    queue.add(items, 0.0)
    assert queue.take(0.0, idle=False) == items[:4]
    assert queue.take(0.5, idle=True) == []
    assert queue.due() == 1.0
    assert queue.take(1.0, idle=False) == []  # a busy worker is given full batches only
    assert queue.take(1.0, idle=True) == items[4:]
    assert (queue.waiting, queue.due(), queue.take(9.0, idle=True)) == (0, None, [])


def test_lanes_do_not_mix_and_the_oldest_goes_first():
    queue = batcher()
    first, second, third = item("a"), item("b"), item("a")
    queue.add([first], 0.0)
    queue.add([second], 0.1)
    queue.add([third], 0.2)
    assert queue.take(5.0, idle=True) == [first, third]
    assert queue.take(5.0, idle=True) == [second]


def test_a_lane_that_is_never_full_is_not_starved():
    queue = batcher(capacity=1000)
    lonely = item("b")
    queue.add([lonely], 0.0)
    now = 0.0
    for _ in range(10):
        queue.add([item("a") for _ in range(8)], now)
        now += 0.3
        if lonely in queue.take(now, idle=True):
            break
    assert lonely.state == "running" and now <= 1.3


def test_rows_count():
    queue = batcher()
    items = [item(rows=3), item(rows=2), item(rows=6)]
    queue.add(items, 0.0)
    assert queue.waiting == 11
    assert [queue.take(9.0, idle=True) for _ in range(3)] == [[items[0]], [items[1]], [items[2]]]
    assert queue.waiting == 0


def test_the_queue_is_bounded_and_takes_all_of_a_request_or_nothing():
    queue = batcher(capacity=4)
    queue.add([item() for _ in range(3)], 0.0)
    with pytest.raises(QueueFull):
        queue.add([item(), item()], 0.0)
    assert queue.waiting == 3
    queue.add([item()], 0.0)
    queue.take(9.0, idle=True)
    queue.add([item() for _ in range(9)], 0.0)  # larger than the queue: taken when nothing waits
    assert queue.waiting == 9


def test_who_leaves_is_not_run_and_makes_room():
    queue = batcher(capacity=4)
    items = [item() for _ in range(4)]
    queue.add(items, 0.0)
    for gone in items[:3]:
        queue.leave(gone)
        queue.leave(gone)  # twice is once
    assert queue.waiting == 1 and all(gone.task is None for gone in items[:3])
    assert queue.take(0.5, idle=True) == []  # three have left, so the batch is not full
    assert queue.take(2.0, idle=True) == [items[3]]
    assert queue.waiting == 0


def test_what_is_tried_again_goes_first_and_alone():
    queue = batcher(capacity=1)
    queue.add([item()], 0.0)
    retried = [item(), item()]
    for one in retried:
        one.state = "running"
        queue.requeue(one)  # whatever the capacity: it was accepted
    assert queue.waiting == 3
    assert queue.take(0.0, idle=False) == []  # behind another batch it could die of that one
    assert queue.take(0.0, idle=True) == [retried[0]]
    assert queue.take(0.0, idle=True) == [retried[1]]
