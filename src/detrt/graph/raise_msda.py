"""The way back from gathers to `detrt.MSDeformAttn` nodes, for a runtime whose plugin is faster than its gathers.

A bundle keeps the graph of standard operators that every runtime takes; the copy for such a runtime gets nodes again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from .clean import drop_dead
from .lower_msda import BY_LEVEL, lower_msda, sampled_sums
from .nodes import GraphBuilder, import_domain, replace_nodes
from .operators import MSDA, MSDA_DOMAIN
from .view import GraphView, attribute, inferred

CORNERS = 4
NARROW = 16  # columns of a head, up to which both runtimes are faster with GridSample
PADDING = 8  # columns: tensor cores take inner sides that are multiples of it


def gather_by_level(model: onnx.ModelProto) -> int:
    """Write deformable attention as "gather by level" instead of "gather", in place; returns how many.

    Where padded positions are masked behind the projection of the values, the mask moves into that product: TensorRT-RTX would repeat
    it, with an integer division, for each sample.
    """
    if not (count := raise_msda(model)):
        return 0
    _mask_in_product(model)
    return lower_msda(model, BY_LEVEL) and count


def sample_grids(model: onnx.ModelProto) -> int:
    """Write deformable attention with narrow heads as "gridsample" instead of "gather", in place, for a CPU; returns how many.

    GridSample of ONNX Runtime and OpenVINO reads a value of each column by itself, gathers read a row (docs/results/cpu.md).
    """
    return raise_msda(model, NARROW) and lower_msda(model, "gridsample")


def _mask_in_product(model: onnx.ModelProto) -> None:
    """`(x @ W + b) * mask` of the values of MSDeformAttn, also as a Where -> `[x * mask, mask] @ [W; b]`, in place: one product."""
    view = GraphView(model)
    graph = inferred(model)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.input)}
    columns = {name for name, dims in shapes.items() if len(dims) == 3 and dims[2].dim_value == 1}
    written: dict[str, GraphBuilder] = {}
    for attention in view.nodes:
        if attention.op_type != MSDA:
            continue
        name = attention.input[0]
        while (node := view.producer.get(name)) is not None and node.op_type == "Reshape":
            name = node.input[0]
        if node is not None and name not in written and (b := _one_product(view, node, columns)) is not None:
            written[name] = b
    nodes = []
    for node in view.nodes:
        b = written.get(node.output[0])
        nodes.extend([node] if b is None else b.nodes)
        model.graph.initializer.extend([] if b is None else b.initializers)
    replace_nodes(model, nodes)
    drop_dead(model)


def _one_product(view: GraphView, node: onnx.NodeProto, columns: set[str]) -> GraphBuilder | None:
    """The product in place of a Where or Mul; None where it is no masked projection. columns: tensors (batch, tokens, 1)."""
    if node.op_type == "Where":
        mask, *sides = node.input
        projected, zero = sides if view.array(sides[0]) is None else sides[::-1]
        array = view.array(zero)
        if array is None or array.size != 1 or array.any():
            return None
    elif node.op_type == "Mul":
        projected, mask = node.input if node.input[1] in columns else reversed(node.input)
    else:
        return None
    total = view.producer.get(projected)
    if mask not in columns or total is None or total.op_type != "Add":
        return None
    bias = next((array for each in total.input if (array := view.array(each)) is not None), None)
    product = next((one for each in total.input if (one := view.producer.get(each)) is not None), None)
    weight = view.array(product.input[1]) if product is not None and product.op_type == "MatMul" else None
    if product is None or weight is None or weight.ndim != 2 or bias is None or bias.shape != weight.shape[1:]:
        return None
    b = GraphBuilder(f"{node.name or node.op_type}/product")
    keeps = mask
    if node.op_type == "Where":
        keeps = b.op("Cast", mask if projected == node.input[1] else b.op("Not", mask), to=view.types[node.output[0]])
    column = np.zeros((1, 1, PADDING), weight.dtype)
    column[..., 0] = 1
    inputs = b.op("Concat", b.op("Mul", product.input[0], keeps), b.op("Mul", keeps, b.const(column, weight.dtype)), axis=2)
    rest = np.zeros((PADDING - 1, weight.shape[1]), weight.dtype)
    b.op("MatMul", inputs, b.const(np.concatenate([weight, bias[None], rest]), weight.dtype), output=node.output[0])
    return b


def raise_msda(model: onnx.ModelProto, widest: int | None = None) -> int:
    """Replace what `lower_msda` writes as "gather" by MSDeformAttn nodes, in place; returns how many.

    widest: largest number of columns of a head; None: any.
    Discrete sampling, and attention in which another tool has changed the arithmetic, stay as they are.
    """
    view = GraphView(model)
    terms, sums, totals = sampled_sums(view)
    found = {}
    for total in sorted(totals):
        last = view.only_reader(total, "Reshape")
        if last is None:
            continue
        corners = [name for name in _addends(view, total, sums) if name in terms]
        builder = _attention(view, corners, last)
        if builder is not None and (widest is None or attribute(builder.nodes[-1], "head_dim") <= widest):
            found[last.output[0]] = builder
    if not found:
        return 0
    nodes: list[onnx.NodeProto] = []
    for node in view.nodes:
        builder = found.get(node.output[0])
        nodes.extend([node] if builder is None else builder.nodes)
        model.graph.initializer.extend([] if builder is None else builder.initializers)
    replace_nodes(model, nodes)
    import_domain(model, MSDA_DOMAIN)
    drop_dead(model)
    return len(found)


def _attention(view: GraphView, corners: list[str], last: onnx.NodeProto) -> GraphBuilder | None:
    """The node in place of four `corners`, whose sum `last` reshapes; None where they are not what `lower_msda` writes."""
    if len(corners) != CORNERS:
        return None
    products = [view.producer[name] for name in corners]
    gathers = [view.producer[product.input[1]] for product in products]
    tables = {gather.input[0] for gather in gathers}
    weights = set.intersection(*(_factors(view, view.producer[product.input[0]].input[0]) for product in products))
    split = next(
        (n for n in _before(view, gathers[0].input[1]) if n.op_type == "Split" and attribute(n, "axis") in (4, -1)), None
    )
    if len(tables) != 1 or len(weights) != 1 or split is None:
        return None
    (table,) = tables
    sides = [_side(view, name) for name in split.output]
    dim = view.array(view.producer[table].input[1]) if table in view.producer else None
    per_head = [c for c in _constants_before(view, gathers[0].input[1]) if c.ndim == 4 and c.shape[1] == 1]
    if dim is None or not per_head or None in sides:
        return None
    width, height = (side for side in sides if side is not None)
    heads = per_head[0].shape[2]
    b = GraphBuilder(f"{last.name or '/' + MSDA}/raised")  # names of its own: constants of the gathers are still there
    if (levels := _levels(view, b, width, height, gathers[0].input[1], heads)) is None:
        return None
    shapes, points = levels
    batch = b.slice(b.op("Shape", split.input[0]), b.ints(0), b.ints(1), 0)
    value = b.op("Reshape", table, b.op("Concat", batch, b.ints(-1, heads, int(dim[-1])), axis=0))
    b.nodes.append(
        helper.make_node(
            MSDA,
            [value, shapes, split.input[0], next(iter(weights))],
            [last.output[0]],
            name=f"{b.prefix}/{MSDA}",
            domain=MSDA_DOMAIN,
            heads=heads,
            head_dim=int(dim[-1]),
            points_per_level=points,
            discrete=0,
        )
    )
    return b


def _levels(view: GraphView, b: GraphBuilder, width: str, height: str, index: str, heads: int) -> tuple[str, list[int]] | None:
    """(name of the sizes of the levels, points of each level), from the width and the height at each point."""
    widths, heights = view.array(width), view.array(height)
    if widths is not None and heights is not None:  # of a graph of one size
        first = next(
            (starts for c in _constants_before(view, index) if (starts := _starts(c, widths.size, heads)) is not None), None
        )
        if first is None:
            return None
        begins = [0, *(np.flatnonzero(np.diff(first)) + 1).tolist()]
        sizes = np.stack([heights.ravel()[begins], widths.ravel()[begins]], axis=1)
        return b.const(sizes, np.int64), np.diff([*begins, widths.size]).tolist()
    for node in _before(view, width):
        level = view.array(node.input[1]) if node.op_type == "Gather" else None
        if level is not None and level.ndim == 1:
            return node.input[0], np.bincount(level).tolist()
    return None


def _starts(constant: NDArray, points: int, heads: int) -> NDArray | None:
    """(points,) first token of the level of each point, alone or in the row of each head."""
    if constant.dtype.kind != "i" or constant.shape[-1:] != (points,):
        return None
    return constant if constant.ndim == 1 else constant.reshape(-1, points)[0] // heads


def _side(view: GraphView, name: str) -> str | None:
    """The widths or heights that coordinates (batch, queries, heads, points, 1) are multiplied with."""
    for _ in range(2):
        reader = view.only_reader(name)
        if reader is None:
            return None
        if reader.op_type == "Mul":
            return next((each for each in reader.input if each != name), None)
        name = reader.output[0]
    return None


def _addends(view: GraphView, name: str, sums: set[str]) -> list[str]:
    node = view.producer[name]
    if node.op_type != "Add":
        return [name]
    return [each for part in node.input if part in sums for each in _addends(view, part, sums)]


def _factors(view: GraphView, name: str, depth: int = 2) -> set[str]:
    """Tensors whose product a tensor is, with the products on the way."""
    node = view.producer.get(name)
    if depth == 0 or node is None or node.op_type != "Mul":
        return {name}
    return set().union(*(_factors(view, part, depth - 1) for part in node.input))


def _before(view: GraphView, name: str) -> Iterator[onnx.NodeProto]:
    """Nodes that lead to a tensor, the nearest first, up to a Split or a Gather."""
    pending, seen = [name], {name}
    while pending:
        node = view.producer.get(pending.pop(0))
        if node is None:
            continue
        yield node
        if node.op_type in ("Split", "Gather") and attribute(node, "axis") in (4, -1, 0):
            continue
        for each in node.input:
            if each not in seen:
                seen.add(each)
                pending.append(each)


def _constants_before(view: GraphView, name: str) -> Iterator[NDArray]:
    for node in _before(view, name):
        yield from (array for each in node.input if (array := view.array(each)) is not None)
