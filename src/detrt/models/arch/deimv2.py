"""DEIMv2 as its authors run it, for inference (Huang et al., arXiv:2509.20787).

transformers 5.23 has a class of this name that computes another function. The published decoder
 1. selects its queries on the encoder's memory as it is: no linear layer and norm (`enc_output`) on it,
 2. has SiLU, not ReLU, between the layers of its box heads and of the quality estimators,
 3. encodes the boxes it starts from once (`query_pos_head`), not the refined ones again in every layer.
Names of parameters are those of transformers, without `enc_output`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Deimv2ForObjectDetection
from transformers.models.deimv2 import modeling_deimv2 as stock

from .dinov3_sta import make_traceable


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
    """Takes and returns what `Deimv2ForObjectDetection` does; it cannot be trained."""

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
