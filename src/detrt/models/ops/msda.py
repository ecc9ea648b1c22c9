"""The two PyTorch ops of deformable attention.

Zhu et al., "Deformable DETR", arXiv:2010.04159, equation 3, with D-FINE's generalisation to a different number of points per
level (arXiv:2410.13842). `detrt::ms_deform_attn` takes sampling locations and attention weights, as in the papers;
`detrt::ms_deform_attn_fused` takes reference points, offsets and logits, and computes locations and weights itself.

Both are one node in exported programs. torch.compile and AOTInductor decompose them: on a GPU to the Triton kernel, elsewhere to
PyTorch operators, so that a compiled program needs neither op at run time.

There are two implementations in PyTorch operators: `reference`, and `traceable_reference` for compilers. Both compute coordinates
and sums in FP32 for FP16 and BF16 values (in FP64 for FP64 values) and round once, at the end. FP16 coordinates would be 2 to 6 %
wrong per sample on wide levels. A location that is NaN, or outside its level, contributes zero.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import number_of
from .compiling import decompose_when_compiled, is_traced

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
    from .msda_launch import kernel_supports

    return kernel_supports(value, points_per_level)


def _check(value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor, points_per_level: list[int]) -> None:
    """Raise ValueError for inconsistent shapes."""
    points = sum(points_per_level)
    if value.dim() != 4:
        raise ValueError(f"{OP}: value must be (batch, tokens, heads, head_dim); got {tuple(value.shape)}")
    if not points_per_level or min(points_per_level) < 1:
        raise ValueError(f"{OP}: points_per_level must hold a positive number for every level; got {points_per_level}")
    batch, _, heads, _ = value.shape
    if locations.dim() != 5 or tuple(locations.shape[2:]) != (heads, points, 2) or locations.shape[0] != batch:
        raise ValueError(
            f"{OP}: locations must be (batch, queries, heads, points, 2) with {heads} heads and {points} points of "
            f"{number_of(len(points_per_level), 'level')}; got {tuple(locations.shape)} for a value {tuple(value.shape)}"
        )
    if weights.dim() != 4 or tuple(weights.shape[2:]) != (heads, points) or weights.shape[1] != locations.shape[1]:
        raise ValueError(
            f"{OP}: weights must be (batch, queries, heads, points), as the locations {tuple(locations.shape[:4])}; "
            f"got {tuple(weights.shape)}"
        )
    if tuple(shapes.shape) != (len(points_per_level), 2):
        raise ValueError(f"{OP}: spatial_shapes must be ({len(points_per_level)}, 2); got {tuple(shapes.shape)}")


def _check_references(references: Tensor, locations: Tensor, points_per_level: list[int]) -> None:
    sizes = tuple(references.shape)
    levels = len(points_per_level)
    if len(sizes) != 4 or sizes[1] != locations.shape[1] or sizes[2] not in (1, levels) or sizes[3] not in (2, 4):
        raise ValueError(
            f"{FUSED_OP}: reference_points must be (batch or 1, queries, {levels} levels or 1, 2 or 4) for "
            f"{locations.shape[1]} queries; got {sizes}"
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
        from .msda_launch import launch_msda

        return launch_msda(
            value, spatial_shapes, None, sampling_locations, attention_weights, points_per_level, discrete=discrete
        )
    implementation = traceable_reference if is_traced(value) else reference
    return implementation(value, spatial_shapes, sampling_locations, attention_weights, points_per_level, discrete)


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
        from .msda_launch import launch_msda

        return launch_msda(
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
    implementation = traceable_reference if is_traced(value) else reference
    weights = normalize_weights(value, attention_logits)
    return implementation(value, spatial_shapes, locations, weights, points_per_level, discrete)


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


decompose_when_compiled(OP, _run, _LIBRARY)
decompose_when_compiled(FUSED_OP, _run_fused, _LIBRARY)
ms_deform_attn = torch.ops.detrt.ms_deform_attn
ms_deform_attn_fused = torch.ops.detrt.ms_deform_attn_fused

# Locations beyond these bounds are more than a pixel outside of every level; clamped to them they are exact as integers.
MIN_LOCATION, MAX_LOCATION = -2.0, 3.0


def accumulation_type(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    """Multi-scale deformable attention in PyTorch operators.

    value: (batch, tokens, heads, head_dim), levels one after the other, row-major.
    spatial_shapes: (levels, 2) int32 or int64, (height, width) of each level; they sum to tokens.
    sampling_locations: (batch, queries, heads, points, 2), x and y in 0..1 of the level; points of
        level 0 first, points = sum(points_per_level). Samples outside the level read zeros.
    attention_weights: (batch, queries, heads, points).
    discrete: read the nearest pixel, clamped to the level, instead of the bilinear sample (RT-DETRv2,
        arXiv:2407.17140, section 3).
    Returns (batch, queries, heads * head_dim), dtype of `value`.
    """
    batch, _, heads, dim = value.shape
    queries, points = sampling_locations.shape[1], sampling_locations.shape[3]
    dtype = accumulation_type(value)
    if batch == 0 or queries == 0:
        return value.new_empty(batch, queries, heads * dim)
    shapes = [(int(h), int(w)) for h, w in spatial_shapes.tolist()]
    values = value.to(dtype).split([h * w for h, w in shapes], dim=1)
    all_locations = sampling_locations.to(dtype).permute(0, 2, 1, 3, 4).flatten(0, 1)  # (batch * heads, queries, points, 2)
    locations = all_locations.clamp(MIN_LOCATION, MAX_LOCATION).nan_to_num(nan=MIN_LOCATION).split(points_per_level, dim=2)
    valid_by_level = (~all_locations.isnan().any(-1)).split(points_per_level, dim=2)
    samples = []
    for (height, width), level, location, valid in zip(shapes, values, locations, valid_by_level, strict=True):
        grid_value = level.permute(0, 2, 3, 1).reshape(batch * heads, dim, height, width)
        sample = sample_level(grid_value, location, discrete)
        samples.append(sample.where(valid.unsqueeze(1), 0.0) if discrete else sample)
    weights = attention_weights.to(dtype).permute(0, 2, 1, 3).reshape(batch * heads, 1, queries, points)
    out = (torch.cat(samples, dim=-1) * weights).sum(-1)
    return out.reshape(batch, heads * dim, queries).transpose(1, 2).to(value.dtype).contiguous()


def sample_level(grid: Tensor, locations: Tensor, discrete: bool) -> Tensor:
    """Samples of one level: (rows, head_dim, queries, points), from (rows, head_dim, height, width) values.

    locations: (rows, queries, points, 2), x and y in 0..1. Bilinear samples are in the accumulation type: 16-bit coordinates are
    off by percents of a pixel, and PyTorch's 16-bit CPU kernel returns NaN far outside.
    """
    rows, dim, height, width = grid.shape
    if not discrete:
        dtype = accumulation_type(grid)
        normalized = (2 * locations - 1).to(dtype)
        return F.grid_sample(grid.to(dtype), normalized, mode="bilinear", padding_mode="zeros", align_corners=False)
    size = torch.tensor([width, height], dtype=locations.dtype, device=locations.device)
    pixel = (locations * size + 0.5).to(torch.int64)
    index = pixel[..., 1].clamp(0, height - 1) * width + pixel[..., 0].clamp(0, width - 1)
    flat = index.reshape(rows, 1, -1).expand(-1, dim, -1)
    return grid.flatten(2).gather(2, flat).reshape(rows, dim, locations.shape[1], -1)


def traceable_reference(
    value: Tensor,
    spatial_shapes: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    points_per_level: list[int],
    discrete: bool = False,
) -> Tensor:
    """As `reference`, without reading `spatial_shapes` on the host: all levels at once, four reads per sample.

    Traceable by torch.compile, and by AOTInductor if the Triton kernel cannot run.
    """
    batch, _, heads, dim = value.shape
    dtype = accumulation_type(value)
    device = value.device
    sizes = spatial_shapes.to(device=device, dtype=torch.int64)
    pixels = sizes[:, 0] * sizes[:, 1]
    height, width, start = _repeat_per_point(
        torch.stack([sizes[:, 0], sizes[:, 1], pixels.cumsum(0) - pixels], -1), points_per_level
    ).unbind(-1)
    locations = sampling_locations.to(dtype)
    x, y = locations[..., 0] * width, locations[..., 1] * height  # (batch, queries, heads, points)
    weights = attention_weights.to(dtype)
    in_batch = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    in_heads = torch.arange(heads, device=device).view(1, 1, -1, 1)

    def read(column: Tensor, row: Tensor, inside: Tensor) -> Tensor:
        token = start + row.clamp(min=0).minimum(height - 1) * width + column.clamp(min=0).minimum(width - 1)
        return value[in_batch, token, in_heads].to(dtype).where(inside.unsqueeze(-1), 0.0)

    if discrete:
        valid = ~(x.isnan() | y.isnan())
        column, row = (_bound(coordinate, side).to(torch.int64) for coordinate, side in ((x + 0.5, width), (y + 0.5, height)))
        sample = read(column, row, valid)
        return (sample * weights.unsqueeze(-1)).sum(3).to(value.dtype).reshape(batch, -1, heads * dim)
    x, y = x - 0.5, y - 0.5
    inside = (x > -1) & (x < width) & (y > -1) & (y < height)
    x, y = _bound(x, width), _bound(y, height)
    left, top = x.floor(), y.floor()
    right_fraction, lower_fraction = x - left, y - top
    column, row = left.to(torch.int64), top.to(torch.int64)
    out = torch.zeros((), dtype=dtype, device=device)
    for down in (0, 1):
        for right in (0, 1):
            fraction = (right_fraction if right else 1 - right_fraction) * (lower_fraction if down else 1 - lower_fraction)
            c, r = column + right, row + down
            inside_level = inside & (c >= 0) & (c < width) & (r >= 0) & (r < height)
            out = out + (read(c, r, inside_level) * (fraction * weights).unsqueeze(-1)).sum(3)
    return out.to(value.dtype).reshape(batch, -1, heads * dim)


def _bound(coordinate: Tensor, side: Tensor) -> Tensor:
    """Coordinates limited to just outside of the level, and without NaN, so that they convert to integers."""
    return coordinate.nan_to_num(nan=MIN_LOCATION).clamp(min=MIN_LOCATION).minimum((side + 2).to(coordinate.dtype))


def _repeat_per_point(rows: Tensor, points_per_level: Sequence[int], dim: int = 0) -> Tensor:
    """Repeat the row of each level for each of its points, along `dim`."""
    rows_by_level = rows.split(1, dim)
    shape = list(rows.shape)
    return torch.cat(
        [row.expand(*shape[:dim], n, *shape[dim + 1 :]) for row, n in zip(rows_by_level, points_per_level, strict=True)], dim
    )


def locations_of(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    points_per_level: list[int],
    offset_scale: float,
) -> Tensor:
    """Sampling locations of the fused op: (batch, queries, heads, points, 2) in 0..1.

    Reference points (x, y): offsets are in pixels (arXiv:2010.04159, equation 3). Reference boxes (cx, cy, w, h): offsets are
    fractions of `offset_scale` times the box, divided by the points of the level (appendix A.4).
    """
    dtype = accumulation_type(value)
    offsets = sampling_offsets.to(dtype)
    centres = reference_points.to(dtype)
    if centres.shape[2] != 1:
        centres = _repeat_per_point(centres, points_per_level, dim=2)
    centres = centres.unsqueeze(2)  # (batch or 1, queries, 1, points or 1, 2 or 4)
    levels = len(points_per_level)
    if centres.shape[-1] == 2:
        sides = spatial_shapes.to(device=value.device, dtype=dtype).reshape(levels, 2).flip(-1)
        return centres + offsets / _repeat_per_point(sides, points_per_level)
    fractions = torch.cat([torch.full((n, 1), offset_scale / n, dtype=dtype, device=value.device) for n in points_per_level])
    return centres[..., :2] + offsets * fractions * centres[..., 2:]


def normalize_weights(value: Tensor, attention_logits: Tensor) -> Tensor:
    return attention_logits.to(accumulation_type(value)).softmax(-1)
