"""Opening TensorRT engines: alone, and of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ...bundle import BundleFile, EngineFacts
from ...errors import EngineError, MissingPackageError, SessionError
from ...spec import ModelSpec
from ...system import CPU
from ..base import BaseSession
from ..search import FileSearch, Opener, Parts, SessionOptions
from .first_opening import check_first_opening


def open_engine(
    path: Path,
    device: str | None = None,
    *,
    spec: ModelSpec | None = None,
    facts: EngineFacts | None = None,
    compare: Callable[[], object] | None = None,
    eager_kernels: bool = False,
    keep_kernels: bool = True,
) -> BaseSession:
    """An engine alone, without the text encoder and the tokenizer of a model that takes a prompt. spec, facts, compare: of its bundle, see
    `TensorRTSession`."""
    from .session import TensorRTSession

    specialization = "eager" if eager_kernels else "lazy"
    return TensorRTSession(
        path,
        spec,
        facts,
        compare=compare,
        device=device or "cuda:0",
        specialization=specialization,
        keep_kernels=keep_kernels,
    )


class EngineOpener(Opener):
    """Opens engines; the text encoder of an engine is the engine for the same target and GPUs."""

    def open_file(self, path: Path, options: SessionOptions) -> BaseSession:
        if options.device == CPU:
            raise SessionError(f"'{path}' is a TensorRT engine, which needs a GPU; got the device cpu")
        return open_engine(path, options.device, eager_kernels=options.eager_kernels)

    def measured_on(self, entries: Sequence[BundleFile], devices: Sequence[str]) -> Sequence[str | None]:
        return [device for device in devices if device.startswith("cuda")] if devices else [None]

    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        options = search.options
        for entry in search.bundle.of_kind("engine"):
            bundle = search.bundle
            try:
                session = open_engine(
                    bundle.path_of(entry),
                    options.device,
                    spec=bundle.spec,
                    facts=entry.engine,
                    compare=partial(bundle.checked_path, entry),
                    eager_kernels=options.eager_kernels,
                )
                return session, entry
            except (EngineError, MissingPackageError, SessionError) as error:
                search.reject(entry, error)
        return None

    def open_text_encoder(self, parts: Parts, detector: BaseSession, options: SessionOptions) -> tuple[BaseSession | None, str]:
        engines = parts.of_kind("text-engine")
        why = "there is none for the same target and GPUs; build one with: detrt build"
        for one in engines:
            if one.engine is not None and not _same_machine(one.engine, detector.info.facts):
                continue
            path, compare = parts.folder / one.path, partial(parts.checked_path, one)
            try:
                return open_engine(path, options.device, spec=detector.spec, facts=one.engine, compare=compare), ""
            except (EngineError, MissingPackageError, SessionError) as error:
                why = f"{one.path}: {error}"
        # Where there is none, TensorRT could not build it, which `build` said.
        if options.backend != "auto" and engines:
            raise EngineError(f"no engine of the text encoder in '{parts.folder}' can run here: {why}")
        return None, f"the text encoder runs with ONNX Runtime, because no engine of it can run here: {why}"

    def check(self, search: FileSearch, session: BaseSession, entry: BundleFile) -> None:
        check_first_opening(session, search.bundle, entry, search.open_graph)


def _same_machine(a: EngineFacts, b: EngineFacts | None) -> bool:
    return b is not None and (a.target, a.compute_capabilities) == (b.target, b.compute_capabilities)


OPENER = EngineOpener()
