"""Bundles: latency, memory and average precision of every backend that runs here, and of the checkpoint in transformers.

Whether the backends agree is the question of `detrt verify`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backends.base import Session
from ..backends.open import BUNDLE, kind_of, load_options_for, open_session
from ..backends.prompted import unbound
from ..backends.targets import GRAPH, TARGETS
from ..bundle import Bundle
from ..data.preprocess import check_size
from ..errors import DetrtError, EngineError, MissingPackageError, SessionError
from ..evaluation.models import bound
from ..models.load_options import LoadOptions
from ..system import StageProgress
from .config import BenchConfig
from .measure import Meter, Row, drawn_images, gpu_memory_mib, jpeg_of, time_call


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A backend and its device, as `open_session` takes them."""

    backend: str
    device: str | None = None

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}" if self.device else self.backend


def measure_bundles(refs: Sequence[str], meter: Meter, progress: StageProgress) -> None:
    """Measure each bundle with each backend, and its checkpoint where `against` names one.

    Raises:
        DetrtError: a bundle that cannot be opened at all, one that takes a prompt without one, or bad options.
    """
    config = meter.config
    if len(config.against) not in (0, 1, len(refs)):
        raise DetrtError(
            f"`against` names one checkpoint for all models, or one for each of the {len(refs)}; got {len(config.against)}"
        )
    if config.ground_truth is not None:
        from ..evaluation.coco import read_dataset

        read_dataset(config.ground_truth, config.images)
    read = load_options_for(refs, LoadOptions() if config.against else config.load)
    for index, (ref, load) in enumerate(zip(refs, read, strict=True)):
        start = len(meter.rows)
        for target in targets_of(ref, config):
            progress("bench", index / len(refs), f"{ref} {target}")
            _measure_target(ref, load, target, meter, lambda text, i=index: progress("bench", i / len(refs), text))
        if len(meter.rows) == start:
            reasons = dict.fromkeys(skip["why"] for skip in meter.skipped if skip["model"] == ref)
            raise SessionError(f"nothing of '{ref}' can be measured here: {'; '.join(reasons)}")
        if config.against and (index == 0 or len(config.against) > 1):
            checkpoint = config.against[index if len(config.against) > 1 else 0]
            progress("bench", (index + 0.5) / len(refs), f"{checkpoint} in transformers")
            _measure_reference(checkpoint, ref, meter, meter.rows[start:])


def targets_of(ref: str, config: BenchConfig) -> list[RunTarget]:
    """What a bundle or a file of one can run with: TensorRT, packages, OpenVINO, ONNX Runtime, their devices in the order given.

    Raises:
        SessionError: the model has none of the backends that are wanted.
    """
    kind = kind_of(ref)
    bundle = Bundle.open(Path(ref)) if kind == BUNDLE else None
    present = [row for row in TARGETS if (bundle.of_kind(row.kind) if bundle is not None else row.kind == kind)]
    names = [(row, name) for row in present for name in (row.name, *row.others)]
    wanted = [(row, name) for row, name in names if (name in config.backends if config.backends else name == row.name)]
    if not wanted:
        has = ", ".join(row.name for row in present) or "no model"
        raise SessionError(f"nothing of '{ref}' runs with {', '.join(config.backends)}; it has {has}")
    found: list[RunTarget] = []
    for row, name in wanted:
        entries = bundle.of_kind(row.kind) if bundle is not None else ()
        own = row.opened_by().measured_on(entries, config.providers if row is GRAPH else config.devices)
        found += [RunTarget(name, device) for device in (own if name == row.name else config.devices or (None,))]
    return found


def build_seconds(ref: str, session: Session, size_hw: tuple[int, int]) -> float | None:
    """How long the file took to build: a package or an engine its own build, an ONNX file its export and conversion.

    None where it is not recorded.
    """
    facts = session.info.facts_by_size.get(size_hw, session.info.facts)
    if facts is not None:
        return round(facts.build_seconds, 3)
    if kind_of(ref) != BUNDLE:
        return None
    seconds = Bundle.open(Path(ref)).provenance.options.get("seconds", {})
    stages = [took for stage, took in seconds.items() if stage == "export" or stage.startswith("precision")]
    return round(sum(stages), 3) if stages else None


def _measure_target(ref: str, load: LoadOptions, target: RunTarget, meter: Meter, say: Callable[[str], None]) -> None:
    """All that is measured of one model with one backend."""
    config, gpu_before, start = meter.config, gpu_memory_mib(), time.perf_counter()
    try:
        opened = open_session(
            ref, backend=target.backend, threads=config.threads, device=target.device, load=load, eager_kernels=True
        )
    except (EngineError, MissingPackageError, SessionError) as error:
        meter.skip(ref, str(target), error)
        return
    try:
        more: Row = {"open_s": round(time.perf_counter() - start, 3)}
        session = bound(opened, ref, config.prompt)
        if not session.info.sizes:  # a session of several sizes checks by itself
            check_size(session.spec.input, config.size)
        size = config.size or _own_size(session)
        more["build_s"] = build_seconds(ref, session, size)
        rows, feeds = _latencies(ref, session, size, gpu_before, meter)
        if config.ground_truth is not None and rows:
            say(f"{ref} {target} average precision")
            more["AP"] = _average_precision(session, config)
        if config.parts and rows:
            say(f"{ref} {target} parts")
            forward = next(row for row in rows if row["scope"] == "forward")
            meter.parts.append(_parts(ref, session, forward, feeds, config))
        if session.info.notes:
            meter.notes.append({"model": ref, "backend": session.info.name, "note": session.info.note})
    finally:
        opened.close()
    meter.rows += [row | more for row in rows]


