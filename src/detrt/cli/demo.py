"""`detrt demo` and `detrt demo-data`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from .. import files
from ..backends.tensorrt import EngineConfig
from ..bundle import Bundle
from ..data import sinks as outputs
from ..data.draw import draw_detections
from ..data.scenes.scene import draw_scene
from ..detector import Detector
from ..errors import OutputError
from ..evaluation.matching import Gate
from ..evaluation.parity import require, verify
from ..evaluation.report import VerifyReport
from ..models.contract import ExportConfig
from ..pipeline import Stage, build


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for everything that is made.")] = Path("demo"),
    sm: Annotated[str | None, typer.Option(help="Compute capabilities of the engine: 86,89.")] = None,
) -> None:
    """Take the embedded detector from checkpoint to engine, check it, and detect in a picture."""
    from ..backends.tensorrt.config import parse_sms
    from . import show

    with show.progress() as step:
        report = run_demo(output, sms=parse_sms(sm) if sm else (), progress=step)
    rows = [(s.name, f"{s.seconds:.1f} s", show.human_size(s.size), s.verdict) for s in report.stages]
    show.table(f"embedded:shapes -> {output}", ("stage", "time", "size", "verdict"), rows, right=(1, 2))
    print(f"look at {report.picture}; the same in JSON: {output / 'detections.jsonl'}")
    print(f"look at {report.prompted}: each phrase asked for is a pair that the training never named together")
    print(
        "This small detector knows only the drawn scenes of detrt.data.scenes.scene. For the things of everyday photographs, "
        "with the network:\n  detrt build hf:PekingU/rtdetr_v2_r18vd -o coco && detrt detect coco photo.jpg --save-dir runs"
    )


def demo_data(
    output: Annotated[Path, typer.Argument(help="A new folder for images and annotations.json.")],
    count: Annotated[int, typer.Option(min=1, max=10_000_000, help="Number of scenes.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="First seed; scene i has seed + i.")] = 0,
    phrases: Annotated[bool, typer.Option("--phrases", help="Categories are the 144 phrases of colour and shape.")] = False,
) -> None:
    """Draw scenes with exact boxes as a dataset in COCO format."""
    from ..data.scenes.phrases import write_phrase_dataset
    from ..data.scenes.scene import write_dataset
    from . import show

    write = write_phrase_dataset if phrases else write_dataset
    try:
        with show.progress() as step:
            write(output, count, seed=seed, progress=lambda done, total: step("draw", done / total, f"{done} of {total}"))
    except ValueError as error:
        raise OutputError(str(error)) from None
    except OSError as error:
        raise files.output_error(output, error) from error
    print(f"{output}: {count} scenes; annotations in {output / 'annotations.json'}")


# The demo: a checkpoint to a checked engine and drawn boxes, in one call, without a download.
EMBEDDED = "embedded:shapes"
PROMPTED = "embedded:phrases"

# Five pairs that no caption of the training named together (`detrt.data.scenes.phrases.HELD_OUT_*`), and one thing that is
# not in the picture of PROMPT_SEED.
PROMPT = "purple ring. black square. white letter A. striped crescent. dotted circle. green star."
PROMPT_SEED = 900_000_280

# Scenes that the embedded detector was neither trained nor chosen on (training/demo_detector.json).
FIRST_SEED = 900_000_001
PICTURE_SEED = 900_000_000
PICTURE_SIZE_HW = (480, 640)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo did: its stages, the bundle, the check, and the files for a person to look at.

    prompted: the picture in which `PROMPT` was looked for, and phrases: what was found of it.
    """

    stages: tuple[Stage, ...]
    bundle: Bundle
    parity: VerifyReport
    picture: Path
    detections: int
    prompted: Path
    phrases: tuple[str, ...]


def run_demo(
    output: Path,
    *,
    sms: tuple[int, ...] = (),
    scenes: int = 8,
    progress: Callable[[str, float | None, str], None] | None = None,
) -> DemoReport:
    """Build the embedded detector into `output`, check it against PyTorch on drawn scenes, detect and draw; then ask
    the embedded prompted detector, in `output/phrases`, for things that were never named together in its training.

    Raises:
        GateError: the exported graph does not detect what PyTorch detects. DetrtError: see `build`.
    """
    say = progress or (lambda stage, fraction, text: None)
    report = build(
        EMBEDDED,
        output,
        export=ExportConfig(),
        engines=(EngineConfig(sms=sms),),
        progress=progress,
    )
    stages = list(report.stages)
    start = time.perf_counter()
    pictures = [draw_scene(FIRST_SEED + index).image for index in range(scenes)]
    parity = verify(
        EMBEDDED,
        output / "model.onnx",
        pictures,
        gate=Gate(),
        progress=lambda done, total: say("verify", done / total, f"{done} of {total} scenes"),
    )
    require(parity)
    verdict = f"{parity.compared} detections on {scenes} scenes the same as PyTorch, within {parity.worst_box_px:.4f} px"
    stages.append(Stage("verify", time.perf_counter() - start, 0, verdict))

    start = time.perf_counter()
    say("detect", None, "picture.png")
    picture = draw_scene(PICTURE_SEED, size_hw=PICTURE_SIZE_HW).image
    with Detector.open(output, backend="onnxruntime", threshold=0.5) as detector:
        found = detector([picture])[0]
    with files.writing(output / "picture.png") as temporary:
        Image.fromarray(picture).save(temporary, format="PNG")
    annotated = output / "annotated.png"
    with files.writing(annotated) as temporary:
        draw_detections(picture, found).save(temporary, format="PNG")
    with outputs.jsonl_writer(output / "detections.jsonl") as write:
        write(outputs.Record("picture.png", found))
    best = ", ".join(dict.fromkeys(found.labels[i] for i in np.argsort(-found.scores)))
    stages.append(Stage("detect", time.perf_counter() - start, annotated.stat().st_size, f"{len(found)} objects: {best}"))
    drawn, phrases, more = _prompted(output, progress)
    return DemoReport((*stages, *more), report.bundle, parity, annotated, len(found), drawn, phrases)


def _prompted(
    output: Path, progress: Callable[[str, float | None, str], None] | None
) -> tuple[Path, tuple[str, ...], list[Stage]]:
    """The second half: the annotated picture, the phrases that were found, and the stages."""
    report = build(PROMPTED, output / "phrases", engines=(), progress=progress)
    stages = [replace(stage, name=f"prompted: {stage.name}") for stage in report.stages if stage.name != "load"]
    start = time.perf_counter()
    picture = draw_scene(PROMPT_SEED, size_hw=PICTURE_SIZE_HW).image
    with Detector.open(output / "phrases", backend="onnxruntime", threshold=0.5, prompt=PROMPT) as detector:
        found = detector([picture])[0]
    path = output / "prompted.png"
    with files.writing(path) as temporary:
        draw_detections(picture, found).save(temporary, format="PNG")
    phrases = tuple(dict.fromkeys(found.labels[i] for i in np.argsort(-found.scores)))
    verdict = f"{len(phrases)} of the {PROMPT.count('.')} phrases asked for: {', '.join(phrases)}"
    stages.append(Stage("prompted: detect", time.perf_counter() - start, path.stat().st_size, verdict))
    return path, phrases, stages
