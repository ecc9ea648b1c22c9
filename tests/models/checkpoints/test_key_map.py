"""Key lists of published checkpoints: every key has its place, at full size and without a forward pass.

The lists are the `state_dict()` of the authors' own code (`tests/data/keys/make_keys.py`).
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import torch
from key_lists import KEYS, meta_state, random_state

from detrt.errors import SourceError
from detrt.models.checkpoints.assumed import Assumed
from detrt.models.checkpoints.key_map import LoadReport
from detrt.models.checkpoints.loader import load, recognise
from detrt.models.checkpoints.shapes import Shapes
from detrt.models.families import formats, rf_detr

# file -> (family by its keys, queries, classes)
FILES = {
    "detr_r50": ("detr", 100, 91),
    "conditional_detr_r50": ("conditional_detr", 300, 91),
    "dab_detr_r50_dc5_3pat": ("dab_detr", 300, 91),
    "table_transformer_detection": ("table-transformer", 15, 2),
    "eomt_l": ("eomt", 200, 80),
    "yolos_ti": ("yolos", 100, 91),
    "yolos_s": ("yolos", 100, 91),
    "lwdetr_large": ("lw_detr", 300, 91),
    "lwdetr_tiny": ("lw_detr", 100, 91),
    "deformable_single_scale": ("deformable_detr", 300, 91),
    "deformable_plain": ("deformable_detr", 300, 91),
    "deformable_refine": ("deformable_detr", 300, 91),
    "deformable_two_stage": ("deformable_detr", 300, 91),
    "rtdetr_r18vd_6x_coco": ("rt_detr", 300, 80),
    "rtdetr_r50vd_6x_coco": ("rt_detr", 300, 80),
    "rtdetr_r101vd_6x_coco": ("rt_detr", 300, 80),
    "rtdetrv2_r18vd_120e_coco": ("rt_detr_v2", 300, 80),
    "rtdetrv2_r50vd_m_7x_coco": ("rt_detr_v2", 300, 80),
    "rtdetrv2_hgnetv2_l_6x_coco": ("rt_detr_v2", 300, 80),
    "deim_r18vd_120e_coco": ("deim-rt_detr_v2", 300, 80),
    "deim_hgnetv2_s_coco": ("d_fine", 300, 80),
    "dfine_hgnetv2_n_coco": ("d_fine", 300, 80),
    "dfine_hgnetv2_m_coco": ("d_fine", 300, 80),
    "dfine_seg_n": ("d_fine_seg", 300, 80),
    "dfine_seg_s": ("d_fine_seg", 300, 80),
    "rtv4_hgnetv2_s_coco": ("rt_detr_v4", 300, 80),
    "rtv4_hgnetv2_x_coco": ("rt_detr_v4", 300, 80),
    "deimv2_hgnetv2_atto_coco": ("deimv2", 100, 80),
    "deimv2_hgnetv2_femto_coco": ("deimv2", 150, 80),
    "deimv2_hgnetv2_pico_coco": ("deimv2", 200, 80),
    "deimv2_hgnetv2_n_coco": ("deimv2", 300, 80),
    "deimv2_dinov3_s_coco": ("deimv2", 300, 80),
    "deimv2_dinov3_l_coco": ("deimv2", 300, 80),
    "deimv2_dinov3_x_coco": ("deimv2", 300, 80),
    **{f"ecdet_{size}": ("ecdet", 300, 80) for size in "smlx"},
    **{f"ecseg_{size}": ("ecseg", 300, 80) for size in "smlx"},
    "ltdetr_v2_s": ("ltdetr_v2", 300, 80),
    "rf_detr_base": ("rf_detr", 300, 91),
    "rf_detr_nano": ("rf_detr", 300, 91),
    "rf_detr_large": ("rf_detr", 300, 91),
    "rf_detr_xlarge": ("rf_detr", 300, 366),
    "rf_detr_2xlarge": ("rf_detr", 300, 366),
    "rf_detr_seg_nano": ("rf_detr", 100, 91),
    "rf_detr_seg_medium": ("rf_detr", 200, 91),
    "rf_detr_seg_2xlarge": ("rf_detr", 300, 91),
}


LARGE = ("eomt_l", "rf_detr_xlarge", "rf_detr_2xlarge", "rtv4_hgnetv2_x_coco")  # quarter to half a gigabyte each
ALIKE = ("ecdet_s", "ecdet_m", "ecdet_x", "ecseg_m", "ecseg_l", "ecseg_x")  # keys of ECDet L and ECSeg S
SLOW = (*LARGE, *ALIKE)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FILES])
def test_every_key_is_used_once_or_named(name):
    family, queries, classes = FILES[name]
    state = random_state(name)
    assert recognise(state) == family
    recognisers = {one.recognise for _, one in formats().values()}
    assert [found for one in recognisers if (found := one(set(state)))] == [family]  # whatever their order
    module, row, report = load(state, family, {}, name)
    assert row.name == formats()[family][0].name
    assert set(report.used) | set(report.skipped) == set(state)
    assert not set(report.used) & set(report.skipped)
    targets = Counter(target for names in report.used.values() for target in names)
    assert max(targets.values()) == 1
    assert report.inferred["queries"] == queries and report.inferred["classes"] == classes
    # One tensor of each key arrives unchanged, also where transformers gives a parameter two names.
    mine = module.state_dict()
    for key, names in report.used.items():
        parts = torch.cat([mine[target].flatten() for target in names])
        want = state[key] * state.get(f"{key}_mask", 1)
        assert torch.equal(parts, (1 / want if key.endswith("periods") else want).flatten()), key


@pytest.mark.parametrize("name", ["rtdetr_r18vd_6x_coco", "detr_r50"])
def test_counters_of_a_profiler_are_named_as_not_needed(name):
    state = random_state(name)
    counters = [f"{part}{count}" for part in ("", "backbone.", "a.b.0.") for count in ("total_ops", "total_params")]
    variant = recognise(state) or ""
    _, _, plain = load(state, variant, {}, name)
    _, _, report = load({**state, **dict.fromkeys(counters, torch.zeros(1, dtype=torch.float64))}, variant, {}, name)
    assert report.used == plain.used and set(report.skipped) - set(plain.skipped) == set(counters)
    assert "not needed at inference" in report.line() and "total_ops" in report.line()


def test_the_keypoint_table_of_later_rf_detr_files_is_not_needed():
    """rfdetr 1.8 and later registers it as a buffer of every model, empty for detection."""
    state = random_state("rf_detr_base") | {"_kp_active_mask": torch.zeros(0, 0, dtype=torch.bool)}
    _, _, report = load(state, "rf_detr", {}, "rf_detr_base")
    assert list(report.skipped) == ["_kp_active_mask"]


def test_every_list_is_tried():
    others = ("dino_", "co_dino_", "groundingdino_", "mm_grounding_dino_")  # their own tests
    lists = {path.stem for path in KEYS.glob("*.json") if not path.stem.startswith(others)}
    assert lists == set(FILES)


@pytest.mark.parametrize(
    ("name", "windows", "heads", "side"),
    [("base", 4, (8, 16), 560), ("large", 2, (8, 16), 704), ("xlarge", 1, (16, 32), 700), ("2xlarge", 2, (16, 32), 880)],
)
def test_what_no_tensor_of_an_rf_detr_tells_is_the_published_value(name, windows, heads, side):
    assumed = Assumed({}, name)
    with torch.device("meta"):
        found = rf_detr.settings(Shapes(meta_state(f"rf_detr_{name}"), name), assumed, "rf_detr", LoadReport())
    assert (found["backbone_config"]["num_windows"], found["family"]["size"]) == (windows, (side, side))
    assert (found["decoder_self_attention_heads"], found["decoder_cross_attention_heads"]) == heads
    assert f"windows={windows}, self_heads={heads[0]}, cross_heads={heads[1]}" in assumed.notes()[0]


def test_dc5_and_discrete_sampling_are_choices_of_the_caller():
    module, _, report = load(random_state("detr_r50"), "detr-dc5", {}, "x")
    assert report.inferred["dilation"] == "yes"
    last = module.model.backbone.model.encoder.stages[-1].layers
    assert [layer.layer[1].convolution.dilation[0] for layer in last] == [1, 2, 2]
    assert last[0].layer[1].convolution.stride == (1, 1)
    module, _, report = load(random_state("deformable_single_scale"), "deformable_detr-dc5", {}, "x")
    last = module.model.backbone.model.encoder.stages[-1].layers
    assert report.inferred["levels"] == 1 and last[2].layer[1].convolution.dilation == (2, 2)
    _, _, plain = load(random_state("detr_r50"), "detr", {}, "x")
    assert any("`family=detr-dc5`" in note for note in plain.notes)
    _, _, told = load(random_state("detr_r50"), "detr", {"dilation": True}, "x")
    assert told.inferred["dilation"] == "yes"
    module, _, _ = load(random_state("rtdetrv2_r18vd_120e_coco"), "rt_detr_v2-discrete", {}, "x")
    assert module.config.decoder_method == "discrete"


def test_r50_m_is_evaluated_at_its_third_decoder_layer():
    module, _, report = load(random_state("rtdetrv2_r50vd_m_7x_coco"), "rt_detr_v2", {}, "x")
    assert len(module.model.decoder.layers) == 3
    assert "result of decoder layer 3 of 6" in report.line()
    skipped = {k for k, why in report.skipped.items() if "behind the one that is evaluated" in why}
    assert {".".join(key.split(".")[:4]) for key in skipped if "layers" in key and "head" not in key} == {
        f"decoder.decoder.layers.{i}" for i in (3, 4, 5)
    }


def test_rt_detr_v4_is_told_by_its_distillation_and_has_silu():
    state = random_state("rtv4_hgnetv2_s_coco")
    with pytest.raises(SourceError, match="is an RT-DETRv4"):
        load(state, "d_fine", {}, "x")
    module, _, report = load(state, "rt_detr_v4", {}, "x")
    assert isinstance(module.model.decoder.bbox_embed[0].act, torch.nn.SiLU)
    assert module.config.decoder_activation_function == "silu"
    assert report.skipped["encoder.feature_projector.0.weight"] == "for the distillation of a teacher's features"
    # As a file for deployment: then only the caller knows.
    deployed = {key: tensor for key, tensor in state.items() if "feature_projector" not in key}
    assert recognise(deployed) == "d_fine"
    module, _, report = load(deployed, "rt_detr_v4", {}, "x")
    assert isinstance(module.model.decoder.bbox_embed[0].act, torch.nn.SiLU) and "RT-DETRv4" in report.line()


@pytest.mark.parametrize(
    ("name", "words", "change"),
    [
        (
            "rtdetr_r18vd_6x_coco",
            "another backbone than ResNet-vd or HGNetV2",
            lambda key: key.replace("backbone.res_layers", "backbone.model"),
        ),
        ("deimv2_dinov3_s_coco", "a ViT of 11 layers", lambda key: "" if "blocks.11." in key else key),
    ],
)
def test_what_is_out_of_reach_is_refused_by_name(name, words, change):
    state = {change(key): tensor for key, tensor in random_state(name).items() if change(key)}
    with pytest.raises(SourceError, match=words):
        load(state, recognise(state), {}, name)


def test_deim_on_rt_detr_v2_is_no_rt_detr_v2():
    with pytest.raises(SourceError, match=r"third layer.*leave `family` out"):
        load(random_state("deim_r18vd_120e_coco"), "rt_detr_v2", {}, "x")
    with pytest.raises(SourceError, match=r"third layer.*leave `family` out"):
        load(random_state("rtdetrv2_r18vd_120e_coco"), "deim-rt_detr_v2", {}, "x")


def test_of_the_mask_head_of_ecseg_one_block_runs():
    """As in the authors' evaluation, which gives their head the queries of one decoder layer."""
    state = random_state("ecseg_s")
    _, _, report = load(state, "ecseg", {}, "x")
    unused = {key for key, why in report.skipped.items() if why == "a block of the mask head that runs in training only"}
    assert unused == {key for key in state if re.search(r"segmentation_head\.blocks\.[123]\.", key)} and len(unused) == 18


