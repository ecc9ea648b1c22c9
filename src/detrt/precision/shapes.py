"""Every shape of a graph at one input size, from one run: symbolic shapes are not guessed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import onnx

from ..backends.base import Feeds
from ..backends.onnxruntime.session import profiled_run
from ..graph.emulate_low_precision import rounded, runs_nowhere

Shapes = dict[str, tuple[list[list[int]], list[list[int]]]]


def run_shapes(model: onnx.ModelProto, feeds: Feeds) -> Shapes:
    """Node name -> (shapes of its inputs, shapes of its outputs), as ONNX Runtime's profiler names them.

    Raises:
        SessionError: the graph does not run on these feeds.
    """
    runnable = rounded(model) if runs_nowhere(model) else model
    with tempfile.TemporaryDirectory(prefix="detrt-") as folder:
        rows = json.loads(profiled_run(runnable.SerializeToString(), feeds, Path(folder)).read_text("utf-8"))
    found: Shapes = {}
    for row in rows:
        arguments = row.get("args", {})
        if "input_type_shape" in arguments:
            inputs, outputs = (
                [shape for entry in arguments[key] for shape in entry.values()]
                for key in ("input_type_shape", "output_type_shape")
            )
            found[str(row.get("name", "")).removesuffix("_kernel_time")] = (inputs, outputs)
    return found
