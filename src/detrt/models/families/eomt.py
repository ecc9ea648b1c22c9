"""EoMT, for instances, with a ViT of DINOv2 or DINOv3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import SourceError
from .base import AS_FOLDER, MASK_CLASS, Family, Processor, RandomModel

if TYPE_CHECKING:
    import torch

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
    return f"read as a model of instances: no file of {title} tells it from a panoptic or semantic one"


def _loaded(module: Any, entry: InputSpec, ref: str) -> tuple[str, ...]:
    """Make the module ready, in place.

    Raises:
        SourceError: a panoptic or semantic model, or one in the middle of its training.
    """
    note = instances_only(module, "EoMT", _EXAMPLE, ref)
    module.pad_with(entry.mean, entry.std)
    try:
        module.fix_attention()
    except SourceError as error:
        raise SourceError(f"'{ref}': {error}") from None
    return (note,)


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


def _row(name: str, cls: str, model: Any, title: str, example: str, licence: str, tiny: dict[str, Any]) -> Family:
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
        relatives=(("encoder.backbone.blocks.#.ls1.gamma", f"an EoMT {AS_FOLDER}{_EXAMPLE}"),),
        classes={f"{cls}{MASK_CLASS}": model, f"{cls}ForUniversalSegmentation": model},
        loaded=_loaded,
        random=(RandomModel(name, {"architectures": [f"{cls}{MASK_CLASS}"], "num_labels": 80}, tiny),),
        after_random=_after_random,
    )


FAMILIES = (
    _row("eomt", "Eomt", _dinov2, "EoMT", _EXAMPLE, "MIT", _TINY),
    _row(
        "eomt_dinov3",
        "EomtDinov3",
        _dinov3,
        "EoMT with DINOv3",
        "tue-mps/coco_instance_eomt_large_640_dinov3",
        "MIT; backbones: DINOv3 License",
        {**_TINY, "intermediate_size": 48},
    ),
)
