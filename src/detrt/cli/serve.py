"""`detrt serve`: detectors behind HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import MissingPackageError, SessionError

_PACKAGES = {"fastapi", "starlette", "pydantic", "uvicorn", "httptools", "prometheus_client", "python_multipart"}


def serve(
    models: Annotated[
        list[str], typer.Argument(metavar="BUNDLE...", help="Bundle folders (or other models); NAME=BUNDLE gives another name.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port; 0 takes a free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Images a run of the model.")] = 8,
    max_delay_ms: Annotated[float, typer.Option(help="How long an image waits for others while a worker is idle.")] = 2.0,
    workers: Annotated[int | None, typer.Option(help="Processes for each device (CPU: 2, GPU: 1).")] = None,
    devices: Annotated[str, typer.Option(help="cpu, or GPUs: 0,1 or all; a worker process runs on each.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Threads of a CPU worker; default: its share of the cores.")] = None,
    backend: Annotated[str, typer.Option(help="auto, onnxruntime, tensorrt, inductor or torch.")] = "auto",
    size: Annotated[str | None, typer.Option(help="Input size, HEIGHTxWIDTH or one number.")] = None,
    image_decoder: Annotated[str, typer.Option(help="Decode JPEG files on the cpu, or on the gpu that runs the model.")] = "cpu",
    threshold: Annotated[float, typer.Option("--threshold", "-t", help="For requests that give none.")] = 0.5,
    queue: Annotated[int | None, typer.Option(help="Images that may wait; more are refused with 429.")] = None,
    timeout: Annotated[float, typer.Option(help="Longest time for a request, seconds.")] = 30.0,
    body_timeout: Annotated[float, typer.Option(help="Longest time for a body to arrive, seconds.")] = 30.0,
    drain: Annotated[float, typer.Option(help="Longest time for requests to finish after SIGTERM, seconds.")] = 30.0,
    max_body_mib: Annotated[int, typer.Option(help="Largest body, MiB.")] = 32,
    max_held_mib: Annotated[int, typer.Option(help="All bodies in memory together, MiB.")] = 512,
    max_pixels: Annotated[int, typer.Option(help="Largest image, pixels.")] = 50_000_000,
    max_images: Annotated[int, typer.Option(help="Images in a request.")] = 32,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that requests must show; or the variable DETRT_API_KEY.")
    ] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for each request on stderr.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what is served.")] = False,
) -> None:
    """Serve detectors over HTTP: images in, boxes out, with a page to try them.

    POST /v1/detect, the KServe v2 protocol under /v2, /metrics for Prometheus, a page at /. SIGTERM lets requests finish.

    Exit code 0: stopped after all requests were answered; 2: a model cannot be opened, or the port is taken.
    """
    from ..serve import ServeConfig, named_models
    from ..system import parse_devices
    from .detect import parse_size

    config = ServeConfig(
        models=named_models(models),
        host=host,
        port=port,
        max_batch=max_batch,
        max_delay_ms=max_delay_ms,
        workers=workers,
        devices=parse_devices(devices),
        threads=threads,
        backend=backend,
        size_hw=parse_size(size),
        image_decoder=image_decoder,
        queue=queue,
        timeout_s=timeout,
        body_timeout_s=body_timeout,
        drain_s=drain,
        max_body_mib=max_body_mib,
        max_held_mib=max_held_mib,
        max_pixels=max_pixels,
        max_images=max_images,
        threshold=threshold,
        api_key=_api_key(api_key_file),
        access_log=access_log,
    )

    def ready(address: str, served: dict[str, Any]) -> None:
        if quiet:
            return
        print(f"ready at {address}", flush=True)
        for facts in served.values():
            what = "takes a prompt" if facts.takes_prompt else f"{len(facts.spec.labels)} classes"
            size_text = f"{facts.size_hw[0]}x{facts.size_hw[1]}"
            print(f"  {facts.name}: {what}, {size_text}, {facts.backend}, batches to {facts.max_batch}", flush=True)
            if facts.note:
                print(f"    note: {facts.note}", flush=True)
        counts = {device: config.places.count(device) for device in dict.fromkeys(config.places)}
        print("  workers: " + ", ".join(f"{number} on {device}" for device, number in counts.items()), flush=True)

    try:
        from ..serve.server import serve as run

        run(config, on_ready=ready)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        raise MissingPackageError(package, "serve", "detrt serve") from None


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("DETRT_API_KEY") or None
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SessionError(f"the key file '{path}' cannot be read ({error}); write the key into a text file") from None
