"""`detrt bench BUNDLE...`: what a built model costs to run here, back end by back end, and next to its library.

Scopes: "forward" is the session alone, arrays in and arrays out; "end_to_end" is from the bytes of JPEG files to
detections. Every back end of a bundle that can run here is measured on the same pictures. Whether they agree is the
question of `detrt verify`.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .bench import machine, time_call
from .bundle import Bundle
from .errors import DetrtError, EngineError, MissingPackageError, SessionError
from .memory import peak_memory_mib
from .prompted import PromptedSession
from .session import Session
from .sessions import kind_of, open_session

BUILT = ("bundle", "onnx", "engine", "inductor")
Progress = Callable[[str, float | None, str], None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What to measure. batches: images a run, each a row. size_hw: (height, width), None for the model's own.

    repeats, warmup: runs with and before the clock. threads: of ONNX Runtime and PyTorch. backends: which; empty for all that
    run here. provider, device: as for `open_session`. prompt: for models that take one. against: the checkpoint, timed in its
    library as well; compile: there also under torch.compile. annotations, images: a data set in COCO's format, for average
    precision. parts: also where the time goes, and the share of the roofline.
    """

    batches: tuple[int, ...] = (1,)
    size_hw: tuple[int, int] | None = None
    repeats: int = 20
    warmup: int = 3
    threads: int | None = None
    backends: tuple[str, ...] = ()
    provider: str = "cpu"
    device: str | None = None
    prompt: str | None = None
    against: str | None = None
    compile: bool = False
    annotations: Path | None = None
    images: Path | None = None
    parts: bool = False

    def __post_init__(self) -> None:
        if not self.batches or not all(1 <= batch <= 256 for batch in self.batches):
            raise DetrtError(f"--batches must be numbers from 1 to 256, such as 1,4,16; got {self.batches}")
        if not 1 <= self.repeats <= 10_000 or not 0 <= self.warmup <= 10_000:
            raise DetrtError(f"repeats must be from 1 and warmup from 0 to 10000; got {self.repeats} and {self.warmup}")
        if (self.annotations is None) != (self.images is None):
            raise DetrtError(
                "average precision needs both --ground-truth (a JSON file in COCO's format) and --images (its folder)"
            )
        if self.compile and self.against is None:
            raise DetrtError("--compile times the checkpoint under torch.compile; give it with --against")


def is_built(ref: str) -> bool:
    """Whether a reference is a bundle or a file of one, and not a checkpoint."""
    try:
        return kind_of(ref) in BUILT
    except SessionError:
        return False


def bench_bundles(refs: Sequence[str], config: RunConfig = RunConfig(), progress: Progress | None = None) -> dict[str, Any]:
    """{"machine", "config", "rows", "skipped", "parts"}: a row for each model, back end, batch and scope.

    Raises:
        DetrtError: a model that cannot be opened at all, one that takes a prompt without one, or bad choices.
    """
    rows: list[Row] = []
    skipped: list[dict[str, str]] = []
    parts: list[Row] = []
    tell = progress or (lambda *step: None)
    sizes: list[tuple[int, int]] = []
    precision = "fp32"
    for index, ref in enumerate(refs):
        found = False
        for backend in _backends(ref, config):
            tell("bench", index / len(refs), f"{ref} {backend}")
            try:
                before, start = _gpu_used_mib(), time.perf_counter()
                session = _opened(ref, backend, config)
            except (EngineError, MissingPackageError) as error:
                skipped.append({"model": ref, "backend": backend, "why": str(error)})
                continue
            opened = {"open_s": round(time.perf_counter() - start, 3), "gpu_before": before}
            found = True
            try:
                own, size, feeds = _measure(ref, session, opened, config)
                sizes.append(size)
                if config.annotations is not None:
                    tell("bench", index / len(refs), f"{ref} {backend} average precision")
                    ap = _average_precision(session, config)
                    own = [{**row, "AP": ap} for row in own]
                if config.parts:
                    tell("bench", index / len(refs), f"{ref} {backend} parts")
                    parts.append(_parts(ref, session, own, feeds, config))
            finally:
                session.close()
            rows += own
            precision = _precision_of(ref)
        if not found:
            raise SessionError(f"nothing of '{ref}' can run here: " + "; ".join(s["why"] for s in skipped if s["model"] == ref))
    if config.against is not None:
        tell("bench", None, f"{config.against} in transformers")
        rows += _library(config, sizes[0], precision)
    settings = {"batches": list(config.batches), "repeats": config.repeats, "warmup": config.warmup, "threads": config.threads}
    return {"machine": machine(), "config": settings, "rows": rows, "skipped": skipped, "parts": parts}


