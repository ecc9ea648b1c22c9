"""Atten4Vis/ConditionalDETR: ResNet-50 and -101, and the dilated DC5 models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes
from .base import EDGES, RESNET_DETR, Family, Format, Processor, RandomModel
from .detr import CONDITIONAL, QUERIES, RESNET, activation, encoder, has_encoder, transformer
from .sizes import TINY_DETR, resnet, tiny_resnet

_OLD, _NEW = "transformer.decoder.layers.#", "model.decoder.layers.#"
TABLE = (
    *RESNET,
    *encoder(),
    QUERIES,
    *(
        (f"{_OLD}.{short}_{old}_proj.@", f"{_NEW}.{attention}.{new}_proj.@")
        for short, attention in (("sa", "self_attn"), ("ca", "encoder_attn"))
        for old, new in (
            ("qcontent", "q_content"),
            ("qpos", "q_pos"),
            ("kcontent", "k_content"),
            ("kpos", "k_pos"),
            ("v", "v"),
            ("qpos_sine", "q_pos_sine"),
        )
    ),
    (f"{_OLD}.self_attn.out_proj.@", f"{_NEW}.self_attn.o_proj.@"),
    (f"{_OLD}.cross_attn.out_proj.@", f"{_NEW}.encoder_attn.o_proj.@"),
    (f"{_OLD}.linear1.@", f"{_NEW}.mlp.fc1.@"),
    (f"{_OLD}.linear2.@", f"{_NEW}.mlp.fc2.@"),
    (f"{_OLD}.norm1.@", f"{_NEW}.self_attn_layer_norm.@"),
    (f"{_OLD}.norm2.@", f"{_NEW}.encoder_attn_layer_norm.@"),
    (f"{_OLD}.norm3.@", f"{_NEW}.final_layer_norm.@"),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    ("transformer.decoder.query_scale.**", "model.decoder.query_scale.**"),
    ("transformer.decoder.ref_point_head.**", "model.decoder.ref_point_head.**"),
    ("class_embed.@", "class_labels_classifier.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)


def recognise(keys: set[str]) -> str | None:
    return "conditional_detr" if has_encoder(keys) and {CONDITIONAL, QUERIES[0]} <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    return {**transformer(shapes, assumed, variant, report, QUERIES[0]), "activation_function": activation(assumed)}


PROCESSOR = Processor("ConditionalDetr", EDGES)
FORMAT = Format("conditional_detr", ("Atten4Vis Conditional DETR",), recognise, settings, TABLE)
FAMILIES = (
    Family(
        name="conditional_detr",
        model_type="conditional_detr",
        title="Conditional DETR",
        example="microsoft/conditional-detr-resnet-50",
        processor=PROCESSOR,
        **RESNET_DETR,
        random=(
            RandomModel(
                "conditional_detr", {"backbone_config": resnet("resnet50")}, {**TINY_DETR, "backbone_config": tiny_resnet()}
            ),
        ),
        formats=(FORMAT, replace(FORMAT, name="conditional_detr-dc5", titles=("Atten4Vis Conditional DETR, DC5",))),
    ),
)
