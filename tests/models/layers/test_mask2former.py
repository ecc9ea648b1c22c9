"""Mask2Former against transformers' own class, image processor and post-processing for instances."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import save_folder

from detrt.backends.compare import relative_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.torch.session import TorchSession
from detrt.data.postprocess import decode
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import ExportError, SourceError
from detrt.models.layers.query_masks import boxes_of
from detrt.models.load import load_source
from detrt.spec import Precision

# As a published folder has it, and a training script of transformers.
FILE = {
    "size": {"height": 120, "width": 90},
    "size_divisor": 32,
    "ignore_index": 255,
    "num_labels": 7,
    "do_reduce_labels": False,
    "_max_size": 1333,
}


SIZE = (384, 384)  # at which transformers makes its masks


def stock_of(source):
    """transformers' own class with the weights of a Source."""
    stock = transformers.Mask2FormerForUniversalSegmentation(source.module.config).eval()
    stock.load_state_dict(source.module.state_dict())
    return stock


@pytest.fixture
def folder(tiny, tmp_path):
    """A tiny model as transformers' class and processor save it."""
    source = tiny("mask2former")
    save_folder(source, tmp_path, FILE)
    stock_of(source).save_pretrained(tmp_path)
    return tmp_path


def test_maps_and_detections_are_those_of_transformers_from_the_image_on(folder):
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    stock = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    source = load_source(str(folder))
    spec = source.spec
    assert (source.family.name, spec.has_masks, spec.decode.mask_stride, spec.input.size_hw) == (
        "mask2former",
        True,
        4,
        (128, 96),
    )
    compared = 0
    for index, size_hw in enumerate(((90, 120), (150, 70), (64, 64))):
        image = draw_scene(index, size_hw=size_hw).image
        with torch.no_grad():
            want = stock(**processor(images=image, return_tensors="pt"))
        batch = preprocess([image], spec)
        outputs = TorchSession(source).run(batch.feeds)
        np.testing.assert_allclose(outputs["mask_logits"], want.masks_queries_logits.numpy(), rtol=1e-4, atol=1e-4)
        (ours,) = decode(outputs, spec, [SIZE], threshold=0.0)
        masks = ours.masks.to_array()
        (theirs,) = processor.post_process_instance_segmentation(want, 0.0, target_sizes=[SIZE], return_binary_maps=True)
        for mask, segment in zip(theirs["segmentation"].numpy() > 0, theirs["segments_info"], strict=True):
            if mask.sum() < 5000:  # a mean of few of the map's values
                continue
            same = [row for row, label in enumerate(ours.class_ids) if label == segment["label_id"]]
            overlaps = [(masks[row] & mask).sum() / (masks[row] | mask).sum() for row in same]
            row = same[int(np.argmax(overlaps))]
            assert max(overlaps) >= 0.999 and abs(segment["score"] - ours.scores[row]) <= 0.02
            rows, columns = np.nonzero(mask)
            box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert np.abs(ours.boxes_xyxy[row] - box).max() <= 6  # half a value of the map
            compared += 1
    assert compared >= 20


@pytest.mark.parametrize("size_hw", [(128, 128), (96, 160), (192, 64), (72, 100)])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_graph_is_the_class_of_transformers_at_sizes_that_were_not_traced(size_hw, batch, exported, tiny):
    stock = stock_of(tiny("mask2former"))
    report = exported("mask2former")
    scenes = [draw_scene(seed, size_hw=size_hw).image for seed in range(batch)]
    pixels = np.stack(scenes).transpose(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (report.spec.input.mean, report.spec.input.std))
    with torch.no_grad():
        want = stock((torch.as_tensor(pixels).float() / 255 - mean) / std)
    got = OnnxSession(report.path).run({"pixel_values": pixels})
    limit = Precision.FP32.output_tolerance / 10
    assert relative_error(want.masks_queries_logits.numpy(), got["mask_logits"]) <= limit
    # The best class of a query is that of transformers: its mask scales all of them.
    best = want.class_queries_logits[..., :-1].argmax(-1).numpy()
    large = torch.nn.functional.interpolate(
        want.masks_queries_logits, scale_factor=2.0, mode="bilinear"
    )  # where scores are taken
    seen = (large > 0).any(-1).any(-1).numpy()
    assert seen.any() and np.array_equal(got["logits"].argmax(-1)[seen], best[seen])


def test_what_is_not_for_instances_and_what_loses_the_aspect_ratio_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["id2label"]["0"] = "Sky"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="has the class 'sky', which has no instances"):
        load_source(str(folder))
    config["id2label"]["0"] = "person"
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "size": {"shortest_edge": 800, "longest_edge": 1333}}))
    with pytest.raises(SourceError, match="size_divisor 32 .*lose their aspect ratio.*`resize=HEIGHTxWIDTH`"):
        load_source(str(folder))
    assert load_source(str(folder), resize="160x128").spec.input.size_hw == (160, 128)


def test_another_backbone_is_refused(tiny):
    """Its sizes would be those of the trace."""
    from detrt.models.layers.mask2former import REWRITE

    swin = tiny("mask2former").module.model.pixel_level_module.encoder
    config = SimpleNamespace(**{**swin.config.to_dict(), "use_absolute_embeddings": True})
    model = SimpleNamespace(
        model=SimpleNamespace(pixel_level_module=SimpleNamespace(encoder=type("SwinBackbone", (), {"config": config})()))
    )
    with pytest.raises(ExportError, match="a Swin backbone with"):
        REWRITE.patches(None, model)


def test_boxes_of_maps_that_are_larger_than_the_traced_one():
    generator = torch.Generator().manual_seed(0)
    traced = torch.jit.trace(boxes_of, (torch.randn(2, 3, 8, 8, generator=generator), torch.ones(2, 1, 8, 8)))
    masks = torch.full((1, 2, 16, 24), -1.0)
    masks[0, 0, 12:14, 20:23] = 1.0  # beyond the traced map
    masks[0, 1, 2:4, 3:5] = 1.0
    found = traced(masks, torch.ones(1, 1, 16, 24))[0]
    want = torch.tensor([[20 / 24, 12 / 16, 23 / 24, 14 / 16], [3 / 24, 2 / 16, 5 / 24, 4 / 16]])
    corners = torch.cat([found[:, :2] - found[:, 2:] / 2, found[:, :2] + found[:, 2:] / 2], -1)
    torch.testing.assert_close(corners, want)
