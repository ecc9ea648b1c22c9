"""ResNet backbones under timm's names, loaded into transformers' own ResNet.

Most published DETR checkpoints keep their backbone under timm's names, and transformers then asks for
the timm package (which needs torchvision). The two ResNets are the same network, so a name map is
enough and nothing has to be installed. Depths and widths: He et al., arXiv:1512.03385, table 1.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from .key_map import COUNTERS

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
    return {rename_key(k): v for k, v in state.items() if not k.endswith(COUNTERS)}


def is_dilated(config: Mapping[str, Any], timm_config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is a "DC5" model: the detector's config says so, or only its backbone's.

    Raises:
        SourceError: an output stride that no published DETR has.
    """
    stride = timm_config.get("output_stride") or 32
    if stride not in (16, 32):
        raise SourceError(f"the checkpoint's timm backbone has output_stride {stride}; detrt reads 16 (DC5) and 32")
    return bool(config.get("dilation")) or stride == 16


def dilate_last_stage(detector: nn.Module) -> None:
    """Turn the stride of the last stage of a detector's ResNet into dilation (the "DC5" models), in place.

    The stage's first 3x3 convolution, which had the stride, keeps dilation 1, and all later ones get 2:
    the rule of timm's `output_stride=16` and of torchvision's `replace_stride_with_dilation`.
    """
    from torch import nn
    from transformers import ResNetBackbone

    backbone = next(part for part in detector.modules() if isinstance(part, ResNetBackbone))
    dilation = 1
    for block in backbone.encoder.stages[-1].layers:  # type: ignore[union-attr]
        for conv in block.modules():
            if isinstance(conv, nn.Conv2d):
                conv.stride = (1, 1)
                if conv.kernel_size == (3, 3):
                    conv.dilation = conv.padding = (dilation, dilation)
                    dilation = 2
