"""Atten4Vis/LW-DETR: tiny to xlarge, with a plain ViT."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any

from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import ATTENDS_BY_MASK, BY_ONNX, Family, Format, RandomModel
from .deformable_detr import PROCESSOR
from .detr import decoder_layer
from .sizes import TINY_LW

if TYPE_CHECKING:
    from torch import nn

# Decoder, its queries and the heads; RF-DETR has the same.
DECODER = (
    *decoder_layer("cross_attn_layer_norm", "layer_norm"),
    ("transformer.decoder.layers.#.cross_attn.@.@", "model.decoder.layers.#.cross_attn.@.@"),
    ("transformer.decoder.norm.@", "model.decoder.layernorm.@"),
    ("transformer.decoder.ref_point_head.**", "model.decoder.ref_point_head.**"),
    ("transformer.enc_output.#.@", "model.enc_output.#.@"),
    ("transformer.enc_output_norm.#.@", "model.enc_output_norm.#.@"),
    ("transformer.enc_out_class_embed.**", "model.enc_out_class_embed.**"),
    ("transformer.enc_out_bbox_embed.**", "model.enc_out_bbox_embed.**"),
    ("refpoint_embed.weight", "model.reference_point_embed.weight"),
    ("query_feat.weight", "model.query_feat.weight"),
    ("class_embed.@", "class_embed.@"),
    ("bbox_embed.**", "bbox_embed.**"),
)


def projector_table(old: str, new: str) -> Table:
    """The layers that join the maps of a ViT, and their norm. old, new: prefixes of one scale."""
    return (
        *(
            (f"{old}.0.{inner}cv{n}.{theirs}.@", f"{new}.projector_layer.{ours}conv{n}.{word}.@")
            for inner, ours in (("", ""), ("m.#.", "bottlenecks.#."))
            for n in (1, 2)
            for theirs, word in (("conv", "conv"), ("bn", "norm"))
        ),
        (f"{old}.1.@", f"{new}.layer_norm.@"),
    )


# Channels of a head of self-attention and of cross-attention, of every published model.
SELF_HEAD, CROSS_HEAD = 32, 16
VIT_HEADS = 12
# Layers of the ViT -> those that attend in windows, and those that are read.
LAYERS = {6: ([0, 2, 4], [1, 3, 5]), 10: ([0, 1, 3, 6, 7, 9], [2, 4, 5, 9])}
_ENCODER, _VIT = "backbone.0.encoder", "model.backbone.backbone"
_OLD, _NEW = f"{_ENCODER}.blocks.#", f"{_VIT}.encoder.layer.#"
_STAGE, _SCALE = "backbone.0.projector.stages.#", "model.backbone.projector.scale_layers.#"
_SAMPLING = ("backbone.0.projector.stages_sampling.#.#.#", f"{_SCALE}.sampling_layers.#.layers.#")
TABLE = (
    (f"{_ENCODER}.pos_embed", f"{_VIT}.embeddings.position_embeddings"),
    (f"{_ENCODER}.patch_embed.proj.@", f"{_VIT}.embeddings.projection.@"),
    (f"{_OLD}.norm1.@", f"{_NEW}.layernorm_before.@"),
    (f"{_OLD}.norm2.@", f"{_NEW}.layernorm_after.@"),
    (f"{_OLD}.attn.qkv.weight", f"{_NEW}.attention.{{q,k,v}}_proj.weight"),
    (f"{_OLD}.attn.q_bias", f"{_NEW}.attention.q_proj.bias"),
    (f"{_OLD}.attn.v_bias", f"{_NEW}.attention.v_proj.bias"),
    (f"{_OLD}.attn.proj.@", f"{_NEW}.attention.o_proj.@"),
    (f"{_OLD}.gamma_#", f"{_NEW}.gamma_#"),
    (f"{_OLD}.mlp.@.@", f"{_NEW}.intermediate.@.@"),
    (f"{_SAMPLING[0]}.conv.@", f"{_SAMPLING[1]}.conv.@"),
    (f"{_SAMPLING[0]}.bn.@", f"{_SAMPLING[1]}.norm.@"),
    (f"{_SAMPLING[0]}.@", f"{_SAMPLING[1]}.@"),
    *projector_table(_STAGE, _SCALE),
    *DECODER,
)


def recognise(keys: set[str]) -> str | None:
    marks = {f"{_ENCODER}.blocks.0.gamma_1", f"{_ENCODER}.pos_embed", "refpoint_embed.weight", "query_feat.weight"}
    return "lw_detr" if marks <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    assumed.need("LW-DETR", two_stage=True, bbox_reparam=True, lite_refpoint_refine=True, decoder_norm="LN")
    width, hidden = shapes.size(f"{_ENCODER}.pos_embed", 2), shapes.size("query_feat.weight", 1)
    patch = shapes.size(f"{_ENCODER}.patch_embed.proj.weight", 2)
    layers = shapes.count(f"{_ENCODER}.blocks.#.")
    windows, taken = LAYERS.get(layers, ([], [layers - 1]))
    windows = assumed.numbers("window_layers", windows, "window_block_indexes")
    taken = [index % layers for index in assumed.numbers("levels", taken, "out_feature_indexes")]
    groups = shapes.count("transformer.enc_output.#.")
    queries = shapes.size("query_feat.weight") // max(groups, 1)
    cross_heads = assumed.number("cross_heads", max(1, hidden // CROSS_HEAD), "ca_nheads", divides=hidden)
    detections = assumed.number("detections", queries, "num_select")
    scales = _scales(shapes)
    return {
        "backbone_config": {
            "model_type": "lw_detr_vit",
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": assumed.number("vit_heads", VIT_HEADS, divides=width),
            "mlp_ratio": shapes.size(f"{_ENCODER}.blocks.0.mlp.fc1.weight") // width,
            "pretrain_image_size": isqrt(shapes.size(f"{_ENCODER}.pos_embed", 1) - 1) * patch,
            "patch_size": patch,
            "num_channels": shapes.size(f"{_ENCODER}.patch_embed.proj.weight", 1),
            "window_block_indices": windows,
            "out_indices": [index + 1 for index in sorted(taken)],
        },
        "projector_scale_factors": scales,
        "num_labels": shapes.size("class_embed.weight"),
        "num_queries": queries,
        "group_detr": groups,
        "d_model": hidden,
        "decoder_layers": shapes.count("transformer.decoder.layers.#."),
        "decoder_ffn_dim": shapes.size("transformer.decoder.layers.0.linear1.weight"),
        "decoder_self_attention_heads": assumed.number("self_heads", max(1, hidden // SELF_HEAD), "sa_nheads", divides=hidden),
        "decoder_cross_attention_heads": cross_heads,
        "decoder_n_points": shapes.points(
            "transformer.decoder.layers.0.cross_attn.attention_weights.weight", cross_heads, len(scales)
        ),
        "family": {"max_detections": detections},
    }


def _scales(shapes: Shapes) -> list[float]:
    """How much larger each map of the projector is than those of the ViT, by the convolutions in front of it."""
    scales = []
    for stage in range(shapes.count("backbone.0.projector.stages.#.")):
        first = f"backbone.0.projector.stages_sampling.{stage}.0."
        up, narrowed = f"{first}0.weight" in shapes, f"{first}1.weight" in shapes
        scales.append(2.0 if up or narrowed else 0.5 if f"{first}0.conv.weight" in shapes else 1.0)
    return scales


def finish(module: nn.Module) -> None:
    """These weights are trained with the authors' selection of queries."""
    from ..layers.lw_detr import take_authors_selection

    take_authors_selection(module)


