"""Deformable attention in the ONNX graph: one node for the op `detrt::ms_deform_attn` (`detrt.models.ops.msda`).

The op stays whole in traced and exported programs and is lowered last (`detrt.graph.lower_msda`), or runs as a kernel.
"""

from __future__ import annotations

from typing import Any

from ..graph.operators import MSDA, MSDA_DOMAIN
from ..models.ops.msda import OP


def onnx_symbolic(g: Any, value: Any, shapes: Any, locations: Any, weights: Any, points_per_level: Any, discrete: Any) -> Any:
    """TorchScript symbolic: one node `detrt.MSDeformAttn`; see `detrt.graph.lower_msda` for what becomes of it."""
    from torch.onnx import symbolic_helper

    # Heads and their width are weights' shapes, so they are known even where batch and size are not.
    sizes = value.type().varyingSizes()
    if sizes is None or None in sizes[2:]:
        raise ValueError(f"{OP}: the traced value has no fixed heads and head_dim, its shape is {sizes}")
    heads, head_dim = sizes[2:]
    node = g.op(
        f"{MSDA_DOMAIN}::{MSDA}",
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
