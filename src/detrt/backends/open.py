"""Pick and open the session that suits a reference: bundle, ONNX file, engine or checkpoint."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bundle import MANIFEST, Bundle, BundleFile, EngineFacts, open_whole, text_encoder_beside
from ..data.arguments import check_device, check_integer, check_model
from ..errors import DetrtError, EngineError, MissingPackageError, PromptError, SessionError, SpecError
from ..models.load import FLAGS, LoadChanges, LoadOptions, changed, check_changes, takes_load_options
from ..models.source import checkpoint_inside
from ..spec import ModelSpec, is_query_encoder, is_text_encoder
from ..system import CPU, processor_name
from ..text.tokenizer import PromptTokenizer
from .base import Backend, BaseSession
from .first_opening import check_first_opening
from .inductor.session import InductorSession, SizedSession
from .onnxruntime.rtx import BACKEND as RTX
from .onnxruntime.session import NoSpecError, OnnxSession, run_graph
from .openvino.session import OpenVinoSession
from .prompted import PromptedSession, model_spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

BACKENDS = ("auto", "onnxruntime", RTX, "openvino", "tensorrt", "inductor", "torch")
# On a CPU a bundle's OpenVINO model comes before its ONNX file, unless the ONNX file was the faster one on this processor.
PREFERRED_ON_CPU = "running the OpenVINO model, which was the faster one on a CPU (docs/results/cpu.md); --backend onnxruntime runs the ONNX file"
OPENVINO_DEVICES = ("xpu", "npu")  # that no other backend has


@dataclass(frozen=True, slots=True)
class _Choices:
    """The arguments of `open_session` of these names. tuning: `performance` and `streams`, where they are given."""

    backend: str
    device: str | None = None
    threads: int | None = None
    tuning: Mapping[str, Any] = field(default_factory=dict)
    spec: ModelSpec | None = None
    eager_kernels: bool = False
    rounded: bool = False


@takes_load_options
def open_session(
    ref: str | os.PathLike,
    *,
    backend: str = "auto",
    device: str | None = None,
    threads: int | None = None,
    performance: str | None = None,
    streams: int | None = None,
    spec: ModelSpec | None = None,
    load: LoadOptions | None = None,
    eager_kernels: bool = False,
    rounded: bool = False,
    **changes: Unpack[LoadChanges],
) -> BaseSession:
    """Open a model for running.

    A model that takes a prompt comes as a `PromptedSession`, with the text encoder and the tokenizer that lie beside it.

    Args:
        ref: a bundle folder (the engine or compiled package that suits this machine, else its OpenVINO model or its ONNX file;
            `session.info.note` says why), a `.onnx` file, a `.engine` file, a `.pt2` package, the `.xml` file of an OpenVINO model,
            or a checkpoint: `hf:org/name`, a folder with
            config.json, `embedded:name`, `ckpt:FILE` (a checkpoint file of the authors).
        backend: one of BACKENDS; anything but "auto" must suit the reference.
        device: "cpu" or "cuda:N", never the CPU where a GPU is named; with OpenVINO also "xpu:N" (an Intel GPU) and "npu". None:
            the backend's own default. With "cpu" the OpenVINO model or the ONNX file of a bundle runs, unless `backend` says otherwise.
        threads: of ONNX Runtime and OpenVINO on the CPU.
        performance: of OpenVINO: "latency" or "throughput", as `OpenVinoRun`; None: as the model was built.
        streams: batches at a time with "throughput"; None: as the model was built.
        spec: replaces the spec of an ONNX file.
        load: how a checkpoint, or an ONNX file of another exporter, is read.
        eager_kernels: TensorRT-RTX compiles the kernels of a shape before its first run, not beside its first runs, which take
            slower ones of other rounding meanwhile. For measurements and comparisons.
        rounded: ONNX Runtime on a CPU rounds to 16 bits and FP8 as the graph says. By itself it computes FP16 in FP32, and does not run
            BF16 and FP8. For comparisons.
        changes: fields of `LoadOptions` by name, e.g. `trust_remote_code=True`.

    Raises:
        SessionError: nothing there, a backend or device that cannot run it, or `performance` for another backend than OpenVINO.
        SpecError, EngineError, SourceError, MissingPackageError: from the one that opens it.
    """
    check_changes(open_session, changes)
    check_model(ref)
    device, threads, streams = check_device(device), check_integer(threads, "threads"), check_integer(streams, "streams")
    tuning = {name: value for name, value in (("performance", performance), ("streams", streams)) if value is not None}
    choices = _Choices(backend, device, threads, tuning, spec, eager_kernels, rounded)
    session = _open(ref, choices, changed(load, changes))
    if tuning and session.info.backend != Backend.OPENVINO:
        name, why = session.info.name, f" ({session.info.note})" if session.info.note else ""
        session.close()
        raise SessionError(
            f"--{next(iter(tuning))} is for OpenVINO, and '{os.fspath(ref)}' runs with {name}{why}; leave it out, or build the "
            "model with --target openvino"
        )
    return session


def _open(ref: str | os.PathLike, choices: _Choices, load: LoadOptions) -> BaseSession:
    backend, device, threads, spec = choices.backend, choices.device, choices.threads, choices.spec
    if backend not in BACKENDS:
        raise SessionError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    kind = kind_of(ref)
    _check_backend(ref, kind, backend)
    if spec is not None and kind not in ("onnx", "bundle"):
        raise SpecError(f"a spec can be given for ONNX files only; '{os.fspath(ref)}' is {_KIND_WORDS[kind]} and has its own")
    if spec is not None and backend not in ("auto", "onnxruntime", RTX):
        raise SpecError(f"a spec is for the ONNX file, which ONNX Runtime runs; leave it out, or --backend {backend}")
    if kind == "checkpoint":
        return _open_checkpoint(ref, load, device)
    if kind == "onnx":
        provider = _provider(choices)
        onnx = _open_onnx(Path(ref), load, choices, provider)
        return with_text(onnx, Path(ref).parent, choices, provider=provider)
    refuse_load_options(ref, kind, load)
    if kind == "bundle":
        return open_whole(Path(ref), lambda bundle: _open_bundle(bundle, choices))
    if kind == "inductor":
        return InductorSession(Path(ref), device=device)
    if kind == "openvino":
        session = OpenVinoSession(Path(ref), device=device, threads=threads, **choices.tuning)
        return with_text(session, Path(ref).parent, choices, openvino=text_encoder_beside(Path(ref)))
    if device == CPU:
        raise SessionError(f"'{os.fspath(ref)}' is a TensorRT engine, which needs a GPU; got the device cpu")
    engine = open_engine(Path(ref), device, eager_kernels=choices.eager_kernels)
    encoder = text_encoder_beside(Path(ref))
    encoder_engine = encoder if encoder != Path(ref) and encoder.is_file() else None
    return with_text(engine, Path(ref).parent, choices, engine=encoder_engine)


def refuse_load_options(ref: str | os.PathLike, kind: str, load: LoadOptions) -> None:
    """Raise SpecError where it is said how a model is read that says it itself. kind: see `kind_of`."""
    what = f"'{os.fspath(ref)}' is {_KIND_WORDS[kind]}"
    for option in load.typed():
        raise SpecError(
            f"{option} says how a checkpoint is read; {what} and has its own; leave it out, or give it to detrt build"
        )
    for name in FLAGS:
        if getattr(load, name):
            raise SpecError(f"--{name.replace('_', '-')} says how a checkpoint is loaded, and {what}; leave it out")


def load_options_for(refs: Sequence[str], load: LoadOptions) -> list[LoadOptions]:
    """How each model is read: `load` for checkpoints and ONNX files, nothing for those that say it themselves.

    Raises:
        SpecError: all say it themselves, and `load` is given. SessionError: nothing there.
    """
    kinds = [kind_of(ref) for ref in refs]
    reads = [kind in ("checkpoint", "onnx") for kind in kinds]
    if not any(reads):
        refuse_load_options(refs[0], kinds[0], load)
    return [load if one else LoadOptions() for one in reads]


def _open_onnx(path: Path, load: LoadOptions, choices: _Choices, provider: str) -> OnnxSession:
    """An ONNX file with its spec, or one of another exporter in detrt's contract."""
    try:
        session = OnnxSession(path, choices.spec, provider=provider, threads=choices.threads, rounded=choices.rounded)
    except NoSpecError:
        from ..models.foreign import read_foreign

        foreign = read_foreign(path, load, run_graph)
        session = OnnxSession(foreign.contract().SerializeToString(), foreign.spec, provider=provider, threads=choices.threads)
        session.name = f"'{path}'"
        session.add_note("a graph of another exporter: " + "; ".join(foreign.notes))
        return session
    try:
        refuse_load_options(path, "onnx", load)
    except SpecError:
        session.close()
        raise
    return session


