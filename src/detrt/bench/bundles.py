"""`detrt bench BUNDLE...`: what a built model costs to run here, back end by back end, and next to its library.

Scopes: "kernel" is the work of the GPU alone; "forward" is the session alone, arrays in and arrays out; "end_to_end" is from
the bytes of JPEG files to detections. Every back end of a bundle that can run here is measured on the same pictures. Whether
they agree is the question of `detrt verify`.
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

from ..backends.base import Session
from ..backends.open import kind_of, open_session
from ..backends.prompted import PromptedSession
from ..bundle import Bundle, EngineFacts
from ..errors import DetrtError, EngineError, MissingPackageError, SessionError
from ..system import peak_memory_mib
from .checkpoints import machine, time_call

BUILT = ("bundle", "onnx", "engine", "inductor")
SCOPES = ("kernel", "forward", "end_to_end")
Progress = Callable[[str, float | None, str], None]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What to measure. batches: images a run, each a row. size_hw: (height, width), None for the model's own.

    repeats, warmup: runs with and before the clock. threads: of ONNX Runtime and PyTorch. scopes: of SCOPES; empty for all that
    there are. backends: which; empty for all that run here. providers: of ONNX Runtime ("cpu", "cuda", "cuda:1"), each a back end of its own; empty for the
    CPU, and the GPU where this ONNX Runtime has one. devices: of packages and engines ("cpu", "cuda:0"); empty for what the
    bundle has. prompt: for models that take one. against: checkpoints, timed in their library as well, one for all models or
    one for each; compile: there also under torch.compile. annotations, images: a data set in COCO's format, for average
    precision. parts: also where the time goes, and the share of the roofline.

    Raises:
        DetrtError: a value that is not allowed, or choices that do not go together.
    """

    batches: tuple[int, ...] = (1,)
    size_hw: tuple[int, int] | None = None
    repeats: int = 20
    warmup: int = 3
    threads: int | None = None
    scopes: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    prompt: str | None = None
    against: tuple[str, ...] = ()
    compile: bool = False
    annotations: Path | None = None
    images: Path | None = None
    parts: bool = False

    def __post_init__(self) -> None:
        if not self.batches or not all(1 <= batch <= 256 for batch in self.batches):
            raise DetrtError(f"--batches must be numbers from 1 to 256, such as 1,4,16; got {self.batches}")
        if not 1 <= self.repeats <= 10_000 or not 0 <= self.warmup <= 10_000:
            raise DetrtError(f"repeats must be from 1 and warmup from 0 to 10000; got {self.repeats} and {self.warmup}")
        if unknown := set(self.scopes) - set(SCOPES):
            raise DetrtError(f"--scopes must be of kernel, forward, end-to-end; got {', '.join(sorted(unknown))}")
        for name, given, allowed in (
            ("--provider", self.providers, ("cpu", "cuda", "tensorrt")),
            ("--device", self.devices, ("cpu", "cuda")),
        ):
            for one in given:
                kind, colon, number = one.partition(":")
                if kind not in allowed or (colon and not number.isdecimal()):
                    raise DetrtError(f"{name} must be of {', '.join(allowed)}, with commas, such as cpu,cuda:0; got {one!r}")
        if (self.annotations is None) != (self.images is None):
            raise DetrtError(
                "average precision needs both --ground-truth (a JSON file in COCO's format) and --images (its folder)"
            )
        if self.compile and not self.against:
            raise DetrtError("--compile times the checkpoint under torch.compile; give it with --against")


def is_built(ref: str) -> bool:
    """Whether a reference is a bundle or a file of one, and not a checkpoint."""
    try:
        return kind_of(ref) in BUILT
    except SessionError:
        return False


