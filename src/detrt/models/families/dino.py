"""Original checkpoints of DINO and Co-DINO, in three layouts of the same network.

"dino": IDEA-Research/DINO. "dino-mmdet": the DINO of mmdetection 3. "co_dino": Co-DETR's Co-DINO, by Sense-X and
mmdetection alike. Backbones come under torchvision's names (ResNet), those of the Swin authors or of mmdetection
(Swin), or Co-DETR's (ViT). The module is detrt's own, `detrt.models.layers.dino`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ...spec import InputSpec
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import BY_ONNX, IMAGENET_MEAN, IMAGENET_STD, PLUGIN_IS_FASTER, SAMPLING_ENCODER, Family, Format, RandomModel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..layers.dino import DinoConfig

HEADS = 8  # of every published DINO and Co-DINO; no tensor's shape tells it
TEMPERATURE = 20  # of the position embedding
LSJ_SIDES = {"resnet": 1024, "swin": 1280, "vit": 1536}  # canvas of the Co-DINO LSJ configs
VIT_DETECTIONS = 1000  # `max_per_img` of the ViT configs

MAX_DETECTIONS = 300  # of every published DINO
# What detrt computes, of the settings of IDEA-Research/DINO that no tensor tells.
_COMPUTES: dict[str, object] = {
    "position_embedding": "sine",
    "transformer_activation": "relu",
    "dilation": False,
    "pre_norm": False,
    "two_stage_type": "standard",
    "two_stage_learn_wh": False,
    "two_stage_add_query_num": 0,
    "two_stage_pat_embed": 0,
    "decoder_sa_type": "sa",
    "decoder_module_seq": ["sa", "ca", "ffn"],
    "dec_layer_number": None,
    "num_patterns": 0,
    "use_deformable_box_attn": False,
    "add_pos_value": False,
    "add_channel_attention": False,
    "embed_init_tgt": True,
    "nms_iou_threshold": -1,
}

# Keys that only one layout has.
MARKS = {
    "dino": ("transformer.level_embed", "transformer.tgt_embed.weight"),
    "dino-mmdet": ("memory_trans_fc.weight", "query_embedding.weight"),
    "co_dino": ("query_head.transformer.level_embeds", "query_head.transformer.query_embed.weight"),
}
RELATIVES = (
    ("query_head.transformer.pos_trans.weight", "a Co-Deformable-DETR checkpoint; detrt reads Co-DINO"),
    ("mask_head.**", "a Co-DINO instance segmentation checkpoint; detrt reads detectors"),
    *(
        (
            key,
            "a DINO with a ViT backbone of another kind than Co-DETR's (EVA-02 blocks with rotary positions); detrt reads "
            "that one, ResNet and Swin",
        )
        for key in (
            "backbone.net.**",
            "backbone.blocks.#.attn.qkv",
            "backbone.blocks.#.attn.qkv.@",
            "backbone.blocks.#.attn.rel_pos_@",
        )
    ),
    ("backbone.downsample_layers.**", "a DINO with a ConvNeXt backbone; detrt reads ResNet and Swin"),
    ("backbone.0.downsample_layers.**", "a DINO with a ConvNeXt backbone; detrt reads ResNet and Swin"),
    *(
        (key, "a quantised checkpoint; give the float one")
        for key in ("**.zero_point", "**._packed_params", "**._packed_params.**", "**.weight_fake_quant.**")
    ),
)

_COLLABORATIVE = "a collaborative head or what feeds one, for training (Co-DETR, sections 3.2 and 3.3)"
_DENOISING = "labels of the denoising queries"
_SAME_HEADS = "the same as the heads outside of the decoder"
_COMPUTED = "a table, computed by the module"
_ROPE = ("backbone.rope_win.freqs_@", "backbone.rope_glb.freqs_@", "backbone.blocks.#.attn.rope.freqs_@")
_INDEX = "attn.relative_position_index"
_BACKBONE_SKIPPED = dict.fromkeys(
    (
        *_ROPE,
        f"backbone.layers.#.blocks.#.{_INDEX}",
        f"backbone.0.layers.#.blocks.#.{_INDEX}",
        "backbone.stages.#.blocks.#.attn.w_msa.relative_position_index",
    ),
    _COMPUTED,
)
_SKIPPED = {
    "dino": {
        "transformer.decoder.class_embed.**": _SAME_HEADS,
        "transformer.decoder.bbox_embed.**": _SAME_HEADS,
        "label_enc.weight": _DENOISING,
    },
    "dino-mmdet": {"dn_query_generator.label_embedding.weight": _DENOISING},
    "co_dino": {
        **dict.fromkeys(
            (
                *(
                    f"query_head.transformer.{name}.#.@"
                    for name in ("aux_pos_trans", "aux_pos_trans_norm", "pos_feats_trans", "pos_feats_norm")
                ),
                "query_head.transformer.head_pos_embed.weight",
                "query_head.downsample.#.@",
                "rpn_head.@.@",
                "roi_head.#.bbox_head.**",
                "bbox_head.#.**",
            ),
            _COLLABORATIVE,
        ),
        "query_head.label_embedding.weight": _DENOISING,
        "query_head.dn_generator.label_embedding.weight": _DENOISING,
    },
}

_VIT: Table = (
    ("backbone.patch_embed.proj.@", "backbone.patch.@"),
    ("backbone.pos_embed", "backbone.position"),
    ("backbone.out_norm.@", "backbone.out_norm.@"),
    ("backbone.blocks.#.norm#.@", "backbone.blocks.#.norm#.@"),
    ("backbone.blocks.#.mlp.@.@", "backbone.blocks.#.mlp.@.@"),
    ("backbone.blocks.#.attn.@.@", "backbone.blocks.#.attn.@.@"),
    ("backbone.blocks.#.attn.q_bias", "backbone.blocks.#.attn.q_proj.bias"),
    ("backbone.blocks.#.attn.v_bias", "backbone.blocks.#.attn.v_proj.bias"),
)
_MMDET_NECK: Table = (
    *(
        (f"neck.{part}.#.{old}.@", f"neck.{part}.#.{new}.@")
        for part in ("convs", "extra_convs")
        for old, new in (("conv", "conv"), ("gn", "norm"))
    ),
    ("neck.p#.#.@", "neck.p#.#.@"),
)


def layout_of(keys: set[str]) -> str | None:
    """The layout that the keys belong to, one of `MARKS`; None for other models."""
    found = next((name for name, marks in MARKS.items() if keys.issuperset(marks)), None)
    if found is None and any(key.startswith("query_head.transformer.") for key in keys):
        return "co_dino"  # a Co-DETR of another kind, which `RELATIVES` names
    return found


def recognise(keys: set[str]) -> str | None:
    layout = layout_of(keys)
    return "dino" if layout == "dino-mmdet" else layout


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    """Fields of `DinoConfig`; "attend_padding" is told by the file's name or its tables."""
    layout = layout_of(set(shapes.state))
    if layout is None or (layout == "co_dino") != (variant == "co_dino"):
        title = {"dino": "DINO", "co_dino": "Co-DINO"}[variant]
        raise SourceError(
            f"'{shapes.ref}' lacks keys that tell a {title} checkpoint (such as {' and '.join(MARKS[variant])}); the file is "
            "incomplete or of another family: leave `family` out"
        )
    report.format = {"dino": "IDEA-Research DINO", "dino-mmdet": "mmdetection DINO"}.get(layout, report.format)
    prefix = {"dino": "transformer.", "dino-mmdet": "", "co_dino": "query_head.transformer."}[layout]
    queries, embed, scores = {
        "dino": ("transformer.tgt_embed.weight", "transformer.level_embed", "transformer.enc_out_class_embed.weight"),
        "dino-mmdet": ("query_embedding.weight", "level_embed", "bbox_head.cls_branches.0.weight"),
        "co_dino": (f"{prefix}query_embed.weight", f"{prefix}level_embeds", "query_head.cls_branches.0.weight"),
    }[layout]
    levels = shapes.size(embed)
    encoder = f"{prefix}encoder.layers.0."
    attention = f"{encoder}{'attentions.0' if layout == 'co_dino' else 'self_attn'}.attention_weights.weight"
    backbone = _backbone(shapes, _neck_inputs(shapes, layout, levels))
    heads = assumed.number("heads", HEADS, "nheads")
    assumed.need("DINO", **_COMPUTES)
    row = family_facts(str(backbone["backbone"]))
    if layout == "dino":
        row["max_detections"] = assumed.number("detections", MAX_DETECTIONS, "num_select")
    hidden = {"dino": "linear1", "dino-mmdet": "ffn.layers.0.0", "co_dino": "ffns.0.layers.0.0"}[layout]
    return {
        "num_labels": shapes.size(scores),
        "num_queries": shapes.size(queries),
        "levels": levels,
        "dim": shapes.size(queries, 1),
        "ffn": shapes.size(f"{encoder}{hidden}.weight"),
        "encoder_layers": shapes.count(f"{prefix}encoder.layers.#."),
        "decoder_layers": shapes.count(f"{prefix}decoder.layers.#."),
        "points": shapes.points(attention, heads, levels),
        "attention_heads": heads,
        "temperature": assumed.temperature("DINO", TEMPERATURE),
        "conv_bias": layout == "dino",
        "head_eps": 1e-5 if layout == "dino-mmdet" else 1e-3,
        **backbone,
        "attend_padding": layout == "co_dino" and _attends_padding(shapes, str(backbone["backbone"]), report),
        "family": row,
    }


