"""transformers' Trainer on blood cells for a few steps: the saved folder has the same AP in both worlds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


def test_a_folder_that_trainer_saved(real_data, tmp_path):
    for package in ("accelerate", "scipy", "pycocotools"):
        pytest.importorskip(package)
    data = real_data / "images" / "bccd"
    if not data.is_dir():
        pytest.skip(f"the BCCD images are not on this machine ('{data}')")
    options = ["--out", str(tmp_path), "--steps", "12", "--batch", "4", "--size", "320", "--cpu"]
    command = [sys.executable, str(ROOT / "training" / "finetune_with_trainer.py"), str(data), *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text("utf-8"))
    assert set(result) == {"transformers", "detrt eval", "detrt serve"} and result["transformers"] > 0
    assert max(result.values()) - min(result.values()) <= 0.002