def bench_bundles(refs: Sequence[str], config: RunConfig = RunConfig(), progress: Progress | None = None) -> dict[str, Any]:
    """{"machine", "config", "rows", "skipped", "notes", "parts"}: a row for each model, back end, batch and scope.

    Raises:
        DetrtError: a model that cannot be opened at all, one that takes a prompt without one, or bad choices.
    """
    if len(config.against) not in (0, 1, len(refs)):
        raise DetrtError(
            f"--against names one checkpoint for all models, or one for each of the {len(refs)}; got {len(config.against)}"
        )
    if config.annotations is not None and config.images is not None:
        from ..evaluation.coco import read_dataset

        read_dataset(config.annotations, config.images)
    found = _Found()
    tell = progress or (lambda *step: None)
    for index, ref in enumerate(refs):
        start = len(found.rows)
        for way in ways_of(ref, config.backends, config.providers, config.devices):
            tell("bench", index / len(refs), f"{ref} {way}")
            _one(ref, way, config, found, lambda what, i=index: tell("bench", i / len(refs), what))
        if len(found.rows) == start:
            raise SessionError(
                f"nothing of '{ref}' can be measured here: "
                + "; ".join(dict.fromkeys(s["why"] for s in found.skipped if s["model"] == ref))
            )
        if config.against and (index == 0 or len(config.against) > 1):
            checkpoint = config.against[index if len(config.against) > 1 else 0]
            tell("bench", (index + 0.5) / len(refs), f"{checkpoint} in transformers")
            _library(checkpoint, ref, config, found, found.rows[start:])
    settings = {"batches": list(config.batches), "repeats": config.repeats, "warmup": config.warmup, "threads": config.threads}
    return {
        "machine": machine(),
        "config": settings | {"scopes": list(config.scopes or SCOPES)},
        "rows": found.rows,
        "skipped": found.skipped,
        "notes": found.notes,
        "parts": found.parts,
    }


