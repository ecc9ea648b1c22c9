"""Lowering of `detrt.MSDeformAttn` nodes to standard ONNX operators.

"gridsample": one GridSample a level. Few nodes, but several TensorRT versions compile GridSample
wrongly without an error (NVIDIA/TensorRT issues 4646 and 4813).
"gather": the bilinear sample written out: four Gathers of whole rows and FP32 coordinates, over all
levels at once. Only operators that every runtime gets right.
"gather by level": the same for each level by itself, for TensorRT-RTX, whose one kernel for all of it is then two to three times as
fast in an encoder; rows are counted in FP32 and become INT32 once.
The op itself is defined in `detrt.models.ops.msda.reference`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..errors import GraphError, number_of
from .clean import drop_dead
from .nodes import GraphBuilder, default_opset, drop_domain, replace_nodes
from .operators import MSDA, MSDA_DOMAIN
from .view import GraphView, element_types, inferred

BY_LEVEL = "gather by level"
FLOAT = onnx.TensorProto.FLOAT


def lower_msda(model: onnx.ModelProto, how: str) -> int:
    """Replace every MSDeformAttn node in place by "gridsample", "gather" or "gather by level"; returns how many.

    Raises:
        GraphError: an unknown lowering, or a node whose heads or levels are not fixed.
    """
    lowerings = {"gridsample": _gridsample, "gather": _gather, BY_LEVEL: _gather_by_level}
    if how not in lowerings:
        raise GraphError(f"`msda` must be gridsample or gather; got {how!r}")
    graph = model.graph
    kinds = element_types(model) if how == BY_LEVEL else {}
    constants = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    opset = default_opset(model)
    nodes: list[onnx.NodeProto] = []
    prefixes: set[str] = set()
    count = 0
    for node in graph.node:
        if (node.domain, node.op_type) != (MSDA_DOMAIN, MSDA):
            nodes.append(node)
            continue
        # Constants are named after the node, so two nodes of one name, or of none, would share them.
        prefix = node.name or f"/{MSDA}"
        if prefix in prefixes:
            prefix = f"{prefix}.{count}"
        prefixes.add(prefix)
        call = _Call(node, constants, opset, prefix, kinds.get(node.input[0], FLOAT))
        (_gather if call.discrete else lowerings[how])(call)
        nodes.extend(call.builder.nodes)
        graph.initializer.extend(call.builder.initializers)
        count += 1
    if count:
        replace_nodes(model, nodes)
        drop_domain(model, MSDA_DOMAIN)
    return count


class _Call:
    """One MSDeformAttn node: its attributes, the sizes of its levels, and the element type of its values and its output."""

    def __init__(
        self, node: onnx.NodeProto, constants: dict[str, onnx.TensorProto], opset: int, prefix: str, kind: int = FLOAT
    ) -> None:
        self.kind = kind
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        self.value, shapes, self.locations, self.weights = node.input
        self.output = node.output[0]
        self.heads, self.dim = int(attributes["heads"]), int(attributes["head_dim"])
        self.points = [int(p) for p in attributes["points_per_level"]]
        self.discrete = bool(attributes.get("discrete", 0))
        self.opset = opset
        self.builder = b = GraphBuilder(prefix)
        levels = len(self.points)
        if shapes in constants:
            sizes = numpy_helper.to_array(constants[shapes]).reshape(-1, 2)
            if len(sizes) != levels:
                raise GraphError(f"node '{node.name}' has {levels} levels of points but {number_of(len(sizes), 'level size')}")
            self.shapes = b.const(sizes, np.int64)
            starts = np.concatenate([[0], np.cumsum(sizes.prod(1))[:-1]])
            self.starts = b.const(starts, np.int64)
        else:
            self.shapes = shapes
            areas = b.op("Mul", *b.op("Split", shapes, b.ints(1, 1), outputs=2, axis=1))
            areas = b.reshape(areas, levels)
            self.starts = level_starts(b, areas, levels, np.int64)

    def level_size(self, level: int) -> tuple[str, str]:
        """(1,) int64 height and width of a level."""
        b = self.builder
        row = b.op("Gather", self.shapes, b.const(level, np.int64), axis=0)
        height, width = b.op("Split", row, b.ints(1, 1), outputs=2, axis=0)
        return height, width


def _gridsample(call: _Call) -> None:
    b, heads, dim = call.builder, call.heads, call.dim
    two, one = b.const(2.0, np.float32), b.const(1.0, np.float32)
    grid = b.op("Sub", b.op("Mul", call.locations, two), one)
    # (batch, queries, heads, points, 2) -> (batch * heads, queries, points, 2)
    grid = b.op("Transpose", grid, perm=[0, 2, 1, 3, 4])
    queries = b.op("Shape", grid, start=2, end=3)
    grid = b.reshape(grid, -1, queries, sum(call.points), 2)
    # (batch, tokens, heads, dim) -> (batch, heads * dim, tokens)
    value = b.op("Transpose", b.reshape(call.value, 0, 0, heads * dim), perm=[0, 2, 1])
    grids = [grid]
    if len(call.points) > 1:
        grids = b.op("Split", grid, b.ints(*call.points), outputs=len(call.points), axis=2)
    weights = b.op("Transpose", call.weights, perm=[0, 2, 1, 3])
    weights = b.reshape(weights, -1, 1, queries, sum(call.points))
    level_weights = [weights]
    if len(call.points) > 1:
        level_weights = b.op("Split", weights, b.ints(*call.points), outputs=len(call.points), axis=3)
    # Summed level by level: samples of all levels side by side would be copied once more, 0.3 GB a layer in the
    # encoder of a detector at 800x1200.
    out, start = "", b.ints(0)
    for level in range(len(call.points)):
        height, width = call.level_size(level)
        end = b.op("Add", start, b.op("Mul", height, width))
        tokens = b.slice(value, start, end, 2) if len(call.points) > 1 else value
        image = b.reshape(tokens, -1, dim, height, width)
        mode = "linear" if call.opset >= 20 else "bilinear"
        samples = b.op("GridSample", image, grids[level], mode=mode, padding_mode="zeros", align_corners=0)
        term = b.op("ReduceSum", b.op("Mul", samples, level_weights[level]), b.ints(3), keepdims=0)
        out = b.op("Add", out, term) if out else term  # (batch * heads, dim, queries)
        start = end
    out = b.reshape(out, -1, heads * dim, queries)
    b.op("Transpose", out, perm=[0, 2, 1], output=call.output)


def _gather_by_level(call: _Call) -> None:
    """A sum over levels, each with its own Gathers. Rows are integers below 2**24 in each image, which FP32 holds exactly."""
    b, heads, dim = call.builder, call.heads, call.dim
    f32 = np.float32
    one, zero, half = b.const(1.0, f32), b.const(0.0, f32), b.const(0.5, f32)
    low = call.kind != FLOAT
    weights = b.op("Cast", call.weights, to=FLOAT) if low else call.weights
    parts = [(call.locations, weights)]
    if len(call.points) > 1:
        split = b.ints(*call.points)
        parts = list(
            zip(
                *(b.op("Split", each, split, outputs=len(call.points), axis=3) for each in (call.locations, weights)), strict=True
            )
        )
    table = b.reshape(call.value, -1, dim)  # (batch * tokens * heads, dim)
    batch = b.op("Squeeze", b.op("Shape", call.value, start=0, end=1), b.ints(0))
    rows_of_image = b.op("Mul", b.op("Shape", call.value, start=1, end=2), b.const(heads, np.int64))
    images = b.op("Mul", b.op("Range", b.const(0, np.int64), batch, b.const(1, np.int64)), rows_of_image)
    images = b.op("Cast", b.reshape(images, -1, 1, 1, 1), to=onnx.TensorProto.INT32)
    head = b.const(np.arange(heads, dtype=f32).reshape(1, 1, heads, 1), f32)
    total = ""
    for level, (locations, level_weights) in enumerate(parts):
        height, width = (b.op("Cast", side, to=FLOAT) for side in call.level_size(level))
        first = b.op("Cast", b.op("Gather", call.starts, b.const([level], np.int64), axis=0), to=FLOAT)
        x, y = (b.op("Squeeze", side, b.ints(4)) for side in b.op("Split", locations, b.ints(1, 1), outputs=2, axis=4))
        corners = {}
        for name, place, side in (("x", x, width), ("y", y, height)):
            place = b.op("Sub", b.op("Mul", place, side), half)
            low_cell = b.op("Floor", place)
            fraction, last = b.op("Sub", place, low_cell), b.op("Sub", side, one)
            for cell, share in ((low_cell, b.op("Sub", one, fraction)), (b.op("Add", low_cell, one), fraction)):
                clamped = b.op("Max", b.op("Min", cell, last), zero)
                # A corner outside the level weighs nothing: it is inside exactly where the clamp left it alone.
                inside = b.op("Cast", b.op("Equal", cell, clamped), to=FLOAT)
                corners.setdefault(name, []).append((clamped, b.op("Mul", share, inside)))
        samples = ""
        for column, column_share in corners["x"]:
            column_weight = b.op("Mul", column_share, level_weights)
            for row, row_share in corners["y"]:
                token = b.op("Add", b.op("Add", b.op("Mul", row, width), column), first)
                index = b.op("Add", b.op("Mul", token, b.const(float(heads), f32)), head)
                index = b.op("Add", b.op("Cast", index, to=onnx.TensorProto.INT32), images)
                weight = b.op("Mul", column_weight, row_share)
                weight = b.op("Unsqueeze", b.op("Cast", weight, to=call.kind) if low else weight, b.ints(4))
                term = b.op("Mul", weight, b.op("Gather", table, index, axis=0))
                samples = b.op("Add", samples, term) if samples else term
        samples = b.op("ReduceSum", b.op("Cast", samples, to=FLOAT) if low else samples, b.ints(3), keepdims=1)
        total = b.op("Add", total, samples) if total else samples
    total = b.op("Cast", total, to=call.kind) if low else total
    shape = b.op("Shape", call.locations, start=0, end=2)  # batch, queries
    b.op("Reshape", total, b.op("Concat", shape, b.ints(heads * dim), axis=0), output=call.output)


def _gather(call: _Call) -> None:
    b, heads, dim = call.builder, call.heads, call.dim
    points = sum(call.points)
    f32, i64 = np.float32, np.int64
    level_of_point = b.const(np.repeat(np.arange(len(call.points)), call.points), i64)
    sizes = b.op("Gather", call.shapes, level_of_point, axis=0)  # (points, 2): height, width
    heights, widths = b.op("Split", sizes, b.ints(1, 1), outputs=2, axis=1)
    h = b.op("Cast", b.reshape(heights, points), to=onnx.TensorProto.FLOAT)
    w = b.op("Cast", b.reshape(widths, points), to=onnx.TensorProto.FLOAT)
    one, zero, half = b.const(1.0, f32), b.const(0.0, f32), b.const(0.5, f32)
    last_x, last_y = b.op("Sub", w, one), b.op("Sub", h, one)
    x, y = b.op("Split", call.locations, b.ints(1, 1), outputs=2, axis=4)
    x, y = (b.op("Squeeze", side, b.ints(4)) for side in (x, y))  # (batch, queries, heads, points)
    x, y = b.op("Mul", x, w), b.op("Mul", y, h)

    # Row of the flattened value table: (batch * tokens + start of the level + y * width + x) * heads + head.
    table = b.reshape(call.value, -1, dim)  # (batch * tokens * heads, dim)
    batch = b.op("Squeeze", b.op("Shape", call.value, start=0, end=1), b.ints(0))
    tokens = b.op("Shape", call.value, start=1, end=2)
    batches = b.op("Mul", b.op("Range", b.const(0, i64), batch, b.const(1, i64)), tokens)
    batches = b.reshape(batches, -1, 1, 1, 1)
    first = b.op("Gather", call.starts, level_of_point, axis=0)  # (points,)
    base = b.op("Mul", b.op("Add", batches, first), b.const(heads, i64))
    base = b.op("Add", base, b.const(np.arange(heads).reshape(1, 1, heads, 1), i64))

    def rows(cell_x: str, cell_y: str) -> str:
        """(batch, queries, heads, points, dim) values at integer positions inside their level."""
        cell = b.op("Add", b.op("Mul", cell_y, w), cell_x)
        offset = b.op("Mul", b.op("Cast", cell, to=onnx.TensorProto.INT64), b.const(heads, i64))
        return b.op("Gather", table, b.op("Add", offset, base), axis=0)

    def inside(cell: str, last: str) -> str:
        # Min and Max, not Clip: its bounds must be scalars and differ here from point to point.
        return b.op("Max", b.op("Min", cell, last), zero)

    def weighted(weight: str, values: str) -> str:
        """(batch, queries, heads, 1, dim): sum over the points."""
        return b.op("MatMul", b.op("Unsqueeze", weight, b.ints(3)), values)

    if call.discrete:
        # Truncation towards zero, as the original casts to integers, then the clamp.
        cell_x = inside(b.op("Floor", b.op("Max", b.op("Add", x, half), zero)), last_x)
        cell_y = inside(b.op("Floor", b.op("Max", b.op("Add", y, half), zero)), last_y)
        total = weighted(call.weights, rows(cell_x, cell_y))
    else:
        x, y = b.op("Sub", x, half), b.op("Sub", y, half)
        x0, y0 = b.op("Floor", x), b.op("Floor", y)
        x1, y1 = b.op("Add", x0, one), b.op("Add", y0, one)
        fx, fy = b.op("Sub", x, x0), b.op("Sub", y, y0)
        clamped = {
            name: inside(c, last)
            for name, c, last in (("x0", x0, last_x), ("x1", x1, last_x), ("y0", y0, last_y), ("y1", y1, last_y))
        }
        # A corner outside the level weighs nothing: it is inside exactly where the clamp left it alone.
        corner_weight = {}
        for name, cell, fraction in (
            ("x0", x0, b.op("Sub", one, fx)),
            ("x1", x1, fx),
            ("y0", y0, b.op("Sub", one, fy)),
            ("y1", y1, fy),
        ):
            valid = b.op("Cast", b.op("Equal", cell, clamped[name]), to=onnx.TensorProto.FLOAT)
            corner_weight[name] = b.op("Mul", fraction, valid)
        total = ""
        for cx in ("x0", "x1"):
            column = b.op("Mul", corner_weight[cx], call.weights)
            for cy in ("y0", "y1"):
                term = weighted(b.op("Mul", column, corner_weight[cy]), rows(clamped[cx], clamped[cy]))
                total = b.op("Add", total, term) if total else term
    shape = b.op("Shape", call.locations, start=0, end=2)  # batch, queries
    b.op("Reshape", total, b.op("Concat", shape, b.ints(heads * dim), axis=0), output=call.output)


def sampled_sums(view: GraphView) -> tuple[set[str], set[str], set[str]]:
    """Tensors in which "gather" sums samples: the MatMuls of the corners, these and all sums of them, and the last sums.

    A MatMul is one of (batch, queries, heads, 1, points) weights and (batch, queries, heads, points, dim) gathered values; all of a sum have
    as many points.
    """

    def sampled(node: onnx.NodeProto) -> bool:
        weight, values = (view.producer.get(name) for name in node.input)
        return (
            weight is not None
            and values is not None
            and (weight.op_type, values.op_type) == ("Unsqueeze", "Gather")
            and len(weight.input) == 2  # before opset 13 the axes are an attribute
            and (axes := view.array(weight.input[1])) is not None
            and axes.tolist() == [3]
        )

    found = [node for node in view.nodes if node.op_type == "MatMul" and sampled(node)]
    points = _points(view.model, {node.output[0]: (view.producer[node.input[0]].input[0], node.input[1]) for node in found})
    terms = set(points)
    # The last are those of corners, whose axis of points is still there.
    for node in view.nodes:
        if (
            node.op_type == "Add"
            and all(name in points for name in node.input)
            and len({points[name] for name in node.input}) == 1
        ):
            points[node.output[0]] = points[node.input[0]]
    sums = set(points)
    return (
        terms,
        sums,
        {name for name in sums if name in view.outputs or any(node.output[0] not in sums for node in view.consumers(name))},
    )


def _points(model: onnx.ModelProto, sides: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Product -> number of its points, of products of `sides` that have the axes of deformable attention: (weights, values) each."""
    if not sides:
        return {}
    graph = inferred(model)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in (*graph.input, *graph.value_info)}
    lengths = {product: [shapes.get(name, ()) for name in pair] for product, pair in sides.items()}
    return {
        product: weights[3].dim_value
        for product, (weights, values) in lengths.items()
        if (len(weights), len(values)) == (4, 5) and weights[3].dim_value
    }


