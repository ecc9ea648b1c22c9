"""`detrt deepstream`: a bundle as a model of NVIDIA DeepStream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..serve.deepstream_config import DeepStreamConfig
from .options import FOLDER, Json, command


@command
def deepstream(
    model: Annotated[Path, typer.Argument(help="Bundle folder, or ONNX file with a spec.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; files of the same names are replaced."), FOLDER],
    config: DeepStreamConfig,
    json_file: Json = None,
) -> None:
    """Write graph, labels and nvinfer's configuration for NVIDIA DeepStream."""
    from ..serve.deepstream import write_deepstream
    from . import show

    show.check_json(json_file)
    done = write_deepstream(model, output, config)
    show.notes(done.notes)
    network, content = ("x".join(map(str, size)) for size in (done.box.network_hw, done.box.content_hw))
    if json_file:
        data = {"folder": str(done.folder), "files": list(done.files), "network": network, "content": content}
        show.write_json({**data, "notes": list(done.notes)}, json_file)
    if json_file != "-":
        rows = [
            ("files", ", ".join(done.files)),
            ("network", network + (f", frames cover {content}" if done.box.padded and done.box.resize is None else "")),
        ]
        show.table(f"{output}", ("", ""), [*rows, ("start with", f"deepstream-app -c {output / 'deepstream_app_config.txt'}")])
