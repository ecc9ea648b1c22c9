"""Opening of compiled packages. Needs torch only, as does the machine that runs a package."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import files
from ...errors import EngineError

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
    """A function from input tensors to output tensors. threads: whether it must be thread-safe.

    Raises:
        EngineError: the file is damaged.
    """
    from . import kernels  # noqa: F401 (registers operators that packages for a GPU call)

    if not is_artifact(path):
        return _aoti(path, torch.device(device), threads)
    with zipfile.ZipFile(path) as archive, files.scratch() as folder:
        for name in (ARTIFACT, WEIGHTS):
            if name not in archive.namelist():
                raise EngineError(f"'{path.name}' has no {name}: it is damaged; build it again with detrt build")
            archive.extract(name, folder)
        weights = torch.load(folder / WEIGHTS, map_location=device, weights_only=True)
        artifact = torch._inductor.CompiledArtifact.load(path=str(folder / ARTIFACT), format="binary")
    return bind_weights(artifact, weights)


def _aoti(path: Path, device: torch.device, threads: bool) -> Run:
    """An AOTInductor package, by the loader that `torch._inductor.aoti_load_package` calls.

    That function first imports the whole compiler, and in every new cache folder compiles small C++ programs to see which
    vector instructions work here: a second, and on a busy machine half a minute. `InductorSession` has already made the
    comparison that it warns about.
    """
    index = device.index or 0 if device.type == "cuda" else -1
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", not threads, 1, index)  # type: ignore[attr-defined]
    return lambda *inputs: loader.run(list(inputs))


def bind_weights(artifact: Any, weights: Sequence[Tensor]) -> Run:
    """An artifact, which takes its weights first, as a function of the inputs only."""
    tensors = list(weights)
    return lambda *inputs: artifact(*tensors, *inputs)
