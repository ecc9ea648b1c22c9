"""The target `inductor` as a stage of `detrt build`: what it refuses beforehand, and one package for each config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..errors import EngineError, ExportError
from ..export.config import ExportConfig
from ..spec import ModelSpec
from .build import BuiltPackage, build_package, check_ready
from .config import PRECISIONS, InductorConfig


@dataclass(frozen=True, slots=True)
class Packaged:
    """One finished package: its config, what was built, seconds, and a verdict in words."""

    config: InductorConfig
    built: BuiltPackage
    seconds: float
    verdict: str


def check_packages(packages: Sequence[InductorConfig], model: str, export: ExportConfig, precision: str) -> None:
    """Refuse what the target cannot build, before minutes of export.

    Raises:
        EngineError, ExportError: the choices do not fit. MissingPackageError: no torch.
    """
    if not packages:
        return
    if model.lower().endswith(".onnx"):
        raise EngineError(f"--target inductor compiles a checkpoint, and '{model}' is an ONNX file; give the checkpoint itself")
    if export.nms.startswith("graph"):
        raise ExportError(f"--nms {export.nms} is not for --target inductor; leave it out: detrt suppresses outside the graph")
    if precision not in PRECISIONS:
        raise EngineError(
            f"--target inductor has the precisions {', '.join(PRECISIONS)}; got {precision}; build it without, or with another target"
        )
    if len({config.label for config in packages}) != len(packages):
        raise EngineError("two packages would have one name; give each device once")
    for config in packages:
        check_ready(config)


def build_packages(
    model: str,
    folder: Path,
    graph: str,
    packages: Sequence[InductorConfig],
    spec: ModelSpec,
    precision: str,
    loading: Mapping[str, Any],
    say: Callable[[str, float | None, str], None],
) -> list[Packaged]:
    """Compile each package into the folder of a bundle. graph: its ONNX file. loading: as `load_source` takes it.

    Raises:
        See `build_package`.
    """
    done = []
    for config in packages:
        start = time.perf_counter()
        built = build_package(
            model,
            folder,
            config,
            spec,
            precision,
            loading=loading,
            onnx_sha256=files.sha256_of(folder / graph),
            progress=lambda fraction, text, label=config.label: say(label, fraction, text),  # type: ignore[misc]
        )
        low, high = config.batches
        batches = f"batch {low}" if low == high else f"batches {low} to {high}"
        verdict = f"{built.facts.precision}, {batches}, {built.error:.1e} from PyTorch"
        done.append(Packaged(config, built, time.perf_counter() - start, verdict))
    return done
