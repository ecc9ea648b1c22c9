"""OmDet-Turbo, also with a Swin backbone under timm's names, which is loaded into transformers' own Swin.

The published checkpoint keeps its backbone under timm's names, and transformers then asks for the timm package (which needs
torchvision). The two are the same network; timm counts the patch merging to the stage after it, stacks queries, keys and values, and
leaves the norms of the outputs to the detector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from .base import Family, RandomModel, TextFacts
from .sizes import LEVELS, SWIN_B, SWIN_T, TINY_SWIN, TINY_VOCABULARY, clip

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...spec import TextSpec
    from ..stock import Stock

# timm's names: Liu et al., arXiv:2103.14030, section 3.3
SWINS: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": SWIN_T,
    "swin_small_patch4_window7_224": {**SWIN_T, "depths": [2, 2, 18, 2]},
    "swin_base_patch4_window7_224": {**SWIN_B, "window_size": 7},
    "swin_base_patch4_window12_384": SWIN_B,
}
_BACKBONE = "vision_backbone.vision_backbone."
_SWIN = _BACKBONE + "swin."
_LINES = (
    (r"patch_embed\.proj\.(\w+)", r"embeddings.patch_embeddings.projection.\1"),
    (r"patch_embed\.norm\.(\w+)", r"embeddings.norm.\1"),
    (r"layers_(\d)\.blocks\.(\d+)\.norm1\.(\w+)", r"encoder.layers.\1.blocks.\2.layernorm_before.\3"),
    (r"layers_(\d)\.blocks\.(\d+)\.norm2\.(\w+)", r"encoder.layers.\1.blocks.\2.layernorm_after.\3"),
    (r"layers_(\d)\.blocks\.(\d+)\.attn\.proj\.(\w+)", r"encoder.layers.\1.blocks.\2.attention.o_proj.\3"),
    (r"layers_(\d)\.blocks\.(\d+)\.mlp\.(\w+)\.(\w+)", r"encoder.layers.\1.blocks.\2.mlp.\3.\4"),
    (
        r"layers_(\d)\.blocks\.(\d+)\.attn\.relative_position_bias_table",
        r"encoder.layers.\1.blocks.\2.attention.relative_position_bias.relative_position_bias_table",
    ),
)
_QKV = re.compile(r"layers_(\d)\.blocks\.(\d+)\.attn\.qkv\.(\w+)")
_MERGE = re.compile(r"layers_(\d)\.downsample\.(\w+)\.(\w+)")

# Computed again by the module.
_TABLES = re.compile(r"(relative_position_index|attn_mask)$")


def timm_name(raw: Mapping[str, Any]) -> str | None:
    """Name of the timm backbone that an OmDet-Turbo's config.json asks for, in its old or its new form."""
    backbone = raw.get("backbone_config")
    if isinstance(backbone, dict):
        return str(backbone.get("backbone")) if backbone.get("model_type") == "timm_backbone" else None
    return str(raw.get("backbone") or "swin_tiny_patch4_window7_224")


def _from_timm(raw: Mapping[str, Any], ref: str) -> tuple[Any, Any, Any] | None:
    from transformers import OmDetTurboForObjectDetection

    return None if timm_name(raw) is None else (omdet_config(raw, ref), OmDetTurboForObjectDetection, rename_swin)


def omdet_config(raw: Mapping[str, Any], ref: str) -> Any:
    """The config of an OmDet-Turbo with transformers' own Swin instead of timm's, norms inside the backbone.

    From the file and not from transformers' config, which asks the hub about timm's names.

    Raises:
        SourceError: a backbone that is not one of `SWINS`.
    """
    from transformers import OmDetTurboConfig

    name = str(timm_name(raw)).split(".")[0]
    if name not in SWINS:
        raise SourceError(f"the backbone of '{ref}' is timm's {name!r}; detrt reads {', '.join(SWINS)} without timm")
    settings = {key: value for key, value in raw.items() if "backbone" not in key}
    settings["backbone_config"] = {**LEVELS, **SWINS[name], "image_size": raw.get("image_size", 640)}
    return OmDetTurboConfig.from_dict({**settings, "apply_layernorm_after_vision_backbone": False})


