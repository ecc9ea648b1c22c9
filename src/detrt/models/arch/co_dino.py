"""Co-DINO: DINO trained with collaborative heads (Zong et al., arXiv:2211.12860), inference only.

At inference it is DINO: RPN, RoI and ATSS heads, their `aux_pos_trans` queries (`with_pos_coord`,
`with_coord_feat`), the extra `downsample` map and the label embedding only make training losses. What
differs is around the network: soft-NMS on the result, and the "LSJ" models, which were trained and are
tested on one square canvas without a padding mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dino import DetectorOutput, Dino, DinoConfig

# What the LSJ configs pad with before normalisation, and the mean and std of all configs (RGB, 0..255).
LSJ_PADDING = 114.0
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)


class CoDino(Dino):
    """See `Dino`. attend_padding: a model trained with large scale jittering (`with_attn_mask=False`): the
    padding has the colour 114 and is attended to, and boxes are relative to the canvas; they are returned
    relative to the image, as everywhere else.
    """

    def __init__(self, config: DinoConfig, *, attend_padding: bool = False) -> None:
        super().__init__(config)
        self.attend_padding = attend_padding
        colour = [(LSJ_PADDING - mean) / std for mean, std in zip(_MEAN, _STD, strict=True)]
        self.register_buffer("padding_colour", torch.tensor(colour).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **_: Any) -> DetectorOutput:
        if not self.attend_padding or pixel_mask is None:
            return super().forward(pixel_values, pixel_mask)
        image = pixel_mask.to(pixel_values.dtype)
        padded = pixel_values + (1 - image).unsqueeze(1) * self.padding_colour
        found = super().forward(padded, torch.ones_like(image))
        # Images lie in the upper left corner, so the first row and column tell their size.
        sides = torch.stack([image[:, 0].mean(1), image[:, :, 0].mean(1)], -1)
        return DetectorOutput(found.logits, found.pred_boxes / sides.repeat(1, 2).unsqueeze(1))
