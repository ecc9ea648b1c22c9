"""Published checkpoints from the Hugging Face hub: `pytest -m network` (downloads about 1 GB)."""

from __future__ import annotations

from pathlib import Path

import pytest

from detrt import ExportConfig, export_onnx, load_source, verify
from detrt.data.scenes.scene import draw_scene

pytestmark = pytest.mark.network

CHECKPOINTS = [
    "hf:facebook/detr-resnet-50",
    "hf:microsoft/table-transformer-detection",
    "hf:microsoft/conditional-detr-resnet-50",
    "hf:IDEA-Research/dab-detr-resnet-50",
    "hf:SenseTime/deformable-detr",
    "hf:PekingU/rtdetr_r50vd",
    "hf:PekingU/rtdetr_v2_r18vd",
    "hf:ustc-community/dfine-large-coco",
    "hf:AnnaZhang/lwdetr_small_60e_coco",
    "hf:hustvl/yolos-tiny",
]


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
