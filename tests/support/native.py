"""Where the C++ runtime is built, how its programs are run, and the tensors of the small model that tests it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("DETRT_CPP_BUILD", ROOT / "build/cpp/test"))
SIDES, QUERIES, CLASSES, LARGEST = (32, 40), 12, 3, 8


def run(*command, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240, **options)


def tensors(*, masks: bool = False) -> tuple[tuple[dict, ...], tuple[dict, ...]]:
    inputs = ({"name": "pixel_values", "dtype": "uint8", "shape": ["batch", 3, *SIDES]},)
    outputs = (
        {"name": "logits", "dtype": "float32", "shape": ["batch", QUERIES, CLASSES]},
        {"name": "pred_boxes", "dtype": "float32", "shape": ["batch", QUERIES, 4]},
    )
    maps = {"name": "mask_logits", "dtype": "float32", "shape": ["batch", QUERIES, SIDES[0] // 4, SIDES[1] // 4]}
    return inputs, (*outputs, maps) if masks else outputs
