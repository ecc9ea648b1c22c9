"""RT-DETRv2 with the mask head of D-FINE-seg, which transformers does not have: the class of `embedded:shapes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RTDetrV2ForObjectDetection
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as stock

from .d_fine_seg import MaskDecoder

SHARPNESS = 2.0  # initial value


@dataclass
class RTDetrV2InstanceSegmentationOutput(stock.RTDetrV2ObjectDetectionOutput):
    """pred_masks: (batch, queries, height / stride, width / stride), logits."""

    pred_masks: Tensor | None = None


class RTDetrV2ForInstanceSegmentation(RTDetrV2ForObjectDetection):
    """config.mask_dim: width of the mask features. config.mask_downsample_ratio: stride of the first stage of the backbone.

    Its detector may be frozen: the head takes details from the first stage of the backbone, and where an object is from the
    predicted box, which features that were trained for boxes do not say.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        levels = [config.encoder_hidden_dim] * len(config.encoder_in_channels)
        self.mask_decoder = MaskDecoder(levels, config.mask_dim, detail=config.backbone_config.hidden_sizes[0])
        self.mask_head = stock.RTDetrV2MLPPredictionHead(config.d_model, config.d_model, config.mask_dim, 3)
        # How fast logits fall outside of the box, for each value of the map.
        self.mask_sharpness = nn.Parameter(torch.tensor([SHARPNESS]))

    def forward(self, pixel_values: Tensor, **options: Any) -> RTDetrV2InstanceSegmentationOutput:
        detail: list[Tensor] = []
        hook = self.model.backbone.model.encoder.stages[0].register_forward_hook(lambda _, __, output: detail.append(output))
        try:
            found = super().forward(pixel_values, **{**options, "return_dict": True})
        finally:
            hook.remove()
        levels = list(found.encoder_last_hidden_state)
        masks = self.predict_masks(found.last_hidden_state, found.pred_boxes, levels, detail[0])
        return RTDetrV2InstanceSegmentationOutput(**found, pred_masks=masks)

    def predict_masks(self, queries: Tensor, boxes: Tensor, levels: list[Tensor], detail: Tensor) -> Tensor:
        """Mask logits, (batch, queries, height, width) of `detail`.

        queries: (batch, queries, d_model). boxes: (batch, queries, 4) as (cx, cy, w, h) in 0..1. levels: of the encoder, finest
        first. detail: (batch, channels, height, width), output of the first stage of the backbone.
        """
        weights = self.mask_head(queries)
        maps = self.mask_decoder(levels, detail)
        height, width = maps.shape[-2:]
        # Scaled as an attention is.
        logits = torch.matmul(weights * weights.shape[-1] ** -0.5, maps.flatten(2))
        logits = logits.view(logits.shape[0], logits.shape[1], height, width)
        centre_x, centre_y, box_width, box_height = boxes.unbind(-1)
        outside_x = _outside(centre_x, box_width, width) * self.mask_sharpness
        outside_y = _outside(centre_y, box_height, height) * self.mask_sharpness
        return logits - outside_x.unsqueeze(2) - outside_y.unsqueeze(3)


def _outside(centre: Tensor, size: Tensor, count: int) -> Tensor:
    """(batch, queries, count): how far each of `count` values is outside of a box along one axis, in steps between values.

    centre, size: (batch, queries) in 0..1.
    """
    positions = torch.arange(count, device=centre.device, dtype=centre.dtype) + 0.5
    distance = (positions - (centre * count).unsqueeze(-1)).abs()
    return (distance - (size * (0.5 * count)).unsqueeze(-1)).clamp(min=0)
