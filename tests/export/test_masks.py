"""RF-DETR-Seg from transformers: exports beside the library's model and its own post-processing of masks; the embedded detector's."""

from __future__ import annotations

import ast
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import save_folder
from PIL import Image
from random_rows import SIZES
from tiny_exports import SHARED

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.data.postprocess import decode
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene, write_dataset
from detrt.detector import Detector
from detrt.errors import ImageError, SessionError, SourceError
from detrt.evaluation.coco import evaluate_coco
from detrt.evaluation.parity import verify
from detrt.models.load import load_source
from detrt.models.published import mask_difference
from detrt.tasks.masks import mask_iou

SIZE = (150, 200)
IMAGE = draw_scene(1, size_hw=SIZE).image


@pytest.fixture(scope="module")
def their_post_processing():
    """`RfDetrImageProcessor.post_process_instance_segmentation` of transformers, whose module needs torchvision for its resize."""
    path = Path(transformers.__file__).parent / "models" / "rf_detr" / "image_processing_rf_detr.py"
    text = path.read_text("utf-8")
    name = "post_process_instance_segmentation"
    (method,) = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name)
    scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "Any": Any}
    exec(textwrap.dedent(ast.get_source_segment(text, method, padded=True)), scope)
    return SimpleNamespace(post_process_instance_segmentation=lambda *args, **kwargs: scope[name](None, *args, **kwargs))


@pytest.fixture(scope="module")
def plain(tiny):
    """(spec, transformers' outputs) for `IMAGE`."""
    source = tiny("rf_detr-seg")
    feeds = preprocess([IMAGE], source.spec.with_input(normalize_in_graph=False, dtype="float32")).feeds
    with torch.no_grad():
        return source.spec, source.module(pixel_values=torch.from_numpy(feeds["pixel_values"]))


def test_masks_are_those_of_transformers(plain, their_post_processing):
    spec, outputs = plain
    arrays = {"logits": outputs.logits, "pred_boxes": outputs.pred_boxes, "mask_logits": outputs.pred_masks}
    (found,) = decode({name: value.numpy() for name, value in arrays.items()}, spec, [SIZE], threshold=0.0)
    assert len(found) == 12 and (found.masks.areas > 0).sum() > 6
    assert mask_difference(found, their_post_processing, outputs) == ""
    outputs.pred_masks.neg_()
    assert "IoU" in mask_difference(found, their_post_processing, outputs)
    outputs.pred_masks.neg_()


@pytest.mark.parametrize(
    "choices", [SHARED["rf_detr-seg"], pytest.param({"decode": "graph"}, marks=pytest.mark.slow)], ids=["raw", "graph"]
)
def test_an_export_finds_the_masks_of_transformers(choices, exported, tiny, plain, their_post_processing):
    report = exported("rf_detr-seg", **choices)
    assert {row["output"] for row in report.errors} >= {"mask_logits"} and report.worst < 1e-3
    assert report.spec.task == "instance-segmentation" and report.spec.decode.mask_stride == 4
    with (
        Detector(OnnxSession(report.path), threshold=0.0) as ours,
        Detector(TorchSession(tiny("rf_detr-seg")), threshold=0.0) as ref,
    ):
        found, want = ours(IMAGE), ref(IMAGE)
    np.testing.assert_allclose(found.boxes_xyxy, want.boxes_xyxy, atol=0.01)
    assert np.diag(mask_iou(found.masks, want.masks)).min() >= 0.99


@pytest.mark.parametrize("name", [name for name in SIZES if "seg" in name])
def test_the_other_published_sizes_have_masks(name):
    assert load_source(f"random:{name}/tiny").spec.has_masks


def test_a_saved_folder_keeps_its_masks(tiny, tmp_path):
    source = tiny("rf_detr-seg")
    again = load_source(str(save_folder(source, tmp_path)))
    assert again.spec.task == source.spec.task and again.spec.decode == source.spec.decode
    pixels = torch.rand(1, 3, 112, 112, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(again.module(pixel_values=pixels).pred_masks, source.module(pixel_values=pixels).pred_masks)


@pytest.mark.parametrize(
    ("model_type", "architecture", "words"),
    [
        ("detr", "DetrForSegmentation", "is a DetrForSegmentation, for panoptic or semantic segmentation"),
        ("oneformer", "OneFormerForUniversalSegmentation", "has model_type 'oneformer', which detrt does not know"),
    ],
)
def test_panoptic_checkpoints_are_refused(model_type, architecture, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "architectures": [architecture]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(SourceError, match=words):
        load_source(str(tmp_path))


def test_models_of_two_tasks_are_not_compared(tiny):
    with pytest.raises(SessionError, match="the reference is a model for detection, the candidate one for instance-segmentation"):
        verify(TorchSession(tiny("rf_detr")), TorchSession(tiny("rf_detr-seg")), [IMAGE])


def test_an_export_passes_the_comparison(exported, tiny):
    report = verify(tiny("rf_detr-seg"), OnnxSession(exported("rf_detr-seg").path), [IMAGE], slots=False)
    assert report.passed and 0.99 <= report.worst_mask_iou <= 1
    assert {row["output"] for row in report.tensors} == {"logits", "pred_boxes", "mask_logits"}


def test_the_embedded_detector_finds_masks(exported, tiny, tmp_path):
    """On scenes that its training did not draw; the results of 500 are in docs/results/average-precision.md."""
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    scenes = write_dataset(tmp_path / "scenes", 6, seed=10_000)
    sides = {"onnx": OnnxSession(exported("embedded:shapes").path), "torch": TorchSession(tiny("embedded:shapes"))}
    found = {
        (name, kind): evaluate_coco(side, scenes / "annotations.json", scenes / "images", iou_type=kind).metrics["AP"]
        for name, side in sides.items()
        for kind in ("bbox", "segm")
    }
    assert found["onnx", "segm"] > 0.75 and found["onnx", "bbox"] > 0.95
    for kind in ("bbox", "segm"):
        assert abs(found["onnx", kind] - found["torch", kind]) < 0.002


@pytest.mark.parametrize(
    ("segmentation", "kind"),
    [([[5, 5, 90, 5, 90, 90]], "mask AP"), ([], "AP"), ([[5, 5, 90, 90]], None)],
    ids=["mask", "box", "bad"],
)
def test_ground_truth_of_a_comparison(exported, tmp_path, segmentation, kind):
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    Image.fromarray(IMAGE).save(tmp_path / "a.png")
    path = exported("rf_detr-seg").path
    truth = {
        "images": [{"id": 1, "file_name": "a.png", "height": SIZE[0], "width": SIZE[1]}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 5, 85, 85], "segmentation": segmentation}],
        "categories": [{"id": 1, "name": load_source("random:rf_detr-seg/tiny").spec.label(0)}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    choices = {"ground_truth": tmp_path / "truth.json", "slots": False, "divergence": "never"}
    if kind is None:
        with pytest.raises(ImageError, match=r"annotations\[0\] has no mask"):
            verify(OnnxSession(path), OnnxSession(path), [tmp_path / "a.png"], **choices)
        return
    report = verify(OnnxSession(path), OnnxSession(path), [tmp_path / "a.png"], **choices)
    assert [check.name for check in report.checks if "AP on" in check.name] == [f"{kind} on 1 annotated image"]
    assert any("not every annotation" in note for note in report.notes) is (kind == "AP")
