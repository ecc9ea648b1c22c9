"""The biases of an attention's queries, keys and values where engines compute them for nothing, or not at all.

TensorRT-RTX has one matmul for queries, keys and values, and one kernel for the attention. Where a bias lies between them, it adds
all three in kernels of their own, which also turn their layout: RF-DETR's ViT has 36 of them at batch size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .clean import drop_dead
from .fuse_attention import HEADS_IN, HEADS_OUT, KEYS, permutation, reshape_target
from .nodes import default_opset, replace_nodes
from .view import FLOATS, GraphView, over_last


@dataclass(frozen=True, slots=True)
class _Projection:
    """Add of a bias, Reshape to heads and Transpose, in this order, each read by the next alone. bias: (channels,)."""

    add: onnx.NodeProto
    plain: str  # the tensor without the bias
    bias: np.ndarray
    turn: onnx.NodeProto
    head: int  # channels of one


def move_attention_biases(model: onnx.ModelProto) -> int:
    """Take the biases away from in front of fused attentions, in place; the outputs stay the same numbers. Returns how many attentions changed.

    A key's bias adds the same to all scores of a query, which the softmax takes away again. The weights of a query's values add up to
    one, so that the values' bias goes through the output projection and becomes part of its bias. That of the queries moves behind the
    split into heads, where one kernel adds it.
    """
    view, opset = GraphView(model), default_opset(model)
    plain: dict[str, str] = {}  # output of an Add -> what its readers read in its place
    behind: dict[str, onnx.NodeProto] = {}  # output of a Transpose -> the Add of queries' biases behind it
    count = 0
    for softmax in view.nodes:
        product = view.only_reader(softmax.output[0], "MatMul", of_values=True) if softmax.op_type == "Softmax" else None
        if product is None or product.input[0] != softmax.output[0] or not over_last(softmax, opset, rank=4):
            continue
        scores = _scores(view, softmax.input[0])
        value = _projection(view, product.input[1], HEADS_IN)
        if scores is None or value is None or not _move_through_output(view, model, product, value):
            continue
        query, key = _projection(view, scores.input[0], HEADS_IN), _projection(view, scores.input[1], KEYS)
        plain |= {one.add.output[0]: one.plain for one in (query, key, value) if one is not None}
        if query is not None:
            turned = query.turn.output[0]
            bias = numpy_helper.from_array(query.bias.reshape(-1, 1, query.head), f"{query.add.output[0]}/bias_of_heads")
            model.graph.initializer.append(bias)
            query.turn.output[0] = f"{turned}/without_bias"
            behind[query.turn.output[0]] = helper.make_node(
                "Add", [query.turn.output[0], bias.name], [turned], name=f"{query.add.name or query.add.output[0]}/of_heads"
            )
        count += 1
    if not count:
        return 0
    nodes: list[onnx.NodeProto] = []
    for node in view.nodes:
        for position, name in enumerate(node.input):
            node.input[position] = plain.get(name, name)
        nodes += [node, *(behind[name] for name in node.output if name in behind)]
    replace_nodes(model, nodes)
    drop_dead(model)
    return count


def _scores(view: GraphView, name: str) -> onnx.NodeProto | None:
    """The product of queries and keys in front of a softmax, scaled by numbers or with a mask added."""
    while (node := view.producer.get(name)) is not None and view.only_reader(name, of_values=True) is not None:
        if node.op_type == "MatMul":
            return node
        # Of two computed tensors, the scores are the one that is a product or scaled.
        sides = [one for one in node.input if one not in view.constants]
        if node.op_type in ("Mul", "Div"):
            factor = next((view.array(one) for one in node.input if one in view.constants), None)
            if len(sides) != 1 or factor is None or factor.size != 1 or (node.op_type == "Div" and node.input[0] != sides[0]):
                return None
            name = sides[0]
        elif node.op_type == "Add":
            scaled = [one for one in sides if one in view.producer and view.producer[one].op_type in ("MatMul", "Mul", "Div")]
            if len(scaled) != 1:
                return None
            name = scaled[0]
        else:
            return None
    return None


def _projection(view: GraphView, name: str, order: Sequence[int]) -> _Projection | None:
    """What lies in front of an attention's input: Add, Reshape to (batch, tokens, heads, channels) and Transpose."""
    turn = view.producer.get(name)
    split = (
        None
        if turn is None or turn.op_type != "Transpose" or permutation(turn) != list(order)
        else view.producer.get(turn.input[0])
    )
    add = None if split is None or split.op_type != "Reshape" else view.producer.get(split.input[0])
    if turn is None or split is None or add is None or add.op_type != "Add":
        return None
    if any(view.only_reader(one, of_values=True) is None for one in (name, split.output[0], add.output[0])):
        return None
    bias = _bias(view, add)
    target = reshape_target(view, split.input[1])
    head = target[-1]
    if bias is None or not head or head < 0 or bias.size % head or target[-2:-1] not in ([-1], [bias.size // head]):
        return None
    plain = add.input[1] if add.input[0] in view.constants else add.input[0]
    matmul = view.producer.get(plain)
    # The bias of a matmul has one number a channel, or a Reshape could mix tokens and channels.
    weight = None if matmul is None or matmul.op_type != "MatMul" else matmul.input[1]
    if weight is None or _columns(view, weight) != bias.size:
        return None
    return _Projection(add, plain, bias, turn, head)


def _move_through_output(view: GraphView, model: onnx.ModelProto, product: onnx.NodeProto, value: _Projection) -> bool:
    """Make the values' bias part of that of the output projection: Transpose, Reshape, MatMul and Add behind `product`. Returns whether they are."""
    turned = view.only_reader(product.output[0], "Transpose", of_values=True)
    joined = None if turned is None else view.only_reader(turned.output[0], "Reshape", of_values=True)
    matmul = None if joined is None else view.only_reader(joined.output[0], "MatMul", of_values=True)
    add = None if matmul is None else view.only_reader(matmul.output[0], "Add", of_values=True)
    if turned is None or joined is None or matmul is None or add is None:
        return False
    if permutation(turned) != HEADS_OUT or matmul.input[0] != joined.output[0]:
        return False
    weight, bias = view.array(matmul.input[1]), _bias(view, add)
    if weight is None or bias is None or weight.ndim != 2 or len(weight) != value.bias.size or weight.shape[1] != bias.size:
        return False
    with np.errstate(over="ignore"):
        moved = (bias.astype(np.float64) + value.bias.astype(np.float64) @ weight.astype(np.float64)).astype(bias.dtype)
    if not np.isfinite(moved.astype(np.float64)).all():  # of FP16
        return False
    tensor = numpy_helper.from_array(moved, f"{add.output[0]}/bias_with_values")
    model.graph.initializer.append(tensor)
    add.input[0 if add.input[0] in view.constants else 1] = tensor.name
    return True


def _bias(view: GraphView, add: onnx.NodeProto) -> np.ndarray | None:
    """The (channels,) constant that a node adds, or None."""
    constants = [view.array(one) for one in add.input if one in view.constants]
    if len(constants) != 1 or constants[0] is None or constants[0].ndim != 1 or view.types.get(add.output[0]) not in FLOATS:
        return None
    return constants[0]


def _columns(view: GraphView, weight: str) -> int | None:
    """Channels that a weight writes, which may be dequantized; None for what is no constant."""
    node = view.producer.get(weight)
    tensor = view.constants.get(node.input[0] if node is not None and node.op_type == "DequantizeLinear" else weight)
    return None if tensor is None or len(tensor.dims) != 2 else tensor.dims[1]
