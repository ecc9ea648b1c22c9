"""Linear layers over few rows, such as the queries of a decoder, in kernels of their own: a feed-forward network with its sum and norm, and
single layers."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .nodes import Constants, aten, call, is_low, value_of


class Layer(NamedTuple):
    """A linear layer with constant weights over a fixed number of rows. relu: behind it."""

    data: fx.Node
    weight: fx.Node
    bias: fx.Node
    relu: bool
    rows: int
    outputs: int
    inputs: int

    @property
    def parameters(self) -> tuple[fx.Node, fx.Node]:
        return self.weight, self.bias


def fuse_few_rows(graph: fx.GraphModule) -> int:
    """Replace linear layers over few rows by `detrt::ffn_rows` and `detrt::linear_rows` where these are faster; the number of
    replacements. Run after the epilogues are fused.
    """
    from .kernels import ffn_rows_is_faster, linear_rows_is_faster

    constants = Constants(graph)
    count = 0
    for match, faster in ((_ffn, ffn_rows_is_faster), (_single, linear_rows_is_faster)):
        for node in list(graph.graph.nodes):
            found = match(node, constants)
            if found is None or not faster(*found[1]):
                continue
            with graph.graph.inserting_before(node):
                new = call(graph, *found[0])
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)
            count += 1
        graph.graph.eliminate_dead_code()
    _read_sums(graph)
    _join_queries_and_values(graph, constants)
    return count


def _read_sums(graph: fx.GraphModule) -> None:
    """Let layers add what they read, such as queries and their positions, where only layers read the sum."""
    for node in list(graph.graph.nodes):
        if node.target != aten.add.Tensor or node.kwargs or not is_low(node) or not node.users:
            continue
        if not all(isinstance(arg, fx.Node) and is_low(arg) and value_of(arg).shape == value_of(node).shape for arg in node.args):
            continue
        if not all(_plain(user) and user.args[0] is node for user in node.users):
            continue
        data, more = node.args
        if not any(_plain(user) for user in data.users):  # type: ignore[union-attr]
            data, more = more, data
        for user in list(node.users):
            _, *others = user.args
            user.args = (data, *others, more, value_of(user).shape[-1])
    graph.graph.eliminate_dead_code()


def _join_queries_and_values(graph: fx.GraphModule, constants: Constants) -> None:
    """Make one layer of that of a sum and that of its first part, where attention alone reads both."""
    from .kernels import ADDED_MULTIPLE, attention, linear_rows, linear_rows_is_faster

    for node in list(graph.graph.nodes):
        if node.target != linear_rows or len(node.args) != 8 or node.args[5] or node.args[7] % ADDED_MULTIPLE:
            continue
        data, at, weight, bias, _, _, more, added = node.args
        partner = next((u for u in data.users if _plain(u) and not u.args[5] and set(u.users) == set(node.users)), None)
        if partner is None or not all(user.target == attention for user in node.users):
            continue
        weights, biases = ([constants.get(one.args[i]) for one in (node, partner)] for i in (2, 3))
        outputs = added + weights[1].shape[0]
        if not linear_rows_is_faster(math.prod(value_of(node).shape[:-1]), weights[0].shape[1], outputs):
            continue
        last = max((node, partner), key=list(graph.graph.nodes).index)
        weight, bias = (constants.add(torch.cat(parts), last, node) for parts in (weights, biases))
        with graph.graph.inserting_before(last):
            joined = call(graph, linear_rows, data, at, weight, bias, False, False, more, added)
        for user in list(node.users):
            tensors, columns = list(user.args[:3]), list(user.args[3])
            for i, tensor in enumerate(tensors):
                if tensor in (node, partner):
                    tensors[i], columns[i] = joined, columns[i] + (added if tensor is partner else 0)
            user.args = (*tensors, columns, *user.args[4:])
    graph.graph.eliminate_dead_code()


def _plain(node: fx.Node) -> bool:
    """A layer that reads a whole tensor as it is."""
    from .kernels import linear_rows

    if node.target != linear_rows or len(node.args) != 6 or node.args[1] or node.args[4]:
        return False
    return value_of(node.args[0]).shape[-1] == value_of(node.args[2]).shape[1]


def _layer(node: Any, constants: Constants) -> Layer | None:
    """The linear layer that a node is, past copies that nothing needs."""
    from .kernels import linear_relu

    if not isinstance(node, fx.Node) or node.target not in (aten.linear.default, linear_relu) or not is_low(node):
        return None
    if len(node.args) < 3 or node.kwargs or not is_low(node.args[0]):
        return None
    weight, bias = (_in_place(constants, argument) for argument in node.args[1:3])
    if weight is None or bias is None or weight.ndim != 2:
        return None
    rows = math.prod(value_of(node).shape[:-1])
    if not isinstance(rows, int):
        return None
    return Layer(*node.args[:3], node.target == linear_relu, rows, *weight.shape)  # type: ignore[arg-type]


def _in_place(constants: Constants, node: Any) -> Tensor | None:
    """The constant that a node is, if a kernel can read it where it is.

    Kernels read their parameters before the kernel before them has ended, which may be the one that copies a parameter.
    """
    tensor = constants.get(node)
    return tensor if tensor is not None and tensor.is_contiguous() else None


def _only(node: Any) -> Any:
    """What a node copies, if only the copy is read; the node itself otherwise."""
    while isinstance(node, fx.Node) and node.target == aten.clone.default and not node.kwargs and len(node.users) == 1:
        node = node.args[0]
    return node


def _hidden(layer: Layer | None, constants: Constants) -> Layer | None:
    """The layer with a ReLU in front of a layer, if nothing else reads it."""
    if layer is None:
        return None
    node = _only(layer.data)
    first = _layer(node, constants)
    return first if first is not None and first.relu and len(node.users) == 1 else None


def _source(data: fx.Node) -> tuple[fx.Node, int, bool]:
    """(the tensor that a layer reads, from which column on, whether a ReLU is between)."""
    relu = data.target == aten.relu.default and len(data.users) == 1 and is_low(data.args[0])
    if relu:
        data = data.args[0]  # type: ignore[assignment]
    pieces = data.args[0] if data.target == operator.getitem else None
    if isinstance(pieces, fx.Node) and pieces.target == aten.split_with_sizes.default and len(pieces.args) == 3:
        whole, sizes, axis = pieces.args
        if axis in (-1, value_of(whole).ndim - 1):  # type: ignore[operator]
            return whole, sum(sizes[: data.args[1]]), relu  # type: ignore[return-value, index, misc, arg-type]
    return data, 0, relu


def _ffn(node: fx.Node, constants: Constants) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """layer_norm(x + second(relu(first(x)))), the sum limited to a magnitude or not: (the call of `ffn_rows`, its rows, width and hidden
    units); None: the node is something else."""
    from .kernels import ffn_rows

    if node.target != aten.layer_norm.default or not is_low(node):
        return None
    total, shape, scale, shift, eps = (*node.args, None, None, 1e-5)[:5]
    if len(shape) != 1 or _in_place(constants, scale) is None or _in_place(constants, shift) is None:  # type: ignore[arg-type]
        return None
    limit = 0.0
    if isinstance(total, fx.Node) and total.target == aten.clamp.default and len(total.args) == 3 and len(total.users) == 1:
        low, limit = total.args[1:]
        if not isinstance(low, (int, float)) or low != -limit or limit <= 0:
            return None
        total = total.args[0]
    if not isinstance(total, fx.Node) or total.target != aten.add.Tensor or total.kwargs or len(total.users) != 1:
        return None
    for residual, branch in (total.args, total.args[::-1]):
        branch = _only(branch)
        second = _layer(branch, constants)
        first = _hidden(second, constants)
        if second is None or first is None or second.relu or len(branch.users) != 1 or first.data is not residual:
            continue
        if second.outputs != first.inputs:
            continue
        op = (ffn_rows, residual, *first.parameters, *second.parameters, scale, shift, eps, float(limit))
        return op, (first.rows, first.inputs, first.outputs)
    return None


def _single(node: fx.Node, constants: Constants) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
    """A layer, with the ReLU and the selection of columns in front of it: (the call of `linear_rows`, its rows, inputs and outputs); None: the
    node is something else."""
    from .kernels import linear_rows

    layer = _layer(node, constants)
    if layer is None:
        return None
    data, at, relu_before = _source(layer.data)
    return (linear_rows, data, at, *layer.parameters, relu_before, layer.relu), (layer.rows, layer.inputs, layer.outputs)
