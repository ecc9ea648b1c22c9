"""Multi-scale deformable attention as one op, `detrt::ms_deform_attn`.

Zhu et al., "Deformable DETR", arXiv:2010.04159, equation 3, with D-FINE's generalisation to another
number of points on every level (arXiv:2410.13842). The op stays whole in traced and exported programs
and is lowered last (`detrt.graph.msda`), or runs as a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OP = "detrt::ms_deform_attn"
ONNX_DOMAIN = "detrt"
ONNX_OP = "MSDeformAttn"


def reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    """The definition, in plain PyTorch.

    value: (batch, tokens, heads, head_dim), levels one after the other, row-major.
    spatial_shapes: (levels, 2) int64, (height, width) of each level; they sum to tokens.
    sampling_locations: (batch, queries, heads, points, 2), x and y in 0..1 of the level; points of
        level 0 first, points = sum(points_per_level). Samples outside the level read zeros.
    attention_weights: (batch, queries, heads, points).
    discrete: read the nearest cell, clamped to the level, instead of the bilinear sample (RT-DETRv2,
        arXiv:2407.17140, section 3).
    Returns (batch, queries, heads * head_dim), dtype of `value`.
    """
    batch, _, heads, dim = value.shape
    queries = sampling_locations.shape[1]
    shapes = [(int(h), int(w)) for h, w in spatial_shapes.tolist()]
    values = value.split([h * w for h, w in shapes], dim=1)
    locations = sampling_locations.permute(0, 2, 1, 3, 4).flatten(0, 1).split(points_per_level, dim=2)
    samples = []
    for (height, width), level, location in zip(shapes, values, locations, strict=True):
        grid_value = level.permute(0, 2, 3, 1).reshape(batch * heads, dim, height, width)
        if discrete:
            size = torch.tensor([width, height], dtype=location.dtype, device=location.device)
            cell = (location * size + 0.5).to(torch.int64)
            index = cell[..., 1].clamp(0, height - 1) * width + cell[..., 0].clamp(0, width - 1)
            flat = index.reshape(batch * heads, 1, -1).expand(-1, dim, -1)
            sample = grid_value.flatten(2).gather(2, flat).reshape(batch * heads, dim, queries, -1)
        else:
            grid = (2 * location - 1).to(grid_value.dtype)
            sample = F.grid_sample(grid_value, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        samples.append(sample)  # (batch * heads, head_dim, queries, points of the level)
    weights = attention_weights.permute(0, 2, 1, 3).reshape(batch * heads, 1, queries, -1)
    out = (torch.cat(samples, dim=-1) * weights).sum(-1)
    return out.reshape(batch, heads * dim, queries).transpose(1, 2).contiguous()


_LIBRARY = torch.library.Library("detrt", "DEF")
_LIBRARY.define(
    "ms_deform_attn(Tensor value, Tensor spatial_shapes, Tensor sampling_locations, "
    "Tensor attention_weights, int[] points_per_level, bool discrete=False) -> Tensor"
)
_LIBRARY.impl("ms_deform_attn", reference, "CompositeExplicitAutograd")


@torch.library.register_fake(OP)
def _fake(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    return value.new_empty(value.shape[0], sampling_locations.shape[1], value.shape[2] * value.shape[3])


ms_deform_attn = torch.ops.detrt.ms_deform_attn


def onnx_symbolic(g: Any, value: Any, shapes: Any, locations: Any, weights: Any, points_per_level: Any, discrete: Any) -> Any:
    """TorchScript symbolic: one node `detrt.MSDeformAttn`; see `detrt.graph.msda` for what becomes of it."""
    from torch.onnx import symbolic_helper

    # Heads and their width are weights' shapes, so they are known even where batch and size are not.
    sizes = value.type().varyingSizes()
    if sizes is None or None in sizes[2:]:
        raise ValueError(f"{OP}: the traced value has no fixed heads and head_dim, its shape is {sizes}")
    heads, head_dim = sizes[2:]
    node = g.op(
        f"{ONNX_DOMAIN}::{ONNX_OP}",
        value,
        shapes,
        locations,
        weights,
        heads_i=heads,
        head_dim_i=head_dim,
        points_per_level_i=symbolic_helper._parse_arg(points_per_level, "is"),
        discrete_i=int(symbolic_helper._parse_arg(discrete, "b")),
    )
    node.setType(value.type().with_sizes([None, None, heads * head_dim]))
    return node
