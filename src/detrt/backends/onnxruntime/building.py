"""What is built for ONNX Runtime beside the graph that every bundle has, and whether the graph runs on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ... import files
from ...data.preprocess import preprocess
from ...data.scenes.scene import draw_images
from ...errors import SessionError
from ...spec import ModelSpec, Precision
from ..building import MODEL, Builder, BuildPlan, Stage, Work
from ..shared import SharedOptions
from .config import GraphConfig
from .session import OnnxSession, require_provider

FUSED = "model.onnxruntime.onnx"


class OnnxBuilder(Builder):
    """Fuses attention, before other backends are timed beside ONNX Runtime, and tries the finished graph."""

    def configs_for(self, asked: SharedOptions, make: Callable[..., GraphConfig]) -> list[GraphConfig]:
        return [make(fuse_attention=True, try_devices=asked.devices)]

    def check(self, configs: Sequence[GraphConfig], plan: BuildPlan) -> None:
        for device in (device for config in configs for device in config.try_devices):
            require_provider(device)

    def adds(self, configs: Sequence[GraphConfig]) -> bool:
        return any(config.try_devices for config in configs)

    def prepare(self, configs: Sequence[GraphConfig], work: Work) -> None:
        if any(config.fuse_attention for config in configs):
            _fuse_attention(work)

    def build(self, configs: Sequence[GraphConfig], plan: BuildPlan, work: Work) -> None:
        return

    def finish(self, configs: Sequence[GraphConfig], work: Work) -> None:
        for device in (device for config in configs for device in config.try_devices):
            work.say("onnxruntime", None, f"trying {device}")
            work.stages.append(_try_device(work.graphs / MODEL, work.spec, device))


def _fuse_attention(work: Work) -> None:
    """The graph with ONNX Runtime's own attention, where it has some in FP32 and gives the same."""
    precision = work.graph_precision
    if precision not in (Precision.FP32, Precision.INT8) or work.spec.text is not None or work.graphs != work.folder:
        return
    from ... import graph
    from ...graph.fuse_attention import fuse_attention, save_beside
    from ...graph.raise_msda import sample_grids
    from ...graph.split_resize import split_resize
    from .fused import fused_difference

    start = time.perf_counter()
    work.say("attention", None, "fusing")
    model = graph.load(work.graphs / MODEL)
    count, sampled = fuse_attention(model), sample_grids(model)
    if not count + sampled + split_resize(model):
        return
    save_beside(model, work.folder / FUSED, work.folder / MODEL)
    try:
        error = fused_difference(work.folder / MODEL, work.folder / FUSED, work.spec, quantized=precision == Precision.INT8)
    except SessionError as failure:
        work.warnings.append(f"ONNX Runtime's own attention cannot run here, so {MODEL} runs as it is: {failure}")
        error = math.inf
    if error > Precision.FP32.output_tolerance:
        files.remove(work.folder / FUSED)
        if math.isfinite(error):
            work.warnings.append(f"ONNX Runtime's own attention gives something else ({error:.1e}), so {MODEL} runs as it is")
        return
    work.add(FUSED, "onnx-fused")
    size = (work.folder / FUSED).stat().st_size
    work.done(
        "attention",
        start,
        size,
        f"{count} fused for ONNX Runtime{f', {sampled} with GridSample' * (sampled > 0)}, {error:.1e} from {MODEL}",
    )


def _try_device(path: Path, spec: ModelSpec, device: str) -> Stage:
    """Open a graph with ONNX Runtime and, for a model of fixed classes, run it on a drawn scene.

    Raises:
        SessionError: it cannot run there.
    """
    start = time.perf_counter()
    with OnnxSession(path, spec, provider=device) as session:
        verdict = "opened"
        if spec.text is None:
            session.run(preprocess(draw_images(1, spec.input.size_hw), spec).feeds)
            verdict = "runs as a CUDA graph" if device.startswith("cuda") else "runs"
        return Stage(session.info.name, time.perf_counter() - start, 0, session.info.note or verdict)


BUILDER = OnnxBuilder()