def _latencies(ref: str, session: Session, size: tuple[int, int], gpu_before: int | None, meter: Meter) -> tuple[list[Row], Any]:
    """(rows of all batch sizes, inputs of the first one)."""
    from ..data.preprocess import preprocess
    from ..detector import Detector

    rows: list[Row] = []
    first: Any = None
    for batch in meter.config.batches:
        least, most = session.info.min_batch, session.info.max_batch
        if batch < least or (most is not None and batch > most):
            limits = f"{least}" if least == most else f"{least} to {most}"
            meter.skip(ref, session.info.name, f"batch {batch}: it takes {limits}", "all")
            continue
        images = drawn_images(size, batch)
        files = [jpeg_of(image) for image in images]
        size_hw = size if session.spec.input.dynamic else None
        feeds = preprocess(images, session.spec, size_hw=size_hw).feeds
        first = feeds if first is None else first
        detector = Detector(session, batch_size=batch, size=size_hw)

        def forward(feeds: Any = feeds) -> object:
            return session.run(feeds)

        def end_to_end(detector: Detector = detector, files: list[bytes] = files) -> object:
            return detector(files)

        calls = {"kernel": forward, "forward": forward, "end_to_end": end_to_end}
        rows += meter.measure(ref, session.info.name, calls, batch, size, gpu_before)
    return rows, first


def _measure_reference(checkpoint: str, ref: str, meter: Meter, rows: list[Row]) -> None:
    """Rows of the checkpoint in transformers: at the size and in the type of the bundle, on the devices of its backends."""
    from .reference import library_calls, load_reference

    config, size, precision = meter.config, (rows[0]["height"], rows[0]["width"]), _precision_of(ref)
    if config.devices:
        devices = tuple(dict.fromkeys(config.devices))
    elif any(not row["backend"].endswith("-cpu") for row in rows):
        devices = (next((provider for provider in config.providers if provider.startswith("cuda")), "cuda"),)
    else:
        devices = ("cpu",)
    for device in devices:
        gpu_before = gpu_memory_mib()
        source = load_reference(checkpoint, config.prompt, config.load)
        calls = library_calls(
            source, threads=config.threads, compiled=config.compile, device=device, precision=precision, prompt=config.prompt
        )
        for batch in config.batches:
            files = [jpeg_of(image) for image in drawn_images(size, batch)]
            for backend, scopes in calls(size, files).items():
                compiling = round(time_call(scopes["forward"], 0, 1)[0] / 1e3, 3)  # the first call compiles
                build = {"build_s": compiling if "compile" in backend else None}
                meter.rows += [row | build for row in meter.measure(checkpoint, backend, scopes, batch, size, gpu_before)]


def _average_precision(session: Session, config: BenchConfig) -> float | None:
    from ..evaluation.coco import evaluate_coco

    assert config.ground_truth is not None
    # A prompt of the user's own does not stand for the categories of a data set.
    model = unbound(session)
    size = config.size if model.info.text is None and session.spec.input.dynamic else None
    return evaluate_coco(model, config.ground_truth, config.images, size=size).metrics["AP"]


def _parts(ref: str, session: Session, row: Row, feeds: Any, config: BenchConfig) -> Row:
    from ..backends.prompted import detector_of, with_text
    from .profile import measure_parts
    from .stages import stage_times

    size = row["height"], row["width"]
    files = [jpeg_of(image) for image in drawn_images(size, row["batch"])]
    stages = stage_times(session, files, size if session.spec.input.dynamic or session.info.sizes else None)
    parts = measure_parts(detector_of(session), _onnx_of(ref), with_text(session, feeds), config.threads, row["p50_ms"])
    return {"model": ref, "backend": session.info.name, "batch": row["batch"], "stages": stages, **parts}


def _onnx_of(ref: str) -> Path | None:
    """The graph of a bundle or of an ONNX file."""
    kind = kind_of(ref)
    if kind == GRAPH.kind:
        return Path(ref)
    if kind != BUNDLE:
        return None
    bundle = Bundle.open(Path(ref))
    files = [file for file in bundle.of_kind(GRAPH.kind) if not Path(file.path).name.startswith("text")]
    return bundle.path_of(files[0]) if files else None


def _precision_of(ref: str) -> str:
    """What the matmuls of a model compute in, as far as its graph tells: "fp32", "fp16" or "bf16"."""
    onnx = _onnx_of(ref)
    if onnx is None:
        return "fp32"
    from ..graph import io
    from ..graph.view import GraphView, graph_precision

    return graph_precision(GraphView(io.load(onnx, weights=False)))


def _own_size(session: Session) -> tuple[int, int]:
    shape = session.inputs[0].shape[2:]
    if all(isinstance(side, int) for side in shape):
        return int(shape[0]), int(shape[1])
    return session.spec.input.size_hw