def _open_checkpoint(ref: str | os.PathLike, load: LoadOptions, device: str | None) -> BaseSession:
    try:
        from ..models.load import load_source
        from .torch import open_torch
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("detrt"):
            raise
        raise MissingPackageError(error.name or "torch", "export", "running a checkpoint") from None

    source = load_source(os.fspath(ref), load)
    session = open_torch(source, device=device or CPU)
    session.checkpoint_sha256 = source.provenance.checkpoint_sha256
    for note in source.notes:
        session.add_note(note)
    return session


def open_prompted(ref: str | os.PathLike, *, backend: str = "auto") -> PromptedSession:
    """As `open_session`, of a model that takes a prompt.

    Raises:
        PromptError: the model has fixed classes.
    """
    session = open_session(ref, backend=backend)
    if not isinstance(session, PromptedSession):
        session.close()
        raise PromptError(f"'{os.fspath(ref)}' has fixed classes and takes no prompt; choose among them with --classes")
    return session


def kind_of(ref: str | os.PathLike) -> str:
    """What a reference is: "bundle", "onnx", "engine", "inductor", "openvino" or "checkpoint"; looks at names and folders only.

    Raises:
        SessionError: a path that does not exist, or a file or folder of another kind.
    """
    text = os.fspath(ref)
    path = Path(text)
    suffix = path.suffix.lower()
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return "bundle"
        if (path / "config.json").is_file():
            return "checkpoint"
        inside = checkpoint_inside(path) or "; give a folder with one of them, an .onnx file, hf:org/name or ckpt:FILE"
        raise SessionError(f"the folder '{text}' has neither {MANIFEST} (a bundle) nor config.json (a checkpoint){inside}")
    if suffix == ".onnx":
        return "onnx"
    if suffix in (".engine", ".plan", ".trt"):
        return "engine"
    if suffix == ".pt2":
        return "inductor"
    if suffix == ".xml":
        return "openvino"
    scheme, colon, rest = text.partition(":")
    if colon and scheme.isalpha() and len(scheme) > 1 and rest:
        return "checkpoint"
    if path.exists():
        raise SessionError(
            f"'{text}' is not a model that detrt can run: expected .onnx, .engine or a folder; a checkpoint file is written "
            f"ckpt:{text}"
        )
    hub = f"of the Hugging Face hub it is written hf:{text}; else " if re.fullmatch(r"[\w.-]+/[\w.-]+", text) else ""
    raise SessionError(
        f"there is no model '{text}'; {hub}give a bundle folder, an .onnx or .engine file, a checkpoint folder, "
        "hf:org/name or embedded:name"
    )