def _attends_padding(shapes: Shapes, backbone: str, report: LoadReport) -> bool:
    """Whether a Co-DINO was trained with large-scale jittering, where padding is part of the image."""
    # Of ViT models, those for one canvas have a table of rotary positions for it.
    name = Path(shapes.ref.removeprefix("ckpt:")).stem.lower()
    if "lsj" in name or "backbone.rope_glb.freqs_cos" in shapes:
        report.notes.append(
            "large-scale jittering, by the file's name or its tables: padding is part of the image, as in its training; "
            "canvas of one size"
        )
        return True
    if backbone != "vit":
        report.notes.append("read as a model with padding masks; an LSJ checkpoint must have 'lsj' in its file name")
    return False


def family_facts(backbone: str) -> dict[str, Any]:
    """Fields of the family's row that another backbone changes."""
    return {"max_detections": VIT_DETECTIONS} if backbone == "vit" else {}


def facts(found: dict[str, Any]) -> dict[str, object]:
    """The sizes that people know a model by."""
    names = {"num_labels": "classes", "num_queries": "queries", "dim": "width", "width": "channels"}
    skipped = (
        "temperature",
        "attention_heads",
        "conv_bias",
        "head_eps",
        "attend_padding",
        "hidden",
        "patch",
        "positions",
        "windowed",
    )
    return {names.get(key, key).replace("_", " "): value for key, value in found.items() if key not in skipped}


