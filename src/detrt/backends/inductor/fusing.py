"""Fusions: attention, linear layers of one input, common subexpressions, top-k, and epilogues of matmuls and convolutions."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .nodes import VIEWS, Constants, aten, conv_args, is_low, is_pure, set_value, value_of


def fuse_attention(graph: fx.GraphModule, biased: bool = True) -> None:
    """Replace softmax(q k^T * scale + bias) v by `scaled_dot_product_attention`, which keeps the scores in registers.

    biased: also fuse attention with a bias.
    """
    for node in list(graph.graph.nodes):
        match = _attention(node)
        if match is None or (match[3] is not None and not biased):
            continue
        q, k, v, bias, scale = match
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
        scores, bias = next(((a, b) for a, b in pairs if _scaled_product(a) is not None), (scores, None))
        if bias is None or not 2 <= value_of(bias).ndim <= 4 or value_of(bias).dtype != val.dtype:
            return None
    match = _scaled_product(scores)
    return None if match is None else (match[0], match[1], v, bias, match[2])


def _scaled_product(node: Any) -> tuple[Any, Any, float] | None:
    """(q, k, scale) of q k^T * scale."""
    scale = 1.0
    while isinstance(node, fx.Node) and node.target in (aten.mul.Tensor, aten.div.Tensor):
        if not isinstance(node.args[1], (int, float)):
            return None
        scale = scale * node.args[1] if node.target == aten.mul.Tensor else scale / node.args[1]
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target != aten.matmul.default:
        return None
    transposed = node.args[1]
    if not isinstance(transposed, fx.Node) or transposed.target != aten.transpose.int or value_of(transposed).ndim != 4:
        return None
    if {transposed.args[1] % 4, transposed.args[2] % 4} != {2, 3}:
        return None
    return node.args[0], transposed.args[0], scale


def eliminate_common_subexpressions(graph: fx.GraphModule) -> None:
    """Merge equal operators with equal inputs, such as memory plus positions in every layer of a decoder."""
    first_nodes: dict[Any, fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and is_pure(node.target):
            key = (node.target, _hash_key(node.args), _hash_key(tuple(sorted(node.kwargs.items()))))
        elif node.target is operator.getitem:
            key = (operator.getitem, node.args)
        else:
            continue
        try:
            first = first_nodes.setdefault(key, node)
        except TypeError:
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.graph.erase_node(node)


def _hash_key(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hash_key(v) for v in value)
    # 1, 1.0 and True are equal, and not the same argument.
    return (type(value).__name__, value) if isinstance(value, (bool, int, float)) else value


def merge_linears(graph: fx.GraphModule) -> None:
    """Merge linear layers that read one tensor into one matmul: query, key and value; offsets and weights.

    Values of deformable attention are not merged, because its kernel needs contiguous tensors.
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
            all_biases = [torch.zeros_like(w[:, 0]) if b is None else b for b, w in zip(biases, weights, strict=True)]  # type: ignore[index]
            args.append(constants.add(torch.cat(all_biases), first, first))
        with graph.graph.inserting_before(first):
            joined = graph.graph.call_function(aten.linear.default, tuple(args))
            pieces = graph.graph.call_function(aten.split_with_sizes.default, (joined, sizes, -1))
            set_value(joined)
            set_value(pieces)
            for index, node in enumerate(nodes):
                piece = graph.graph.call_function(operator.getitem, (pieces, index))
                set_value(piece)
                node.replace_all_uses_with(piece)
    graph.graph.eliminate_dead_code()


def _feeds_values(node: fx.Node) -> bool:
    """Whether the result of a linear layer reaches deformable attention through views and masks only."""
    todo, first_nodes = [node], set()
    passing = (*VIEWS, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.mul.Tensor, aten.permute.default, aten.where.self)
    while todo:
        for user in todo.pop().users:
            if str(user.target).startswith("detrt."):
                return True
            if user.target in passing and user not in first_nodes:
                first_nodes.add(user)
                todo.append(user)
    return False


def pad_stem(graph: fx.GraphModule, channels: int) -> None:
    """Pad the input of the first convolution from 3 channels to `channels`: tensor cores read whole vectors of channels."""
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.conv2d.default, aten.conv2d.padding):
            continue
        weight, val = constants.get(node.args[1]), value_of(node.args[0])
        if weight is None or weight.shape[1] != 3 or val is None or val.shape[1] != 3 or weight.dtype == torch.float32:
            continue
        padded = F.pad(weight, (0, 0, 0, 0, 0, channels - 3))
        with graph.graph.inserting_before(node):
            data = graph.graph.call_function(aten.constant_pad_nd.default, (node.args[0], [0, 0, 0, 0, 0, channels - 3], 0.0))
            set_value(data)
        node.args = (data, constants.add(padded, node, node), *node.args[2:])


def fuse_top_k(graph: fx.GraphModule) -> int:
    """Replace `topk` by `detrt::top_k` where its kernel is faster; the number of replacements."""
    from ..gpu.top_k import is_faster, top_k

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
        if not is_faster(*sizes):
            continue
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(top_k, (scores, k))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        count += 1
    return count


_RELU = (aten.relu.default,)


