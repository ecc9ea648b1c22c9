"""Graph passes in their order: from a source to the graph that is compiled."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ...models.ops.msda import sample_level
from ...models.source import Source
from ...spec import ModelSpec, Precision
from .attention import fuse_plain_attention
from .capture import CapturedGraph, Range, capture, capture_text
from .convolving import fold_stem, fuse_depthwise, linear_patches, linear_pointwise
from .early import EARLY_PIXELS, pixels_of, starts_early
from .few_rows import fuse_few_rows
from .folding import (
    drop_checks,
    drop_neutral,
    fold_constants,
    fold_fills,
    fold_into_convolutions,
    merge_convolutions,
    read_past_stacks,
    unify_batch_norms,
)
from .fusing import (
    eliminate_common_subexpressions,
    fuse_attention,
    fuse_epilogues,
    fuse_gelu,
    fuse_top_k,
    merge_linears,
    pad_heads,
    pad_stem,
)
from .nodes import MSDA, Constants, aten, finish, value_of
from .types import lower_types
from .windows import fuse_windows


def simplify(graph: fx.GraphModule, biased: bool = True) -> fx.GraphModule:
    """Run the semantics-preserving passes. biased: see `fuse_attention`."""
    drop_checks(graph)
    unify_batch_norms(graph)
    fold_fills(graph)
    fold_constants(graph)
    drop_neutral(graph)
    fold_into_convolutions(graph)
    merge_convolutions(graph)
    read_past_stacks(graph)
    fuse_attention(graph, biased)
    eliminate_common_subexpressions(graph)
    merge_linears(graph)
    fold_constants(graph)
    return finish(graph)


def sample_levels(
    value: Tensor, shapes: list[list[int]], locations: Tensor, weights: Tensor, points: list[int], discrete: bool
) -> Tensor:
    """`detrt.models.ops.msda.reference` with sizes that are numbers, so that the compiler gets plain operators."""
    batch, _, heads, dim = value.shape
    queries = locations.shape[1]
    values = value.split([h * w for h, w in shapes], dim=1)
    locations_by_level = locations.permute(0, 2, 1, 3, 4).flatten(0, 1).split(points, dim=2)
    samples = []
    for (height, width), level, location in zip(shapes, values, locations_by_level, strict=True):
        grid = level.permute(0, 2, 3, 1).reshape(batch * heads, dim, height, width)
        samples.append(sample_level(grid, location, discrete))
    scale = weights.permute(0, 2, 1, 3).reshape(batch * heads, 1, queries, -1)
    out = (torch.cat(samples, dim=-1) * scale).sum(-1).to(value.dtype)
    return out.reshape(batch, heads * dim, queries).transpose(1, 2)


def lower_deformable(graph: fx.GraphModule) -> int:
    """Replace deformable attention by `sample_levels`, for devices without a kernel; the number of replacements.

    Raises:
        ValueError: the sizes of the levels are not constant.
    """
    constants = Constants(graph)
    count = 0
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target != MSDA:
            continue
        shapes = constants.get(node.args[1])
        if shapes is None:
            raise ValueError("the sizes of the levels of deformable attention are not constant")
        args = [*node.args, False][:6]
        args[1] = [[int(side) for side in pair] for pair in shapes.tolist()]
        with graph.graph.inserting_before(node):
            new = graph.graph.call_function(sample_levels, tuple(args))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        count += 1
    return count


def prepare(
    source: Source,
    spec: ModelSpec,
    batch: Range,
    precision: Precision = Precision.FP32,
    device: str = "cpu",
    tokens: int | None = None,
    biased: bool = True,
    names: int | None = None,
) -> CapturedGraph:
    """The graph of a detector for one device: captured, simplified, typed.

    On a GPU deformable attention stays an op, for detrt's kernel; elsewhere it becomes plain operators.

    Args:
        source: the checkpoint.
        spec: of the package.
        batch: smallest and largest.
        precision: FP32, FP16 or BF16.
        device: "cpu" or "cuda".
        tokens: of a prompted model: length of its prompt or task.
        biased: see `fuse_attention`.
        names: of a prompted model: length of its class list.

    Raises:
        ExportError: the model cannot be captured.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        _use_kernels(source)
    if spec.text is None:
        captured = capture(source, spec, batch, device)
    else:
        captured = capture_text(source, spec, batch, tokens or 6, device, names)
    simplify(captured.graph, biased)
    if precision.bits == 16:
        lower_types(captured.graph, precision)
    if on_gpu:
        tune_for_gpu(captured)
    else:
        lower_deformable(captured.graph)
    finish(captured.graph)
    return captured


def _use_kernels(source: Source) -> None:
    from ...models.ops import install, triton_available

    if triton_available():
        install(source.module)


def tune_for_gpu(captured: CapturedGraph, linears: bool = True, convolutions: str = "all") -> None:
    """Layouts and paddings for tensor cores, and fused epilogues; run after the types are chosen."""
    fuse_windows(captured.graph)
    fuse_plain_attention(captured.graph)
    linear_patches(captured.graph)
    fold_stem(captured.graph)
    pad_stem(captured.graph, 4)
    channels_last(captured)
    fuse_epilogues(captured.graph, linears, convolutions)
    fuse_depthwise(captured.graph)
    fuse_gelu(captured.graph)
    linear_pointwise(captured.graph)
    pad_heads(captured.graph)
    if starts_early(captured.inputs[0].device) and pixels_of(captured) <= EARLY_PIXELS:
        fuse_few_rows(captured.graph)
    fuse_top_k(captured.graph)
    finish(captured.graph)


def channels_last(captured: CapturedGraph) -> None:
    """Store convolution weights with channels last, as tensor cores read them, so that nothing is converted at run time."""
    graph = captured.graph
    constants = Constants(graph)
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (aten.conv2d.default, aten.conv2d.padding):
            weight = constants.get(node.args[1])
            if weight is not None and weight.ndim == 4:
                new = constants.add(_channels_last(weight), node, node)
                node.args = (node.args[0], new, *node.args[2:])


def _channels_last(weight: Tensor) -> Tensor:
    return weight.contiguous(memory_format=torch.channels_last)
