"""LoRA adapters in a checkpoint folder: merged as PEFT merges them, or refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from detrt.errors import SourceError
from detrt.models.load import load_source

State = dict[str, torch.Tensor]
LINEAR, CONV = "model.decoder.layers.0.self_attn.q_proj", "model.input_projection"
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], State]:
    """The text files of a small DETR's folder, and its weights."""
    folder = tmp_path_factory.mktemp("base")
    load_source("random:detr/tiny").module.save_pretrained(folder)
    return {path.name: path.read_text() for path in folder.glob("*.json")}, load_file(folder / "model.safetensors")


def _write(
    folder: Path,
    base: tuple[dict[str, str], State],
    adapter: State | None,
    settings: dict[str, Any] | None,
    own: State | None = None,
) -> str:
    texts, state = base
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 96, "longest_edge": 128}})
    )
    save_file(own or state, folder / "model.safetensors", {"format": "pt"})
    if adapter is not None:
        save_file(adapter, folder / "adapter_model.safetensors")
    if settings is not None:
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def _pair(state: State, layer: str, rank: int) -> State:
    weight = state[f"{layer}.weight"]
    torch.manual_seed(rank)
    a = torch.randn(rank, *weight.shape[1:])
    b = torch.randn(weight.shape[0], rank, *((1, 1) if weight.ndim == 4 else ()))
    return {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}


@pytest.mark.parametrize(
    ("layer", "rank", "settings", "scale"),
    [
        (LINEAR, 2, {}, 3.0),
        (CONV, 2, {}, 3.0),
        (LINEAR, 2, {"use_rslora": True}, 6 / math.sqrt(2)),
        (LINEAR, 4, {"rank_pattern": {"q_proj": 4}}, 6 / 4),
        (LINEAR, 4, {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"k_proj": 1, "self_attn.q_proj": 12}}, 12 / 4),
        (LINEAR, 3, {"use_rslora": True, "alpha_pattern": {r".*layers\.0\..*q_proj": 9}}, 9 / math.sqrt(3)),
        (LINEAR, 2, {"fan_in_fan_out": True}, 3.0),  # PEFT sets it to false for linear layers, with a warning
    ],
)
def test_the_product_of_an_adapter_is_added(
    tmp_path: Path, base: Any, layer: str, rank: int, settings: dict, scale: float
) -> None:
    pair = _pair(base[1], layer, rank)
    source = load_source(_write(tmp_path, base, pair, {**SETTINGS, **settings}))
    a, b = pair.values()
    change = torch.einsum("or,ri...->oi...", b.flatten(1).double(), a.double())
    weight = base[1][f"{layer}.weight"].double() + scale * change
    assert torch.allclose(source.module.state_dict()[f"{layer}.weight"].double(), weight, rtol=1e-6, atol=1e-6)
    assert source.notes[0].startswith("LoRA of 1 layer merged")
    others = {key: value for key, value in source.module.state_dict().items() if key in base[1] and key != f"{layer}.weight"}
    assert all(torch.equal(value, base[1][key]) for key, value in others.items())


@pytest.mark.parametrize(
    ("patterns", "scale"),
    [
        ({}, 3),
        ({"mlp.fc1": 32}, 16),
        ({r"decoder\.layers\.\d+\.mlp\.fc1": 5}, 2.5),
        ({r"^model.decoder.layers.0.mlp.fc1": 8}, 4),
        ({"layers.0.fc1": 32}, 3),  # the file's name, which is none of the module
    ],
    ids=str,
)
def test_an_adapter_names_layers_as_the_module_and_the_file_as_its_writer(
    tmp_path: Path, base: Any, patterns: dict, scale: float
) -> None:
    """transformers stores `layers.0.fc1` of its module's `layers.0.mlp.fc1`, and PEFT takes the module's name. The sum is that of PEFT."""
    stored, name = "model.decoder.layers.0.fc1", "model.decoder.layers.0.mlp.fc1"
    assert f"{stored}.weight" in base[1]
    pair = {key.replace(stored, name): value for key, value in _pair(base[1], stored, 2).items()}
    source = load_source(_write(tmp_path, base, pair, {**SETTINGS, "alpha_pattern": patterns}))
    a, b = pair.values()
    assert torch.allclose(source.module.state_dict()[f"{name}.weight"], base[1][f"{stored}.weight"] + scale * b @ a, atol=1e-5)


def test_the_base_of_an_adapter_is_told(tmp_path: Path, base: Any) -> None:
    settings = {**SETTINGS, "base_model_name_or_path": "facebook/detr-resnet-101"}
    source = load_source(_write(tmp_path, base, _pair(base[1], LINEAR, 2), settings))
    assert "trained on 'facebook/detr-resnet-101'" in source.notes[0]


def test_whole_modules_of_an_adapter_replace_those_of_the_base(tmp_path: Path, base: Any) -> None:
    head = torch.full_like(base[1]["class_labels_classifier.weight"], 0.5)
    adapter = {**_pair(base[1], LINEAR, 2), "base_model.model.class_labels_classifier.weight": head}
    source = load_source(_write(tmp_path, base, adapter, SETTINGS))
    assert torch.equal(source.module.state_dict()["class_labels_classifier.weight"], head)


