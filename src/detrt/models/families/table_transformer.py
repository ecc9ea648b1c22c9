"""microsoft/table-transformer: DETR that normalises before each layer, for tables and their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes
from .base import RESNET_DETR, SOFTMAX, Family, Format, RandomModel
from .detr import PRE_NORM, QUERIES, activation, cross_attention, decoder_layer, encoder, has_encoder, resnet_table, transformer
from .sizes import TINY_DETR, resnet, tiny_resnet

TABLE = (
    *resnet_table("model.backbone.conv_encoder.model"),
    *encoder("out_proj", ""),
    QUERIES,
    ("transformer.encoder.norm.@", "model.encoder.layernorm.@"),
    *decoder_layer("encoder_attn_layer_norm", "final_layer_norm", "out_proj", ""),
    *cross_attention("out_proj"),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    ("class_embed.@", "class_labels_classifier.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)
# Classes of the published models, and the side of their input: the longest edge, which the authors' evaluation resizes to.
PUBLISHED = {
    2: ("table", "table rotated"),
    6: ("table", "table column", "table row", "table column header", "table projected row header", "table spanning cell"),
}
EDGE = {2: 800, 6: 1000}


def recognise(keys: set[str]) -> str | None:
    return "table-transformer" if has_encoder(keys) and {PRE_NORM, QUERIES[0]} <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    assumed.need("Table Transformer", pre_norm=True)
    found = transformer(shapes, assumed, variant, report, QUERIES[0])
    classes = found["num_labels"] - 1
    edge = EDGE.get(classes)
    return {
        **found,
        "num_labels": classes,
        "activation_function": activation(assumed),
        "family": {"edges": (edge, edge)} if edge else {},
    }


FORMAT = Format("table-transformer", ("microsoft Table Transformer",), recognise, settings, TABLE, class_names=PUBLISHED)
FAMILIES = (
    Family(
        name="table-transformer",
        model_type="table-transformer",
        title="Table Transformer",
        example="microsoft/table-transformer-detection",
        **{**RESNET_DETR, **SOFTMAX, "licence": "MIT"},
        random=(
            RandomModel(
                "table-transformer",
                {"backbone_config": resnet("resnet18"), "num_queries": 15, "num_labels": 2},
                {**TINY_DETR, "backbone_config": tiny_resnet()},
            ),
        ),
        formats=(FORMAT, replace(FORMAT, name="table-transformer-dc5", titles=("microsoft Table Transformer, DC5",))),
    ),
)
