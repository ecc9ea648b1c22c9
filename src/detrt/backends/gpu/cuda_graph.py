"""What is done to the pictures of one layout on the device, recorded: one call instead of many, and tables that stay there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .staging import Image, Layout

LARGEST = 1 << 24  # pixels of a batch


class Fixed:
    """A block of its own for one layout, and a CUDA graph of `fill` on it, which may wait for nothing.

    fill(block): makes the inputs of the model from the block. stream: to record on; None: the device is no GPU, and nothing
    is recorded.
    """

    def __init__(self, plan: Layout, device: torch.device, fill: Callable[[Tensor], None], stream: Any) -> None:
        self.block = torch.zeros(plan.room, dtype=torch.uint8, device=device)
        head = np.zeros(plan.head, np.uint8)
        plan.write_head(head)
        self.block[: plan.head].copy_(torch.from_numpy(head))

        def step() -> list[Tensor]:
            fill(self.block)
            return []

        self.fill: Callable[[], Any] = step
        if stream is not None:
            graph, _ = captured(step, stream, trim=False)
            self.fill = graph.replay


class FixedLayouts:
    """Recordings of the layouts that come again and again: made at the `at`-th time of one, `most` of them at once.

    One that has come lately is not given up for another: recording takes longer than it saves in many batches. why: what went
    wrong with one, after which none is made.
    """

    def __init__(self, at: int = 3, most: int = 8, patience: int = 200) -> None:
        self._at, self._most, self._patience = at, most, patience
        self._kept: dict[int, _Kept] = {}
        self._asked = 0
        self.why = ""

    def get(self, plan: Layout, times: int, owner: object, make: Callable[[], Fixed]) -> Fixed | None:
        """The recording of a layout that was asked for so many `times`, or None. owner: of what it writes to."""
        self._asked += 1
        found = self._kept.get(id(plan))
        if found is None or found.owner is not owner:
            if times < self._at or self.why or not self._makes_room(found):
                return None
            try:
                found = self._kept[id(plan)] = _Kept(plan, owner, make())
            except RuntimeError as error:  # of CUDA: no memory left, or a step that cannot be recorded
                self._kept.pop(id(plan), None)
                self.why = str(error)
                return None
        found.last = self._asked
        return found.fixed

    def _makes_room(self, found: _Kept | None) -> bool:
        if found is None and len(self._kept) >= self._most:
            oldest = min(self._kept, key=lambda key: self._kept[key].last)
            if self._asked - self._kept[oldest].last < self._patience:
                return False
            del self._kept[oldest]
        return True


@dataclass(slots=True)
class _Kept:
    plan: Layout  # so that no other gets its id
    owner: object
    fixed: Fixed
    last: int = 0


def recordable(images: Sequence[Image]) -> bool:
    """Whether it pays: not for very large pictures, whose blocks would be kept."""
    return sum(image.shape[0] * image.shape[1] for image in images) <= LARGEST


# Recording work on a GPU as a CUDA graph.
def captured(step: Callable[[], list[Tensor]], stream: Any, *, trim: bool = True) -> tuple[Any, list[Tensor]]:
    """(a CUDA graph of `step`, its results, which stay where they are). trim: give back memory that was taken meanwhile."""
    with torch.cuda.stream(stream):
        for _ in range(2):  # handles and work memory are made before the capture, which allows neither
            step()
        stream.synchronize()
        if trim:
            torch.cuda.empty_cache()  # the search for fast kernels took more memory than the graph will need
        graph = torch.cuda.CUDAGraph()
        # Decoders of pictures take memory in threads of their own meanwhile, which is no fault of this one.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = step()
    return graph, results
