"""`--queries` and `--decoder-layers`: the same as transformers' class of that size with the first of the weights; `--no-masks`."""

from __future__ import annotations

from copy import deepcopy

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from random_rows import FAMILIES, MODELS

from detrt.bundle import Provenance
from detrt.cli import main
from detrt.errors import SourceError, SpecError
from detrt.export import ExportConfig, export_onnx
from detrt.models.families import BY_NAME
from detrt.models.load import EMBEDDED, load_source
from detrt.models.preprocessor import read_input_spec
from detrt.models.random import build
from detrt.models.reduce import reduced
from detrt.models.source import Source, make_spec

NAMES = ["rt_detr", "rt_detr_v2", "d_fine", "deimv2", "rf_detr"]


def source(name, **changes):
    """A tiny model with three decoder layers: transformers builds none with one."""
    family_name, full, tiny = MODELS[name]
    family = BY_NAME[family_name]
    settings = {**deepcopy(full), **deepcopy(tiny), "num_labels": 7, "decoder_layers": 3, **changes}
    module = build(family, settings)
    entry = read_input_spec(None, family, module.config)
    return Source(module, make_spec(family, module, entry), family, Provenance("test", "", 0))


def smaller(module, queries, layers):
    """transformers' class with fewer of both, and of every tensor of the whole one its first rows."""
    config = deepcopy(module.config)
    config.num_queries, config.decoder_layers = queries, layers
    made = type(module)(config).eval()
    own = made.state_dict()
    rows = {
        key: tensor[: own[key].shape[0]] if "query_feat" in key or "reference_point_embed" in key else tensor
        for key, tensor in module.state_dict().items()
        if key in own
    }
    assert made.load_state_dict(rows, strict=False).missing_keys == []
    return made


def test_the_cases_are_the_families_that_allow_it():
    assert [family.name for family in FAMILIES if family.reducible] == NAMES


@pytest.mark.parametrize(("queries", "layers"), [(7, 2), (None, 2), (5, None)])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_transformers_class_of_that_size(name, queries, layers):
    whole = source(name)
    total = whole.spec.decode.num_queries
    want = smaller(whole.module, queries or total, layers or 3)
    side = whole.spec.input.height if name == "rf_detr" else 128
    pixels = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        all_of_it = whole.module(pixel_values=pixels)
        found = reduced(whole, queries, layers)
        expected, got = want(pixel_values=pixels), found.module(pixel_values=pixels)
    # Not to the bit: kernels of a CPU add up in another order where memory is aligned otherwise.
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.pred_boxes, expected.pred_boxes, rtol=1e-5, atol=1e-5)
    assert got.logits.shape == (2, queries or total, 7) and got.logits.shape[1] == found.spec.decode.num_queries
    assert layers is None or not torch.equal(all_of_it.logits[:, : queries or total], got.logits)
    assert found.spec.decode.max_detections <= (queries or total) * 7


@pytest.mark.parametrize("name", [pytest.param("d_fine", marks=pytest.mark.slow), "rf_detr"])
def test_it_exports_and_is_recorded(name, tmp_path):
    found = load_source(f"random:{name}/tiny", queries=6, decoder_layers=1)
    report = export_onnx(found, tmp_path / "small.onnx", ExportConfig())
    assert report.worst < 1e-3 and report.summary.outputs["logits"][1][1] == 6
    assert "6 of " in found.notes[-1] and "1 of 2 decoder layers" in found.notes[-1]
    assert (found.provenance.options["queries"], found.provenance.options["decoder_layers"]) == (6, 1)
    assert found.provenance.parameters < load_source(f"random:{name}/tiny").provenance.parameters


def test_deimv2_keeps_as_many_pairs_as_its_queries_have():
    assert load_source("random:deimv2/tiny").spec.decode.max_detections == 140
    assert load_source("random:deimv2/tiny", queries=4).spec.decode.max_detections == 28


