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
from .dino_keys import ALIAS, DERIVED, SPLIT_QKV, TRAINING, UNFOLD_ORDER, layout_of, place
from .dino_sizes import infer_config

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
    from ..arch.co_dino import CoDino
    from ..arch.dino import Dino

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
