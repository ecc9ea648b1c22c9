"""Name maps from the original DINO and Co-DINO checkpoints to `detrt.models.arch`.

Three layouts hold the same network: IDEA-Research's DINO ("dino"), mmdetection 3's DINO ("dino-mmdet")
and Co-DETR's Co-DINO ("co_dino", Sense-X and mmdetection alike). Backbones come in torchvision's names
(ResNet), the Swin authors' and mmdetection's, or Co-DETR's (ViT), and are told apart by their keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

# Transforms of one stored tensor, named in a rule's third part.
SPLIT_QKV = "split_qkv"  # in_proj of nn.MultiheadAttention -> q_proj, k_proj, v_proj
UNFOLD_ORDER = "unfold_order"  # mmdetection's patch merging order -> the Swin authors' order

_LEAF = r"(weight|bias)"
_MSDA = r"(sampling_offsets|attention_weights|value_proj|output_proj)\.(weight|bias)"

Rule = tuple[str, str, str]  # pattern of the whole key, target ("" = see the kind), transform or kind

TRAINING = "training only"
DERIVED = "derived"
ALIAS = "alias"


def _transformer(prefix: str, encoder: str, decoder: str) -> list[Rule]:
    """Rules for mmdetection's transformer layers; encoder and decoder name their attentions differently."""
    self_attn, cross_attn = decoder.split(",")
    ffn = "ffns\\.0" if "attentions" in encoder else "ffn"
    rules: list[Rule] = [(rf"{prefix}encoder\.layers\.(\d+)\.{encoder}\.{_MSDA}", r"encoder.layers.\1.self_attn.\2.\3", "")]
    for part in ("encoder", "decoder"):
        rules += [
            (
                rf"{prefix}{part}\.layers\.(\d+)\.{ffn}\.layers\.0\.0\.{_LEAF}",
                rf"{part}.layers.\1.linear1.\2",
                "",
            ),
            (
                rf"{prefix}{part}\.layers\.(\d+)\.{ffn}\.layers\.1\.{_LEAF}",
                rf"{part}.layers.\1.linear2.\2",
                "",
            ),
        ]
        for index in range(2 if part == "encoder" else 3):
            rules.append(
                (
                    rf"{prefix}{part}\.layers\.(\d+)\.norms\.{index}\.{_LEAF}",
                    rf"{part}.layers.\1.norm{index + 1}.\2",
                    "",
                )
            )
    rules += [
        (
            rf"{prefix}decoder\.layers\.(\d+)\.{self_attn}\.attn\.in_proj_{_LEAF}",
            r"decoder.layers.\1.self_attn.{}_proj.\2",
            SPLIT_QKV,
        ),
        (
            rf"{prefix}decoder\.layers\.(\d+)\.{self_attn}\.attn\.out_proj\.{_LEAF}",
            r"decoder.layers.\1.self_attn.out_proj.\2",
            "",
        ),
        (
            rf"{prefix}decoder\.layers\.(\d+)\.{cross_attn}\.{_MSDA}",
            r"decoder.layers.\1.cross_attn.\2.\3",
            "",
        ),
        (rf"{prefix}decoder\.norm\.{_LEAF}", r"decoder.norm.\1", ""),
    ]
    return rules


def _branches(prefix: str) -> list[Rule]:
    rules: list[Rule] = [(rf"{prefix}cls_branches\.(\d+)\.{_LEAF}", r"class_heads.\1.\2", "")]
    # Every second module is a ReLU.
    return rules + [(rf"{prefix}reg_branches\.(\d+)\.{2 * i}\.{_LEAF}", rf"box_heads.\1.layers.{i}.\2", "") for i in range(3)]


_MMDET_NECK: list[Rule] = [
    (rf"neck\.(convs|extra_convs)\.(\d+)\.conv\.{_LEAF}", r"neck.\1.\2.conv.\3", ""),
    (rf"neck\.(convs|extra_convs)\.(\d+)\.gn\.{_LEAF}", r"neck.\1.\2.norm.\3", ""),
    (rf"neck\.(p[2-6]\.\d+)\.{_LEAF}", r"neck.\1.\2", ""),
]

