"""`detrt triton-repo`: a bundle as a model repository of Triton Inference Server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..serve.triton_config import TritonConfig
from .options import FOLDER, Json, command


@command
def triton_repo(
    bundle: Annotated[Path, typer.Argument(help="Bundle folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Model repository; its other models stay."), FOLDER],
    config: TritonConfig,
    json_file: Json = None,
) -> None:
    """Write a model repository for Triton Inference Server."""
    from dataclasses import asdict

    from ..serve.triton import write_triton_repo
    from . import show

    show.check_json(json_file)
    done = write_triton_repo(bundle, output, config)
    show.notes(done.notes)
    if json_file:
        show.write_json({**asdict(done), "folder": str(done.folder)}, json_file)
    if json_file != "-":
        rows = [("model", f"{done.model}, version {done.version}"), ("start with", done.command)]
        show.table(f"{output}", ("", ""), rows)
