"""The demo: a checkpoint to a checked engine and drawn boxes, in one call, without a download."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from . import files, outputs
from .bundle import Bundle
from .compare import Gate
from .detector import Detector
from .draw import draw_detections
from .engine import EngineConfig
from .export.config import ExportConfig
from .parity import VerifyReport, require, verify
from .pipeline import Stage, build
from .scenes import draw_scene

EMBEDDED = "embedded:shapes"
# Scenes that the embedded detector was neither trained nor chosen on (training/demo_detector.json).
FIRST_SEED = 900_000_001
PICTURE_SEED = 900_000_000
PICTURE_SIZE_HW = (480, 640)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What the demo did: its stages, the bundle, the check, and the files for a person to look at."""

    stages: tuple[Stage, ...]
    bundle: Bundle
    parity: VerifyReport
    picture: Path
    detections: int


def run_demo(
    output: Path,
    *,
    sms: tuple[int, ...] = (),
    scenes: int = 8,
    progress: Callable[[str, float | None, str], None] | None = None,
) -> DemoReport:
    """Build the embedded detector into `output`, check it against PyTorch on drawn scenes, detect and draw.

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
    return DemoReport(tuple(stages), report.bundle, parity, annotated, len(found))
