"""Facts that no tensor of a file tells: read from its settings, stated by the caller, or assumed as published and said.

The right outputs are those of transformers' class (or of the published one) with that fact in its configuration.
"""

from __future__ import annotations

from copy import deepcopy

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import authors_files
import torch
from authors_files import CASES, HEADS, LW, RF, module_of, write_file
from dino_reference import keys as key_lists
from dino_reference.weights import fill
from key_lists import random_state

from detrt.errors import ArgumentError, SourceError
from detrt.models.checkpoints.assumed import parse_assumed, stated_text
from detrt.models.checkpoints.loader import load
from detrt.models.families import IMAGENET_MEAN, IMAGENET_STD
from detrt.models.load import load_source
from detrt.models.load_options import LoadOptions

FOUR = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
DECODER_OF_FOUR = {**HEADS, "decoder_attention_heads": 4}
# case -> (the file's case, settings of its model, options that read it, settings in the file)
OTHERS = {
    "rt_detr heads": ("rt_detr", {**DECODER_OF_FOUR, "decoder_n_points": 4}, {"assume": "heads=4"}, {}),
    "rt_detr encoder heads": ("rt_detr", {"encoder_attention_heads": 4}, {"assume": "encoder_heads=4"}, {}),
    "rt_detr encoder activation": ("rt_detr", {"encoder_activation_function": "relu"}, {"assume": "encoder_activation=relu"}, {}),
    "rt_detr decoder activation": (
        "rt_detr",
        {"decoder_activation_function": "gelu"},
        {"assume": {"decoder_activation": "gelu"}},
        {},
    ),
    "rt_detr neck activation": ("rt_detr", {"activation_function": "relu"}, {"assume": "neck_activation=relu"}, {}),
    "rt_detr temperature": ("rt_detr", {"positional_encoding_temperature": 20}, {"assume": {"temperature": 20}}, {}),
    "rt_detr queries": ("rt_detr", {"num_queries": 400}, {"queries": 400}, {}),
    "rt_detr_v2 heads": ("rt_detr_v2", DECODER_OF_FOUR, {}, {}),
    "rt_detr_v2 sampling": ("rt_detr_v2", {"decoder_method": "discrete"}, {"assume": "sampling=discrete"}, {}),
    "d_fine heads": ("d_fine", DECODER_OF_FOUR, {}, {}),
    "d_fine sampling": ("d_fine", {"decoder_method": "discrete"}, {"assume": "sampling=discrete"}, {}),
    "deimv2 heads": ("deimv2", {**CASES["deimv2"][2], **DECODER_OF_FOUR}, {}, {}),
    "deimv2 queries": ("deimv2-lite", {**CASES["deimv2-lite"][2], "num_queries": 120}, {"queries": 120}, {}),
    "detr heads": ("detr", FOUR, {"assume": "heads=4"}, {}),
    "detr heads in the file": ("detr", FOUR, {}, {"nheads": 4}),
    "detr activation": ("detr", {"activation_function": "gelu"}, {"assume": "activation=gelu"}, {}),
    "conditional heads": ("conditional_detr", FOUR, {"assume": "heads=4"}, {}),
    "conditional activation": ("conditional_detr", {"activation_function": "gelu"}, {"assume": "activation=gelu"}, {}),
    "dab heads in the file": ("dab_detr", FOUR, {}, {"nheads": 4}),
    "dab temperatures": (
        "dab_detr",
        {"temperature_height": 10000, "temperature_width": 30},
        {"assume": "temperature_height=10000"},
        {"pe_temperatureW": 30},
    ),
    "table heads": ("table-transformer", FOUR, {"assume": "heads=4"}, {}),
    "yolos table": ("yolos", {"image_size": [800, 1120]}, {"assume": "position_table=800+1120"}, {}),
    "yolos table in the file": ("yolos", {"image_size": [640, 480]}, {}, {"init_pe_size": [640, 480]}),
    "yolos heads": ("yolos", {"num_attention_heads": 2}, {"assume": "heads=2"}, {}),
    "lw_detr heads": ("lw_detr", {**LW, "decoder_cross_attention_heads": 2}, {"assume": "cross_heads=2"}, {}),
    "lw_detr heads in the file": ("lw_detr", {**LW, "decoder_self_attention_heads": 4}, {}, {"sa_nheads": 4}),
    "deformable heads": ("deformable-plain", FOUR, {"assume": "heads=4"}, {}),
    "deformable heads in the file": ("deformable-plain", FOUR, {}, {"nheads": 4}),
    "deformable queries": ("deformable-two-stage", {"two_stage_num_proposals": 100}, {"queries": 100}, {}),
    "deformable queries in the file": ("deformable-two-stage", {"two_stage_num_proposals": 100}, {}, {"num_queries": 100}),
    "rf_detr heads": ("rf_detr", {**RF, "decoder_self_attention_heads": 4}, {"assume": "self_heads=4"}, {}),
    "rf_detr heads in the file": ("rf_detr", {**RF, "decoder_self_attention_heads": 4}, {}, {"sa_nheads": 4}),
}


