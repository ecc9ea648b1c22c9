"""How many threads PyTorch computes with on a CPU."""

from __future__ import annotations

import threading

import torch

_of_thread = threading.local()  # the number that was last set in each thread


def use_threads(count: int | None) -> None:
    """Let what this thread runs next use `count` threads of the CPU; None: as many as before.

    OpenMP keeps the number for each thread that calls it, and PyTorch another one for the process, so both are looked at.
    """
    if count is not None and (getattr(_of_thread, "count", None) != count or torch.get_num_threads() != count):
        torch.set_num_threads(count)
        _of_thread.count = count
