"""Fusion of attention without a bias into `detrt::attention`, which reads merged queries, keys and values as their matmul wrote them."""

from __future__ import annotations

from typing import Any

from torch import fx

from .nodes import aten, attention_args, call, columns_of, is_low, value_of


def fuse_plain_attention(graph: fx.GraphModule) -> int:
    """Replace attention without a mask by `detrt::attention` where its kernel is faster; the number of replacements.

    All sizes are numbers, that of the batch as well.
    """
    from .kernels import attention, attention_is_faster

    count = 0
    for node in list(graph.graph.nodes):
        found = attention_args(node)
        if found is None or found[3] is not None or not isinstance(value_of(node).shape[0], int):
            continue
        q, k, v, _, scale = found
        sizes = [value_of(t).shape for t in (q, k, v)]
        heads, queries, dim = sizes[0][1:]
        keys = sizes[1][2]
        if any(not isinstance(side, int) for size in sizes for side in size[1:]):
            continue
        if [*sizes[1][1:]] != [heads, keys, dim] or sizes[2] != sizes[1] or sizes[0][0] != sizes[1][0]:
            continue
        if not all(is_low(t) for t in (q, k, v)):
            continue
        if not attention_is_faster(sizes[0][0], heads, queries, keys, dim):
            continue
        with graph.graph.inserting_before(node):
            rows = [_rows(graph, t) for t in (q, k, v)]
            out = call(graph, attention, *(r for r, _ in rows), [at for _, at in rows], heads, dim, scale)
            split = call(graph, aten.reshape.default, out, [sizes[0][0], queries, heads, dim])
            new = graph.graph.call_function(aten.transpose.int, (split, 1, 2))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)  # the tracer's rule keeps it: attention may drop out at random
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _rows(graph: fx.GraphModule, node: Any) -> tuple[fx.Node, int]:
    """((batch, tokens, width) with the heads of each token side by side, the column of the first)."""
    batch, heads, tokens, dim = value_of(node).shape
    found = columns_of(node, batch, heads, tokens, dim)
    if found is not None:
        return found
    turned = call(graph, aten.transpose.int, node, 1, 2)
    flat = call(graph, aten.reshape.default, turned, [batch, tokens, heads * dim])
    return flat, 0