class _Found:
    """What a run of bench collects; see `bench_bundles`."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.skipped: list[dict[str, str]] = []
        self.notes: list[dict[str, str]] = []
        self.parts: list[Row] = []

    def skip(self, model: str, backend: str, why: object, scope: str = "") -> None:
        self.skipped.append({"model": model, "backend": backend, "why": str(why)} | ({"scope": scope} if scope else {}))


def _one(ref: str, way: Way, config: RunConfig, found: _Found, tell: Callable[[str], None]) -> None:
    """All that is measured of one model with one back end."""
    before, start = _gpu_used_mib(), time.perf_counter()
    try:
        opened = open_session(ref, backend=way.backend, threads=config.threads, provider=way.provider, device=way.device)
    except (EngineError, MissingPackageError, SessionError) as error:
        found.skip(ref, str(way), error)
        return
    try:
        facts = {"open_s": round(time.perf_counter() - start, 3), "gpu_before": before}
        session = _bound(ref, opened, config)
        size = config.size_hw or _own_size(session)
        facts["build_s"] = build_seconds(ref, session, size)
        own, feeds = _measure(ref, session, size, facts, config, found)
        if config.annotations is not None and own:
            tell(f"{ref} {way} average precision")
            ap = _average_precision(session, config)
            own = [{**row, "AP": ap} for row in own]
        if config.parts and own:
            tell(f"{ref} {way} parts")
            forward = next((row for row in own if row["scope"] == "forward"), None)
            if forward is None:
                found.skip(ref, session.backend, "--parts compares with the forward time; keep that scope", "parts")
            else:
                found.parts.append(_parts(ref, session, forward, feeds, config))
        if session.note:
            found.notes.append({"model": ref, "backend": session.backend, "note": session.note})
    finally:
        opened.close()
    found.rows += own


def _bound(ref: str, session: Session, config: RunConfig) -> Session:
    if isinstance(session, PromptedSession):
        if not config.prompt:
            raise SessionError(f"'{ref}' takes a prompt; say what to look for, e.g. --prompt 'a cat. a remote control.'")
        return session.bind(config.prompt)
    if config.prompt:
        raise SessionError(f"'{ref}' has fixed classes and takes no prompt; leave --prompt out")
    return session


def _measure(
    ref: str, session: Session, size: tuple[int, int], facts: Row, config: RunConfig, found: _Found
) -> tuple[list[Row], Any]:
    """(rows, inputs of the smallest batch)."""
    from ..data.preprocess import preprocess
    from ..detector import Detector

    rows: list[Row] = []
    first: Any = None
    for batch in config.batches:
        least, most = getattr(session, "min_batch", 1), session.max_batch
        if batch < least or (most is not None and batch > most):
            limits = f"{least}" if least == most else f"{least} to {most}"
            found.skip(ref, session.backend, f"batch {batch}: it takes {limits}", "all")
            continue
        pictures = _pictures(size, batch)
        given = size if session.spec.input.dynamic else None
        feeds = preprocess([p for p, _ in pictures], session.spec, size_hw=given).feeds
        first = feeds if first is None else first
        detector = Detector(session, batch_size=batch, size_hw=given)
        files = [data for _, data in pictures]

        def forward(feeds: Any = feeds) -> object:
            return session.run(feeds)

        calls: dict[str, Callable[[], object]] = {
            "kernel": forward,
            "forward": forward,
            "end_to_end": lambda detector=detector, files=files: detector(files),
        }
        for row in _scopes(ref, session.backend, calls, batch, size, config, found):
            used = _gpu_used_mib()
            if used is not None and facts["gpu_before"] is not None:
                row["gpu_memory_mib"] = max(0, used - facts["gpu_before"])
            rows.append(row | {"open_s": facts["open_s"], "build_s": facts["build_s"]})
    return rows, first


def _scopes(
    ref: str,
    backend: str,
    calls: dict[str, Callable[[], object]],
    batch: int,
    size: tuple[int, int],
    config: RunConfig,
    found: _Found,
) -> list[Row]:
    """A row for each scope that was asked for and can be had."""
    rows = []
    for scope in SCOPES:
        if scope not in (config.scopes or SCOPES):
            continue
        if scope == "kernel":
            row = _kernel_row(ref, backend, calls[scope], batch, size, config, found)
            rows += [row] if row else []
        else:
            samples = time_call(calls[scope], config.warmup, config.repeats)
            rows.append(_row(ref, backend, scope, batch, size, samples))
    return rows


def _kernel_row(
    ref: str, backend: str, step: Callable[[], object], batch: int, size: tuple[int, int], config: RunConfig, found: _Found
) -> Row | None:
    from .profile import device_times

    if backend.endswith("-cpu"):
        if config.scopes:
            found.skip(ref, backend, "on a CPU there is no device to measure apart from the call: see forward", "kernel")
        return None
    try:
        times = device_times(step, config.warmup, config.repeats)
    except SessionError as error:
        found.skip(ref, backend, error, "kernel")
        return None
    row = _row(ref, backend, "kernel", batch, size, times.samples_ms) | {"kernels": times.kernels}
    if times.msda_calls:
        msda = float(np.median(times.msda_samples_ms))
        row |= {"msda_ms": round(msda, 4), "msda_calls": times.msda_calls, "msda_share": round(msda / row["p50_ms"], 4)}
    return row


def _row(ref: str, backend: str, scope: str, batch: int, size: tuple[int, int], samples: Sequence[float]) -> Row:
    p50, p90, p99 = (round(float(v), 3) for v in np.percentile(samples, [50, 90, 99]))
    return {
        "model": ref,
        "backend": backend,
        "scope": scope,
        "batch": batch,
        "height": size[0],
        "width": size[1],
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "min_ms": round(min(samples), 3),
        "images_per_s": round(batch * 1e3 / max(p50, 1e-3), 2),
        "samples_ms": [round(s, 3) for s in samples],
        "peak_memory_mib": round(peak_memory_mib()),
    }


def _library(checkpoint: str, ref: str, config: RunConfig, found: _Found, rows: list[Row]) -> None:
    """Rows of the checkpoint in transformers: at the size and in the type of the model, where its back ends ran."""
    from .library import first_call_seconds, library_calls

    size, precision = (rows[0]["height"], rows[0]["width"]), _precision_of(ref)
    cuda = next((device for device in (*config.devices, *config.providers) if device.startswith("cuda")), "cuda")
    if config.devices:
        devices = tuple(dict.fromkeys(config.devices))
    else:
        devices = (cuda,) if any(not row["backend"].endswith("-cpu") for row in rows) else ("cpu",)
    for device in devices:
        before = _gpu_used_mib()
        calls = library_calls(
            checkpoint, compiled=config.compile, device=device, precision=precision, threads=config.threads, prompt=config.prompt
        )
        for batch in config.batches:
            for backend, scopes in calls(size, [data for _, data in _pictures(size, batch)]).items():
                compiling = round(first_call_seconds(scopes["forward"]), 3)
                for row in _scopes(checkpoint, backend, scopes, batch, size, config, found):
                    used = _gpu_used_mib()
                    if used is not None and before is not None:
                        row["gpu_memory_mib"] = max(0, used - before)
                    found.rows.append(row | {"build_s": compiling if "compile" in backend else None})


def _average_precision(session: Session, config: RunConfig) -> float | None:
    from ..evaluation.coco import evaluate_coco

    assert config.annotations is not None and config.images is not None
    # A prompt of the user's own does not stand for the categories of a data set.
    model = getattr(session, "model", None)
    size = config.size_hw if model is None and session.spec.input.dynamic else None
    return evaluate_coco(model or session, config.annotations, config.images, size_hw=size).metrics["AP"]


def _parts(ref: str, session: Session, row: Row, feeds: Any, config: RunConfig) -> Row:
    from ..backends.prompted import detector_of, with_text
    from .profile import measure_parts

    onnx = _onnx_of(ref)
    found = measure_parts(detector_of(session), onnx, with_text(session, feeds), config.threads, row["p50_ms"])
    return {"model": ref, "backend": session.backend, "batch": row["batch"], **found}


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
    from ..graph import io
    from ..graph.view import GraphView, graph_precision

    return graph_precision(GraphView(io.load(onnx, weights=False)))


def _gpu_used_mib() -> int | None:
    """Memory of the current GPU in use, by everybody; None where nothing in this process has opened one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def _own_size(session: Session) -> tuple[int, int]:
    shape = session.inputs[0].shape[2:]
    if all(isinstance(side, int) for side in shape):
        return int(shape[0]), int(shape[1])
    return session.spec.input.size_hw


