"""`detrt serve`: detectors behind HTTP."""

from __future__ import annotations

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import files
from ..errors import SessionError, number_of, printable
from ..models.load_options import LoadOptions
from ..serve.config import ServeConfig, named_models
from .options import Given, GivenTuning, command
from .spellings import spelled
from .streams import give_stdout_a_sink

# Fields of requests have these names too, and answers are about requests.
_OF_REQUESTS = {"threshold", "size", "image_decoder"}


def _spelled(text: str) -> str:
    """An answer of the server with its options as its operator types them; all else are keys of the request."""
    return spelled(text, only={*(one.name for one in fields(ServeConfig)), "api_key_file"} - _OF_REQUESTS)


@command
def serve(
    models: Annotated[
        list[str], typer.Argument(metavar="BUNDLE...", help="Bundle folders (or other models); NAME=BUNDLE gives another name.")
    ],
    options: Given[ServeConfig],
    tuning: GivenTuning,
    load: LoadOptions,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that requests must show; or the variable DETRT_API_KEY.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what is served.")] = False,
) -> None:
    """Serve detectors over HTTP: images in, boxes out, with a page to try them.

    POST /v1/detect, the KServe v2 protocol under /v2, /metrics for Prometheus, a page at /. SIGTERM lets requests finish.

    Exit code 0: stopped after all requests were answered; 2: a model cannot be opened, or the port is taken.
    """
    from ..backends.open import load_options_for

    named = named_models(models)
    read = load_options_for([model.ref for model in named], load)
    served = tuple(replace(model, load=own) for model, own in zip(named, read, strict=True))
    config = options.make(models=served, tuning=tuning.arguments(), api_key=_api_key(api_key_file), spelled=_spelled)

    begun = time.monotonic()

    def say(text: str) -> None:
        """A line on stdout; its reader may have gone (`| head -1`), which is no reason to stop serving."""
        try:
            print(printable(text), flush=True)
        except BrokenPipeError:
            give_stdout_a_sink()

    def loaded(count: int, total: int) -> None:
        say(f"  {count} of {number_of(total, 'worker')} ready after {time.monotonic() - begun:.0f} s")

    def ready(address: str, facts_of: dict[str, Any]) -> None:
        if quiet:
            return
        say(f"ready at {address}")
        for facts in facts_of.values():
            classes = "takes a prompt" if facts.takes_prompt else number_of(len(facts.spec.labels), "class")
            size_text = f"{facts.size_hw[0]}x{facts.size_hw[1]}"
            say(f"  {facts.name}: {classes}, {size_text}, {facts.backend}, batches to {facts.max_batch}")
            if facts.note:
                say(f"    note: {spelled(facts.note)}")
        counts = {device: config.worker_devices.count(device) for device in dict.fromkeys(config.worker_devices)}
        say("  workers: " + ", ".join(f"{number} on {device}" for device, number in counts.items()))

    from ..serve.server import serve as run

    if not quiet:
        names = ", ".join(model.name for model in config.models)
        say(f"loading {names} in {number_of(len(config.worker_devices), 'worker')}; this can take a minute")
    run(config, on_ready=ready, on_worker=None if quiet else loaded)


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("DETRT_API_KEY") or None
    return files.read_text(path, "key file", SessionError, advice="write the key into it").strip()
