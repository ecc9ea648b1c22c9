"""Convolutions of a GPU's graph in the form whose kernels are fast: patches and pointwise layers as matmuls, a first layer of few channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ...graph.operators import kernel_over_blocks
from .nodes import Constants, aten, call, conv_args, is_low, value_of

_ALIGNMENT = 8  # of channels, for kernels that read whole vectors
_CHANNELS_LAST = (0, 2, 3, 1)


class _Conv:
    """A convolution of plain numbers: one group or one for each channel, no dilation, weights that are constants, a low type."""

    def __init__(self, node: fx.Node, constants: Constants) -> None:
        self.node, self.data = node, node.args[0]
        args = conv_args(node)
        self.weight, self.bias = constants.get(args[1]), constants.get(args[2])
        self.bias_node = args[2]
        stride, padding, dilation = (tuple(side) * (2 // len(side)) for side in args[3:6])
        self.stride, self.padding = stride, padding
        shape = getattr(value_of(self.data), "shape", ())
        channels = shape[1] if len(shape) == 4 else 0
        self.depthwise = self.weight is not None and 1 < args[6] == channels == self.weight.shape[0]
        self.usable = (
            self.weight is not None
            and self.weight.ndim == 4
            and (args[2] is None or self.bias is not None)
            and dilation == (1, 1)
            and (args[6] == 1 or self.depthwise)
            and not node.kwargs
            and is_low(node)
            and len(shape) == 4
            and all(isinstance(side, int) for side in shape[1:])
        )


def _convolutions(graph: fx.GraphModule, constants: Constants, depthwise: bool = False) -> list[_Conv]:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function" and node.target == aten.conv2d.default]
    return [conv for node in nodes if (conv := _Conv(node, constants)).usable and conv.depthwise == depthwise]


def linear_patches(graph: fx.GraphModule) -> int:
    """Make a convolution over separate patches of the image, such as the first layer of a ViT, a matmul; the number of replacements.

    cuDNN's kernels for three channels take five times as long.
    """
    constants = Constants(graph)
    count = 0
    for conv in _convolutions(graph, constants):
        weight = conv.weight
        assert weight is not None
        out, channels, *kernel = weight.shape
        _, _, *sides = value_of(conv.data).shape
        if channels > 4 or tuple(kernel) != conv.stride or conv.padding != (0, 0) or kernel[0] * kernel[1] == 1:
            continue
        (high, wide), (rows, columns) = kernel, (side // step for side, step in zip(sides, kernel, strict=True))
        width = channels * high * wide
        with graph.graph.inserting_before(conv.node):
            data = conv.data
            if [rows * high, columns * wide] != sides:
                data = call(graph, aten.slice.Tensor, data, 2, 0, rows * high)
                data = call(graph, aten.slice.Tensor, data, 3, 0, columns * wide)
            data = call(graph, aten.reshape.default, data, [-1, channels, rows, high, columns, wide])
            data = call(graph, aten.permute.default, data, [0, 2, 4, 1, 3, 5])
            data = call(graph, aten.reshape.default, data, [-1, rows, columns, width])
            extra = -width % _ALIGNMENT
            matrix = weight.reshape(out, width)
            if extra:
                data = call(graph, aten.constant_pad_nd.default, data, [0, extra], 0.0)
                matrix = F.pad(matrix, (0, extra))
        _replace_by_linear(graph, constants, conv, data, matrix)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def linear_pointwise(graph: fx.GraphModule) -> int:
    """Make convolutions of one pixel with a bias matmuls, which add the bias before they write; the number of replacements.

    Those with a ReLU behind them are `detrt::conv_relu` by then.
    """
    constants = Constants(graph)
    count = 0
    for conv in _convolutions(graph, constants):
        weight = conv.weight
        assert weight is not None
        if conv.bias is None or tuple(weight.shape[2:]) != (1, 1) or conv.stride != (1, 1) or conv.padding != (0, 0):
            continue
        if weight.shape[0] % _ALIGNMENT or weight.shape[1] % _ALIGNMENT:
            continue
        with graph.graph.inserting_before(conv.node):
            data = call(graph, aten.permute.default, conv.data, list(_CHANNELS_LAST))
        _replace_by_linear(graph, constants, conv, data, weight.flatten(1))
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def fuse_depthwise(graph: fx.GraphModule) -> int:
    """Replace depthwise convolutions with a bias, and the ReLU behind them, by `detrt::depthwise_conv`; the number of replacements."""
    from .kernels import depthwise_conv

    constants = Constants(graph)
    count = 0
    for conv in _convolutions(graph, constants, depthwise=True):
        weight, node = conv.weight, conv.node
        assert weight is not None
        if conv.bias is None or conv.stride[0] != conv.stride[1]:
            continue
        users = list(node.users)
        relu = len(users) == 1 and users[0].target == aten.relu.default
        kernel = constants.add(weight[:, 0].permute(1, 2, 0).contiguous(), node, node)
        with graph.graph.inserting_before(node):
            new = call(graph, depthwise_conv, conv.data, kernel, conv.bias_node, conv.stride[0], list(conv.padding), relu)
        (users[0] if relu else node).replace_all_uses_with(new)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _replace_by_linear(graph: fx.GraphModule, constants: Constants, conv: _Conv, data: Any, matrix: Tensor) -> None:
    """data: (batch, rows, columns, width). matrix: (out, width)."""
    weight = constants.add(matrix.contiguous(), conv.node, conv.node)
    with graph.graph.inserting_before(conv.node):
        args = (data, weight) if conv.bias is None else (data, weight, conv.bias_node)
        product = call(graph, aten.linear.default, *args)
        new = call(graph, aten.permute.default, product, [0, 3, 1, 2])
    conv.node.replace_all_uses_with(new)


def fold_stem(graph: fx.GraphModule) -> int:
    """Make a first convolution of three channels with stride 2 one of stride 1 over blocks of 2x2 pixels; the number of replacements.

    A kernel of 7x7 over 3 channels becomes one of 4x4 over 12, padded to 16, with the same products: tensor cores read whole vectors of
    channels. What pads and turns the image into blocks is one elementwise operator, which writes channels last.
    """
    constants = Constants(graph)
    count = 0
    for conv in _convolutions(graph, constants):
        weight = conv.weight
        assert weight is not None
        _, _, *sides = value_of(conv.data).shape
        if weight.shape[1] != 3 or conv.stride != (2, 2) or max(weight.shape[2:]) < 3:
            continue
        blocks = [_blocks(side, kernel, pad) for side, kernel, pad in zip(sides, weight.shape[2:], conv.padding, strict=True)]
        if any(after < 0 for _, after, _ in blocks):
            continue
        (top, bottom, rows), (left, right, columns) = blocks
        with graph.graph.inserting_before(conv.node):
            data = call(graph, aten.constant_pad_nd.default, conv.data, [left, right, top, bottom], 0.0)
            data = call(graph, aten.reshape.default, data, [-1, 3, rows, 2, columns, 2])
            data = call(graph, aten.permute.default, data, [0, 3, 5, 1, 2, 4])
            data = call(graph, aten.reshape.default, data, [-1, 12, rows, columns])
            data = call(graph, aten.constant_pad_nd.default, data, [0, 0, 0, 0, 0, 4], 0.0)
            data = call(graph, aten.clone.default, data, memory_format=torch.channels_last)
            kernel = constants.add(_block_weight(weight, conv.padding), conv.node, conv.node)
            new = call(graph, aten.conv2d.default, data, kernel, conv.bias_node, [1, 1], [0, 0], [1, 1], 1)
        conv.node.replace_all_uses_with(new)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _blocks(side: int, kernel: int, padding: int) -> tuple[int, int, int]:
    """(pixels added before, after, blocks of two) along one side for a kernel over blocks."""
    first, last, _ = kernel_over_blocks(kernel, padding, 2)
    outputs = (side + 2 * padding - kernel) // 2 + 1
    count = outputs + last - first
    return -2 * first, 2 * count + 2 * first - side, count


def _block_weight(weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """(out, 16, rows, columns) over blocks of 2x2 pixels, channels in the order (row, column, channel), four of zeros."""
    out, channels, *kernel = weight.shape
    above, beside = (kernel_over_blocks(size, pad, 2)[2] for size, pad in zip(kernel, padding, strict=True))
    whole = F.pad(weight, (*beside, *above))
    rows, columns = whole.shape[2] // 2, whole.shape[3] // 2
    blocks = whole.reshape(out, channels, rows, 2, columns, 2).permute(0, 3, 5, 1, 2, 4).reshape(out, 4 * channels, rows, columns)
    return F.pad(blocks, (0, 0, 0, 0, 0, 16 - 4 * channels)).contiguous(memory_format=torch.channels_last)
