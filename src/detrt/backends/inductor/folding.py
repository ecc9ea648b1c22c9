"""Constant folding and dead-code elimination.

The graphs are functional, so a node whose inputs are constant is a constant, and a node without users is dead.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ...graph.operators import kernel_margins
from .nodes import MSDA, VIEWS, Constants, aten, is_pure, uniform, value_of

# A larger tensor is not folded.
MAX_CONSTANT_BYTES = 256 << 20
# Operators that fill a tensor with one number -> the number; None: their last argument.
_FILLS = {
    aten.ones_like.default: 1,
    aten.zeros_like.default: 0,
    aten.full_like.default: None,
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.new_full.default: None,
}
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_assert_async")


def drop_checks(graph: fx.GraphModule) -> None:
    """Remove assertions of the tracer and operators without effect."""
    for node in list(graph.graph.nodes):
        name = str(node.target)
        if (node.op == "call_module" and "guard" in name) or any(check in name for check in _CHECKS):
            node.replace_all_uses_with(None)  # type: ignore[arg-type]
            graph.graph.erase_node(node)
        elif node.op == "call_function" and node.target in (
            aten.alias.default,
            aten.lift_fresh_copy.default,
            aten.detach.default,
        ):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
        elif node.op == "call_function" and node.target == aten.view.default:
            node.target = aten.reshape.default  # merged linear layers return slices, which have no view
        elif node.op == "call_function" and node.target == aten.dropout.default and not node.args[2]:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def unify_batch_norms(graph: fx.GraphModule) -> None:
    """Replace the form of BatchNorm that is captured without gradients by `batch_norm`, the form with them."""
    for node in list(graph.graph.nodes):
        if node.target != aten._native_batch_norm_legit_no_training.default:
            continue
        firsts = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
        if len(firsts) != len(node.users):
            continue
        data, weight, bias, mean, var, momentum, eps = node.args
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(aten.batch_norm.default, (data, weight, bias, mean, var, False, momentum, eps, False))
        val = value_of(node)
        new.meta["val"] = val[0] if isinstance(val, (tuple, list)) else value_of(firsts[0])
        for first in firsts:
            first.replace_all_uses_with(new)
            graph.graph.erase_node(first)
        graph.graph.erase_node(node)


def fold_constants(graph: fx.GraphModule) -> None:
    """Compute what depends on weights and fixed sizes only: position tables, anchors, masks, scaled weights.

    A tensor of one value becomes `full`, which the compiler puts into the code that reads it.
    """
    constants = Constants(graph)
    known: dict[fx.Node, Any] = {}
    folded: list[fx.Node] = []
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            tensor = constants.get(node)
            if tensor is not None:
                known[node] = tensor
        elif node.op == "call_function" and _can_fold(node, known):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
            with torch.no_grad():
                result = node.target(*args, **kwargs)
            if isinstance(result, Tensor) and result.numel() * result.element_size() > MAX_CONSTANT_BYTES:
                continue
            known[node] = result
            folded.append(node)
    for node in folded:
        outside = [user for user in node.users if user not in known]
        if not outside:
            continue
        result = known[node]
        if isinstance(result, Tensor):
            new = _constant_node(constants, node, result)
            for user in outside:
                user.replace_input_with(node, new)
        elif isinstance(result, (bool, int, float)):
            for user in outside:
                _replace_by_number(user, node, result)
    graph.graph.eliminate_dead_code()


def fold_fills(graph: fx.GraphModule) -> None:
    """Replace `ones_like(image)` and the like, which depend on sizes only, by `full`, which is a constant; so is what follows: a
    mask without padding, its position table, the reference points of an encoder."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _FILLS:
            continue
        val, number = value_of(node), _FILLS[node.target]
        if not isinstance(val, Tensor) or not all(isinstance(side, int) for side in val.shape):
            continue
        if number is None:
            number = node.args[-1]
        if not isinstance(number, (bool, int, float)):
            continue
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(
                aten.full.default, (list(val.shape), number), {"dtype": val.dtype, "device": val.device}
            )
        new.meta["val"] = val
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)


def _can_fold(node: fx.Node, known: dict[fx.Node, Any]) -> bool:
    if not all(source in known for source in node.all_input_nodes):
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target == MSDA:
        return False
    return is_pure(node.target)


