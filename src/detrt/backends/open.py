"""Pick and open the session that suits a reference: bundle, file of a backend, or checkpoint. `targets.py` lists the backends."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import MANIFEST, Bundle, open_whole
from ..data.arguments import check_integer, check_model
from ..errors import SessionError, SpecError
from ..models import trust
from ..models.load_options import LoadChanges, LoadOptions, changed, check_changes, hub_name
from ..spec import ModelSpec
from ..system import CPU
from ..text.tokenizer import PromptTokenizer
from . import targets
from .base import BaseSession, is_query_encoder, is_text_encoder, no_prompt
from .prompted import PromptedSession
from .search import FilesBeside, FileSearch, Opener, Parts, SessionOptions, part_path, refuse_reading
from .target import Target
from .targets import CHECKPOINT, GRAPH, check_backend, row_of, tuned

if TYPE_CHECKING:
    from typing_extensions import Unpack

BUNDLE = "bundle"


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
    emulate_low_precision: bool = False,
    **changes: Unpack[LoadChanges],
) -> BaseSession:
    """Open a model for running.

    A model that takes a prompt comes as a `PromptedSession`, with the text encoder and the tokenizer that lie beside it.

    Args:
        ref: a bundle folder (the engine or compiled package that suits this machine, else its OpenVINO model or its ONNX file;
            `session.info.note` says why), a `.onnx` file, a `.engine` file, a `.pt2` package, the `.xml` file of an OpenVINO model,
            or a checkpoint: `hf:org/name`, a folder with
            config.json, `embedded:name`, `ckpt:FILE` (a checkpoint file of the authors).
        backend: one of `targets.backend_names()`; anything but "auto" must suit the reference.
        device: "cpu" or "cuda:N", never the CPU where a GPU is named; with OpenVINO also "xpu:N" (an Intel GPU) and "npu". None:
            the backend's own default. With "cpu" the OpenVINO model or the ONNX file of a bundle runs, unless `backend` says otherwise.
        threads: of a model that runs on the CPU. PyTorch has one number for a process: it stays what it was set to last.
        performance: of OpenVINO: "latency" or "throughput", as `OpenVinoRun`; None: as the model was built.
        streams: batches at a time with "throughput"; None: as the model was built.
        spec: replaces the spec of an ONNX file.
        load: how a checkpoint, or an ONNX file of another exporter, is read.
        eager_kernels: TensorRT-RTX compiles the kernels of a shape before its first run, not beside its first runs, which take
            slower ones of other rounding meanwhile. For measurements and comparisons.
        emulate_low_precision: ONNX Runtime on a CPU rounds to 16 bits and FP8 as the graph says. By itself it computes FP16 in FP32, and does not run
            BF16 and FP8. For comparisons.
        changes: fields of `LoadOptions` by name, e.g. `trust_remote_code=True`.

    Raises:
        SessionError: nothing there, a backend or device that cannot run it, or `performance` for another backend than OpenVINO.
        SpecError, EngineError, SourceError, MissingPackageError: from the one that opens it.
    """
    check_changes(open_session, changes)
    tuning = {"performance": performance, "streams": check_integer(streams, "streams")}
    return open_with(
        ref, SessionOptions(backend, device, threads, tuning, spec, eager_kernels, emulate_low_precision, changed(load, changes))
    )


def open_with(ref: str | os.PathLike, options: SessionOptions) -> BaseSession:
    """As `open_session`, whose arguments are one object."""
    check_model(ref)
    with trust.allowing(options.load.trust_remote_code):
        session = _open(ref, options)
    for name in options.tuning:
        owner = tuned(name)
        if session.info.backend not in owner.names:
            runs, why = session.info.name, f" ({session.info.note})" if session.info.note else ""
            session.close()
            raise SessionError(
                f"`{name}` is for {owner.title}, and '{os.fspath(ref)}' runs with {runs}{why}; leave it out, or build the "
                f"model with `targets={owner.builds[0].name}`"
            )
    return session


def _open(ref: str | os.PathLike, options: SessionOptions) -> BaseSession:
    check_backend(options.backend, SessionError)
    kind = kind_of(ref)
    _check_backend(ref, kind, options.backend)
    row = row_of(kind)
    takes_spec = [name for target in targets.TARGETS if target.takes_spec for name in target.names]
    if options.spec is not None and row is not None and not row.takes_spec:
        raise SpecError(f"a spec can be given for ONNX files only; '{os.fspath(ref)}' is {_words(kind)} and has its own")
    if options.spec is not None and options.backend not in ("auto", *takes_spec):
        raise SpecError(f"a spec is for the ONNX file, which ONNX Runtime runs; leave it out, or `backend={options.backend}`")
    if row is None or not row.reads_load:
        refuse_load_options(ref, kind, options.load)
    if row is None:
        return open_whole(Path(ref), lambda bundle: _open_bundle(bundle, options))
    opener = row.opened_by()
    if row is CHECKPOINT:
        return opener.open_file(ref, options)  # type: ignore[arg-type]  # a reference, which may be no path
    path = Path(ref)
    return with_text(opener.open_file(path, options), path, options, opener)


def refuse_load_options(ref: str | os.PathLike, kind: str, load: LoadOptions) -> None:
    """Raise SpecError where it is said how a model is read that says it itself. kind: see `kind_of`."""
    refuse_reading(f"'{os.fspath(ref)}' is {_words(kind)}", load)


def load_options_for(refs: Sequence[str], load: LoadOptions) -> list[LoadOptions]:
    """How each model is read: `load` for checkpoints and ONNX files, nothing for those that say it themselves.

    Raises:
        SpecError: all say it themselves, and `load` is given. SessionError: nothing there.
    """
    kinds = [kind_of(ref) for ref in refs]
    reads = [(row := row_of(kind)) is not None and row.reads_load for kind in kinds]
    if not any(reads):
        refuse_load_options(refs[0], kinds[0], load)
    consent = LoadOptions(trust_remote_code=load.trust_remote_code)  # which holds for the code of bundles as well
    return [load if one else consent for one in reads]


def open_prompted(ref: str | os.PathLike, *, backend: str = "auto") -> PromptedSession:
    """As `open_session`, of a model that takes a prompt.

    Raises:
        PromptError: the model has fixed classes.
    """
    session = open_session(ref, backend=backend)
    if not isinstance(session, PromptedSession):
        session.close()
        raise no_prompt(f"'{os.fspath(ref)}'")
    return session


def kind_of(ref: str | os.PathLike) -> str:
    """What a reference is: "bundle", "checkpoint", or the `kind` of a `Target`, such as "onnx"; looks at names and folders only.

    Raises:
        SessionError: a path that does not exist, or a file or folder of another kind.
    """
    text = os.fspath(ref)
    path = Path(text)
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return BUNDLE
        if (path / "config.json").is_file():
            return CHECKPOINT.kind
        from ..models.source import checkpoint_inside

        inside = checkpoint_inside(path) or "; give a folder with one of them, an .onnx file, hf:org/name or ckpt:FILE"
        raise SessionError(f"the folder '{text}' has neither {MANIFEST} (a bundle) nor config.json (a checkpoint){inside}")
    for target in targets.TARGETS:
        if path.suffix.lower() in target.suffixes:
            return target.kind
    scheme, colon, rest = text.partition(":")
    if colon and scheme.isalpha() and len(scheme) > 1 and rest:
        return CHECKPOINT.kind
    suffixes = ", ".join(target.suffixes[0] for target in reversed(targets.TARGETS))
    if path.exists():
        raise SessionError(
            f"'{text}' is not a model that detrt can run: expected {suffixes} or a folder; a checkpoint file is written ckpt:{text}"
        )
    hub = f"of the Hugging Face hub it is written {name}; else " if (name := hub_name(text)) else ""
    raise SessionError(
        f"there is no model '{text}'; {hub}give a bundle folder, a file ({suffixes}), a checkpoint folder, hf:org/name or embedded:name"
    )


def _words(kind: str) -> str:
    row = row_of(kind)
    return "a bundle" if row is None else row.words


def _check_backend(ref: str | os.PathLike, kind: str, backend: str) -> None:
    """Raise SessionError where a backend is named that does not run such a file."""
    row = row_of(kind)
    rows = targets.TARGETS[::-1] if row is None else (row,)
    runs = [name for target in rows for name in target.names]
    if backend != "auto" and backend not in runs:
        hint = "; turn it into a bundle first with: detrt build" if kind == CHECKPOINT.kind else ""
        raise SessionError(
            f"'{os.fspath(ref)}' is {_words(kind)}, which runs with {' or '.join(runs)}; got backend {backend!r}{hint}"
        )


def _takes(target: Target, options: SessionOptions) -> bool:
    """Whether a backend may run a bundle: it is named, or none is and it suits the spec and the device."""
    if options.backend != "auto":
        return options.backend in target.names
    if options.spec is not None and not target.takes_spec:
        return False
    return not options.device or options.device_kind in target.devices


def _open_bundle(bundle: Bundle, options: SessionOptions) -> BaseSession:
    """The first backend that runs here. Raises what the last one that may run it says, where none does."""
    search = FileSearch(
        bundle, options, lambda: _open_bundle(bundle, SessionOptions(GRAPH.name, CPU, emulate_low_precision=True))
    )
    takes = [target for target in targets.TARGETS if _takes(target, options)] or [GRAPH]
    for target in takes:
        # What runs files that are not there is not imported.
        if bundle.of_kind(target.kind) and (session := _open_with(target.opened_by(), search)) is not None:
            return session
    raise takes[-1].opened_by().refusal(search, takes[-1])


def _open_with(opener: Opener, search: FileSearch) -> BaseSession | None:
    """What one backend opens of a bundle, with its text encoder; None where it has nothing that runs here."""
    chosen = opener.choose(search)
    if chosen is None:
        return None
    detector, entry = chosen
    if search.note:
        detector.add_note(search.note)
    session = with_text(detector, search.bundle, search.options, opener)
    with _closing_on_error(session):
        opener.check(search, session, entry)
    return session


def with_text(
    session: BaseSession,
    beside: Parts | Path,
    options: SessionOptions = SessionOptions(),  # noqa: B008 - frozen
    opener: Opener | None = None,
) -> BaseSession:
    """The session of a detector, or with its encoders and its tokenizer where the model takes a prompt.

    beside: the bundle, or the file of a detector alone. opener: of the backend of the detector, which may have a text encoder of its own;
    else the ONNX file of it runs on the CPU.
    """
    text = session.spec.text
    if text is None:
        return session
    parts = FilesBeside(beside, text) if isinstance(beside, Path) else beside

    def open_part(kind: str) -> BaseSession:
        return targets.graph_opener().open_part(part_path(parts, kind, text.parts[kind]), session.spec, options)

    with _closing_on_error(session) as opened:
        if is_text_encoder(session.inputs) or is_query_encoder(session.inputs, session.outputs):
            raise SessionError(
                "this is the text encoder of a model, or its encoder of query images; give the model itself, which lies beside it"
            )
        tokenizer = PromptTokenizer(part_path(parts, "tokenizer", text.tokenizer), text)
        encoder, note = None, ""
        if text.encoder:
            encoder, note = (None, "") if opener is None else opener.open_text_encoder(parts, session, options)
            encoder = encoder or open_part("text")
            opened.append(encoder)
        # Opened for each query, on the CPU whatever runs the detector: it runs once, and takes as much memory as a detector.
        queries = functools.partial(open_part, "query") if text.query_encoder and parts.of_kind("query") else None
        found = PromptedSession(session, tokenizer, encoder, query_encoder=queries)
    if note:
        found.add_note(note)
    return found


@contextlib.contextmanager
def _closing_on_error(session: BaseSession) -> Iterator[list[BaseSession]]:
    opened = [session]
    try:
        yield opened
    except BaseException:
        for one in opened:
            one.close()
        raise