def rename_swin(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All keys of an OmDet-Turbo with timm's names, under those of transformers; others unchanged."""
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key.startswith("vision_backbone.layer_norms."):
            index, _, leaf = key.removeprefix("vision_backbone.layer_norms.").partition(".")
            renamed[f"{_BACKBONE}hidden_states_norms.stage{int(index) + 2}.{leaf}"] = tensor
            renamed[key] = tensor  # the module keeps its own, and does not use them
        elif key.startswith(_BACKBONE + "_backbone."):
            renamed.update(_backbone(key.removeprefix(_BACKBONE + "_backbone."), tensor))
        else:  # the text model was one level deeper in transformers 4
            renamed[key.replace("language_backbone.model.text_model.", "language_backbone.model.")] = tensor
    last = renamed.get(f"{_BACKBONE}hidden_states_norms.stage4.bias")
    if last is not None:  # of the classifier that the library's Swin is cut from; nothing runs it
        renamed[f"{_SWIN}layernorm.weight"] = last.new_ones(last.shape)
        renamed[f"{_SWIN}layernorm.bias"] = last.new_zeros(last.shape)
    return renamed


def _backbone(key: str, tensor: Tensor) -> dict[str, Tensor]:
    stacked, merge = _QKV.fullmatch(key), _MERGE.fullmatch(key)
    if _TABLES.search(key):
        return {}
    if stacked:
        stage, block, leaf = stacked.groups()
        prefix = f"{_SWIN}encoder.layers.{stage}.blocks.{block}.attention."
        return {f"{prefix}{n}_proj.{leaf}": part for n, part in zip("qkv", tensor.chunk(3), strict=True)}
    if merge:
        stage, part, leaf = merge.groups()
        return {f"{_SWIN}encoder.layers.{int(stage) - 1}.downsample.{part}.{leaf}": tensor}
    for old, new in _LINES:
        if re.fullmatch(old, key):
            return {_SWIN + re.sub(old, new, key): tensor}
    return {f"{_BACKBONE}_backbone.{key}": tensor}


def _text_facts(config: Any) -> TextFacts:
    words = config.text_config
    return TextFacts(int(words.max_position_embeddings), int(words.hidden_size), int(config.num_queries))


def _stock() -> type[Stock]:
    from ..layers.omdet_turbo import OmDetStock

    return OmDetStock


def _detector(module: nn.Module) -> nn.Module:
    from ..layers.omdet_turbo import OmDetDetector

    return OmDetDetector(module)


def _text_encoder(module: nn.Module, text: TextSpec) -> nn.Module:
    from ..layers.omdet_turbo import OmDetText

    return OmDetText(module)


FAMILIES = (
    Family(
        name="omdet_turbo",
        model_type="omdet-turbo",
        title="OmDet-Turbo",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        licence="Apache-2.0",
        example="omlab/omdet-turbo-swin-tiny-hf",
        multiple_of=32,
        deformable=True,
        text="classes",
        text_facts=_text_facts,
        text_processor="OmDetTurboProcessor",
        stock=_stock,
        since="5.12.1",
        nms="nms",
        nms_iou=0.5,
        converted=_from_timm,
        detector=_detector,
        text_encoder=_text_encoder,
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "tensors_only": {
                "OmDetTurboDecoder._get_decoder_input": ("e36c88008f1fcf02", "bd8099cb86c76802"),
                "OmDetTurboDecoder.forward": ("1a615049670a24e3", "629e8da8ee1bb8c3"),
                "OmDetTurboDecoder.generate_anchors": ("6856340a4388f624",),
                "OmDetTurboDeformableTransformerDecoderLayer.forward": ("baceef2bbdb7a145",),
                "OmDetTurboForObjectDetection.forward": ("17e5d9ce3deca4af", "95ef5c89aa18f69e", "042876ecb580ffc6"),
                "OmDetTurboHybridEncoder.build_2d_sincos_position_embedding": ("3f44c0a8c8eff676",),
                "OmDetTurboHybridEncoder.forward": ("733606a3300eb107", "e3b94d54d4da9bff"),
                "OmDetTurboLanguageBackbone.forward": ("de6a92a7bf9960be",),
                "OmDetTurboVisionBackbone.forward": ("0bdbf606b80c0cc3",),
                "get_class_similarity": ("cc4e2d641eae55cc",),
            },
        },
        random=(
            RandomModel(
                "omdet_turbo",
                {
                    "backbone_config": {**LEVELS, **SWIN_T, "image_size": 640},
                    "text_config": clip(49408),
                    "apply_layernorm_after_vision_backbone": False,
                },
                {
                    "backbone_config": TINY_SWIN,
                    "text_config": clip(
                        TINY_VOCABULARY,
                        hidden_size=24,
                        num_hidden_layers=2,
                        num_attention_heads=4,
                        intermediate_size=48,
                        projection_dim=24,
                    ),
                    **{"d_model": 32, "decoder_hidden_dim": 32, "vision_features_channels": [32, 32, 32]},
                    **{"encoder_in_channels": [32, 64, 128], "encoder_dim_feedforward": 48, "encoder_attention_heads": 4},
                    **{"decoder_dim_feedforward": 48, "decoder_num_layers": 2, "decoder_num_heads": 4, "num_queries": 20},
                    **{"text_projection_in_dim": 24, "text_projection_out_dim": 24, "class_embed_dim": 24},
                    "task_encoder_hidden_dim": 40,
                },
            ),
        ),
    ),
)
