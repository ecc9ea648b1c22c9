"""Scores and boxes of queries that are masks, as those of MaskFormer's successors.

The rules are those of the image processors of transformers, `post_process_instance_segmentation`: a mask is where its logit is above 0, and
a score is the probability of a class times the mean probability inside the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

LEAST = 1e-6  # mean probability inside a mask without pixels, whose score is below any threshold


@dataclass
class InstanceOutput(ModelOutput):
    """logits (b, q, classes), whose sigmoid is the score; pred_boxes (b, q, 4) as (cx, cy, w, h) in 0..1; pred_masks (b, q, height / stride,
    width / stride), logits. Boxes are relative to the image, masks cover the padded input."""

    logits: Tensor | None = None
    pred_boxes: Tensor | None = None
    pred_masks: Tensor | None = None


class Instances:
    """A class of transformers whose queries are masks, with boxes and scores. config.mask_downsample_ratio: stride of the mask logits."""

    config: Any

    def of_library(self) -> Any:
        """transformers' model of these weights, without boxes and scores."""
        library: Any = next(one for one in type(self).__mro__ if one.__module__.startswith("transformers."))
        found = library(self.config)
        found.load_state_dict(self.state_dict())  # type: ignore[attr-defined]
        return found

    @staticmethod
    def image_of(pixel_values: Tensor, pixel_mask: Tensor | None) -> Tensor:
        """(b, 1, h, w), 1 for the image. pixel_values: (b, 3, h, w). pixel_mask: (b, h, w), or None for all."""
        return torch.ones_like(pixel_values[:, :1]) if pixel_mask is None else pixel_mask.unsqueeze(1).to(pixel_values.dtype)

    def instances(self, found: Any, image: Tensor) -> InstanceOutput:
        """found: what transformers' class returns. image: see `image_of`."""
        masks = found.masks_queries_logits
        covered = nn.functional.avg_pool2d(image, self.config.mask_downsample_ratio)
        return InstanceOutput(
            logits=instance_logits(found.class_queries_logits, masks, covered),
            pred_boxes=boxes_of(masks, covered),
            pred_masks=masks,
        )


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
    centres = torch.arange(masks.shape[-1], device=masks.device).to(masks.dtype) + 0.5
    # How far from the centre of a value the logit stays above 0: to the next value, or at an end to the edge of the map.
    step = (masks[..., 1:] - masks[..., :-1]).abs().clamp(min=1e-12)
    reach = [(masks[..., part].clamp(min=0) / step).clamp(max=1) for part in (slice(None, -1), slice(1, None))]
    half = torch.full_like(masks[..., :1], 0.5)
    last = torch.where(above, centres + torch.cat([reach[0], half], dim=-1), torch.zeros_like(masks))
    first = torch.where(above, centres - torch.cat([half, reach[1]], dim=-1), (centres[-1] + 0.5).expand_as(masks))
    return first.amin((2, 3)), last.amax((2, 3))
