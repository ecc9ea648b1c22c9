"""`detrt build --target onnxruntime --provider cuda`: the finished graph run once with a provider of ONNX Runtime."""

from __future__ import annotations

import time
from pathlib import Path

from .backends.onnxruntime.session import OnnxSession
from .data.preprocess import preprocess
from .data.scenes.scene import draw_scene
from .spec import ModelSpec


def try_provider(path: Path, spec: ModelSpec, provider: str) -> tuple[str, float, int, str]:
    """(back end, seconds, 0 bytes written, verdict): opened and, for a model of fixed classes, run on a drawn scene.

    Raises:
        SessionError: it cannot run there.
    """
    start = time.perf_counter()
    with OnnxSession(path, spec, provider=provider) as session:
        verdict = "opened"
        if spec.text is None:
            session.run(preprocess([draw_scene(0, size_hw=spec.input.size_hw).image], spec).feeds)
            verdict = "runs as a CUDA graph" if session.backend == "onnxruntime-cuda" else "runs"
        return session.backend, time.perf_counter() - start, 0, session.note or verdict
