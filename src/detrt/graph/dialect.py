"""A graph in the dialect of the ONNX parsers of TensorRT 10 and newer, which lack little. The outputs stay equal in ONNX Runtime."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .attention_biases import move_attention_biases
from .border import compare_beside_border
from .clean import drop_dead, drop_default_reduction, fold_pads, multiply_outer_products
from .lower_msda import sum_by_reduction
from .nodes import GraphBuilder, default_opset, replace_nodes
from .opset import lower_opset, name_modes_as_before
from .view import attribute, inferred

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def for_typed_parser(
    model: onnx.ModelProto,
    *,
    opset: int = 20,
    cumsum: bool = False,
    grid_sample_linear: bool = False,
    scatter_reduction: bool = True,
) -> Counter[str]:
    """Write a graph as the parsers of TensorRT 10 and newer read it best, in place; the defaults are what all of them read.

    Deformable attention sums by reduction (`sum_by_reduction`), padding is part of what reads it (`fold_pads`), proposals on the
    border are outside (`compare_beside_border`), outer products are no matmuls (`multiply_outer_products`), and biases are no part of
    an attention (`move_attention_biases`), in graphs of others too. opset: the newest that the parser is documented for: BF16 graphs
    have 22, and parsers take BF16 at any. cumsum, grid_sample_linear, scatter_reduction: as of
    `backends.tensorrt.rows.Version`.

    Returns:
        What was written in another form -> how often.

    Raises:
        GraphError: a node that the opset cannot express.
    """
    changes = Counter({"MatMul": sum_by_reduction(model), "Pad": fold_pads(model), "border": compare_beside_border(model)})
    changes["Einsum"] = multiply_outer_products(model)
    changes["attention biases"] = move_attention_biases(model)
    if not cumsum:
        changes["CumSum"] = cumsum_to_matmul(model, symbolic=True)
    if default_opset(model) > opset:
        lower_opset(model, opset)
        changes["opset"] = 1
    if not grid_sample_linear:
        changes["GridSample"] = name_modes_as_before(model)
    if not scatter_reduction:
        changes["ScatterND"] = sum(map(drop_default_reduction, model.graph.node))
    return +changes


def cumsum_to_matmul(model: onnx.ModelProto, *, symbolic: bool = False) -> int:
    """Replace CumSum, a loop in TensorRT before 10.8, by a product with a triangle of ones, in place; returns how many.

    Of floats, because TensorRT multiplies no integer matrices, over one of the last two axes.

    symbolic: also where the length of that axis is not known; the triangle is computed then, in graphs of opset 13 and newer.
    """
    symbolic = symbolic and default_opset(model) >= 13  # before, Unsqueeze has its axes in an attribute
    sums = [node for node in model.graph.node if node.op_type == "CumSum"]
    if not sums:
        return 0
    graph, written = inferred(model), {}
    known = {value.name: value.type.tensor_type for value in (*graph.input, *graph.value_info)}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in sums:
        x, tensor, axis = node.input[0], known.get(node.input[0]), constants.get(node.input[1])
        if tensor is None or tensor.elem_type not in _FLOATS or not tensor.shape.dim or axis is None:
            continue
        rank = len(tensor.shape.dim)
        from_last = int(numpy_helper.to_array(axis).reshape(())) % rank - rank
        length = tensor.shape.dim[from_last].dim_value
        if from_last < -2 or not (length or symbolic):
            continue
        exclusive = bool(attribute(node, "exclusive", 0))
        upper = bool(attribute(node, "reverse", 0)) != (from_last == -1)
        builder = GraphBuilder(f"{node.name}/ones")
        if length:
            triangle = np.tri(length, k=-int(exclusive))  # row i holds ones up to column i
            kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            ones = builder.const(triangle.T if upper else triangle, kind)
        else:
            side = builder.op("Gather", builder.op("Shape", x), builder.const(rank + from_last, np.int64))
            index = builder.op("Range", builder.const(0, np.int64), side, builder.const(1, np.int64))
            row, column = (builder.op("Unsqueeze", index, builder.ints(at)) for at in (1, 0))
            if upper:
                row, column = column, row
            inside = builder.op("Greater" if exclusive else "GreaterOrEqual", row, column)
            ones = builder.op("Cast", inside, to=tensor.elem_type)
        factors = [x, ones] if from_last == -1 else [ones, x]
        model.graph.initializer.extend(builder.initializers)
        written[node.output[0]] = [*builder.nodes, helper.make_node("MatMul", factors, node.output, node.name)]
    if written:
        replace_nodes(model, [new for node in model.graph.node for new in written.get(node.output[0], [node])])
        drop_dead(model)
    return len(written)
