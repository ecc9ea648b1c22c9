"""Replacement of deformable attention in models of transformers and detrt by the fused op.

Seven families of transformers share one forward, RT-DETRv2 has its own, and D-FINE and DEIMv2 share a third. Each is recognised
by the fingerprint of its source, so that modules of other versions are not replaced.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..layers.deformable import DeformableAttention
from ..rewrites import fingerprint
from .msda import ms_deform_attn_fused

CLASS_SUFFIX = "MultiscaleDeformableAttention"


def _transformers_forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    position_embeddings: Tensor | None = None,
    reference_points: Tensor | None = None,
    spatial_shapes: Tensor | None = None,
    spatial_shapes_list: Any = None,
    level_start_index: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """(batch, queries, dim), and no attention weights, which the op never writes to memory."""
    assert encoder_hidden_states is not None and reference_points is not None and spatial_shapes is not None
    queries = hidden_states if position_embeddings is None else hidden_states + position_embeddings
    value = _masked(self.value_proj(encoder_hidden_states), attention_mask)
    points = [self.n_points] * self.n_levels
    scale, discrete = getattr(self, "offset_scale", 0.5), getattr(self, "method", "default") == "discrete"
    out = _fused_attention(self, queries, value, self.n_heads, reference_points, spatial_shapes, points, scale, discrete)
    return self.output_proj(out), None


def _d_fine_forward(
    self: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    reference_points: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    spatial_shapes: Tensor | None = None,
    spatial_shapes_list: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    assert encoder_hidden_states is not None and reference_points is not None and spatial_shapes is not None
    value = _masked(encoder_hidden_states, attention_mask)
    discrete = self.decoder_method == "discrete"
    points = list(self.num_points_list)
    out = _fused_attention(
        self, hidden_states, value, self.n_heads, reference_points, spatial_shapes, points, self.offset_scale, discrete
    )
    return out, None


def _detrt_forward(self: nn.Module, query: Tensor, reference: Tensor, value: Tensor, keep: Tensor, shapes: Tensor) -> Tensor:
    points = [self.points] * self.levels
    value = self.value_proj(value) * keep
    return self.output_proj(_fused_attention(self, query, value, self.heads, reference, shapes, points, 0.5, False))


def _masked(value: Tensor, keep: Tensor | None) -> Tensor:
    return value if keep is None else value.masked_fill(~keep[..., None], 0.0)


def _fused_attention(
    module: nn.Module,
    queries: Tensor,
    value: Tensor,
    heads: int,
    references: Tensor,
    shapes: Tensor,
    points: list[int],
    scale: float,
    discrete: bool,
) -> Tensor:
    total = sum(points)
    return ms_deform_attn_fused(
        value.unflatten(-1, (heads, -1)),
        shapes,
        references,
        module.sampling_offsets(queries).unflatten(-1, (heads, total, 2)),
        module.attention_weights(queries).unflatten(-1, (heads, total)),
        points,
        float(scale),
        discrete,
    )


# Fingerprints of the forwards in transformers 5.23.0.
FORWARDS: dict[str, Callable[..., Any]] = {
    "69dd25eeadd2b25c": _transformers_forward,  # Deformable DETR, RT-DETR, LW-DETR, RF-DETR
    "f820f53c3e66a68a": _transformers_forward,  # Grounding DINO, MM-Grounding-DINO
    "b82969ae36226e5e": _transformers_forward,  # OmDet-Turbo
    "babc01e9e18cb72e": _transformers_forward,  # RT-DETRv2
    "cfa215f94d769c4e": _d_fine_forward,  # D-FINE, DEIMv2
}


def _fused_forward(module: nn.Module) -> Callable[..., Any] | None:
    cls = type(module)
    if isinstance(module, DeformableAttention):
        return _detrt_forward
    if not cls.__name__.endswith(CLASS_SUFFIX) or not cls.__module__.startswith("transformers."):
        return None
    return FORWARDS.get(fingerprint(cls.forward))


def install(model: nn.Module, *, everywhere: bool = False) -> int:
    """Run every supported deformable attention of a model as the fused op if its inputs are on a GPU.

    On the CPU the original forward runs, unless `everywhere`. The fused op does not return attention weights. Changes the module
    instances of this model only; a second call changes nothing. Returns the number of modules with the fused op.
    """
    count = 0
    for module in model.modules():
        fused = _fused_forward(module)
        if fused is None:
            continue
        count += 1
        if "forward" not in vars(module):
            module.forward = types.MethodType(_dispatch(fused, type(module).forward, everywhere), module)  # type: ignore[method-assign]
    return count


def missing(model: nn.Module) -> list[str]:
    """Classes of deformable attention in a model that `install` does not support, from another version of transformers."""
    names = {type(m).__name__ for m in model.modules() if type(m).__name__.endswith(CLASS_SUFFIX) and _fused_forward(m) is None}
    return sorted(names)


@functools.cache
def _dispatch(fused: Callable[..., Any], original: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["hidden_states"]
        return (fused if everywhere or first.is_cuda else original)(self, *args, **kwargs)

    return forward
