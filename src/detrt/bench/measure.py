"""Timing: what every measurement of `detrt bench` shares.

Scopes: "kernel" is the work of the GPU alone; "forward" is the session alone, arrays in and arrays out; "end_to_end" is from
images to detections. Nothing but the measured call is inside a timed region.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import SessionError
from ..system import peak_memory_mib, processor_name
from .config import SCOPES, BenchConfig

Row = dict[str, Any]
Calls = Mapping[str, Callable[[], object]]  # scope -> call that has finished its work when it returns


class Meter:
    """Measures the scopes of models and collects their rows.

    Attributes:
        rows: one for each model, backend, batch size and scope.
        skipped: {"model", "backend", "why", "scope"} of everything that cannot be measured here.
        notes: {"model", "backend", "note"}.
        parts: see `profile.measure_parts`; "stages": see `stages.stage_times`.
    """

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.notes: list[dict[str, str]] = []
        self.parts: list[Row] = []

    def skip(self, model: str, backend: str, why: object, scope: str = "") -> None:
        self.skipped.append({"model": model, "backend": backend, "why": str(why)} | ({"scope": scope} if scope else {}))

    def measure(
        self, model: str, backend: str, calls: Calls, batch: int, size_hw: tuple[int, int], gpu_before: int | None
    ) -> list[Row]:
        """A row for each scope that is wanted and exists; they are returned, not collected.

        gpu_before: GPU memory in use before the model was opened, MiB (`gpu_memory_mib`).
        """
        rows = []
        for scope in SCOPES:
            if scope not in (self.config.scopes or SCOPES) or scope not in calls:
                continue
            about = {"model": model, "backend": backend, "scope": scope, "batch": batch}
            about |= {"height": size_hw[0], "width": size_hw[1]}
            row = self._kernel_row(about, calls[scope]) if scope == "kernel" else self._row(about, calls[scope])
            if row is None:
                continue
            used = gpu_memory_mib()
            if used is not None and gpu_before is not None:
                row["gpu_memory_mib"] = max(0, used - gpu_before)
            rows.append(row)
        return rows

    def _row(self, about: Row, step: Callable[[], object]) -> Row:
        samples = time_call(step, self.config.warmup, self.config.repeats)
        return about | statistics(samples, about["batch"])

    def _kernel_row(self, about: Row, step: Callable[[], object]) -> Row | None:
        from .profile import device_times

        model, backend = about["model"], about["backend"]
        if backend.endswith("-cpu"):
            if self.config.scopes:
                self.skip(model, backend, "on a CPU there is no device to measure apart from the call: see forward", "kernel")
            return None
        try:
            times = device_times(step, self.config.warmup, self.config.repeats)
        except SessionError as error:
            self.skip(model, backend, error, "kernel")
            return None
        row = about | statistics(times.samples_ms, about["batch"]) | {"kernels": times.kernels}
        if times.msda_calls:
            msda = float(np.median(times.msda_samples_ms))
            row |= {"msda_ms": round(msda, 4), "msda_calls": times.msda_calls, "msda_share": round(msda / row["p50_ms"], 4)}
        return row


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


def statistics(samples_ms: Sequence[float], batch: int) -> Row:
    """Percentiles and samples in milliseconds of a run of `batch` images, throughput, and the process's peak memory so far."""
    p50, p90, p99 = (round(float(v), 3) for v in np.percentile(samples_ms, [50, 90, 99]))
    return {
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "min_ms": round(min(samples_ms), 3),
        "images_per_s": round(batch * 1e3 / max(p50, 1e-3), 2),
        "samples_ms": [round(s, 3) for s in samples_ms],
        "peak_memory_mib": round(peak_memory_mib()),
    }


def drawn_images(size_hw: tuple[int, int], count: int) -> list[NDArray[np.uint8]]:
    """Drawn scenes of the input's own size, so that nothing is padded: (height, width, 3) uint8."""
    from ..data.scenes.scene import draw_images

    height, width = size_hw
    return [image[:height, :width] for image in draw_images(count, size_hw)]


def jpeg_of(image: NDArray[np.uint8]) -> bytes:
    """The image as a JPEG file of quality 90."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def gpu_memory_mib() -> int | None:
    """Memory of the current GPU in use by all processes; None where nothing in this process has opened one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions."""
    from ..system import diagnose

    found = diagnose()
    versions = {package.name: package.version for package in found.packages if package.version}
    return {**found.machine, "processor": processor_name(), "gpus": list(found.gpus), "versions": versions}