def test_an_ecpose_is_refused():
    state = {**random_state("ecdet_s"), "decoder.keypoint_embedding.weight": torch.zeros(17, 192)}
    with pytest.raises(SourceError, match="an ECPose of EdgeCrafter, for keypoints"):
        load(state, "ecdet", {}, "x")


# Sides of the input in training, whose cells one table holds: squares, both orders, and two with the count of 640x640.
TRAINED = ((320, 320), (640, 640), (512, 768), (768, 512), (320, 1280), (1280, 320), (800, 1344), (32, 64))
OF_THE_SIDES = {
    "rtdetr_r18vd_6x_coco": (8, 16, 32),
    "rtdetrv2_hgnetv2_l_6x_coco": (8, 16, 32),
    "dfine_hgnetv2_n_coco": (16, 32),
    "rtv4_hgnetv2_s_coco": (8, 16, 32),
    "deimv2_hgnetv2_pico_coco": (16, 32),
    "deimv2_dinov3_s_coco": (8, 16, 32),
    "ecdet_s": (8, 16, 32),
}


def anchors(size: tuple[int, int], strides: tuple[int, ...]) -> torch.Tensor:
    """transformers' table, which is that of the authors."""
    from transformers import RTDetrV2Model

    return RTDetrV2Model.generate_anchors(object.__new__(RTDetrV2Model), tuple((size[0] // s, size[1] // s) for s in strides))[0]


def sizes_in_settings(name: str, table: torch.Tensor) -> tuple[int, int]:
    state = {**meta_state(name), "decoder.anchors": table}
    variant = recognise(state)
    for key, tensor in random_state(name).items():
        if key.endswith(("num_points_scale", "decoder.up", "decoder.reg_scale")):
            state[key] = tensor
    return formats()[variant][1].settings(Shapes(state, name), Assumed({}, name), variant, LoadReport())["family"]["size"]


@pytest.mark.parametrize("size", TRAINED, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("name", OF_THE_SIDES)
def test_the_size_of_training_is_read_from_the_table_of_anchors(name, size):
    table = anchors(size, OF_THE_SIDES[name])
    assert sizes_in_settings(name, table) == size
    assert sizes_in_settings(name, table.half()) == size


def test_a_size_of_training_shapes_the_input(tmp_path):
    name = "dfine_hgnetv2_n_coco"
    _, row, report = load({**random_state(name), "decoder.anchors": anchors((512, 768), (16, 32))}, "deim", {}, "x")
    assert row.size == (512, 768) and "size 512x768" in report.line()


@pytest.mark.parametrize("rows", (7, 2101, 8399))
def test_a_table_of_no_size_is_refused(rows):
    with pytest.raises(SourceError, match=rf"decoder\.anchors' has {rows} rows.*eval_spatial_size"):
        sizes_in_settings("ecdet_s", torch.zeros(1, rows, 4))


def test_a_table_with_other_numbers_is_refused():
    with pytest.raises(SourceError, match="another eval_spatial_size, which detrt does not run, or is damaged"):
        sizes_in_settings("ecdet_s", torch.zeros(1, 8400, 4))


@pytest.mark.parametrize("name", ("dfine_hgnetv2_n_coco", "rtdetr_r18vd_6x_coco"))
def test_what_no_tensor_tells_is_said(name):
    state = random_state(name)
    variant = recognise(state)
    table = anchors((640, 640), OF_THE_SIDES[name])
    _, _, told = load({**state, "decoder.anchors": table}, variant, {}, "x")
    _, _, untold = load({key: tensor for key, tensor in state.items() if key != "decoder.anchors"}, variant, {}, "x")
    assert "assumed as published, no tensor tells: 300 queries (`queries`)" in told.line()
    assert "size 640x640 (`size`), 300 queries (`queries`)" in untold.line() and "encoder_activation=gelu" in untold.line()