def build(found: dict[str, Any], variant: str) -> nn.Module:
    from ..layers.dino import CoDino, Dino, DinoConfig

    attend_padding = found.pop("attend_padding")
    config = DinoConfig(**found)
    return CoDino(config, attend_padding=attend_padding) if variant == "co_dino" else Dino(config)


def input_spec(config: DinoConfig, family: Family, *, attend_padding: bool = False) -> InputSpec:
    """Preprocessing by the published configs. attend_padding: of a model for one square canvas."""
    entry: dict[str, Any] = {"rescale": 1 / 255, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "mask": True, "dynamic": True}
    if attend_padding:
        side = LSJ_SIDES[config.backbone]
        return InputSpec("fit", side, side, **entry)
    if config.backbone == "vit":
        return InputSpec("shortest_edge", 1280, 1728, shortest_edge=1280, longest_edge=2048, multiple_of=32, **entry)
    return InputSpec("shortest_edge", 800, 1067, shortest_edge=800, longest_edge=1333, **entry)


def skipped(shapes: Shapes) -> dict[str, str]:
    return {**_BACKBONE_SKIPPED, **_SKIPPED[layout_of(set(shapes.state)) or "dino"]}


def table(shapes: Shapes) -> Table:
    layout = layout_of(set(shapes.state))
    backbone = _VIT if "backbone.pos_embed" in shapes else (*_resnet(_root(shapes)), *_swin(_root(shapes)))
    if layout == "dino":
        return (*backbone, *_idea(shapes))
    if layout == "dino-mmdet":
        return (
            *backbone,
            *_MMDET_NECK,
            ("level_embed", "level_embed"),
            ("query_embedding.weight", "query_embed"),
            ("memory_trans_fc.@", "enc_output.@"),
            ("memory_trans_norm.@", "enc_output_norm.@"),
            *_mmdet("", "ffn", "self_attn", "self_attn", "cross_attn"),
            ("decoder.ref_point_head.layers.#.@", "decoder.ref_point_head.layers.#.@"),
            *_branches("bbox_head."),
        )
    prefix = "query_head.transformer."
    return (
        *backbone,
        *_MMDET_NECK,
        (f"{prefix}level_embeds", "level_embed"),
        (f"{prefix}query_embed.weight", "query_embed"),
        (f"{prefix}enc_output.@", "enc_output.@"),
        (f"{prefix}enc_output_norm.@", "enc_output_norm.@"),
        *_mmdet(prefix, "ffns.0", "attentions.0", "attentions.0", "attentions.1"),
        # The module between the two is a ReLU.
        (f"{prefix}decoder.ref_point_head.0.@", "decoder.ref_point_head.layers.0.@"),
        (f"{prefix}decoder.ref_point_head.2.@", "decoder.ref_point_head.layers.1.@"),
        *_branches("query_head."),
    )


