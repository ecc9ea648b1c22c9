"""Table Transformer: DETR for tables and their parts."""

from __future__ import annotations

from .base import AS_FOLDER, RESNET_DETR, SOFTMAX, Family, RandomModel
from .sizes import TINY_DETR, resnet, tiny_resnet

FAMILIES = (
    Family(
        name="table-transformer",
        model_type="table-transformer",
        title="Table Transformer",
        example="microsoft/table-transformer-detection",
        relatives=(
            (
                "transformer.encoder.norm.@",
                f"a Table Transformer, or another DETR with pre_norm, {AS_FOLDER}microsoft/table-transformer-detection",
            ),
        ),
        **{**RESNET_DETR, **SOFTMAX, "licence": "MIT"},
        random=(
            RandomModel(
                "table-transformer",
                {"backbone_config": resnet("resnet18"), "num_queries": 15, "num_labels": 2},
                {**TINY_DETR, "backbone_config": tiny_resnet()},
            ),
        ),
    ),
)
