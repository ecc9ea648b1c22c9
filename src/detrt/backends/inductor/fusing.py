"""Several operators become one: attention, products of one input, what is written twice."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .nodes import VIEWS, Constants, aten, is_pure, remember, value_of


def fuse_attention(graph: fx.GraphModule, biased: bool = True) -> None:
    """softmax(q k^T * scale + bias) v, written out, becomes one operator, which keeps the scores in registers.

    biased: also where there is a bias.
    """
    for node in list(graph.graph.nodes):
        found = _attention(node)
        if found is None or (found[3] is not None and not biased):
            continue
        q, k, v, bias, scale = found
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(
                aten.scaled_dot_product_attention.default, (q, k, v, bias, 0.0, False), {"scale": scale}
            )
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
    graph.graph.eliminate_dead_code()


def _attention(node: fx.Node) -> tuple[Any, Any, Any, Any, float] | None:
    if node.target != aten.matmul.default or not isinstance(node.args[0], fx.Node):
        return None
    weights, v = node.args[0], node.args[1]
    val = value_of(node)
    if weights.target != aten.softmax.int or len(weights.users) != 1 or val is None or val.ndim != 4:
        return None
    if weights.args[1] not in (-1, 3) or len(weights.args) > 2:
        return None
    scores, bias = weights.args[0], None
    if scores.target == aten.add.Tensor and not scores.kwargs and isinstance(scores.args[1], fx.Node):
        pairs = (scores.args, scores.args[::-1])
        scores, bias = next(((a, b) for a, b in pairs if _product(a) is not None), (scores, None))
        if bias is None or not 2 <= value_of(bias).ndim <= 4 or value_of(bias).dtype != val.dtype:
            return None
    found = _product(scores)
    return None if found is None else (found[0], found[1], v, bias, found[2])


def _product(node: Any) -> tuple[Any, Any, float] | None:
    """(q, k, scale) of q k^T * scale."""
    scale = 1.0
    while isinstance(node, fx.Node) and node.target in (aten.mul.Tensor, aten.div.Tensor):
        if not isinstance(node.args[1], (int, float)):
            return None
        scale = scale * node.args[1] if node.target == aten.mul.Tensor else scale / node.args[1]
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target != aten.matmul.default:
        return None
    turned = node.args[1]
    if not isinstance(turned, fx.Node) or turned.target != aten.transpose.int or value_of(turned).ndim != 4:
        return None
    if {turned.args[1] % 4, turned.args[2] % 4} != {2, 3}:
        return None
    return node.args[0], turned.args[0], scale


def share_equal(graph: fx.GraphModule) -> None:
    """Compute once what is written several times, such as memory plus positions in every layer of a decoder."""
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and is_pure(node.target):
            key = (node.target, _hashable(node.args), _hashable(tuple(sorted(node.kwargs.items()))))
        elif node.target is operator.getitem:
            key = (operator.getitem, node.args)
        else:
            continue
        try:
            first = seen.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    # 1, 1.0 and True are equal, and not the same argument.
    return (type(value).__name__, value) if isinstance(value, (bool, int, float)) else value


def join_linears(graph: fx.GraphModule) -> None:
    """Linear layers that read one tensor become one product: query, key and value; offsets and weights.

    What goes straight into deformable attention stays apart, because its kernel wants each tensor in one piece.
    """
    constants = Constants(graph)
    order = {node: index for index, node in enumerate(graph.graph.nodes)}
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target == aten.linear.default and not _feeds_values(node):
            weight = constants.get(node.args[1])
            has_bias = len(node.args) > 2 and node.args[2] is not None
            if weight is not None and weight.shape[0] <= 1024 and (not has_bias or constants.get(node.args[2]) is not None):
                groups.setdefault((node.args[0], weight.dtype), []).append(node)
    for nodes in groups.values():
        if len(nodes) < 2:
            continue
        first = min(nodes, key=order.__getitem__)
        weights = [constants.get(n.args[1]) for n in nodes]
        biases = [constants.get(n.args[2]) if len(n.args) > 2 and n.args[2] is not None else None for n in nodes]
        sizes = [w.shape[0] for w in weights]  # type: ignore[union-attr]
        weight = torch.cat(weights)  # type: ignore[arg-type]
        args: list[Any] = [first.args[0], constants.add(weight, first, first)]
        if any(b is not None for b in biases):
            filled = [torch.zeros_like(w[:, 0]) if b is None else b for b, w in zip(biases, weights, strict=True)]  # type: ignore[index]
            args.append(constants.add(torch.cat(filled), first, first))
        with graph.graph.inserting_before(first):
            joined = graph.graph.call_function(aten.linear.default, tuple(args))
            parts = graph.graph.call_function(aten.split_with_sizes.default, (joined, sizes, -1))
            remember(joined)
            remember(parts)
            for index, node in enumerate(nodes):
                part = graph.graph.call_function(operator.getitem, (parts, index))
                remember(part)
                node.replace_all_uses_with(part)
    graph.graph.eliminate_dead_code()


def _feeds_values(node: fx.Node) -> bool:
    """Whether a linear layer's result reaches deformable attention through views and masks alone."""
    todo, seen = [node], set()
    passing = (*VIEWS, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.mul.Tensor, aten.permute.default, aten.where.self)
    while todo:
        for user in todo.pop().users:
            if str(user.target).startswith("detrt."):
                return True
            if user.target in passing and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def pad_stem(graph: fx.GraphModule, channels: int) -> None:
    """Give a convolution over the three colours some channels of zeros: tensor cores read whole vectors of channels."""
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.conv2d.default, aten.conv2d.padding):
            continue
        weight, val = constants.get(node.args[1]), value_of(node.args[0])
        if weight is None or weight.shape[1] != 3 or val is None or val.shape[1] != 3 or weight.dtype == torch.float32:
            continue
        wider = F.pad(weight, (0, 0, 0, 0, 0, channels - 3))
        with graph.graph.inserting_before(node):
            data = graph.graph.call_function(aten.constant_pad_nd.default, (node.args[0], [0, 0, 0, 0, 0, channels - 3], 0.0))
            remember(data)
        node.args = (data, constants.add(wider, node, node), *node.args[2:])
