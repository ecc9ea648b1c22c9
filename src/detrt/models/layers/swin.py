"""Swin Transformer backbone with one norm per output (Liu et al., arXiv:2103.14030), any input size.

Patch merging concatenates the four neighbours in the order of the authors' code: (0,0), (1,0), (0,1),
(1,1) as (row, column), all channels of each. mmdetection's order is that of nn.Unfold (channel first,
then neighbour row by row); the loader permutes such weights, so there is one module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ExportError
from .windows import blocks_of, in_windows, pad_to_multiple

# Added to the attention scores of tokens that were not neighbours before the cyclic shift; the value of the authors.
NOT_NEIGHBOURS = -100.0


def relative_position_index(window: int) -> Tensor:
    """(window**2, window**2) int64: row of the bias table for each pair of tokens (section 3.2, "B-hat")."""
    ys, xs = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    ys, xs = ys.flatten(), xs.flatten()
    rows = ys[:, None] - ys[None, :] + window - 1
    columns = xs[:, None] - xs[None, :] + window - 1
    return rows * (2 * window - 1) + columns


class WindowAttention(nn.Module):
    """Self-attention inside windows with a relative position bias (section 3.2, equation 4)."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_position_index(window), persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x: (batch * windows, tokens, dim). mask: (windows, tokens, tokens), added, or None."""
        tokens, dim = self.window**2, self.qkv.in_features
        q, k, v = self.qkv(x).reshape(-1, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attention = (q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()]
        attention = attention + bias.view(tokens, tokens, self.heads).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            attention = attention.view(-1, mask.shape[0], self.heads, tokens, tokens) + mask[None, :, None]
            attention = attention.view(-1, self.heads, tokens, tokens)
        x = (attention.softmax(-1) @ v).transpose(1, 2).reshape(-1, tokens, dim)
        return self.proj(x)


class SwinBlock(nn.Module):
    """One block of equation 3; `shift` is 0 (W-MSA) or half a window (SW-MSA)."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, ffn: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads, window)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.fc2 = nn.Linear(ffn, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (batch, h, w, dim). mask: see `shift_mask`."""
        # Zero padding comes after the norm and takes part in attention, as in the original.
        x = x + in_windows(self.norm1(x), self.window, lambda groups: self.attn(groups, mask if self.shift else None), self.shift)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


def shift_mask(height: Any, width: Any, window: int) -> Tensor:
    """(windows, window**2, window**2): 0 between tokens of one region of figure 4, else `NOT_NEIGHBOURS`.

    Regions are computed, not assigned slice by slice, so that the sizes stay symbolic.
    """
    regions = []
    for side in (height, width):
        padded = blocks_of(side, window) * window
        place = torch.arange(padded)
        regions.append((place >= padded - window).to(torch.int64) + (place >= padded - window // 2).to(torch.int64))
    rows, columns = regions
    grid = rows[:, None] * 3 + columns[None, :]
    grid = grid.view(blocks_of(height, window), window, blocks_of(width, window), window)
    grid = grid.permute(0, 2, 1, 3).reshape(-1, window * window)
    return (grid[:, None] != grid[:, :, None]).to(torch.float32) * NOT_NEIGHBOURS


class PatchMerging(nn.Module):
    """(batch, h, w, dim) -> (batch, ceil(h/2), ceil(w/2), 2 * dim); order of neighbours: see the module."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to_multiple(x, 2, 1)
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class SwinStage(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, window: int, ffn: int, merge: bool) -> None:
        super().__init__()
        self.window = window
        self.blocks = nn.ModuleList(SwinBlock(dim, heads, window, window // 2 if i % 2 else 0, ffn) for i in range(depth))
        self.downsample = PatchMerging(dim) if merge else None

    def forward(self, x: Tensor) -> Tensor:
        mask = shift_mask(x.shape[1], x.shape[2], self.window).to(x.device)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Swin(nn.Module):
    """(batch, 3, h, w) -> normalised maps of the selected stages, of strides 4, 8, 16 and 32.

    dim: channels of stage 0, doubled from stage to stage. depths, heads: one number per stage.
    window: 7, or 12 for the models pretrained at 384 pixels. ratio: FFN width over channels.
    """

    def __init__(
        self,
        dim: int,
        depths: Sequence[int],
        heads: Sequence[int],
        window: int,
        out_stages: Sequence[int],
        ratio: int = 4,
    ) -> None:
        super().__init__()
        self.out_stages = tuple(out_stages)
        self.channels = [dim * 2**i for i in self.out_stages]
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.patch_norm = nn.LayerNorm(dim)
        last = len(depths) - 1
        self.stages = nn.ModuleList(
            SwinStage(dim * 2**i, depth, heads[i], window, ratio * dim * 2**i, merge=i < last) for i, depth in enumerate(depths)
        )
        self.norms = nn.ModuleDict({str(i): nn.LayerNorm(dim * 2**i) for i in self.out_stages})

    def forward(self, x: Tensor) -> list[Tensor]:
        x = pad_to_multiple(x, 4, 2)
        x = self.patch_norm(self.patch(x).permute(0, 2, 3, 1))
        found = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i in self.out_stages:
                found.append(self.norms[str(i)](x).permute(0, 3, 1, 2))
            if stage.downsample is not None:
                x = stage.downsample(x)
        return found


def from_transformers_swin(backbone: Any) -> Swin:
    """detrt's Swin with the weights of a transformers `SwinBackbone`; the same function at any size.

    transformers' Swin pads and slices by Python branches on sizes, which a trace turns into constants silently. It also projects
    queries, keys and values separately, and computes its shift mask in every block.

    Raises:
        ExportError: a Swin with settings that no published detector has.
    """
    config = backbone.config
    facts = {"use_absolute_embeddings": False, "qkv_bias": True, "patch_size": 4, "hidden_act": "gelu"}
    wrong = {name: getattr(config, name) for name, value in facts.items() if getattr(config, name) != value}
    ratio = float(config.mlp_ratio)
    if wrong or ratio != int(ratio):
        raise ExportError(f"a Swin backbone with {wrong or {'mlp_ratio': ratio}}; detrt exports those with {facts}")
    stages = [int(name.removeprefix("stage")) - 1 for name in backbone.out_features]
    with torch.device("meta"):
        swin = Swin(config.embed_dim, config.depths, config.num_heads, config.window_size, stages, int(ratio))
    state = {
        key.removeprefix("swin."): tensor
        for key, tensor in backbone.state_dict().items()
        if not key.startswith("swin.layernorm.")  # of the classifier; unused in a backbone
    }
    renamed: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if ".q_proj." in key:
            parts = [state[key.replace(".q_proj.", f".{name}_proj.")] for name in "qkv"]
            renamed[_swin_name(key)] = torch.cat(parts)
        elif ".k_proj." not in key and ".v_proj." not in key:
            renamed[_swin_name(key)] = tensor
    for name, module in swin.named_modules():
        if isinstance(module, nn.LayerNorm):
            inside = "blocks" in name
            module.eps = float(config.layer_norm_eps) if inside else 1e-5
        if hasattr(module, "relative_position_index"):
            index = type(module)(module.qkv.in_features, module.heads, module.window).relative_position_index
            module.relative_position_index = index
    swin.load_state_dict(renamed, strict=True, assign=True)
    return swin.eval().requires_grad_(False)


_SWIN_PARTS = (
    ("embeddings.patch_embeddings.projection.", "patch."),
    ("embeddings.norm.", "patch_norm."),
    ("encoder.layers.", "stages."),
    (".attention.q_proj.", ".attn.qkv."),
    (".attention.o_proj.", ".attn.proj."),
    (".attention.relative_position_bias.", ".attn."),
    (".layernorm_before.", ".norm1."),
    (".layernorm_after.", ".norm2."),
    (".mlp.", "."),
)


def _swin_name(key: str) -> str:
    if key.startswith("hidden_states_norms.stage"):
        stage, _, leaf = key.removeprefix("hidden_states_norms.stage").partition(".")
        return f"norms.{int(stage) - 1}.{leaf}"
    for old, new in _SWIN_PARTS:
        key = key.replace(old, new)
    return key
