"""Sizes of a DINO or Co-DINO from the shapes of a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import isqrt
from typing import TYPE_CHECKING

from ...errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

    from ..arch.dino import DinoConfig

HEADS = 8  # of every published DINO and Co-DINO; no tensor's shape tells it


def infer_config(state: Mapping[str, Tensor], layout: str) -> DinoConfig:
    """Sizes of the model from the shapes of its tensors.

    Raises:
        SourceError: a tensor that tells a size is missing, or sizes do not fit together.
    """
    from ..arch.dino import DinoConfig

    names = {
        "dino": (
            "transformer.tgt_embed.weight",
            "transformer.level_embed",
            "transformer.enc_out_class_embed.weight",
        ),
        "dino-mmdet": ("query_embedding.weight", "level_embed", "bbox_head.cls_branches.0.weight"),
        "co_dino": (
            "query_head.transformer.query_embed.weight",
            "query_head.transformer.level_embeds",
            "query_head.cls_branches.0.weight",
        ),
    }[layout]
    queries, dim = _shape(state, names[0], 2)
    levels, _ = _shape(state, names[1], 2)
    classes, _ = _shape(state, names[2], 2)
    prefix = {"dino": "transformer.", "dino-mmdet": "", "co_dino": "query_head.transformer."}[layout]
    encoder = f"{prefix}encoder.layers.0."
    attention = f"{encoder}attentions.0." if layout == "co_dino" else f"{encoder}self_attn."
    ffn = {"dino": "linear1", "dino-mmdet": "ffn.layers.0.0", "co_dino": "ffns.0.layers.0.0"}[layout]
    rows, _ = _shape(state, f"{attention}attention_weights.weight", 2)
    if rows % (HEADS * levels):
        raise SourceError(
            f"'{attention}attention_weights.weight' has {rows} rows, which are no multiple of {HEADS} heads times "
            f"{levels} levels; detrt knows DINO with {HEADS} heads"
        )
    # The neck's 1x1 convolutions tell which stages of the backbone are used.
    if layout == "co_dino" and "backbone.pos_embed" in state:
        projections: Iterable[str] = ()
    elif layout == "dino":
        projections = (f"input_proj.{i}.0.weight" for i in range(levels))
    else:
        projections = (f"neck.convs.{i}.conv.weight" for i in range(levels))
    inputs = [tuple(state[key].shape) for key in projections if key in state]
    channels = [shape[1] for shape in inputs if len(shape) == 4 and shape[2] == 1]
    backbone = _backbone(state, channels)
    return DinoConfig(
        classes=classes,
        queries=queries,
        levels=levels,
        dim=dim,
        ffn=_shape(state, f"{encoder}{ffn}.weight", 2)[0],
        encoder_layers=_count(state, rf"{re.escape(prefix)}encoder\.layers\.(\d+)\."),
        decoder_layers=_count(state, rf"{re.escape(prefix)}decoder\.layers\.(\d+)\."),
        points=rows // (HEADS * levels),
        conv_bias=layout == "dino",
        head_eps=1e-5 if layout == "dino-mmdet" else 1e-3,
        **backbone,  # type: ignore[arg-type]
    )


def _backbone(state: Mapping[str, Tensor], channels: list[int]) -> dict[str, object]:
    """The part of `DinoConfig` that describes the backbone."""
    if "backbone.pos_embed" in state:
        return _vit(state)
    for stem in ("backbone.conv1.weight", "backbone.0.body.conv1.weight"):
        if stem in state:
            width = _shape(state, stem, 4)[0]
            root = re.escape(stem.removesuffix("conv1.weight"))
            depths = tuple(_count(state, rf"{root}layer{i}\.(\d+)\.conv3\.") for i in (1, 2, 3, 4))
            return {
                "backbone": "resnet",
                "width": width,
                "depths": depths,
                "out_stages": _stages(channels, 4 * width),
            }
    patch = next((k for k in state if re.fullmatch(r"backbone\.(?:0\.)?patch_embed\.proj(?:ection)?\.weight", k)), None)
    if patch is None:
        raise SourceError(
            "the checkpoint has no ResNet stem ('backbone.conv1.weight') and no Swin patch embedding "
            "('backbone.patch_embed.proj.weight'); the backbone is missing or of another kind"
        )
    width = _shape(state, patch, 4)[0]
    root = patch.split("patch_embed")[0]
    part = "stages" if patch.endswith("projection.weight") else "layers"
    stages = re.escape(f"{root}{part}.")
    depths = tuple(_count(state, rf"{stages}{i}\.blocks\.(\d+)\.") for i in range(4))
    inside = "attn.w_msa" if part == "stages" else "attn"
    tables = [_shape(state, f"{root}{part}.{i}.blocks.0.{inside}.relative_position_bias_table", 2) for i in range(4)]
    side = isqrt(tables[0][0])
    if side * side != tables[0][0] or side % 2 == 0:
        raise SourceError(f"a relative position table of {tables[0][0]} rows belongs to no square window")
    return {
        "backbone": "swin",
        "width": width,
        "depths": depths,
        "heads": tuple(table[1] for table in tables),
        "window": (side + 1) // 2,
        "out_stages": _stages(channels, width),
    }


def _vit(state: Mapping[str, Tensor]) -> dict[str, object]:
    """ViT: a block with windows has a table of rotary positions as large as a window."""
    _, positions, width = _shape(state, "backbone.pos_embed", 3)
    tokens, head_dim = _shape(state, "backbone.rope_win.freqs_cos", 2)
    window, side = isqrt(tokens), isqrt(positions - 1)
    if window * window != tokens or side * side != positions - 1 or width % head_dim or head_dim % 4:
        raise SourceError(
            f"a ViT with {positions} positions, a table of {tokens} x {head_dim} rotary positions and {width} channels "
            "does not fit together; expected 1 + a square, a square, and a head that divides the channels"
        )
    depth = _count(state, r"backbone\.blocks\.(\d+)\.")
    tables = {i: state.get(f"backbone.blocks.{i}.attn.rope.freqs_cos") for i in range(depth)}
    return {
        "backbone": "vit",
        "width": width,
        "depths": (depth,),
        "heads": (width // head_dim,),
        "window": window,
        "windowed": tuple(i for i, table in tables.items() if table is not None and table.shape[0] == tokens),
        "hidden": _shape(state, "backbone.blocks.0.mlp.w1.weight", 2)[0],
        "patch": _shape(state, "backbone.patch_embed.proj.weight", 4)[2],
        "positions": positions,
        "out_stages": (0,),
    }


def _stages(channels: list[int], first: int) -> tuple[int, ...]:
    """Stages whose channels (`first`, doubled from stage to stage) the neck reads."""
    known = [first * 2**i for i in range(4)]
    wrong = [c for c in channels if c not in known]
    if wrong or not channels:
        raise SourceError(f"the neck reads maps of {channels} channels, but the backbone's stages have {known}")
    return tuple(known.index(c) for c in channels)


def _shape(state: Mapping[str, Tensor], key: str, rank: int) -> tuple[int, ...]:
    if key not in state:
        raise SourceError(f"the checkpoint lacks '{key}', which tells the size of the model; it is incomplete")
    shape = tuple(state[key].shape)
    if len(shape) != rank:
        raise SourceError(f"'{key}' has shape {shape}; it must have {rank} axes")
    return shape


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """How many numbered parts match, 1 + the largest number."""
    compiled = re.compile(pattern)
    found = [int(match[1]) for match in map(compiled.match, state) if match]
    if not found:
        raise SourceError(f"the checkpoint has no keys like '{pattern}'; it is incomplete or of another model")
    return 1 + max(found)