@pytest.fixture
def file_of(tmp_path, monkeypatch):
    def make(case, changes, args):
        model, variant, before, backbone = CASES[case]
        monkeypatch.setitem(authors_files.CASES, case, (model, variant, {**before, **changes}, backbone))
        module = module_of(case)
        path, labels = write_file(case, tmp_path / "file.pth", module)
        if args:
            torch.save({**torch.load(path), "args": args}, path)
        return module, path, labels

    return make


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_not_as_published_is_read(name, file_of):
    case, changes, options, args = OTHERS[name]
    module, path, labels = file_of(case, changes, args)
    source = load_source(f"ckpt:{path}", family=CASES[case][1], labels=labels, **options)
    side = {"rf_detr": source.spec.input.height, "lw_detr": 192}.get(case, 160)
    pixels = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        want, got = (deepcopy(m).double()(pixel_values=pixels) for m in (module, source.module))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.pred_boxes, want.pred_boxes, atol=1e-5, rtol=1e-5)
    assert source.spec.decode.num_queries == got.logits.shape[1]
    if options:
        assert "as stated (published: " in source.notes[0]
        assert set(options) <= set(source.provenance.options)
    if "assume" in options:
        assert source.provenance.options["assume"] == stated_text(options["assume"])


@pytest.mark.parametrize(
    ("case", "args", "edges", "kept"),
    [
        ("conditional_detr", {}, (800, 1333), 100),
        ("dab_detr", {}, (800, 1333), 300),
        ("dab_detr", {"num_select": 100}, (800, 1333), 100),
        ("table-transformer", {}, (800, 1333), 12),
        ("yolos", {}, (800, 1333), 12),
        ("yolos", {"eval_size": 512}, (512, 853), 12),
        ("lw_detr", {"num_select": 7}, (None, None), 7),
    ],
)
def test_images_and_detections_are_those_of_the_authors_evaluation(case, args, edges, kept, file_of):
    _, path, labels = file_of(case, {}, args)
    spec = load_source(f"ckpt:{path}", labels=labels).spec
    assert (spec.input.shortest_edge, spec.input.longest_edge) == edges and spec.decode.max_detections == kept
    if case == "lw_detr":
        assert (spec.input.resize, spec.input.height, spec.input.width) == ("stretch", 640, 640)
    assert spec.input.mean == IMAGENET_MEAN and spec.input.std == IMAGENET_STD


@pytest.mark.parametrize(("classes", "names", "edge"), [(2, "table, table rotated", 800), (6, "table, table column", 1000)])
def test_a_published_table_transformer_has_its_class_names_and_size(classes, names, edge, file_of):
    _, path, _ = file_of("table-transformer", {"num_labels": classes}, {})
    source = load_source(f"ckpt:{path}")
    assert ", ".join(source.spec.labels[i] for i in range(2)) == names and len(source.spec.labels) == classes
    assert (source.spec.input.shortest_edge, source.spec.input.longest_edge) == (edge, edge)


@pytest.mark.parametrize(
    ("case", "args", "words"),
    [
        ("conditional_detr", {"dilation": True}, "dilation yes"),
        ("dab_detr", {"dilation": True}, "dilation yes"),
        ("table-transformer", {"dilation": True}, "dilation yes"),
        ("conditional_detr", {}, "needs `family=conditional_detr-dc5`"),
    ],
)
def test_the_stride_of_the_last_stage_is_read_from_the_settings(case, args, words, file_of):
    _, path, labels = file_of(case, {}, args)
    source = load_source(f"ckpt:{path}", labels=labels)
    assert words in source.notes[0]
    stage = next(m for m in source.module.modules() if type(m).__name__ == "ResNetBackbone").encoder.stages[-1]
    strides = {conv.stride for conv in stage.modules() if isinstance(conv, torch.nn.Conv2d)}
    assert ((2, 2) in strides) == (not args)