def _opened(ref: str, backend: str, config: RunConfig) -> Session:
    session = open_session(ref, backend=backend, threads=config.threads, provider=config.provider, device=config.device)
    if isinstance(session, PromptedSession):
        if not config.prompt:
            session.close()
            raise SessionError(f"'{ref}' takes a prompt; say what to look for, e.g. --prompt 'a cat. a remote control.'")
        return session.bind(config.prompt)
    if config.prompt:
        session.close()
        raise SessionError(f"'{ref}' has fixed classes and takes no prompt; leave --prompt out")
    return session


def _backends(ref: str, config: RunConfig) -> tuple[str, ...]:
    if kind_of(ref) != "bundle":
        return ("auto",)
    bundle = Bundle.open(Path(ref))
    there = {"tensorrt": "engine", "inductor": "inductor", "onnxruntime": "onnx"}
    return tuple(b for b, kind in there.items() if bundle.of_kind(kind) and (not config.backends or b in config.backends))


def _measure(ref: str, session: Session, opened: Row, config: RunConfig) -> tuple[list[Row], tuple[int, int], Any]:
    """(rows, (height, width), inputs of the smallest batch)."""
    from .detector import Detector
    from .preprocess import preprocess

    rows: list[Row] = []
    first: Any = None
    size = config.size_hw or _own_size(session)
    for batch in config.batches:
        if session.max_batch is not None and batch > session.max_batch:
            continue
        pictures = _pictures(size, batch)
        given = size if session.spec.input.dynamic else None
        feeds = preprocess([p for p, _ in pictures], session.spec, size_hw=given).feeds
        first = feeds if first is None else first
        detector = Detector(session, batch_size=batch, size_hw=given)
        files = [data for _, data in pictures]
        scopes: dict[str, Callable[[], object]] = {
            "forward": lambda feeds=feeds: session.run(feeds),
            "end_to_end": lambda detector=detector, files=files: detector(files),
        }
        for scope, step in scopes.items():
            row = _row(ref, session.backend, scope, batch, size, _times(step, config, batch))
            used = _gpu_used_mib()
            if used is not None and opened["gpu_before"] is not None:
                row["gpu_memory_mib"] = max(0, used - opened["gpu_before"])
            rows.append(row | {"open_s": opened["open_s"]})
    return rows, size, first


def _row(ref: str, backend: str, scope: str, batch: int, size: tuple[int, int], times: Row) -> Row:
    return {
        "model": ref,
        "backend": backend,
        "scope": scope,
        "batch": batch,
        "height": size[0],
        "width": size[1],
        **times,
        "peak_memory_mib": round(peak_memory_mib()),
    }


def _library(config: RunConfig, size: tuple[int, int], precision: str) -> list[Row]:
    """Rows of the checkpoint in transformers, at the size of the first model."""
    from .bench_against import first_call_seconds, library_calls

    assert config.against is not None
    device = config.device or (config.provider if config.provider.startswith("cuda") else None)
    calls = library_calls(config.against, compiled=config.compile, device=device, precision=precision, threads=config.threads)
    rows = []
    for batch in config.batches:
        for backend, scopes in calls(size, [p for p, _ in _pictures(size, batch)]).items():
            opened = first_call_seconds(scopes["forward"])  # of a compiled model: compiling
            for scope, step in scopes.items():
                row = _row(config.against, backend, scope, batch, size, _times(step, config, batch))
                rows.append(row | {"open_s": round(opened, 3)})
    return rows


def _average_precision(session: Session, config: RunConfig) -> float | None:
    from .evaluate import evaluate_coco

    assert config.annotations is not None and config.images is not None
    # A prompt of the user's own does not stand for the categories of a data set.
    return evaluate_coco(getattr(session, "model", session), config.annotations, config.images).metrics["AP"]


def _parts(ref: str, session: Session, rows: list[Row], feeds: Any, config: RunConfig) -> Row:
    from .bench_parts import measure_parts
    from .bound import detector_of, with_text

    onnx = _onnx_of(ref)
    forward = next(row["p50_ms"] for row in rows if row["scope"] == "forward")
    found = measure_parts(detector_of(session), onnx, with_text(session, feeds), config.threads, forward)
    return {"model": ref, "backend": session.backend, "batch": rows[0]["batch"], **found}


def _onnx_of(ref: str) -> Path | None:
    """The graph of a bundle or of an ONNX file."""
    kind = kind_of(ref)
    if kind == "onnx":
        return Path(ref)
    if kind != "bundle":
        return None
    bundle = Bundle.open(Path(ref))
    files = [file for file in bundle.of_kind("onnx") if not Path(file.path).name.startswith("text")]
    return bundle.path_of(files[0]) if files else None


def _precision_of(ref: str) -> str:
    """What the products of a model compute in, as far as its graph tells: "fp32", "fp16" or "bf16"."""
    onnx = _onnx_of(ref)
    if onnx is None:
        return "fp32"
    from .graph import io
    from .graph.view import GraphView, precision_of

    return precision_of(GraphView.of(io.load(onnx, weights=False)))


def _gpu_used_mib() -> int | None:
    """Memory of the current GPU in use, by everybody; None where nothing in this process has opened one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


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
