"""DINO and Co-DINO against an independent forward pass from the papers, stage by stage, in FP32."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from dino_files import load_dino
from dino_reference import keys as key_lists
from dino_reference.detector import Reference
from dino_reference.weights import fill

from detrt.models.families.dino import layout_of
from detrt.models.layers.dino import CoDino

TOLERANCE = 1e-4
RESNET = {"kind": "resnet", "depths": (1, 2, 1, 1), "width": 8}
SWIN = {"kind": "swin", "depths": (2, 2, 2, 2), "width": 16, "heads": (1, 2, 4, 8), "window": 4}
SMALL = {"classes": 7, "dim": 32, "ffn": 48, "layers": 2, "queries": 20}
VIT = {
    "kind": "vit", "width": 32, "depth": 3, "head": 16, "hidden": 43, "positions": 26, "window": 3, "windowed": (0, 2),
    "whole": 0,
}  # fmt: skip
# name -> (layout, backbone, stages that are used, levels)
CASES = {
    "dino-resnet": ("dino", RESNET, (1, 2, 3), 4),
    "dino-swin": ("dino", SWIN, (1, 2, 3), 4),
    "co_dino-resnet": ("co_dino", RESNET, (0, 1, 2, 3), 5),
    "co_dino-vit": ("co_dino", VIT, (0,), 5),
    "co_dino-swin": ("co_dino", SWIN, (0, 1, 2, 3), 5),
}
# Odd sides: no level, window or patch fits; and one image fills the canvas.
SIZES = ((97, 131), (61, 131), (97, 70))


def state_of(layout, facts, stages, levels):
    make = key_lists.dino if layout == "dino" else key_lists.co_dino
    return fill(make(facts, stages, levels, **SMALL, **({"fc": 16} if layout == "co_dino" else {})), seed=3)


def images(canvas=SIZES[0]):
    """canvas: of the batch; a ViT pads it to a multiple of its patches."""
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(len(SIZES), 3, *canvas, generator=generator)
    mask = torch.zeros(len(SIZES), *canvas, dtype=torch.int64)
    for row, (height, width) in zip(mask, SIZES, strict=True):
        row[:height, :width] = 1
    return pixels * mask[:, None], mask


def close(actual, expected, where):
    assert actual.shape == expected.shape, where
    assert torch.isfinite(actual).all(), where
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert error <= TOLERANCE, f"{where}: {error:.2g}"


@pytest.mark.parametrize("name", CASES)
def test_every_stage_equals_the_reference(name):
    layout, facts, stages, levels = CASES[name]
    state = state_of(layout, facts, stages, levels)
    model, _spec, _family, _report = load_dino(state, name=name)
    reference = Reference(
        state,
        layout,
        levels=levels,
        stages=stages,
        groups=32,
        window=facts.get("window"),
        windowed=facts.get("windowed"),
    )
    pixels, mask = images(*((96, 160),) if "windowed" in facts else ())
    with torch.no_grad():
        backbone, expected = model.backbone(pixels), reference.backbone(pixels)
        assert len(backbone) == len(stages)
        for level, pair in enumerate(zip(backbone, expected, strict=True)):
            close(*pair, f"backbone level {level}")
        maps, expected_maps = model.neck(backbone), reference.neck(expected)
        assert len(maps) == levels
        for level, pair in enumerate(zip(maps, expected_maps, strict=True)):
            close(*pair, f"neck level {level}")
        encoded = model.encode(maps, mask)
        anchors, chosen = model.select(encoded)
        states, references = model.decode(encoded, anchors)
        whole = model(pixel_values=pixels, pixel_mask=mask, return_dict=True)
        for image in range(len(SIZES)):
            e = reference.encode([m[image : image + 1] for m in expected_maps], mask[image].bool())
            inside = ~e["padding"]
            close(encoded.memory[image][inside], e["memory"][inside], f"memory of image {image}")
            assert torch.equal(encoded.usable[image, :, 0], e["usable"])
            classes, boxes = reference.proposals(e)
            # Ties and near-ties may be ordered otherwise; the scores that were chosen are the best ones.
            best = classes.amax(-1)
            close(best[chosen[image]], best.topk(SMALL["queries"]).values, f"scores chosen in image {image}")
            close(anchors[image], boxes[chosen[image]], f"proposals of image {image}")
            logits, final, want_states, want_references = reference.decode(e, boxes[chosen[image]])
            for layer in range(2):
                close(states[layer][image], want_states[layer], f"decoder layer {layer} of image {image}")
                close(
                    references[layer + 1][image],
                    want_references[layer],
                    f"boxes after layer {layer} of image {image}",
                )
            close(whole.logits[image], logits, f"logits of image {image}")
            close(whole.pred_boxes[image], final, f"boxes of image {image}")
        assert whole.logits.std() > 0.1 and whole.pred_boxes.std(1).mean() > 0.01  # it sees something


def test_lsj_attends_to_grey_padding_and_returns_boxes_of_the_image():
    layout, facts, stages, levels = CASES["co_dino-resnet"]
    state = state_of(layout, facts, stages, levels)
    model = load_dino(state, name="co_dino_5scale_lsj_r50_3x_coco")[0]
    plain = load_dino(state, name="co_dino_5scale_r50")[0]
    assert isinstance(model, CoDino) and model.attend_padding and not plain.attend_padding
    pixels, mask = images()
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
    canvas = torch.where(mask[:, None] == 1, pixels, ((114 - mean) / std).expand(3, *SIZES[0]))
    with torch.no_grad():
        got = model(pixel_values=pixels, pixel_mask=mask)
        want = plain(pixel_values=canvas, pixel_mask=torch.ones_like(mask))
    close(got.logits, want.logits, "logits")
    for image, (height, width) in enumerate(SIZES):
        factor = torch.tensor([SIZES[0][1] / width, SIZES[0][0] / height]).repeat(2)
        close(got.pred_boxes[image], want.pred_boxes[image] * factor, f"boxes of image {image}")


def test_no_mask_is_a_full_mask():
    layout, facts, stages, levels = CASES["dino-resnet"]
    model = load_dino(state_of(layout, facts, stages, levels))[0]
    pixels, mask = images()
    with torch.no_grad():
        got, want = model(pixel_values=pixels), model(pixel_values=pixels, pixel_mask=torch.ones_like(mask))
    assert torch.equal(got.logits, want.logits) and torch.equal(got.pred_boxes, want.pred_boxes)


def unfold_order(weight):
    """The Swin authors' patch merging columns in mmdetection's order, column by column."""
    channels = weight.shape[-1] // 4
    out = torch.empty_like(weight)
    for theirs, (row, column) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
        for channel in range(channels):
            out[..., channel * 4 + row * 2 + column] = weight[..., theirs * channels + channel]
    return out


MMDET_SWIN = (
    ("patch_embed.proj.", "patch_embed.projection."),
    (".layers.0.downsample", ".stages.0.downsample"),
    (".layers.1.downsample", ".stages.1.downsample"),
    (".layers.2.downsample", ".stages.2.downsample"),
    *((f"backbone.layers.{i}.blocks", f"backbone.stages.{i}.blocks") for i in range(4)),
    (".attn.", ".attn.w_msa."),
    ("mlp.fc1", "ffn.layers.0.0"),
    ("mlp.fc2", "ffn.layers.1"),
)
MMDET_DINO = (
    ("query_head.transformer.", ""),
    ("level_embeds", "level_embed"),
    ("query_embed.", "query_embedding."),
    ("enc_output_norm", "memory_trans_norm"),
    ("enc_output", "memory_trans_fc"),
    ("ffns.0", "ffn"),
    ("ref_point_head.0", "ref_point_head.layers.0"),
    ("ref_point_head.2", "ref_point_head.layers.1"),
    ("query_head.cls", "bbox_head.cls"),
    ("query_head.reg", "bbox_head.reg"),
)


def renamed(state, pairs):
    found = {}
    for key, value in state.items():
        for old, new in pairs:
            key = key.replace(old, new)
        found[key] = value
    return found


def test_mmdetection_names_hold_the_same_model():
    """One set of weights under three sets of names loads to the same module."""
    layout, facts, stages, levels = CASES["co_dino-swin"]
    state = state_of(layout, facts, stages, levels)
    expected = load_dino(state)[0].state_dict()
    backbone = {k: unfold_order(v) if "downsample" in k and k.startswith("backbone") else v for k, v in state.items()}
    backbone = {
        **{k: v for k, v in backbone.items() if not k.startswith("backbone.")},
        **renamed({k: v for k, v in backbone.items() if k.startswith("backbone.")}, MMDET_SWIN),
    }
    swin = load_dino(backbone)[0].state_dict()
    drop = (
        "rpn_head",
        "roi_head",
        "bbox_head",
        "query_head.label",
        "query_head.down",
        "query_head.transformer.aux",
    )
    dino = renamed({k: v for k, v in backbone.items() if not k.startswith(drop)}, MMDET_DINO)
    for i in range(2):
        dino = renamed(dino, ((f"encoder.layers.{i}.attentions.0", f"encoder.layers.{i}.self_attn"),))
        dino = renamed(dino, ((f"decoder.layers.{i}.attentions.0", f"decoder.layers.{i}.self_attn"),))
        dino = renamed(dino, ((f"decoder.layers.{i}.attentions.1", f"decoder.layers.{i}.cross_attn"),))
    dino["dn_query_generator.label_embedding.weight"] = torch.zeros(7, 32)
    assert layout_of(set(dino)) == "dino-mmdet"
    mmdet, _spec, _family, report = load_dino(dino)
    assert [key for key in report.skipped if "relative_position_index" not in key] == [
        "dn_query_generator.label_embedding.weight"
    ]
    assert mmdet.config.head_eps == 1e-5
    for other in (swin, mmdet.state_dict()):
        assert other.keys() == expected.keys()
        assert all(torch.equal(other[k], expected[k]) for k in expected)
