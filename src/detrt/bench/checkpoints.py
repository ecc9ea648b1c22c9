"""Measure models on this machine: every step from checkpoint to engine, and the latency of each back end.

A model is measured in a process of its own, so that its peak memory is its own. Every figure names its
scope, and the report names the machine. Nothing but the measured call is inside a timed region.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.child_process import Progress, answer_parent, run_child
from ..errors import DetrtError, SessionError
from ..system import peak_memory_mib, usable_cores

WARMUP, REPEATS = 2, 7


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What to measure. size: (height, width) of the input, None for the model's usual size.

    batch: images a run. threads: of PyTorch and ONNX Runtime alike, None for all cores.
    engine: build a TensorRT-RTX engine as well. torch: time the plain transformers model as well.
    """

    size_hw: tuple[int, int] | None = None
    batch: int = 1
    repeats: int = REPEATS
    warmup: int = WARMUP
    threads: int | None = None
    engine: bool = True
    torch: bool = True
    msda: str = "auto"
    fixed: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("batch", 1, 256), ("repeats", 1, 10_000), ("warmup", 0, 10_000)):
            if not low <= getattr(self, name) <= high:
                raise DetrtError(f"{name} must be from {low} to {high}; got {getattr(self, name)}")
        if self.threads is not None and self.threads < 1:
            raise DetrtError(f"threads must be at least 1, or left out for all cores; got {self.threads}")
        if self.size_hw is not None and not all(1 <= side <= 16384 for side in self.size_hw):
            raise DetrtError(f"size must be from 1 to 16384 pixels a side; got {self.size_hw[0]}x{self.size_hw[1]}")


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds a run (the whole batch) and the samples they come from."""

    backend: str
    scope: str
    p50_ms: float
    p90_ms: float
    min_ms: float
    samples_ms: tuple[float, ...]


def bench_models(
    models: list[str],
    config: BenchConfig = BenchConfig(),
    *,
    trust_remote_code: bool = False,
    progress: Callable[[str, float | None, str], None] | None = None,
) -> dict[str, Any]:
    """Measure each model in a child process; {"machine": ..., "config": ..., "rows": [...]}.

    Raises:
        DetrtError: a model that cannot be loaded or built; nothing is measured after it.
    """
    rows = []
    for index, model in enumerate(models):
        if progress:
            progress("bench", index / len(models), model)
        rows.append(_in_child(model, config, trust_remote_code))
    return {"machine": machine(), "config": asdict(config), "rows": rows}


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions."""
    from ..system import diagnose

    found = diagnose()
    versions = {package.name: package.version for package in found.packages if package.version}
    return {**found.machine, "processor": _processor(), "gpus": list(found.gpus), "versions": versions}


def measure_call(step: Callable[[], object], backend: str, scope: str, config: BenchConfig) -> Latency:
    """Time a call after warming up; the call must have finished its work when it returns."""
    samples = time_call(step, config.warmup, config.repeats)
    p50, p90 = np.percentile(samples, [50, 90])
    return Latency(backend, scope, float(p50), float(p90), min(samples), tuple(round(s, 3) for s in samples))


