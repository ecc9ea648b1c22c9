"""What follows a product or a convolution: ReLU and residual sums go into it, see `detrt.backends.inductor.kernels`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .nodes import Constants, aten, remember, value_of

_RELU = (aten.relu.default,)


def fuse_epilogues(graph: fx.GraphModule, linears: bool = True, convolutions: str = "all") -> int:
    """Rewrite the graph in place; how many activations went. convolutions: "all", "wide" (3x3 and larger), "none"."""
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
            found = _convolution(source, node, constants, convolutions)
            new = None if found is None else (conv_relu, found)
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


def pad_heads(graph: fx.GraphModule) -> int:
    """Products with an odd number of results, such as 91 classes, get rows of zeros up to a multiple of 8, which are cut off
    again: tensor cores write whole vectors, and the kernels that do not are five times slower. How many there were."""
    constants = Constants(graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target != aten.linear.default or not _is_low(node):
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
        size, more = weight.shape[0], -weight.shape[0] % 8
        args = [node.args[0], constants.add(F.pad(weight, (0, 0, 0, more)), node, node)]
        if bias is not None:
            args.append(constants.add(F.pad(bias, (0, more)), node, node))
        with graph.graph.inserting_before(node):
            wider = graph.graph.call_function(aten.linear.default, tuple(args))
            remember(wider)
            cut = graph.graph.call_function(aten.slice.Tensor, (wider, val.ndim - 1, 0, size))
        cut.meta["val"] = val
        node.replace_all_uses_with(cut)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _is_low(node: Any) -> bool:
    val = value_of(node)
    return isinstance(val, Tensor) and val.dtype in (torch.float16, torch.bfloat16)


def _is_linear(node: Any) -> bool:
    """A product of some size with a bias, in a type that cuBLASLt has tensor cores for."""
    if not isinstance(node, fx.Node) or node.target != aten.linear.default or len(node.users) != 1:
        return False
    val = value_of(node)
    if len(node.args) < 3 or node.args[2] is None or not _is_low(node):
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
        # Of two convolutions the later one takes the other's result.
        conv, residual = max(pairs, key=lambda pair: order.index(pair[0]))
        if not isinstance(residual, fx.Node) or value_of(residual) is None:
            return None
        if tuple(value_of(residual).shape) != tuple(value_of(conv).shape) or value_of(residual).dtype != value_of(conv).dtype:
            return None
    elif not _is_conv(source, constants, which):
        return None
    data, weight, bias, stride, padding, dilation, groups = _conv_args(conv)
    if isinstance(data, fx.Node) and data.target == aten.constant_pad_nd.default:
        data = _channels_last(data)  # the stem's input: written once, in the order that the convolution reads
    return (data, weight, bias, residual, stride, padding, dilation, groups)


def _channels_last(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last})
    new.meta["val"] = value_of(node)
    return new


def _conv_args(node: fx.Node) -> tuple[Any, ...]:
    defaults: list[Any] = [None, None, None, [1, 1], [0, 0], [1, 1], 1]
    args = [*node.args, *defaults[len(node.args) :]]
    return tuple(args)


def _is_conv(node: Any, constants: Constants, which: str) -> bool:
    if not isinstance(node, fx.Node) or node.target != aten.conv2d.default or len(node.users) != 1 or not _is_low(node):
        return False
    weight = constants.get(node.args[1])
    has_bias = len(node.args) > 2 and node.args[2] is not None
    if weight is None or not has_bias or node.kwargs:
        return False
    if _conv_args(node)[6] != 1:
        # With its 24 depthwise convolutions fused D-FINE took 0.8 ms more: see docs/benchmarks-gpu.md.
        return False
    return which == "all" or weight.shape[2] * weight.shape[3] > 1
