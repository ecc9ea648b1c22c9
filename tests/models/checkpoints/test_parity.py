"""`ckpt:` files against the transformers model that their weights came from, for every name map, tiny."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import numpy as np
import torch
from authors_files import CASES, module_of, write_file
from key_lists import random_state
from original_names import to_original

from detrt.data.scenes.scene import draw_scene
from detrt.errors import SourceError
from detrt.evaluation.parity import verify
from detrt.export import ExportConfig, export_onnx
from detrt.models.load import load_source

# What no folder in transformers' format leads to, so no other test exports it.
WITHOUT_FOLDERS = ("rt_detr_v2-hgnet", "deim-rt_detr_v2", "deimv2-plain-vit", "deimv2-dinov3")
# Exported from their files in slow tests: test_families exports the same classes, and here their outputs are compared.
SLOW_EXPORTS = (
    "dab_detr",
    "yolos",
    "deformable-two-stage",
    "rt_detr",
    "d_fine",
    "deim",
    "rf_detr",
    "deimv2-lite",
    *WITHOUT_FOLDERS[:3],
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """case -> (module with the same weights, Source of the file with the authors' names)."""
    folder = tmp_path_factory.mktemp("originals")
    torch.set_num_threads(1)

    @cache
    def make(case):
        module = module_of(case)
        path, labels = write_file(case, folder / f"{case}.pth", module)
        return module, load_source(f"ckpt:{path}", family=CASES[case][1], labels=labels)

    return make


# Its parts are those of RF-DETR and of the other heads of masks.
QUICK = [pytest.param(case, marks=[pytest.mark.slow] * (case == "rf_detr-seg")) for case in CASES]


@pytest.mark.parametrize("case", QUICK)
def test_outputs_equal_the_model_that_the_weights_came_from(case, loaded):
    module, source = loaded(case)
    side = source.spec.input.height if source.family.name in ("rf_detr", "eomt") else 192 if "lw_detr" in case else 160
    generator = torch.Generator().manual_seed(3)
    # In double precision: these random models multiply a rounding of FP32 by a thousand.
    pixels = torch.rand(2, 3, side, side, generator=generator).double()
    with torch.no_grad():
        want, got = (deepcopy(m).double()(pixel_values=pixels) for m in (module, source.module))
    torch.testing.assert_close(got.logits, want.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.pred_boxes, want.pred_boxes, atol=1e-5, rtol=1e-5)
    assert want.logits.std() > 0.01  # not all the same number
    if source.spec.has_masks:
        torch.testing.assert_close(got.pred_masks, want.pred_masks, atol=1e-5, rtol=1e-5)
        assert want.pred_masks.std() > 0.01


@pytest.mark.parametrize(
    "case",
    (
        "detr",
        pytest.param("deimv2-dinov3", marks=pytest.mark.slow),
        *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW_EXPORTS),
    ),
)
def test_a_loaded_file_exports(case, loaded, tmp_path):
    _, source = loaded(case)
    report = export_onnx(source, tmp_path / "model.onnx", ExportConfig())
    assert report.errors and report.worst < 1e-3
    assert report.spec.labels[0] == "thing 0"


