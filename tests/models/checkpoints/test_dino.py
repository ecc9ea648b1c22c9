"""The published key lists of DINO and Co-DINO: every key has one place, and damage is refused with its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from dino_reference import keys as key_lists
from dino_reference.weights import fill

from detrt.errors import SourceError, SpecError
from detrt.models.arch.dino import Dino
from detrt.models.checkpoints.dino import ALIAS, DERIVED, SPLIT_QKV, TRAINING, infer_config, place, recognise
from detrt.models.checkpoints.dino import load as load_state

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


def load(state, **options):
    """The small models have seven classes, which no label set has."""
    return load_state(state, **{"stored": tuple("abcdefg"), **options})


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


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_published_key_has_one_place(name):
    """Without values: places and shapes of the full-size model."""
    state = on_meta(published(name))
    assert recognise(state) == LAYOUTS[name]
    config = infer_config(state, LAYOUTS[name])
    with torch.device("meta"):
        model = Dino(config).state_dict()
    wanted = {key: tuple(value.shape) for key, value in model.items() if not key.endswith("num_batches_tracked")}
    filled, kinds = {}, {TRAINING: [], DERIVED: [], ALIAS: []}
    for key, value in state.items():
        spot = place(key, LAYOUTS[name], last_head=config.decoder_layers, backbone_levels=len(config.out_stages))
        assert spot is not None, key
        if spot.kind:
            kinds[spot.kind].append(key)
            continue
        targets = [spot.target.format(q) for q in "qkv"] if spot.transform == SPLIT_QKV else [spot.target]
        for target in targets:
            assert target not in filled, (key, filled.get(target))
            rows = value.shape[0] // len(targets)
            assert (rows, *value.shape[1:]) == wanted[target], key
            filled[target] = key
    assert set(filled) == set(wanted)
    prefixes = ("label_enc", "dn_query", "rpn_head", "roi_head", "bbox_head.0.", "query_head.", "backbone.")
    assert all(key.startswith(prefixes) for key in kinds[TRAINING])
    assert not any(word in key for key in kinds[TRAINING] for word in ("branches", "encoder", "decoder", "enc_output"))
    if "co_dino" in name:
        count = 42 if "vit" in name else 32  # the box head of ViT models has four convolutions with norms
        assert sum(key.startswith(("rpn_head", "roi_head", "bbox_head")) for key in kinds[TRAINING]) == count


def test_sizes_come_from_shapes():
    facts = {name: infer_config(on_meta(published(name)), layout) for name, layout in LAYOUTS.items()}
    swin, lvis = facts["co_dino_5scale_swin_l"], facts["co_dino_5scale_lsj_r50_lvis"]
    assert (swin.backbone, swin.depths, swin.width, swin.heads, swin.window) == (
        "swin",
        (2, 2, 18, 2),
        192,
        (6, 12, 24, 48),
        12,
    )
    assert (swin.levels, swin.out_stages, swin.queries, swin.classes, swin.points) == (
        5,
        (0, 1, 2, 3),
        900,
        80,
        4,
    )
    assert (lvis.classes, lvis.backbone, lvis.depths) == (1203, "resnet", (3, 4, 6, 3))
    assert facts["co_dino_5scale_9encoder_lsj_r50"].encoder_layers == 9
    assert (facts["dino_4scale_r50"].classes, facts["dino_4scale_r50"].out_stages) == (91, (1, 2, 3))
    assert facts["dino_4scale_r50"].conv_bias and not facts["dino_mmdet_4scale_r50"].conv_bias
    assert facts["co_dino_mmdet_5scale_swin_l"] == swin
    assert "queries=900" in swin.describe() and "window=12" in swin.describe()


@pytest.mark.parametrize("layout", ("dino", "dino-mmdet", "co_dino"))
def test_small_files_load_whole(layout, small):
    model, spec, family, report = load(small[layout], variant=layout, name="small")
    parts = (report.used, report.training_only, report.derived, report.aliases)
    assert sorted(key for part in parts for key in part) == sorted(small[layout])
    assert spec.decode.num_classes == 7 and spec.decode.num_queries == 20 and spec.input.mask
    assert family.name == spec.family == ("co_dino" if layout == "co_dino" else "dino")
    assert (spec.decode.nms, spec.decode.nms_iou) == (("soft_nms", 0.8) if layout == "co_dino" else ("none", 0.8))
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert any("sizes from tensor shapes: classes=7" in line for line in report.lines())
    assert not any(torch.equal(p, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_files_load_whole(name):
    _model, _spec, _family, report = load(fill(published(name)), variant=LAYOUTS[name], name=name)
    parts = (report.used, report.training_only, report.derived, report.aliases)
    assert sum(map(len, parts)) == len(published(name))


def test_lsj_is_told_by_the_name(small):
    _model, spec, _family, report = load(small["co_dino"], variant="co_dino", name="co_dino_5scale_LSJ_r50")
    assert (spec.input.resize, spec.input.size_hw) == ("fit", (1024, 1024))
    assert any("padding is part of the picture" in note for note in report.notes)
    _model, spec, _family, report = load(small["co_dino"], variant="co_dino", name="co_dino_5scale_r50")
    assert (spec.input.resize, spec.input.shortest_edge, spec.input.longest_edge) == (
        "shortest_edge",
        800,
        1333,
    )
    assert any("must have 'lsj'" in note for note in report.notes)


@pytest.mark.parametrize("layout", ("dino", "dino-mmdet", "co_dino"))
def test_half_the_keys_is_an_error_with_counts(layout, small):
    state = dict(small[layout])
    config = infer_config(state, layout)
    used = load(state, variant=layout)[3].used
    half = {key: value for i, (key, value) in enumerate(state.items()) if key not in used or i % 2}
    with pytest.raises(SourceError, match=r"lacks '|missing|no keys like"):
        load(half, variant=layout)
    drop = [k for k in used if "decoder.layers.1" in k and "norm" in k][:3]
    with pytest.raises(SourceError, match=r"3 missing \(e\.g\. decoder\.layers\.1") as caught:
        load({k: v for k, v in state.items() if k not in drop}, variant=layout)
    assert config.describe() in str(caught.value)


def test_unexpected_and_misshapen_keys_are_named(small):
    state = dict(small["dino"])
    state["transformer.reference_points.weight"] = torch.zeros(2, 32)
    with pytest.raises(SourceError, match=r"1 unexpected \(e\.g\. transformer\.reference_points\.weight\)"):
        load(state, variant="dino")
    state = dict(small["dino"])
    state["transformer.enc_output.weight"] = torch.zeros(32, 16)
    with pytest.raises(SourceError, match=r"1 of another shape \(e\.g\. .*\(32, 16\) instead of \(32, 32\)"):
        load(state, variant="dino")


def test_an_alias_with_other_values_is_damage(small):
    state = dict(small["dino"])
    state["transformer.decoder.class_embed.0.bias"] = state["class_embed.0.bias"] + 1
    with pytest.raises(SourceError, match=r"class_embed\.0\.bias' differs"):
        load(state, variant="dino")


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
        load({**small["co_dino"], key: torch.zeros(1)}, variant="co_dino")


VIT = {
    "kind": "vit", "width": 32, "depth": 2, "head": 16, "hidden": 43, "positions": 26, "window": 3, "windowed": (0,),
    "whole": 0,
}  # fmt: skip


def test_vit_sizes_and_tables():
    """Windows are told by the tables of rotary positions, and so is a model for one canvas."""
    state = fill(key_lists.co_dino(VIT, fc=16, **SMALL))
    model, spec, _family, report = load(state, variant="co_dino", name="pytorch_model")
    assert [block.window for block in model.backbone.blocks] == [3, 0] and not model.attend_padding
    assert (spec.input.shortest_edge, spec.input.longest_edge, spec.input.multiple_of) == (1280, 2048, 32)
    assert spec.decode.max_detections == 20 * 7 and len(report.derived) == 4
    key = "backbone.blocks.0.attn.rope.freqs_sin"
    with pytest.raises(SourceError, match="is no table of the rotary positions"):
        load({**state, key: state[key] + 1}, variant="co_dino")
    with pytest.raises(SourceError, match="does not fit together"):
        load({**state, "backbone.pos_embed": torch.zeros(1, 24, 32)}, variant="co_dino")
    canvas = fill(key_lists.co_dino({**VIT, "whole": 6}, fc=16, **SMALL))
    model, spec, _family, _report = load(canvas, variant="co_dino", name="pytorch_model")
    assert [block.window for block in model.backbone.blocks] == [3, 0] and model.attend_padding
    assert (spec.input.resize, spec.input.size_hw) == ("fit", (1536, 1536))


def test_sizes_that_contradict_are_refused(small):
    state = dict(small["co_dino"])
    state["query_head.transformer.level_embeds"] = torch.zeros(3, 32)
    with pytest.raises(SourceError, match="no multiple of 8 heads times 3 levels"):
        load(state, variant="co_dino")
    state = {k: v for k, v in small["co_dino"].items() if not k.startswith("backbone.")}
    with pytest.raises(SourceError, match="backbone is missing or of another kind"):
        load(state, variant="co_dino")


def test_other_models_are_not_recognised():
    assert recognise(["transformer.encoder.layers.0.self_attn.in_proj_weight", "class_embed.weight"]) is None
    assert recognise([]) is None


def test_labels_must_fit(small, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join("abcdefg"), "utf-8")
    assert load(small["dino"], variant="dino", labels=names)[1].label(2) == "c"
    names.write_text("a\nb", "utf-8")
    with pytest.raises(SpecError, match="2 names"):
        load(small["dino"], variant="dino", labels=names)
