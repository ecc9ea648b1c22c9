"""The two PyTorch ops of deformable attention.

Zhu et al., "Deformable DETR", arXiv:2010.04159, equation 3, with D-FINE's generalisation to another number of points
on every level (arXiv:2410.13842). `detrt::ms_deform_attn` takes locations and weights, as the papers write it;
`detrt::ms_deform_attn_fused` takes what the layers before it give, and does the rest itself.

Both stay one node in exported programs. torch.compile and AOTInductor see through them: on a GPU to the Triton kernel,
elsewhere to plain operators, so that a compiled program needs neither op at run time.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

OP = "detrt::ms_deform_attn"
FUSED_OP = "detrt::ms_deform_attn_fused"
_LIBRARY = torch.library.Library("detrt", "DEF")
_LIBRARY.define(
    "ms_deform_attn(Tensor value, Tensor spatial_shapes, Tensor sampling_locations, "
    "Tensor attention_weights, int[] points_per_level, bool discrete=False) -> Tensor"
)
_LIBRARY.define(
    "ms_deform_attn_fused(Tensor value, Tensor spatial_shapes, Tensor reference_points, Tensor sampling_offsets, "
    "Tensor attention_logits, int[] points_per_level, float offset_scale=0.5, bool discrete=False) -> Tensor"
)


@functools.cache
def triton_available() -> bool:
    """Whether the Triton package is installed. It comes with PyTorch's CUDA builds for Linux, not with the CPU builds."""
    return importlib.util.find_spec("triton") is not None


def _on_gpu(value: Tensor, points_per_level: list[int]) -> bool:
    if value.device.type != "cuda" or not triton_available():
        return False
    from .msda_launch import fits

    return fits(value, points_per_level)


def _check(value: Tensor, shapes: Tensor, places: Tensor, weights: Tensor, points_per_level: list[int]) -> None:
    """Raises ValueError where the shapes of the arguments do not belong together."""
    points = sum(points_per_level)
    if value.dim() != 4:
        raise ValueError(f"{OP}: value must be (batch, tokens, heads, head_dim); got {tuple(value.shape)}")
    if not points_per_level or min(points_per_level) < 1:
        raise ValueError(f"{OP}: points_per_level must hold a positive number for every level; got {points_per_level}")
    batch, _, heads, _ = value.shape
    if places.dim() != 5 or tuple(places.shape[2:]) != (heads, points, 2) or places.shape[0] != batch:
        raise ValueError(
            f"{OP}: locations must be (batch, queries, heads, points, 2) with {heads} heads and {points} points of "
            f"{len(points_per_level)} levels; got {tuple(places.shape)} for a value {tuple(value.shape)}"
        )
    if weights.dim() != 4 or tuple(weights.shape[2:]) != (heads, points) or weights.shape[1] != places.shape[1]:
        raise ValueError(
            f"{OP}: weights must be (batch, queries, heads, points), as the locations {tuple(places.shape[:4])}; "
            f"got {tuple(weights.shape)}"
        )
    if tuple(shapes.shape) != (len(points_per_level), 2):
        raise ValueError(f"{OP}: spatial_shapes must be ({len(points_per_level)}, 2); got {tuple(shapes.shape)}")


def _check_references(references: Tensor, places: Tensor, points_per_level: list[int]) -> None:
    sizes = tuple(references.shape)
    levels = len(points_per_level)
    if len(sizes) != 4 or sizes[1] != places.shape[1] or sizes[2] not in (1, levels) or sizes[3] not in (2, 4):
        raise ValueError(
            f"{FUSED_OP}: reference_points must be (batch or 1, queries, {levels} levels or 1, 2 or 4) for "
            f"{places.shape[1]} queries; got {sizes}"
        )


