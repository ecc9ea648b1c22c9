"""The demo: a checkpoint to a checked engine and drawn boxes, in one call, without a download."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import files
from ..backends.targets import GRAPH
from ..bundle import Bundle
from ..data import sinks as outputs
from ..data.draw import draw_detections
from ..data.matching import Gate
from ..data.scenes.scene import draw_scene
from ..detector import Detector
from ..errors import number_of
from ..evaluation.parity import require, verify
from ..models.contract import ExportConfig
from ..models.load_options import LoadOptions
from ..pipeline import Stage, build
from ..system import StageProgress

EMBEDDED = "embedded:shapes"
PROMPTED = "embedded:phrases"

# Five pairs that no caption of the training named together (`detrt.data.scenes.phrases.HELD_OUT_*`), and one thing that is
# not in the image of PROMPT_SEED.
PROMPT = "purple ring. black square. white letter A. striped crescent. dotted circle. green star."
PROMPT_SEED = 900_000_280

# Scenes that the embedded detector was neither trained nor chosen on (training/demo_detector.json).
FIRST_SEED, SCENES = 900_000_001, 8
IMAGE_SEED = 900_000_000
IMAGE_SIZE_HW = (480, 640)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo did: its stages, the bundle, the check, and the files for a person to look at.

    prompted: the image in which `PROMPT` was searched for, and phrases: what was found of it.
    """

    stages: tuple[Stage, ...]
    bundle: Bundle
    image: Path
    detections: int
    prompted: Path
    phrases: tuple[str, ...]


def run_demo(
    output: Path,
    *,
    load: LoadOptions | None = None,
    progress: StageProgress | None = None,
    targets: Sequence[Any] = (),
) -> DemoReport:
    """Build the embedded detector into `output`, check it against PyTorch on drawn scenes, detect and draw; then ask
    the embedded prompted detector, in `output/phrases`, for things that were never named together in its training.

    load: how both are read. targets: what is built of the embedded detector, as `build` takes it.

    Raises:
        GateError: the exported graph does not detect what PyTorch detects. DetrtError: see `build`.
    """
    say = progress or (lambda stage, fraction, text: None)
    report = build(
        EMBEDDED,
        output,
        export=ExportConfig(),
        load=load,
        progress=progress,
        targets=targets,
    )
    stages = list(report.stages)
    start = time.perf_counter()
    images = [draw_scene(FIRST_SEED + index).image for index in range(SCENES)]
    parity = verify(
        EMBEDDED,
        output / "model.onnx",
        images,
        gate=Gate(),
        load=load,
        progress=lambda done, total: say("verify", done / total, f"{done} of {number_of(total, 'scene')}"),
    )
    require(parity)
    verdict = (
        f"{number_of(parity.compared, 'detection')} on {SCENES} scenes the same as PyTorch, within {parity.worst_box_px:.4f} px"
    )
    verdict += f", IoU of masks from {parity.worst_mask_iou:.4f}"
    stages.append(Stage("verify", time.perf_counter() - start, 0, verdict))

    start = time.perf_counter()
    say("detect", None, "image.png")
    image = draw_scene(IMAGE_SEED, size_hw=IMAGE_SIZE_HW).image
    with Detector.open(output, backend=GRAPH.name, threshold=0.5) as detector:
        found = detector([image])[0]
    with files.writing(output / "image.png") as temporary:
        Image.fromarray(image).save(temporary, format="PNG")
    annotated = output / "annotated.png"
    with files.writing(annotated) as temporary:
        draw_detections(image, found).save(temporary, format="PNG")
    with outputs.jsonl_writer(output / "detections.jsonl") as write:
        write(outputs.Record("image.png", found))
    best = ", ".join(dict.fromkeys(found.labels[i] for i in np.argsort(-found.scores)))
    stages.append(
        Stage("detect", time.perf_counter() - start, annotated.stat().st_size, f"{number_of(len(found), 'object')}: {best}")
    )
    drawn, phrases, more = _prompted(output, load, progress)
    return DemoReport((*stages, *more), report.bundle, annotated, len(found), drawn, phrases)


def _prompted(
    output: Path, load: LoadOptions | None, progress: StageProgress | None
) -> tuple[Path, tuple[str, ...], list[Stage]]:
    """The second half: the annotated image, the phrases that were found, and the stages."""
    report = build(PROMPTED, output / "phrases", load=load, progress=progress)
    stages = [replace(stage, name=f"prompted: {stage.name}") for stage in report.stages if stage.name != "load"]
    start = time.perf_counter()
    image = draw_scene(PROMPT_SEED, size_hw=IMAGE_SIZE_HW).image
    with Detector.open(output / "phrases", backend=GRAPH.name, threshold=0.5, prompt=PROMPT) as detector:
        found = detector([image])[0]
    path = output / "prompted.png"
    with files.writing(path) as temporary:
        draw_detections(image, found).save(temporary, format="PNG")
    phrases = tuple(dict.fromkeys(found.labels[i] for i in np.argsort(-found.scores)))
    verdict = f"{len(phrases)} of the {number_of(PROMPT.count('.'), 'phrase')} asked for: {', '.join(phrases)}"
    stages.append(Stage("prompted: detect", time.perf_counter() - start, path.stat().st_size, verdict))
    return path, phrases, stages
