"""Files as the authors' code writes them, from tiny transformers models, and the modules that compute what that code computes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from original_names import to_original
from random_rows import MODELS

from detrt.models.families import BY_NAME
from detrt.models.random import build

HEADS = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
STAGES = ["stage2", "stage3", "stage4"]
RF = {
    "decoder_self_attention_heads": 2,
    "decoder_cross_attention_heads": 4,
    "d_model": 64,
    "decoder_n_points": 2,
}
LITE = {
    "encoder_type": "lite",
    "encoder_in_channels": [48],
    "decoder_in_channels": [64] * 2,
    "feat_strides": [16, 32],
    "num_feature_levels": 2,
}
SIZES = {"d_model": 64, "encoder_hidden_dim": 64, "decoder_in_channels": [64] * 3}

HGNET = {
    **MODELS["d_fine"][2]["backbone_config"],
    "hidden_sizes": [16, 24, 32, 48],
    "stage_out_channels": [16, 24, 32, 48],
}
HGNET |= {"stage_in_channels": [8, 16, 24, 32], "stage_light_block": [False, False, True, True]}
VIT = {
    "model_type": "dinov3_vit",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "key_bias": True,
}
GATED = {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 4}
PLAIN, DINOV3 = ["stage4", "stage8", "stage12"], ["stage6", "stage9", "stage12"]
V2_VIT = {
    **HEADS,
    **SIZES,
    "encoder_in_channels": [64] * 3,
    "decoder_activation_function": "silu",
    "encoder_has_trailing_conv": False,
    "hidden_expansion": 0.34,
    "spatial_tuning_adapter_inplanes": 8,
}

LW = {"d_model": 64, "decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 4}
LW_VIT = {
    **{"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 12},
    **{"window_block_indices": [0, 2, 4], "out_indices": [2, 4, 6]},
}
RF_BACKBONE = {
    "image_size": 112,
    "num_hidden_layers": 12,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_windows": 4,
    "out_indices": [2, 5, 8, 11],
}
# case -> (entry of random_models.MODELS, family of the file, settings on top of its tiny ones, backbone settings)
CASES = {
    "detr": ("detr", "detr", HEADS, {"out_features": ["stage4"]}),
    "conditional_detr": ("conditional_detr", "conditional_detr", HEADS, {"out_features": ["stage4"]}),
    "dab_detr": ("dab_detr", "dab_detr", {**HEADS, "num_patterns": 2}, {"out_features": ["stage4"]}),
    "table-transformer": ("table-transformer", "table-transformer", HEADS, {"out_features": ["stage4"]}),
    "yolos": ("yolos", "yolos", {"image_size": [800, 1344], "num_attention_heads": 1, "layer_norm_eps": 1e-6}, {}),
    "yolos-mid": (
        "yolos",
        "yolos",
        {"image_size": [512, 864], "num_attention_heads": 1, "layer_norm_eps": 1e-6, "use_mid_position_embeddings": True},
        {},
    ),
    "eomt": ("eomt", "eomt", {"num_attention_heads": 1}, {}),
    "lw_detr": ("lw_detr-two-scales", "lw_detr", LW, LW_VIT),
    "deformable-plain": ("deformable_detr-plain", "deformable_detr", HEADS, {"out_features": STAGES}),
    "deformable-refine": ("deformable_detr-refine", "deformable_detr", HEADS, {"out_features": STAGES}),
    "deformable-two-stage": (
        "deformable_detr",
        "deformable_detr",
        {**HEADS, "two_stage_num_proposals": 300},
        {"out_features": STAGES},
    ),
    "rt_detr": ("rt_detr", "rt_detr", HEADS, {}),
    "rt_detr_v2": ("rt_detr_v2", "rt_detr_v2", HEADS, {}),
    "rt_detr_v2-discrete": ("rt_detr_v2-discrete", "rt_detr_v2-discrete", HEADS, {}),
    "d_fine": ("d_fine", "d_fine", HEADS, {"use_learnable_affine_block": True}),
    "d_fine-no-lab": ("d_fine", "d_fine", {**HEADS, "hidden_expansion": 0.5, "depth_mult": 0.34}, {}),
    "d_fine-seg": ("d_fine-seg", "d_fine_seg", HEADS, {}),
    "deim": ("d_fine", "deim", {**HEADS, "decoder_activation_function": "silu"}, {}),
    "deimv2": (
        "deimv2",
        "deimv2",
        {**HEADS, **SIZES, "decoder_activation_function": "silu", "hidden_expansion": 0.34},
        {},
    ),
    "deimv2-lite": (
        "deimv2",
        "deimv2",
        {
            **HEADS,
            **SIZES,
            **LITE,
            "num_queries": 100,
            "encoder_layers": 0,
            "decoder_n_points": [4, 2],
            "use_gateway": False,
            "share_bbox_head": True,
            "decoder_activation_function": "silu",
        },
        {
            "hidden_sizes": [16, 32, 48],
            "stages": 3,
            "out_features": ["stage3"],
            "use_learnable_affine_block": True,
        },
    ),
    "rt_detr_v2-hgnet": ("rt_detr_v2", "rt_detr_v2", HEADS, HGNET),
    "deim-rt_detr_v2": (
        "rt_detr_v2",
        "deim-rt_detr_v2",
        {**HEADS, "decoder_activation_function": "silu"},
        {},
    ),
    "deimv2-plain-vit": ("deimv2", "deimv2", V2_VIT, {**VIT, "layer_norm_eps": 1e-6, "out_features": PLAIN}),
    "deimv2-dinov3": ("deimv2", "deimv2", V2_VIT, {**VIT, **GATED, "out_features": DINOV3}),
    "ecseg": ("ecseg", "ecseg", HEADS, {"num_hidden_layers": 12, "out_features": ["stage11", "stage12"]}),
    "rf_detr": ("rf_detr", "rf_detr", RF, RF_BACKBONE),
    "rf_detr-seg": ("rf_detr-seg", "rf_detr", RF, RF_BACKBONE),
}
FIXED_QUERIES = ("rt_detr", "d_fine", "deimv2", "deim", "ecseg")


def _reference(case: str) -> torch.nn.Module:
    name, variant, changes, backbone_changes = CASES[case]
    family, full, tiny = MODELS[name]
    settings = {**deepcopy(full), **deepcopy(tiny), "num_labels": 80, **changes}
    if variant.startswith(FIXED_QUERIES) and "num_queries" not in changes:
        settings["num_queries"] = 300
    if "backbone_config" not in settings:
        return build(BY_NAME[family], settings)
    own = settings["backbone_config"] if "model_type" not in backbone_changes else {}
    backbone = {**own, **backbone_changes}
    stages = backbone.pop("stages", None)
    if stages:
        for field in (
            "depths",
            "stage_in_channels",
            "stage_mid_channels",
            "stage_out_channels",
            "stage_num_blocks",
            "stage_numb_of_layers",
        ):
            backbone[field] = backbone[field][:stages]
        backbone |= {
            "stage_downsample": [False, True, True],
            "stage_downsample_strides": [2, 2, 2],
            "stage_light_block": [False, False, True],
            "stage_kernel_size": [3, 3, 5],
        }
    settings["backbone_config"] = backbone
    return build(BY_NAME[family], settings)


def _published(case: str, module: torch.nn.Module) -> torch.nn.Module:
    """The module that computes what the authors' code computes with these weights."""
    variant = CASES[case][1]
    if variant == "rf_detr":  # see `detrt.models.families.rf_detr.finish`
        detector = module.model if case.endswith("seg") else module
        for norm in detector.model.backbone.projector.modules():
            if hasattr(norm, "eps"):
                norm.eps = 1e-6
    if not variant.startswith("deim"):
        return module
    from detrt.models.layers import deim, deimv2

    kind = {"deimv2": deimv2.PublishedDeimv2, "deim": deim.DeimDFine}.get(variant, deim.DeimRtDetrV2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deimv2, "make_traceable", lambda encoder: None)  # transformers' own backbone
        published = kind(module.config)
    head = "model.decoder.query_pos_head." if "rt_detr" in case else "none"  # has one layer more than stock
    state = {key: tensor for key, tensor in module.state_dict().items() if not key.startswith(head)}
    result = published.load_state_dict(state, strict=False)
    assert all(key.startswith(head) for key in result.missing_keys)
    assert all(key.startswith("model.enc_output.") for key in result.unexpected_keys)
    if "vit" in case or "dinov3" in case:
        backbone = published.model.conv_encoder.backbone
        for layer in backbone.model.layer:
            layer.attention.k_proj.bias.data.zero_()
            if "plain" in case:
                layer.layer_scale1.lambda1.data.fill_(1), layer.layer_scale2.lambda1.data.fill_(1)
        if "plain" in case:
            backbone.norm = torch.nn.Identity()
    return published.eval()