@pytest.mark.parametrize(
    ("ref", "choices", "words"),
    [
        ("random:detr/tiny", {"queries": 5}, r"`queries=5`: DETR is not made for fewer .*RT-DETR.*RF-DETR"),
        ("random:lw_detr/tiny", {"decoder_layers": 1}, r"`decoder_layers=1`: LW-DETR is not made"),
        ("random:grounding_dino/tiny", {"queries": 5}, "`queries=5`: Grounding DINO is not made"),
        ("random:rt_detr/tiny", {"queries": 0}, r"`queries` must be from 1 to 20 for this model; got 0"),
        ("random:rt_detr/tiny", {"queries": 21}, "from 1 to 20 .* got 21"),
        ("random:rf_detr/tiny", {"decoder_layers": 3}, "`decoder_layers` must be from 1 to 2 for this model; got 3"),
        ("random:rf_detr-seg/tiny", {"decoder_layers": 1}, "RF-DETR predicts masks from all .* or `no_masks`"),
        ("random:rt_detr/tiny", {"no_masks": True}, "`no_masks` is for models with masks, and this RT-DETR has boxes alone"),
    ],
)
def test_what_is_refused(ref, choices, words):
    with pytest.raises(SourceError, match=words):
        load_source(ref, **choices)


def test_learned_queries_are_refused():
    with pytest.raises(SourceError, match="this RT-DETR has learned queries"):
        reduced(source("rt_detr", learn_initial_query=True), 5, None)


def test_a_mask_model_with_fewer_queries():
    assert load_source("random:rf_detr-seg/tiny", queries=5).spec.decode.num_queries == 5


@pytest.mark.parametrize("ref", ["random:rf_detr-seg/tiny", "random:d_fine-seg/tiny", "random:ecseg/tiny", "embedded:shapes"])
def test_boxes_without_masks_are_those_with_them(ref):
    whole, same = load_source(ref), load_source(ref, no_masks=True)
    assert whole.spec.has_masks and not same.spec.has_masks and same.spec.decode.mask_stride == 0
    assert type(same.module).__name__.endswith("ForObjectDetection")
    assert same.provenance.options["no_masks"] is True and same.provenance.parameters < whole.provenance.parameters
    pixels = torch.rand(1, 3, *whole.spec.input.size_hw, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = whole.module(pixel_values=pixels), same.module(pixel_values=pixels)
    assert "pred_masks" in want and "pred_masks" not in got
    assert torch.equal(want.logits, got.logits) and torch.equal(want.pred_boxes, got.pred_boxes)


def test_the_embedded_detector_is_transformers_own_class():
    """Its folder opens in transformers as a detector, whose boxes are those of the model with the mask head."""
    import transformers

    folder = EMBEDDED["embedded:shapes"]
    stock = transformers.RTDetrV2ForObjectDetection.from_pretrained(folder, attn_implementation="eager").eval()
    pixels = torch.rand(1, 3, 320, 320, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = stock(pixel_values=pixels), load_source("embedded:shapes").module(pixel_values=pixels)
    assert torch.equal(want.logits, got.logits) and torch.equal(want.pred_boxes, got.pred_boxes)
    assert got.pred_masks.shape == (1, 100, 80, 80)


@pytest.mark.slow
def test_a_bundle_says_that_it_is_exported_already(tmp_path, capsys):
    from detrt import open_session

    assert main(["export", "random:rt_detr/tiny", "-o", str(tmp_path / "m.onnx"), "--queries", "9", "--no-check"]) == 0
    with pytest.raises(SpecError, match="`queries=5` says how a checkpoint is read"):
        open_session(tmp_path / "m.onnx", queries=5)
    capsys.readouterr()
    assert main(["export", "random:rt_detr/tiny", "-o", str(tmp_path / "n.onnx"), "--queries", "99"]) == 2
    assert "from 1 to 20" in capsys.readouterr().err and not (tmp_path / "n.onnx").exists()
    with open_session(tmp_path / "m.onnx") as session:
        assert session.spec.decode.num_queries == 9
