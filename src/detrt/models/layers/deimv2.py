"""DEIMv2 as its authors run it, for inference (Huang et al., arXiv:2509.20787).

transformers 5.23 has a class of this name that computes another function. The published decoder
 1. selects its queries on the encoder's memory directly, without a linear layer and norm (`enc_output`),
 2. has SiLU, not ReLU, between the layers of its box heads and of the quality estimators,
 3. encodes the boxes it starts from once (`query_pos_head`), not the refined ones again in every layer.
Names of parameters are those of transformers, without `enc_output`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deimv2 import modeling_deimv2 as stock
from transformers.models.dinov3_vit import modeling_dinov3_vit as vit


class PublishedDecoder(stock.Deimv2Decoder):
    """Fine-grained distribution refinement: every layer adds to the distributions of the four edges."""

    def forward(
        self,
        encoder_hidden_states: Tensor,
        reference_points: Tensor,
        inputs_embeds: Tensor,
        spatial_shapes: Any,
        level_start_index: Any = None,
        spatial_shapes_list: Any = None,
        encoder_attention_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        **options: Any,
    ) -> stock.Deimv2DecoderOutput:
        """encoder_hidden_states (b, pixels, d); reference_points (b, q, 4), logits; inputs_embeds (b, q, d)."""
        bins = stock.weighting_function(self.max_num_bins, self.up, self.reg_scale)
        start = reference_points.sigmoid()  # (b, q, 4) cxcywh
        place = self.query_pos_head(start).clamp(-10, 10)
        hidden, previous, edges, boxes, anchor = inputs_embeds, None, None, start, start
        states = []
        for index, layer in enumerate(self.layers[: self.eval_idx + 1]):
            hidden = layer(
                hidden,
                position_embeddings=place,
                reference_points=boxes.unsqueeze(2),
                spatial_shapes=spatial_shapes,
                spatial_shapes_list=spatial_shapes_list,
                encoder_hidden_states=encoder_hidden_states,
                encoder_attention_mask=encoder_attention_mask,
                **options,
            )
            if index == 0:
                anchor = (self.pre_bbox_head(hidden) + stock.inverse_sigmoid(start)).sigmoid()
            step = self.bbox_embed[index](hidden if previous is None else hidden + previous)  # (b, q, 4 (bins + 1))
            edges = step if edges is None else edges + step
            boxes = stock.distance2bbox(anchor, self.integral(edges, bins), self.reg_scale)
            previous = hidden
            states.append(hidden)
        logits = self.lqe_layers[self.eval_idx](self.class_embed[self.eval_idx](hidden), edges)
        return stock.Deimv2DecoderOutput(
            last_hidden_state=hidden,
            intermediate_hidden_states=torch.stack(states),
            intermediate_logits=logits.unsqueeze(1),
            intermediate_reference_points=boxes.unsqueeze(1),
            intermediate_predicted_corners=edges.unsqueeze(1),
            initial_reference_points=anchor.unsqueeze(1),
        )


class PublishedDeimv2(Deimv2ForObjectDetection):
    """DEIMv2 with the published decoder, for inference only; otherwise as `Deimv2ForObjectDetection`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.enc_output = nn.Identity()
        if isinstance(self.model.conv_encoder, stock.Deimv2DINOv3ConvEncoder):
            make_traceable(self.model.conv_encoder)
        decoder = self.model.decoder
        decoder.__class__ = PublishedDecoder
        for owner in (self.model.enc_bbox_head, decoder):
            for module in owner.modules():
                if isinstance(module, stock.Deimv2MLP):
                    module.act = nn.SiLU()

    def train(self, mode: bool = True) -> PublishedDeimv2:
        if mode:
            raise RuntimeError("this DEIMv2 is for inference; its decoder has no training outputs")
        return super().train(mode)


class Tokens(vit.DINOv3ViTEmbeddings):
    """Patches, after a class token and any register tokens."""

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


class TracedDinov3Attention(vit.DINOv3ViTAttention):
    """Self-attention with rotary positions for patches, but not for the first tokens."""

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
    """All layers; returns the states before the first and after each of them."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **options: Any) -> BaseModelOutput:
        states = [hidden_states]
        for layer in self.layer:
            states.append(layer(states[-1], position_embeddings=position_embeddings))
        return BaseModelOutput(last_hidden_state=states[-1], hidden_states=tuple(states))


def rescaled(fine: Tensor, middle: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Maps (b, d, h, w) -> (b, d, 2 h, 2 w), (b, d, h, w), (b, d, h/2, w/2); h and w are even."""
    fine = nn.functional.interpolate(fine, scale_factor=2.0, mode="bilinear", align_corners=False)
    # At an integer factor this equals a bilinear resize without aligned corners.
    return fine, middle, nn.functional.avg_pool2d(coarse, 2)


class StaEncoder(stock.Deimv2DINOv3ConvEncoder):
    """The backbone of DEIMv2 S, M, L and X: a DINOv3 ViT and a spatial tuning adapter.

    Three layers of the ViT at strides 8, 16 and 32 are each joined with the map of the adapter of that stride. The modules compute
    the same as those of transformers, with sizes that stay symbolic while tracing, and have the same parameter names. Huang et al.,
    arXiv:2509.20787, section 3; Siméoni et al., arXiv:2508.10104.
    """

    def forward(self, pixel_values: Tensor, **options: Any) -> list[Tensor]:
        """(b, 3, h, w) -> maps (b, d, h/8, w/8), (b, d, h/16, w/16), (b, d, h/32, w/32); sides are multiples of 32."""
        details = self.spatial_tuning_adapter(pixel_values)
        maps = zip(self.fusion_proj, rescaled(*self.backbone(pixel_values).feature_maps), details, strict=True)
        return [project(torch.cat([meaning, detail], dim=1)) for project, meaning, detail in maps]


_OWN = {
    vit.DINOv3ViTEmbeddings: Tokens,
    vit.DINOv3ViTRopePositionEmbedding: PatchAngles,
    vit.DINOv3ViTAttention: TracedDinov3Attention,
    vit.DINOv3ViTEncoder: Layers,
    stock.Deimv2DINOv3ConvEncoder: StaEncoder,
}


def make_traceable(encoder: nn.Module) -> None:
    """Replace the modules of a `Deimv2DINOv3ConvEncoder` by those above, in place."""
    for module in encoder.modules():
        if type(module) in _OWN:
            module.__class__ = _OWN[type(module)]


def keep_plain(encoder: nn.Module) -> None:
    """Remove modules that the small ViTs of DEIMv2 (S and M) do not have: last norm, layer scales, mask and registers."""
    backbone = encoder.backbone
    backbone.norm = nn.Identity()
    backbone.embeddings.register_tokens = None
    for layer in backbone.model.layer:
        layer.layer_scale1 = layer.layer_scale2 = nn.Identity()
