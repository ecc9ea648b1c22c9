"""fundamentalvision/Deformable-DETR: plain, with iterative box refinement, two-stage, single-scale (and DC5)."""

from __future__ import annotations

from typing import Any

from .assumed import ACTIVATIONS, Assumed
from .detr import HEADS, RESNET
from .key_map import LoadReport
from .shapes import Shapes, levels_of, resnet

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
SKIPPED: dict[str, str] = {}


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
    dilated = variant.endswith("-dc5") or bool(assumed.args.get("dilation"))
    if levels == 1 and not dilated and "dilation" not in assumed.args:
        report.notes.append("stride 32 assumed: a DC5 file has the same keys and needs --family deformable_detr-dc5")

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
        "dilation": dilated,
    }
