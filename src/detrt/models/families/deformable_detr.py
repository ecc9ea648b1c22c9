"""fundamentalvision/Deformable-DETR: plain, with iterative box refinement, two-stage, single-scale (and DC5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes, levels_of, resnet
from .base import (
    EDGES,
    LAYER_NORM_PLUGIN_IS_FASTER,
    PLUGIN_IS_FASTER,
    RESNET_DETR,
    SAMPLING_ENCODER,
    SYMBOLIC_PLUGIN,
    Family,
    Format,
    Processor,
    RandomModel,
)
from .detr import HEADS, RESNET, dilated
from .sizes import STAGES, TINY_DETR, tiny_resnet
from .sizes import resnet as published_resnet

_LAYER = (("linear1", "mlp.fc1"), ("linear2", "mlp.fc2"))

TABLE = (
    *RESNET,
    ("input_proj.#.#.@", "model.input_proj.#.#.@"),
    ("query_embed.weight", "model.query_position_embeddings.weight"),
    ("transformer.level_embed", "model.level_embed"),
    ("transformer.encoder.layers.#.norm1.@", "model.encoder.layers.#.self_attn_layer_norm.@"),
    ("transformer.encoder.layers.#.norm2.@", "model.encoder.layers.#.final_layer_norm.@"),
    *(
        (f"transformer.{side}.layers.#.{old}.@", f"model.{side}.layers.#.{new}.@")
        for side in ("encoder", "decoder")
        for old, new in _LAYER
    ),
    ("transformer.encoder.layers.#.self_attn.@.@", "model.encoder.layers.#.self_attn.@.@"),
    ("transformer.decoder.layers.#.self_attn.in_proj_@", "model.decoder.layers.#.self_attn.{q,k,v}_proj.@"),
    ("transformer.decoder.layers.#.self_attn.out_proj.@", "model.decoder.layers.#.self_attn.o_proj.@"),
    ("transformer.decoder.layers.#.cross_attn.@.@", "model.decoder.layers.#.encoder_attn.@.@"),
    # Here the cross attention is normalised first by number, the self-attention second.
    ("transformer.decoder.layers.#.norm1.@", "model.decoder.layers.#.encoder_attn_layer_norm.@"),
    ("transformer.decoder.layers.#.norm2.@", "model.decoder.layers.#.self_attn_layer_norm.@"),
    ("transformer.decoder.layers.#.norm3.@", "model.decoder.layers.#.final_layer_norm.@"),
    ("transformer.decoder.bbox_embed.**", "model.decoder.bbox_embed.**"),
    ("transformer.decoder.class_embed.**", "model.decoder.class_embed.**"),
    ("transformer.reference_points.@", "model.reference_points.@"),
    ("transformer.enc_output.@", "model.enc_output.@"),
    ("transformer.enc_output_norm.@", "model.enc_output_norm.@"),
    ("transformer.pos_trans.@", "model.pos_trans.@"),
    ("transformer.pos_trans_norm.@", "model.pos_trans_norm.@"),
    ("class_embed.#.@", "class_embed.#.@"),
    ("bbox_embed.#.layers.#.@", "bbox_embed.#.layers.#.@"),
)


def recognise(keys: set[str]) -> str | None:
    # DINO has the same transformer, and embeds labels for its denoising.
    marks = {
        "transformer.level_embed",
        "transformer.encoder.layers.0.self_attn.sampling_offsets.weight",
        "class_embed.0.weight",
    }
    others = {"label_enc.weight", "transformer.tgt_embed.weight"}
    return "deformable_detr" if marks <= keys and not others & keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    heads = assumed.number("heads", HEADS, "nheads", divides=shapes.size("transformer.level_embed", 1))
    levels = shapes.size("transformer.level_embed")
    backbone = resnet(shapes, "backbone.0.body.")
    inputs = [shapes.size(f"input_proj.{i}.0.weight", 1) for i in range(levels)]
    # Levels beyond the backbone's are strided convolutions on its last one: 3x3, the others 1x1.
    taken = [c for i, c in enumerate(inputs) if shapes.size(f"input_proj.{i}.0.weight", 2) == 1]
    two_stage = "transformer.pos_trans.weight" in shapes
    layers = shapes.count("transformer.decoder.layers.#.")
    queries = assumed.queries(300, "num_queries") if two_stage else shapes.size("query_embed.weight")
    return {
        "activation_function": assumed.choice("activation", "relu", ACTIVATIONS),
        "backbone_config": {
            **backbone,
            "out_features": levels_of(backbone["hidden_sizes"], taken, shapes.ref),
        },
        "num_labels": shapes.size("class_embed.0.weight"),
        "num_queries": queries,
        "two_stage_num_proposals": queries,
        "d_model": shapes.size("transformer.level_embed", 1),
        "num_feature_levels": levels,
        "encoder_layers": shapes.count("transformer.encoder.layers.#."),
        "decoder_layers": layers,
        "encoder_ffn_dim": shapes.size("transformer.encoder.layers.0.linear1.weight"),
        "decoder_ffn_dim": shapes.size("transformer.decoder.layers.0.linear1.weight"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_n_points": shapes.points("transformer.encoder.layers.0.self_attn.attention_weights.weight", heads, levels),
        "decoder_n_points": shapes.points("transformer.decoder.layers.0.cross_attn.attention_weights.weight", heads, levels),
        "two_stage": two_stage,
        "with_box_refine": "transformer.decoder.bbox_embed.0.layers.0.weight" in shapes,
        "dilation": dilated(variant, assumed, report, told=levels > 1),
    }


PROCESSOR = Processor("DeformableDetr", EDGES)
FORMAT = Format("deformable_detr", ("fundamentalvision Deformable DETR",), recognise, settings, TABLE)
_TWO_STAGE = {"two_stage": True, "with_box_refine": True, "two_stage_num_proposals": 300}
_PYRAMID = {**published_resnet("resnet50"), "out_features": STAGES[1:]}  # the fourth level is made of it
_TINY = {**TINY_DETR, "backbone_config": tiny_resnet()}
_LAST = {"out_features": ["stage4"]}
FAMILIES = (
    Family(
        name="deformable_detr",
        model_type="deformable_detr",
        title="Deformable DETR",
        example="SenseTime/deformable-detr",
        processor=PROCESSOR,
        queries=(("two_stage_num_proposals", "two_stage"), "num_queries"),
        deformable=True,
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "symbolic_shapes": {
                "DeformableDetrModel.forward": (
                    "e3a4b576a446c266",
                    "6ff23ab3155a17c6",
                    "1e57d041c6a30036",
                    "c38b116c984d4cae",
                    "cb84c379832c04e4",
                ),
                "DeformableDetrModel.gen_encoder_output_proposals": ("cf2ac8b98a7a3f1c", "5b24387b7f7aa28d", "e834ffc0e7ab9a0b"),
                "DeformableDetrEncoder.get_reference_points": ("21e119814bd280ee", "bb4f51fee94e0ea5", "906f391e3614ae16"),
            },
        },
        **RESNET_DETR,
        random=(
            RandomModel("deformable_detr", {"backbone_config": _PYRAMID, **_TWO_STAGE}, {**_TINY, "two_stage_num_proposals": 12}),
            RandomModel("deformable_detr-refine", {"backbone_config": _PYRAMID, "with_box_refine": True}, _TINY),
            RandomModel("deformable_detr-plain", {"backbone_config": _PYRAMID}, _TINY),
            RandomModel(
                "deformable_detr-single-scale",
                {"backbone_config": {**published_resnet("resnet50"), **_LAST}, "num_feature_levels": 1},
                {**TINY_DETR, "backbone_config": {**tiny_resnet(), **_LAST}},
            ),
        ),
        formats=(FORMAT, replace(FORMAT, name="deformable_detr-dc5", titles=("fundamentalvision Deformable DETR, DC5",))),
        engines=frozenset(
            (
                SAMPLING_ENCODER,
                PLUGIN_IS_FASTER,
                LAYER_NORM_PLUGIN_IS_FASTER,
                SYMBOLIC_PLUGIN,
            )
        ),
    ),
)
