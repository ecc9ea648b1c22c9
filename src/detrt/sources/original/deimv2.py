"""Intellindust-AI-Lab/DEIMv2 with HGNetV2 backbones (Atto, Femto, Pico, N and the larger B-sizes).

The module is `detrt.models.deimv2`, which has the authors' decoder; transformers' own class does not.
"""

from __future__ import annotations

from typing import Any

from ...errors import SourceError
from .d_fine import DECODER, ENCODER, block_table, hgnet_table, refinement
from .names import LoadReport
from .rt_detr import PROJECTIONS, hybrid
from .shapes import Shapes, hgnet, levels_of

VARIANTS = ("deimv2",)
# Width of the light encoder -> queries of the published model; no tensor has the number.
LITE_QUERIES = {64: 100, 96: 150, 112: 200}

_BLOCK = (
    ("cv1", "conv1"),
    ("cv2.0", "csp_rep1"),
    ("cv2.1", "csp_rep1.conv2"),
    ("cv3.0", "csp_rep2"),
    ("cv3.1", "csp_rep2.conv2"),
    ("cv4", "conv2"),
)

TABLE = (
    *hgnet_table("model.conv_encoder.model"),
    # The light encoder projects its inputs itself; the table is completed in `table`.
    *ENCODER,
    ("encoder.down_sample1.1.@", "model.encoder.down_conv1.conv.@"),
    ("encoder.down_sample1.2.@", "model.encoder.down_conv1.norm.@"),
    ("encoder.down_sample2.1.@", "model.encoder.down_conv2.conv.@"),
    ("encoder.down_sample2.2.@", "model.encoder.down_conv2.norm.@"),
    ("encoder.bi_fusion.cv.**", "model.encoder.bi_fusion_conv.**"),
    *(
        line
        for name in ("fpn_block", "pan_block", "fpn_blocks.#", "pan_blocks.#")
        for line in block_table(name, _BLOCK)
    ),
    *(line for line in PROJECTIONS if line[0].startswith("decoder.")),
    *DECODER,
    ("decoder.decoder.layers.#.gateway.norm.scale", "model.decoder.layers.#.gateway.norm.weight"),
    ("decoder.decoder.layers.#.swish_ffn.w12.@", "model.decoder.layers.#.mlp.{gate,up}_proj.@"),
    ("decoder.decoder.layers.#.swish_ffn.w3.@", "model.decoder.layers.#.mlp.down_proj.@"),
    ("decoder.decoder.layers.#.norm1.scale", "model.decoder.layers.#.self_attn_layer_norm.weight"),
    ("decoder.decoder.layers.#.norm2.scale", "model.decoder.layers.#.encoder_attn_layer_norm.weight"),
    ("decoder.decoder.layers.#.norm3.scale", "model.decoder.layers.#.final_layer_norm.weight"),
)
LITE = (("encoder.input_proj.**", "model.encoder.input_proj.**"),)
HYBRID = (("encoder.input_proj.**", "model.conv_encoder.encoder_input_proj.**"),)
TRAINING_ONLY = {
    "decoder.anchors": "a table for one input size, computed anew",
    "decoder.valid_mask": "a table for one input size, computed anew",
    "decoder.up": "the same number as decoder.decoder.up",
    "decoder.reg_scale": "the same number as decoder.decoder.reg_scale",
    "decoder.decoder.project": "computed from up and reg_scale",
}


def recognise(keys: set[str]) -> bool:
    return "decoder.decoder.layers.0.swish_ffn.w12.weight" in keys


def is_lite(keys: Any) -> bool:
    return "encoder.bi_fusion.cv.conv.weight" in keys


def table(shapes: Shapes) -> tuple[tuple[str, str], ...]:
    return (*TABLE, *(LITE if is_lite(shapes) else HYBRID))


def settings(shapes: Shapes, args: dict[str, Any], variant: str, report: LoadReport) -> dict[str, Any]:
    if shapes.any(r"^backbone\.(dinov3|sta)\."):
        raise SourceError(
            f"'{shapes.ref}' is a DEIMv2 with a DINOv3 backbone (S, M, L or X), which detrt does not read yet; it reads the "
            "HGNetV2 models (Atto, Femto, Pico, N)"
        )
    lite = is_lite(shapes)
    width = shapes.size("decoder.enc_score_head.weight", 1)
    if lite and width not in LITE_QUERIES:
        report.notes.append(f"no published light model is {width} wide")
    found = {**hybrid(shapes, report, LITE_QUERIES.get(width, 300) if lite else 300), **refinement(shapes)}
    neck = found["encoder_hidden_dim"]
    levels = len(found["decoder_n_points"])
    block = "encoder.fpn_block" if lite else "encoder.fpn_blocks.0"
    backbone = hgnet(shapes)
    inputs = found["encoder_in_channels"]
    backbone["out_features"] = levels_of(backbone["hidden_sizes"], inputs, shapes.ref)
    strides = (
        [4 * 2 ** (len(backbone["hidden_sizes"]) - 1) // 2**i for i in range(levels)][::-1]
        if not lite
        else [16, 32]
    )
    found |= {
        "backbone_config": backbone,
        "encoder_type": "lite" if lite else "hybrid",
        "num_feature_levels": levels,
        "decoder_in_channels": [neck] * levels,
        "feat_strides": strides,
        "decoder_ffn_dim": shapes.size("decoder.decoder.layers.0.swish_ffn.w12.weight"),
        "decoder_activation_function": "silu",
        "decoder_attention_heads": 8,
        "use_gateway": "decoder.decoder.layers.0.gateway.gate.weight" in shapes,
        "encoder_has_trailing_conv": f"{block}.cv2.1.conv.weight" in shapes,
        # Its heads may be copies of one; their values are read one by one, which is the same function.
        "share_bbox_head": False,
        # The module rounds this down to the width that the tensor has.
        "hidden_expansion": shapes.size(f"{block}.cv2.0.conv1.conv.weight") / neck,
        "depth_mult": shapes.count(f"{block}.cv2.0.bottlenecks.#.") / 3,
    }
    side = trained_side(shapes, strides)
    if side:
        report.inferred["size"] = side
    return found


def trained_side(shapes: Shapes, strides: list[int]) -> int | None:
    """Side of the square input that the file's anchor table was made for."""
    if "decoder.anchors" not in shapes:
        return None
    count = shapes.size("decoder.anchors", 1)
    return next(
        (s for s in range(32, 4097, 32) if sum((s // stride) ** 2 for stride in strides) == count), None
    )
