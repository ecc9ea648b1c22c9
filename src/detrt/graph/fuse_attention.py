"""Attention as one operator of ONNX Runtime: `com.microsoft.MultiHeadAttention`, which keeps no matrix of scores.

ONNX Runtime fuses no attention of these graphs by itself: two products and a softmax over all pairs of tokens, which go through
memory three times. The fused graph is for ONNX Runtime alone, so it lies beside `model.onnx`, whose weights it reads.
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from ..files import writing
from .clean import drop_dead
from .nodes import default_opset, import_domain, replace_nodes
from .view import FLOAT, GraphView, attribute, over_last

DOMAIN, OPERATOR = "com.microsoft", "MultiHeadAttention"
HEADS_IN, HEADS_OUT, KEYS = [0, 2, 1, 3], [0, 2, 1, 3], [0, 2, 3, 1]
# Smaller tensors are copied into the graph.
SHARED_BYTES = 1024


def fuse_attention(model: onnx.ModelProto) -> int:
    """Replace each FP32 attention without a mask, in place; returns how many there were."""
    view = GraphView(model)
    shapes = _shapes(model)
    added: dict[int, onnx.NodeProto] = {}
    for softmax in view.nodes:
        if softmax.op_type == "Softmax":
            found = _attention(view, shapes, softmax)
            if found is not None:
                tail, node = found
                added[view.index[tail.output[0]]] = node
                # Its shape is computed from others, so the Reshape stays; the order of the elements is the same.
                tail.input[0] = node.output[0]
    if not added:
        return 0
    nodes = [n for index, node in enumerate(view.nodes) for n in ((added[index], node) if index in added else (node,))]
    replace_nodes(model, nodes)
    drop_dead(model)
    import_domain(model, DOMAIN)
    return len(added)


def _attention(
    view: GraphView, shapes: dict[str, list[int | None]], softmax: onnx.NodeProto
) -> tuple[onnx.NodeProto, onnx.NodeProto] | None:
    """(the Reshape behind an attention, the operator in its place); None where the pattern is another."""
    rank = 4
    if not over_last(softmax, default_opset(view.model), rank) or view.types.get(softmax.output[0]) != FLOAT:
        return None
    scale, scores = _scaled(view, softmax.input[0])
    product = view.only_reader(softmax.output[0], "MatMul")
    if scores is None or product is None or product.input[0] != softmax.output[0]:
        return None
    turned = view.only_reader(product.output[0], "Transpose")
    tail = None if turned is None else view.only_reader(turned.output[0], "Reshape")
    if turned is None or tail is None or permutation(turned) != HEADS_OUT:
        return None
    if 0 in reshape_target(view, tail.input[1])[2:]:  # 0 keeps a length of the input, whose first two stay
        return None
    sides = (scores.input[0], scores.input[1], product.input[1])
    flat = [_flat(view, shapes, name, perm) for name, perm in zip(sides, (HEADS_IN, KEYS, HEADS_IN), strict=True)]
    if None in flat:
        return None
    heads = {one[1] for one in flat if one is not None}
    if len(heads) != 1:
        return None
    names = [one[0] for one in flat if one is not None]
    node = helper.make_node(
        OPERATOR,
        names,
        [softmax.output[0] + "_attended"],
        name=softmax.name.rpartition("/")[0] + "/" + OPERATOR,
        domain=DOMAIN,
        num_heads=heads.pop(),
        scale=scale,
    )
    return tail, node


def _scaled(view: GraphView, name: str) -> tuple[float, onnx.NodeProto | None]:
    """The factor behind a product, and the product."""
    scale, node = 1.0, view.producer.get(name)
    while node is not None and node.op_type in ("Mul", "Div"):
        number = next((i for i in (1, 0) if node.input[i] in view.constants), None)
        value = None if number is None else view.array(node.input[number])
        if number is None or value is None or value.size != 1 or (node.op_type == "Div" and number == 0):
            return scale, None
        scale = scale * float(value.item()) if node.op_type == "Mul" else scale / float(value.item())
        node = view.producer.get(node.input[1 - number])
    return scale, node if node is not None and node.op_type == "MatMul" else None


def _flat(view: GraphView, shapes: dict[str, list[int | None]], name: str, perm: list[int]) -> tuple[str, int] | None:
    """(tensor of (batch, tokens, channels), number of heads) in front of a Reshape and a Transpose to heads."""
    turned = view.producer.get(name)
    if turned is None or turned.op_type != "Transpose" or permutation(turned) != perm:
        return None
    split = view.producer.get(turned.input[0])
    if split is None or split.op_type != "Reshape":
        return None
    before, after = shapes.get(split.input[0], []), shapes.get(split.output[0], [])
    if len(before) != 3 or len(after) != 4 or before[2] is None or not after[3]:
        return None
    # Tokens that are cut into windows attend to those of their window alone.
    if any(old is not None and new is not None and old != new for old, new in zip(before[:2], after[:2], strict=True)):
        return None
    return split.input[0], before[2] // after[3]


def _shapes(model: onnx.ModelProto) -> dict[str, list[int | None]]:
    """Tensor -> its shape, None for an axis that is not known."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    return {
        value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
        if value.type.tensor_type.HasField("shape")
    }


def permutation(node: onnx.NodeProto) -> list[int]:
    """Of a Transpose."""
    return list(attribute(node, "perm", []))  # type: ignore[call-overload]


def reshape_target(view: GraphView, name: str) -> list[int | None]:
    """The lengths that a Reshape is given, None for one that is computed."""
    value = view.array(name)
    if value is not None:
        return [int(one) for one in value.ravel()]
    node = view.producer.get(name)
    if node is None or node.op_type != "Concat":
        return [None]
    return [length for part in node.input for length in reshape_target(view, part)]


def save_beside(model: onnx.ModelProto, path: Path, weights: Path) -> None:
    """Write a graph whose large constants are those of the ONNX file `weights` beside it, which it reads them from."""
    held, start = weights.read_bytes(), 0
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        raw = tensor.raw_data
        if len(raw) < SHARED_BYTES or tensor.data_location == onnx.TensorProto.EXTERNAL:
            continue
        # In the order of the file, so that one pass finds them all.
        at = held.find(raw, start)
        at = at if at >= 0 else held.find(raw)
        if at < 0:
            continue
        start = at + len(raw)
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", weights.name), ("offset", str(at)), ("length", str(len(raw)))):
            tensor.external_data.add(key=key, value=value)
    with writing(path) as temporary:
        temporary.write_bytes(copy.SerializeToString())
