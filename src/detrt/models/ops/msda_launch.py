"""Launches the Triton kernel over PyTorch's tensors, eagerly or as part of a compiled graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .msda_tiles import Tile, choose, power_of_two
from .msda_triton import msda_kernel
from .msda_triton_many import msda_many_kernel

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_INDEX = 2**31 - 1
MOST_POINTS = 4095  # of all levels together: bounds have 12 bits
LARGEST_HEAD = 256


def fits(value: Tensor, points_per_level: Sequence[int]) -> bool:
    """Whether the kernel takes these sizes and types."""
    return value.dtype in SUPPORTED and value.shape[3] <= LARGEST_HEAD and sum(points_per_level) <= MOST_POINTS


def attend(
    value: Tensor,
    spatial_shapes: Tensor,
    reference_points: Tensor | None,
    places: Tensor,
    weights: Tensor,
    points_per_level: Sequence[int],
    offset_scale: float = 0.5,
    discrete: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Run the kernel; tensors as in `detrt.models.ops.msda`.

    reference_points: None, then places are locations and weights are weights; otherwise offsets and logits.
    """
    batch, tokens, heads, dim = value.shape
    queries, points = places.shape[1], sum(points_per_level)
    out = value.new_empty(batch, queries, heads * dim)
    if _is(batch, 0) or _is(queries, 0):
        return out
    value, places, weights = _packed(value, 2), _packed(_single(places), 3), _packed(_single(weights), 2)
    if not isinstance(value.stride(1), int):
        value = value.contiguous()  # the kernel wants the step between tokens as a constant
    if _traced(value):
        # PyTorch's compiler keeps the order of an input's strides, not the strides, which are numbers in the kernel's call.
        value, places, weights = value.contiguous(), places.contiguous(), weights.contiguous()
    shapes = spatial_shapes.to(device=value.device, non_blocking=True).contiguous()
    references = places if reference_points is None else _packed(_single(reference_points), 1)
    if _traced(value):
        references = references.contiguous()
    steps = (0, 0, 0)
    if reference_points is not None:
        steps = tuple(0 if _is(references.shape[axis], 1) else references.stride(axis) for axis in range(3))
    if tile is None:
        many = not discrete and value.element_size() == 2
        sums = _hint(batch) * _hint(queries) * heads
        tile = choose(sums, points, dim, fused=reference_points is not None, heads=heads if many else 0)
    furthest = (tokens * value.stride(1), queries * places.stride(1), queries * weights.stride(1), queries * steps[1])
    blocks = (queries + tile.queries - 1) // tile.queries
    kernel = msda_many_kernel if tile.beside else msda_kernel
    if _traced(value):
        kernel = torch.library.wrap_triton(kernel)
    if tile.beside:
        special = {"BESIDE": tile.beside, "BLOCK_P": tile.points}
    else:
        special = {
            "BLOCK_D": power_of_two(dim),
            "DISCRETE": discrete,
            "AT_ONCE": tile.points == 0,
            "HEADS_FIRST": tile.heads_first,
            "BLOCK_P": max(tile.points, 1),
        }
    kernel[(blocks * batch * (heads // max(tile.beside, 1)),)](
        value,
        shapes,
        references,
        places,
        weights,
        out,
        queries,
        tokens,
        blocks,
        value.stride(0),
        places.stride(0),
        places.stride(1),
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
        PAIRS=all(_even(n) for n in (places.storage_offset(), places.stride(0), places.stride(1))),
        WIDE=not all(_below(n) for n in furthest),
        BLOCK_Q=tile.queries,
        **special,
        num_warps=tile.warps,
        num_stages=1,
    )
    return out


def _traced(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def _is(size: Any, number: int) -> bool:
    """Whether a size is known to be `number`; a symbolic one is not."""
    return isinstance(size, int) and size == number


def _hint(size: Any) -> int:
    """A size, or the example that a symbolic size was traced with: it decides the speed only."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 1024


def _below(size: Any) -> bool:
    """Whether an index fits 32 bits; a symbolic one must do so over its whole range."""
    if isinstance(size, int):
        return size <= LARGEST_INDEX
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size <= LARGEST_INDEX)


def _even(size: Any) -> bool:
    if isinstance(size, int):
        return size % 2 == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size % 2 == 0)


def _single(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32) if tensor.dtype == torch.float64 else tensor


def _packed(tensor: Tensor, axes: int) -> Tensor:
    """The tensor, copied unless its last `axes` axes lie packed in memory."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[-axes:]), reversed(tensor.stride()[-axes:]), strict=True):
        if stride != expected and not _is(size, 1):
            return tensor.contiguous()
        expected *= size
    return tensor


def _bounds(points_per_level: Sequence[int]) -> int:
    """12 bits a level: the points up to and with it."""
    packed, total = 0, 0
    for level, points in enumerate(points_per_level):
        total += points
        packed |= total << (12 * level)
    return packed
