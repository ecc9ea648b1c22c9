"""Random-weight models of every family: `random:<family>` at full size, `random:<family>/tiny` for tests.

The full-size configurations are the published ones (ResNet-50 for the DETRs of 2020 to 2022, the
"L" or "base" model where a family has several). Weights are seeded; parameters that training starts at
zero are perturbed, because zero offsets and zero box heads would hide errors; and weights keep the
variance of activations, because with the library's initialisation (a standard deviation of 0.01 or 0.02)
the signal vanishes in a narrow network: the output is then the same for every image, and a comparison of
outputs proves nothing.

The full DINO sizes are those of the published configs: DINO 4scale R50 and Swin-L (91 classes, as
IDEA-Research trains COCO), Co-DINO 5scale R50 and Swin-L (80 classes).
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bundle import Provenance
from ..errors import SourceError
from .arch.dino import CoDino, Dino, DinoConfig
from .checkpoints import d_fine, dino
from .families import BY_NAME, Family
from .hub import refuse_text_choices
from .labels import labels_for, read_labels
from .preprocessor import read_input_spec
from .source import Source, auto_class, make_spec, versions, why_unsupported
from .text import bert_tokenizer, library, read_tokenizer, text_spec, with_boolean_masks

_STAGES = ["stage1", "stage2", "stage3", "stage4"]


def _resnet(name: str) -> dict[str, Any]:
    from .checkpoints.timm import resnet_config

    return resnet_config({"backbone": name, "out_indices": [1, 2, 3, 4]})


def _multi_scale(backbone: dict[str, Any]) -> dict[str, Any]:
    """Strides 8, 16 and 32; Deformable DETR adds its fourth level itself."""
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
_TINY_DOCUMENT = {**_TINY_HG, "global_pointer_head_size": 8}
_DOCUMENT_LABELS = 25


def _class_order(labels: int) -> dict[str, Any]:
    """What PP-DocLayoutV2 knows of each class: from which score on it is ordered, and its number for the reading order."""
    return {"class_thresholds": [0.3] * labels, "class_order": [(7 * i) % labels % 20 for i in range(labels)]}


_RF_WIDE = {
    **{"d_model": 512, "decoder_layers": 5, "decoder_n_points": 4},
    **{"decoder_self_attention_heads": 16, "decoder_cross_attention_heads": 32, "num_labels": 366},
}


def _rf_detr(side: int, patch: int, windows: int, **settings: int) -> dict[str, Any]:
    """A published RF-DETR, trained at `side` pixels: a ViT-S, or a ViT-B below a wide decoder."""
    wide = settings.get("d_model", 256) > 256
    backbone = {
        **{"model_type": "rf_detr_dinov2", "num_hidden_layers": 12, "image_size": side, "patch_size": patch},
        **{"hidden_size": 768 if wide else 384, "num_attention_heads": 12 if wide else 6, "num_windows": windows},
        "out_features": ["stage3", "stage6", "stage9", "stage12"],
    }
    return {"backbone_config": backbone, "decoder_n_points": 2, **settings}


def _tiny_rf_detr(patch: int, windows: int) -> dict[str, Any]:
    backbone = {
        **{"model_type": "rf_detr_dinov2", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{"image_size": 8 * patch, "patch_size": patch, "num_windows": windows, "out_indices": [2, 4]},
    }
    return {**_TINY_LW, "intermediate_size": 48, "backbone_config": backbone}


def _rf_detr_seg(side: int, *, layers: int, queries: int, windows: int = 2) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A published RF-DETR-Seg, trained at `side` pixels."""
    full = _rf_detr(side, 12, windows, decoder_layers=layers, num_queries=queries)
    return "rf_detr", {**full, "architectures": ["RfDetrForInstanceSegmentation"]}, _tiny_rf_detr(14, 2)


