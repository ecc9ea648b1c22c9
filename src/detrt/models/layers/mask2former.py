"""Mask2Former as an instance segmenter: the queries of transformers' class are masks (Cheng et al., arXiv:2112.01527), see `query_masks`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Mask2FormerForUniversalSegmentation

from ..ops.msda import ms_deform_attn
from ..rewrites import Patch, Rewrite, TorchForTracing, traced_sizes
from .grounding_dino import tensor_backbone
from .query_masks import InstanceOutput, boxes_of, instance_logits


class Mask2FormerForInstanceSegmentation(Mask2FormerForUniversalSegmentation):
    """config.mask_downsample_ratio: stride of the mask logits. Inference only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.mask_downsample_ratio = config.common_stride

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Mask2FormerForInstanceSegmentation:
        """As the Auto classes have it."""
        return cls._from_config(config, **options)

    def of_library(self) -> Any:
        """transformers' model of these weights, without boxes and scores."""
        found = Mask2FormerForUniversalSegmentation(self.config)
        found.load_state_dict(self.state_dict())
        return found

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **options: Any) -> InstanceOutput:
        """pixel_values (b, 3, h, w), normalised; pixel_mask (b, h, w), 1 for the image."""
        # The model does not look at the mask: padding is 0 in training, too.
        found = super().forward(pixel_values)
        masks = found.masks_queries_logits
        image = torch.ones_like(pixel_values[:, :1]) if pixel_mask is None else pixel_mask.unsqueeze(1).to(masks.dtype)
        covered = nn.functional.avg_pool2d(image, self.config.mask_downsample_ratio)
        return InstanceOutput(
            logits=instance_logits(found.class_queries_logits, masks, covered),
            pred_boxes=boxes_of(masks, covered),
            pred_masks=masks,
        )


class _Torch(TorchForTracing):
    """`torch` for Mask2Former's module, also with sizes of levels in `torch.tensor`."""

    @staticmethod
    def tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return TorchForTracing.as_tensor(data, dtype=dtype, device=device)


def _deformable(value: Tensor, shapes: Sequence[Sequence[Any]], locations: Tensor, weights: Tensor) -> Tensor:
    levels, points = locations.shape[3:5]
    return ms_deform_attn(
        value, traced_sizes(shapes), locations.flatten(3, 4), weights.flatten(3, 4), [int(points)] * int(levels), False
    )


def _patches(module: ModuleType, model: Any) -> list[Patch]:
    encoder = model.model.pixel_level_module.encoder
    backbone = tensor_backbone(encoder)
    return [
        (module, "torch", _Torch()),
        (module, "multi_scale_deformable_attention", _deformable),
        (encoder, "forward", lambda pixels, **options: SimpleNamespace(feature_maps=tuple(backbone(pixels)))),
    ]


REWRITE = Rewrite("sizes of maps become constants, and deformable attention one op", _patches)