@pytest.mark.parametrize(
    ("case", "changes", "args", "words"),
    [
        ("yolos", {"image_size": [64, 96]}, {}, r"position table has 24 cells .* `assume=position_table=800\+1344`"),
        ("yolos", {"image_size": [64, 96]}, {"init_pe_size": [64, 64]}, "position table has 24 cells .*got 64x64"),
        ("yolos-mid", {}, {"init_pe_size": [512, 864], "mid_pe_size": [864, 512]}, "mid_pe_size = "),
        ("lw_detr", {}, {"bbox_reparam": False}, "bbox_reparam = False"),
        ("lw_detr", {}, {"lite_refpoint_refine": False}, "lite_refpoint_refine = False"),
        ("table-transformer", {}, {"pre_norm": False}, "pre_norm = False"),
        ("dab_detr", {}, {"nheads": 3}, "heads must divide its 32 channels; got 3"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(case, changes, args, words, file_of):
    _, path, labels = file_of(case, changes, args)
    with pytest.raises(SourceError, match=words):
        load_source(f"ckpt:{path}", labels=labels)


@pytest.mark.parametrize(("args", "kept"), [({}, 12), ({"num_select": 7}, 7), ({"num_select": 20}, 20)], ids=str)
def test_an_rf_detr_keeps_as_many_detections_as_its_settings_say(args, kept, file_of):
    _, path, labels = file_of("rf_detr", {}, args)
    assert load_source(f"ckpt:{path}", labels=labels).spec.decode.max_detections == kept


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "rt_detr",
            "300 queries (`queries`), the result of the last decoder layer that is read (`decoder_layers`), query_selection=default, ",
        ),
        (
            "rt_detr",
            "encoder_heads=8, encoder_activation=gelu, temperature=10000, neck_activation=silu, decoder_activation=relu, heads=8",
        ),
        ("d_fine", "decoder_activation=relu, sampling=default"),
        ("deimv2", "decoder_activation=silu, sampling=default"),
        ("ecseg", "encoder_activation=silu"),
        ("detr", "heads=8, activation=relu (`assume=NAME=VALUE`)"),
        ("deformable-two-stage", "300 queries (`queries`), heads=8, activation=relu"),
        ("rf_detr", "levels=2+5+8+11, resolution=560, windows=4, self_heads=2, cross_heads=4, detections=12"),
    ],
)
def test_what_is_assumed_is_said_with_its_option(case, words, file_of):
    _, path, labels = file_of(case, {}, {})
    (note,) = load_source(f"ckpt:{path}", family=CASES[case][1], labels=labels).notes
    assert "assumed as published, no tensor tells: " in note and words in note


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        (
            "rt_detr",
            {"assume": "head=4"},
            "`assume=head=4`: .* has no such fact; of this file no tensor tells: query_selection, ",
        ),
        (
            "rt_detr",
            {"assume": "query_selection=one2many"},
            "query_selection must be default; got 'one2many' by `assume=query_selection=one2many`",
        ),
        ("rt_detr", {"assume": "heads=7"}, "7 heads times 3 levels do not divide; state the heads"),
        ("rt_detr", {"assume": "heads=0"}, "heads must be an integer from 1; got '0'"),
        ("rt_detr", {"assume": "encoder_activation=tanh"}, "must be relu or gelu or silu; got 'tanh'"),
        ("rt_detr", {"assume": "encoder_heads=7"}, r"encoder_heads must divide its \d+ channels; got 7"),
        ("rt_detr", {"assume": "heads"}, "must be comma-separated NAME=VALUE"),
        ("rt_detr", {"assume": "heads=4,heads=8"}, "gives 'heads' twice"),
        ("rt_detr", {"queries": 8401}, "`queries` must be from 1 to 8400, the positions of 640x640 pixels; got 8401"),
        ("rt_detr", {"queries": 0}, "`queries` must be at least 1; got 0"),
        ("rf_detr", {"assume": "levels=2,5"}, "must be comma-separated NAME=VALUE"),
        ("rf_detr", {"assume": "levels=2+x"}, r"levels must be integers such as 3\+6\+9"),
        ("detr", {"queries": 50}, "DETR is not made for fewer queries"),
    ],
)
def test_what_is_stated_wrongly_is_refused(case, options, words, file_of):
    _, path, labels = file_of(case, {}, {})
    with pytest.raises(SourceError, match=words):
        load_source(f"ckpt:{path}", family=CASES[case][1], labels=labels, **options)


