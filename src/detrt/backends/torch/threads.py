"""How many threads PyTorch computes with on a CPU."""

from __future__ import annotations

import os
import threading

import torch

FORKED = "one thread, because PyTorch ran in the process that forked this one"
_ran = False
_forked = False  # after PyTorch ran: its threads were not copied, and it would wait for them for ever
_of_thread = threading.local()  # the number that was last set in each thread


def use_threads(count: int | None) -> None:
    """Let what this thread runs next use `count` threads of the CPU; None: as many as before.

    OpenMP keeps the number for each thread that calls it, and PyTorch another one for the process, so both are looked at. Where `is_forked`
    it is one.
    """
    global _ran
    if not _ran and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    _ran = True
    if _forked:
        count = 1
    if count is not None and (getattr(_of_thread, "count", None) != count or torch.get_num_threads() != count):
        torch.set_num_threads(count)
        _of_thread.count = count


def is_forked() -> bool:
    """Whether this process was forked after PyTorch ran here."""
    return _forked


def _after_fork() -> None:
    """As in the workers of PyTorch's own DataLoader: also for what loads a model."""
    global _forked
    _forked = True
    torch.set_num_threads(1)