_DINO: list[Rule] = [
    (r"transformer\.level_embed", "level_embed", ""),
    (r"transformer\.tgt_embed\.weight", "query_embed", ""),
    (rf"transformer\.(enc_output|enc_output_norm)\.{_LEAF}", r"\1.\2", ""),
    (rf"transformer\.encoder\.layers\.(\d+)\.self_attn\.{_MSDA}", r"encoder.layers.\1.self_attn.\2.\3", ""),
    (
        rf"transformer\.encoder\.layers\.(\d+)\.(norm1|norm2|linear1|linear2)\.{_LEAF}",
        r"encoder.layers.\1.\2.\3",
        "",
    ),
    (rf"transformer\.decoder\.layers\.(\d+)\.cross_attn\.{_MSDA}", r"decoder.layers.\1.cross_attn.\2.\3", ""),
    (
        rf"transformer\.decoder\.layers\.(\d+)\.self_attn\.in_proj_{_LEAF}",
        r"decoder.layers.\1.self_attn.{}_proj.\2",
        SPLIT_QKV,
    ),
    (
        rf"transformer\.decoder\.layers\.(\d+)\.self_attn\.out_proj\.{_LEAF}",
        r"decoder.layers.\1.self_attn.out_proj.\2",
        "",
    ),
    # The original counts the norm of the cross-attention first, although self-attention runs first.
    (rf"transformer\.decoder\.layers\.(\d+)\.norm2\.{_LEAF}", r"decoder.layers.\1.norm1.\2", ""),
    (rf"transformer\.decoder\.layers\.(\d+)\.norm1\.{_LEAF}", r"decoder.layers.\1.norm2.\2", ""),
    (
        rf"transformer\.decoder\.layers\.(\d+)\.(norm3|linear1|linear2)\.{_LEAF}",
        r"decoder.layers.\1.\2.\3",
        "",
    ),
    (rf"transformer\.decoder\.norm\.{_LEAF}", r"decoder.norm.\1", ""),
    (
        rf"transformer\.decoder\.ref_point_head\.layers\.(\d)\.{_LEAF}",
        r"decoder.ref_point_head.layers.\1.\2",
        "",
    ),
    (rf"class_embed\.(\d+)\.{_LEAF}", r"class_heads.\1.\2", ""),
    (rf"bbox_embed\.(\d+)\.layers\.(\d)\.{_LEAF}", r"box_heads.\1.layers.\2.\3", ""),
    (rf"transformer\.enc_out_class_embed\.{_LEAF}", r"class_heads.LAST.\1", ""),
    (rf"transformer\.enc_out_bbox_embed\.layers\.(\d)\.{_LEAF}", r"box_heads.LAST.layers.\1.\2", ""),
    (rf"input_proj\.(\d+)\.0\.{_LEAF}", r"neck.PROJ\1.conv.\2", ""),
    (rf"input_proj\.(\d+)\.1\.{_LEAF}", r"neck.PROJ\1.norm.\2", ""),
    (r"transformer\.decoder\.((?:class|bbox)_embed\..+)", r"\1", ALIAS),
    (r"label_enc\.weight", "", TRAINING),
]

_DINO_MMDET: list[Rule] = [
    *_MMDET_NECK,
    (r"level_embed", "level_embed", ""),
    (r"query_embedding\.weight", "query_embed", ""),
    (rf"memory_trans_fc\.{_LEAF}", r"enc_output.\1", ""),
    (rf"memory_trans_norm\.{_LEAF}", r"enc_output_norm.\1", ""),
    *_transformer("", "self_attn", "self_attn,cross_attn"),
    (rf"decoder\.ref_point_head\.layers\.(\d)\.{_LEAF}", r"decoder.ref_point_head.layers.\1.\2", ""),
    *_branches(r"bbox_head\."),
    (r"dn_query_generator\.label_embedding\.weight", "", TRAINING),
]