_KIND_WORDS = {
    "onnx": "an ONNX file",
    "engine": "a TensorRT engine",
    "inductor": "a compiled package",
    "openvino": "an OpenVINO model",
    "bundle": "a bundle",
    "checkpoint": "a checkpoint",
}


def _check_backend(ref: str | os.PathLike, kind: str, backend: str) -> None:
    runs = {
        "onnx": ("onnxruntime", RTX),
        "engine": ("tensorrt",),
        "inductor": ("inductor",),
        "openvino": ("openvino",),
        "bundle": ("onnxruntime", RTX, "openvino", "tensorrt", "inductor"),
        "checkpoint": ("torch",),
    }[kind]
    if backend != "auto" and backend not in runs:
        hint = "; turn it into a bundle first with: detrt build" if kind == "checkpoint" else ""
        raise SessionError(
            f"'{os.fspath(ref)}' is {_KIND_WORDS[kind]}, which runs with {' or '.join(runs)}; got backend {backend!r}{hint}"
        )


def _provider(choices: _Choices) -> str:
    """The execution provider of ONNX Runtime, as `OnnxSession` takes it. Raises SessionError: a device that it does not run on."""
    if choices.backend != RTX:
        return choices.device or CPU
    kind, _, number = (choices.device or "cuda:0").partition(":")
    if kind != "cuda":
        raise SessionError(f"--backend {RTX} runs on NVIDIA's RTX GPUs, such as cuda:0; got the device {choices.device!r}")
    return f"rtx:{number or 0}"


def open_engine(path: Path, device: str | None = None, *, eager_kernels: bool = False) -> BaseSession:
    """An engine alone, without the text encoder and the tokenizer of a model that takes a prompt."""
    from .tensorrt import TensorRTSession

    return TensorRTSession(path, device=device or "cuda:0", specialization="eager" if eager_kernels else "lazy")


