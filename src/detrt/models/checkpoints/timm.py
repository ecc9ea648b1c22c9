"""ResNet backbones under timm's names, loaded into transformers' own ResNet.

Most published DETR checkpoints keep their backbone under timm's names, and transformers then asks for
the timm package (which needs torchvision). The two ResNets are the same network, so a name map is
enough and nothing has to be installed. Depths and widths: He et al., arXiv:1512.03385, table 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn


# name -> (layer type, blocks per stage, channels per stage)
RESNETS: dict[str, tuple[str, list[int], list[int]]] = {
    "resnet18": ("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
    "resnet34": ("basic", [3, 4, 6, 3], [64, 128, 256, 512]),
    "resnet50": ("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    "resnet101": ("bottleneck", [3, 4, 23, 3], [256, 512, 1024, 2048]),
    "resnet152": ("bottleneck", [3, 8, 36, 3], [256, 512, 1024, 2048]),
}
_KEY = re.compile(
    r"^(?P<head>(?:model\.)?backbone\.(?:conv_encoder\.)?model\.)"
    r"(?:(?P<stem>conv1|bn1)|layer(?P<stage>[1-4])\.(?P<block>\d+)\."
    r"(?:conv(?P<conv>\d)|bn(?P<bn>\d)|downsample\.(?P<down>[01])))\.(?P<leaf>\w+)$"
)


def resnet_config(timm_config: dict[str, Any]) -> dict[str, Any]:
    """transformers `ResNetConfig` fields for a timm backbone config.

    Raises:
        SourceError: the backbone is not one of the ResNets above.
    """
    name = str(timm_config.get("backbone", "")).split(".")[0]
    if name not in RESNETS:
        raise SourceError(
            f"the checkpoint's backbone is timm's {name!r}; detrt reads {', '.join(RESNETS)} without timm. "
            "Convert the checkpoint to a transformers backbone first"
        )
    layer_type, depths, widths = RESNETS[name]
    # timm counts the stem as feature 0; transformers calls it "stem".
    stages = [f"stage{i}" for i in timm_config.get("out_indices", [1, 2, 3, 4])]
    return {
        "model_type": "resnet",
        "num_channels": timm_config.get("num_channels", 3),
        "embedding_size": 64,
        "hidden_sizes": widths,
        "depths": depths,
        "layer_type": layer_type,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "out_features": stages,
    }


def rename_key(key: str) -> str:
    """A checkpoint key with timm's ResNet names -> transformers' ResNet names; other keys unchanged."""
    match = _KEY.match(key)
    if match is None:
        return key
    head, leaf = match["head"], match["leaf"]
    if match["stem"]:
        part = "convolution" if match["stem"] == "conv1" else "normalization"
        return f"{head}embedder.embedder.{part}.{leaf}"
    layer = f"{head}encoder.stages.{int(match['stage']) - 1}.layers.{match['block']}"
    if match["down"]:
        return f"{layer}.shortcut.{'convolution' if match['down'] == '0' else 'normalization'}.{leaf}"
    number = int(match["conv"] or match["bn"])
    return f"{layer}.layer.{number - 1}.{'convolution' if match['conv'] else 'normalization'}.{leaf}"


def rename_resnet(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All keys through `rename_key`; BatchNorm step counters are dropped (inference has no use for them)."""
    return {rename_key(k): v for k, v in state.items() if not k.endswith("num_batches_tracked")}


def is_dilated(config: Mapping[str, Any], timm_config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is a "DC5" model: the detector's config says so, or only its backbone's.

    Raises:
        SourceError: an output stride that no published DETR has.
    """
    stride = timm_config.get("output_stride") or 32
    if stride not in (16, 32):
        raise SourceError(f"the checkpoint's timm backbone has output_stride {stride}; detrt reads 16 (DC5) and 32")
    return bool(config.get("dilation")) or stride == 16


def dilate_last_stage(backbone: nn.Module) -> None:
    """Turn the last stage's stride into dilation (the "DC5" models), in place.

    The stage's first 3x3 convolution, which had the stride, keeps dilation 1, and all later ones get 2:
    the rule of timm's `output_stride=16` and of torchvision's `replace_stride_with_dilation`.
    """
    from torch import nn

    dilation = 1
    for block in backbone.encoder.stages[-1].layers:  # type: ignore[union-attr]
        for conv in block.modules():
            if isinstance(conv, nn.Conv2d):
                conv.stride = (1, 1)
                if conv.kernel_size == (3, 3):
                    conv.dilation = conv.padding = (dilation, dilation)
                    dilation = 2


# OmDet-Turbo's Swin backbone under timm's names, loaded into transformers' own Swin.
#
# The published checkpoint keeps its backbone under timm's names, and transformers then asks for the timm
# package (which needs torchvision). The two are the same network; timm counts the patch merging to the stage
# after it, stacks queries, keys and values, and leaves the norms of the outputs to the detector.
# name -> (channels, blocks per stage, heads per stage, window): Liu et al., arXiv:2103.14030, section 3.3
SWINS: dict[str, tuple[int, list[int], list[int], int]] = {
    "swin_tiny_patch4_window7_224": (96, [2, 2, 6, 2], [3, 6, 12, 24], 7),
    "swin_small_patch4_window7_224": (96, [2, 2, 18, 2], [3, 6, 12, 24], 7),
    "swin_base_patch4_window7_224": (128, [2, 2, 18, 2], [4, 8, 16, 32], 7),
    "swin_base_patch4_window12_384": (128, [2, 2, 18, 2], [4, 8, 16, 32], 12),
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
    if raw.get("model_type") != "omdet-turbo":
        return None
    if isinstance(backbone, dict):
        return str(backbone.get("backbone")) if backbone.get("model_type") == "timm_backbone" else None
    return str(raw.get("backbone") or "swin_tiny_patch4_window7_224")


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
    width, depths, heads, window = SWINS[name]
    settings = {key: value for key, value in raw.items() if "backbone" not in key}
    settings["backbone_config"] = {
        "model_type": "swin",
        "embed_dim": width,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "out_features": ["stage2", "stage3", "stage4"],
        "image_size": raw.get("image_size", 640),
    }
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
