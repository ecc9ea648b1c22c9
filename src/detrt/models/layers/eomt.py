"""EoMT as an instance segmenter: the queries of transformers' class are masks, from which boxes and scores are derived (Kerssies et al.,
arXiv:2503.19108).

The rules are those of `EomtImageProcessor.post_process_instance_segmentation`: a mask is where its logit is above 0, and the score of a query
is the probability of its best class times the mean probability inside the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EomtDinov3ForUniversalSegmentation, EomtForUniversalSegmentation
from transformers.modeling_outputs import ModelOutput

from ...errors import ExportError, SourceError
from ..families import IMAGENET_MEAN, IMAGENET_STD

LEAST = 1e-6  # mean probability inside a mask without pixels, whose score is below any threshold


@dataclass
class EomtInstanceSegmentationOutput(ModelOutput):
    """logits (b, q, classes), whose sigmoid is the score; pred_boxes (b, q, 4) as (cx, cy, w, h) in 0..1; pred_masks (b, q, height / stride,
    width / stride), logits. Boxes are relative to the image, masks cover the padded input."""

    logits: Tensor | None = None
    pred_boxes: Tensor | None = None
    pred_masks: Tensor | None = None


class _Instances:
    """The forward pass of an EoMT with boxes and scores. Inference only.

    config.mask_downsample_ratio: stride of the mask logits.
    """

    config: Any
    padding: Tensor
    _buffers: dict[str, Tensor | None]
    _constants: list[float] | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        config.mask_downsample_ratio = config.patch_size // 2**config.num_upscale_blocks
        self.pad_with(IMAGENET_MEAN, IMAGENET_STD)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """As the Auto classes have it."""
        return cls._from_config(config, **options)  # type: ignore[attr-defined]

    def of_library(self) -> Any:
        """transformers' model of these weights, without boxes and scores."""
        library = type(self).__mro__[2]
        found = library(self.config)
        found.load_state_dict(self.state_dict())  # type: ignore[attr-defined]
        return found

    def pad_with(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Fill padding with black, normalised, as its image processor does."""
        values = [-m / s for m, s in zip(mean, std, strict=True)]
        self.register_buffer("padding", torch.tensor(values).view(1, 3, 1, 1), persistent=False)  # type: ignore[attr-defined]

    @property
    def attn_mask_probs(self) -> Any:
        """Of masked attention in each of the last layers: transformers' buffer, or after `fix_attention` its values."""
        if "attn_mask_probs" not in self._buffers:
            raise AttributeError("attn_mask_probs")
        return self._buffers["attn_mask_probs"] if self._constants is None else self._constants

    def fix_attention(self) -> None:
        """Turn the probabilities of masked attention into constants, on which a tracer can branch.

        Raises:
            SourceError: some are between 0 and 1, so that transformers' class draws random numbers.
        """
        found = self.attn_mask_probs.tolist()
        if any(0 < value < 1 for value in found):
            raise SourceError(
                f"its attention is masked at random (attn_mask_probs {found}), in the middle of training; train it to the end"
            )
        self._constants = found

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **options: Any) -> EomtInstanceSegmentationOutput:
        """pixel_values (b, 3, h, w), normalised; pixel_mask (b, h, w), 1 for the image."""
        side = self.config.image_size
        if (int(pixel_values.shape[2]), int(pixel_values.shape[3])) != (side, side):
            raise ExportError(f"EoMT takes {side}x{side} only, the size of its position table; leave `size` out")
        if pixel_mask is None:
            image = torch.ones_like(pixel_values[:, :1])
        else:
            image = pixel_mask.unsqueeze(1).to(pixel_values.dtype)
            pixel_values = pixel_values * image + self.padding * (1 - image)
        found = super().forward(pixel_values)  # type: ignore[misc]
        masks = found.masks_queries_logits
        covered = nn.functional.avg_pool2d(image, self.config.mask_downsample_ratio)
        return EomtInstanceSegmentationOutput(
            logits=instance_logits(found.class_queries_logits, masks, covered),
            pred_boxes=boxes_of(masks, covered),
            pred_masks=masks,
        )


class EomtForInstanceSegmentation(_Instances, EomtForUniversalSegmentation):
    pass


class EomtDinov3ForInstanceSegmentation(_Instances, EomtDinov3ForUniversalSegmentation):
    pass


def instance_logits(classes: Tensor, masks: Tensor, covered: Tensor) -> Tensor:
    """(b, q, classes), whose sigmoid is the probability of a class times the mean probability inside the mask.

    The mean is taken on maps of twice the size: transformers takes it on masks of the image's size.

    classes: (b, q, classes + 1), the last is "no object". masks: (b, q, h, w), logits. covered: (b, 1, h, w), how much of each value is image.
    """
    masks = nn.functional.interpolate(masks, scale_factor=2.0, mode="bilinear", align_corners=False)
    inside = (masks > 0).to(masks.dtype) * nn.functional.interpolate(covered, scale_factor=2.0, mode="nearest")
    mean = (masks.sigmoid() * inside).mean((2, 3)) / inside.mean((2, 3)).clamp(min=LEAST)
    scores = (classes.softmax(-1)[..., :-1] * mean.unsqueeze(-1)).clamp(LEAST, 1 - LEAST)
    return scores.log() - (1 - scores).log()


def boxes_of(masks: Tensor, covered: Tensor) -> Tensor:
    """(b, q, 4) as (cx, cy, w, h) in 0..1 of the image: the smallest boxes around the masks, between the centres of the map's values linear;
    0 of empty masks.

    masks: (b, q, h, w), logits. covered: (b, 1, h, w), how much of each value is image, from the top left.
    """
    above = (masks > 0) & (covered > 0)
    low_x, high_x = _extent(masks, above)
    low_y, high_y = _extent(masks.transpose(2, 3), above.transpose(2, 3))
    size = torch.stack([covered[:, :, 0].sum(-1), covered[:, :, :, 0].sum(-1)], dim=-1)  # (b, 1, 2)
    low = (torch.stack([low_x, low_y], dim=-1) / size).clamp(0, 1)
    high = (torch.stack([high_x, high_y], dim=-1) / size).clamp(0, 1)
    boxes = torch.cat([(low + high) / 2, high - low], dim=-1)
    return torch.where(above.flatten(2).any(-1, keepdim=True), boxes, torch.zeros_like(boxes))


def _extent(masks: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """First and last position (b, q) along the last axis, in values of the map, of what is `above` in logits (b, q, rows, n)."""
    count = masks.shape[-1]
    centres = torch.arange(count, device=masks.device).to(masks.dtype) + 0.5
    # How far from the centre of a value the logit stays above 0: to the next value, or at an end to the edge of the map.
    step = (masks[..., 1:] - masks[..., :-1]).abs().clamp(min=1e-12)
    reach = [(masks[..., part].clamp(min=0) / step).clamp(max=1) for part in (slice(None, -1), slice(1, None))]
    half = torch.full_like(masks[..., :1], 0.5)
    last = torch.where(above, centres + torch.cat([reach[0], half], dim=-1), torch.zeros_like(masks))
    first = torch.where(above, centres - torch.cat([half, reach[1]], dim=-1), torch.full_like(masks, float(count)))
    return first.amin((2, 3)), last.amax((2, 3))
