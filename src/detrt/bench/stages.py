"""The stages of the path from image files to detections, each timed alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ..backends.base import Session
from ..data.postprocess import DetectionFilter
from ..data.prefetch import Prefetcher
from ..data.preprocess import plan_batches, preprocess
from ..detector import MAX_DECODERS
from ..system import usable_cores
from .measure import time_call

REPEATS = 20
KEEP = DetectionFilter(0.5)


def stage_times(session: Session, files: Sequence[bytes], size_hw: tuple[int, int] | None) -> dict[str, float]:
    """Median milliseconds of each stage of one batch, in the order of the path.

    Where the session resizes on its device: "decode", "upload", "resize", "forward", "selection", "download" and "post-process";
    elsewhere "decode", "resize", "forward" and "post-process". They overlap from batch to batch, so that throughput is higher
    than their sum tells. Of a list of class names that runs in chunks, the first.

    Args:
        session: with fixed classes, or with a bound prompt.
        files: encoded images of a batch.
        size_hw: (height, width) of the input in pixels, for models with a dynamic size; None: the model's own.
    """
    runner = session.image_runner
    decoders = Prefetcher(1 if runner is None else min(MAX_DECODERS, usable_cores()))
    try:
        decode_ms = _median(lambda: decoders.load_batch(files))
        images = decoders.load_batch(files)
    finally:
        decoders.close()
    (plan,) = plan_batches(
        [(image.shape[0], image.shape[1]) for image in images],
        session.spec.input,
        size_hw=size_hw,
        sizes=() if size_hw is not None else session.info.sizes,
        fill=session.info.fixed_batch,
    )
    batch = [images[index] for index in plan.indices]
    stages = {"decode": decode_ms}
    outputs: Any
    if runner is not None:
        stages |= {stage: statistics.median(times) for stage, times in runner.stage_times(batch, plan, REPEATS).items()}
        outputs = runner.submit(batch, plan).outputs()
    else:
        stages["resize"] = _median(lambda: preprocess(batch, session.spec, plan=plan))
        feeds = preprocess(batch, session.spec, plan=plan).feeds
        stages["forward"] = _median(lambda: session.run(feeds))
        outputs = session.run(feeds)
    stages["post-process"] = _median(lambda: session.postprocess(outputs, plan.originals_hw, KEEP))
    return {stage: round(ms, 4) for stage, ms in stages.items()}


def _median(step: Callable[[], object]) -> float:
    return statistics.median(time_call(step, 1, REPEATS))
