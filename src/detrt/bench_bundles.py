"""`detrt bench BUNDLE...`: what a built model costs to run here, back end by back end.

Scopes: "forward" is the session alone, arrays in and arrays out; "end_to_end" is from the bytes of JPEG files to
detections. Every back end of a bundle that can run here is measured on the same pictures. Whether they agree is the
question of `detrt verify`.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench import machine, time_call
from .bundle import Bundle
from .errors import DetrtError, EngineError, MissingPackageError, SessionError
from .files import write_text
from .memory import peak_memory_mib
from .session import Session
from .sessions import kind_of, open_session

BUILT = ("bundle", "onnx", "engine", "inductor")
Progress = Callable[[str, float | None, str], None]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What to measure. batches: images a run, each a row. size_hw: (height, width), None for the model's own.

    repeats, warmup: runs with and before the clock. threads: of ONNX Runtime. backends: which; empty for all that run here.
    """

    batches: tuple[int, ...] = (1,)
    size_hw: tuple[int, int] | None = None
    repeats: int = 20
    warmup: int = 3
    threads: int | None = None
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.batches or not all(1 <= batch <= 256 for batch in self.batches):
            raise DetrtError(f"--batches must be numbers from 1 to 256, such as 1,4,16; got {self.batches}")
        if not 1 <= self.repeats <= 10_000 or not 0 <= self.warmup <= 10_000:
            raise DetrtError(f"repeats must be from 1 and warmup from 0 to 10000; got {self.repeats} and {self.warmup}")


def is_built(ref: str) -> bool:
    """Whether a reference is a bundle or a file of one, and not a checkpoint."""
    try:
        return kind_of(ref) in BUILT
    except SessionError:
        return False


def bench_bundles(refs: Sequence[str], config: RunConfig = RunConfig(), progress: Progress | None = None) -> dict[str, Any]:
    """{"machine", "config", "rows", "skipped"}: a row for each model, back end, batch and scope.

    Raises:
        DetrtError: a model that cannot be opened at all, or takes a prompt.
    """
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for index, ref in enumerate(refs):
        found = False
        for backend in _backends(ref, config):
            if progress:
                progress("bench", index / len(refs), f"{ref} {backend}")
            try:
                start = time.perf_counter()
                session = open_session(ref, backend=backend, threads=config.threads)
            except (EngineError, MissingPackageError, SessionError) as error:
                skipped.append({"model": ref, "backend": backend, "why": str(error)})
                continue
            opened_s = time.perf_counter() - start
            found = True
            try:
                rows += _measure(ref, session, opened_s, config)
            finally:
                session.close()
        if not found:
            raise SessionError(f"nothing of '{ref}' can run here: " + "; ".join(s["why"] for s in skipped if s["model"] == ref))
    settings = {"batches": list(config.batches), "repeats": config.repeats, "warmup": config.warmup, "threads": config.threads}
    return {"machine": machine(), "config": settings, "rows": rows, "skipped": skipped}


def _backends(ref: str, config: RunConfig) -> tuple[str, ...]:
    if kind_of(ref) != "bundle":
        return ("auto",)
    bundle = Bundle.open(Path(ref))
    if bundle.spec.text is not None:
        raise SessionError(f"'{ref}' takes a prompt, which detrt bench measures with checkpoints only; give the checkpoint")
    there = {"tensorrt": "engine", "inductor": "inductor", "onnxruntime": "onnx"}
    return tuple(b for b, kind in there.items() if bundle.of_kind(kind) and (not config.backends or b in config.backends))


def _measure(ref: str, session: Session, opened_s: float, config: RunConfig) -> list[dict[str, Any]]:
    from .detector import Detector
    from .preprocess import preprocess

    rows = []
    size = config.size_hw or _own_size(session)
    for batch in config.batches:
        if session.max_batch is not None and batch > session.max_batch:
            continue
        pictures = _pictures(size, batch)
        given = size if session.spec.input.dynamic else None
        feeds = preprocess([p for p, _ in pictures], session.spec, size_hw=given).feeds
        detector = Detector(session, batch_size=batch, size_hw=given)
        files = [data for _, data in pictures]
        scopes: dict[str, Callable[[], object]] = {
            "forward": lambda feeds=feeds: session.run(feeds),
            "end_to_end": lambda detector=detector, files=files: detector(files),
        }
        for scope, step in scopes.items():
            rows.append(
                {
                    "model": ref,
                    "backend": session.backend,
                    "scope": scope,
                    "batch": batch,
                    "height": size[0],
                    "width": size[1],
                    "open_s": round(opened_s, 3),
                    **_times(step, config, batch),
                    "peak_memory_mib": round(peak_memory_mib()),
                }
            )
    return rows


def _times(step: Callable[[], object], config: RunConfig, batch: int) -> dict[str, Any]:
    samples = time_call(step, config.warmup, config.repeats)
    p50, p90, p99 = (round(float(v), 3) for v in np.percentile(samples, [50, 90, 99]))
    return {
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "min_ms": round(min(samples), 3),
        "images_per_s": round(batch * 1e3 / p50, 2),
        "samples_ms": [round(s, 3) for s in samples],
    }


def _own_size(session: Session) -> tuple[int, int]:
    shape = session.inputs[0].shape[2:]
    if all(isinstance(side, int) for side in shape):
        return int(shape[0]), int(shape[1])
    return session.spec.input.size_hw


def _pictures(size: tuple[int, int], count: int) -> list[tuple[np.ndarray, bytes]]:
    """Drawn scenes of the input's own size, as arrays and as JPEG bytes."""
    from PIL import Image

    from .scenes import draw_scene

    found = []
    for index in range(count):
        image, buffer = draw_scene(index, size_hw=size).image, io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=90)
        found.append((image, buffer.getvalue()))
    return found


def write_plot(report: dict[str, Any], path: str | os.PathLike) -> None:
    """Forward latency against batch, a line for each model and back end, as SVG."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in report["rows"]:
        if row["scope"] == "forward":
            lines.setdefault(f"{row['model']} {row['backend']}", []).append((row["batch"], row["p50_ms"]))
    width, height, left, bottom = 720, 420, 70, 50
    most = max((ms for line in lines.values() for _, ms in line), default=1.0)
    widest = max((batch for line in lines.values() for batch, _ in line), default=1)

    def at(batch: int, ms: float) -> str:
        return f"{left + (width - left - 20) * batch / widest:.1f},{height - bottom - (height - bottom - 20) * ms / most:.1f}"

    colours = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#bc4c00", "#57606a")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<path d="M{left},20V{height - bottom}H{width - 20}" fill="none" stroke="#57606a"/>',
        f'<text x="{width / 2}" y="{height - 12}">images a run (to {widest})</text>',
        f'<text x="8" y="24">{most:.3g} ms</text><text x="8" y="{height - bottom}">0 ms</text>',
    ]
    for index, (name, line) in enumerate(sorted(lines.items())):
        colour = colours[index % len(colours)]
        points = " ".join(at(*point) for point in sorted(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>' for p in points.split()]
        safe = name.replace("&", "&amp;").replace("<", "&lt;")
        parts.append(f'<text x="{left + 14}" y="{34 + 16 * index}" fill="{colour}">{safe}</text>')
    write_text(Path(path), "\n".join([*parts, "</svg>"]) + "\n")
