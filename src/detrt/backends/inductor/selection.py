"""The choice of the best queries becomes `detrt::top_k` (see `detrt.backends.gpu.top_k`)."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from .nodes import aten, value_of


def fuse_selections(graph: fx.GraphModule) -> int:
    """Rewrite the graph in place; how many there were."""
    from ..gpu.top_k import fits, top_k

    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target != aten.topk.default or node.kwargs:
            continue
        scores, k, dim, largest, in_order = (*node.args, *(None, None, -1, True, True)[len(node.args) :])
        val = value_of(scores)
        if not isinstance(val, Tensor) or val.dim() != 2 or val.dtype != torch.float32:
            continue
        sizes = (*val.shape, k)
        if dim not in (1, -1) or not largest or not in_order or not all(isinstance(size, int) for size in sizes):
            continue
        if not fits(*sizes):
            continue
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(top_k, (scores, k))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        count += 1
    return count
