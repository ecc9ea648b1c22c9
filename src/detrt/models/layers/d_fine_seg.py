"""D-FINE with the mask head of ArgoHA/D-FINE-seg, which transformers does not have; names of parameters are theirs for the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DFineForObjectDetection
from transformers.models.d_fine import modeling_d_fine as stock

GROUPS = 32  # of each GroupNorm


@dataclass
class DFineInstanceSegmentationOutput(stock.DFineObjectDetectionOutput):
    """pred_masks: (batch, queries, height / stride, width / stride), logits."""

    pred_masks: Tensor | None = None


class MaskDecoder(nn.Module):
    """Levels of the encoder to one map of features, of twice the size of the finest level.

    detail: channels of a map of that size which is added, such as a stage of the backbone; 0: none.
    """

    def __init__(self, channels: list[int], width: int, detail: int = 0) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(count, width, 1, bias=False) for count in channels])
        self.bn = nn.ModuleList([nn.GroupNorm(GROUPS, width) for _ in channels])
        self.fusion_conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.fusion_norm = nn.GroupNorm(GROUPS, width)
        self.up_conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(GROUPS, width)
        if detail:
            self.detail = nn.Conv2d(detail, width, 1, bias=False)
            self.detail_norm = nn.GroupNorm(GROUPS, width)

    def forward(self, levels: list[Tensor], detail: Tensor | None = None) -> Tensor:
        """levels: (batch, channels, height, width) each, finest first."""
        projected = [norm(conv(level)) for norm, conv, level in zip(self.bn, self.lateral, levels, strict=True)]
        fused = projected[0]
        for level in projected[1:]:
            fused = fused + nn.functional.interpolate(level, size=projected[0].shape[-2:], mode="bilinear", align_corners=False)
        fused = self.fusion_norm(self.fusion_conv(fused)).relu()
        fused = nn.functional.interpolate(fused, scale_factor=2.0, mode="bilinear", align_corners=False)
        if detail is not None:
            fused = fused + self.detail_norm(self.detail(detail))
        return self.bn1(self.up_conv(fused)).relu()


class DFineForInstanceSegmentation(DFineForObjectDetection):
    """config.mask_dim: width of the mask features. config.mask_downsample_ratio: half the stride of the finest level."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        levels = len(config.encoder_in_channels)
        self.mask_decoder = MaskDecoder([config.encoder_hidden_dim] * levels, config.mask_dim)
        self.mask_head = stock.DFineMLP(config.d_model, config.d_model, config.mask_dim, 3)

    def forward(self, pixel_values: Tensor, **options: Any) -> DFineInstanceSegmentationOutput:
        found = super().forward(pixel_values, **{**options, "return_dict": True})
        queries = self.mask_head(found.last_hidden_state)
        maps = self.mask_decoder(list(found.encoder_last_hidden_state))
        # Scaled as an attention is.
        logits = torch.matmul(queries * queries.shape[-1] ** -0.5, maps.flatten(2))
        logits = logits.view(logits.shape[0], logits.shape[1], maps.shape[2], maps.shape[3])
        return DFineInstanceSegmentationOutput(**found, pred_masks=logits)
