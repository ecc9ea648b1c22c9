"""Compiled files: which form one has, and opening it. Needs torch alone, as the machine that runs a package does."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import EngineError

ARTIFACT, WEIGHTS, INDEX = "artifact.bin", "weights.pt", "index.json"
Run = Callable[..., Any]


def is_artifact(path: Path) -> bool:
    """Whether a file is an archive of artifacts, and not an AOTInductor package."""
    try:
        with zipfile.ZipFile(path) as archive:
            return ARTIFACT in archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def load_package(path: Path, device: str = "cpu", threads: bool = True) -> Run:
    """A function from input tensors to output tensors. threads: several may call it at once.

    Raises:
        EngineError: the file is damaged.
    """
    from ..kernels import epilogues  # noqa: F401 (registers operators that packages for a GPU call)

    if not is_artifact(path):
        index = torch.device(device).index if torch.device(device).type == "cuda" else -1
        return torch._inductor.aoti_load_package(str(path), run_single_threaded=not threads, device_index=index or -1)
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory(prefix="detrt-artifact-") as folder:
        for name in (ARTIFACT, WEIGHTS):
            if name not in archive.namelist():
                raise EngineError(f"'{path.name}' has no {name}: it is damaged; build it again with detrt build")
            archive.extract(name, folder)
        weights = torch.load(Path(folder) / WEIGHTS, map_location=device, weights_only=True)
        artifact = torch._inductor.CompiledArtifact.load(path=str(Path(folder) / ARTIFACT), format="binary")
    return bound(artifact, weights)


def bound(artifact: Any, weights: Sequence[Tensor]) -> Run:
    """An artifact, which takes its weights first, as a function of the inputs alone."""
    held = list(weights)
    return lambda *inputs: artifact(*held, *inputs)