def _original(case: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The authors' file of a module."""
    if "vit" not in case and "dinov3" not in case:
        family = case if case in ("rt_detr_v2-hgnet", "rf_detr-seg") else MODELS[CASES[case][0]][0]
        state = to_original(family, module.state_dict())
        return {key: 1 / tensor if key.endswith("periods") else tensor for key, tensor in state.items()}
    state = to_original(case, module.state_dict())
    prefix = "backbone.dinov3._model." if "plain" in case else "backbone.dinov3."
    state[f"{prefix}rope_embed.periods"] = 1 / module.model.conv_encoder.backbone.rope_embeddings.inv_freq
    if "plain" in case:
        return {k: v for k, v in state.items() if not k.endswith(("gamma", "mask_token", "storage_tokens"))}
    for key in [key for key in state if key.endswith("qkv.bias")]:
        mask = torch.ones(3, len(state[key]) // 3)
        mask[1] = 0
        state[f"{key}_mask"] = mask.flatten()
        state[key] = state[key] + 5 * (1 - mask.flatten())  # what the mask hides must not be read
    return state


def module_of(case: str) -> torch.nn.Module:
    """A module with random weights, which a file of `case` has as well."""
    return _published(case, _reference(case))


def write_file(case: str, path: Path, module: torch.nn.Module) -> tuple[Path, Path]:
    """Write the weights of `module_of` under the authors' names, and class names: (the file, names.txt beside it)."""
    state = _original(case, module)
    if case.startswith(("d_fine", "deim")) and "rt_detr" not in case:
        state["decoder.up"], state["decoder.reg_scale"] = torch.tensor([0.5]), torch.tensor([4.0])
    torch.save({"model": state, "epoch": 3}, path)
    labels = path.with_name("names.txt")
    labels.write_text("\n".join(f"thing {i}" for i in range(module.config.num_labels)), "utf-8")
    return path, labels