def _idea(shapes: Shapes) -> Table:
    """IDEA-Research's transformer, neck and heads."""
    last = shapes.count("class_embed.#.")  # the encoder's head comes after those of the decoder layers
    levels = shapes.size("transformer.level_embed")
    backbone_levels = len(_neck_inputs(shapes, "dino", levels))
    neck = [f"convs.{i}" if i < backbone_levels else f"extra_convs.{i - backbone_levels}" for i in range(levels)]
    return (
        ("transformer.level_embed", "level_embed"),
        ("transformer.tgt_embed.weight", "query_embed"),
        ("transformer.enc_output.@", "enc_output.@"),
        ("transformer.enc_output_norm.@", "enc_output_norm.@"),
        ("transformer.encoder.layers.#.self_attn.@.@", "encoder.layers.#.self_attn.@.@"),
        ("transformer.encoder.layers.#.@.@", "encoder.layers.#.@.@"),
        ("transformer.decoder.layers.#.cross_attn.@.@", "decoder.layers.#.cross_attn.@.@"),
        ("transformer.decoder.layers.#.self_attn.in_proj_@", "decoder.layers.#.self_attn.{q,k,v}_proj.@"),
        ("transformer.decoder.layers.#.self_attn.out_proj.@", "decoder.layers.#.self_attn.out_proj.@"),
        # The original counts the norm of the cross-attention first, although self-attention runs first.
        ("transformer.decoder.layers.#.norm2.@", "decoder.layers.#.norm1.@"),
        ("transformer.decoder.layers.#.norm1.@", "decoder.layers.#.norm2.@"),
        ("transformer.decoder.layers.#.@.@", "decoder.layers.#.@.@"),
        ("transformer.decoder.norm.@", "decoder.norm.@"),
        ("transformer.decoder.ref_point_head.layers.#.@", "decoder.ref_point_head.layers.#.@"),
        ("class_embed.#.@", "class_heads.#.@"),
        ("bbox_embed.#.layers.#.@", "box_heads.#.layers.#.@"),
        ("transformer.enc_out_class_embed.@", f"class_heads.{last}.@"),
        ("transformer.enc_out_bbox_embed.layers.#.@", f"box_heads.{last}.layers.#.@"),
        *((f"input_proj.{i}.0.@", f"neck.{part}.conv.@") for i, part in enumerate(neck)),
        *((f"input_proj.{i}.1.@", f"neck.{part}.norm.@") for i, part in enumerate(neck)),
    )