def test_ema_is_preferred_and_wrappers_are_opened(loaded, tmp_path):
    module, source = loaded("rt_detr")
    state = to_original("rt_detr", module.state_dict())
    worse = {key: tensor + 1 if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    files = {
        "trainer": ({"model": worse, "ema": {"module": state, "updates": 9}, "epoch": 1}, "EMA weights"),
        "mmengine": (
            {
                "state_dict": worse,
                "ema_state_dict": {"steps": torch.tensor(3), **{f"module.{k}": v for k, v in state.items()}},
            },
            "EMA weights",
        ),
        "parallel": ({"state_dict": {f"module.{k}": v for k, v in state.items()}}, "(weights)"),
        "bare": (state, "(weights)"),
    }
    want = source.module.state_dict()
    for name, (content, words) in files.items():
        path = tmp_path / f"{name}.pt"
        torch.save(content, path)
        got = load_source(f"ckpt:{path}")
        assert words in got.notes[0]
        assert all(torch.equal(tensor, want[key]) for key, tensor in got.module.state_dict().items()), name


def prefixed(prefix, state):
    return {f"{prefix}{key}": tensor for key, tensor in state.items()}


def in_the_middle(state, word):
    """Each part of the model wrapped by itself."""
    return {key.replace(".", f".{word}.", 1): tensor for key, tensor in state.items()}


# Trainer -> what its file holds, of the good and the worse weights; the good ones are wanted.
LIGHTNING = {"pytorch-lightning_version": "2.6.0", "callbacks": {}, "optimizer_states": [{"state": {}}]}
TRAINERS = {
    "lightning": (lambda good, worse: {**LIGHTNING, "state_dict": prefixed("model.", good)}, "(weights)"),
    "lightning compiled": (lambda good, worse: {**LIGHTNING, "state_dict": prefixed("model._orig_mod.", good)}, "(weights)"),
    "lightning and its criterion": (
        lambda good, worse: {"state_dict": {**prefixed("net.", good), "criterion.empty_weight": torch.ones(81)}},
        "1 tensor beside the detector were not read (criterion)",
    ),
    "wrapped twice": (lambda good, worse: prefixed("module._orig_mod.detector.", good), "(weights)"),
    "compiled, then distributed": (lambda good, worse: {"model": prefixed("_orig_mod.module.", good)}, "(weights)"),
    "parts compiled": (lambda good, worse: {"model": in_the_middle(good, "_orig_mod")}, "(weights)"),
    "sharded": (lambda good, worse: {"model": in_the_middle(good, "_fsdp_wrapped_module")}, "(weights)"),
    "average beside": (
        lambda good, worse: {"state_dict": {**prefixed("model.", worse), **prefixed("model_ema.module.", good)}},
        "EMA weights",
    ),
    "average of a callback": (
        lambda good, worse: {
            **LIGHTNING,
            "state_dict": prefixed("model.", worse),
            "callbacks": {"EMACallback": {"ema_state_dict": prefixed("model.", good), "decay": 0.999}},
        },
        "EMA weights",
    ),
    "average of Lightning": (
        lambda good, worse: {"state_dict": prefixed("model.", good), "current_model_state": prefixed("model.", worse)},
        "EMA weights",
    ),
    "average of torch": (
        lambda good, worse: {"model": worse, "averaged_model": {"n_averaged": torch.tensor(9), **prefixed("module.", good)}},
        "EMA weights",
    ),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_model_is_found_under_the_names_of_any_trainer(trainer, loaded, tmp_path):
    module, source = loaded("rt_detr")
    state = to_original("rt_detr", module.state_dict())
    worse = {key: tensor + 1 if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    content, words = TRAINERS[trainer]
    torch.save(content(state, worse), tmp_path / "last.ckpt")
    got = load_source(f"ckpt:{tmp_path / 'last.ckpt'}")
    assert words in got.notes[0]
    want = source.module.state_dict()
    assert all(torch.equal(tensor, want[key]) for key, tensor in got.module.state_dict().items())


def test_two_models_in_one_file_are_refused(loaded, tmp_path):
    state = to_original("rt_detr", loaded("rt_detr")[0].state_dict())
    torch.save({"state_dict": {**prefixed("student.", state), **prefixed("teacher.", state)}}, tmp_path / "two.ckpt")
    with pytest.raises(SourceError, match=r"holds 2 models \('state_dict.student', 'state_dict.teacher'\)"):
        load_source(f"ckpt:{tmp_path / 'two.ckpt'}")


def test_what_is_refused_by_name_is_so_under_a_prefix(loaded, tmp_path):
    state = to_original("detr", loaded("detr")[0].state_dict())
    torch.save({"state_dict": prefixed("model.detr.", {**state, "x.y": torch.ones(2)})}, tmp_path / "panoptic.ckpt")
    with pytest.raises(SourceError, match="for panoptic segmentation"):
        load_source(f"ckpt:{tmp_path / 'panoptic.ckpt'}")


def test_safetensors_and_labels_by_count(loaded, tmp_path):
    from safetensors.torch import save_file

    module, _ = loaded("rt_detr")
    path = tmp_path / "detector.safetensors"
    save_file({k: v.contiguous() for k, v in to_original("rt_detr", module.state_dict()).items()}, path)
    got = load_source(f"ckpt:{path}")
    assert (got.spec.label(0), got.spec.label(79), got.spec.name) == ("person", "toothbrush", "detector")
    assert "class names of COCO" in got.notes[0]
    assert got.provenance.checkpoint_sha256 and got.provenance.source == f"ckpt:{path}"


@pytest.mark.parametrize("case", ["d_fine-seg", "ecseg"])
def test_a_random_model_is_preprocessed_as_the_authors_file(case, tmp_path):
    """Families that transformers does not have: OpenCV's resize of D-FINE-seg does not antialias."""
    path, _ = write_file(case, tmp_path / "file.pth", module_of(case))
    assert load_source(f"random:{case}/tiny").spec.input == load_source(f"ckpt:{path}", family=CASES[case][1]).spec.input


def test_a_model_of_as_many_queries_as_positions_exports_and_is_verified(tmp_path):
    """Both look at sizes of their own, which must have a position for each query: two maps of 320x320 pixels have 500."""
    path = tmp_path / "many.pth"
    torch.save({"model": random_state("deimv2_hgnetv2_atto_coco")}, path)
    source = load_source(f"ckpt:{path}", queries=500)
    assert source.spec.input.size_hw == (320, 320) and source.spec.decode.num_queries == 500
    report = export_onnx(source, tmp_path / "model.onnx", ExportConfig())
    assert report.errors and report.worst < 1e-3
    verified = verify(source, tmp_path / "model.onnx", [draw_scene(1).image])
    assert verified.tensors and verified.worst_tensor <= verified.gate.tensor and not verified.broken
    assert all(np.isfinite(row["error"]) for row in verified.slots)
