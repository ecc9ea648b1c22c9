"""facebookresearch/detr: DETR with ResNet-50 or -101, and the dilated DC5 models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoints.assumed import ACTIVATIONS, Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes, resnet
from .base import BY_ONNX, LAYER_NORM_PLUGIN_IS_FASTER, RESNET_DETR, SOFTMAX, Family, Format, RandomModel
from .sizes import TINY_DETR, tiny_resnet
from .sizes import resnet as published_resnet

HEADS = 8  # of every published model
RESNET = (
    ("backbone.0.body.conv1.@", "model.backbone.model.embedder.embedder.convolution.@"),
    ("backbone.0.body.bn1.@", "model.backbone.model.embedder.embedder.normalization.@"),
    *(
        line
        for stage in range(4)
        for line in (
            (
                f"backbone.0.body.layer{stage + 1}.#.downsample.0.@",
                f"model.backbone.model.encoder.stages.{stage}.layers.#.shortcut.convolution.@",
            ),
            (
                f"backbone.0.body.layer{stage + 1}.#.downsample.1.@",
                f"model.backbone.model.encoder.stages.{stage}.layers.#.shortcut.normalization.@",
            ),
            *(
                (
                    f"backbone.0.body.layer{stage + 1}.#.{old}{number + 1}.@",
                    f"model.backbone.model.encoder.stages.{stage}.layers.#.layer.{number}.{new}.@",
                )
                for number in range(3)
                for old, new in (("conv", "convolution"), ("bn", "normalization"))
            ),
        )
    ),
)


def decoder_layer(cross_norm: str, final_norm: str) -> Table:
    """The layers of DETR's decoder but for the cross-attention, with the names of its last two norms in transformers."""
    old, new = "transformer.decoder.layers.#", "model.decoder.layers.#"
    return (
        (f"{old}.self_attn.in_proj_@", f"{new}.self_attn.{{q,k,v}}_proj.@"),
        (f"{old}.self_attn.out_proj.@", f"{new}.self_attn.o_proj.@"),
        (f"{old}.linear1.@", f"{new}.mlp.fc1.@"),
        (f"{old}.linear2.@", f"{new}.mlp.fc2.@"),
        (f"{old}.norm1.@", f"{new}.self_attn_layer_norm.@"),
        (f"{old}.norm2.@", f"{new}.{cross_norm}.@"),
        (f"{old}.norm3.@", f"{new}.{final_norm}.@"),
    )


TABLE = (
    *RESNET,
    ("input_proj.@", "model.input_projection.@"),
    ("query_embed.weight", "model.query_position_embeddings.weight"),
    ("transformer.encoder.layers.#.self_attn.in_proj_@", "model.encoder.layers.#.self_attn.{q,k,v}_proj.@"),
    ("transformer.encoder.layers.#.self_attn.out_proj.@", "model.encoder.layers.#.self_attn.o_proj.@"),
    ("transformer.encoder.layers.#.linear1.@", "model.encoder.layers.#.mlp.fc1.@"),
    ("transformer.encoder.layers.#.linear2.@", "model.encoder.layers.#.mlp.fc2.@"),
    ("transformer.encoder.layers.#.norm1.@", "model.encoder.layers.#.self_attn_layer_norm.@"),
    ("transformer.encoder.layers.#.norm2.@", "model.encoder.layers.#.final_layer_norm.@"),
    *decoder_layer("encoder_attn_layer_norm", "final_layer_norm"),
    (
        "transformer.decoder.layers.#.multihead_attn.in_proj_@",
        "model.decoder.layers.#.encoder_attn.{q,k,v}_proj.@",
    ),
    (
        "transformer.decoder.layers.#.multihead_attn.out_proj.@",
        "model.decoder.layers.#.encoder_attn.o_proj.@",
    ),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    ("class_embed.@", "class_labels_classifier.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)


def recognise(keys: set[str]) -> str | None:
    marks = {
        "query_embed.weight",
        "transformer.encoder.layers.0.self_attn.in_proj_weight",
        "class_embed.weight",
    }
    return "detr" if marks <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    """transformers config fields, and what they were read from."""
    backbone = resnet(shapes, "backbone.0.body.")
    decoder = "transformer.decoder.layers."
    dilated = variant.endswith("-dc5") or bool(assumed.args.get("dilation"))
    if not dilated and "dilation" not in assumed.args:
        report.notes.append("stride 32 assumed: a DC5 file has the same keys and needs `family=detr-dc5`")
    assumed.need("DETR", pre_norm=False)
    heads = assumed.number("heads", HEADS, "nheads", divides=shapes.size("query_embed.weight", 1))
    found = {
        "backbone_config": {**backbone, "out_features": ["stage4"]},
        "num_labels": shapes.size("class_embed.weight") - 1,
        "num_queries": shapes.size("query_embed.weight"),
        "d_model": shapes.size("query_embed.weight", 1),
        "encoder_layers": shapes.count("transformer.encoder.layers.#."),
        "decoder_layers": shapes.count(f"{decoder}#."),
        "encoder_ffn_dim": shapes.size("transformer.encoder.layers.0.linear1.weight"),
        "decoder_ffn_dim": shapes.size(f"{decoder}0.linear1.weight"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "activation_function": assumed.choice("activation", "relu", ACTIVATIONS),
    }
    return {**found, "dilation": dilated}


FORMAT = Format("detr", ("facebookresearch DETR",), recognise, settings, TABLE)
FAMILIES = (
    Family(
        name="detr",
        model_type="detr",
        title="DETR",
        example="facebook/detr-resnet-50",
        **{**RESNET_DETR, **SOFTMAX},
        random=(
            RandomModel(
                "detr", {"backbone_config": published_resnet("resnet50")}, {**TINY_DETR, "backbone_config": tiny_resnet()}
            ),
        ),
        formats=(FORMAT, replace(FORMAT, name="detr-dc5", titles=("facebookresearch DETR, DC5",))),
        relatives=(
            ("detr.transformer.**", "a facebookresearch DETR for panoptic segmentation; detrt reads the detectors"),
            ("tgt_embed.weight", f"a DAB-Deformable-DETR or DN-DETR; {BY_ONNX}"),
        ),
        engines=frozenset((LAYER_NORM_PLUGIN_IS_FASTER,)),
    ),
)
