"""CUDA graphs of the GPU preprocessing, cached by batch layout, and the capture of any GPU work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.raw_image import LoadedImage
from .staging import BatchLayout

MAX_GRAPH_PIXELS = 1 << 24  # of a batch


class LayoutGraph:
    """A device block for one layout, with its tables uploaded, and a CUDA graph of `fill` on it.

    Args:
        plan: the layout.
        device: of the block.
        fill: writes the inputs of the model from the block, without synchronizing.
        stream: to record on; None on a CPU, where `fill` is called as it is.
    """

    def __init__(self, plan: BatchLayout, device: torch.device, fill: Callable[[Tensor], None], stream: Any) -> None:
        self.block = torch.zeros(plan.block_size, dtype=torch.uint8, device=device)
        header = np.zeros(plan.header_size, np.uint8)
        plan.write_header(header)
        self.block[: plan.header_size].copy_(torch.from_numpy(header))

        def step() -> list[Tensor]:
            fill(self.block)
            return []

        self.fill: Callable[[], Any] = step
        if stream is not None:
            graph, _ = capture_graph(step, stream, trim=False)
            self.fill = graph.replay


class LayoutGraphCache:
    """Graphs of the layouts that recur.

    Args:
        min_uses: a layout is recorded at its `min_uses`-th batch.
        capacity: largest number of graphs.
        patience: a graph used within so many lookups is not evicted, because recording costs more than many batches save.

    Attributes:
        failure: why recording failed, after which nothing is recorded; "" otherwise.
    """

    def __init__(self, min_uses: int = 3, capacity: int = 8, patience: int = 200) -> None:
        self._min_uses, self._capacity, self._patience = min_uses, capacity, patience
        self._entries: dict[int, _Entry] = {}
        self._lookups = 0
        self.failure = ""

    def get(self, plan: BatchLayout, uses: int, owner: object, record: Callable[[], LayoutGraph]) -> LayoutGraph | None:
        """The graph of a layout, recorded if due; None: run without one.

        Args:
            plan: the layout.
            uses: how often it has been used, this time included.
            owner: of the tensors that the graph writes to; another owner needs another graph.
            record: records the graph.
        """
        self._lookups += 1
        entry = self._entries.get(id(plan))
        if entry is None or entry.owner is not owner:
            if uses < self._min_uses or self.failure or not (entry or self._has_room()):
                return None
            try:
                entry = self._entries[id(plan)] = _Entry(plan, owner, record())
            except RuntimeError as error:  # of CUDA: out of memory, or a step that cannot be recorded
                self._entries.pop(id(plan), None)
                self.failure = str(error)
                return None
        entry.last_use = self._lookups
        return entry.graph

    def _has_room(self) -> bool:
        """Whether a graph can be added, after evicting the oldest if it is idle."""
        if len(self._entries) < self._capacity:
            return True
        oldest = min(self._entries, key=lambda key: self._entries[key].last_use)
        if self._lookups - self._entries[oldest].last_use < self._patience:
            return False
        del self._entries[oldest]
        return True


@dataclass(slots=True)
class _Entry:
    plan: BatchLayout  # a reference, so that no other layout gets its id
    owner: object
    graph: LayoutGraph
    last_use: int = 0


def recordable(images: Sequence[LoadedImage]) -> bool:
    """Whether a batch is small enough to keep a block for it on the device."""
    return sum(image.shape[0] * image.shape[1] for image in images) <= MAX_GRAPH_PIXELS


def capture_graph(step: Callable[[], list[Tensor]], stream: Any, *, trim: bool = True) -> tuple[Any, list[Tensor]]:
    """(CUDA graph of `step`, its results, whose memory is fixed). trim: release cached memory before the capture."""
    with torch.cuda.stream(stream):
        for _ in range(2):  # warm-up creates handles and workspaces, which a capture must not
            step()
        stream.synchronize()
        if trim:
            torch.cuda.empty_cache()  # the search for fast kernels took more memory than the graph will need
        graph = torch.cuda.CUDAGraph()
        # Image decoders allocate in other threads at the same time, which must not invalidate the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = step()
    return graph, results
