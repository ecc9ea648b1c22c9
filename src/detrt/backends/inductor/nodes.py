"""Nodes of a captured graph: their values, and the constant tensors of the graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils import _pytree as pytree

from ...models.ops.msda import ms_deform_attn

aten = torch.ops.aten
MSDA = ms_deform_attn.default
VIEWS = (aten.expand.default, aten.view.default, aten.unsqueeze.default, aten.reshape.default, aten.slice.Tensor)

CASTS = (aten.to.dtype, aten._to_copy.default)
# What keeps the memory of its input, in part or whole.
_ALIASES = (
    *VIEWS,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.select.int,
    aten.split_with_sizes.default,
    aten.split.Tensor,
    aten.chunk.default,
    operator.getitem,
)


def value_of(node: Any) -> Any:
    """The traced value of a node: a fake tensor, a number, or None."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def fake_mode(*values: Any) -> Any:
    """The mode of the first fake tensor, also in lists of them; None if there is none."""
    leaves = pytree.tree_leaves(values)
    return next((mode for value in leaves if (mode := getattr(value, "fake_mode", None)) is not None), None)


@contextmanager
def faking(mode: Any) -> Iterator[None]:
    """Run operators on the tensors of a fake mode; None: on real tensors."""
    if mode is None:
        yield
        return
    # Composite operators, such as linear, support symbolic sizes in Python only.
    with mode, enable_python_dispatcher():
        yield


def attribute(graph: fx.GraphModule, target: str) -> Any:
    found: Any = graph
    for part in target.split("."):
        found = getattr(found, part)
    return found


class Constants:
    """Constant tensors of the graph, by node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self._count = 0

    def get(self, node: Any) -> Tensor | None:
        """The tensor of a `get_attr` node, else None."""
        if isinstance(node, fx.Node) and node.op == "get_attr":
            found = attribute(self.graph, str(node.target))
            return found if isinstance(found, Tensor) else None
        return None

    def add(self, tensor: Tensor, before: fx.Node, like: fx.Node | None = None) -> fx.Node:
        """A new `get_attr` node for a tensor."""
        while hasattr(self.graph, f"folded_{self._count}"):
            self._count += 1
        name = f"folded_{self._count}"
        self.graph.register_buffer(name, tensor.detach(), persistent=False)
        with self.graph.graph.inserting_before(before):
            node = self.graph.graph.get_attr(name)
        node.meta["val"] = fake_like(tensor, like or before)
        return node


def move_constants(graph: fx.GraphModule, device: torch.device) -> None:
    """Put every constant tensor on the graph's device.

    PyTorch keeps a number that is assigned to elements of a GPU's tensor on the CPU. The compiled code would read it with a wait for the
    GPU, which a CUDA graph cannot record.
    """
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        tensor = constants.get(node)
        if tensor is not None and tensor.device.type != device.type:
            node.replace_all_uses_with(constants.add(tensor.to(device), node))
            graph.graph.erase_node(node)


def fake_like(tensor: Tensor, node: fx.Node) -> Any:
    """The tensor without its data, in the fake mode of the node's graph."""
    for other in (node, *node.graph.nodes):
        mode = getattr(value_of(other), "fake_mode", None)
        if mode is not None:
            with mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return tensor.to("meta")


def columns_of(node: Any, batch: Any, heads: int, tokens: int, dim: int) -> tuple[fx.Node, int] | None:
    """(a tensor of (batch, tokens, width), the column from which its heads are those of `node`), past views and casts.

    node: (batch, heads, tokens, dim). The tensor is the first of the chain, which is no view of another. None: the heads of a token do
    not lie side by side in one.
    """
    chain: list[fx.Node] = []
    found = None
    while isinstance(node, fx.Node) and (node.target in _ALIASES or node.target in CASTS):
        chain.append(node)
        node = node.args[0]
        val = value_of(node)
        if not isinstance(val, Tensor) or val.ndim != 3 or tuple(val.shape[:2]) != (batch, tokens):
            continue
        width = val.shape[2]
        if not isinstance(width, int) or width < heads * dim:
            continue
        # Strides and offset identify the slice: views keep the memory.
        base = torch.empty([s if isinstance(s, int) else 2 for s in val.shape], device="meta")
        view: Any = base
        for step in reversed(chain):
            if step.target not in CASTS:
                args, kwargs = fx.map_arg((step.args, step.kwargs), lambda n: view)  # noqa: B023
                view = step.target(*args, **kwargs)  # type: ignore[operator]
        same = view is base or view._base is base
        if same and view.shape[1:] == (heads, tokens, dim) and view.stride() == (tokens * width, dim, width, 1):
            found = node, view.storage_offset()
    return found


def uniform(node: Any) -> Any:
    """The value of a tensor created by `full`, or None."""
    if isinstance(node, fx.Node) and node.target == aten.full.default:
        return node.args[1]
    return None


def is_low(node: Any) -> bool:
    """Whether the value of a node has a type of 16 bits."""
    val = value_of(node)
    return isinstance(val, Tensor) and val.dtype in (torch.float16, torch.bfloat16)


def is_pure(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def set_value(node: fx.Node) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with faking(fake_mode(*map(value_of, node.all_input_nodes))):
        node.meta["val"] = node.target(*args, **kwargs)


def call(graph: fx.GraphModule, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call with its value, where the graph inserts nodes."""
    node = graph.graph.call_function(target, args, kwargs)
    set_value(node)
    return node


def conv_args(node: fx.Node) -> tuple[Any, ...]:
    """(data, weight, bias, stride, padding, dilation, groups) of a `conv2d`."""
    defaults: list[Any] = [None, None, None, [1, 1], [0, 0], [1, 1], 1]
    return (*node.args, *defaults[len(node.args) :])


def attention_args(node: fx.Node) -> tuple[Any, Any, Any, Any, float] | None:
    """(q, k, v, mask, scale) of attention of four axes, without dropout and causality; None for any other node."""
    if node.op != "call_function" or node.target != aten.scaled_dot_product_attention.default:
        return None
    val = value_of(node)
    q, k, v, mask, dropout, causal = [*node.args, *(None, 0.0, False)[len(node.args) - 3 :]]
    options = dict(node.kwargs)
    scale, mask = options.pop("scale", None), options.pop("attn_mask", mask)
    if dropout or causal or any(options.values()) or not isinstance(val, Tensor) or val.ndim != 4:
        return None
    return q, k, v, mask, float(val.shape[3] ** -0.5 if scale is None else scale)  # type: ignore[arg-type]


def finish(graph: fx.GraphModule) -> fx.GraphModule:
    graph.graph.eliminate_dead_code()
    _drop_unused_tensors(graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def _drop_unused_tensors(graph: fx.GraphModule) -> None:
    used = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    for name, module in list(graph.named_modules()):
        for kind in (module._parameters, module._buffers):
            for key in list(kind):
                if ".".join(filter(None, (name, key))) not in used:
                    del kind[key]