@pytest.mark.parametrize("name", ["", ".default"])
def test_an_adapter_inside_the_weights_is_merged(tmp_path: Path, base: Any, name: str) -> None:
    pair = {key.replace(".weight", f"{name}.weight"): value for key, value in _pair(base[1], LINEAR, 2).items()}
    own = {f"base_model.model.{key}": value for key, value in base[1].items()}
    own[f"base_model.model.{LINEAR}.base_layer.weight"] = own.pop(f"base_model.model.{LINEAR}.weight")
    own[f"base_model.model.{LINEAR}.base_layer.bias"] = own.pop(f"base_model.model.{LINEAR}.bias")
    inside = load_source(_write(tmp_path, base, None, SETTINGS, {**own, **pair}))
    a, b = pair.values()
    assert torch.allclose(inside.module.state_dict()[f"{LINEAR}.weight"], base[1][f"{LINEAR}.weight"] + 3 * b @ a, atol=1e-5)


def _with(**settings: Any) -> Callable[[State], tuple]:
    return lambda state: (_pair(state, LINEAR, 2), {**SETTINGS, **settings}, None)


REFUSED: dict[str, tuple[Callable[[State], tuple], str]] = {
    "DoRA": (_with(use_dora=True), "use_dora"),
    "IA3": (_with(peft_type="IA3"), "IA3"),
    "PiSSA": (_with(init_lora_weights="pissa_niter_4"), "pissa_niter_4"),
    "parameters": (_with(target_parameters=["x"]), "target_parameters"),
    "KaSA": (_with(kasa_config={"beta": 1e-4}), "kasa_config"),
    "KaSA, an older file": (
        lambda s: (None, SETTINGS, {**s, **_pair(s, LINEAR, 2), f"base_model.model.{LINEAR}.lora_diag.default": torch.ones(2)}),
        "lora_diag",
    ),
    "MonteCLoRA": (_with(monteclora_config={"num_samples": 8}), "monteclora_config"),
    "Arrow": (_with(arrow_config={"top_k": 3}), "arrow_config"),
    "rank-stabilised by text": (_with(use_rslora="false"), "use_rslora 'false'"),
    "repeated layers": (_with(layer_replication=[[0, 1]]), "layer_replication"),
    "no alpha": (_with(lora_alpha=None), "lora_alpha"),
    "alpha of text": (_with(lora_alpha="16"), "the alpha '16' of 'lora_alpha'"),
    "alpha not finite": (_with(lora_alpha=float("nan")), "the alpha nan"),
    "alphas in a list": (_with(alpha_pattern=[1]), "alpha_pattern"),
    "alpha of a layer": (_with(alpha_pattern={"fc1": "x"}), "the alpha 'x' of 'fc1'"),
    "pattern": (_with(alpha_pattern={"(": 2}), "no expression"),
    "no settings": (lambda s: (None, None, {**s, **_pair(s, LINEAR, 2)}), "adapter_config.json"),
    "settings alone": (lambda s: (None, SETTINGS, None), "adapter_model.safetensors"),
    "B alone": (lambda s: (dict([*_pair(s, LINEAR, 2).items()][1:]), SETTINGS, None), "A and B"),
    "another layer": (
        lambda s: (
            {
                "base_model.model.elsewhere.lora_A.weight": s[f"{LINEAR}.weight"],
                "base_model.model.elsewhere.lora_B.weight": s[f"{LINEAR}.weight"].clone(),
            },
            SETTINGS,
            None,
        ),
        "elsewhere",
    ),
    "magnitudes": (
        lambda s: (
            {**_pair(s, LINEAR, 2), f"base_model.model.{LINEAR}.lora_magnitude_vector.weight": s[f"{LINEAR}.bias"]},
            SETTINGS,
            None,
        ),
        "lora_magnitude_vector",
    ),
    "another head": (
        lambda s: ({"base_model.model.class_labels_classifier.weight": torch.zeros(3, 5)}, SETTINGS, None),
        "class_labels_classifier",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_merged_is_refused_by_name(tmp_path: Path, base: Any, what: str) -> None:
    make, named = REFUSED[what]
    adapter, settings, own = make(base[1])
    with pytest.raises(SourceError, match=named.replace(".", r"\.")):
        load_source(_write(tmp_path, base, adapter, settings, own))


@pytest.mark.parametrize("also", [False, True])
def test_adapters_in_inner_folders_are_told(tmp_path: Path, base: Any, also: bool) -> None:
    pair = _pair(base[1], LINEAR, 2)
    ref = _write(tmp_path, base, pair if also else None, SETTINGS if also else None)
    for name in ("second", "first"):
        (tmp_path / name).mkdir()
        save_file(pair, tmp_path / name / "adapter_model.safetensors")
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(SETTINGS))
    source = load_source(ref)
    assert "adapters in first, second were not read" in " ".join(source.notes)
    same = torch.equal(source.module.state_dict()[f"{LINEAR}.weight"], base[1][f"{LINEAR}.weight"])
    assert same is not also


def test_an_adapter_alone_is_named(tmp_path: Path, base: Any) -> None:
    save_file(_pair(base[1], LINEAR, 2), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**SETTINGS, "base_model_name_or_path": "org/its-base"}))
    with pytest.raises(SourceError, match="adapter alone.*org/its-base"):
        load_source(str(tmp_path))


def test_weights_that_no_module_takes_are_named(tmp_path: Path, base: Any) -> None:
    own = {**base[1], "ema.shadow_head": torch.zeros(2)}
    source = load_source(_write(tmp_path, base, None, None, own))
    assert any("ema.shadow_head" in note for note in source.notes)
