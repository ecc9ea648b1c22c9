"""Fine-tuning on a COCO-format set of blood cells: two steps, save, load as a user would."""

from __future__ import annotations

import json

import pytest
from smoke_runs import run_smoke

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
    done = run_smoke("train_bccd.py", tmp_path, str(data), *options)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "train_bccd.json").read_text("utf-8"))["steps"] == 2

    from detrt import build
    from detrt.models.load import load_source

    bundle = build(str(tmp_path / "model"), tmp_path / "bundle").bundle
    source = load_source(str(tmp_path / "model"))
    if "--config" in options:
        assert len(source.module.model.decoder.layers) == 1
    assert list(source.spec.labels.values()) == ["RBC", "WBC", "Platelets"] == list(bundle.spec.labels.values())


def test_config_with_an_unknown_name_is_refused(real_data, tmp_path):
    data = real_data / "images" / "bccd"
    options = ("--model", "random:rt_detr_v2/tiny", "--size", "128", "--config", '{"decoder_layer": 1}')
    done = run_smoke("train_bccd.py", tmp_path, str(data), *options)
    assert done.returncode != 0
    assert "has no decoder_layer; it has " in done.stderr
