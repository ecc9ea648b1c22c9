"""Opening ONNX files: alone, of a bundle, and of other exporters; and the parts that run with ONNX Runtime beside another backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...bundle import BundleFile
from ...errors import DetrtError, SessionError, SpecError
from ...spec import ModelSpec
from ...system import CPU
from ..base import BaseSession
from ..search import FileSearch, GraphOpener, Parts, SessionOptions, part_path, refuse_reading
from ..target import Target
from .rtx import BACKEND as RTX
from .session import NoSpecError, OnnxSession, available_providers, run_graph


class OnnxOpener(GraphOpener):
    """Opens ONNX files. It is the last of the list: every bundle has one."""

    def open_file(self, path: Path, options: SessionOptions) -> BaseSession:
        """An ONNX file with its spec, or one of another exporter in detrt's contract."""
        provider, threads = provider_of(options), options.threads
        try:
            session = OnnxSession(
                path, options.spec, provider=provider, threads=threads, emulate_low_precision=options.emulate_low_precision
            )
        except NoSpecError:
            from ...models.foreign import read_foreign

            foreign = read_foreign(path, options.load, run_graph)
            session = OnnxSession(foreign.contract().SerializeToString(), foreign.spec, provider=provider, threads=threads)
            session.name = f"'{path}'"
            session.add_note("a graph of another exporter: " + "; ".join(foreign.notes))
            return session
        try:
            refuse_reading(f"'{path}' is an ONNX file", options.load, may_have_code=False)
        except SpecError:
            session.close()
            raise
        return session

    def open_part(self, path: Path, spec: ModelSpec, options: SessionOptions) -> BaseSession:
        return OnnxSession(path, spec, provider=CPU, threads=options.threads)

    def run_graph(self, model: bytes | Path, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return run_graph(model, feeds)

    def measured_on(self, entries: Sequence[BundleFile], devices: Sequence[str]) -> Sequence[str | None]:
        """The CPU, and the GPU where this build of ONNX Runtime has one."""
        return devices or [name for name in (CPU, "cuda") if name in available_providers()]

    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        bundle, options = search.bundle, search.options
        graphs = bundle.of_kind("onnx")
        if not graphs:
            return None
        provider = provider_of(options)
        fused = [bundle.checked_path(entry) for entry in bundle.of_kind("onnx-fused")] if provider == CPU else []
        try:
            session = OnnxSession(
                bundle.checked_path(graphs[0]),
                options.spec or bundle.spec,
                provider=provider,
                threads=options.threads,
                fused=next(iter(fused), None),
                emulate_low_precision=options.emulate_low_precision,
            )
        except DetrtError as error:
            if provider == CPU:
                raise
            # What was built for the device comes first: making that run is the one next step.
            raise SessionError(f"'{bundle.folder}' cannot run on {provider}: {search.why or error}") from None
        if search.reasons:
            session.add_note(
                f"running the ONNX file with ONNX Runtime, because nothing else of the bundle can run here: {search.why}"
            )
        return session, graphs[0]

    def open_text_encoder(self, parts: Parts, detector: BaseSession, options: SessionOptions) -> tuple[BaseSession | None, str]:
        assert detector.spec.text is not None
        path = part_path(parts, "text", detector.spec.text.encoder)
        return OnnxSession(path, detector.spec, provider=provider_of(options), threads=options.threads), ""

    def refusal(self, search: FileSearch, row: Target) -> DetrtError:
        why = f", and nothing else of it can run here: {search.why}" if search.reasons else "; build it again"
        return SessionError(f"the bundle '{search.bundle.folder}' has no ONNX file{why}")


def provider_of(options: SessionOptions) -> str:
    """The execution provider, as `OnnxSession` takes it. Raises SessionError: a device that it does not run on."""
    if options.backend != RTX:
        return options.device or CPU
    kind, _, number = (options.device or "cuda:0").partition(":")
    if kind != "cuda":
        raise SessionError(f"`backend={RTX}` runs on NVIDIA's RTX GPUs, such as cuda:0; got the device {options.device!r}")
    return f"rtx:{number or 0}"


OPENER = OnnxOpener()
