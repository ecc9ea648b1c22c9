"""Fusion of window attention, unfused or `scaled_dot_product_attention`, into `detrt::window_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .nodes import CASTS, Constants, aten, attention_args, columns_of, fake_like, value_of

MAX_WINDOW_TOKENS, DIMS = 256, (16, 32, 64)


@dataclass(frozen=True, slots=True)
class _Match:
    """Window attention in the graph: its inputs, and the constants that are added to the scores."""

    q: fx.Node
    k: fx.Node
    v: fx.Node
    added: tuple[fx.Node, ...]
    scale: float


def fuse_windows(graph: fx.GraphModule) -> int:
    """Rewrite the graph in place, if query, key and value are slices of one matmul; the number of replacements."""
    from .kernels import window_attention

    constants = Constants(graph)
    count = 0
    for node in list(graph.graph.nodes):
        match = _match_unfused(node) or _match_sdpa(node)
        if match is None:
            continue
        val = value_of(node)
        windows, heads, tokens, dim = val.shape
        if tokens > MAX_WINDOW_TOKENS or dim not in DIMS or val.dtype not in (torch.float16, torch.bfloat16):
            continue
        source = _one_source(match, heads, tokens, dim)
        terms = _bias_and_mask(match.added, constants, windows, heads, tokens)
        if source is None or terms is None:
            continue
        bias, mask = terms
        with graph.graph.inserting_before(node):
            tensors = [None if t is None else constants.add(t.to(val.dtype).contiguous(), node, node) for t in (bias, mask)]
            out = graph.graph.call_function(window_attention, (source, *tensors, heads, match.scale))
            reshaped = graph.graph.call_function(aten.reshape.default, (out, [windows, tokens, heads, dim]))
            transposed = graph.graph.call_function(aten.transpose.int, (reshaped, 1, 2))
        transposed.meta["val"] = val
        reshaped.meta["val"] = fake_like(torch.empty((windows, tokens, heads, dim), dtype=val.dtype, device="meta"), node)
        out.meta["val"] = fake_like(torch.empty((windows, tokens, heads * dim), dtype=val.dtype, device="meta"), node)
        node.replace_all_uses_with(transposed)
        graph.graph.erase_node(node)  # the tracer's rule keeps it: attention may drop out at random
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _skip_casts(node: Any) -> Any:
    """The node before any casts."""
    while isinstance(node, fx.Node) and node.target in CASTS:
        node = node.args[0]
    return node


def _split_scale(node: Any) -> tuple[Any, float]:
    """(node without its constant factors, their product)."""
    scale, node = 1.0, _skip_casts(node)
    while isinstance(node, fx.Node) and node.target in (aten.mul.Tensor, aten.div.Tensor):
        number = node.args[1]
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            break
        scale = scale * number if node.target == aten.mul.Tensor else scale / number
        node = _skip_casts(node.args[0])
    return node, scale


def _is_4d(node: Any) -> bool:
    val = value_of(node)
    return isinstance(val, Tensor) and val.ndim == 4 and all(isinstance(side, int) for side in val.shape)


def _match_sdpa(node: fx.Node) -> _Match | None:
    found = attention_args(node) if _is_4d(node) else None
    if found is None or not isinstance(found[3], fx.Node):
        return None
    q, k, v, bias, scale = found
    (q, a), (k, b) = _split_scale(q), _split_scale(k)
    return _Match(q, k, _skip_casts(v), (bias,), float(scale * a * b))


def _match_unfused(node: fx.Node) -> _Match | None:
    if node.op != "call_function" or node.target != aten.matmul.default or not _is_4d(node):
        return None
    weights = _skip_casts(node.args[0])
    if not isinstance(weights, fx.Node) or weights.target != aten.softmax.int or len(weights.users) != 1:
        return None
    if weights.args[1] not in (-1, 3):
        return None
    scores, added = _skip_casts(weights.args[0]), []
    while isinstance(scores, fx.Node) and scores.target in (aten.add.Tensor, aten.view.default, aten.reshape.default):
        if scores.target == aten.add.Tensor:
            left, right = scores.args
            constant = next((c for c in (right, left) if isinstance(c, fx.Node) and _skip_casts(c).op == "get_attr"), None)
            if constant is None or scores.kwargs:
                return None
            added.append(_skip_casts(constant))
            scores = left if constant is right else right
        else:
            scores = scores.args[0]
        scores = _skip_casts(scores)
    scores, scale = _split_scale(scores)
    if not isinstance(scores, fx.Node) or scores.target != aten.matmul.default or not added:
        return None
    (q, a), (transposed, b) = _split_scale(scores.args[0]), _split_scale(scores.args[1])
    if not isinstance(transposed, fx.Node) or transposed.target != aten.transpose.int or not _is_4d(transposed):
        return None
    if {transposed.args[1] % 4, transposed.args[2] % 4} != {2, 3}:
        return None
    k, c = _split_scale(transposed.args[0])
    return _Match(q, k, _skip_casts(node.args[1]), tuple(added), float(scale * a * b * c))


def _one_source(match: _Match, heads: int, tokens: int, dim: int) -> fx.Node | None:
    """The matmul that query, key and value are slices of, in that order; None if they are not."""
    width = heads * dim
    found = [columns_of(node, value_of(match.q).shape[0], heads, tokens, dim) for node in (match.q, match.k, match.v)]
    if None in found or [at for _, at in found] != [0, width, 2 * width]:  # type: ignore[misc]
        return None
    (source, _), *others = found  # type: ignore[misc]
    return source if all(other is source for other, _ in others) and value_of(source).shape[2] == 3 * width else None  # type: ignore[misc]


def _bias_and_mask(
    added: tuple[fx.Node, ...], constants: Constants, windows: int, heads: int, tokens: int
) -> tuple[Tensor, Tensor | None] | None:
    """((heads, tokens, tokens), (masks, tokens, tokens) or None)."""
    bias: Tensor | None = None
    mask: Tensor | None = None
    for node in added:
        tensor = constants.get(_skip_casts(node))
        if tensor is None or tensor.ndim < 3 or tuple(tensor.shape[-2:]) != (tokens, tokens):
            return None
        count, heads_here = tensor.numel() // (tokens * tokens), tensor.shape[-3]
        if bias is None and heads_here == heads == count:
            bias = tensor.reshape(heads, tokens, tokens)
        elif mask is None and heads_here == 1 and tensor.ndim >= 4 and tensor.shape[-4] == count and windows % count == 0:
            mask = tensor.reshape(count, tokens, tokens)
        else:
            return None
    if bias is None:
        return None
    return bias, mask
