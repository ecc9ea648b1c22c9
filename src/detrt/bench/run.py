"""`detrt bench`: measure checkpoints or bundles and report it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..backends.open import kind_of
from ..errors import DetrtError
from ..system import StageProgress
from .bundles import measure_bundles
from .checkpoints import measure_checkpoints
from .config import BUNDLES, CHECKPOINTS, SCOPES, BenchConfig
from .measure import Meter, machine


def bench(models: Sequence[str], config: BenchConfig, progress: StageProgress | None = None) -> dict[str, Any]:
    """Measure checkpoints (the steps from checkpoint to engine) or bundles (every backend that runs here).

    Args:
        models: checkpoints, or bundles and files of them; not both.
        config: what to measure.
        progress: called with (stage, fraction or None, text).

    Returns:
        {"machine", "config", "rows", "skipped", "notes", "parts"}. Of checkpoints a row is a model, with its latencies in
        "latency"; of bundles a row is a model, backend, batch size and scope.

    Raises:
        DetrtError: a model that cannot be loaded, built or opened at all; a prompt that is missing; an option that has no
            effect on these models.
    """
    kind = models_of(models)
    config.check_models(kind)
    report = progress or (lambda *step: None)
    meter = Meter(config)
    if kind == CHECKPOINTS:
        meter.rows = measure_checkpoints(models, config, report)
    else:
        if config.plot is not None:
            from ..data.figure import check_figure

            check_figure(config.plot)
        measure_bundles(models, meter, report)
    settings = config.to_dict(kind) | ({"scopes": config.scopes or SCOPES} if kind == BUNDLES else {})
    result = {"machine": machine(), "config": settings, "rows": meter.rows}
    result |= {"skipped": meter.skipped, "notes": meter.notes, "parts": meter.parts}
    if config.plot is not None:
        from .plot import write_plot

        write_plot(result, config.plot)
    return result


def models_of(refs: Sequence[str]) -> str:
    """CHECKPOINTS or BUNDLES.

    Raises:
        DetrtError: none, some of each, or a path that is neither.
    """
    if not refs:
        raise DetrtError("give at least one checkpoint or bundle, e.g. detrt bench embedded:shapes")
    built = [kind_of(ref) != "checkpoint" for ref in refs]
    if any(built) and not all(built):
        raise DetrtError("give checkpoints or bundles, not both in one run: they are measured in different ways")
    return BUNDLES if built[0] else CHECKPOINTS
