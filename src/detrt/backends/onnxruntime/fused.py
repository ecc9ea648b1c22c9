"""The graph with ONNX Runtime's own attention, compared with the graph that it stands for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ... import files, graph
from ...graph.dequantize import remove_quantization
from ...spec import ModelSpec, Precision
from ..compare import compare_opened, drawn_batches
from .session import OnnxSession


def fused_difference(path: Path, fused: Path, spec: ModelSpec, *, quantized: bool = False) -> float:
    """Between two forms of a graph in ONNX Runtime, on one drawn scene and on two; relative to the largest value.

    Where they differ, the plain one is given the selections (top-k) of the fused one: scores that tie within rounding may change their
    order, and each query after them then is another one.

    quantized: both are compared without their quantization, which makes steps of differences in the last bit, and the fused one must run
    with it.

    Raises:
        SessionError: one of them cannot run.
    """
    if quantized:
        with OnnxSession(path, spec, fused=fused) as session:
            found = session.run(drawn_batches(session, (1,))[0])
        if not all(np.isfinite(output).all() for output in found.values()):
            return math.inf
        with files.scratch() as folder:
            exact = []
            for one in (path, fused):
                model = graph.load(one)
                remove_quantization(model)
                graph.save(model, folder / one.name)
                exact.append(folder / one.name)
            return fused_difference(exact[0], exact[1], spec)
    limit = Precision.FP32.output_tolerance
    errors = compare_opened(lambda: OnnxSession(path, spec), lambda: OnnxSession(path, spec, fused=fused), drawn_batches, limit)
    return max(errors.values())