def _pictures(size: tuple[int, int], count: int) -> list[tuple[np.ndarray, bytes]]:
    """Drawn scenes of the input's own size, as arrays and as JPEG bytes."""
    from PIL import Image

    from ..data.scenes.scene import draw_scene

    found = []
    for index in range(count):
        image, buffer = draw_scene(index, size_hw=size).image, io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=90)
        found.append((image, buffer.getvalue()))
    return found


# Which back ends of a built model `detrt bench` measures, and how long each took to build.
@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model, as `open_session` takes it."""

    backend: str
    provider: str = "cpu"
    device: str | None = None

    def __str__(self) -> str:
        place = self.provider if self.backend == "onnxruntime" else self.device
        return f"{self.backend}-{place}" if place else self.backend


def ways_of(ref: str, backends: Sequence[str], providers: Sequence[str], devices: Sequence[str]) -> list[Way]:
    """The ways that a bundle or a file of one offers: TensorRT, packages, ONNX Runtime, the processors in the order given.

    backends: which; empty for all. providers, devices: empty for what ONNX Runtime and the bundle have.

    Raises:
        SessionError: the model has none of the back ends that are asked for.
    """
    kind = kind_of(ref)
    if kind == "bundle":
        bundle = Bundle.open(Path(ref))
        have = {"tensorrt": "engine", "inductor": "inductor", "onnxruntime": "onnx"}
        there = [backend for backend, what in have.items() if bundle.of_kind(what)]
        packaged = {_device(entry.engine) for entry in bundle.of_kind("inductor")}
    else:
        there = [{"onnx": "onnxruntime", "engine": "tensorrt", "inductor": "inductor"}[kind]]
        packaged = {None}
    wanted = [backend for backend in there if not backends or backend in backends]
    if not wanted:
        raise SessionError(f"nothing of '{ref}' runs with {', '.join(backends)}; it has {', '.join(there) or 'no model'}")
    ways: list[Way] = []
    for backend in wanted:
        if backend == "onnxruntime":
            ways += [Way(backend, provider=provider) for provider in providers or _providers()]
        elif backend == "tensorrt":
            ways += [Way(backend, device=d) for d in devices if d.startswith("cuda")] if devices else [Way(backend)]
        else:
            chosen = devices or sorted(packaged, key=lambda d: d == "cpu")
            ways += [Way(backend, device=device) for device in chosen]
    return ways


def build_seconds(ref: str, session: Session, size_hw: tuple[int, int]) -> float | None:
    """What building the file took: of a package or an engine its own build, of an ONNX file its export and conversion.

    None where nobody wrote it down.
    """
    facts = getattr(session, "facts", None)
    if hasattr(session, "of"):  # several packages, one for each size
        facts = session.of(size_hw).facts
    if isinstance(facts, EngineFacts):
        return round(facts.build_seconds, 3)
    if kind_of(ref) != "bundle":
        return None
    seconds = Bundle.open(Path(ref)).provenance.options.get("seconds", {})
    found = [took for stage, took in seconds.items() if stage == "export" or stage.startswith("precision")]
    return round(sum(found), 3) if found else None


def _device(facts: EngineFacts | None) -> str | None:
    return None if facts is None else facts.target.removeprefix("inductor-")


def _providers() -> tuple[str, ...]:
    from ..backends.onnxruntime.session import available_providers

    return tuple(p for p in ("cpu", "cuda") if p in available_providers())
