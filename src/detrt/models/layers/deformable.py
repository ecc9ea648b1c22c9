"""Deformable encoder and decoder layers with padding masks (Zhu et al., arXiv:2010.04159).

Masks are 1 (True) for the image and 0 for padding everywhere here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.msda import ms_deform_attn

HEADS = 8
TEMPERATURE = 20  # of the position embedding of DINO; DETR has 10000


def level_shapes(maps: Sequence[Tensor]) -> Tensor:
    """(levels, 2) int64 heights and widths of (batch, dim, h, w) maps; symbolic while tracing."""
    return torch.stack([torch._shape_as_tensor(x)[2:4] for x in maps]).to(maps[0].device)


def level_masks(mask: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """(batch, height, width) mask -> one (batch, h, w) bool mask per level.

    Pixels are selected as by `F.interpolate(mode="nearest")`, in its arithmetic, but with a gather, because
    TensorRT-RTX 1.7 cannot infer the shape of a Resize to the size of a Swin level.
    """
    image = mask > 0
    masks = []
    for x in maps:
        rows, columns = (_nearest(image.shape[a], x.shape[b], x.device) for a, b in ((1, 2), (2, 3)))
        masks.append(image.index_select(1, rows).index_select(2, columns))
    return masks


def _nearest(size: int, pixels: int, device: torch.device) -> Tensor:
    """(cells,) int64: the index of each resized pixel among `size` pixels."""
    places = torch.arange(pixels, device=device).to(torch.float32)
    step = torch.as_tensor(size, device=device).to(torch.float32) / torch.as_tensor(pixels, device=device).to(torch.float32)
    return torch.minimum((places * step).to(torch.int64), torch.as_tensor(size, device=device) - 1)


def valid_sides(masks: Sequence[Tensor]) -> Tensor:
    """(batch, levels, 2) float32: pixels of the image along x and y of each level."""
    return torch.stack([torch.stack([m[:, 0].sum(1), m[:, :, 0].sum(1)], -1) for m in masks], 1).to(torch.float32)


def pixel_centres(shape_of: Tensor) -> Tensor:
    """(1, h * w, 2) float32: x + 0.5 and y + 0.5 of every pixel of a (batch, h, w) map, row-major."""
    height, width = shape_of.shape[-2], shape_of.shape[-1]
    ys = torch.arange(height, device=shape_of.device).to(torch.float32) + 0.5
    xs = torch.arange(width, device=shape_of.device).to(torch.float32) + 0.5
    grid = torch.stack([xs.unsqueeze(0).expand(height, -1), ys.unsqueeze(1).expand(-1, width)], -1)
    return grid.reshape(1, -1, 2)


def sine_position(mask: Tensor, dim: int, temperature: float = TEMPERATURE) -> Tensor:
    """(batch, h, w) mask -> (batch, h * w, dim): sine embedding of y, then x, counted inside the image.

    DETR (arXiv:2005.12872), appendix A.4.
    """
    eps, half = 1e-6, dim // 2
    inside = mask.to(torch.float32)
    ys, xs = inside.cumsum(1), inside.cumsum(2)
    ys = ys / (ys[:, -1:] + eps) * (2 * math.pi)
    xs = xs / (xs[:, :, -1:] + eps) * (2 * math.pi)
    periods = _periods(half, temperature, mask.device)
    return torch.cat([_sin_cos(side.flatten(1).unsqueeze(-1) / periods) for side in (ys, xs)], -1)


def sine_of_boxes(boxes: Tensor, dim: int) -> Tensor:
    """(batch, queries, 4) cxcywh in 0..1 -> (batch, queries, 2 * dim): y, x, w, h with dim / 2 numbers each.

    DAB-DETR (arXiv:2201.12329), section 4.2; y comes before x in all published weights.
    """
    periods = _periods(dim // 2, 10000.0, boxes.device)
    # One gather instead of four slices; the order is y, x, w, h.
    ordered = boxes[..., [1, 0, 2, 3]] * (2 * math.pi)
    return _sin_cos(ordered.unsqueeze(-1) / periods).flatten(2)


def _periods(count: int, temperature: float, device: torch.device) -> Tensor:
    index = torch.arange(count, dtype=torch.float32, device=device)
    return temperature ** (2 * torch.div(index, 2, rounding_mode="floor") / count)


def _sin_cos(angles: Tensor) -> Tensor:
    """(..., n): sine of the even columns and cosine of the odd ones."""
    return torch.stack([angles[..., 0::2].sin(), angles[..., 1::2].cos()], -1).flatten(-2)


class DeformableAttention(nn.Module):
    """Multi-scale deformable attention (equation 3).

    query: (batch, queries, dim). reference: (batch, queries, levels, 2) points, or (..., 4) boxes cxcywh,
    both relative to the padded level. value: (batch, tokens, dim). keep: (batch, tokens, 1), 0 = padding.
    shapes: (levels, 2). Returns (batch, queries, dim).
    """

    def __init__(self, dim: int, levels: int, points: int, heads: int = HEADS) -> None:
        super().__init__()
        self.dim, self.levels, self.points, self.heads = dim, levels, points, heads
        self.sampling_offsets = nn.Linear(dim, heads * levels * points * 2)
        self.attention_weights = nn.Linear(dim, heads * levels * points)
        self.value_proj = nn.Linear(dim, dim)
        self.output_proj = nn.Linear(dim, dim)

    def forward(self, query: Tensor, reference: Tensor, value: Tensor, keep: Tensor, shapes: Tensor) -> Tensor:
        heads, levels, points = self.heads, self.levels, self.points
        batch, queries = query.shape[0], query.shape[1]
        value = (self.value_proj(value) * keep).unflatten(-1, (heads, self.dim // heads))
        offsets = self.sampling_offsets(query).view(batch, queries, heads, levels, points, 2)
        weights = self.attention_weights(query).view(batch, queries, heads, levels * points).softmax(-1)
        reference = reference[:, :, None, :, None]
        if reference.shape[-1] == 2:
            sides = shapes.flip(-1).to(offsets.dtype)[None, None, None, :, None]
            locations = reference + offsets / sides
        else:
            # Offsets are relative to half the box (appendix A.4).
            locations = reference[..., :2] + offsets / points * reference[..., 2:] * 0.5
        out = ms_deform_attn(value, shapes, locations.flatten(3, 4), weights, [points] * levels, False)
        return self.output_proj(out)


class SelfAttention(nn.Module):
    """Multi-head attention among queries; the position enters queries and keys, not values."""

    def __init__(self, dim: int, heads: int = HEADS) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """x, position: (batch, queries, dim)."""
        batch, queries, width = x.shape[0], x.shape[1], self.dim // self.heads
        shape = (batch, queries, self.heads, width)
        q, k, v = (
            projection(y).view(*shape).transpose(1, 2)
            for projection, y in ((self.q_proj, x + position), (self.k_proj, x + position), (self.v_proj, x))
        )
        attention = ((q * width**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.out_proj((attention @ v).transpose(1, 2).reshape(batch, queries, self.dim))


class EncoderLayer(nn.Module):
    """Deformable self-attention, then FFN, norm after each (section 4.1)."""

    def __init__(self, dim: int, ffn: int, levels: int, points: int, heads: int = HEADS) -> None:
        super().__init__()
        self.self_attn = DeformableAttention(dim, levels, points, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.linear1, self.linear2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, position: Tensor, reference: Tensor, keep: Tensor, shapes: Tensor) -> Tensor:
        """x, position: (batch, tokens, dim). reference: (batch, tokens, levels, 2)."""
        x = self.norm1(x + self.self_attn(x + position, reference, x, keep, shapes))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


class DecoderLayer(nn.Module):
    """Self-attention among queries, deformable attention on the memory, FFN, norm after each."""

    def __init__(self, dim: int, ffn: int, levels: int, points: int, heads: int = HEADS) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross_attn = DeformableAttention(dim, levels, points, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.linear1, self.linear2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.norm3 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, position: Tensor, reference: Tensor, memory: Tensor, keep: Tensor, shapes: Tensor) -> Tensor:
        """x, position: (batch, queries, dim). reference: (batch, queries, levels, 4)."""
        x = self.norm1(x + self.self_attn(x, position))
        x = self.norm2(x + self.cross_attn(x + position, reference, memory, keep, shapes))
        return self.norm3(x + self.linear2(F.relu(self.linear1(x))))


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)
