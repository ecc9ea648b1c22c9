"""Open a new engine and its graph, and compare them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from ..base import BaseSession
from ..engine_check import EngineCheck, compare_sessions
from ..open import open_session
from ..prompted import PromptedSession
from .opening import open_engine


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
        reference = open_session(graph, emulate_low_precision=True)
        closing.callback(reference.close)
        candidate = open_engine_beside(reference, engine, text_engine)
        closing.callback(candidate.close)
        return compare_sessions(reference, candidate, precision, progress=progress)


def open_engine_beside(
    reference: BaseSession | None, engine: Path, text_engine: Path | None = None, **choices: bool
) -> BaseSession:
    """An engine, with the tokenizer of another session of the same model where it takes a prompt; else that session may be left out.

    text_engine: of its text encoder; None: the encoder of `reference`. choices: how `open_engine` opens the detector.
    """
    detector = open_engine(engine, **choices)
    if not isinstance(reference, PromptedSession):
        return detector
    encoder = reference.text_encoder
    if encoder is not None and text_engine is not None:
        try:
            encoder = open_engine(text_engine)
        except BaseException:
            detector.close()
            raise
    return reference.with_sessions(detector, encoder)
