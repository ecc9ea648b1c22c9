"""A detector of three parts: a plain ViT of EdgeCrafter, the neck of RT-DETR and the decoder of D-FINE. Parameter names are transformers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DFineForObjectDetection
from transformers.models.d_fine import modeling_d_fine as stock
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as stock_neck

from .deimv2 import keep_plain, make_traceable, rescaled
from .edgecrafter import ConvPatches

READ = 2  # last layers of the ViT whose mean is the map


class Pyramid(nn.Module):
    """The mean of the last layers of a ViT at three strides, each or only the coarsest projected."""

    def __init__(self, config: Any, backbone: Any) -> None:
        super().__init__()
        width, levels = config.backbone_config.hidden_size, len(config.encoder_in_channels)
        self.backbone = backbone
        keep_plain(self)
        del backbone.embeddings.mask_token
        backbone.embeddings.patch_embeddings = ConvPatches(config, width)
        rope = backbone.rope_embeddings
        rope.register_buffer("inv_freq", rope.inv_freq)  # a file has its own, so it must be filled like the others
        self.fusion_proj = nn.ModuleList(
            [
                nn.Identity()
                if level < levels - config.projections
                else stock.DFineConvNormLayer(config, width, config.encoder_in_channels[level], 1, 1)
                for level in range(levels)
            ]
        )
        make_traceable(backbone)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None) -> list[tuple[Tensor, None]]:
        """(b, 3, h, w) -> maps of strides 8, 16 and 32, as transformers' encoders return them; sides are multiples of 32."""
        mean = torch.stack(list(self.backbone(pixel_values).feature_maps[-READ:])).mean(0)
        return [(project(level), None) for project, level in zip(self.fusion_proj, rescaled(mean, mean, mean), strict=True)]


class VitDFineForObjectDetection(DFineForObjectDetection):
    """config: a `DFineConfig` with a `dinov3_vit`, of which three stages are named, one for each level; the last `READ` are read.
    config.projections: 3, or 1 where only the coarsest level of the backbone is projected."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        model: Any = self.model
        model.backbone = Pyramid(config, model.backbone.model)
        neck = config.encoder_hidden_dim
        model.encoder_input_proj = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, neck, 1, bias=False), nn.BatchNorm2d(neck)) for width in config.encoder_in_channels
        )
        model.encoder = stock_neck.RTDetrV2HybridEncoder(config)
        for block in (*model.encoder.fpn_blocks, *model.encoder.pan_blocks):
            block.bottlenecks = block.bottlenecks[: round(3 * config.depth_mult)]
