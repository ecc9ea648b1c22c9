"""FP16 and BF16 in the captured graph, by the same table of operators as `detrt.precision.rules`.

Matmuls, convolutions, attention and the operators between them run in 16 bits. Values that become positions, orders and outputs
stay FP32 from the last matmul on. The compiler computes fused elementwise operators in FP32 anyway, so that FP32 parts cost
little.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ...graph.operators import BARRIER, COMPARE, DECIDE, FILL_LIMIT, FILL_VALUE, GEMM, WIDE
from ...spec import Precision
from .nodes import MSDA, Constants, fake_like, fake_mode, faking, finish, value_of

aten = torch.ops.aten
_FUSED = "detrt::ms_deform_attn_fused"


def lower_types(graph: fx.GraphModule, precision: Precision) -> fx.GraphModule:
    """Rewrite the graph in place; inputs and outputs keep their types. precision: FP16 or BF16."""
    low = getattr(torch, precision.dtype)
    exact = _exact_nodes(graph)
    constants = Constants(graph)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    values: dict[fx.Node, Any] = {}  # present value of each node
    for node in graph.graph.nodes:
        tensor = constants.get(node)
        if tensor is not None:
            values[node] = fake_like(tensor, node)

    def current(node: Any) -> Any:
        return values.get(node, value_of(node))

    def is_float(node: Any) -> bool:
        val = current(node)
        return isinstance(val, Tensor) and val.dtype in (torch.float32, low)

    def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        val = current(node)
        if val.dtype == dtype:
            return node
        key = (node, dtype)
        if key in casts:
            return casts[key]
        tensor = constants.get(node)
        if tensor is not None:
            tensor = _limit_fills(tensor).to(dtype) if dtype == low else tensor.to(dtype)
            new = constants.add(tensor, node.next, node)
        else:
            with graph.graph.inserting_after(_insertion_point(node)):
                new = graph.graph.call_function(aten.to.dtype, (node, dtype))
        new.meta["val"] = values[new] = _run_fake(lambda: val.to(dtype), val)
        casts[key] = new
        return new

    for node in list(graph.graph.nodes):
        if node.op == "output":
            node.args = (fx.map_arg(node.args[0], lambda n: cast(n, value_of(n).dtype) if is_float(n) else n),)
            continue
        if node.op != "call_function":
            continue
        floats = [n for n in node.all_input_nodes if is_float(n)]
        if floats:
            dtype_in = _input_dtype(node, floats, exact, low, constants, current)
            argument_dtype = _argument_dtypes(node)
            if argument_dtype is not None:
                node.args = tuple(
                    cast(arg, target_dtype) if (target_dtype := argument_dtype(index, low)) is not None and is_float(arg) else arg
                    for index, arg in enumerate(node.args)
                )
            elif dtype_in is not None:
                cast_input = lambda n: cast(n, dtype_in) if is_float(n) else n  # noqa: E731, B023
                node.args, node.kwargs = fx.map_arg(node.args, cast_input), fx.map_arg(node.kwargs, cast_input)
                if dtype_in == low:
                    _limit_constants(node)
        values[node] = _retrace(node, current)
    for node, val in values.items():
        node.meta["val"] = val
    return finish(graph)


def _input_dtype(
    node: fx.Node, floats: list[fx.Node], exact: set[fx.Node], low: torch.dtype, constants: Constants, current: Any
) -> Any:
    """The type that the inputs of a node are cast to; None: no cast."""
    if node in exact:
        return torch.float32
    if _name(node) in GEMM.aten:
        return low
    if _name(node) in WIDE.aten or _name(node) in COMPARE.aten:
        return torch.float32
    if node.target is operator.getitem or _is_cast(node):
        return None
    inputs = [n for n in floats if constants.get(n) is None and n.target != aten.full.default]
    return low if any(current(n).dtype == low for n in inputs) else torch.float32


def _argument_dtypes(node: fx.Node) -> Any:
    """For deformable attention: function from argument number to its type (None: no cast)."""
    if node.target == MSDA:
        return lambda index, low: {0: low, 2: torch.float32}.get(index)
    if str(node.target).startswith(_FUSED.replace("::", ".")):
        return lambda index, low: {0: low, 2: torch.float32}.get(index)
    return None


def _exact_nodes(graph: fx.GraphModule) -> set[fx.Node]:
    """Nodes between the last matmuls and outputs, indices, orders and angles, which stay FP32."""
    todo: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "output":
            todo += node.all_input_nodes
        elif node.op == "call_function":
            if node.target == MSDA or str(node.target).startswith(_FUSED.replace("::", ".")):
                todo.append(node.args[2])
            elif _name(node) in DECIDE.aten or (_is_cast(node) and not _floating(value_of(node))):
                todo += node.all_input_nodes
    exact: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        seen.add(node)
        val = value_of(node)
        if isinstance(val, Tensor) and not _floating(val):
            continue
        if _name(node) in BARRIER.aten or node.target == MSDA or str(node.target).startswith("detrt."):
            continue
        if _name(node) in GEMM.aten and not _is_dot_product(node):
            continue
        exact.add(node)
        todo += node.all_input_nodes
    return exact


def _is_dot_product(node: fx.Node) -> bool:
    """A matmul of a softmax with one vector, such as the expected distance of D-FINE, which is not a layer."""
    if node.target not in (aten.linear.default, aten.matmul.default, aten.mm.default):
        return False
    weight = value_of(node.args[1])
    if not isinstance(weight, Tensor) or (weight.ndim == 2 and weight.shape[0 if node.target == aten.linear.default else 1] != 1):
        return False
    before = node.args[0]
    while isinstance(before, fx.Node) and _name(before) in (
        "reshape",
        "view",
        "unsqueeze",
        "squeeze",
        "permute",
        "transpose",
        "flatten",
    ):
        before = before.args[0]
    return isinstance(before, fx.Node) and _name(before) in ("softmax", "_softmax")


def _name(node: fx.Node) -> str:
    target = node.target
    return target._schema.name.split("::")[-1] if isinstance(target, torch._ops.OpOverload) else str(target)


def _is_cast(node: fx.Node) -> bool:
    return node.target in (aten.to.dtype, aten._to_copy.default)


def _floating(val: Any) -> bool:
    return isinstance(val, Tensor) and val.is_floating_point()


def _run_fake(step: Any, val: Any) -> Any:
    with faking(fake_mode(val)):
        return step()


def _retrace(node: fx.Node, current: Any) -> Any:
    """The value of a node with the present types of its inputs."""
    values = [current(n) for n in node.all_input_nodes]
    if any(v is None for v in values):
        return value_of(node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), current)
    mode = fake_mode(*values)
    if mode is None or not any(_floating(v) or isinstance(v, (tuple, list)) for v in values):
        return value_of(node)
    with faking(mode), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _limit_constants(node: fx.Node) -> None:
    """Limit constants that a 16-bit type cannot hold, such as the fill of a mask."""
    limit = lambda x: max(-FILL_VALUE, min(FILL_VALUE, x)) if isinstance(x, float) and FILL_LIMIT < abs(x) < float("inf") else x  # noqa: E731
    node.args = tuple(limit(a) for a in node.args)
    for source in node.all_input_nodes:
        if source.target == aten.full.default:
            source.args = (source.args[0], limit(source.args[1]))


def _limit_fills(tensor: Tensor) -> Tensor:
    return torch.where((tensor.abs() > FILL_LIMIT) & tensor.isfinite(), tensor.sign() * FILL_VALUE, tensor)


def _insertion_point(node: fx.Node) -> fx.Node:
    """The node after which a cast is inserted: the placeholders must stay together."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node


def low_fraction(graph: fx.GraphModule, precision: Precision) -> float:
    """Fraction of matmuls and convolutions that run in a precision, 0 to 1."""
    low = getattr(torch, precision.dtype)
    gemms = [n for n in graph.graph.nodes if n.op == "call_function" and _name(n) in GEMM.aten]
    typed = [n for n in gemms if isinstance(value_of(n), Tensor) and value_of(n).dtype == low]
    return len(typed) / len(gemms) if gemms else 0.0