def time_call(step: Callable[[], object], warmup: int, repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` calls, after `warmup` others."""
    for _ in range(warmup):
        step()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def measure_model(model: str, config: BenchConfig, folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """All figures of one checkpoint, in this process. See docs/results/benchmarks.md for what each one means."""
    from ..backends.onnxruntime.session import OnnxSession
    from ..backends.tensorrt import EngineConfig, build_engine
    from ..export import ExportConfig, export_onnx
    from ..models.load import load_source

    start = time.perf_counter()
    source = load_source(model, trust_remote_code=trust_remote_code)
    load_seconds = time.perf_counter() - start
    size = config.size_hw or source.spec.input.size_hw
    pinned = config.fixed or not source.spec.input.dynamic
    start = time.perf_counter()
    report = export_onnx(
        source,
        folder / "model.onnx",
        ExportConfig(msda=config.msda, height=size[0] if pinned else None, width=size[1] if pinned else None),
    )
    row: dict[str, Any] = {
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
    if config.engine:
        # The profile's largest batch and size set the builder's memory, so they are the measured ones.
        sides = {"height": (size[0],) * 3, "width": (size[1],) * 3}
        engine = EngineConfig(batch=(1, config.batch, max(config.batch, 2)), **sides)  # type: ignore[arg-type]
        built = build_engine(folder / "model.onnx", folder / "model.engine", engine)
        row |= {
            "build_seconds": built.facts.build_seconds,
            "engine_bytes": built.size,
            "engine_layers": built.facts.layers,
            "build_peak_memory_mib": built.facts.peak_memory_mib,
        }
    session = OnnxSession(folder / "model.onnx", threads=config.threads)
    latencies = [_forward_onnx(session, size, config), _end_to_end(session, size, config)]
    session.close()
    if config.torch:
        latencies += _torch_latencies(source, size, config)
    row["latency"] = [asdict(latency) for latency in latencies]
    return row


def _feeds(spec: Any, size: tuple[int, int], batch: int) -> dict[str, np.ndarray]:
    from ..data.preprocess import preprocess

    return preprocess(_pictures(size, batch), spec, size_hw=size if spec.input.dynamic else None).feeds


def _pictures(size: tuple[int, int], count: int) -> list[np.ndarray]:
    """Drawn scenes of the input's own aspect ratio, so that nothing is padded."""
    from ..data.scenes.scene import draw_scene

    return [draw_scene(index, size_hw=size).image for index in range(count)]


def _forward_onnx(session: Any, size: tuple[int, int], config: BenchConfig) -> Latency:
    feeds = _feeds(session.spec, size, config.batch)
    return measure_call(lambda: session.run(feeds), session.backend, "forward", config)


def _end_to_end(session: Any, size: tuple[int, int], config: BenchConfig) -> Latency:
    from ..detector import Detector

    detector = Detector(session, batch_size=config.batch, size_hw=size if session.spec.input.dynamic else None)
    pictures = _pictures(size, config.batch)
    return measure_call(lambda: detector(pictures), session.backend, "end_to_end", config)


def _torch_latencies(source: Any, size: tuple[int, int], config: BenchConfig) -> list[Latency]:
    """The plain transformers model: forward on a ready tensor, and from arrays to boxes as its users call it."""
    import torch

    torch.set_num_threads(config.threads or usable_cores())
    module = source.module
    if getattr(type(module), "_supports_sdpa", False):
        # What from_pretrained chooses by itself; detrt loads models with plain attention, for tracing.
        module.config._attn_implementation = "sdpa"
    pictures = _pictures(size, config.batch)
    processor = processor_of(source.family.name, source.spec, size)
    sizes = [picture.shape[:2] for picture in pictures]

    def prepared() -> Any:
        return processor(images=pictures, return_tensors="pt")

    def forward_on(feeds: Any) -> Any:
        with torch.inference_mode():
            return module(**feeds)

    def end_to_end() -> Any:
        found = forward_on(prepared())
        return processor.post_process_object_detection(found, threshold=0.5, target_sizes=sizes)

    feeds = prepared()
    return [
        measure_call(lambda: forward_on(feeds), "transformers", "forward", config),
        measure_call(end_to_end, "transformers", "end_to_end", config),
    ]


# RF-DETR's own processor needs torchvision; Deformable DETR's does the same steps.
_PROCESSORS = {
    "detr": "Detr",
    "table-transformer": "Detr",
    "conditional_detr": "ConditionalDetr",
    "dab_detr": "ConditionalDetr",
    "yolos": "Yolos",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetr",
    "d_fine": "RTDetr",
    "deimv2": "RTDetr",
}


def processor_of(family: str, spec: Any, size: tuple[int, int]) -> Any:
    """transformers' image processor (its Pillow version) with the checkpoint's settings, at the measured size."""
    import transformers

    entry = spec.input
    name = f"{_PROCESSORS.get(family, 'DeformableDetr')}ImageProcessorPil"
    return getattr(transformers, name)(
        size={"height": size[0], "width": size[1]},
        do_normalize=any(entry.mean) or entry.std != (1.0, 1.0, 1.0),
        image_mean=list(entry.mean),
        image_std=list(entry.std),
        do_pad=entry.mask,
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows less, but something
    return platform.processor() or platform.machine()


def _in_child(model: str, config: BenchConfig, trust_remote_code: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="detrt-bench-") as folder:
        row: dict[str, Any] = run_child(
            (sys.executable, "-m", "detrt.bench.checkpoints"),
            {"model": model, "config": asdict(config), "folder": Path(folder), "trust_remote_code": trust_remote_code},
            what="measuring",
            error=SessionError,
            cwd=Path.cwd(),
        )
        return row


def _measure(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    config = BenchConfig(**request["config"])
    return measure_model(request["model"], config, request["folder"], trust_remote_code=request["trust_remote_code"])


if __name__ == "__main__":
    answer_parent(int(sys.argv[1]), _measure)