def fuse_epilogues(graph: fx.GraphModule, linears: bool = True, convolutions: str = "all") -> int:
    """Move ReLU and residual sums into the matmul or convolution before them; the number of fused activations.

    convolutions: "all", "wide" (3x3 and larger), or "none". See `detrt.backends.inductor.kernels`.
    """
    from .kernels import conv_relu, linear_relu

    constants = Constants(graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _RELU:
            continue
        source = node.args[0]
        new = None
        if linears and _is_linear(source):
            new = (linear_relu, tuple(source.args[:3]))
        elif convolutions != "none":
            match = _convolution(source, node, constants, convolutions)
            new = None if match is None else (conv_relu, match)
        if new is None:
            continue
        with graph.graph.inserting_before(node):
            fused = graph.graph.call_function(*new)
        fused.meta["val"] = value_of(node)
        node.replace_all_uses_with(fused)
        graph.graph.erase_node(node)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def fuse_gelu(graph: fx.GraphModule) -> int:
    """Replace linear layers with a GELU behind them by `detrt::linear_gelu`, where its kernel is faster; the number of replacements."""
    from .kernels import linear_gelu, linear_gelu_is_faster

    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target != aten.gelu.default or node.kwargs.get("approximate", "none") != "none":
            continue
        source = node.args[0]
        if not _is_linear(source):
            continue
        val, inputs = value_of(source), value_of(source.args[0]).shape[-1]
        if not linear_gelu_is_faster(math.prod(val.shape[:-1]), val.shape[-1], inputs):
            continue
        with graph.graph.inserting_before(node):
            fused = graph.graph.call_function(linear_gelu, tuple(source.args[:3]))
        fused.meta["val"] = value_of(node)
        node.replace_all_uses_with(fused)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def pad_heads(graph: fx.GraphModule) -> int:
    """Pad linear layers with an unaligned number of outputs, such as 91 classes, to a multiple of 8, and slice the result.

    Tensor cores write whole vectors, and the kernels that do not are five times slower. Returns the number of padded layers.
    """
    constants = Constants(graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target != aten.linear.default or not is_low(node):
            continue
        val, weight = value_of(node), constants.get(node.args[1])
        bias = constants.get(node.args[2]) if len(node.args) > 2 else None
        if (
            weight is None
            or weight.ndim != 2
            or weight.shape[0] % 8 == 0
            or (len(node.args) > 2 and node.args[2] is not None and bias is None)
        ):
            continue
        size, extra = weight.shape[0], -weight.shape[0] % 8
        args = [node.args[0], constants.add(F.pad(weight, (0, 0, 0, extra)), node, node)]
        if bias is not None:
            args.append(constants.add(F.pad(bias, (0, extra)), node, node))
        with graph.graph.inserting_before(node):
            padded = graph.graph.call_function(aten.linear.default, tuple(args))
            set_value(padded)
            sliced = graph.graph.call_function(aten.slice.Tensor, (padded, val.ndim - 1, 0, size))
        sliced.meta["val"] = val
        node.replace_all_uses_with(sliced)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _is_linear(node: Any) -> bool:
    """A linear layer over several rows, with a bias, in a type that cuBLASLt has tensor cores for."""
    if not isinstance(node, fx.Node) or node.target != aten.linear.default or len(node.users) != 1:
        return False
    val = value_of(node)
    if len(node.args) < 3 or node.args[2] is None or not is_low(node):
        return False
    rows = math.prod(val.shape[:-1])
    return isinstance(rows, int) and rows > 1


def _convolution(source: Any, relu: fx.Node, constants: Constants, which: str) -> tuple[Any, ...] | None:
    if not isinstance(source, fx.Node) or len(source.users) != 1:
        return None
    conv, residual = source, None
    if source.target == aten.add.Tensor and not source.kwargs:
        left, right = source.args
        order = list(relu.graph.nodes)
        pairs = [(a, b) for a, b in ((left, right), (right, left)) if _is_conv(a, constants, which)]
        if not pairs:
            return None
        # Of two convolutions the later one adds the result of the other.
        conv, residual = max(pairs, key=lambda pair: order.index(pair[0]))
        if not isinstance(residual, fx.Node) or value_of(residual) is None:
            return None
        if tuple(value_of(residual).shape) != tuple(value_of(conv).shape) or value_of(residual).dtype != value_of(conv).dtype:
            return None
    elif not _is_conv(source, constants, which):
        return None
    data, weight, bias, stride, padding, dilation, groups = conv_args(conv)
    if residual is not None:
        bias = _with_bias_of(residual, bias, constants)
    if isinstance(data, fx.Node) and data.target == aten.constant_pad_nd.default:
        data = _channels_last(data)  # input of the first convolution: written once, in the layout that the convolution reads
    return (data, weight, bias, residual, stride, padding, dilation, groups)


def _with_bias_of(residual: fx.Node, bias: fx.Node, constants: Constants) -> fx.Node:
    """The sum of both biases, if the residual is a convolution that only this sum reads: cuDNN adds no bias without a ReLU."""
    if residual.target != aten.conv2d.default or len(residual.users) != 1 or residual.kwargs or len(residual.args) < 3:
        return bias
    other, own = constants.get(residual.args[2]), constants.get(bias)
    if other is None or own is None:
        return bias
    residual.args = (*residual.args[:2], None, *residual.args[3:])
    return constants.add((own.float() + other.float()).to(own.dtype), residual, bias)


def _channels_last(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last})
    new.meta["val"] = value_of(node)
    return new


def _is_conv(node: Any, constants: Constants, which: str) -> bool:
    if not isinstance(node, fx.Node) or node.target != aten.conv2d.default or len(node.users) != 1 or not is_low(node):
        return False
    weight = constants.get(node.args[1])
    has_bias = len(node.args) > 2 and node.args[2] is not None
    if weight is None or not has_bias or node.kwargs:
        return False
    if conv_args(node)[6] != 1:
        # With its 24 depthwise convolutions fused D-FINE took 0.8 ms more on an H200.
        return False
    return which == "all" or weight.shape[2] * weight.shape[3] > 1
