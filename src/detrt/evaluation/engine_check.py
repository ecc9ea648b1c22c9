"""Open a new engine and its graph, and compare them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from ..backends.engine_check import EngineCheck, compare_sessions
from ..backends.open import open_engine_beside, open_following, open_session
from ..spec import SELECTION


def compare_engine(
    graph: Path,
    engine: Path,
    precision: str,
    *,
    text_engine: Path | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> EngineCheck:
    """Compare an engine with its ONNX graph on drawn scenes.

    Both run at the least, usual and largest batch size of the profile at its usual size, and at batch size 1 of its smallest
    and largest size. A model with a prompt is asked for three prompts of different lengths. Where the engine returns its
    selections, the graph computes with the queries of the engine.

    Args:
        graph: the ONNX file, which ONNX Runtime runs on the CPU.
        engine: the engine; its sidecar lies beside it.
        text_engine: engine of the text encoder, of a model that takes a prompt; None: ONNX Runtime runs it on both sides.
        precision: of the graph; chooses the tolerances.
        progress: called with (fraction, text).

    Raises:
        SessionError: ONNX Runtime cannot run the graph. EngineError: the engine cannot be opened here.
    """
    with contextlib.ExitStack() as closing:
        reference = open_session(graph, rounded=True)
        closing.callback(reference.close)
        candidate = open_engine_beside(reference, engine, text_engine)
        closing.callback(candidate.close)
        if any(info.name.startswith(SELECTION) for info in candidate.outputs):
            reference = open_following(reference, graph)
            closing.callback(reference.close)
        return compare_sessions(reference, candidate, precision, progress=progress)
