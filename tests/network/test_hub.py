"""Published checkpoints from the Hugging Face hub: `pytest -m network` (downloads about 1 GB)."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrt import ExportConfig, export_onnx, load_source, verify
from detrt.data.scenes.scene import draw_scene
from detrt.models.families import BY_NAME, TESTED

pytestmark = pytest.mark.network

# Of the families that every tested version of transformers reads; about 1 GB.
CHECKPOINTS = [f"hf:{family.example}" for family in BY_NAME.values() if family.example and family.since == TESTED[0]]


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the suite forbids the hub; huggingface_hub reads the switch when it is imported."""
    import huggingface_hub.constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize("reference", CHECKPOINTS)
def test_a_published_checkpoint_exports_and_detects_the_same(reference: str, tmp_path: Path) -> None:
    source = load_source(reference)
    report = export_onnx(source, tmp_path / "model.onnx", ExportConfig())
    assert report.errors
    images = [draw_scene(seed, size_hw=(480, 640)).image for seed in (1, 2)]
    assert verify(source, tmp_path / "model.onnx", images).failures == []
