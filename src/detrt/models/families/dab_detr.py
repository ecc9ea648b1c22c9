"""IDEA-Research/DAB-DETR: ResNet-50 and -101, with patterns, and the dilated DC5 models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes
from .base import BY_ONNX, RESNET_DETR, Family, Format, RandomModel
from .conditional_detr import PROCESSOR
from .detr import CONDITIONAL, encoder, has_encoder, resnet_table, transformer
from .sizes import TINY_DETR, resnet, tiny_resnet

TEMPERATURE = 20  # of the position embedding, of every published model
DETECTIONS = 300  # that the authors' evaluation keeps
_ANCHORS = "refpoint_embed.weight"
_OLD, _NEW = "transformer.decoder.layers.#", "model.decoder.layers.#"
TABLE = (
    *resnet_table("model.backbone.conv_encoder.model"),
    *encoder("out_proj", ""),
    ("transformer.encoder.layers.#.activation.weight", "model.encoder.layers.#.activation_fn.weight"),
    ("transformer.encoder.query_scale.**", "model.encoder.query_scale.**"),
    (_ANCHORS, "model.query_refpoint_embeddings.weight"),
    ("transformer.patterns.weight", "model.patterns.weight"),
    *(
        (f"{_OLD}.{short}_{old}_proj.@", f"{_NEW}.{attention}.{attention}_{new}_proj.@")
        for short, attention in (("sa", "self_attn"), ("ca", "cross_attn"))
        for old, new in (
            ("qcontent", "query_content"),
            ("qpos", "query_pos"),
            ("kcontent", "key_content"),
            ("kpos", "key_pos"),
            ("v", "value"),
            ("qpos_sine", "query_pos_sine"),
        )
    ),
    *((f"{_OLD}.{name}.out_proj.@", f"{_NEW}.{name}.{name}.output_proj.@") for name in ("self_attn", "cross_attn")),
    (f"{_OLD}.linear1.@", f"{_NEW}.mlp.fc1.@"),
    (f"{_OLD}.linear2.@", f"{_NEW}.mlp.fc2.@"),
    (f"{_OLD}.activation.weight", f"{_NEW}.mlp.activation_fn.weight"),
    (f"{_OLD}.norm1.@", f"{_NEW}.self_attn.self_attn_layer_norm.@"),
    (f"{_OLD}.norm2.@", f"{_NEW}.cross_attn.cross_attn_layer_norm.@"),
    (f"{_OLD}.norm3.@", f"{_NEW}.mlp.final_layer_norm.@"),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    *(
        (f"transformer.decoder.{part}.**", f"model.decoder.{part}.**")
        for part in ("query_scale", "ref_point_head", "ref_anchor_head", "bbox_embed")
    ),
    ("class_embed.@", "class_embed.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)


def recognise(keys: set[str]) -> str | None:
    return "dab_detr" if has_encoder(keys) and {CONDITIONAL, _ANCHORS} <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    found = transformer(shapes, assumed, variant, report, _ANCHORS)
    prelu = "transformer.decoder.layers.0.activation.weight" in shapes
    patterns = shapes.size("transformer.patterns.weight") if "transformer.patterns.weight" in shapes else 0
    if patterns:
        report.notes.append(f"{patterns} patterns: {patterns * found['num_queries']} boxes of {found['num_queries']} anchors")
    return {
        **{name: value for name, value in found.items() if name != "d_model"},
        "hidden_size": found["d_model"],
        "activation_function": "prelu" if prelu else assumed.choice("activation", "relu", ACTIVATIONS, "transformer_activation"),
        "num_patterns": patterns,
        "temperature_height": assumed.number("temperature_height", TEMPERATURE, "pe_temperatureH"),
        "temperature_width": assumed.number("temperature_width", TEMPERATURE, "pe_temperatureW"),
        "family": {"max_detections": assumed.number("detections", DETECTIONS, "num_select")},
    }


FORMAT = Format(
    "dab_detr",
    ("IDEA-Research DAB-DETR",),
    recognise,
    settings,
    TABLE,
    relatives=(("bbox_embed.#.layers.0.weight", f"a DAB-DETR with a box head for each layer; {BY_ONNX}"),),
)
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
        formats=(FORMAT, replace(FORMAT, name="dab_detr-dc5", titles=("IDEA-Research DAB-DETR, DC5",))),
    ),
)
