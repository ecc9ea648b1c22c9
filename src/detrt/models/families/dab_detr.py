"""DAB-DETR."""

from __future__ import annotations

from .base import RESNET_DETR, Family, RandomModel
from .conditional_detr import PROCESSOR
from .sizes import TINY_DETR, resnet, tiny_resnet

FAMILIES = (
    Family(
        name="dab_detr",
        model_type="dab-detr",
        title="DAB-DETR",
        example="IDEA-Research/dab-detr-resnet-50",
        processor=PROCESSOR,
        patterns="num_patterns",
        **RESNET_DETR,
        random=(
            RandomModel(
                "dab_detr",
                {"backbone_config": resnet("resnet50")},
                {**{("hidden_size" if k == "d_model" else k): v for k, v in TINY_DETR.items()}, "backbone_config": tiny_resnet()},
            ),
        ),
    ),
)