def _mmdet(prefix: str, ffn: str, encoder: str, self_attn: str, cross_attn: str) -> Table:
    """mmdetection's transformer layers; its versions name the attentions differently."""
    return (
        (f"{prefix}encoder.layers.#.{encoder}.@.@", "encoder.layers.#.self_attn.@.@"),
        (f"{prefix}decoder.layers.#.{self_attn}.attn.in_proj_@", "decoder.layers.#.self_attn.{q,k,v}_proj.@"),
        (f"{prefix}decoder.layers.#.{self_attn}.attn.out_proj.@", "decoder.layers.#.self_attn.out_proj.@"),
        (f"{prefix}decoder.layers.#.{cross_attn}.@.@", "decoder.layers.#.cross_attn.@.@"),
        *(
            (f"{prefix}{part}.layers.#.{old}.@", f"{part}.layers.#.{new}.@")
            for part in ("encoder", "decoder")
            for old, new in (
                (f"{ffn}.layers.0.0", "linear1"),
                (f"{ffn}.layers.1", "linear2"),
                ("norms.0", "norm1"),
                ("norms.1", "norm2"),
                ("norms.2", "norm3"),
            )
        ),
        (f"{prefix}decoder.norm.@", "decoder.norm.@"),
    )


def _branches(prefix: str) -> Table:
    """mmdetection's prediction heads; every second module of a box head is a ReLU."""
    boxes = ((f"{prefix}reg_branches.#.{2 * i}.@", f"box_heads.#.layers.{i}.@") for i in range(3))
    return ((f"{prefix}cls_branches.#.@", "class_heads.#.@"), *boxes)


def _root(shapes: Shapes) -> str:
    """Prefix of a ResNet's or Swin's keys: "backbone.", "backbone.0." or "backbone.0.body."."""
    stems = ("conv1.weight", "patch_embed.proj.weight", "patch_embed.projection.weight")
    roots = ("backbone.", "backbone.0.body.", "backbone.0.")
    return next((root for root in roots if any(f"{root}{stem}" in shapes for stem in stems)), "backbone.")


def _resnet(root: str) -> Table:
    names = ("conv#", "bn#", "downsample.#")
    return (
        (f"{root}conv1.@", "backbone.conv1.@"),
        (f"{root}bn1.@", "backbone.bn1.@"),
        *((f"{root}layer#.#.{name}.@", f"backbone.layer#.#.{name}.@") for name in names),
    )


def _swin(root: str) -> Table:
    """Swin under its authors' names ("layers") and under mmdetection's ("stages")."""
    authors = (
        ("norm1.@", "norm1.@"),
        ("norm2.@", "norm2.@"),
        ("attn.qkv.@", "attn.qkv.@"),
        ("attn.proj.@", "attn.proj.@"),
        ("mlp.@.@", "@.@"),
        ("attn.relative_position_bias_table", "attn.relative_position_bias_table"),
    )
    mmdetection = (
        ("norm1.@", "norm1.@"),
        ("norm2.@", "norm2.@"),
        ("attn.w_msa.qkv.@", "attn.qkv.@"),
        ("attn.w_msa.proj.@", "attn.proj.@"),
        ("ffn.layers.0.0.@", "fc1.@"),
        ("ffn.layers.1.@", "fc2.@"),
        ("attn.w_msa.relative_position_bias_table", "attn.relative_position_bias_table"),
    )
    return (
        (f"{root}patch_embed.proj.@", "backbone.patch.@"),
        (f"{root}patch_embed.projection.@", "backbone.patch.@"),
        (f"{root}patch_embed.norm.@", "backbone.patch_norm.@"),
        (f"{root}norm#.@", "backbone.norms.#.@"),
        *(
            (f"{root}{part}.#.blocks.#.{old}", f"backbone.stages.#.blocks.#.{new}")
            for part, lines in (("layers", authors), ("stages", mmdetection))
            for old, new in lines
        ),
        *((f"{root}{part}.#.downsample.@.@", "backbone.stages.#.downsample.@.@") for part in ("layers", "stages")),
    )


