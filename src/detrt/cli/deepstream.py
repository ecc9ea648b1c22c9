"""`detrt deepstream`: a bundle as a model of NVIDIA DeepStream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..spec import parse_size


def deepstream(
    model: Annotated[Path, typer.Argument(help="Bundle folder, or ONNX file with a spec.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; files of the same names are replaced.")],
    frame: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH of nvstreammux, for models that keep the aspect ratio.")] = None,
    resize: Annotated[
        str, typer.Option(help="nvinfer resizes frames, or the graph, exactly as detrt does; that needs --frame.")
    ] = "nvinfer",
    size: Annotated[str | None, typer.Option(help="Input size: 640 or HEIGHTxWIDTH.")] = None,
    batch: Annotated[int, typer.Option(help="Batch size: the number of streams.")] = 1,
    threshold: Annotated[float, typer.Option("--threshold", "-t", help="Lowest score to keep.")] = 0.5,
    class_thresholds: Annotated[str | None, typer.Option(help="Thresholds of classes: person=0.6,car=0.4.")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="What was written to this file; - is stdout.")] = None,
) -> None:
    """Write graph, labels and nvinfer's configuration for NVIDIA DeepStream."""
    from ..serve.deepstream import DeepStreamConfig, write_deepstream
    from . import show
    from .detect import parse_class_thresholds

    show.check_json(json_file)
    config = DeepStreamConfig(
        frame_hw=None if frame is None else parse_size(frame),
        size_hw=None if size is None else parse_size(size),
        resize=resize,
        batch=batch,
        threshold=threshold,
        class_thresholds=dict(parse_class_thresholds(class_thresholds or "")),
    )
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
