"""`detrt triton-repo`: a bundle as a model repository of Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def triton_repo(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model repository; its other models stay.")],
    name: Annotated[str | None, typer.Option(help="Name of the model; default: the bundle's folder.")] = None,
    backend: Annotated[str, typer.Option(help="auto, onnxruntime or tensorrt.")] = "auto",
    max_batch: Annotated[int | None, typer.Option(help="Images that run together; default: the engine's largest, or 16.")] = None,
    max_delay_ms: Annotated[float, typer.Option(help="How long a request may wait for others.")] = 2.0,
    preferred_batch: Annotated[str | None, typer.Option(help="Batches to aim at, with commas: 4,8.")] = None,
    queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused; 0: any number.")] = 0,
    instances: Annotated[int, typer.Option(help="Copies on each device.")] = 1,
    devices: Annotated[str | None, typer.Option(help="GPUs 0,1 or cpu; default: Triton chooses.")] = None,
    threshold: Annotated[float, typer.Option("--threshold", "-t", help="Of the ensemble: keep scores above it.")] = 0.5,
    ensemble: Annotated[
        bool, typer.Option("--ensemble/--model-only", help="Encoded images in and boxes out, or the detector alone.")
    ] = True,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run the detector once when it is loaded.")] = True,
    plugin: Annotated[
        str | None, typer.Option(help="Library with the plugins of the engine, as Triton's machine has it.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="What was written to this file; - is stdout.")] = None,
) -> None:
    """Write a model repository for Triton Inference Server."""
    from dataclasses import asdict

    from ..errors import SpecError
    from ..serve.triton import Placement, TritonConfig, write_triton_repo
    from . import show

    show.check_json(json_file)
    try:
        preferred = tuple(int(part) for part in (preferred_batch or "").split(",") if part.strip())
    except ValueError:
        raise SpecError(f"--preferred-batch takes numbers with commas, e.g. 4,8; got {preferred_batch!r}") from None
    config = TritonConfig(
        name=name,
        backend=backend,
        max_batch=max_batch,
        delay_us=round(max_delay_ms * 1000),
        preferred=preferred,
        queue=queue,
        placement=Placement(instances, *_places(devices)),
        threshold=threshold,
        ensemble=ensemble,
        warmup=warmup,
        plugin=plugin,
    )
    done = write_triton_repo(bundle, output, config)
    show.notes(done.notes)
    if json_file:
        show.write_json({**asdict(done), "folder": str(done.folder)}, json_file)
    if json_file != "-":
        rows = [("models", ", ".join(done.models)), ("runs with", f"{done.backend}, batch up to {done.max_batch}")]
        show.table(f"{output}", ("", ""), [*rows, ("start with", done.command)])


def _places(devices: str | None) -> tuple[bool, tuple[int, ...] | None]:
    """(whether on the CPU, GPU numbers) of --devices. Raises SpecError where both are named."""
    from ..errors import SpecError
    from ..system import CPU, parse_devices

    if devices is None:
        return False, None
    found = parse_devices(devices)
    if CPU not in found:
        return False, tuple(dict.fromkeys(int(one.partition(":")[2]) for one in found))
    if set(found) != {CPU}:
        raise SpecError(f"--devices: a model of Triton runs on GPUs or on the CPU, not on both; got {devices!r}")
    return True, None