def values(shapes: Shapes) -> dict[str, Tensor]:
    """Swin's patch merging in the authors' order instead of mmdetection's.

    nn.Unfold: channel * 4 + neighbour with neighbours (0,0), (0,1), (1,0), (1,1); the authors: neighbour * channels +
    channel with (0,0), (1,0), (0,1), (1,1).
    """
    found = {}
    for key, tensor in shapes.state.items():
        if re.fullmatch(r"backbone\.(0\.)?stages\.\d+\.downsample\.\w+\.\w+", key) and tensor.shape[-1] % 4 == 0:
            split = tensor.reshape(*tensor.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]
            found[key] = split.transpose(-1, -2).reshape(tensor.shape)
    return found


def check(module: nn.Module, shapes: Shapes) -> None:
    """Compare the keys that repeat others, or tables that the module computes, with what they must equal.

    Raises:
        SourceError: a key with other values.
    """
    import torch

    state = shapes.state
    index = next((value for name, value in module.named_buffers() if name.endswith(_INDEX)), None)
    for key, tensor in state.items():
        if re.fullmatch(r"backbone\..*freqs_(cos|sin)", key):
            if not _is_rope(tensor, key[-3:]):
                raise SourceError(
                    f"'{shapes.ref}': '{key}' is no table of the rotary positions that this model has; it is damaged or of "
                    "another model"
                )
            continue
        if key.endswith("relative_position_index"):
            other, name = index, "Swin's table of positions in a window"
        elif key.startswith(("transformer.decoder.class_embed.", "transformer.decoder.bbox_embed.")):
            name = key.removeprefix("transformer.decoder.")
            other = state.get(name)
        else:
            continue
        if other is None or other.shape != tensor.shape or not torch.equal(other.to(tensor.dtype), tensor):
            raise SourceError(f"'{shapes.ref}': '{key}' differs from what it must equal ('{name}'); the checkpoint is damaged")


def _is_rope(tensor: Tensor, which: str) -> bool:
    import torch

    from ..layers.vit import rope

    side = isqrt(tensor.shape[0]) if tensor.ndim == 2 else 0
    if side < 1 or side * side != tensor.shape[0] or tensor.shape[1] % 4:
        return False
    expected = rope(side, side, tensor.shape[1])[which == "sin"]
    return torch.allclose(tensor.float(), expected, atol=1e-3)


def _neck_inputs(shapes: Shapes, layout: str, levels: int) -> list[int]:
    """Channels of the backbone's maps that the neck reads: its 1x1 convolutions. Empty for a ViT."""
    if "backbone.pos_embed" in shapes:
        return []
    names = (f"input_proj.{i}.0.weight" if layout == "dino" else f"neck.convs.{i}.conv.weight" for i in range(levels))
    return [shapes.size(name, 1) for name in names if name in shapes and shapes.size(name, 2) == 1]


