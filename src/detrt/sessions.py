"""Pick and open the session that suits a reference: bundle, ONNX file, engine or checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from .bundle import MANIFEST, Bundle
from .errors import EngineError, MissingPackageError, SessionError, SpecError
from .onnx_session import OnnxSession
from .session import Session
from .spec import ModelSpec

BACKENDS = ("auto", "onnxruntime", "tensorrt", "torch")


def open_session(
    ref: str | os.PathLike,
    *,
    backend: str = "auto",
    provider: str = "cpu",
    device: str | None = None,
    threads: int | None = None,
    spec: ModelSpec | None = None,
    trust_remote_code: bool = False,
) -> Session:
    """Open a model for running.

    ref: a bundle folder (the engine that suits this GPU, else its ONNX file; `session.note` says
        why), a `.onnx` file, a `.engine` file, or a checkpoint: `hf:org/name`, a folder with
        config.json, `embedded:name`.
    backend: one of BACKENDS; anything but "auto" must suit the reference.
    provider, threads: for ONNX Runtime ("cpu", "cuda", "cuda:1"). device: for TensorRT and PyTorch
        ("cuda:0", "cpu"); None is the back end's own default.
    spec: replaces the spec of an ONNX file.
    trust_remote_code: run Python code that comes with a checkpoint.

    Raises:
        SessionError: nothing there, or a back end that cannot run it.
        SpecError, EngineError, SourceError, MissingPackageError: from the one that opens it.
    """
    if backend not in BACKENDS:
        raise SessionError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    kind = kind_of(ref)
    _check_backend(ref, kind, backend)
    if spec is not None and kind not in ("onnx", "bundle"):
        raise SpecError(
            f"a spec can be given for ONNX files only; '{os.fspath(ref)}' is a {kind} and has its own"
        )
    if kind == "onnx":
        return OnnxSession(ref, spec, provider=provider, threads=threads)
    if kind == "engine":
        return _open_engine(Path(ref), device)
    if kind == "bundle":
        return _open_bundle(Bundle.open(Path(ref)), backend, provider, device, threads, spec)
    try:
        from .sources import load_source
        from .torch_session import TorchSession
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("detrt"):
            raise
        raise MissingPackageError(error.name or "torch", "export", "running a checkpoint") from None

    source = load_source(os.fspath(ref), trust_remote_code=trust_remote_code)
    return TorchSession(source) if device is None else TorchSession(source, device=device)


def kind_of(ref: str | os.PathLike) -> str:
    """What a reference is: "bundle", "onnx", "engine" or "checkpoint"; looks at names and folders only.

    Raises:
        SessionError: a path that is not there, or a file or folder of another kind.
    """
    text = os.fspath(ref)
    path = Path(text)
    suffix = path.suffix.lower()
    if path.is_dir():
        if (path / MANIFEST).is_file():
            return "bundle"
        if (path / "config.json").is_file():
            return "checkpoint"
        raise SessionError(
            f"the folder '{text}' has neither {MANIFEST} (a bundle) nor config.json (a checkpoint)"
        )
    if suffix == ".onnx":
        return "onnx"
    if suffix in (".engine", ".plan", ".trt"):
        return "engine"
    scheme, colon, rest = text.partition(":")
    if colon and scheme.isalpha() and len(scheme) > 1 and rest:
        return "checkpoint"
    if path.exists():
        raise SessionError(f"'{text}' is not a model that detrt can run: expected .onnx, .engine or a folder")
    raise SessionError(
        f"there is no model '{text}'; give a bundle folder, an .onnx or .engine file, a checkpoint folder, "
        "hf:org/name or embedded:name"
    )


def _check_backend(ref: str | os.PathLike, kind: str, backend: str) -> None:
    runs = {
        "onnx": ("onnxruntime",),
        "engine": ("tensorrt",),
        "bundle": ("onnxruntime", "tensorrt"),
        "checkpoint": ("torch",),
    }[kind]
    if backend != "auto" and backend not in runs:
        hint = "; turn it into a bundle first with: detrt build" if kind == "checkpoint" else ""
        raise SessionError(
            f"'{os.fspath(ref)}' is a {kind}, which runs with {' or '.join(runs)}; "
            f"got backend {backend!r}{hint}"
        )


def _open_engine(path: Path, device: str | None) -> Session:
    from .engine import TensorRTSession

    return TensorRTSession(path) if device is None else TensorRTSession(path, device=device)


def _open_bundle(
    bundle: Bundle,
    backend: str,
    provider: str,
    device: str | None,
    threads: int | None,
    spec: ModelSpec | None,
) -> Session:
    reasons = []
    engines = bundle.of_kind("engine") if backend != "onnxruntime" else []
    # A spec or a provider is asked of ONNX Runtime, so it decides between the two.
    if backend == "auto" and (spec is not None or provider != "cpu"):
        engines = []
    for entry in engines:
        # Outside of the `try`: a damaged file is an error, not a reason to take another one.
        path = bundle.checked_path(entry)
        try:
            return _open_engine(path, device)
        except (EngineError, MissingPackageError, SessionError) as error:
            reasons.append(f"{entry.path}: {error}")
    if backend == "tensorrt":
        why = "; ".join(reasons) or "it holds no engine"
        raise EngineError(
            f"no engine of the bundle '{bundle.folder}' can run here: {why}. Build one with: detrt build"
        )
    models = bundle.of_kind("onnx")
    if not models:
        why = f" ({'; '.join(reasons)})" if reasons else ""
        raise SessionError(
            f"the bundle '{bundle.folder}' has no ONNX file to fall back to{why}; build it again"
        )
    session = OnnxSession(
        bundle.checked_path(models[0]), spec or bundle.spec, provider=provider, threads=threads
    )
    if reasons:
        session.note = (
            "running the ONNX file with ONNX Runtime, because no engine can run here: " + "; ".join(reasons)
        )
    elif engines == [] and backend == "auto" and not bundle.of_kind("engine"):
        session.note = "running the ONNX file with ONNX Runtime: the bundle has no engine"
    return session