_CO_DINO: list[Rule] = [
    *_MMDET_NECK,
    (r"query_head\.transformer\.level_embeds", "level_embed", ""),
    (r"query_head\.transformer\.query_embed\.weight", "query_embed", ""),
    (rf"query_head\.transformer\.(enc_output|enc_output_norm)\.{_LEAF}", r"\1.\2", ""),
    *_transformer(r"query_head\.transformer\.", r"attentions\.0", r"attentions\.0,attentions\.1"),
    (
        rf"query_head\.transformer\.decoder\.ref_point_head\.0\.{_LEAF}",
        r"decoder.ref_point_head.layers.0.\1",
        "",
    ),
    (
        rf"query_head\.transformer\.decoder\.ref_point_head\.2\.{_LEAF}",
        r"decoder.ref_point_head.layers.1.\1",
        "",
    ),
    *_branches(r"query_head\."),
    # The collaborative heads and what feeds them (Co-DETR, section 3.2 and 3.3).
    (
        r"query_head\.transformer\.(aux_pos_trans|aux_pos_trans_norm|pos_feats_trans|pos_feats_norm)\.\d+\.(weight|bias)",
        "",
        TRAINING,
    ),
    (r"query_head\.transformer\.head_pos_embed\.weight", "", TRAINING),
    (r"query_head\.downsample\.[01]\.(weight|bias)", "", TRAINING),
    (r"query_head\.(?:dn_generator\.)?label_embedding\.weight", "", TRAINING),
    (r"rpn_head\.(rpn_conv|rpn_cls|rpn_reg)\.(weight|bias)", "", TRAINING),
    (r"roi_head\.\d+\.bbox_head\.shared_convs\.\d+\.(conv|gn)\.(weight|bias)", "", TRAINING),
    (r"roi_head\.\d+\.bbox_head\.(shared_fcs\.\d+|fc_cls|fc_reg)\.(weight|bias)", "", TRAINING),
    (r"bbox_head\.\d+\.(cls_convs|reg_convs)\.\d+\.(conv|gn)\.(weight|bias)", "", TRAINING),
    (r"bbox_head\.\d+\.(atss_cls|atss_reg|atss_centerness)\.(weight|bias)", "", TRAINING),
    (r"bbox_head\.\d+\.scales\.\d+\.scale", "", TRAINING),
]

_BACKBONE = r"backbone\.(?:0\.)?(?:body\.)?"
_BLOCK = r"\.(\d+)\.blocks\.(\d+)\."
_BACKBONES: list[Rule] = [
    (rf"{_BACKBONE}.*num_batches_tracked", "", TRAINING),
    (
        rf"{_BACKBONE}((?:conv1|bn1|layer[1-4]\.\d+\.(?:conv[123]|bn[123]|downsample\.[01]))\.\w+)",
        r"backbone.\1",
        "",
    ),
    # Swin under its authors' names.
    (rf"{_BACKBONE}patch_embed\.(?:proj|projection)\.{_LEAF}", r"backbone.patch.\1", ""),
    (rf"{_BACKBONE}patch_embed\.norm\.{_LEAF}", r"backbone.patch_norm.\1", ""),
    (rf"{_BACKBONE}norm(\d)\.{_LEAF}", r"backbone.norms.\1.\2", ""),
    (
        rf"{_BACKBONE}layers{_BLOCK}(norm[12]|attn\.qkv|attn\.proj)\.{_LEAF}",
        r"backbone.stages.\1.blocks.\2.\3.\4",
        "",
    ),
    (rf"{_BACKBONE}layers{_BLOCK}mlp\.(fc[12])\.{_LEAF}", r"backbone.stages.\1.blocks.\2.\3.\4", ""),
    (
        rf"{_BACKBONE}layers\.(\d+)\.downsample\.(norm|reduction)\.{_LEAF}",
        r"backbone.stages.\1.downsample.\2.\3",
        "",
    ),
    # Swin under mmdetection's names.
    (rf"{_BACKBONE}stages{_BLOCK}(norm[12])\.{_LEAF}", r"backbone.stages.\1.blocks.\2.\3.\4", ""),
    (
        rf"{_BACKBONE}stages{_BLOCK}attn\.w_msa\.(qkv|proj)\.{_LEAF}",
        r"backbone.stages.\1.blocks.\2.attn.\3.\4",
        "",
    ),
    (rf"{_BACKBONE}stages{_BLOCK}ffn\.layers\.0\.0\.{_LEAF}", r"backbone.stages.\1.blocks.\2.fc1.\3", ""),
    (rf"{_BACKBONE}stages{_BLOCK}ffn\.layers\.1\.{_LEAF}", r"backbone.stages.\1.blocks.\2.fc2.\3", ""),
    (
        rf"{_BACKBONE}stages\.(\d+)\.downsample\.(norm|reduction)\.{_LEAF}",
        r"backbone.stages.\1.downsample.\2.\3",
        UNFOLD_ORDER,
    ),
    (
        rf"{_BACKBONE}(?:layers|stages){_BLOCK}attn\.(?:w_msa\.)?relative_position_bias_table",
        r"backbone.stages.\1.blocks.\2.attn.relative_position_bias_table",
        "",
    ),
    (
        rf"{_BACKBONE}(?:layers|stages){_BLOCK}attn\.(?:w_msa\.)?relative_position_index",
        r"backbone.stages.\1.blocks.\2.attn.relative_position_index",
        DERIVED,
    ),
]

