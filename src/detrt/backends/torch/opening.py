"""Opening checkpoints in PyTorch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...bundle import BundleFile
from ...errors import MissingPackageError
from ...system import CPU
from ..search import FileSearch, Opener, SessionOptions

if TYPE_CHECKING:
    from ..base import BaseSession


class TorchOpener(Opener):
    """Opens checkpoints, which no bundle has."""

    def open_file(self, path: str | os.PathLike, options: SessionOptions) -> BaseSession:
        """path: a reference, such as hf:org/name."""
        try:
            from ...models.load import load_source
            from .session import open_torch
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("detrt"):
                raise
            raise MissingPackageError(error.name or "torch", "export", "running a checkpoint") from None

        source = load_source(os.fspath(path), options.load)
        session = open_torch(source, device=options.device or CPU, threads=options.threads)
        session.checkpoint_sha256 = source.provenance.checkpoint_sha256
        for note in source.notes:
            session.add_note(note)
        return session

    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        return None


OPENER = TorchOpener()
