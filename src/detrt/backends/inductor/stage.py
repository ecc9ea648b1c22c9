"""The target `inductor` as a stage of `detrt build`: what it refuses beforehand, and one package for each config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import files
from ...errors import EngineError, ExportError
from ...models.config import ExportConfig
from ...spec import ModelSpec
from .build import BuiltPackage, build_package, check_ready
from .config import LOW, PRECISIONS, InductorConfig


@dataclass(frozen=True, slots=True)
class Packaged:
    """One finished package: its name in words, what was built, seconds, and a verdict in words."""

    name: str
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
    if len({(config.device, config.height, config.width) for config in packages}) != len(packages):
        raise EngineError("two packages would have one name; give each device and each size once")
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
    several = len(packages) > len({config.device for config in packages})
    for config in packages:
        start = time.perf_counter()
        name = config.label + (f" {config.height[0]}x{config.width[0]}" if several and config.height and config.width else "")
        built = build_package(
            model,
            folder,
            config,
            spec,
            precision,
            loading=loading,
            onnx_sha256=files.sha256_of(folder / graph),
            progress=lambda fraction, text, name=name: say(name, fraction, text),  # type: ignore[misc]
            sized=several,
        )
        profile = next(iter(built.facts.profile.values()))
        low, high = profile["min"][0], profile["max"][0]
        batches = f"batch {low}" if low == high else f"batches {low} to {high}"
        # 16-bit types may select other queries, which a difference of tensors cannot judge.
        exact = built.facts.precision not in LOW
        judged = f"{built.error:.1e} from PyTorch" if exact else "finite; compare with: detrt verify"
        verdict = f"{built.facts.precision}, {batches}, {judged}"
        done.append(Packaged(name, built, time.perf_counter() - start, verdict))
    return done