def _open_bundle(bundle: Bundle, choices: _Choices) -> BaseSession:
    backend, device, spec = choices.backend, choices.device, choices.spec
    reasons: list[str] = []
    engines = bundle.of_kind("engine") if backend in ("auto", "tensorrt") else []
    packages = bundle.of_kind("inductor") if backend in ("auto", "inductor") else []
    models = bundle.of_kind("openvino") if backend in ("auto", "openvino") else []
    on_gpu = device is not None and device.partition(":")[0] not in (CPU, *OPENVINO_DEVICES)
    # Unless a backend is named, a spec is for ONNX Runtime, a device of NVIDIA's for engines and packages, others for OpenVINO.
    if backend == "auto" and (spec is not None or (device is not None and not on_gpu)):
        engines, packages = [], []
    if backend == "auto" and (spec is not None or on_gpu):
        models = []
    for entry in engines:
        # Outside of the `try`: a damaged file is an error, not a reason to take another one.
        path = bundle.checked_path(entry)
        try:
            session = open_engine(path, device, eager_kernels=choices.eager_kernels)
        except (EngineError, MissingPackageError, SessionError) as error:
            reasons.append(f"{entry.path}: {error}")
        else:
            return _with_first_check(bundle, _with_text_of(bundle, session, choices, engine=entry), entry)
    opened = _open_package(bundle, packages, device, reasons)
    if opened is not None:
        return _with_text_of(bundle, opened, choices)
    if backend == "inductor":
        why = "; ".join(reasons) or "it holds none"
        raise EngineError(
            f"no compiled package of the bundle '{bundle.folder}' can run here: {why}. Build one with: detrt build "
            f"{bundle.folder} --target inductor"
        )
    if backend == "tensorrt":
        why = "; ".join(reasons) or "it holds no engine"
        raise EngineError(
            f"no engine of the bundle '{bundle.folder}' can run here: {why}. Build one with: detrt build {bundle.folder} "
            "--target tensorrt, or tensorrt-rtx"
        )
    chosen = ""
    if backend == "auto" and models and device in (None, CPU):
        onnx_first, chosen = _faster_on_cpu(models[0].engine, choices.tuning)
        models = [] if onnx_first else models
    found = _open_openvino(bundle, models, choices, reasons)
    if found is not None:
        if chosen:
            found.add_note(chosen)
        return found
    if models:  # none of them runs here
        chosen = ""
    if backend == "openvino" or (device is not None and device.partition(":")[0] in OPENVINO_DEVICES):
        why = "; ".join(reasons) or f"it holds none. Build one with: detrt build {bundle.folder} --target openvino"
        raise EngineError(f"no OpenVINO model of the bundle '{bundle.folder}' can run here: {why}")
    graphs = bundle.of_kind("onnx")
    if not graphs:
        why = f" ({'; '.join(reasons)})" if reasons else ""
        raise SessionError(f"the bundle '{bundle.folder}' has no ONNX file to fall back to{why}; build it again")
    provider = _provider(choices)
    fused = [bundle.checked_path(entry) for entry in bundle.of_kind("onnx-fused")] if provider == CPU else []
    try:
        onnx = OnnxSession(
            bundle.checked_path(graphs[0]),
            spec or bundle.spec,
            provider=provider,
            threads=choices.threads,
            fused=next(iter(fused), None),
            rounded=choices.rounded,
        )
    except DetrtError as error:
        if provider == CPU:
            raise
        raise SessionError(f"'{bundle.folder}' cannot run on {provider}: {'; '.join([*reasons, str(error)])}") from None
    if reasons:
        onnx.add_note("running the ONNX file with ONNX Runtime, because no engine can run here: " + "; ".join(reasons))
    if chosen:
        onnx.add_note(chosen)
    return _with_text_of(bundle, onnx, choices, provider)


