"""Recording work on a GPU as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
