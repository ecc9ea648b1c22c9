"""Opening packages of PyTorch's compiler: alone, and of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...bundle import BundleFile
from ...errors import EngineError, MissingPackageError, SessionError
from ...system import CPU
from ..base import BaseSession
from ..search import FileSearch, Opener, SessionOptions
from .session import InductorSession, SizedSession


class PackageOpener(Opener):
    """Opens packages; several of one kind of device are one session of several sizes."""

    def open_file(self, path: Path, options: SessionOptions) -> BaseSession:
        return InductorSession(path, device=options.device, threads=options.threads)

    def measured_on(self, entries: Sequence[BundleFile], devices: Sequence[str]) -> Sequence[str | None]:
        """The kinds of device that packages were compiled for, GPUs first; of a file alone its own."""
        own = {None if entry.engine is None else entry.engine.target.removeprefix("inductor-") for entry in entries} or {None}
        return devices or sorted(own, key=lambda device: device == CPU)

    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        """The packages of the first kind of device that run here, those of a GPU first."""
        bundle = search.bundle
        opened: list[InductorSession] = []
        entries: list[BundleFile] = []
        for entry in sorted(bundle.of_kind("inductor"), key=lambda e: e.engine is None or not e.engine.compute_capabilities):
            if opened and (entry.engine is None or entry.engine.target != opened[0].facts.target):
                continue
            options = search.options
            try:
                opened.append(
                    InductorSession(
                        bundle.path_of(entry),
                        bundle.spec,
                        entry.engine,
                        compare=partial(bundle.checked_path, entry),
                        device=options.device,
                        threads=options.threads,
                    )
                )
                entries.append(entry)
            except (EngineError, MissingPackageError, SessionError) as error:
                search.reject(entry, error)
        if not opened:
            return None
        return SizedSession(opened) if len(opened) > 1 else opened[0], entries[0]


OPENER = PackageOpener()