def _faster_on_cpu(facts: EngineFacts | None, tuning: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the ONNX file of a bundle runs rather than its OpenVINO model, and why.

    facts: of the OpenVINO model. tuning: what is given for OpenVINO.
    """
    speed = None if facts is None else facts.cpu_speed
    if tuning:
        return False, f"running the OpenVINO model, which --{next(iter(tuning))} is for"
    if speed is None:
        return False, PREFERRED_ON_CPU
    here = processor_name()
    if speed.processor != here:
        return False, (
            f"{PREFERRED_ON_CPU}. When the bundle was built, both were timed on another processor ({speed.processor}; this one is "
            f"{here}); detrt build BUNDLE --target openvino times them here"
        )
    model, other = ("ONNX file", "openvino") if speed.prefers_onnx else ("OpenVINO model", "onnxruntime")
    return speed.prefers_onnx, (
        f"running the {model}, which was the faster one on this processor when the bundle was built (OpenVINO "
        f"{speed.openvino_ms:.4g} ms, ONNX Runtime {speed.onnxruntime_ms:.4g} ms, {speed.threads} threads); --backend {other} runs "
        "the other"
    )


def _with_first_check(bundle: Bundle, session: BaseSession, entry: BundleFile) -> BaseSession:
    """The session of an engine, compared with its graph where that was not done before."""
    with _closing_on_error(session):
        check_first_opening(
            session,
            bundle,
            entry,
            lambda: _open_bundle(bundle, _Choices("onnxruntime", CPU, rounded=True)),
        )
    return session


def _open_package(bundle: Bundle, packages: list[BundleFile], device: str | None, reasons: list[str]) -> BaseSession | None:
    """The packages of the first kind of device that run here, those of a GPU first; why the others do not is added to
    `reasons`."""
    opened: list[InductorSession] = []
    for entry in sorted(packages, key=lambda e: e.engine is None or not e.engine.compute_capabilities):
        if opened and (entry.engine is None or entry.engine.target != opened[0].facts.target):
            continue
        path = bundle.checked_path(entry)
        try:
            opened.append(InductorSession(path, bundle.spec, entry.engine, device=device))
        except (EngineError, MissingPackageError, SessionError) as error:
            reasons.append(f"{entry.path}: {error}")
    return SizedSession(opened) if len(opened) > 1 else opened[0] if opened else None


def _open_openvino(bundle: Bundle, models: list[BundleFile], choices: _Choices, reasons: list[str]) -> BaseSession | None:
    """The first OpenVINO model that runs here, with its text encoder; why the others do not is added to `reasons`."""
    for entry in models:
        path = bundle.checked_path(entry)
        try:
            session = OpenVinoSession(
                path, bundle.spec, entry.engine, device=choices.device, threads=choices.threads, **choices.tuning
            )
        except (MissingPackageError, SessionError) as error:
            reasons.append(f"{entry.path}: {error}")
            continue
        return _with_text_of(bundle, session, choices)
    return None


def _with_text_of(
    bundle: Bundle, session: BaseSession, choices: _Choices, provider: str = CPU, engine: BundleFile | None = None
) -> BaseSession:
    """The session, or with its text encoder and tokenizer where the model takes a prompt.

    engine: the detector's; the text encoder is then the engine for the same target and GPUs, else its ONNX file.
    """
    text = bundle.spec.text
    if text is None:
        return session
    with _closing_on_error(session) as opened:
        tokenizer = PromptTokenizer(_only(bundle, "tokenizer", text.tokenizer), text)
        encoder, note = None, ""
        if text.encoder:
            encoder, note = _text_encoder(bundle, session, choices, provider, engine)
            opened.append(encoder)
        found = PromptedSession(session, tokenizer, encoder)
    if note:
        found.add_note(note)
    if encoders := bundle.of_kind("query"):
        # It runs once for each query: on the CPU, whatever runs the detector.
        found.set_query_encoder(lambda: OnnxSession(bundle.checked_path(encoders[0]), session.spec, threads=choices.threads))
    return found


def _text_encoder(
    bundle: Bundle, session: BaseSession, choices: _Choices, provider: str, engine: BundleFile | None
) -> tuple[BaseSession, str]:
    """The text encoder beside the detector `session`, as `_with_text_of`, and a note where it does not run as an engine does."""
    device, threads = choices.device, choices.threads
    why = "the bundle has none for the same target and GPUs"
    for entry in bundle.of_kind("text-engine") if engine is not None else []:
        if not _same_machine(entry, engine):
            continue
        path = bundle.checked_path(entry)
        try:
            return open_engine(path, device), ""
        except (EngineError, MissingPackageError, SessionError) as error:
            why = f"{entry.path}: {error}"
    # A bundle without any has none because TensorRT could not build it, which `build` said.
    if engine is not None and choices.backend == "tensorrt" and bundle.of_kind("text-engine"):
        raise EngineError(f"no engine of the text encoder in '{bundle.folder}' can run here: {why}. Build it with: detrt build")
    encoders = bundle.of_kind("text-openvino") if isinstance(session, OpenVinoSession) else []
    if encoders:
        path, facts = bundle.checked_path(encoders[0]), encoders[0].engine
        return OpenVinoSession(path, session.spec, facts, device=device, threads=threads), ""
    assert bundle.spec.text is not None
    path = _only(bundle, "text", bundle.spec.text.encoder)
    note = f"the text encoder runs with ONNX Runtime, because no engine of it can run here: {why}"
    return OnnxSession(path, session.spec, provider=provider, threads=threads), note if engine is not None else ""


def with_text(
    session: BaseSession,
    folder: Path,
    choices: _Choices | None = None,
    *,
    provider: str = CPU,
    engine: Path | None = None,
    openvino: Path | None = None,
) -> BaseSession:
    """As `_with_text_of`, with the files that lie in `folder`, for a model that was opened by its path."""
    text = session.spec.text
    if text is None:
        return session
    device, threads = (None, None) if choices is None else (choices.device, choices.threads)
    with _closing_on_error(session) as opened:
        if is_text_encoder(session.inputs) or is_query_encoder(session.inputs, session.outputs):
            raise SessionError(
                "this is the text encoder of a model, or its encoder of query images; give the model itself, which lies beside it"
            )
        tokenizer = PromptTokenizer(folder / text.tokenizer, text)
        if not text.encoder:
            return PromptedSession(session, tokenizer)
        if engine is not None:
            opened.append(open_engine(engine, device))
        elif openvino is not None and openvino.is_file():
            opened.append(OpenVinoSession(openvino, device=device, threads=threads))
        else:
            path = folder / text.encoder
            if not path.is_file():
                raise SessionError(
                    f"there is no text encoder '{path}', which this model needs to read a prompt; copy it there from where the "
                    "model was exported, or export the model again with detrt export"
                )
            opened.append(OnnxSession(path, session.spec, provider=provider, threads=threads))
        prompted = PromptedSession(session, tokenizer, opened[-1])
        path = folder / text.query_encoder
        if text.query_encoder and path.is_file():
            prompted.set_query_encoder(lambda: OnnxSession(path, session.spec, threads=threads))
        return prompted


@contextlib.contextmanager
def _closing_on_error(session: BaseSession) -> Iterator[list[BaseSession]]:
    opened = [session]
    try:
        yield opened
    except BaseException:
        for one in opened:
            one.close()
        raise


def _only(bundle: Bundle, kind: str, name: str) -> Path:
    """The file of a kind that a text model needs. Raises SpecError where the bundle lacks it."""
    entries = [entry for entry in bundle.of_kind(kind) if entry.path == name] or bundle.of_kind(kind)
    if not entries:
        what = {"tokenizer": "tokenizer", "text": "text encoder"}[kind]
        raise SpecError(
            f"the bundle '{bundle.folder}' has no {what} '{name}', which its model needs to read a prompt; build it again with "
            "detrt build"
        )
    return bundle.checked_path(entries[0])


def _same_machine(encoder: BundleFile, detector: BundleFile | None) -> bool:
    a, b = encoder.engine, None if detector is None else detector.engine
    if a is None or b is None:
        return False
    return a.target == b.target and a.compute_capabilities == b.compute_capabilities


def open_engine_beside(reference: BaseSession, engine: Path, text_engine: Path | None = None) -> BaseSession:
    """An engine, with the tokenizer of another session of the same model where it takes a prompt.

    text_engine: of its text encoder; None: the encoder of `reference`.
    """
    detector = open_engine(engine)
    if not isinstance(reference, PromptedSession):
        return detector
    encoder = reference.text_encoder
    if encoder is not None and text_engine is not None:
        with _closing_on_error(detector):
            encoder = open_engine(text_engine)
    return reference.with_sessions(detector, encoder)


def open_following(reference: BaseSession, graph: Path) -> BaseSession:
    """The graph of a session, opened to take the selections of another run as inputs; see `graph.selections.take_selections`.

    Raises:
        GraphError: a graph of 2 GB or more.
    """
    from ..graph import load, save
    from ..graph.selections import take_selections

    with tempfile.TemporaryDirectory(prefix="detrt-") as folder:
        path = Path(folder) / graph.name
        save(take_selections(load(graph)), path)
        detector = OnnxSession(path, model_spec(reference), rounded=True)
    return reference.with_sessions(detector, reference.text_encoder) if isinstance(reference, PromptedSession) else detector
