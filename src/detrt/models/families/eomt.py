"""EoMT, for instances, with a ViT of DINOv2 or DINOv3; and files of tue-mps/eomt with DINOv2."""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport, Table
from ..checkpoints.shapes import Shapes
from .base import AS_FOLDER, IMAGENET_MEAN, IMAGENET_STD, MASK_CLASS, Family, Format, Processor, RandomModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ...spec import InputSpec

_EXAMPLE = "tue-mps/coco_instance_eomt_large_640"
_STUFF = {"sky", "sky-other-merged"}  # classes of ADE20K, Cityscapes and COCO that have no instances
PROCESSOR = Processor(
    "Eomt",
    {"size": {"shortest_edge": 640, "longest_edge": 640}, "do_normalize": True, "do_pad": False},
    one_size=True,
)
_TINY = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 128, "mlp_ratio": 2},
    **{"num_blocks": 1, "num_queries": 12},
}


def _dinov2() -> Any:
    from ..layers.eomt import EomtForInstanceSegmentation

    return EomtForInstanceSegmentation


def _dinov3() -> Any:
    from ..layers.eomt import EomtDinov3ForInstanceSegmentation

    return EomtDinov3ForInstanceSegmentation


def instances_only(module: Any, title: str, example: str, ref: str) -> str:
    """A note on what no file of a model for instances tells.

    Raises:
        SourceError: a panoptic or semantic model, by its classes.
    """
    found = sorted(_STUFF & {str(name).lower() for name in (module.config.id2label or {}).values()})
    if found:
        raise SourceError(
            f"'{ref}' has the class {found[0]!r}, which has no instances: it is a {title} for panoptic or semantic segmentation, and detrt "
            f"reads those for instances; give one, e.g. hf:{example}"
        )
    return _instances(title)


def _instances(title: str) -> str:
    return f"read as a model of instances: no file of {title} tells it from a panoptic or semantic one"


def _loaded(module: Any, entry: InputSpec, ref: str) -> tuple[str, ...]:
    """Make the module ready, in place.

    Raises:
        SourceError: a panoptic or semantic model, or one in the middle of its training.
    """
    note = instances_only(module, "EoMT", _EXAMPLE, ref)
    module.pad_with(entry.mean, entry.std)
    _fix_attention(module, ref)
    return (note,)


def _fix_attention(module: Any, ref: str) -> None:
    try:
        module.fix_attention()
    except SourceError as error:
        raise SourceError(f"'{ref}': {error}") from None


_VIT, _LAYER = "encoder.backbone", "encoder.backbone.blocks.#"
_TABLE = (
    (f"{_VIT}.cls_token", "embeddings.cls_token"),
    (f"{_VIT}.reg_token", "embeddings.register_tokens"),
    (f"{_VIT}.pos_embed", "embeddings.position_embeddings.weight"),
    (f"{_VIT}.patch_embed.proj.@", "embeddings.patch_embeddings.projection.@"),
    (f"{_LAYER}.norm#.@", "layers.#.norm#.@"),
    (f"{_LAYER}.attn.qkv.@", "layers.#.attention.{q,k,v}_proj.@"),
    (f"{_LAYER}.attn.proj.@", "layers.#.attention.out_proj.@"),
    (f"{_LAYER}.ls#.gamma", "layers.#.layer_scale#.lambda1"),
    (f"{_LAYER}.mlp.@.@", "layers.#.mlp.@.@"),
    (f"{_VIT}.norm.@", "layernorm.@"),
    ("q.weight", "query.weight"),
    ("class_head.@", "class_predictor.@"),
    *((f"mask_head.{2 * i}.@", f"mask_head.fc{i + 1}.@") for i in range(3)),
    ("upscale.#.norm.@", "upscale_block.block.#.layernorm2d.@"),
    ("upscale.#.@.@", "upscale_block.block.#.@.@"),
    ("attn_mask_probs", "attn_mask_probs"),
)
_SKIPPED = {
    "encoder.pixel_@": "mean and standard deviation of ImageNet; the graph normalises",
    "criterion.empty_weight": "of the loss",
}


def recognise(keys: set[str]) -> str | None:
    return "eomt" if {f"{_VIT}.blocks.0.ls1.gamma", "attn_mask_probs", "q.weight"} <= keys else None


def values(shapes: Shapes) -> dict[str, Tensor]:
    """The position table as an embedding."""
    key = f"{_VIT}.pos_embed"
    return {key: shapes.state[key][0]}


