"""DINO: DETR with improved denoising anchor boxes (Zhang et al., arXiv:2203.03605), inference only.

Denoising queries and auxiliary losses exist in training only and are not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .deformable import (
    HEADS,
    MLP,
    TEMPERATURE,
    DecoderLayer,
    EncoderLayer,
    level_masks,
    level_shapes,
    pixel_centres,
    sine_of_boxes,
    sine_position,
    valid_sides,
)
from .resnet import ResNet
from .swin import Swin
from .vit import SimplePyramid, Vit

# The original has infinity for tokens that cannot be proposals. Any number whose sigmoid is 1 gives the same boxes,
# and this one does not overflow in half precision.
NO_PROPOSAL = 1e4


GROUPS = 32


@dataclass(frozen=True, slots=True)
class DinoConfig:
    """Sizes of one DINO or Co-DINO, inferred from the shapes of a checkpoint, and what they do not tell.

    backbone: "resnet", "swin" or "vit". depths: blocks per stage. width: channels of the stem or patch embedding.
    heads, window: of Swin and ViT. attention_heads: of the transformer. temperature: of the position embedding. hidden, patch, positions, windowed: of `Vit`. out_stages: backbone stages that are used. levels: feature levels, extra ones
    included. conv_bias: see `ChannelMapper`. head_eps: the clamp of the inverse sigmoid in the last box;
    1e-3 in DINO and Co-DINO, 1e-5 in mmdetection's DINO.
    """

    num_labels: int
    num_queries: int
    backbone: str
    depths: tuple[int, ...]
    width: int
    out_stages: tuple[int, ...]
    levels: int
    heads: tuple[int, ...] = ()
    window: int = 0
    dim: int = 256
    ffn: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    points: int = 4
    attention_heads: int = HEADS
    temperature: int = TEMPERATURE
    conv_bias: bool = False
    head_eps: float = 1e-3
    groups: int = GROUPS
    hidden: int = 0
    patch: int = 0
    positions: int = 0
    windowed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DetectorOutput:
    """logits: (batch, queries, classes). pred_boxes: (batch, queries, 4) cxcywh of the unpadded image."""

    logits: Tensor
    pred_boxes: Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """Result of the encoder, and inputs of the decoder.

    memory: (batch, tokens, dim). keep: (batch, tokens, 1) float, 0 = padding. shapes: (levels, 2).
    ratios: (batch, levels, 2), image over padded level along x and y. proposals: (batch, tokens, 4) logits.
    usable: (batch, tokens, 1) bool, tokens that can be proposals.
    """

    memory: Tensor
    keep: Tensor
    shapes: Tensor
    ratios: Tensor
    proposals: Tensor
    usable: Tensor


def inverse_sigmoid(x: Tensor, eps: float) -> Tensor:
    """log(x / (1 - x)), with x and 1 - x clamped to eps."""
    x = x.clamp(0, 1)
    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))


class Encoder(nn.Module):
    def __init__(self, config: DinoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            EncoderLayer(config.dim, config.ffn, config.levels, config.points, config.attention_heads)
            for _ in range(config.encoder_layers)
        )


class Decoder(nn.Module):
    def __init__(self, config: DinoConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DecoderLayer(config.dim, config.ffn, config.levels, config.points, config.attention_heads)
            for _ in range(config.decoder_layers)
        )
        self.norm = nn.LayerNorm(config.dim)
        self.ref_point_head = MLP([2 * config.dim, config.dim, config.dim])


class Dino(nn.Module):
    """pixel_values: (batch, 3, height, width) normalised, zero in the padding. pixel_mask: (batch, height,
    width), 1 = image; None = no padding. Returns a `DetectorOutput`.

    `features`, `encode`, `select` and `decode` are its stages, in this order.
    """

    def __init__(self, config: DinoConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        if config.backbone == "resnet":
            self.backbone: nn.Module = ResNet(config.depths, config.width, config.out_stages)
        elif config.backbone == "vit":
            self.backbone = Vit(
                config.width,
                config.depths[0],
                config.heads[0],
                config.hidden,
                patch=config.patch,
                positions=config.positions,
                window=config.window,
                windowed=config.windowed,
            )
        else:
            self.backbone = Swin(config.width, config.depths, config.heads, config.window, config.out_stages)
        if config.backbone == "vit":
            self.neck: nn.Module = SimplePyramid(config.width, dim)
        else:
            self.neck = ChannelMapper(self.backbone.channels, dim, config.levels, bias=config.conv_bias, groups=config.groups)
        self.level_embed = nn.Parameter(torch.zeros(config.levels, dim))
        self.encoder = Encoder(config)
        self.enc_output = nn.Linear(dim, dim)
        self.enc_output_norm = nn.LayerNorm(dim)
        self.query_embed = nn.Parameter(torch.zeros(config.num_queries, dim))
        self.decoder = Decoder(config)
        # One head per decoder layer, and the last one for the proposals of the encoder.
        count = config.decoder_layers + 1
        self.class_heads = nn.ModuleList(nn.Linear(dim, config.num_labels) for _ in range(count))
        self.box_heads = nn.ModuleList(MLP([dim, dim, dim, 4]) for _ in range(count))
        self.eval()

    def features(self, pixel_values: Tensor) -> list[Tensor]:
        """(batch, dim, h, w) for each level."""
        return self.neck(self.backbone(pixel_values))

    def encode(self, maps: list[Tensor], mask: Tensor) -> Encoded:
        """Deformable encoder over all levels (Deformable DETR, section 4.1) and the grid of proposals.

        mask: (batch, height, width) of the input image.
        """
        dim = self.config.dim
        masks = level_masks(mask, maps)
        shapes = level_shapes(maps)
        sides = valid_sides(masks)
        ratios = sides / shapes.flip(-1).to(torch.float32)
        keep = torch.cat([m.flatten(1) for m in masks], 1).unsqueeze(-1)
        centres = [pixel_centres(m) / sides[:, None, i] for i, m in enumerate(masks)]  # relative to the image
        reference = torch.cat(centres, 1).unsqueeze(2) * ratios.unsqueeze(1)  # (batch, tokens, levels, 2)
        position = torch.cat(
            [sine_position(m, dim, self.config.temperature) + self.level_embed[i] for i, m in enumerate(masks)], 1
        )
        memory = torch.cat([x.flatten(2).transpose(1, 2) for x in maps], 1)
        weight = keep.to(memory.dtype)
        for layer in self.encoder.layers:
            memory = layer(memory, position, reference, weight, shapes)
        boxes = torch.cat([torch.cat([c, torch.full_like(c, 0.05 * 2.0**i)], -1) for i, c in enumerate(centres)], 1)
        inside = ((boxes > 0.01) & (boxes < 0.99)).to(torch.int64).amin(-1, keepdim=True) > 0
        usable = inside & keep
        # The clamp does not change usable boxes; it keeps the logarithm of the others finite.
        boxes = boxes.clamp(0.01, 0.99)
        proposals = torch.where(usable, torch.log(boxes / (1 - boxes)), torch.full_like(boxes, NO_PROPOSAL))
        return Encoded(memory, weight, shapes, ratios, proposals, usable)

    def select(self, encoded: Encoded) -> tuple[Tensor, Tensor]:
        """Two-stage query selection (section 3.4): tokens with the best class score become anchors.

        Returns anchors (batch, queries, 4) in 0..1 and the chosen tokens (batch, queries).
        """
        tokens = self.enc_output_norm(self.enc_output(encoded.memory * encoded.usable.to(encoded.memory.dtype)))
        best = self.class_heads[-1](tokens).amax(-1)
        chosen = torch.topk(best, self.config.num_queries, dim=1).indices
        index = chosen.unsqueeze(-1)
        picked = tokens.gather(1, index.expand(-1, -1, self.config.dim))
        proposals = encoded.proposals.gather(1, index.expand(-1, -1, 4))
        return (self.box_heads[-1](picked) + proposals).sigmoid(), chosen

    def decode(self, encoded: Encoded, anchors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Decoder with look forward twice (section 3.5) and mixed query selection: content is learned.

        Returns the normed states (batch, queries, dim) of each layer, and the reference boxes before
        each layer and after the last one.
        """
        dim = self.config.dim
        ratios = torch.cat([encoded.ratios, encoded.ratios], -1).unsqueeze(1)  # (batch, 1, levels, 4)
        x = self.query_embed.unsqueeze(0).expand(anchors.shape[0], -1, -1)
        states, references = [], [anchors]
        for i, layer in enumerate(self.decoder.layers):
            reference = references[-1].unsqueeze(2) * ratios
            position = self.decoder.ref_point_head(sine_of_boxes(reference[:, :, 0], dim))
            x = layer(x, position, reference, encoded.memory, encoded.keep, encoded.shapes)
            states.append(self.decoder.norm(x))
            # Refinement uses the state before the norm, predictions the one after it.
            references.append((self.box_heads[i](x) + inverse_sigmoid(references[-1], 1e-3)).sigmoid())
        return states, references

    def predict(self, states: list[Tensor], references: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Class logits and boxes of the last layer; its box is relative to its reference."""
        last = self.config.decoder_layers - 1
        delta = self.box_heads[last](states[-1])
        boxes = (delta + inverse_sigmoid(references[last], self.config.head_eps)).sigmoid()
        return self.class_heads[last](states[-1]), boxes

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **_: Any) -> DetectorOutput:
        mask = pixel_mask if pixel_mask is not None else torch.ones_like(pixel_values[:, 0])
        encoded = self.encode(self.features(pixel_values), mask)
        anchors, _chosen = self.select(encoded)
        return DetectorOutput(*self.predict(*self.decode(encoded, anchors)))


# Padding colour of the LSJ configs before normalisation, and mean and std of all configs (RGB, 0..255).
LSJ_PADDING = 114.0
_MEAN = (123.675, 116.28, 103.53)
_STD = (58.395, 57.12, 57.375)


class CoDino(Dino):
    """DINO trained with collaborative heads (Zong et al., arXiv:2211.12860), inference only.

    At inference it is `Dino`: RPN, RoI and ATSS heads, their `aux_pos_trans` queries, the extra `downsample` map and the label
    embedding are for training losses only. Post-processing uses soft-NMS.

    attend_padding: a model trained with large scale jittering (`with_attn_mask=False`) on one square canvas: the padding has the
    colour 114 and is attended to, and the boxes of the network are relative to the canvas; they are returned relative to the image.
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
        # Images are in the upper left corner, so that the first row and column give their size.
        sides = torch.stack([image[:, 0].mean(1), image[:, :, 0].mean(1)], -1)
        return DetectorOutput(found.logits, found.pred_boxes / sides.repeat(1, 2).unsqueeze(1))


class ConvNorm(nn.Module):
    """Convolution and GroupNorm without activation."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, *, bias: bool, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=bias)
        self.norm = nn.GroupNorm(groups, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ChannelMapper(nn.Module):
    """(batch, c_i, h_i, w_i) for each backbone level -> (batch, dim, h_i, w_i) for each of `levels`.

    The first extra level reads the last backbone map, the next ones the level before them (Deformable
    DETR, appendix A.2). bias: of the convolutions; IDEA-Research's DINO has it, mmdetection's does not.
    """

    def __init__(self, channels: Sequence[int], dim: int, levels: int, *, bias: bool, groups: int = GROUPS) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ConvNorm(c, dim, 1, 1, bias=bias, groups=groups) for c in channels)
        self.extra_convs = nn.ModuleList(
            ConvNorm(dim if i else channels[-1], dim, 3, 2, bias=bias, groups=groups) for i in range(levels - len(channels))
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [conv(x) for conv, x in zip(self.convs, maps, strict=True)]
        for i, conv in enumerate(self.extra_convs):
            levels.append(conv(levels[-1] if i else maps[-1]))
        return levels