@pytest.mark.parametrize("value", [4, 1.5, ["heads=4"], b"heads=4", True], ids=str)
def test_what_is_no_statement_is_refused(value):
    with pytest.raises(ArgumentError, match="assume must be a text"):
        LoadOptions(assume=value)


def test_statements_are_for_checkpoint_files():
    with pytest.raises(SourceError, match="`assume=heads=4` is for a checkpoint file of the authors"):
        load_source("random:detr/tiny", assume="heads=4")
    assert parse_assumed(" heads = 4 , activation=gelu") == {"heads": "4", "activation": "gelu"}


@pytest.fixture(scope="module")
def dino():
    sizes = {"classes": 7, "dim": 32, "ffn": 48, "layers": 2, "queries": 20}
    return fill(key_lists.dino({"kind": "resnet", "depths": (1, 1, 1, 1), "width": 8}, (1, 2, 3), 4, **sizes))


def test_the_settings_in_a_dino_are_read(dino):
    args = {
        "pe_temperatureH": 10000,
        "pe_temperatureW": 10000,
        "nheads": 4,
        "num_select": 100,
        "decoder_module_seq": ("sa", "ca", "ffn"),
    }
    module, family, report = load(dino, "dino", args, "x")
    assert (module.config.temperature, module.config.attention_heads, module.config.points) == (10000, 4, 8)
    assert module.decoder.layers[0].self_attn.heads == module.encoder.layers[0].self_attn.heads == 4
    assert family.max_detections == 100 and "assumed" not in report.line()
    module, family, report = load(dino, "dino", {}, "x")
    assert (module.config.temperature, module.config.attention_heads, family.max_detections) == (20, 8, 300)
    assert "heads=8, detections=300, temperature=20 (`assume=NAME=VALUE`)" in report.line()


@pytest.mark.parametrize(
    "args", [{"pe_temperatureW": 40}, {"pe_temperatureH": 40}, {"pe_temperatureH": None, "pe_temperatureW": 40.0}], ids=str
)
def test_one_temperature_holds_for_both_sides(args, dino):
    module, _, report = load(dino, "dino", args, "x")
    assert module.config.temperature == 40 and "temperature" not in report.line()
    stated = load(dino, "dino", args, "x", stated={"temperature": "20"})[0]
    assert stated.config.temperature == 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pe_temperatureW", 40),
        ("transformer_activation", "gelu"),
        ("dilation", True),
        ("pre_norm", True),
        ("two_stage_type", "no"),
        ("decoder_sa_type", "ca_label"),
        ("decoder_module_seq", ["ca", "sa", "ffn"]),
        ("num_patterns", 3),
        ("nms_iou_threshold", 0.7),
        ("embed_init_tgt", False),
    ],
)
def test_settings_that_detrt_does_not_compute_are_refused(name, value, dino):
    args = {"pe_temperatureH": 20, name: value}
    with pytest.raises(SourceError, match=f"was trained with {name} = .*detrt computes DINO with"):
        load(dino, "dino", args, "x")


def test_class_agnostic_selection_is_refused_by_name():
    state = dict(random_state("rtdetr_r18vd_6x_coco"))
    for leaf in ("weight", "bias"):
        state[f"decoder.enc_score_head.{leaf}"] = state[f"decoder.enc_score_head.{leaf}"][:1]
    with pytest.raises(SourceError, match="query_select_method agnostic.*export it to ONNX"):
        load(state, "rt_detr", {}, "x")


def test_of_dilation_and_normalisation_before_attention_a_detr_is_refused():
    with pytest.raises(SourceError, match="was trained with pre_norm = True"):
        load(random_state("detr_r50"), "detr", {"pre_norm": True}, "x")
