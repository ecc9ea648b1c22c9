"""Original checkpoints of DINO and Co-DINO: recognise a state dict, infer its sizes, load it whole.

Every key of the file is used exactly once, or is named as training only, derived or an alias; anything
else is an error with counts and examples. Reading the file (and choosing EMA weights) is not done here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import SourceError
from ...spec import DecodeSpec, InputSpec, ModelSpec
from ..families import BY_NAME, IMAGENET_MEAN, IMAGENET_STD, Family
from ..labels import choose

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..arch.dino import DinoConfig

LSJ_SIDES = {"resnet": 1024, "swin": 1280, "vit": 1536}  # canvas of the Co-DINO LSJ configs
VIT_DETECTIONS = 1000  # `max_per_img` of the ViT configs

# What looks like one of these families and is not supported: (a key that tells, what it is).
_REFUSED = (
    (
        r"query_head\.transformer\.pos_trans\.weight",
        "a Co-Deformable-DETR checkpoint; detrt reads Co-DINO",
    ),
    (r"mask_head\..+", "a Co-DINO instance segmentation checkpoint; detrt reads detectors"),
    (
        r"backbone\.(?:net\..+|blocks\.\d+\.attn\.(?:qkv|rel_pos_[hw]).*)",
        "a DINO with a ViT backbone of another kind than Co-DETR's (EVA-02 blocks with rotary positions); detrt reads "
        "that one, ResNet and Swin",
    ),
    (
        r"backbone\.(?:0\.)?downsample_layers\..+",
        "a DINO with a ConvNeXt backbone; detrt reads ResNet and Swin",
    ),
    (
        r".+\.(?:zero_point|_packed_params.*|weight_fake_quant\..+)",
        "a quantised checkpoint; give the float one",
    ),
)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a file was read. used + training_only + derived + aliases are all its keys."""

    layout: str
    config: str
    used: tuple[str, ...]
    training_only: tuple[str, ...]
    derived: tuple[str, ...]
    aliases: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report for a log."""
        heads = [key.split(".") for key in self.training_only if not key.endswith("num_batches_tracked")]
        parts = sorted({".".join(words[: 3 if words[1] == "transformer" else 2]) for words in heads})
        found = [
            f"layout {self.layout}: {len(self.used)} tensors used, {len(self.training_only)} training only, "
            f"{len(self.derived)} derived, {len(self.aliases)} aliases",
            f"sizes from tensor shapes: {self.config}",
        ]
        if parts:
            found.append(f"not needed at inference: {', '.join(parts)}")
        return [*found, *self.notes]


def recognise(state_dict_keys: Iterable[str]) -> str | None:
    """The layout that the keys belong to: "dino", "dino-mmdet" or "co_dino"; None for other models."""
    keys = list(state_dict_keys)
    found = layout_of(keys)
    if found is None and any(key.startswith("query_head.transformer.") for key in keys):
        return "co_dino"  # of the Co-DETR kind, which `load` refuses by name
    return found


def load(
    state_dict: Mapping[str, Tensor],
    *,
    variant: str,
    labels: Path | str | None = None,
    stored: Mapping[int, str] | Sequence[str] = (),
    name: str = "",
) -> tuple[nn.Module, ModelSpec, Family, LoadReport]:
    """Build the model and fill it. variant: what `recognise` gave. labels: a file of class names.
    stored: class names in the checkpoint, see `label_sets.choose`.

    name: of the checkpoint; "lsj" in it means that the model was trained with large scale jittering,
    which no tensor tells.

    Raises:
        SourceError: a related model that is not supported, sizes that contradict one another, or keys
            that are missing, unexpected or of another shape. SpecError: labels that do not fit.
    """
    from ..arch.dino import CoDino, Dino

    _refuse(state_dict)
    layout_names = ("dino", "dino-mmdet", "co_dino")
    if variant not in layout_names:
        raise SourceError(f"there is no layout {variant!r}; allowed: {', '.join(layout_names)}")
    config = infer_config(state_dict, variant)
    co_dino = variant == "co_dino"
    # Of ViT models, those for one canvas have a table of rotary positions for it.
    lsj = co_dino and ("lsj" in name.lower() or "backbone.rope_glb.freqs_cos" in state_dict)
    module = CoDino(config, attend_padding=lsj) if co_dino else Dino(config)
    report = _fill(module, state_dict, variant, config)
    notes = []
    if lsj:
        notes.append(
            "large-scale jittering, by the file's name or its tables: padding is part of the picture, as in its training; canvas of one size"
        )
    elif co_dino and config.backbone != "vit":
        notes.append("read as a model with padding masks; an LSJ checkpoint must have 'lsj' in its file name")
    family = BY_NAME["co_dino" if co_dino else "dino"]
    spec, label_note = make_spec(family, config, labels=labels, stored=stored, name=name, lsj=lsj)
    notes.append(label_note)
    return (
        module.eval().requires_grad_(False),
        spec,
        family,
        replace(report, notes=tuple(filter(None, notes))),
    )


def make_spec(
    family: Family,
    config: DinoConfig,
    *,
    labels: Path | str | None = None,
    stored: Mapping[int, str] | Sequence[str] = (),
    name: str = "",
    lsj: bool = False,
) -> tuple[ModelSpec, str]:
    """ModelSpec by the published configs, and a note on where the class names come from."""
    entry = {"rescale": 1 / 255, "mean": IMAGENET_MEAN, "std": IMAGENET_STD, "mask": True, "dynamic": True}
    if lsj:
        side = LSJ_SIDES[config.backbone]
        pixels = InputSpec("fit", side, side, **entry)  # type: ignore[arg-type]
    elif config.backbone == "vit":
        entry["multiple_of"] = 32
        pixels = InputSpec("shortest_edge", 1280, 1728, shortest_edge=1280, longest_edge=2048, **entry)  # type: ignore[arg-type]
    else:
        pixels = InputSpec("shortest_edge", 800, 1067, shortest_edge=800, longest_edge=1333, **entry)  # type: ignore[arg-type]
    best = VIT_DETECTIONS if config.backbone == "vit" else family.max_detections
    keep = min(best or config.queries, config.queries * config.classes)
    soft = {"nms": "soft_nms", "nms_iou": 0.8} if family.name == "co_dino" else {}
    decode = DecodeSpec(family.activation, family.select, config.queries, config.classes, keep, **soft)  # type: ignore[arg-type]
    names, note = choose(config.classes, file=labels, stored=stored, ref=name or family.name)
    return ModelSpec(family.name, pixels, decode, names, name), note


def _refuse(state: Mapping[str, Tensor]) -> None:
    for pattern, what in _REFUSED:
        compiled = re.compile(pattern)
        found = next((key for key in state if compiled.fullmatch(key)), None)
        if found is not None:
            raise SourceError(f"this is {what} (it has the key '{found}')")


def _fill(module: nn.Module, state: Mapping[str, Tensor], layout: str, config: DinoConfig) -> LoadReport:
    """Copy every tensor to its place."""
    import torch

    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    wanted = set(module.state_dict()) - {key for key in module.state_dict() if key.endswith("num_batches_tracked")}
    used, training, derived, aliases, unexpected, misshapen = [], [], [], [], [], []
    filled: dict[str, str] = {}
    for key, tensor in state.items():
        spot = place(key, layout, last_head=config.decoder_layers, backbone_levels=len(config.out_stages))
        if spot is None:
            unexpected.append(key)
        elif spot.kind == TRAINING:
            training.append(key)
        elif spot.target.startswith("ROPE."):
            if not _is_rope(tensor, spot.target.removeprefix("ROPE.")):
                raise SourceError(f"'{key}' is no table of the rotary positions that this model has; it is damaged or of another")
            derived.append(key)
        elif spot.kind in (DERIVED, ALIAS):
            other = targets.get(spot.target) if spot.kind == DERIVED else state.get(spot.target)
            if other is None or other.shape != tensor.shape or not torch.equal(other.to(tensor.dtype), tensor):
                raise SourceError(f"'{key}' differs from what it must equal ('{spot.target}'); the checkpoint is damaged")
            (derived if spot.kind == DERIVED else aliases).append(key)
        else:
            for target, part in _parts(spot.target, tensor, spot.transform):
                # A second key for one weight: a head of a layer that the file does not have.
                if target not in wanted or target in filled:
                    unexpected.append(key)
                elif targets[target].shape != part.shape:
                    misshapen.append(f"{key} {tuple(part.shape)} instead of {tuple(targets[target].shape)}")
                    filled[target] = key
                else:
                    targets[target].data.copy_(part)
                    filled[target] = key
            used.append(key)
    missing = sorted(wanted - set(filled))
    if missing or unexpected or misshapen:
        counts = [
            f"{len(found)} {what} (e.g. {', '.join(found[:3])})"
            for what, found in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("of another shape", misshapen),
            )
            if found
        ]
        raise SourceError(
            f"the checkpoint does not fit a {layout} model of {config.describe()}: {'; '.join(counts)}. It is incomplete "
            "or of another model"
        )
    return LoadReport(layout, config.describe(), tuple(used), tuple(training), tuple(derived), tuple(aliases))


def _is_rope(tensor: Tensor, which: str) -> bool:
    import torch

    from ..arch.vit import rope

    side = isqrt(tensor.shape[0]) if tensor.ndim == 2 else 0
    if side < 1 or side * side != tensor.shape[0] or tensor.shape[1] % 4:
        return False
    expected = rope(side, side, tensor.shape[1])[which == "sin"]
    return torch.allclose(tensor.float(), expected, atol=1e-3)


def _parts(target: str, tensor: Tensor, transform: str) -> list[tuple[str, Tensor]]:
    """What one stored tensor becomes: names and values."""
    if transform == SPLIT_QKV:
        return [(target.format(which), part) for which, part in zip("qkv", tensor.chunk(3), strict=False)]
    if transform == UNFOLD_ORDER and tensor.shape[-1] % 4 == 0:
        # nn.Unfold: channel * 4 + neighbour with neighbours (0,0), (0,1), (1,0), (1,1);
        # the authors: neighbour * channels + channel with (0,0), (1,0), (0,1), (1,1).
        split = tensor.reshape(*tensor.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]
        return [(target, split.transpose(-1, -2).reshape(tensor.shape))]
    return [(target, tensor)]


# Name maps from the original DINO and Co-DINO checkpoints to `detrt.models.arch`.
#
# Three layouts hold the same network: IDEA-Research's DINO ("dino"), mmdetection 3's DINO ("dino-mmdet")
# and Co-DETR's Co-DINO ("co_dino", Sense-X and mmdetection alike). Backbones come in torchvision's names
# (ResNet), the Swin authors' and mmdetection's, or Co-DETR's (ViT), and are told apart by their keys.
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


# Sizes of a DINO or Co-DINO from the shapes of a checkpoint's tensors.
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