def _edgecrafter(size: str) -> dict[str, Any]:
    """A published ECDet."""
    # Width and feed-forward part of the ViT; width, expansion and depth of the neck; feed-forward parts of neck and decoder.
    vit, inner, neck, expansion, depth, encoder_ffn, decoder_ffn = {
        "s": (192, 768, 192, 0.34, 0.67, 512, 512),
        "m": (256, 1024, 256, 0.75, 0.67, 512, 1024),
        "l": (384, 1536, 256, 0.75, 1.0, 1024, 1024),
        "x": (384, 2304, 256, 1.5, 1.0, 2048, 2048),
    }[size]
    backbone = {
        **{"model_type": "dinov3_vit", "hidden_size": vit, "intermediate_size": inner, "num_hidden_layers": 12},
        **{
            "num_attention_heads": vit // 64,
            "patch_size": 16,
            "key_bias": True,
            "layer_norm_eps": 1e-6,
            "num_register_tokens": 0,
        },
        **{"apply_layernorm": False, "out_features": ["stage11", "stage12"]},
    }
    return {
        **{"architectures": ["EcDetForObjectDetection"], "backbone_config": backbone, "projections": 3 if vit > neck else 1},
        **{"d_model": neck, "encoder_hidden_dim": neck, "encoder_in_channels": [neck] * 3, "decoder_in_channels": [neck] * 3},
        **{"hidden_expansion": expansion, "depth_mult": depth, "encoder_has_trailing_conv": False, "decoder_layers": 4},
        **{"encoder_ffn_dim": encoder_ffn, "decoder_ffn_dim": decoder_ffn, "decoder_n_points": [3, 6, 3]},
        **{"encoder_activation_function": "silu", "decoder_activation_function": "silu"},
    }


def _ecseg(size: str) -> dict[str, Any]:
    """A published ECSeg."""
    return {**_edgecrafter(size), "architectures": ["EcDetForInstanceSegmentation"], "mask_downsample_ratio": 4}