def prepare(module: nn.Module, shapes: Shapes) -> None:
    """Take out the loss, which has weights of its own that a file may not have."""
    from torch import nn

    module.criterion = nn.Identity()


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    report.notes.append(_instances("EoMT"))
    width, cells = shapes.size(f"{_VIT}.pos_embed", 2), shapes.size(f"{_VIT}.pos_embed", 1)
    patch, side = shapes.size(f"{_VIT}.patch_embed.proj.weight", 2), isqrt(cells)
    if side * side != cells:
        raise SourceError(f"'{shapes.ref}': its position table has {cells} cells, which are no square; detrt runs square EoMTs")
    return {
        "hidden_size": width,
        "num_hidden_layers": shapes.count(f"{_VIT}.blocks.#."),
        "num_attention_heads": assumed.number("heads", max(1, width // 64), divides=width),
        "mlp_ratio": shapes.size(f"{_VIT}.blocks.0.mlp.fc1.weight") // width,
        "image_size": side * patch,
        "patch_size": patch,
        "num_channels": shapes.size(f"{_VIT}.patch_embed.proj.weight", 1),
        "num_register_tokens": shapes.size(f"{_VIT}.reg_token", 1),
        "num_upscale_blocks": shapes.count("upscale.#."),
        "num_blocks": shapes.size("attn_mask_probs"),
        "num_queries": shapes.size("q.weight"),
        "num_labels": shapes.size("class_head.weight") - 1,
        "architectures": [f"Eomt{MASK_CLASS}"],
    }


def facts(settings: dict[str, Any]) -> dict[str, object]:
    names = {"classes": "num_labels", "queries": "num_queries", "width": "hidden_size", "layers": "num_hidden_layers"}
    return {**{name: settings[key] for name, key in names.items()}, "size": settings["image_size"]}


def check(module: nn.Module, shapes: Shapes) -> None:
    """Make the module ready, in place, as `_loaded` does for folders."""
    module.pad_with(IMAGENET_MEAN, IMAGENET_STD)  # type: ignore[operator]
    _fix_attention(module, shapes.ref)


FORMATS = (
    Format(
        "eomt",
        ("tue-mps EoMT",),
        recognise,
        settings,
        _TABLE,
        _SKIPPED,
        model=_dinov2,
        facts=facts,
        values=values,
        prepare=prepare,
        check=check,
    ),
)


def _after_random(module: Any, generator: torch.Generator, full_size: bool) -> None:
    """Give the mask logits a negative mean, in place: masks of half of all pixels have equal boxes, all of the image."""
    import torch

    norm = module.upscale_block.block[-1].layernorm2d
    direction = torch.empty_like(norm.bias).normal_(generator=generator)
    direction *= norm.bias.numel() ** 0.25 / direction.norm()
    module.mask_head.fc3.bias.data += direction
    norm.bias.data -= direction
    module.attn_mask_probs.zero_()  # as training leaves them
    module.fix_attention()


def _row(
    name: str,
    cls: str,
    model: Any,
    title: str,
    example: str,
    licence: str,
    tiny: dict[str, Any],
    formats: tuple[Format, ...] = (),
    relatives: Table = (),
) -> Family:
    return Family(
        name=name,
        model_type=name,
        title=title,
        example=example,
        activation="sigmoid",
        select="query",
        max_detections=None,
        mask=True,
        dynamic=False,
        fixed_reason="its masks lie on one grid of patches",
        multiple_of="patch",
        processor=PROCESSOR,
        licence=licence,
        since="5.23.0",
        formats=formats,
        relatives=relatives,
        classes={f"{cls}{MASK_CLASS}": model, f"{cls}ForUniversalSegmentation": model},
        loaded=_loaded,
        random=(RandomModel(name, {"architectures": [f"{cls}{MASK_CLASS}"], "num_labels": 80}, tiny),),
        after_random=_after_random,
    )


FAMILIES = (
    _row("eomt", "Eomt", _dinov2, "EoMT", _EXAMPLE, "MIT", _TINY, formats=FORMATS),
    _row(
        "eomt_dinov3",
        "EomtDinov3",
        _dinov3,
        "EoMT with DINOv3",
        "tue-mps/coco_instance_eomt_large_640_dinov3",
        "MIT; backbones: DINOv3 License",
        {**_TINY, "intermediate_size": 48},
        relatives=(
            ("encoder.backbone.blocks.#.layer_scale1.lambda1", f"an EoMT with DINOv3 {AS_FOLDER}{_EXAMPLE}_dinov3"),
            ("encoder.backbone.blocks.#.mlp.w12.weight", f"an EoMT with a giant ViT {AS_FOLDER}{_EXAMPLE}"),
        ),
    ),
)
