"""Mask2Former as an instance segmenter: the queries of transformers' class are masks (Cheng et al., arXiv:2112.01527), see `query_masks`."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import Mask2FormerForUniversalSegmentation

from ..rewrites import Patch, Rewrite, TorchForTracing, sampled
from .grounding_dino import tensor_backbone
from .query_masks import InstanceOutput, Instances


class Mask2FormerForInstanceSegmentation(Instances, Mask2FormerForUniversalSegmentation):
    """config.mask_downsample_ratio: stride of the mask logits. Inference only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config.mask_downsample_ratio = config.common_stride

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **options: Any) -> InstanceOutput:
        """pixel_values (b, 3, h, w), normalised; pixel_mask (b, h, w), 1 for the image."""
        # The model does not look at the mask: padding is 0 in training, too.
        found = super().forward(pixel_values)
        return self.instances(found, self.image_of(pixel_values, pixel_mask))


class _Torch(TorchForTracing):
    """`torch` for Mask2Former's module, also with sizes of levels in `torch.tensor`."""

    @staticmethod
    def tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return TorchForTracing.as_tensor(data, dtype=dtype, device=device)


def _patches(module: ModuleType, model: Any) -> list[Patch]:
    encoder = model.model.pixel_level_module.encoder
    backbone = tensor_backbone(encoder)
    return [
        (module, "torch", _Torch()),
        (module, "multi_scale_deformable_attention", sampled),
        (encoder, "forward", lambda pixels, **options: SimpleNamespace(feature_maps=tuple(backbone(pixels)))),
    ]


REWRITE = Rewrite("sizes of maps become constants, and deformable attention one op", _patches)
