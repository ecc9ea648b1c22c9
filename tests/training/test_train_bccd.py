"""Fine-tuning on a COCO-format set of blood cells: two steps, save, load as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model", "random:d_fine/tiny", "--size", "128"),
        ("--model", "random:deformable_detr/tiny", "--size", "128", "--config", '{"decoder_layers": 1}'),
    ],
    ids=["embedded", "d_fine", "deformable_detr, smaller"],
)
def test_smoke_run_leaves_a_loadable_model(real_data, tmp_path, options):
    pytest.importorskip("scipy")
    data = real_data / "images" / "bccd"
    if not data.is_dir():
        pytest.skip(f"the BCCD images are not on this machine ('{data}')")
    command = [sys.executable, str(ROOT / "training" / "train_bccd.py"), str(data), "--out", str(tmp_path), "--smoke", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "train_bccd.json").read_text("utf-8"))["steps"] == 2

    from detrt.models.load import load_source

    source = load_source(str(tmp_path / "model"))
    if "--config" in options:
        assert len(source.module.model.decoder.layers) == 1
    assert list(source.spec.labels.values()) == ["RBC", "WBC", "Platelets"]


def test_config_with_an_unknown_name_is_refused(real_data, tmp_path):
    data = real_data / "images" / "bccd"
    command = [sys.executable, str(ROOT / "training" / "train_bccd.py"), str(data), "--out", str(tmp_path), "--smoke"]
    command += ["--model", "random:rt_detr_v2/tiny", "--size", "128", "--config", '{"decoder_layer": 1}']
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode != 0
    assert "has no decoder_layer; it has " in done.stderr