def _constant_node(constants: Constants, node: fx.Node, result: Tensor) -> fx.Node:
    graph = constants.graph.graph
    if result.numel() > 1 and result.dtype != torch.int64:
        first = result.flatten()[0]
        if bool((result == first).all()):
            number = first.item()
            with graph.inserting_before(node):
                new = graph.call_function(
                    aten.full.default, (list(result.shape), number), {"dtype": result.dtype, "device": result.device}
                )
            new.meta["val"] = value_of(node)
            return new
    # A copy, because a view would keep its whole base.
    return constants.add(result.contiguous().clone(), node, node)


def _replace_by_number(user: fx.Node, node: fx.Node, number: Any) -> None:
    substitute = lambda n: number if n is node else n  # noqa: E731
    user.args, user.kwargs = fx.map_arg(user.args, substitute), fx.map_arg(user.kwargs, substitute)


def _same_type(a: Any, b: Any) -> bool:
    x, y = value_of(a), value_of(b)
    return x is not None and y is not None and tuple(x.shape) == tuple(y.shape) and x.dtype == y.dtype


def drop_neutral(graph: fx.GraphModule) -> None:
    """Remove operators without effect, such as masks that mask nothing because the image has no padding."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target == aten.scaled_dot_product_attention.default:
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            value = uniform(_through_views(mask))
            if value is not None and (value is True or (value == 0 and value is not False)):
                if len(node.args) > 3:
                    node.args = (*node.args[:3], None, *node.args[4:])
                else:
                    node.kwargs = {**node.kwargs, "attn_mask": None}
            continue
        source = _neutral(node)
        if isinstance(source, fx.Node) and _same_type(source, node):
            node.replace_all_uses_with(source)
    graph.graph.eliminate_dead_code()


def _through_views(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in VIEWS:
        node = node.args[0]
    return node


def _neutral(node: fx.Node) -> Any:
    """The input that a node returns unchanged, or None."""
    target, args = node.target, node.args
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return args[0] if uniform(args[1]) in (False, 0) and uniform(args[1]) is not None else None
    if target == aten.where.self:
        value = uniform(args[0])
        return None if value is None else args[1] if value else args[2]
    if target in (aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor):
        for data, other in ((args[0], args[1]), (args[1], args[0])):
            value = uniform(other)
            if value is None:
                continue
            if target == aten.mul.Tensor and value == 1:
                return data
            if target == aten.add.Tensor and value == 0 and not node.kwargs:
                return data
            if target == aten.div.Tensor and value == 1 and other is args[1]:
                return data
    if target in (aten.to.dtype, aten._to_copy.default):
        return args[0]  # the caller compares types
    return None


def fold_into_convolutions(graph: fx.GraphModule) -> None:
    """Fold BatchNorm, frozen BatchNorm and scales after a convolution into its weight and bias."""
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in (aten.conv2d.default, aten.conv2d.padding):
            continue
        weight = constants.get(node.args[1])
        bias = constants.get(node.args[2]) if len(node.args) > 2 else None
        if weight is None or (len(node.args) > 2 and node.args[2] is not None and bias is None):
            continue
        w, b = weight.double(), None if bias is None else bias.double()
        changed, last = False, node
        while len(last.users) == 1:
            user = next(iter(last.users))
            affine = _affine(user, last, constants, w.shape[0])
            if affine is None:
                break
            scale, shift = affine
            w = w * scale.view(-1, 1, 1, 1)
            b = shift if b is None else b * scale + shift
            changed, last = True, user
        if not changed:
            continue
        new_weight = constants.add(w.to(weight.dtype), node, node)
        new_bias = constants.add(b.to(weight.dtype), node, node)  # type: ignore[union-attr]
        node.args = (node.args[0], new_weight, new_bias, *node.args[3:])
        last.replace_all_uses_with(node)
    graph.graph.eliminate_dead_code()


def merge_convolutions(graph: fx.GraphModule) -> int:
    """As `detrt.graph.branches.merge_convolutions`: the parallel convolutions of RepVGG blocks become one; how many went."""
    constants = Constants(graph)
    count = 0
    for add in list(graph.graph.nodes):
        if add.target != aten.add.Tensor or add.kwargs or len(add.all_input_nodes) != 2:
            continue
        first, second = add.args
        if any(node.target != aten.conv2d.default or len(node.users) != 1 for node in (first, second)):
            continue
        (x, *_), (other, *_) = first.args, second.args
        merged = _sum_of(constants, first, second) if x is other else None
        if merged is None:
            continue
        weight, bias, rest = merged
        with graph.graph.inserting_before(add):
            new = graph.graph.call_function(
                aten.conv2d.default, (x, constants.add(weight, add, first), constants.add(bias, add, first), *rest)
            )
        new.meta["val"] = value_of(add)
        add.replace_all_uses_with(new)
        count += 1
    graph.graph.eliminate_dead_code()
    return count


def _sum_of(constants: Constants, first: fx.Node, second: fx.Node) -> tuple[Tensor, Tensor, tuple[Any, ...]] | None:
    """(weight, bias, stride, padding, ... of the one convolution), or None where the kernels do not lie on each other."""
    defaults = (None, (1, 1), (0, 0), (1, 1), 1)
    rows = []
    for node in (first, second):
        _, weight, bias, stride, padding, dilation, groups = (*node.args, *defaults[len(node.args) - 2 :])
        tensor = constants.get(weight)
        offset = constants.get(bias) if bias is not None else None
        if tensor is None or (bias is not None and offset is None):
            return None
        sides = [list(value) * (2 // len(value)) for value in (stride, padding, dilation)]
        rows.append((tensor, offset, *sides, groups))
    (wide, bias, stride, padding, dilation, groups), (narrow, other, *steps) = sorted(rows, key=lambda row: -row[0].numel())
    if wide.shape[:2] != narrow.shape[:2] or [steps[0], steps[2], steps[3]] != [stride, dilation, groups]:
        return None
    outer, inner = ([(side, side) for side in sides] for sides in (padding, steps[1]))
    margins = kernel_margins(wide.shape[2:], narrow.shape[2:], outer, inner, dilation)
    if margins is None:
        return None
    # torch pads the last axis first
    weight = wide.double() + torch.nn.functional.pad(narrow.double(), [side for axis in reversed(margins) for side in axis])
    total = sum(
        (offset.double() for offset in (bias, other) if offset is not None), torch.zeros(len(wide), device=wide.device).double()
    )
    return weight.to(wide.dtype), total.to(wide.dtype), (stride, padding, dilation, groups)


def read_past_stacks(graph: fx.GraphModule) -> int:
    """Replace the choice of one tensor of a `stack` by that tensor, so that the others are computed only if something reads them."""
    count = 0
    for node in list(graph.graph.nodes):
        if node.target != aten.select.int:
            continue
        stack, axis, index = node.args
        if not isinstance(stack, fx.Node) or stack.target != aten.stack.default or not isinstance(index, int):
            continue
        tensors, at = stack.args[0], stack.args[1] if len(stack.args) > 1 else 0
        rank = len(value_of(stack).shape)
        if axis % rank == at % rank:
            node.replace_all_uses_with(tensors[index])
            count += 1
    graph.graph.eliminate_dead_code()
    return count


def _affine(user: fx.Node, data: fx.Node, constants: Constants, channels: int) -> tuple[Tensor, Tensor] | None:
    """(scale, shift) per channel of a node that does nothing else, float64."""
    if user.op != "call_function" or not user.args or user.args[0] is not data:
        return None
    if user.target == aten.batch_norm.default:
        _, weight, bias, mean, var, training, _, eps, _ = user.args
        tensors = [constants.get(n) for n in (weight, bias, mean, var)]
        if training or tensors[2] is None or tensors[3] is None:
            return None
        ones = torch.ones(channels, dtype=torch.float64, device=tensors[2].device)
        gain, offset, centre, spread = (None if t is None else t.double() for t in tensors)
        scale = (ones if gain is None else gain) / (spread + eps).sqrt()  # type: ignore[operator]
        return scale, (ones * 0 if offset is None else offset) - centre * scale  # type: ignore[operator]
    if user.target in (aten.mul.Tensor, aten.add.Tensor) and not user.kwargs:
        tensor = constants.get(user.args[1])
        if tensor is None or tensor.ndim not in (3, 4) or tensor.numel() != channels or tensor.shape[-3] != channels:
            return None
        vector = tensor.double().flatten()
        if user.target == aten.mul.Tensor:
            return vector, torch.zeros_like(vector)
        return torch.ones_like(vector), vector
    return None
