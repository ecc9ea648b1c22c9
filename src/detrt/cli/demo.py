"""`detrt demo` and `detrt demo-data`."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import files
from ..backends.shared import SharedOptions, builds, configs_of
from ..errors import EngineError, OutputError, number_of
from ..models.load_options import LoadOptions
from .options import FOLDER, option_of

*_OTHERS, ONNX = builds()
Untested = option_of(LoadOptions, "allow_untested_transformers")


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Output folder."), FOLDER] = Path("demo"),
    target: Annotated[str, typer.Option(help=f"{ONNX} (the graph alone), {', '.join(_OTHERS)}.")] = ONNX,
    sm: Annotated[str | None, typer.Option(help="Comma-separated compute capabilities of the engine: 86,89.")] = None,
    allow_untested_transformers: Untested = False,
) -> None:
    """Take the embedded detector from checkpoint to a bundle, check it, and detect in an image."""
    from . import show
    from .run_demo import run_demo

    asked = SharedOptions((target,)).resolved(checkpoint=True)
    row, _ = builds()[asked.names[0]]
    option = next((one for one in fields(row.config_class()) if one.name == "sms"), None)
    if sm and option is None:
        raise EngineError(f"--sm {sm} has no effect without --target tensorrt-rtx; add that, or leave it out")
    chosen = {"sms": option.metadata["parse"](sm)} if sm and option is not None else {}
    configs = [] if target == ONNX else configs_of(asked, {row.name: partial(row.config_class(), **chosen)})
    with show.progress() as step:
        load = LoadOptions(allow_untested_transformers=allow_untested_transformers)
        report = run_demo(output, targets=configs, load=load, progress=step)
    rows = [(s.name, f"{s.seconds:.1f} s", show.human_size(s.size), s.verdict) for s in report.stages]
    show.table(f"embedded:shapes -> {output}", ("stage", "time", "size", "verdict"), rows, right=(1, 2))
    print(f"look at {report.image}; the same in JSON: {output / 'detections.jsonl'}")
    print(f"look at {report.prompted}: each phrase asked for is a pair that the training never named together")
    print(
        "This small detector knows only the drawn scenes of detrt.data.scenes.scene. For the things of everyday photographs, "
        "with the network:\n  detrt build hf:PekingU/rtdetr_v2_r18vd -o coco && detrt detect coco photo.jpg --save-dir runs"
    )


def demo_data(
    output: Annotated[Path, typer.Argument(help="A new folder for images and annotations.json."), FOLDER],
    count: Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of scenes.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="First seed; scene i has seed + i.")] = 0,
    phrases: Annotated[bool, typer.Option("--phrases", help="Categories are the 144 phrases of colour and shape.")] = False,
) -> None:
    """Draw scenes with exact boxes and masks as a dataset in COCO format."""
    from ..data.scenes.phrases import write_phrase_dataset
    from ..data.scenes.scene import write_dataset
    from . import show

    write = write_phrase_dataset if phrases else write_dataset
    try:
        with files.naming(output), show.progress() as step:
            write(output, count, seed=seed, progress=lambda done, total: step("draw", done / total, f"{done} of {total}"))
    except ValueError as error:
        raise OutputError(str(error)) from None
    print(f"{output}: {number_of(count, 'scene')}; annotations in {output / 'annotations.json'}")