def sum_by_reduction(model: onnx.ModelProto) -> int:
    """Sum the samples of gathered deformable attention by Mul and ReduceSum instead of MatMul, in place.

    TensorRT's compiler writes all gathered values of a MatMul to memory (one layer of three levels up to 40x56, batch size 4:
    296 MB of activations), and fuses a Gather, a Mul and a ReduceSum into one kernel (5 MB). ONNX Runtime's CPU kernels are
    two to three times faster with MatMul, so the exported graph keeps it. The results differ by the order of summation; in
    16-bit graphs the sum is in FP32.

    Returns:
        How many sums were replaced.
    """
    view = GraphView(model)
    terms, sums, totals = sampled_sums(view)
    if not totals:
        return 0
    summands = {name: f"{name}/points" if name in totals else name for name in sums}
    nodes: list[onnx.NodeProto] = []
    for node in view.nodes:
        name = node.output[0]
        if name not in sums:
            nodes.append(node)
            continue
        builder = GraphBuilder(f"{node.name}/sum")
        summand = summands[name]
        if name in terms:
            weight, values = view.producer[node.input[0]], node.input[1]
            builder.op("Mul", builder.op("Unsqueeze", weight.input[0], builder.ints(4)), values, output=summand)
        else:
            builder.op("Add", *(summands[each] for each in node.input), output=summand)
        if name in totals:
            low = view.types[name] != onnx.TensorProto.FLOAT
            wide = builder.op("Cast", summand, to=onnx.TensorProto.FLOAT) if low else summand
            total = builder.op("ReduceSum", wide, builder.ints(3), keepdims=1, **({} if low else {"output": name}))
            if low:
                builder.op("Cast", total, to=view.types[name], output=name)
        nodes.extend(builder.nodes)
        model.graph.initializer.extend(builder.initializers)
    replace_nodes(model, nodes)
    drop_dead(model)
    return len(totals)


def level_starts(b: GraphBuilder, areas: str, levels: int, dtype: Any) -> str:
    """(levels,) index of each level's first token, from the (levels,) areas of the levels.

    An exclusive sum, as a product with a triangle of ones: TensorRT before 10.8 runs CumSum as a loop, which cannot be recorded as
    a CUDA graph.
    """
    return b.op("ReduceSum", b.op("Mul", b.const(np.tri(levels, k=-1), dtype), areas), b.ints(1), keepdims=0)