def _backbone(shapes: Shapes, inputs: list[int]) -> dict[str, object]:
    """The part of `DinoConfig` that describes the backbone. inputs: see `_neck_inputs`."""
    if "backbone.pos_embed" in shapes:
        return _vit_sizes(shapes)
    root = _root(shapes)
    if f"{root}conv1.weight" in shapes:
        width = shapes.size(f"{root}conv1.weight")
        return {
            "backbone": "resnet",
            "width": width,
            "depths": tuple(shapes.count(f"{root}layer{stage}.#.") for stage in range(1, 5)),
            "out_stages": _stages(shapes, inputs, 4 * width),
        }
    stages, attention, patch = f"{root}layers.", "attn", f"{root}patch_embed.proj.weight"
    if patch not in shapes:
        stages, attention, patch = f"{root}stages.", "attn.w_msa", f"{root}patch_embed.projection.weight"
    if patch not in shapes:
        raise SourceError(
            f"'{shapes.ref}' has no ResNet stem ('backbone.conv1.weight') and no Swin patch embedding "
            "('backbone.patch_embed.proj.weight'); the backbone is missing or of another kind"
        )
    width = shapes.size(patch)
    tables = [f"{stages}{i}.blocks.0.{attention}.relative_position_bias_table" for i in range(4)]
    return {
        "backbone": "swin",
        "width": width,
        "depths": tuple(shapes.count(f"{stages}{i}.blocks.#.") for i in range(4)),
        "heads": tuple(shapes.size(name, 1) for name in tables),
        "window": shapes.window(tables[0]),
        "out_stages": _stages(shapes, inputs, width),
    }


