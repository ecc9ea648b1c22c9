"""Conditional DETR."""

from __future__ import annotations

from .base import AS_FOLDER, EDGES, RESNET_DETR, Family, Processor, RandomModel
from .sizes import TINY_DETR, resnet, tiny_resnet

PROCESSOR = Processor("ConditionalDetr", EDGES)
FAMILIES = (
    Family(
        name="conditional_detr",
        model_type="conditional_detr",
        title="Conditional DETR",
        example="microsoft/conditional-detr-resnet-50",
        processor=PROCESSOR,
        **RESNET_DETR,
        relatives=(
            (
                "transformer.decoder.layers.0.sa_qcontent_proj.**",
                f"a Conditional DETR or DAB-DETR {AS_FOLDER}microsoft/conditional-detr-resnet-50",
            ),
        ),
        random=(
            RandomModel(
                "conditional_detr", {"backbone_config": resnet("resnet50")}, {**TINY_DETR, "backbone_config": tiny_resnet()}
            ),
        ),
    ),
)
