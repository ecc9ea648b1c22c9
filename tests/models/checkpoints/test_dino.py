"""The published key lists of DINO and Co-DINO: every key has one place, and damage is refused with its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from dino_files import load_dino
from dino_reference import keys as key_lists
from dino_reference.weights import fill

from detrt.errors import SourceError, SpecError
from detrt.models.checkpoints.assumed import Assumed
from detrt.models.checkpoints.key_map import LoadReport, rename
from detrt.models.checkpoints.loader import recognise
from detrt.models.checkpoints.shapes import Shapes
from detrt.models.families.dino import build, layout_of, settings, skipped, table, values

KEYS = Path(__file__).resolve().parents[2] / "data" / "keys"
LAYOUTS = {
    "dino_4scale_r50": "dino",
    "dino_5scale_r50": "dino",
    "dino_4scale_swin_l": "dino",
    "dino_mmdet_4scale_r50": "dino-mmdet",
    "dino_mmdet_5scale_swin_l": "dino-mmdet",
    "co_dino_5scale_r50": "co_dino",
    "co_dino_5scale_9encoder_lsj_r50": "co_dino",
    "co_dino_5scale_lsj_r50_lvis": "co_dino",
    "co_dino_5scale_swin_l": "co_dino",
    "co_dino_5scale_vit_large_coco": "co_dino",
    "co_dino_mmdet_5scale_swin_l": "co_dino",
}
RESNET = {"kind": "resnet", "depths": (1, 1, 1, 1), "width": 8}
SMALL = {"classes": 7, "dim": 32, "ffn": 48, "layers": 2, "queries": 20}


def published(name):
    return json.loads((KEYS / f"{name}.json").read_text("utf-8"))["keys"]


def on_meta(keys):
    return {name: torch.empty(shape, device="meta") for name, shape in keys.items()}


@pytest.fixture(scope="module")
def small():
    return {
        "dino": fill(key_lists.dino(RESNET, (1, 2, 3), 4, **SMALL)),
        "dino-mmdet": fill(key_lists.dino_mmdet(RESNET, (1, 2, 3), 4, **SMALL)),
        "co_dino": fill(key_lists.co_dino(RESNET, fc=16, **SMALL)),
    }


def test_every_list_is_tried():
    lists = {path.stem for pattern in ("dino_*.json", "co_dino_*.json") for path in KEYS.glob(pattern)}
    assert lists == set(LAYOUTS) == set(key_lists.PUBLISHED)


def settings_of(state, name):
    found = settings(Shapes(state, name), Assumed({}, name), LAYOUTS[name].removesuffix("-mmdet"), LoadReport())
    return {key: value for key, value in found.items() if key != "family"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_published_key_has_one_target(name):
    """Without values: targets and shapes of the full-size model."""
    state = on_meta(published(name))
    variant = LAYOUTS[name].removesuffix("-mmdet")
    assert layout_of(set(state)) == LAYOUTS[name] and recognise(state) == variant
    with torch.device("meta"):
        model = build(settings_of(state, name), variant).state_dict()
    wanted = {key: tuple(value.shape) for key, value in model.items() if not key.endswith("num_batches_tracked")}
    shapes, report = Shapes(state, name), LoadReport()
    renamed = rename({**state, **values(shapes)}, table(shapes), skipped(shapes), report)
    assert {key: tuple(value.shape) for key, value in renamed.items()} == wanted
    assert sorted([*report.used, *report.skipped]) == sorted(state)
    assert sorted(target for targets in report.used.values() for target in targets) == sorted(wanted)
    prefixes = ("label_enc", "dn_query", "rpn_head", "roi_head", "bbox_head.0.", "query_head.", "backbone.")
    skip = [key for key, why in report.skipped.items() if "training" in why or "denoising" in why]
    assert skip and all(key.startswith(prefixes) for key in skip)
    assert not any(word in key for key in skip for word in ("branches", "encoder", "decoder", "enc_output"))
    others = ("freqs_cos", "freqs_sin", "relative_position_index", "num_batches_tracked")
    repeated = ("transformer.decoder.class_embed.", "transformer.decoder.bbox_embed.")
    assert all(key.endswith(others) or key.startswith(repeated) for key in set(report.skipped) - set(skip))
    if "co_dino" in name:
        count = 42 if "vit" in name else 32  # the box head of ViT models has four convolutions with norms
        assert sum(key.startswith(("rpn_head", "roi_head", "bbox_head")) for key in skip) == count


def test_sizes_come_from_shapes():
    facts = {name: settings_of(on_meta(published(name)), name) for name in LAYOUTS}
    swin, lvis = facts["co_dino_5scale_swin_l"], facts["co_dino_5scale_lsj_r50_lvis"]
    wanted = {
        **{"backbone": "swin", "depths": (2, 2, 18, 2), "width": 192, "heads": (6, 12, 24, 48), "window": 12},
        **{"levels": 5, "out_stages": (0, 1, 2, 3), "num_queries": 900, "num_labels": 80, "points": 4},
    }
    assert {key: swin[key] for key in wanted} == wanted
    assert (lvis["num_labels"], lvis["backbone"], lvis["depths"]) == (1203, "resnet", (3, 4, 6, 3))
    assert facts["co_dino_5scale_9encoder_lsj_r50"]["encoder_layers"] == 9
    assert (facts["dino_4scale_r50"]["num_labels"], facts["dino_4scale_r50"]["out_stages"]) == (91, (1, 2, 3))
    assert facts["dino_4scale_r50"]["conv_bias"] and not facts["dino_mmdet_4scale_r50"]["conv_bias"]
    assert facts["co_dino_mmdet_5scale_swin_l"] == swin


@pytest.mark.parametrize("layout", ("dino", "dino-mmdet", "co_dino"))
def test_small_files_load_whole(layout, small):
    model, spec, family, report = load_dino(small[layout], name="small")
    assert sorted([*report.used, *report.skipped]) == sorted(small[layout])
    assert spec.decode.num_classes == 7 and spec.decode.num_queries == 20 and spec.input.mask
    assert family.name == spec.family == ("co_dino" if layout == "co_dino" else "dino")
    assert (spec.decode.nms, spec.decode.nms_iou) == (("soft_nms", 0.8) if layout == "co_dino" else ("none", 0.8))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert "classes 7, queries 20" in report.line()
    assert not any(torch.equal(p, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_files_load_whole(name):
    _model, _spec, _family, report = load_dino(fill(published(name)), name=name)
    assert len(report.used) + len(report.skipped) == len(published(name))


def test_lsj_is_told_by_the_name(small):
    _model, spec, _family, report = load_dino(small["co_dino"], name="co_dino_5scale_LSJ_r50")
    assert (spec.input.resize, spec.input.size_hw) == ("fit", (1024, 1024))
    assert any("padding is part of the image" in note for note in report.notes)
    _model, spec, _family, report = load_dino(small["co_dino"], name="co_dino_5scale_r50")
    assert (spec.input.resize, spec.input.shortest_edge, spec.input.longest_edge) == (
        "shortest_edge",
        800,
        1333,
    )
    assert any("must have 'lsj'" in note for note in report.notes)


@pytest.mark.parametrize("layout", ("dino", "dino-mmdet", "co_dino"))
def test_half_the_keys_is_an_error_with_counts(layout, small):
    state = dict(small[layout])
    used = load_dino(state)[3].used
    half = {key: value for i, (key, value) in enumerate(state.items()) if key not in used or i % 2}
    with pytest.raises(SourceError, match=r"has no '|missing|lacks keys"):
        load_dino(half, variant=layout.removesuffix("-mmdet"))
    drop = [k for k in used if "decoder.layers.1" in k and "norm" in k][:3]
    with pytest.raises(SourceError, match=r"3 missing \(e\.g\. decoder\.layers\.1") as caught:
        load_dino({k: v for k, v in state.items() if k not in drop})
    assert "of classes 7, queries 20" in str(caught.value)


def test_unexpected_and_misshapen_keys_are_named(small):
    state = dict(small["dino"])
    state["transformer.reference_points.weight"] = torch.zeros(2, 32)
    with pytest.raises(SourceError, match=r"1 unexpected \(e\.g\. transformer\.reference_points\.weight\)"):
        load_dino(state)
    state = dict(small["dino"])
    state["transformer.enc_output.weight"] = torch.zeros(32, 16)
    with pytest.raises(SourceError, match=r"1 misshapen \(e\.g\. .*\[32, 16\] instead of \[32, 32\]"):
        load_dino(state)


def test_an_alias_with_other_values_is_damage(small):
    state = dict(small["dino"])
    state["transformer.decoder.class_embed.0.bias"] = state["class_embed.0.bias"] + 1
    with pytest.raises(SourceError, match=r"class_embed\.0\.bias' differs"):
        load_dino(state)


@pytest.mark.parametrize(
    ("key", "words"),
    (
        ("query_head.transformer.pos_trans.weight", "Co-Deformable-DETR"),
        ("backbone.blocks.0.attn.qkv.weight", "ViT backbone of another kind"),
        ("backbone.net.blocks.0.norm1.weight", "ViT backbone of another kind"),
        ("mask_head.0.convs.0.weight", "instance segmentation"),
        ("backbone.0.downsample_layers.0.0.weight", "ConvNeXt"),
        ("neck.convs.0.conv.weight_fake_quant.scale", "quantised"),
    ),
)
def test_relatives_are_refused_by_name(key, words, small):
    with pytest.raises(SourceError, match=words):
        load_dino({**small["co_dino"], key: torch.zeros(1)})


VIT = {
    "kind": "vit", "width": 32, "depth": 2, "head": 16, "hidden": 43, "positions": 26, "window": 3, "windowed": (0,),
    "whole": 0,
}  # fmt: skip


def test_vit_sizes_and_tables():
    """Windows are told by the tables of rotary positions, and so is a model for one canvas."""
    state = fill(key_lists.co_dino(VIT, fc=16, **SMALL))
    model, spec, _family, report = load_dino(state, name="pytorch_model")
    assert [block.window for block in model.backbone.blocks] == [3, 0] and not model.attend_padding
    assert (spec.input.shortest_edge, spec.input.longest_edge, spec.input.multiple_of) == (1280, 2048, 32)
    assert spec.decode.max_detections == 20 * 7 and sum("freqs" in key for key in report.skipped) == 4
    key = "backbone.blocks.0.attn.rope.freqs_sin"
    with pytest.raises(SourceError, match="is no table of the rotary positions"):
        load_dino({**state, key: state[key] + 1})
    with pytest.raises(SourceError, match="does not fit together"):
        load_dino({**state, "backbone.pos_embed": torch.zeros(1, 24, 32)})
    canvas = fill(key_lists.co_dino({**VIT, "whole": 6}, fc=16, **SMALL))
    model, spec, _family, _report = load_dino(canvas, name="pytorch_model")
    assert [block.window for block in model.backbone.blocks] == [3, 0] and model.attend_padding
    assert (spec.input.resize, spec.input.size_hw) == ("fit", (1536, 1536))


def test_sizes_that_contradict_are_refused(small):
    state = dict(small["co_dino"])
    state["query_head.transformer.level_embeds"] = torch.zeros(3, 32)
    with pytest.raises(SourceError, match="8 heads times 3 levels do not divide; state the heads"):
        load_dino(state)
    state = {k: v for k, v in small["co_dino"].items() if not k.startswith("backbone.")}
    with pytest.raises(SourceError, match="backbone is missing or of another kind"):
        load_dino(state)


def test_other_models_are_not_recognised():
    assert layout_of({"transformer.encoder.layers.0.self_attn.in_proj_weight", "class_embed.weight"}) is None
    assert recognise([]) is None and layout_of(set()) is None


def test_labels_must_fit(small, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefg"), "utf-8")
    assert load_dino(small["dino"], labels=names)[1].label(2) == "c"
    names.write_text("a\nb", "utf-8")
    with pytest.raises(SpecError, match="2 names"):
        load_dino(small["dino"], labels=names)
