"""The training scripts end to end: two steps, save, load as a user would, score, resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from smoke_runs import run_smoke

SCRIPT = "train_demo_detector.py"

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _needs() -> None:
    for package in ("torch", "transformers", "scipy", "pycocotools"):
        pytest.importorskip(package)


def test_smoke_run_leaves_a_loadable_model_and_a_record(tmp_path: Path) -> None:
    done = run_smoke(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "demo_detector.json").read_text(encoding="utf-8"))
    assert record["steps"] == 2
    assert [point["step"] for point in record["loss_curve"]] == [1, 2]
    assert all(point["total"] > 0 for point in record["loss_curve"])
    assert record["seed"] == 0 and record["versions"]["torch"]
    assert 1e6 < record["parameters"] < 2.5e6
    assert 0 <= record["final_validation_ap"]["ap"] <= 1
    model = tmp_path / "model"
    assert {path.name for path in model.iterdir()} == {
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }
    assert (model / "model.safetensors").stat().st_size <= 5_000_000
    last = json.loads(done.stdout.strip().splitlines()[-1])
    assert last["dtype"] == "torch.float32"


def test_the_mask_head_is_trained_on_a_detector_that_stays_as_it_is(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from detrt.models.load import EMBEDDED, load_source

    done = run_smoke("train_demo_masks.py", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "demo_masks.json").read_text(encoding="utf-8"))
    assert record["steps"] == 2 and record["validation"]["ap"] > 0.5 and 0 <= record["validation"]["masks"]["ap"] <= 1
    before, after = (load_file(folder / "model.safetensors") for folder in (EMBEDDED["embedded:shapes"], tmp_path / "model"))
    changed = {name for name in after if not after[name].equal(before[name])}
    assert after.keys() == before.keys() and changed and all(name.startswith("mask_") for name in changed)
    assert load_source(str(tmp_path / "model")).spec.has_masks


def test_a_finished_run_resumes_from_its_checkpoint_and_refuses_another_seed(tmp_path: Path) -> None:
    assert run_smoke(SCRIPT, tmp_path).returncode == 0
    again = run_smoke(SCRIPT, tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "resumed at step 2" in again.stdout
    other = run_smoke(SCRIPT, tmp_path, "--seed", "1")
    assert other.returncode != 0
    assert "give the same arguments or another --checkpoint" in other.stderr
