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
from typing import Any

import torch
from torch import Tensor

from . import portable

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
    plain = portable.gathered if _hidden(value) else portable.reference
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
    locations = portable.locations_of(value, spatial_shapes, reference_points, sampling_offsets, points_per_level, offset_scale)
    plain = portable.gathered if _hidden(value) else portable.reference
    weights = portable.weights_of(value, attention_logits)
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
