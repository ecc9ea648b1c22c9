"""ECDet and ECSeg of EdgeCrafter, for inference, which transformers does not have (Intellindust-AI-Lab/EdgeCrafter).

The detector is the published DEIMv2 with two changes: a ViT that has convolutions for patches and no adapter, and decoder layers with
LayerNorm and a feed-forward part of two linear layers. Names of parameters are those of transformers' DEIMv2, DINOv3 and RF-DETR.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RfDetrConfig
from transformers.models.deimv2 import modeling_deimv2 as stock
from transformers.models.rf_detr import modeling_rf_detr as stock_masks

from .deimv2 import PublishedDeimv2, StaEncoder, keep_plain, rescaled

FINEST = 8  # stride of the finest level


class ConvPatches(nn.Module):
    """Patches of 16 pixels by four convolutions."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        channels = (3, width // 8, width // 4, width // 2)
        self.convs = nn.ModuleList(
            [stock.Deimv2ConvNormLayer(config, before, after, 3, 2, activation="relu") for before, after in pairwise(channels)]
        )
        self.proj = nn.Conv2d(width // 2, width, 3, stride=2, padding=1)

    @property
    def weight(self) -> Tensor:
        """transformers casts the pixels to the type of the patches' weight."""
        return self.proj.weight

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(b, 3, h, w) -> (b, d, h/16, w/16)"""
        for conv in self.convs:
            pixel_values = conv(pixel_values)
        return self.proj(pixel_values)


class EcEncoder(StaEncoder):
    """The backbone of ECDet: the mean of the read layers of a ViT, at three strides."""

    def forward(self, pixel_values: Tensor, **options: Any) -> list[Tensor]:
        """(b, 3, h, w) -> maps (b, d, h/8, w/8), (b, d, h/16, w/16), (b, d, h/32, w/32); sides are multiples of 32."""
        mean = torch.stack(list(self.backbone(pixel_values).feature_maps)).mean(0)
        return [project(level) for project, level in zip(self.fusion_proj, rescaled(mean, mean, mean), strict=True)]


class EcDetForObjectDetection(PublishedDeimv2):
    """config: a `Deimv2Config` with a `dinov3_vit`. config.projections: 3, or 1 where only the coarsest level of the backbone is projected."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        encoder: Any = self.model.conv_encoder
        width = config.backbone_config.hidden_size
        keep_plain(encoder)
        del encoder.spatial_tuning_adapter, encoder.backbone.embeddings.mask_token
        encoder.backbone.embeddings.patch_embeddings = ConvPatches(config, width)
        rope = encoder.backbone.rope_embeddings
        rope.register_buffer("inv_freq", rope.inv_freq)  # a file has its own, so it must be filled like the others
        levels = len(encoder.fusion_proj)
        encoder.fusion_proj = nn.ModuleList(
            [
                nn.Identity()
                if level < levels - config.projections
                else stock.Deimv2ConvNormLayer(config, width, config.encoder_hidden_dim, 1, 1)
                for level in range(levels)
            ]
        )
        encoder.__class__ = EcEncoder
        for layer in self.model.decoder.layers:
            layer.self_attn_layer_norm = nn.LayerNorm(config.d_model)
            layer.gateway.norm = nn.LayerNorm(config.d_model)
            layer.mlp = stock.Deimv2MLP(config.d_model, config.decoder_ffn_dim, config.d_model, 2, "silu")
            layer.final_layer_norm = nn.LayerNorm(config.d_model)


@dataclass
class EcDetInstanceSegmentationOutput(stock.Deimv2ObjectDetectionOutput):
    """pred_masks: (batch, queries, height / stride, width / stride), logits."""

    pred_masks: Tensor | None = None


class MaskHead(nn.Module):
    """RF-DETR's mask head with one block, as the authors evaluate ECSeg.

    Their head has a block for each decoder layer and runs as many as it gets layers of queries: all in training, one in evaluation.
    """

    get_mask_logits = stock_masks.RfDetrForInstanceSegmentation.get_mask_logits

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        sizes = RfDetrConfig(d_model=width, intermediate_size=4 * width)
        self.scale = scale
        self.block = stock_masks.RfDetrSegmentationBlock(sizes)
        self.spatial_features_proj = nn.Conv2d(width, width, 1)
        self.query_features_block = stock_masks.RfDetrSegmentationMLPBlock(sizes)
        self.query_features_proj = nn.Linear(width, width)
        self.segmentation_bias = nn.Parameter(torch.zeros(1))

    def forward(self, level: Tensor, queries: Tensor) -> Tensor:
        """level (b, d, h/8, w/8), queries (b, q, d) -> (b, q, h/8 scale, w/8 scale), logits."""
        maps = nn.functional.interpolate(level, scale_factor=self.scale, mode="bilinear", align_corners=False)
        return self.get_mask_logits(queries, self.spatial_features_proj(self.block(maps)))


class EcDetForInstanceSegmentation(EcDetForObjectDetection):
    """ECSeg. config.mask_downsample_ratio: stride of the masks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mask_head = MaskHead(config.d_model, FINEST / config.mask_downsample_ratio)

    def forward(self, pixel_values: Tensor, **options: Any) -> EcDetInstanceSegmentationOutput:
        found = super().forward(pixel_values, **{**options, "return_dict": True})
        masks = self.mask_head(found.encoder_last_hidden_state[0], found.last_hidden_state)
        return EcDetInstanceSegmentationOutput(**found, pred_masks=masks)
