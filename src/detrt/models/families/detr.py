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


def resnet_table(target: str) -> Table:
    """torchvision's ResNet as the first part of a backbone, and `target`, transformers' own."""
    lines = [("conv1.@", "embedder.embedder.convolution.@"), ("bn1.@", "embedder.embedder.normalization.@")]
    for stage in range(4):
        old, new = f"layer{stage + 1}.#", f"encoder.stages.{stage}.layers.#"
        for kind, word in ((0, "convolution"), (1, "normalization")):
            lines.append((f"{old}.downsample.{kind}.@", f"{new}.shortcut.{word}.@"))
        for number in range(3):
            lines.append((f"{old}.conv{number + 1}.@", f"{new}.layer.{number}.convolution.@"))
            lines.append((f"{old}.bn{number + 1}.@", f"{new}.layer.{number}.normalization.@"))
    return tuple((f"backbone.0.body.{old}", f"{target}.{new}") for old, new in lines)


RESNET = resnet_table("model.backbone.model")


def decoder_layer(cross_norm: str, final_norm: str, output: str = "o_proj", feed_forward: str = "mlp.") -> Table:
    """The layers of DETR's decoder but for the cross-attention, with the names of its last two norms in transformers, and of those parts
    that `encoder` takes as well."""
    old, new = "transformer.decoder.layers.#", "model.decoder.layers.#"
    return (
        (f"{old}.self_attn.in_proj_@", f"{new}.self_attn.{{q,k,v}}_proj.@"),
        (f"{old}.self_attn.out_proj.@", f"{new}.self_attn.{output}.@"),
        (f"{old}.linear1.@", f"{new}.{feed_forward}fc1.@"),
        (f"{old}.linear2.@", f"{new}.{feed_forward}fc2.@"),
        (f"{old}.norm1.@", f"{new}.self_attn_layer_norm.@"),
        (f"{old}.norm2.@", f"{new}.{cross_norm}.@"),
        (f"{old}.norm3.@", f"{new}.{final_norm}.@"),
    )


def encoder(output: str = "o_proj", feed_forward: str = "mlp.") -> Table:
    """The input projection and the encoder, with the names of two parts in transformers' module."""
    old, new = "transformer.encoder.layers.#", "model.encoder.layers.#"
    return (
        ("input_proj.@", "model.input_projection.@"),
        (f"{old}.self_attn.in_proj_@", f"{new}.self_attn.{{q,k,v}}_proj.@"),
        (f"{old}.self_attn.out_proj.@", f"{new}.self_attn.{output}.@"),
        (f"{old}.linear1.@", f"{new}.{feed_forward}fc1.@"),
        (f"{old}.linear2.@", f"{new}.{feed_forward}fc2.@"),
        (f"{old}.norm1.@", f"{new}.self_attn_layer_norm.@"),
        (f"{old}.norm2.@", f"{new}.final_layer_norm.@"),
    )


def cross_attention(output: str = "o_proj") -> Table:
    old, new = "transformer.decoder.layers.#.multihead_attn", "model.decoder.layers.#.encoder_attn"
    return ((f"{old}.in_proj_@", f"{new}.{{q,k,v}}_proj.@"), (f"{old}.out_proj.@", f"{new}.{output}.@"))


QUERIES = ("query_embed.weight", "model.query_position_embeddings.weight")
TABLE = (
    *RESNET,
    *encoder(),
    QUERIES,
    *decoder_layer("encoder_attn_layer_norm", "final_layer_norm"),
    *cross_attention(),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    ("class_embed.@", "class_labels_classifier.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)


def has_encoder(keys: set[str]) -> bool:
    """Whether keys are those of a DETR or of one of its successors with the same encoder."""
    return {"transformer.encoder.layers.0.self_attn.in_proj_weight", "class_embed.weight", "input_proj.weight"} <= keys


PRE_NORM = "transformer.encoder.norm.weight"  # of a DETR that normalises before each layer
CONDITIONAL = "transformer.decoder.layers.0.sa_qcontent_proj.weight"  # of Conditional DETR and DAB-DETR


def recognise(keys: set[str]) -> str | None:
    others = {PRE_NORM, CONDITIONAL}
    return "detr" if has_encoder(keys) and QUERIES[0] in keys and not others & keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    """transformers config fields, and what they were read from."""
    assumed.need("DETR", pre_norm=False)
    found = transformer(shapes, assumed, variant, report, QUERIES[0])
    return {**found, "num_labels": found["num_labels"] - 1, "activation_function": activation(assumed)}


def dilated(variant: str, assumed: Assumed, report: LoadReport, *, told: bool = False) -> bool:
    """Whether the last stage of the backbone keeps its stride, in the models called DC5. told: the keys tell that it does not."""
    found = variant.endswith("-dc5") or bool(assumed.args.get("dilation"))
    if not found and not told and "dilation" not in assumed.args:
        report.notes.append(f"stride 32 assumed: a DC5 file has the same keys and needs `family={variant}-dc5`")
    return found


def activation(assumed: Assumed) -> str:
    return assumed.choice("activation", "relu", ACTIVATIONS)


def transformer(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport, queries: str) -> dict[str, Any]:
    """Config fields of DETR and of its successors with the same encoder. queries: key of their embedding. "num_labels" is the number of
    the head's columns."""
    backbone = resnet(shapes, "backbone.0.body.")
    decoder = "transformer.decoder.layers."
    width = shapes.size("input_proj.weight")
    heads = assumed.number("heads", HEADS, "nheads", divides=width)
    return {
        "backbone_config": {**backbone, "out_features": ["stage4"]},
        "num_labels": shapes.size("class_embed.weight"),
        "num_queries": shapes.size(queries),
        "d_model": width,
        "encoder_layers": shapes.count("transformer.encoder.layers.#."),
        "decoder_layers": shapes.count(f"{decoder}#."),
        "encoder_ffn_dim": shapes.size("transformer.encoder.layers.0.linear1.weight"),
        "decoder_ffn_dim": shapes.size(f"{decoder}0.linear1.weight"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "dilation": dilated(variant, assumed, report),
    }


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