_TINY_EC = {
    **_TINY_HYBRID,
    "encoder_in_channels": [32, 32, 32],
    "backbone_config": {
        **_edgecrafter("s")["backbone_config"],
        **{"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        "out_features": ["stage2", "stage3"],
    },
    "projections": 3,
}
_TINY_EOMT = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 128, "mlp_ratio": 2},
    **{"num_blocks": 1, "num_queries": 12},
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
    "d_fine-seg": (
        "d_fine",
        {"architectures": ["DFineForInstanceSegmentation"], "mask_dim": 256, "mask_downsample_ratio": 4},
        {**_TINY_HG, "decoder_n_points": [3, 4, 2], "mask_dim": 32},
    ),
    "deimv2": ("deimv2", {}, _TINY_HG),
    "ecdet": ("ecdet", _edgecrafter("l"), _TINY_EC),
    "ecseg": ("ecdet", _ecseg("l"), _TINY_EC),
    "pp_doclayout_v2": (
        "pp_doclayout_v2",
        {"num_labels": _DOCUMENT_LABELS, **_class_order(_DOCUMENT_LABELS)},
        {
            **_TINY_HG,
            **_class_order(7),
            "reading_order_config": {
                **{"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48},
                **{"coordinate_size": 6, "shape_size": 4, "relation_bias_embed_dim": 16, "global_pointer_head_size": 8},
            },
        },
    ),
    "pp_doclayout_v3": (
        "pp_doclayout_v3",
        {"num_labels": _DOCUMENT_LABELS},
        {
            **_TINY_DOCUMENT,
            "backbone_config": {**_tiny_hgnet(), "out_features": _STAGES},
            **{"x4_feat_dim": 16, "mask_feature_channels": [16, 16], "num_prototypes": 8},
        },
    ),
    "pp_doclayout_v4": (
        "pp_doclayout_v4",
        {"num_labels": _DOCUMENT_LABELS},
        {**{("hidden_size" if k == "d_model" else k): v for k, v in _TINY_DOCUMENT.items()}},
    ),
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
    "rf_detr": ("rf_detr", {}, _tiny_rf_detr(14, 2)),
    "rf_detr-large": ("rf_detr", _rf_detr(704, 16, 2, decoder_layers=4), _tiny_rf_detr(16, 2)),
    "rf_detr-xlarge": ("rf_detr", _rf_detr(700, 20, 1, **_RF_WIDE), _tiny_rf_detr(20, 1)),
    "rf_detr-2xlarge": ("rf_detr", _rf_detr(880, 20, 2, **_RF_WIDE), _tiny_rf_detr(20, 2)),
    "rf_detr-seg": _rf_detr_seg(432, layers=5, queries=200),  # the published medium
    "eomt": ("eomt", {"architectures": ["EomtForInstanceSegmentation"], "num_labels": 80}, _TINY_EOMT),
    "eomt_dinov3": (
        "eomt_dinov3",
        {"architectures": ["EomtDinov3ForInstanceSegmentation"], "num_labels": 80},
        {**_TINY_EOMT, "intermediate_size": 48},
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

# The other published sizes of RF-DETR-Seg, ECDet and ECSeg; their tiny models are those of the entries above.
SIZES = {
    "rf_detr-seg-nano": _rf_detr_seg(312, windows=1, layers=4, queries=100),
    "rf_detr-seg-small": _rf_detr_seg(384, layers=4, queries=100),
    "rf_detr-seg-large": _rf_detr_seg(504, layers=5, queries=200),
    "rf_detr-seg-xlarge": _rf_detr_seg(624, layers=6, queries=300),
    "rf_detr-seg-2xlarge": _rf_detr_seg(768, layers=6, queries=300),
    **{f"ecdet-{size}": ("ecdet", _edgecrafter(size), _TINY_EC) for size in "smx"},
    **{f"ecseg-{size}": ("ecdet", _ecseg(size), _TINY_EC) for size in "smx"},
}


def load_random(
    ref: str, *, labels: Path | str | None = None, labels_start: int | None = None, tokenizer: Path | str | None = None
) -> Source:
    """A Source for `random:<name>` or `random:<name>/tiny`.

    Raises:
        SourceError: a name that is in none of `MODELS`, `SIZES`, `DINO_MODELS` and `TEXT_MODELS`.
    """

    name, _, size = ref.removeprefix("random:").partition("/")
    names = [*MODELS, *SIZES, *DINO_MODELS, *TEXT_MODELS]
    if name not in names or size not in ("", "tiny"):
        raise SourceError(
            f"there is no random model {ref!r}; write random:<name> or random:<name>/tiny with one of: {', '.join(names)}"
        )
    found = {**MODELS, **SIZES, **TEXT_MODELS}.get(name)
    if found is not None and (why := why_unsupported(BY_NAME[found[0]])):  # the others are detrt's own
        raise SourceError(f"'{ref}' {why}")
    if name in TEXT_MODELS:
        return load_random_text(ref, labels=labels, labels_start=labels_start, tokenizer=tokenizer)
    if labels_start is not None and labels is None:
        raise SourceError(f"--labels-start {labels_start} needs --labels FILE: '{ref}' has a name for each class")
    if tokenizer is not None:
        raise SourceError(f"--tokenizer '{tokenizer}' cannot be given for '{ref}', which takes no prompt")
    if name in DINO_MODELS:
        return load_random_dino(ref, labels=labels, labels_start=labels_start)
    family_name, full, tiny = {**MODELS, **SIZES}[name]
    family = BY_NAME[family_name]
    settings: dict[str, Any] = {"num_labels": 91 if family.select == "query" or family.mask else 80, **deepcopy(full)}
    if size == "tiny":
        settings |= {**deepcopy(tiny), "num_labels": 7}
    module = build(family, settings, settle=size != "tiny")
    names = read_labels(labels, int(module.config.num_labels), labels_start) if labels else None
    # D-FINE-seg is of its authors alone, who resize otherwise than transformers does for a D-FINE.
    entry = d_fine.input_spec(module.config, family) if family.name == "d_fine" else read_input_spec(None, family, module.config)
    spec = make_spec(family, module, entry, names)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    return Source(module, replace(spec, name=ref.removeprefix("random:").replace("/", "-")), family, provenance)


def _config(family: Family, settings: dict[str, Any]) -> Any:
    """The family's config, whose backbone is of transformers: before 5.2 the default is one of timm."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[family.model_type]
    if "use_timm_backbone" in inspect.signature(cls.__init__).parameters:
        settings = {**settings, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return cls(**settings)


def build(family: Family, settings: dict[str, Any], *, settle: bool = False) -> torch.nn.Module:
    """The family's transformers class with seeded weights, float32, eval mode.

    settle: keep six decoder layers well conditioned; not needed for the two of a tiny model.
    """
    from transformers import CONFIG_MAPPING

    settings = dict(settings)
    backbone = settings.pop("backbone_config", None)
    if backbone is not None:
        settings["backbone_config"] = CONFIG_MAPPING[backbone["model_type"]](
            **{k: v for k, v in backbone.items() if k != "model_type"}
        )
    config = _config(family, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        auto = auto_class(family, config.architectures)
        module = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
        generator = torch.Generator().manual_seed(SEED)
        keep_variance(module, generator)
        for name, parameter in module.named_parameters():
            dull = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
            moves = "bbox" in name or "box_head" in name or "sampling_offsets" in name
            if moves and settle and parameter.ndim == 2:
                # Trained models move boxes and samples by little in each layer. With steps of full size six
                # layers of random weights are chaotic, and rounding alone changes the result.
                parameter.data *= 0.2
            if dull or (moves and not settle):
                parameter.data += torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
        spread_variances(module, generator)
        if family.reading_order != "none":
            for child in module.modules():
                if isinstance(child, torch.nn.BatchNorm2d):  # initialised to 0.01, for training from a backbone's weights
                    child.weight.data.normal_(1, 0.05, generator=generator)
        # ECDet selects its queries on the output of the encoder as it is, so that a tiny one needs statistics, too.
        if family.name == "ecdet" or (settle and family.name in ("d_fine", "deimv2")):
            _settle_batch_norms(module, generator)
        if family.masks_at:
            _centre_prototypes(module, generator)
        projection = getattr(getattr(module, "model", None), "input_projection", None)
        if settle and isinstance(projection, torch.nn.Conv2d):
            _settle_projection(projection, module, generator)
        if family.processor == "Eomt":
            _separate_masks(module, generator)
    return module.eval().requires_grad_(False)


def _separate_masks(module: Any, generator: torch.Generator) -> None:
    """Give the mask logits of an EoMT a negative mean, in place: masks of half of all pixels have equal boxes, all of the image."""
    norm = module.upscale_block.block[-1].layernorm2d
    direction = torch.empty_like(norm.bias).normal_(generator=generator)
    direction *= norm.bias.numel() ** 0.25 / direction.norm()
    module.mask_head.fc3.bias.data += direction
    norm.bias.data -= direction
    module.attn_mask_probs.zero_()  # as training leaves them
    module.fix_attention()


def _settle_batch_norms(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Set the statistics of every BatchNorm from two images of noise, in place, and shift it off zero.

    These decoders read the output of the encoder without a projection or norm; without statistics it is in the thousands, and
    adding it to the queries loses four digits. Around zero, each untrained layer of normalisation and activation amplifies every
    difference by a constant factor (Yang et al., arXiv:1902.08129), including rounding; trained layers do not. A small scale and a
    positive shift keep the activation almost linear.
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


def _centre_prototypes(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Give the maps that masks are sums of the mean 0 on images of noise, in place: otherwise a mask is the whole image or nothing."""
    last: Any = module.get_submodule("model.encoder.encoder_mask_output.conv")
    seen: list[torch.Tensor] = []
    handle = last.register_forward_hook(lambda conv, inputs, output: seen.append(output))
    with torch.no_grad():
        module.eval()(pixel_values=_noise(2, generator))
    handle.remove()
    last.bias.data -= seen[0].mean((0, 2, 3))


def _settle_projection(projection: torch.nn.Conv2d, module: torch.nn.Module, generator: torch.Generator) -> None:
    """Scale the input projection of a DETR encoder so that its output has standard deviation 1, in place.

    It projects the output of the backbone without a norm. With untrained layers that is in the thousands, attention logits are in
    the millions, and their softmax is a maximum that rounding moves to another pixel.
    """
    found: list[torch.Tensor] = []
    hook = projection.register_forward_hook(lambda _, __, output: found.append(output))
    with torch.no_grad():
        module.eval()(pixel_values=_noise(1, generator))
        for parameter in projection.parameters():
            parameter /= found[0].std()
    hook.remove()


def _noise(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count, 3, 256, 256) of standard deviation 1: noise of all scales, as in photographs. White noise averages out in
    every convolution."""
    image = torch.zeros(count, 3, 256, 256)
    for side in (2, 4, 8, 16, 32, 64, 128, 256):
        noise = torch.randn(count, 3, side, side, generator=generator)
        image += torch.nn.functional.interpolate(noise, size=(256, 256), mode="bilinear")
    return image / image.std()


# Ids of the framing tokens and of printable ASCII in BERT's uncased vocabulary.
_FRAME = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
_PLACES = (
    (999, "!\"#$%&'()*+,-./"),
    (1014, "0123456789:;<=>?@"),
    (1031, "[\\]^_`"),
    (1037, "abcdefghijklmnopqrstuvwxyz{|}~"),
)
_WORDS = (
    *(
        "a",
        "an",
        "the",
        "of",
        "and",
        "with",
        "in",
        "on",
        "red",
        "green",
        "blue",
        "yellow",
        "orange",
        "purple",
        "black",
    ),
    *(
        "white",
        "grey",
        "circle",
        "square",
        "triangle",
        "star",
        "striped",
        "dotted",
        "person",
        "cat",
        "dog",
        "car",
        "bus",
    ),
    *(
        "bicycle",
        "remote",
        "control",
        "chair",
        "table",
        "bottle",
        "cup",
        "book",
        "phone",
        "tree",
        "detect",
        "left",
        "right",
    ),
)
TINY_VOCABULARY = 1200
_SWIN_T = {"embed_dim": 96, "depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "window_size": 7}
_SWIN_B = {
    "embed_dim": 128,
    "depths": [2, 2, 18, 2],
    "num_heads": [4, 8, 16, 32],
    "window_size": 12,
    "image_size": 384,
}
_WIDE_SWIN = {**_SWIN_B, "embed_dim": 192, "num_heads": [6, 12, 24, 48]}
_LEVELS = {"model_type": "swin", "out_features": ["stage2", "stage3", "stage4"]}
_TINY_SWIN = {**_LEVELS, "embed_dim": 16, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 8], "window_size": 4}
_BERT = {"model_type": "bert"}
_TINY_BERT = {
    **{"model_type": "bert", "vocab_size": TINY_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 48},
}
_TINY_GROUNDING = {
    **{"backbone_config": _TINY_SWIN, "text_config": _TINY_BERT, "d_model": 32, "num_queries": 20},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
}


_TINY_SAM3 = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def _clip(size: int, **settings: int | str) -> dict[str, Any]:
    # The last two ids begin and end a text.
    ends = {"bos_token_id": size - 2, "eos_token_id": size - 1, "pad_token_id": size - 1}
    return {"model_type": "clip_text_model", "vocab_size": size, **ends, **settings}


def _owl(name: str, **vision: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
    kind = {"model_type": f"{name}_text_model", "max_position_embeddings": 16}
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    return (
        name,
        {"text_config": _clip(49408, **kind, hidden_size=512), "vision_config": vision},
        {
            "text_config": _clip(TINY_VOCABULARY, **kind, **small, hidden_size=24),
            "vision_config": {"image_size": 96, "patch_size": 16, "hidden_size": 32, **small},
            "projection_dim": 24,
        },
    )


# name -> (family, full-size settings, tiny settings on top of them)
TEXT_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grounding_dino": (
        "grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_T}, "text_config": _BERT},
        _TINY_GROUNDING,
    ),
    "grounding_dino-swin-b": (
        "grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_B}, "text_config": _BERT},
        {**_TINY_GROUNDING, "backbone_config": {**_TINY_SWIN, "window_size": 6}},
    ),
    "mm_grounding_dino": (
        "mm_grounding_dino",
        {"backbone_config": {**_LEVELS, **_SWIN_T}, "text_config": _BERT},
        _TINY_GROUNDING,
    ),
    "mm_grounding_dino-swin-l": (
        "mm_grounding_dino",
        {"backbone_config": {**_LEVELS, **_WIDE_SWIN, "out_features": _STAGES}, "text_config": _BERT, "num_feature_levels": 5},
        {**_TINY_GROUNDING, "backbone_config": {**_TINY_SWIN, "out_features": _STAGES}},
    ),
    "omdet_turbo": (
        "omdet_turbo",
        {
            "backbone_config": {**_LEVELS, **_SWIN_T, "image_size": 640},
            "text_config": _clip(49408),
            "apply_layernorm_after_vision_backbone": False,
        },
        {
            "backbone_config": _TINY_SWIN,
            "text_config": _clip(
                TINY_VOCABULARY,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=48,
                projection_dim=24,
            ),
            **{"d_model": 32, "decoder_hidden_dim": 32, "vision_features_channels": [32, 32, 32]},
            **{
                "encoder_in_channels": [32, 64, 128],
                "encoder_dim_feedforward": 48,
                "encoder_attention_heads": 4,
            },
            **{
                "decoder_dim_feedforward": 48,
                "decoder_num_layers": 2,
                "decoder_num_heads": 4,
                "num_queries": 20,
            },
            **{"text_projection_in_dim": 24, "text_projection_out_dim": 24, "class_embed_dim": 24},
            "task_encoder_hidden_dim": 40,
        },
    ),
    "sam3": (
        "sam3",
        {
            "text_config": _clip(
                49408,
                **{"hidden_size": 1024, "intermediate_size": 4096, "projection_dim": 512, "num_hidden_layers": 24},
                **{"num_attention_heads": 16, "max_position_embeddings": 32, "hidden_act": "gelu"},
            )
        },
        {
            "vision_config": {
                "backbone_config": {
                    **{"model_type": "sam3_vit_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
                    **{"num_attention_heads": 4, "window_size": 3, "global_attn_indexes": [1]},
                    **{"image_size": 112, "pretrain_image_size": 56},
                },
                "fpn_hidden_size": 32,
            },
            "text_config": _clip(
                TINY_VOCABULARY,
                **{"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
                **{"projection_dim": 24, "max_position_embeddings": 32, "hidden_act": "gelu"},
            ),
            "geometry_encoder_config": _TINY_SAM3,
            "detr_encoder_config": _TINY_SAM3,
            "detr_decoder_config": {**_TINY_SAM3, "num_queries": 20},
            "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 4},
        },
    ),
    "owlvit": _owl("owlvit", image_size=768, patch_size=32),
    "owlv2": _owl("owlv2", image_size=960, patch_size=16),
}


def load_random_text(
    ref: str, *, labels: Path | str | None = None, labels_start: int | None = None, tokenizer: Path | str | None = None
) -> Source:
    """A prompted Source for `random:<name>` or `random:<name>/tiny` with a name of `TEXT_MODELS`."""
    name, _, size = ref.removeprefix("random:").partition("/")
    family_name, full, tiny = TEXT_MODELS[name]
    family = BY_NAME[family_name]
    refuse_text_choices(family, labels, None, labels_start)
    settings = {**deepcopy(full), **(deepcopy(tiny) if size == "tiny" else {})}
    words = read_tokenizer(tokenizer, None, ref) if tokenizer is not None else small_tokenizer(family, settings["text_config"])
    module = build_text(family, settings, settle=size != "tiny")
    spec = text_spec(family, module, read_input_spec(None, family, module.config), words, ref)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    title = ref.removeprefix("random:").replace("/", "-")
    return Source(module, replace(spec, name=title), family, provenance, tokenizer=words)


def small_tokenizer(family: Family, text_config: dict[str, Any]) -> bytes:
    """A tokenizer of some words, and letters and digits for all others, as a file.

    WordPiece with BERT's ids of framing tokens and separators, which transformers' code uses; for CLIP the same words between
    its own two tokens.
    """
    vocabulary = dict(_FRAME)
    vocabulary |= {letter: start + i for start, letters in _PLACES for i, letter in enumerate(letters)}
    free = iter(i for i in range(1, TINY_VOCABULARY) if i not in vocabulary.values())
    for letters in ("abcdefghijklmnopqrstuvwxyz0123456789",):
        vocabulary |= {f"##{letter}": next(free) for letter in letters}
    vocabulary |= {word: next(free) for word in _WORDS if word not in vocabulary}
    made = bert_tokenizer(vocabulary)
    if family.text != "tokens":
        processors = library().processors
        ends = [
            ("<|startoftext|>", text_config["bos_token_id"]),
            ("<|endoftext|>", text_config["eos_token_id"]),
        ]
        model = library().models.WordPiece(vocabulary | dict(ends), unk_token="[UNK]")
        made = library().Tokenizer(model)
        made.normalizer, made.pre_tokenizer = _bert_parts()
        made.post_processor = processors.TemplateProcessing(single="<|startoftext|> $A <|endoftext|>", special_tokens=ends)
        made.add_special_tokens([name for name, _ in ends])
    return made.to_str().encode()


def _bert_parts() -> tuple[Any, Any]:
    return library().normalizers.BertNormalizer(lowercase=True), library().pre_tokenizers.BertPreTokenizer()


def build_text(family: Family, settings: dict[str, Any], *, settle: bool = False) -> torch.nn.Module:
    """The family's transformers class with seeded weights, float32, eval mode.

    settle: boxes and samples move little in each layer, as in trained models; see `build`.
    """
    from transformers import CONFIG_MAPPING

    settings = dict(settings)
    for part in {"backbone_config", "text_config"} & set(settings):
        given = dict(settings[part])
        settings[part] = CONFIG_MAPPING[given.pop("model_type")](**given)
    config = _config(family, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = auto_class(family, None).from_config(config, dtype=torch.float32, attn_implementation="eager")
        generator = torch.Generator().manual_seed(SEED)
        keep_variance(module, generator)
        for name, parameter in module.named_parameters():
            moves = "bbox" in name or "box_head" in name or "sampling_offsets" in name
            if moves and settle and parameter.ndim == 2:
                parameter.data *= 0.2
            elif name.endswith(("_param", "text_projection")):
                # Fusion is initialised to 1e-4, and the projection may be uninitialised memory.
                parameter.data.normal_(0, 0.5 if parameter.ndim == 1 else parameter.shape[0] ** -0.5, generator=generator)
            elif name.endswith(("reference_points.weight", "position_embeddings")):
                parameter.data.normal_(generator=generator)  # else all boxes of SAM 3 begin at one point
            elif (parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())) or moves:
                parameter.data += torch.empty_like(parameter).normal_(0, 0.05, generator=generator)
        spread_variances(module, generator)
    with_boolean_masks(module)
    return module.eval().requires_grad_(False)


_R50 = DinoConfig(
    num_labels=91,
    num_queries=900,
    backbone="resnet",
    depths=(3, 4, 6, 3),
    width=64,
    out_stages=(1, 2, 3),
    levels=4,
    conv_bias=True,
)
_SWIN_L = replace(_R50, backbone="swin", depths=(2, 2, 18, 2), width=192, heads=(6, 12, 24, 48), window=12)
_CO = {"num_labels": 80, "levels": 5, "out_stages": (0, 1, 2, 3), "conv_bias": False}
_VIT_L = {
    "backbone": "vit",
    "depths": (24,),
    "width": 1024,
    "heads": (16,),
    "hidden": 2730,
    "patch": 16,
    "positions": 1025,
    "window": 24,
    "windowed": tuple(i for i in range(24) if i % 4 != 3),
    "out_stages": (0,),
    "num_queries": 1500,
}
DINO_MODELS: dict[str, tuple[str, DinoConfig]] = {
    "dino": ("dino", _R50),
    "dino-swin-l": ("dino", _SWIN_L),
    "co_dino-r50": ("co_dino", replace(_R50, **_CO)),  # type: ignore[arg-type]
    "co_dino-vit-l": ("co_dino", replace(_R50, **{**_CO, **_VIT_L})),  # type: ignore[arg-type]
    "co_dino-swin-l": ("co_dino", replace(_SWIN_L, **_CO)),  # type: ignore[arg-type]
}
_TINY = {
    "num_labels": 7,
    "num_queries": 20,
    "dim": 32,
    "ffn": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "groups": 8,
}
_TINY_BACKBONE = {
    "resnet": {"depths": (1, 1, 1, 1), "width": 8},
    "swin": {"depths": (2, 2, 2, 2), "width": 16, "heads": (1, 2, 4, 8), "window": 4},
    "vit": {
        "depths": (4,),
        "width": 32,
        "heads": (2,),
        "hidden": 43,
        "positions": 50,
        "window": 3,
        "windowed": (0, 1, 2),
    },
}


def tiny_config(name: str) -> DinoConfig:
    """The tiny variant of a full config, with the same levels and stages."""
    config = DINO_MODELS[name][1]
    return replace(config, **_TINY, **_TINY_BACKBONE[config.backbone])  # type: ignore[arg-type]


def load_random_dino(ref: str, *, labels: Path | str | None = None, labels_start: int | None = None) -> Source:
    """A DINO or Co-DINO for `random:<name>` or `random:<name>/tiny` with a name of `DINO_MODELS`."""

    name, _, size = ref.removeprefix("random:").partition("/")
    family_name, config = DINO_MODELS[name]
    module = build_dino(family_name, tiny_config(name) if size == "tiny" else config)
    family = replace(BY_NAME[family_name], **dino.family_facts(config.backbone))
    classes = module.config.num_labels
    names = read_labels(labels, classes, labels_start) if labels else labels_for(classes) or {i: str(i) for i in range(classes)}
    spec = make_spec(family, module, dino.input_spec(module.config, family), names)
    provenance = Provenance(ref, "", sum(p.numel() for p in module.parameters()), versions=versions())
    return Source(module, replace(spec, name=ref.removeprefix("random:").replace("/", "-")), family, provenance)


def build_dino(family: str, config: DinoConfig, *, attend_padding: bool = False) -> Dino:
    """The model with seeded weights, eval mode; no parameter is zero or one, which would hide errors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = CoDino(config, attend_padding=attend_padding) if family == "co_dino" else Dino(config)
        keep_variance(module)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.data += torch.randn_like(parameter) * 0.05
            elif name.endswith(("_embed", "bias_table")):
                parameter.data.normal_()
            elif "sampling_offsets" in name:
                # About a pixel at level 0, so that samples leave their pixel, and some the map.
                parameter.data *= 3
            elif name.endswith("layers.2.weight"):
                parameter.data *= 0.3
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.data.uniform_(0.6, 1.6)
            elif name.endswith("running_mean"):
                buffer.data.normal_(0, 0.1)
    return module.eval().requires_grad_(False)


SEED = 20260101


def keep_variance(module: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw the weights of convolutions and linear layers, in place: sqrt(2 / fan in), He et al., arXiv:1502.01852.

    Linear layers without ReLU have sqrt(1 / fan in).
    """
    for child in module.modules():
        if isinstance(child, (torch.nn.Conv2d, torch.nn.Linear)):
            gain = 2.0 if isinstance(child, torch.nn.Conv2d) else 1.0
            child.weight.data.normal_(0, (gain / child.weight[0].numel()) ** 0.5, generator=generator)


def spread_variances(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Change the variances of normalisations from 1, in place."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_var"):
            buffer.data *= torch.empty_like(buffer).uniform_(0.6, 1.6, generator=generator)
