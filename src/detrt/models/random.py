"""Random-weight models of every family: `random:<family>` at full size, `random:<family>/tiny` for tests.

The full-size configurations are the published ones (ResNet-50 for the DETRs of 2020 to 2022, the
"L" or "base" model where a family has several). Weights are seeded; parameters that training starts at
zero are perturbed, because zero offsets and zero box heads would hide every error behind them; and
weights keep the variance of what goes through them, because the library's own start (a standard deviation
of 0.01 or 0.02) makes the picture vanish on its way through a narrow network: the output is then the same
for every picture, and a comparison of outputs proves nothing.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bundle import Provenance
from ..errors import SourceError
from .families import BY_NAME, Family
from .hub import make_spec, versions
from .load import Source
from .preprocessor import read_input_spec
from .random_weights import SEED, keep_variance, spread_variances

_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _resnet(name: str) -> dict[str, Any]:
    from .checkpoints.timm import resnet_config

    return resnet_config({"backbone": name, "out_indices": [1, 2, 3, 4]})


def _multi_scale(backbone: dict[str, Any]) -> dict[str, Any]:
    """Strides 8, 16 and 32; Deformable DETR makes its fourth level itself."""
    return {**backbone, "out_features": _STAGES[1:]}


def _tiny_resnet() -> dict[str, Any]:
    config = _resnet("resnet18")
    return {**config, "depths": [1, 1, 1, 1], "hidden_sizes": [16, 24, 32, 48], "embedding_size": 16}


def _tiny_hgnet() -> dict[str, Any]:
    return {
        "model_type": "hgnet_v2",
        "embedding_size": 8,
        "hidden_sizes": [16, 32, 48, 64],
        "depths": [1, 1, 1, 1],
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 16, 32, 48],
        "stage_mid_channels": [8, 16, 16, 24],
        "stage_out_channels": [16, 32, 48, 64],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [1, 1, 1, 1],
        "out_features": _STAGES[1:],
    }


_TINY_DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_queries": 12,
}
_TINY_HYBRID = {
    "d_model": 32,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [24, 32, 48],
    "decoder_in_channels": [32, 32, 32],
    "feat_strides": [8, 16, 32],
    "encoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "num_queries": 20,
}
_TINY_RT = {
    **_TINY_HYBRID,
    "backbone_config": {
        "model_type": "rt_detr_resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 24, 32, 48],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": _STAGES[1:],
    },
}
_TINY_HG = {**_TINY_HYBRID, "backbone_config": _tiny_hgnet(), "encoder_in_channels": [32, 48, 64]}
_TINY_LW = {
    "num_queries": 12,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "decoder_self_attention_heads": 4,
    "decoder_cross_attention_heads": 4,
    "backbone_config": {
        "model_type": "lw_detr_vit",
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": 256,
        "pretrain_image_size": 64,
        "num_windows": 16,
        "window_block_indices": [0, 2],
        "out_indices": [2, 4],
    },
}
_TWO_STAGE = {"two_stage": True, "with_box_refine": True, "two_stage_num_proposals": 300}

# family or variant -> (family, full-size settings, tiny settings on top of them)
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "detr": ("detr", {"backbone_config": _resnet("resnet50")}, {**_TINY_DETR, "backbone_config": _tiny_resnet()}),
    "table-transformer": (
        "table-transformer",
        {"backbone_config": _resnet("resnet18"), "num_queries": 15, "num_labels": 2},
        {**_TINY_DETR, "backbone_config": _tiny_resnet()},
    ),
    "conditional_detr": (
        "conditional_detr",
        {"backbone_config": _resnet("resnet50")},
        {**_TINY_DETR, "backbone_config": _tiny_resnet()},
    ),
    "dab_detr": (
        "dab_detr",
        {"backbone_config": _resnet("resnet50")},
        {**{("hidden_size" if k == "d_model" else k): v for k, v in _TINY_DETR.items()}, "backbone_config": _tiny_resnet()},
    ),
    "deformable_detr": (
        "deformable_detr",
        {"backbone_config": _multi_scale(_resnet("resnet50")), **_TWO_STAGE},
        {**_TINY_DETR, "backbone_config": _tiny_resnet(), "two_stage_num_proposals": 12},
    ),
    "deformable_detr-refine": (
        "deformable_detr",
        {"backbone_config": _multi_scale(_resnet("resnet50")), "with_box_refine": True},
        {**_TINY_DETR, "backbone_config": _tiny_resnet()},
    ),
    "deformable_detr-plain": (
        "deformable_detr",
        {"backbone_config": _multi_scale(_resnet("resnet50"))},
        {**_TINY_DETR, "backbone_config": _tiny_resnet()},
    ),
    "deformable_detr-single-scale": (
        "deformable_detr",
        {"backbone_config": {**_resnet("resnet50"), "out_features": ["stage4"]}, "num_feature_levels": 1},
        {**_TINY_DETR, "backbone_config": {**_tiny_resnet(), "out_features": ["stage4"]}},
    ),
    "rt_detr": ("rt_detr", {}, _TINY_RT),
    "rt_detr_v2": ("rt_detr_v2", {}, _TINY_RT),
    "rt_detr_v2-discrete": ("rt_detr_v2", {"decoder_method": "discrete"}, _TINY_RT),
    "d_fine": ("d_fine", {}, {**_TINY_HG, "decoder_n_points": [3, 4, 2]}),
    "deimv2": ("deimv2", {}, _TINY_HG),
    "lw_detr": (
        "lw_detr",
        {"projector_scale_factors": [1.0]},
        _TINY_LW,
    ),
    "lw_detr-two-scales": (
        "lw_detr",
        {"projector_scale_factors": [2.0, 0.5]},
        _TINY_LW,
    ),
    "rf_detr": (
        "rf_detr",
        {},
        {
            **_TINY_LW,
            "backbone_config": {
                "model_type": "rf_detr_dinov2",
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "image_size": 112,
                "patch_size": 14,
                "num_windows": 2,
                "out_indices": [2, 4],
            },
        },
    ),
    "yolos": (
        "yolos",
        {
            "hidden_size": 192,
            "num_attention_heads": 3,
            "intermediate_size": 768,
            "image_size": [800, 1344],
            "use_mid_position_embeddings": False,
        },
        {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "image_size": [64, 96],
            "num_detection_tokens": 12,
        },
    ),
}


def load_random(ref: str, *, labels: Path | str | None = None, tokenizer: Path | str | None = None) -> Source:
    """A Source for `random:<name>` or `random:<name>/tiny`.

    Raises:
        SourceError: a name that is not in `MODELS`.
    """
    from . import random_dino, random_text

    name, _, size = ref.removeprefix("random:").partition("/")
    names = [*MODELS, *random_dino.MODELS, *random_text.MODELS]
    if name not in names or size not in ("", "tiny"):
        raise SourceError(
            f"there is no random model {ref!r}; write random:<name> or random:<name>/tiny with one of: {', '.join(names)}"
        )
    if name in random_text.MODELS:
        return random_text.load_random_text(ref, labels=labels, tokenizer=tokenizer)
    if tokenizer is not None:
        raise SourceError(f"--tokenizer '{tokenizer}' cannot be given for '{ref}', which takes no prompt")
    if name in random_dino.MODELS:
        return random_dino.load_random_dino(ref, labels=labels)
    family_name, full, tiny = MODELS[name]
    family = BY_NAME[family_name]
    settings: dict[str, Any] = {"num_labels": 91 if family.select == "query" or family.mask else 80, **deepcopy(full)}
    if size == "tiny":
        settings |= {**deepcopy(tiny), "num_labels": 7}
    module = build(family, settings, settle=size != "tiny")
    spec = make_spec(family, module.config, read_input_spec(Path("."), family, module.config), labels)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    return Source(module, replace(spec, name=ref.removeprefix("random:").replace("/", "-")), family, provenance)


def build(family: Family, settings: dict[str, Any], *, settle: bool = False) -> torch.nn.Module:
    """The family's transformers class with seeded weights, float32, eval mode.

    settle: keep six decoder layers well conditioned; the two of a tiny model need no such care.
    """
    from transformers import CONFIG_MAPPING, AutoModelForObjectDetection

    settings = dict(settings)
    backbone = settings.pop("backbone_config", None)
    if backbone is not None:
        settings["backbone_config"] = CONFIG_MAPPING[backbone["model_type"]](
            **{k: v for k, v in backbone.items() if k != "model_type"}
        )
    config = CONFIG_MAPPING[family.model_type](**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = AutoModelForObjectDetection.from_config(config, dtype=torch.float32, attn_implementation="eager")
        generator = torch.Generator().manual_seed(SEED)
        keep_variance(module, generator)
        for name, parameter in module.named_parameters():
            dull = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            moves = "bbox" in name or "sampling_offsets" in name
            if moves and settle and parameter.ndim == 2:
                # Trained models move boxes and samples by little in each layer. With steps of full size six
                # layers of random weights are chaotic, and rounding alone changes the result.
                parameter.data *= 0.2
            if dull or (moves and not settle):
                parameter.data += torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
        spread_variances(module, generator)
        if settle and family.name in ("d_fine", "deimv2"):
            _settle_batch_norms(module, generator)
        projection = getattr(getattr(module, "model", None), "input_projection", None)
        if settle and isinstance(projection, torch.nn.Conv2d):
            _settle_projection(projection, module, generator)
    return module.eval().requires_grad_(False)


def _settle_batch_norms(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Take the statistics of every BatchNorm from two pictures of noise, in place, and move it off zero.

    These decoders read the encoder's output without a projection or norm of their own; without
    statistics it is in the thousands, and adding it to the queries loses four digits of them.
    Around zero, untrained layers of normalisation and activation make every difference larger by a constant factor each
    (Yang et al., arXiv:1902.08129), rounding too; trained ones do not. A small scale and a positive shift keep the
    activation where it is almost linear.
    """
    norms = [child for child in module.modules() if isinstance(child, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.weight.data.normal_(0.5, 0.05, generator=generator)
        norm.bias.data.normal_(0.8, 0.2, generator=generator)
        norm.momentum = 1.0
        norm.train()
    with torch.no_grad():
        module(pixel_values=_noise(2, generator))
    for norm in norms:
        norm.momentum = 0.1
        norm.eval()


def _settle_projection(projection: torch.nn.Conv2d, module: torch.nn.Module, generator: torch.Generator) -> None:
    """Bring what a DETR's encoder reads to a standard deviation of 1, in place.

    It projects the backbone's output without a norm. Of untrained layers that is in the thousands, its attention has
    logits of millions, and a softmax of those is a maximum that rounding moves to another pixel.
    """
    found: list[torch.Tensor] = []
    hook = projection.register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        module.eval()(pixel_values=_noise(1, generator))
        for parameter in projection.parameters():
            parameter /= found[0].std()
    hook.remove()


def _noise(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, 3, 256, 256) of standard deviation 1: noise of every scale, as in photographs. Plain noise averages out in
    every convolution."""
    picture = torch.zeros(count, 3, 256, 256)
    for side in (2, 4, 8, 16, 32, 64, 128, 256):
        noise = torch.randn(count, 3, side, side, generator=generator)
        picture += torch.nn.functional.interpolate(noise, size=(256, 256), mode="bilinear")
    return picture / picture.std()
