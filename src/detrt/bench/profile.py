"""The scope "kernel": what a run costs the GPU itself, as CUPTI records it, without copies from and to the host, launches and Python."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import SessionError

MSDA = "msda"  # part of the names of detrt's kernels of deformable attention
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")
# Records of so many runs are held at once; eager models launch thousands of kernels a run.
MOST_RUNS = 100
Event = tuple[str, float, float]  # name, start and duration in microseconds


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Milliseconds of all kernels of each run, and of those of deformable attention.

    kernels, msda_calls: how many a run. msda_samples_ms: empty where no kernel of detrt's is among them.
    """

    samples_ms: tuple[float, ...]
    kernels: int
    msda_samples_ms: tuple[float, ...] = ()
    msda_calls: int = 0


def device_times(step: Callable[[], object], warmup: int, repeats: int) -> DeviceTimes:
    """Run `step`, which waits for the GPU, and add up what ran there.

    Raises:
        SessionError: no GPU, no PyTorch to read its records, or nothing that ran on one.
    """
    repeats = min(repeats, MOST_RUNS)
    return added_up(device_events(step, warmup, repeats), repeats)


def device_events(step: Callable[[], object], warmup: int, repeats: int) -> list[Event]:
    """What ran on the GPU in `repeats` calls of `step`, which waits for it: kernels, copies, fills.

    Raises:
        SessionError: no GPU, or no PyTorch to read its records.
    """
    try:
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise SessionError("the times of single kernels are read through PyTorch, which is not installed") from None
    if not torch.cuda.is_available():
        raise SessionError("there is no GPU here that PyTorch sees")
    for _ in range(max(warmup, 1)):
        step()
    torch.cuda.synchronize()
    with quiet(), profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in found.events()
        # Named ranges of Python show up among the records of the GPU as well.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what PyTorch's profiler writes to standard error itself; Python's own exceptions come through."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def added_up(events: Sequence[Event], runs: int) -> DeviceTimes:
    """Records of `runs` equal runs, run by run; their mean as one sample where the records cannot be told apart.

    Raises:
        SessionError: no kernel among them.
    """
    work = sorted((e for e in events if not e[0].startswith(HOST_COPIES)), key=lambda e: e[1])
    if not work:
        raise SessionError("no kernel of the GPU was recorded")
    msda = [e for e in work if MSDA in e[0].lower()]
    return DeviceTimes(_per_run(work, runs), round(len(work) / runs), _per_run(msda, runs), round(len(msda) / runs))


def _per_run(events: Sequence[Event], runs: int) -> tuple[float, ...]:
    if not events:
        return ()
    if len(events) % runs:
        return (sum(e[2] for e in events) / runs / 1e3,)
    each = len(events) // runs
    return tuple(sum(e[2] for e in events[start : start + each]) / 1e3 for start in range(0, len(events), each))
