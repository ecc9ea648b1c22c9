"""Mask2Former, for instances, with a Swin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import EDGES, MASK_CLASS, Family, Processor, RandomModel
from .eomt import instances_only
from .sizes import STAGES, SWIN_T, TINY_SWIN

if TYPE_CHECKING:
    import torch

    from ...spec import InputSpec

_EXAMPLE, _TITLE = "facebook/mask2former-swin-tiny-coco-instance", "Mask2Former"


def _module() -> Any:
    from ..layers.mask2former import Mask2FormerForInstanceSegmentation

    return Mask2FormerForInstanceSegmentation


def _rewrite() -> Any:
    from ..layers.mask2former import REWRITE

    return REWRITE


def _loaded(module: Any, entry: InputSpec, ref: str) -> tuple[str, ...]:
    return (instances_only(module, _TITLE, _EXAMPLE, ref),)


def _after_random(module: Any, generator: torch.Generator, full_size: bool) -> None:
    """Give each query a mask of its own, of less than half of the image, in place."""
    import torch

    from ..random import centre

    projection = module.model.pixel_level_module.decoder.mask_projection
    decoder = module.model.transformer_module.decoder
    for layer in decoder.layers:  # what all queries attend to makes them equal
        layer.cross_attn.out_proj.weight.data *= 0.3
        layer.self_attn.out_proj.weight.data *= 0.3
    last = decoder.mask_predictor.mask_embedder.layers[-1].layers[0]
    last.weight.data *= 4
    centre(module, last, generator)
    centre(module, projection, generator)
    direction = torch.empty_like(projection.bias).normal_(generator=generator)
    direction *= projection.bias.numel() ** 0.25 / direction.norm()
    last.bias.data += direction
    projection.bias.data -= direction


FAMILIES = (
    Family(
        name="mask2former",
        model_type="mask2former",
        title=_TITLE,
        example=_EXAMPLE,
        activation="sigmoid",
        select="topk",
        max_detections=100,
        no_mask="derives boxes from masks of the whole input",
        multiple_of=4,
        size=(384, 384),
        deformable=True,
        processor=Processor(
            "Mask2Former",
            {"size": EDGES["size"], "do_normalize": True, "size_divisor": 32},
            idle=("ignore_index", "num_labels", "reduce_labels", "do_reduce_labels", "_max_size"),
        ),
        licence="MIT; weights: CC BY-NC 4.0",
        since="5.20.2",
        own_rewrites={"mask2former": _rewrite},
        rewrites={
            "mask2former": {
                "multi_scale_deformable_attention": ("457a3a00d81508e9",),
                "Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention.forward": ("5217b351348ec75e",),
                "Mask2FormerPixelDecoderEncoderOnly.get_reference_points": ("f2103abf8b4d3444", "456d7e54a30ade61"),
                "Mask2FormerPixelDecoder.forward": ("e2ae552c8e6896be",),
                "Mask2FormerPixelLevelModule.forward": ("4979980febd3647f",),
            },
        },
        classes={f"Mask2Former{MASK_CLASS}": _module, "Mask2FormerForUniversalSegmentation": _module},
        loaded=_loaded,
        after_random=_after_random,
        random=(
            RandomModel(
                "mask2former",
                {
                    "architectures": [f"Mask2Former{MASK_CLASS}"],
                    "num_labels": 80,
                    "backbone_config": {"model_type": "swin", "out_features": STAGES, **SWIN_T},
                },
                {
                    "backbone_config": {**TINY_SWIN, "out_features": STAGES},
                    **{"feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 48},
                    **{"encoder_layers": 2, "decoder_layers": 3, "num_attention_heads": 4, "dim_feedforward": 48},
                    "num_queries": 12,
                },
            ),
        ),
    ),
)
