"""Fusion of attention without a bias into `detrt::attention`, which reads merged queries, keys and values as their matmul wrote them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .nodes import aten, columns_of, set_value, value_of


def fuse_plain_attention(graph: fx.GraphModule) -> int:
    """Replace attention without a mask by `detrt::attention` where its kernel is faster; the number of replacements.

    Sizes are numbers; only the batch may be symbolic.
    """
    from .kernels import attention, attention_is_faster

    count = 0
    for node in list(graph.graph.nodes):
        scale = _scale(node)
        if scale is None:
            continue
        q, k, v = node.args[:3]
        sizes = [value_of(t).shape for t in (q, k, v)]
        heads, queries, dim = sizes[0][1:]
        keys = sizes[1][2]
        if any(not isinstance(side, int) for size in sizes for side in size[1:]):
            continue
        if [*sizes[1][1:]] != [heads, keys, dim] or sizes[2] != sizes[1] or sizes[0][0] != sizes[1][0]:
            continue
        if any(value_of(t).dtype not in (torch.float16, torch.bfloat16) for t in (q, k, v)):
            continue
        if not attention_is_faster(sizes[0][0], heads, queries, keys, dim):
            continue
        with graph.graph.inserting_before(node):
            rows = [_rows(graph.graph, t) for t in (q, k, v)]
            out = graph.graph.call_function(attention, (*(r for r, _ in rows), [at for _, at in rows], heads, dim, float(scale)))
            set_value(out)
            split = graph.graph.call_function(aten.reshape.default, (out, [sizes[0][0], queries, heads, dim]))
            set_value(split)
            new = graph.graph.call_function(aten.transpose.int, (split, 1, 2))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)  # the tracer's rule keeps it: attention may drop out at random
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _scale(node: fx.Node) -> float | None:
    """The factor of the scores, if the node is attention of four axes without mask, dropout and causality."""
    if node.op != "call_function" or node.target != aten.scaled_dot_product_attention.default:
        return None
    val = value_of(node)
    _, _, _, mask, dropout, causal = [*node.args, *(None, 0.0, False)[len(node.args) - 3 :]]
    if mask is not None or dropout or causal or not set(node.kwargs) <= {"scale", "attn_mask", "enable_gqa"}:
        return None
    if node.kwargs.get("attn_mask") is not None or node.kwargs.get("enable_gqa"):
        return None
    if not isinstance(val, Tensor) or val.ndim != 4 or not isinstance(val.shape[0], int):
        return None
    scale = node.kwargs.get("scale")
    return float(val.shape[3] ** -0.5 if scale is None else scale)  # type: ignore[arg-type]


def _rows(graph: fx.Graph, node: Any) -> tuple[fx.Node, int]:
    """((batch, tokens, width) with the heads of each token side by side, the column of the first)."""
    batch, heads, tokens, dim = value_of(node).shape
    found = columns_of(node, batch, heads, tokens, dim)
    if found is not None:
        return found
    turned = graph.call_function(aten.transpose.int, (node, 1, 2))
    set_value(turned)
    flat = graph.call_function(aten.reshape.default, (turned, [batch, tokens, heads * dim]))
    set_value(flat)
    return flat, 0