FAMILIES = (
    Family(
        name="lw_detr",
        model_type="lw_detr",
        title="LW-DETR",
        activation="sigmoid",
        select="topk",
        max_detections=100,
        example="AnnaZhang/lwdetr_small_60e_coco",
        licence="Apache-2.0",
        relatives=(
            ("backbone.0.encoder.res_layers.**", f"an LW-DETR with a ResNet; {BY_ONNX}"),
            ("backbone.0.projector.stages_sampling.#.#.3.weight", f"an LW-DETR with a map of stride 4; {BY_ONNX}"),
        ),
        no_mask=ATTENDS_BY_MASK,
        processor=PROCESSOR,
        multiple_of="windows of image",
        deformable=True,
        rewrites={
            "msda": {"MultiScaleDeformableAttention.forward": ("c21b48c80c88a553",)},
            "symbolic_shapes": {
                "LwDetrModel.forward": (
                    "6842be7061f6eb63",
                    "f56dbcaf6500fb1e",
                    "18f4df54eb572f2a",
                    "8de02514b5f8b87a",
                    "e838e7ef7efeb7ed",
                ),
                "LwDetrModel.gen_encoder_output_proposals": (
                    "3bdc32ee4500d2ff",
                    "b47d9e3449d032de",
                    "3c241682d72698d7",
                    "525e003946ce095e",
                ),
            },
        },
        formats=(Format("lw_detr", ("Atten4Vis LW-DETR",), recognise, settings, TABLE, finish=finish),),
        random=(
            RandomModel("lw_detr", {"projector_scale_factors": [1.0]}, TINY_LW),
            RandomModel("lw_detr-two-scales", {"projector_scale_factors": [2.0, 0.5]}, TINY_LW),
        ),
    ),
)
