"""Checkpoints: every step from checkpoint to engine, and the latency of ONNX Runtime next to transformers.

A checkpoint is measured in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import files
from ..backends.child_process import answer_parent, run_child
from ..backends.worker_process import module_command
from ..errors import MissingPackageError, SessionError
from ..system import Progress, StageProgress, peak_memory_mib
from .config import BenchConfig
from .measure import Meter, Row, drawn_images


def measure_checkpoints(models: Sequence[str], config: BenchConfig, progress: StageProgress) -> list[Row]:
    """A row for each checkpoint, each measured in a child process.

    Raises:
        DetrtError: a model that cannot be loaded or built; nothing is measured after it.
    """
    rows = []
    for index, model in enumerate(models):
        progress("bench", index / len(models), model)
        rows.append(_in_child(model, config))
    return rows


def measure_checkpoint(model: str, config: BenchConfig, folder: Path) -> Row:
    """All results of one checkpoint, in this process. See docs/results/benchmarks.md for what each one means."""
    from ..backends.tensorrt import EngineConfig, build_engine
    from ..export import ExportConfig, export_onnx
    from ..models.load import load_source

    start = time.perf_counter()
    source = load_source(model, config.load)
    load_seconds = time.perf_counter() - start
    if source.spec.text is not None:
        raise SessionError(f"'{model}' takes a prompt; build a bundle, and measure that with `prompt`: detrt build {model}")
    size = config.size or source.spec.input.size_hw
    pinned = config.fixed or not source.spec.input.dynamic
    export = ExportConfig(msda=config.msda or "auto", height=size[0] if pinned else None, width=size[1] if pinned else None)
    start = time.perf_counter()
    report = export_onnx(source, folder / "model.onnx", export)
    row: Row = {
        "model": model,
        "family": source.family.name,
        "parameters": source.provenance.parameters,
        "height": size[0],
        "width": size[1],
        "symbolic_size": report.spec.input.dynamic,
        "nodes": report.summary.nodes,
        "onnx_bytes": sum(path.stat().st_size for path in folder.glob("model.onnx*")),
        "load_seconds": load_seconds,
        "export_seconds": report.seconds,
        "check_seconds": time.perf_counter() - start - report.seconds,
        "check_error": report.worst,
        "peak_memory_mib": peak_memory_mib(),
    }
    batch = config.batches[0]
    if config.engine is not False:
        # The profile's largest batch and size set the builder's memory, so they are the measured ones.
        sides = {"height": (size[0],) * 3, "width": (size[1],) * 3}
        engine = EngineConfig(batch=(1, batch, max(batch, 2)), **sides)  # type: ignore[arg-type]
        built = build_engine(folder / "model.onnx", folder / "model.engine", engine)
        row |= {
            "build_seconds": built.facts.build_seconds,
            "engine_bytes": built.size,
            "engine_layers": built.facts.layers,
            "build_peak_memory_mib": built.facts.peak_memory_mib,
        }
    row["latency"] = _latencies(source, folder / "model.onnx", size, batch, config)
    return row


def _latencies(source: Any, onnx: Path, size: tuple[int, int], batch: int, config: BenchConfig) -> list[Row]:
    """Rows of the scopes forward (on ready arrays) and end_to_end (from decoded images to detections)."""
    from ..backends.onnxruntime.session import OnnxSession
    from ..data.preprocess import preprocess
    from ..detector import Detector
    from .reference import library_calls

    meter, images = Meter(config), drawn_images(size, batch)
    model = source.provenance.source
    with OnnxSession(onnx, threads=config.threads) as session:
        size_hw = size if session.spec.input.dynamic else None
        feeds = preprocess(images, session.spec, size_hw=size_hw).feeds
        detector = Detector(session, batch_size=batch, size=size_hw)
        calls = {"forward": lambda: session.run(feeds), "end_to_end": lambda: detector(images)}
        rows = meter.measure(model, session.info.name, calls, batch, size, None)
    if config.torch is not False:
        try:
            library = library_calls(source, threads=config.threads)(size, images)
        except MissingPackageError as error:
            raise SessionError(f"{error}; or add `torch=False`") from None
        for backend, both in library.items():
            rows += meter.measure(model, backend, {name: both[name] for name in calls}, batch, size, None)
    return rows


def _in_child(model: str, config: BenchConfig) -> Row:
    with files.scratch() as folder:
        row: Row = run_child(
            module_command("detrt.bench.checkpoints"),
            {"model": model, "config": config, "folder": folder},
            what="measuring",
            error=SessionError,
            cwd=Path.cwd(),
        )
        return row


def _measure(request: dict[str, Any], progress: Progress) -> Row:
    return measure_checkpoint(request["model"], request["config"], request["folder"])


if __name__ == "__main__":
    answer_parent(int(sys.argv[1]), _measure)
