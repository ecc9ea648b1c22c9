"""Launch of the Triton kernels on PyTorch tensors, eagerly or in a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .compiling import is_traced
from .msda_tiles import Tile, choose, power_of_two
from .msda_triton import msda_kernel
from .msda_triton_many import msda_many_queries_kernel

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)
MAX_INDEX = 2**31 - 1
MAX_POINTS = 4095  # of all levels together: bounds have 12 bits
MAX_HEAD_DIM = 256


def kernel_supports(value: Tensor, points_per_level: Sequence[int]) -> bool:
    """Whether the kernel supports these sizes and types."""
    return value.dtype in SUPPORTED and value.shape[3] <= MAX_HEAD_DIM and sum(points_per_level) <= MAX_POINTS


def launch_msda(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor | None,
    locations: Tensor,
    weights: Tensor,
    points_per_level: Sequence[int],
    offset_scale: float = 0.5,
    discrete: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Run the kernel; tensors as in `detrt.models.ops.msda`.

    reference_points: None if `locations` are sampling locations and `weights` attention weights; otherwise offsets and logits.
    """
    batch, tokens, heads, dim = value.shape
    queries, points = locations.shape[1], sum(points_per_level)
    out = value.new_empty(batch, queries, heads * dim)
    if _equals(batch, 0) or _equals(queries, 0):
        return out
    value, locations, weights = _contiguous(value, 2), _contiguous(_single(locations), 3), _contiguous(_single(weights), 2)
    if not isinstance(value.stride(1), int):
        value = value.contiguous()  # the kernel takes the stride of tokens as a constant
    if is_traced(value):
        # PyTorch's compiler keeps the order of strides, but not their values, which are constants in the kernel's call.
        value, locations, weights = value.contiguous(), locations.contiguous(), weights.contiguous()
    shapes = spatial_shapes.to(device=value.device, non_blocking=True).contiguous()
    references = locations if reference_points is None else _contiguous(_single(reference_points), 1)
    if is_traced(value):
        references = references.contiguous()
    steps = (0, 0, 0)
    if reference_points is not None:
        steps = tuple(0 if _equals(references.shape[axis], 1) else references.stride(axis) for axis in range(3))
    if tile is None:
        many_queries = not discrete and value.element_size() == 2
        outputs = _hint(batch) * _hint(queries) * heads
        tile = choose(outputs, points, dim, fused=reference_points is not None, heads=heads if many_queries else 0)
    max_offsets = (tokens * value.stride(1), queries * locations.stride(1), queries * weights.stride(1), queries * steps[1])
    blocks = (queries + tile.queries - 1) // tile.queries
    kernel = msda_many_queries_kernel if tile.heads_per_program else msda_kernel
    if is_traced(value):
        kernel = torch.library.wrap_triton(kernel)
    if tile.heads_per_program:
        kernel_options = {"HEADS_PER_PROGRAM": tile.heads_per_program, "BLOCK_P": tile.points}
    else:
        kernel_options = {
            "BLOCK_D": power_of_two(dim),
            "DISCRETE": discrete,
            "AT_ONCE": tile.points == 0,
            "HEADS_FIRST": tile.heads_first,
            "BLOCK_P": max(tile.points, 1),
            "EARLY": False,
        }
    kernel[(blocks * batch * (heads // max(tile.heads_per_program, 1)),)](
        value,
        shapes,
        references,
        locations,
        weights,
        out,
        queries,
        tokens,
        blocks,
        value.stride(0),
        locations.stride(0),
        locations.stride(1),
        weights.stride(0),
        weights.stride(1),
        *steps,
        float(offset_scale),
        HEADS=heads,
        VALUE_T=value.stride(1),
        D=dim,
        LEVELS=len(points_per_level),
        POINTS=points,
        BOUNDS=_bounds(points_per_level),
        BLOCK_ALL=power_of_two(points),
        REFERENCE=0 if reference_points is None else references.shape[-1],
        SOFTMAX=reference_points is not None,
        PAIRS=all(_is_even(n) for n in (locations.storage_offset(), locations.stride(0), locations.stride(1))),
        WIDE=not all(_fits_int32(n) for n in max_offsets),
        BLOCK_Q=tile.queries,
        **kernel_options,
        num_warps=tile.warps,
        num_stages=1,
    )
    return out


def _equals(size: Any, number: int) -> bool:
    """Whether a size is the integer `number`; never for a symbolic size."""
    return isinstance(size, int) and size == number


def _hint(size: Any) -> int:
    """A size, or the hint of a symbolic size; it affects speed only."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 1024


def _fits_int32(size: Any) -> bool:
    """Whether an index fits into 32 bits, over the whole range if it is symbolic."""
    if isinstance(size, int):
        return size <= MAX_INDEX
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size <= MAX_INDEX)


def _is_even(size: Any) -> bool:
    if isinstance(size, int):
        return size % 2 == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size % 2 == 0)


def _single(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def _contiguous(tensor: Tensor, axes: int) -> Tensor:
    """The tensor, copied unless its last `axes` axes are contiguous."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-axes:]), reversed(tensor.stride()[-axes:]), strict=True):
        if stride != expected and not _equals(size, 1):
            return tensor.contiguous()
        expected *= size
    return tensor


def _bounds(points_per_level: Sequence[int]) -> int:
    """Cumulative number of points of each level, 12 bits per level."""
    packed, total = 0, 0
    for level, points in enumerate(points_per_level):
        total += points
        packed |= total << (12 * level)
    return packed
