"""An OpenVINO model timed beside the ONNX file that it was built from, so that the faster one runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from ...bundle import CpuSpeed, EngineFacts
from ...data.preprocess import preprocess
from ...data.scenes.scene import draw_images
from ...spec import ModelSpec
from ...system import processor_name, usable_cores
from ..base import BaseSession
from ..engine_check import PROMPT
from ..onnxruntime.session import OnnxSession
from ..open import with_text
from ..prompted import PromptedSession
from .session import OpenVinoSession

SECONDS = 1.0  # of runs for each backend
FEWEST, MOST = 3, 10  # runs


def measure_speed(source: Path, fused: Path | None, model: Path, spec: ModelSpec, facts: EngineFacts) -> CpuSpeed:
    """Time one drawn scene of the usual size in both backends, with all cores that this process may use.

    A model that takes a prompt has one, whose text encoder is not timed. One backend runs after the other, because large models
    need gigabytes in each; the least time of several runs is the one that other work on the machine disturbs least.

    Args:
        source: the ONNX file. fused: the one with the attention of ONNX Runtime, where the bundle has it.
        model, facts: the OpenVINO model.
        spec: of both.

    Raises:
        SessionError, EngineError: one of them cannot run.
    """
    batch, onnxruntime_ms = _least_ms(lambda: OnnxSession(source, spec, fused=fused), source)
    _, openvino_ms = _least_ms(lambda: OpenVinoSession(model, spec, facts), source)
    return CpuSpeed(processor_name(), usable_cores(), batch, openvino_ms, onnxruntime_ms, version("onnxruntime"))


def _least_ms(opened: Callable[[], BaseSession], model: Path) -> tuple[int, float]:
    """Batch size, and milliseconds of the fastest run. model: the file beside which the text encoder and the tokenizer lie."""
    with ExitStack() as closing:
        session = closing.enter_context(with_text(opened(), model))
        batch = session.info.fixed_batch or 1
        feeds = preprocess(draw_images(batch, session.spec.input.size_hw), session.spec).feeds
        runs = session.bind(PROMPT) if isinstance(session, PromptedSession) else session
        runs.run(feeds)  # allocates
        times: list[float] = []
        while len(times) < FEWEST or (len(times) < MOST and sum(times) < SECONDS * 1e3):
            start = time.perf_counter()
            runs.run(feeds)
            times.append((time.perf_counter() - start) * 1e3)
        return batch, round(min(times), 3)