# Co-DETR's ViT. Blocks share two tables of rotary positions, and the file has them again in every block.
_VIT: list[Rule] = [
    (r"backbone\.pos_embed", "backbone.position", ""),
    (rf"backbone\.out_norm\.{_LEAF}", r"backbone.out_norm.\1", ""),
    (
        rf"backbone\.blocks\.(\d+)\.(norm[12]|attn\.proj|mlp\.(?:w[123]|ffn_ln))\.{_LEAF}",
        r"backbone.blocks.\1.\2.\3",
        "",
    ),
    (r"backbone\.blocks\.(\d+)\.attn\.([qkv])_proj\.weight", r"backbone.blocks.\1.attn.\2_proj.weight", ""),
    (r"backbone\.blocks\.(\d+)\.attn\.([qv])_bias", r"backbone.blocks.\1.attn.\2_proj.bias", ""),
    (r"backbone\.(?:rope_win|rope_glb|blocks\.\d+\.attn\.rope)\.freqs_(cos|sin)", r"ROPE.\1", DERIVED),
]

RULES: dict[str, list[Rule]] = {
    "dino": [*_BACKBONES, *_DINO],
    "dino-mmdet": [*_BACKBONES, *_DINO_MMDET],
    "co_dino": [*_BACKBONES, *_VIT, *_CO_DINO],
}
_COMPILED = {name: [(re.compile(pattern), target, how) for pattern, target, how in rules] for name, rules in RULES.items()}

# Keys that only one layout has.
MARKS = {
    "dino": ("transformer.level_embed", "transformer.tgt_embed.weight"),
    "dino-mmdet": ("memory_trans_fc.weight", "query_embedding.weight"),
    "co_dino": ("query_head.transformer.level_embeds", "query_head.transformer.query_embed.weight"),
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor goes. kind: "" (it is used), or TRAINING, DERIVED or ALIAS."""

    target: str
    transform: str = ""
    kind: str = ""


def layout_of(keys: Iterable[str]) -> str | None:
    """Name of the layout by its marks, or None."""
    present = set(keys)
    return next((name for name, marks in MARKS.items() if all(mark in present for mark in marks)), None)


def place(key: str, layout: str, *, last_head: int, backbone_levels: int) -> Place | None:
    """Where a key of a layout goes; None for a key that the layout does not have.

    last_head: index of the encoder's prediction head. backbone_levels: levels that the backbone gives.
    """
    for pattern, target, how in _COMPILED[layout]:
        match = pattern.fullmatch(key)
        if match is None:
            continue
        if how == TRAINING:
            return Place("", kind=TRAINING)
        name = match.expand(target).replace("LAST", str(last_head))
        projection = re.search(r"PROJ(\d+)", name)
        if projection:
            index = int(projection[1])
            inside = f"convs.{index}" if index < backbone_levels else f"extra_convs.{index - backbone_levels}"
            name = name.replace(projection[0], inside)
        if how in (DERIVED, ALIAS):
            return Place(name, kind=how)
        return Place(name, transform=how)
    return None
