"""EoMT against transformers' own class, image processor and post-processing for instances."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("detrt.models.layers.eomt", reason="needs a transformers that has EoMT with DINOv3")

from checkpoint_folders import save_folder

from detrt.backends.torch.session import TorchSession
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.errors import SourceError
from detrt.models.layers import query_masks
from detrt.models.load import load_source
from detrt.tasks.masks import encode_masks

SIDE, STRIDE = 640, 4
SIZE = {"shortest_edge": SIDE, "longest_edge": SIDE}
STOCK = {"eomt": "EomtForUniversalSegmentation", "eomt_dinov3": "EomtDinov3ForUniversalSegmentation"}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """name -> a tiny model as transformers' class and processor save it."""

    def save(name, **settings):
        source = tiny(name)
        path = save_folder(source, tmp_path_factory.mktemp(name), {"do_pad": True, **settings})
        stock = getattr(transformers, STOCK[name])(source.module.config).eval()
        stock.load_state_dict(source.module.state_dict())
        stock.save_pretrained(path)
        return path

    return save


@pytest.mark.parametrize("name", STOCK)
def test_maps_are_those_of_transformers_from_the_image_on(name, folder):
    path = folder(name)
    processor = transformers.AutoImageProcessor.from_pretrained(path, backend="pil")
    stock = getattr(transformers, STOCK[name]).from_pretrained(path, attn_implementation="eager").eval()
    source = load_source(str(path))
    assert (source.family.name, source.spec.has_masks, source.spec.decode.mask_stride) == (name, True, STRIDE)
    for index, size in enumerate(((90, 120), (150, 70), (64, 64))):
        image = draw_scene(index, size_hw=size).image
        with torch.no_grad():
            want = stock(torch.as_tensor(np.stack(processor(images=image)["pixel_values"])))
        got = TorchSession(source).run(preprocess([image], source.spec).feeds)
        np.testing.assert_allclose(got["mask_logits"], want.masks_queries_logits.numpy(), rtol=1e-4, atol=1e-4)
        best = want.class_queries_logits[..., :-1].argmax(-1).numpy()
        inside = torch.from_numpy(preprocess([image], source.spec).feeds["pixel_mask"][0, :: STRIDE // 2, :: STRIDE // 2] == 1)
        large = torch.nn.functional.interpolate(want.masks_queries_logits, scale_factor=2.0, mode="bilinear")
        seen = (large[0][:, inside] > 0).any(1).numpy()
        assert seen.any() and np.array_equal(got["logits"][0].argmax(-1)[seen], best[0][seen])


def blobs(count, covered_hw, seed):
    """(1, count, 160, 160) logits of ellipses whose centres lie in the covered part; the last is empty, the one before in the padding."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(SIDE // STRIDE) + 0.5
    draw = torch.rand(count, 5, generator=generator)
    y, x = draw[:, 0] * covered_hw[0], draw[:, 1] * covered_hw[1]
    radius, stretch, slope = 5 + 30 * draw[:, 2], 0.6 + 0.8 * draw[:, 3], 0.5 + 2 * draw[:, 4]
    distance = torch.hypot(
        (axis[None, :, None] - y[:, None, None]) * stretch[:, None, None], (axis - x[:, None, None]) / stretch[:, None, None]
    )
    maps = (slope[:, None, None] * (radius[:, None, None] - distance)).clamp(-8, 8)
    maps[-1] = -1.0
    maps[-2] = torch.where((axis[:, None] > covered_hw[0] + 1) | (axis > covered_hw[1] + 1), 2.0, -2.0)
    return maps[None]


@pytest.mark.parametrize("size_hw", [(480, 640), (612, 405), (1080, 1920), (200, 200)])
def test_masks_scores_and_boxes_are_those_of_the_image_processor(size_hw):
    from transformers.image_transforms import get_size_with_aspect_ratio
    from transformers.models.eomt.image_processing_pil_eomt import EomtImageProcessorPil

    resized = get_size_with_aspect_ratio(size_hw, SIDE, SIDE)
    covered_hw = tuple(side / STRIDE for side in resized)
    maps = blobs(30, covered_hw, seed=sum(size_hw))
    classes = 4 * torch.randn(1, 30, 6, generator=torch.Generator().manual_seed(1))
    image = torch.zeros(1, 1, SIDE, SIDE)
    image[:, :, : resized[0], : resized[1]] = 1
    covered = torch.nn.functional.avg_pool2d(image, STRIDE)
    scores = query_masks.instance_logits(classes, maps, covered).sigmoid()[0]
    boxes = query_masks.boxes_of(maps, covered)[0]
    masks = encode_masks(maps[0].numpy(), size_hw, covered_hw).to_array()

    processor = EomtImageProcessorPil(size=SIZE, do_pad=True)
    outputs = SimpleNamespace(masks_queries_logits=maps, class_queries_logits=classes)
    compared = 0
    for query in range(30):  # one at a time, as their map gives a pixel to one instance
        one = SimpleNamespace(
            masks_queries_logits=maps[:, query : query + 1],
            class_queries_logits=outputs.class_queries_logits[:, query : query + 1],
        )
        (found,) = processor.post_process_instance_segmentation(one, [size_hw], threshold=0.0, size=SIZE)
        score, label = float(scores[query].max()), int(scores[query].argmax())
        if not found["segments_info"]:
            assert score < 1e-3 and not masks[query].any()
            continue
        (segment,) = found["segments_info"]
        theirs = (found["segmentation"] == 0).numpy()
        assert label == segment["label_id"] and abs(score - segment["score"]) <= 0.02
        assert (theirs & masks[query]).sum() / (theirs | masks[query]).sum() >= 0.99
        rows, columns = np.nonzero(theirs)
        want = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
        centre, half = boxes[query, :2].numpy(), boxes[query, 2:].numpy() / 2
        got = np.concatenate([centre - half, centre + half]) * np.array([*size_hw[::-1], *size_hw[::-1]])
        # Theirs end at pixels, and small images have several pixels of the input for one.
        assert np.abs(got - want).max() <= 1 + max(1.0, size_hw[0] / resized[0])
        compared += 1
    assert compared >= 27


def test_what_is_not_for_instances_or_not_trained_to_the_end_is_refused(folder, tmp_path):
    path = folder("eomt")
    config = transformers.EomtConfig.from_pretrained(path)
    config.id2label = {**config.id2label, 0: "sky"}
    config.save_pretrained(path)
    with pytest.raises(SourceError, match="has the class 'sky', which has no instances"):
        load_source(str(path))
    with pytest.raises(SourceError, match="do_split_image true: images are split for semantic segmentation"):
        load_source(str(folder("eomt", do_split_image=True)))
    path = folder("eomt")
    stock = transformers.EomtForUniversalSegmentation.from_pretrained(path)
    stock.attn_mask_probs.fill_(0.5)
    stock.save_pretrained(path)
    with pytest.raises(SourceError, match="masked at random .*train it to the end"):
        load_source(str(path))