def _vit_sizes(shapes: Shapes) -> dict[str, object]:
    """ViT: a block with windows has a table of rotary positions as large as a window."""
    positions, width = shapes.size("backbone.pos_embed", 1), shapes.size("backbone.pos_embed", 2)
    tokens, head_dim = shapes.size("backbone.rope_win.freqs_cos"), shapes.size("backbone.rope_win.freqs_cos", 1)
    window, side = isqrt(tokens), isqrt(positions - 1)
    if window * window != tokens or side * side != positions - 1 or width % head_dim or head_dim % 4:
        raise SourceError(
            f"'{shapes.ref}': a ViT with {positions} positions, a table of {tokens} x {head_dim} rotary positions and {width} "
            "channels does not fit together; expected 1 + a square, a square, and a head that divides the channels"
        )
    depth = shapes.count("backbone.blocks.#.")
    tables = [f"backbone.blocks.{i}.attn.rope.freqs_cos" for i in range(depth)]
    return {
        "backbone": "vit",
        "width": width,
        "depths": (depth,),
        "heads": (width // head_dim,),
        "window": window,
        "windowed": tuple(i for i, name in enumerate(tables) if name in shapes and shapes.size(name) == tokens),
        "hidden": shapes.size("backbone.blocks.0.mlp.w1.weight"),
        "patch": shapes.size("backbone.patch_embed.proj.weight", 2),
        "positions": positions,
        "out_stages": (0,),
    }


def _stages(shapes: Shapes, inputs: list[int], first: int) -> tuple[int, ...]:
    """Stages whose channels (`first`, doubled from stage to stage) the neck reads."""
    known = [first * 2**i for i in range(4)]
    if not inputs or not set(inputs) <= set(known):
        raise SourceError(f"'{shapes.ref}': the neck reads maps of {inputs} channels, but the backbone's stages have {known}")
    return tuple(known.index(channels) for channels in inputs)


def _random(settings: Mapping[str, Any], co: bool) -> nn.Module:
    """The model with seeded weights; no parameter is zero or one, which would hide errors."""
    import torch

    from ..layers.dino import CoDino, Dino, DinoConfig
    from ..random import SEED, keep_variance

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        module = (CoDino if co else Dino)(DinoConfig(**settings))
        keep_variance(module)
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.data += torch.randn_like(parameter) * 0.05
            elif name.endswith(("_embed", "bias_table")):
                parameter.data.normal_()
            elif "sampling_offsets" in name:
                # About a pixel at level 0, so that samples leave their pixel, and some the map.
                parameter.data *= 3
            elif name.endswith("layers.2.weight"):
                parameter.data *= 0.3
        for name, buffer in module.named_buffers():
            if name.endswith("running_var"):
                buffer.data.uniform_(0.6, 1.6)
            elif name.endswith("running_mean"):
                buffer.data.normal_(0, 0.1)
    return module.eval().requires_grad_(False)


# As published: DINO 4scale R50 and Swin-L (91 classes, as IDEA-Research trains COCO), Co-DINO 5scale R50, ViT-L and Swin-L (80 classes).
_R50: dict[str, Any] = {
    **{"num_labels": 91, "num_queries": 900, "levels": 4, "conv_bias": True},
    **{"backbone": "resnet", "depths": (3, 4, 6, 3), "width": 64, "out_stages": (1, 2, 3)},
}
_SWIN_L = {**_R50, "backbone": "swin", "depths": (2, 2, 18, 2), "width": 192, "heads": (6, 12, 24, 48), "window": 12}
_CO = {"num_labels": 80, "levels": 5, "out_stages": (0, 1, 2, 3), "conv_bias": False}
_VIT_L = {
    "backbone": "vit",
    "depths": (24,),
    "width": 1024,
    "heads": (16,),
    "hidden": 2730,
    "patch": 16,
    "positions": 1025,
    "window": 24,
    "windowed": tuple(i for i in range(24) if i % 4 != 3),
    "out_stages": (0,),
    "num_queries": 1500,
}
_TINY = {"num_queries": 20, "dim": 32, "ffn": 48, "encoder_layers": 2, "decoder_layers": 2, "groups": 8}
_TINY_RESNET = {**_TINY, "depths": (1, 1, 1, 1), "width": 8}
_TINY_SWIN = {**_TINY, "depths": (2, 2, 2, 2), "width": 16, "heads": (1, 2, 4, 8), "window": 4}
_TINY_VIT = {
    **_TINY,
    "depths": (4,),
    "width": 32,
    "heads": (2,),
    "hidden": 43,
    "positions": 50,
    "window": 3,
    "windowed": (0, 1, 2),
}
FORMAT = Format(
    "dino",
    ("IDEA-Research DINO", "mmdetection DINO"),
    recognise,
    settings,
    table,
    skipped,
    relatives=RELATIVES,
    build=build,
    facts=facts,
    values=values,
    check=check,
)
_FACTS: dict[str, Any] = {
    "mask": True,
    "shortest_edge": True,
    "activation": "sigmoid",
    "select": "topk",
    "max_detections": 300,
    "deformable": True,
    "own": True,
    "authors_input": input_spec,
}
FAMILIES = (
    Family(
        name="dino",
        model_type="",
        title="DINO",
        example="",
        licence="Apache-2.0",
        random=(RandomModel("dino", _R50, _TINY_RESNET), RandomModel("dino-swin-l", _SWIN_L, _TINY_SWIN)),
        build_random=lambda settings: _random(settings, co=False),
        formats=(FORMAT,),
        relatives=(
            (
                "transformer.encoder.layers.#.attentions.0.attention_weights.@",
                f"a model of detrex; {BY_ONNX}, or give the DINO of IDEA-Research or mmdetection",
            ),
            (
                "transformer.refpoint_embed.weight",
                f"a DINO of one stage (two_stage_type 'no'), and detrt reads two-stage ones; {BY_ONNX}",
            ),
        ),
        engines=frozenset((SAMPLING_ENCODER, PLUGIN_IS_FASTER)),
        **_FACTS,
    ),
    Family(
        name="co_dino",
        model_type="",
        title="Co-DINO",
        example="",
        nms="soft_nms",
        licence="MIT",
        random=(
            RandomModel("co_dino-r50", {**_R50, **_CO}, _TINY_RESNET),
            RandomModel("co_dino-vit-l", {**_R50, **_CO, **_VIT_L}, _TINY_VIT, row=family_facts("vit")),
            RandomModel("co_dino-swin-l", {**_SWIN_L, **_CO}, _TINY_SWIN),
        ),
        build_random=lambda settings: _random(settings, co=True),
        formats=(replace(FORMAT, name="co_dino", titles=("Sense-X Co-DETR", "mmdetection CO-DETR")),),
        engines=frozenset((SAMPLING_ENCODER, PLUGIN_IS_FASTER)),
        **_FACTS,
    ),
)
