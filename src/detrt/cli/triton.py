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
    max_batch: Annotated[int | None, typer.Option(help="Largest batch size; default: the engine's, or 16.")] = None,
    max_delay_ms: Annotated[float, typer.Option(help="Max queue delay of a request, milliseconds.")] = 2.0,
    preferred_batch: Annotated[str | None, typer.Option(help="Preferred batch sizes, comma-separated: 4,8.")] = None,
    queue: Annotated[int, typer.Option(help="Longest queue, requests; more are refused; 0: no limit.")] = 0,
    instances: Annotated[int, typer.Option(help="Model instances on each device.")] = 1,
    device: Annotated[str | None, typer.Option(help="GPUs 0,1 or cpu; default: Triton chooses.")] = None,
    threshold: Annotated[float, typer.Option("--threshold", "-t", help="Lowest score that the ensemble keeps.")] = 0.5,
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

    from ..serve.triton import Placement, TritonConfig, write_triton_repo
    from . import show
    from .options import numbers

    show.check_json(json_file)
    preferred = () if preferred_batch is None else numbers("--preferred-batch")(preferred_batch)
    config = TritonConfig(
        name=name,
        backend=backend,
        max_batch=max_batch,
        delay_us=round(max_delay_ms * 1000),
        preferred=preferred,
        queue=queue,
        placement=Placement(instances, *_devices(device)),
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


def _devices(device: str | None) -> tuple[bool, tuple[int, ...] | None]:
    """(whether on the CPU, GPU numbers) of --device. Raises SpecError where both are named."""
    from ..errors import SpecError
    from ..system import CPU, parse_devices

    if device is None:
        return False, None
    found = parse_devices(device)
    if CPU not in found:
        return False, tuple(dict.fromkeys(int(one.partition(":")[2]) for one in found))
    if set(found) != {CPU}:
        raise SpecError(f"--device: a model of Triton runs on GPUs or on the CPU, not on both; got {device!r}")
    return True, None
