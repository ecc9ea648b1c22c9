"""The backbone of DEIMv2 S, M, L and X: a DINOv3 ViT and a spatial tuning adapter beside it.

Huang et al., arXiv:2509.20787, section 3; Siméoni et al., arXiv:2508.10104. transformers has the modules; what is
here computes the same with sizes that stay symbolic while tracing. Names of parameters are those of transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deimv2 import modeling_deimv2 as stock
from transformers.models.dinov3_vit import modeling_dinov3_vit as vit


class Tokens(vit.DINOv3ViTEmbeddings):
    """Patches, behind a class token and the register tokens where there are any."""

    def forward(self, pixel_values: Tensor, bool_masked_pos: Tensor | None = None) -> Tensor:
        """(b, 3, h, w) -> (b, 1 + registers + h/p w/p, d)"""
        patches = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        first = [self.cls_token] if self.register_tokens is None else [self.cls_token, self.register_tokens]
        return torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in first), patches], dim=1)


class PatchAngles(vit.DINOv3ViTRopePositionEmbedding):
    """Angles of the rotary position embedding: the centres of the patches, each axis from -1 to 1."""

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """(b, 3, h, w) -> cosines and sines (h/p w/p, d of a head)"""
        sides = [pixel_values.shape[axis] // self.config.patch_size for axis in (2, 3)]
        axes = [2 * (torch.arange(side, device=pixel_values.device) + 0.5) / side - 1 for side in sides]
        centres = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)  # (patches, 2) y, x
        angles = (2 * math.pi * centres[:, :, None] * self.inv_freq).flatten(1, 2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


class RopeAttention(vit.DINOv3ViTAttention):
    """Self-attention whose patches, but not its first tokens, are turned by their angles."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        batch, count, _ = hidden_states.shape
        query, key, value = (
            layer(hidden_states).view(batch, count, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        assert position_embeddings is not None
        cosine, sine = position_embeddings
        first = 1 + self.config.num_register_tokens
        query, key = (
            torch.cat([x[:, :, :first], x[:, :, first:] * cosine + vit.rotate_half(x[:, :, first:]) * sine], dim=2)
            for x in (query, key)
        )
        weights = (query @ key.transpose(2, 3) * self.scaling).softmax(dim=-1)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2)), None


class Layers(vit.DINOv3ViTEncoder):
    """All layers; the states in front of the first and behind each of them."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> BaseModelOutput:
        states = [hidden_states]
        for layer in self.layer:
            states.append(layer(states[-1], position_embeddings=position_embeddings))
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=tuple(states))


class StaEncoder(stock.Deimv2DINOv3ConvEncoder):
    """Three chosen layers of the ViT at strides 8, 16 and 32, each joined with the adapter's map of that stride."""

    def forward(self, pixel_values: Tensor, **options: Any) -> list[Tensor]:
        """(b, 3, h, w) -> maps (b, d, h/8, w/8), (b, d, h/16, w/16), (b, d, h/32, w/32); sides are multiples of 32."""
        fine, middle, coarse = self.backbone(pixel_values).feature_maps
        # At an exact factor these are what a bilinear resize without aligned corners gives.
        fine = nn.functional.interpolate(fine, scale_factor=2.0, mode="bilinear", align_corners=False)
        coarse = nn.functional.avg_pool2d(coarse, 2)
        details = self.spatial_tuning_adapter(pixel_values)
        maps = zip(self.fusion_proj, (fine, middle, coarse), details, strict=True)
        return [project(torch.cat([meaning, detail], dim=1)) for project, meaning, detail in maps]


_OWN = {
    vit.DINOv3ViTEmbeddings: Tokens,
    vit.DINOv3ViTRopePositionEmbedding: PatchAngles,
    vit.DINOv3ViTAttention: RopeAttention,
    vit.DINOv3ViTEncoder: Layers,
    stock.Deimv2DINOv3ConvEncoder: StaEncoder,
}


def make_traceable(encoder: nn.Module) -> None:
    """Give the parts of a `Deimv2DINOv3ConvEncoder` the forward passes above, in place."""
    for module in encoder.modules():
        if type(module) in _OWN:
            module.__class__ = _OWN[type(module)]


def keep_plain(encoder: nn.Module) -> None:
    """Take out what the small ViTs of DEIMv2 (S and M) do not have: last norm, scales of layers, mask and registers."""
    backbone = encoder.backbone
    backbone.norm = nn.Identity()
    backbone.embeddings.register_tokens = None
    for layer in backbone.model.layer:
        layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
