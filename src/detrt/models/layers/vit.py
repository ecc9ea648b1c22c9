"""Plain ViT with windows, and the feature pyramid on its single map: the backbone of Co-DINO ViT-L.

EVA-02 blocks (Fang et al., arXiv:2303.11331, section 2.1: SwiGLU with a norm inside, rotary positions along both
axes); windows, and maps of other strides from the last one (Li et al., arXiv:2203.16527, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .windows import in_windows

# Patches per side of the images that the rotary positions were trained on; there the step of a patch is 1.
ROPE_SIDE = 16
ROPE_THETA = 10000.0
CUBIC = -0.75  # of the cubic kernel, as in PyTorch


def rope(height: Any, width: Any, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (height * width, head_dim): the first half of a head is rotated by the row, the other by the column."""
    rows, columns = (torch.arange(side) / side * ROPE_SIDE for side in (height, width))
    return _cos_sin(_pairs(rows, head_dim)[:, None], _pairs(columns, head_dim)[None])


def columns_first_rope(height: Any, width: Any, head_dim: int, step: Any = 1.0) -> tuple[Tensor, Tensor]:
    """As `rope`, but the first half is rotated by the column. step: from patch to patch, along both axes."""
    rows, columns = (torch.arange(side) * step for side in (height, width))
    return _cos_sin(_pairs(columns, head_dim)[None], _pairs(rows, head_dim)[:, None])


def _pairs(coordinates: Tensor, head_dim: int) -> Tensor:
    """(n,) -> (n, head_dim / 2): the angles of half a head; both channels of a pair have the same."""
    half = head_dim // 2
    angles = coordinates[:, None] * ROPE_THETA ** (-torch.arange(0, half, 2) / half)
    return torch.stack([angles, angles], -1).flatten(-2)


def _cos_sin(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Of the angles of both halves of a head, (height or 1, width or 1, head_dim / 2) each."""
    angle = torch.cat([first + torch.zeros_like(second), second + torch.zeros_like(first)], -1).flatten(0, 1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of neighbouring channels. x: (..., tokens, head_dim)."""
    pairs = x.unflatten(-1, (-1, 2))
    other = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
    return x * cosine + other * sine


def cubic_resize(count: Any, size: int) -> Tensor:
    """(count, size) matrix of a bicubic resize of `size` numbers to `count`, corners not aligned, edges repeated.

    As a matrix, because TensorRT's and ONNX Runtime's Resize differ at the edges, and the count is symbolic.
    """
    place = (torch.arange(count) + 0.5) * (size / count) - 0.5
    first = place.floor()
    cells = torch.arange(size)
    matrix = 0.0
    for tap in (-1, 0, 1, 2):
        at = (first + tap).clamp(0, size - 1)
        x = (place - first - tap).abs()
        near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
        far = ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
        weight = near if tap in (0, 1) else far
        matrix = matrix + weight[:, None] * (at[:, None] == cells).to(torch.float32)
    return matrix  # type: ignore[return-value]


class RopeAttention(nn.Module):
    """Self-attention with rotary positions; keys have no bias."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x: (groups, tokens, dim). angles: see `rope`, for one group."""
        head_dim = x.shape[-1] // self.heads
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, head_dim)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *angles), rotate(k, *angles)
        weights = (q * head_dim**-0.5 @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(dim, hidden)
        self.ffn_ln = nn.LayerNorm(hidden, eps=1e-6)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(self.ffn_ln(F.silu(self.w1(x)) * self.w2(x)))


class VitBlock(nn.Module):
    """window: its side in patches; 0 attends to the whole map."""

    def __init__(self, dim: int, heads: int, hidden: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = RopeAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = SwiGLU(dim, hidden)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x: (batch, h, w, dim)."""
        y = in_windows(self.norm1(x), self.window, lambda groups: self.attn(groups, angles))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """(batch, 3, h, w) -> one map (batch, dim, h/patch, w/patch); sides are multiples of the patch.

    positions: rows of the table of absolute positions, 1 + a square (its first row, of a class token, is not
    used). windowed: indices of the blocks with windows.
    """

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        hidden: int,
        *,
        patch: int,
        positions: int,
        window: int,
        windowed: Sequence[int],
    ) -> None:
        super().__init__()
        self.channels, self.head_dim, self.side = [dim], dim // heads, isqrt(positions - 1)
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, positions, dim))
        self.blocks = nn.ModuleList(VitBlock(dim, heads, hidden, window if i in windowed else 0) for i in range(depth))
        self.out_norm = nn.LayerNorm(dim)
        cosine, sine = rope(window, window, self.head_dim)
        self.register_buffer("window_cosine", cosine, persistent=False)
        self.register_buffer("window_sine", sine, persistent=False)

    def positions(self, height: Any, width: Any) -> Tensor:
        """(h, w, dim)"""
        table = self.position[0, 1:]
        rows, columns = (cubic_resize(count, self.side).to(table) for count in (height, width))
        return columns @ (rows @ table.view(self.side, -1)).unflatten(-1, (self.side, -1))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.patch(x).permute(0, 2, 3, 1)
        height, width = x.shape[1], x.shape[2]
        x = x + self.positions(height, width)
        whole = tuple(part.to(x) for part in rope(height, width, self.head_dim))
        for block in self.blocks:
            x = block(x, (self.window_cosine, self.window_sine) if block.window else whole)
        return [self.out_norm(x).permute(0, 3, 1, 2)]


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of (batch, channels, h, w)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _stack(*parts: str | tuple[int, int, int, int]) -> nn.Sequential:
    """ "up" and "down" halve and double the stride; (in, out, kernel, stride) is a convolution and its norm."""
    layers: list[nn.Module] = []
    for part in parts:
        if part == "up":
            layers.append(nn.Upsample(scale_factor=2))
        elif part == "down":
            layers.append(nn.MaxPool2d(3, 2, 1))
        else:
            source, out, kernel, stride = part  # type: ignore[misc]
            layers.append(nn.Conv2d(source, out, kernel, stride, kernel // 2, bias=False))  # type: ignore[arg-type]
            layers += [ChannelNorm(out, eps=1e-6), nn.GELU()]  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])  # no activation after the last norm


class SimplePyramid(nn.Module):
    """[(batch, c, h, w)] of stride 16 -> five maps (batch, dim, ...) of strides 4, 8, 16, 32 and 64."""

    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        half, quarter, last = channels // 2, channels // 4, (dim, dim, 3, 1)
        self.p2 = _stack("up", (channels, half, 3, 1), "up", (half, quarter, 3, 1), (quarter, dim, 1, 1), last)
        self.p3 = _stack("up", (channels, half, 3, 1), (half, dim, 1, 1), last)
        self.p4 = _stack((channels, dim, 1, 1), last)
        self.p5 = _stack("down", (channels, dim, 1, 1), last)
        self.p6 = _stack("down", (channels, channels, 3, 2), (channels, dim, 1, 1), last)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        return [level(maps[0]) for level in (self.p2, self.p3, self.p4, self.p5, self.p6)]