def _run(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    _check(value, spatial_shapes, sampling_locations, attention_weights, points_per_level)
    if _on_gpu(value, points_per_level):
        from .msda_launch import attend

        return attend(value, spatial_shapes, None, sampling_locations, attention_weights, points_per_level, discrete=discrete)
    plain = gathered if _hidden(value) else reference
    return plain(value, spatial_shapes, sampling_locations, attention_weights, points_per_level, discrete)


def _run_fused(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    points_per_level: list[int],
    offset_scale: float = 0.5,
    discrete: bool = False,
) -> Tensor:
    _check(value, spatial_shapes, sampling_offsets, attention_logits, points_per_level)
    _check_references(reference_points, sampling_offsets, points_per_level)
    if _on_gpu(value, points_per_level):
        from .msda_launch import attend

        return attend(
            value,
            spatial_shapes,
            reference_points,
            sampling_offsets,
            attention_logits,
            points_per_level,
            offset_scale,
            discrete,
        )
    locations = locations_of(value, spatial_shapes, reference_points, sampling_offsets, points_per_level, offset_scale)
    plain = gathered if _hidden(value) else reference
    weights = weights_of(value, attention_logits)
    return plain(value, spatial_shapes, locations, weights, points_per_level, discrete)


def _hidden(value: Tensor) -> bool:
    """Whether the numbers cannot be read on the host: the program is being traced by a compiler."""
    return type(value) not in (Tensor, torch.nn.Parameter)


_LIBRARY.impl("ms_deform_attn", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("ms_deform_attn_fused", _run_fused, "CompositeExplicitAutograd")


@torch.library.register_fake(OP)
def _fake(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    _check(value, spatial_shapes, sampling_locations, attention_weights, points_per_level)
    return value.new_empty(value.shape[0], sampling_locations.shape[1], value.shape[2] * value.shape[3])


@torch.library.register_fake(FUSED_OP)
def _fake_fused(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    points_per_level: list[int],
    offset_scale: float = 0.5,
    discrete: bool = False,
) -> Tensor:
    _check(value, spatial_shapes, sampling_offsets, attention_logits, points_per_level)
    _check_references(reference_points, sampling_offsets, points_per_level)
    return value.new_empty(value.shape[0], sampling_offsets.shape[1], value.shape[2] * value.shape[3])


def see_through(op: str, run: Any, library: Any) -> None:
    """Replace the op by its parts when a program is compiled, but keep it whole when a program is exported.

    The rule of `torch.library.triton_op`, which cannot be used itself: it needs Triton at registration, and its
    kernel on every device.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def rule(mode: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _exporting():
            return mode.__torch_dispatch__(function, types, args, kwargs or {})
        with mode:
            return run(*args, **(kwargs or {}))

    torch.library.register_torch_dispatch(op, FunctionalTensorMode, rule, lib=library)


def _exporting() -> bool:
    try:
        from torch.export._trace import custom_triton_ops_decomposition_disabled
    except ImportError:  # before torch 2.9 nothing tells exports apart, and both ops are kept whole everywhere
        return True
    return custom_triton_ops_decomposition_disabled()


see_through(OP, _run, _LIBRARY)
see_through(FUSED_OP, _run_fused, _LIBRARY)
ms_deform_attn = torch.ops.detrt.ms_deform_attn
ms_deform_attn_fused = torch.ops.detrt.ms_deform_attn_fused

# Multi-scale deformable attention in plain PyTorch: the definition, and a form that compilers can see through.
#
# Both compute coordinates and sums in FP32 for FP16 and BF16 values (in FP64 for FP64 values) and round once, at the
# end. Coordinates in FP16 would be 2 to 6 % wrong per sample on wide levels. A location that is not a number, or lies
# outside its level, contributes zero.
# Locations outside these bounds lie outside every level by more than a cell; the bounds keep them exact as integers.
LOWEST, HIGHEST = -2.0, 3.0


def working_type(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    """The definition.

    value: (batch, tokens, heads, head_dim), levels one after the other, row-major.
    spatial_shapes: (levels, 2) int32 or int64, (height, width) of each level; they sum to tokens.
    sampling_locations: (batch, queries, heads, points, 2), x and y in 0..1 of the level; points of
        level 0 first, points = sum(points_per_level). Samples outside the level read zeros.
    attention_weights: (batch, queries, heads, points).
    discrete: read the nearest cell, clamped to the level, instead of the bilinear sample (RT-DETRv2,
        arXiv:2407.17140, section 3).
    Returns (batch, queries, heads * head_dim), dtype of `value`.
    """
    batch, _, heads, dim = value.shape
    queries, points = sampling_locations.shape[1], sampling_locations.shape[3]
    working = working_type(value)
    if batch == 0 or queries == 0:
        return value.new_empty(batch, queries, heads * dim)
    shapes = [(int(h), int(w)) for h, w in spatial_shapes.tolist()]
    values = value.to(working).split([h * w for h, w in shapes], dim=1)
    everywhere = sampling_locations.to(working).permute(0, 2, 1, 3, 4).flatten(0, 1)  # (batch * heads, queries, points, 2)
    locations = everywhere.clamp(LOWEST, HIGHEST).nan_to_num(nan=LOWEST).split(points_per_level, dim=2)
    numbers = (~everywhere.isnan().any(-1)).split(points_per_level, dim=2)
    samples = []
    for (height, width), level, location, number in zip(shapes, values, locations, numbers, strict=True):
        grid_value = level.permute(0, 2, 3, 1).reshape(batch * heads, dim, height, width)
        if discrete:
            size = torch.tensor([width, height], dtype=working, device=location.device)
            cell = (location * size + 0.5).to(torch.int64)
            index = cell[..., 1].clamp(0, height - 1) * width + cell[..., 0].clamp(0, width - 1)
            flat = index.reshape(batch * heads, 1, -1).expand(-1, dim, -1)
            sample = grid_value.flatten(2).gather(2, flat).reshape(batch * heads, dim, queries, -1)
            sample = sample.where(number.unsqueeze(1), 0.0)
        else:
            grid = 2 * location - 1
            sample = F.grid_sample(grid_value, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        samples.append(sample)  # (batch * heads, head_dim, queries, points of the level)
    weights = attention_weights.to(working).permute(0, 2, 1, 3).reshape(batch * heads, 1, queries, points)
    out = (torch.cat(samples, dim=-1) * weights).sum(-1)
    return out.reshape(batch, heads * dim, queries).transpose(1, 2).to(value.dtype).contiguous()


def gathered(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    """What `reference` computes, without reading `spatial_shapes` on the host: all levels at once, four reads a sample.

    Traceable by torch.compile, and by AOTInductor where no Triton kernel runs.
    """
    batch, _, heads, dim = value.shape
    working = working_type(value)
    device = value.device
    sizes = spatial_shapes.to(device=device, dtype=torch.int64)
    cells = sizes[:, 0] * sizes[:, 1]
    height, width, start = _of_points(
        torch.stack([sizes[:, 0], sizes[:, 1], cells.cumsum(0) - cells], -1), points_per_level
    ).unbind(-1)
    locations = sampling_locations.to(working)
    x, y = locations[..., 0] * width, locations[..., 1] * height  # (batch, queries, heads, points)
    weights = attention_weights.to(working)
    in_batch = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    in_heads = torch.arange(heads, device=device).view(1, 1, -1, 1)

    def read(column: Tensor, row: Tensor, inside: Tensor) -> Tensor:
        token = start + row.clamp(min=0).minimum(height - 1) * width + column.clamp(min=0).minimum(width - 1)
        return value[in_batch, token, in_heads].to(working).where(inside.unsqueeze(-1), 0.0)

    if discrete:
        number = ~(x.isnan() | y.isnan())
        column, row = (_bounded(place, side).to(torch.int64) for place, side in ((x + 0.5, width), (y + 0.5, height)))
        sample = read(column, row, number)
        return (sample * weights.unsqueeze(-1)).sum(3).to(value.dtype).reshape(batch, -1, heads * dim)
    x, y = x - 0.5, y - 0.5
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    x, y = _bounded(x, width), _bounded(y, height)
    left, top = x.floor(), y.floor()
    right_share, low_share = x - left, y - top
    column, row = left.to(torch.int64), top.to(torch.int64)
    out = torch.zeros((), dtype=working, device=device)
    for down in (0, 1):
        for right in (0, 1):
            share = (right_share if right else 1 - right_share) * (low_share if down else 1 - low_share)
            c, r = column + right, row + down
            there = inside & (c >= 0) & (c < width) & (r >= 0) & (r < height)
            out = out + (read(c, r, there) * (share * weights).unsqueeze(-1)).sum(3)
    return out.to(value.dtype).reshape(batch, -1, heads * dim)


def _bounded(place: Tensor, side: Tensor) -> Tensor:
    """Places as they are where that matters, and safe to make integers of."""
    return place.nan_to_num(nan=LOWEST).clamp(min=LOWEST).minimum((side + 2).to(place.dtype))


def _of_points(rows: Tensor, points_per_level: Sequence[int], dim: int = 0) -> Tensor:
    """One row a level -> one row a point, along `dim`."""
    parts = rows.split(1, dim)
    shape = list(rows.shape)
    return torch.cat(
        [part.expand(*shape[:dim], n, *shape[dim + 1 :]) for part, n in zip(parts, points_per_level, strict=True)], dim
    )


def locations_of(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    points_per_level: list[int],
    offset_scale: float,
) -> Tensor:
    """(batch, queries, heads, points, 2) in 0..1: where the fused op samples.

    Points (x, y): offsets count cells (arXiv:2010.04159, equation 3). Boxes (cx, cy, w, h): offsets are shares of
    `offset_scale` times the box, divided by the points of the level (appendix A.4).
    """
    working = working_type(value)
    offsets = sampling_offsets.to(working)
    centres = reference_points.to(working)
    if centres.shape[2] != 1:
        centres = _of_points(centres, points_per_level, dim=2)
    centres = centres.unsqueeze(2)  # (batch or 1, queries, 1, points or 1, 2 or 4)
    levels = len(points_per_level)
    if centres.shape[-1] == 2:
        sides = spatial_shapes.to(device=value.device, dtype=working).reshape(levels, 2).flip(-1)
        return centres + offsets / _of_points(sides, points_per_level)
    shares = torch.cat([torch.full((n, 1), offset_scale / n, dtype=working, device=value.device) for n in points_per_level])
    return centres[..., :2] + offsets * shares * centres[..., 2:]


def weights_of(value: Tensor, attention_logits: Tensor) -> Tensor:
    return attention_logits.to(working_type(value)).softmax(-1)
