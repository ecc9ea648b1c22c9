"""Engines of one model, timed against each other."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .session import TensorRTSession

ROUNDS, RUNS = 10, 10
WARM_UP = 3  # runs; the third replays a CUDA graph


def median_times(engines: Sequence[Path]) -> list[float]:
    """Median milliseconds of the forward pass of each engine, at the usual shapes of the first one's profile.

    The engines take turns, so that what else the GPU does meanwhile concerns them alike. Inputs are zeros: no layer of these
    models takes longer for other values.

    Raises:
        EngineError, SessionError: an engine cannot be opened or run.
    """
    with contextlib.ExitStack() as closing:
        sessions = [closing.enter_context(TensorRTSession(path)) for path in engines]
        usual = {name: shapes[1] for name, shapes in sessions[0].info.profile.items()}
        feeds = {info.name: np.zeros(usual[info.name], info.dtype) for info in sessions[0].inputs}
        for session in sessions:
            for _ in range(WARM_UP):
                session.run(feeds)
        times: list[list[float]] = [[] for _ in sessions]
        for _ in range(ROUNDS):
            for session, found in zip(sessions, times, strict=True):
                found += session.forward_times(RUNS)
        return [statistics.median(found) for found in times]
