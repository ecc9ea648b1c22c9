"""Passes over the captured graph, each the same function with less to do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .folding import drop_checks, drop_neutral, fill_fixed, fold_constants, fold_into_convolutions, plain_norms
from .fusing import fuse_attention, join_linears, share_equal
from .nodes import MSDA, Constants, finish, value_of


def simplify(graph: fx.GraphModule, biased: bool = True) -> fx.GraphModule:
    """All passes, in their order. biased: see `fuse_attention`."""
    drop_checks(graph)
    plain_norms(graph)
    fill_fixed(graph)
    fold_constants(graph)
    drop_neutral(graph)
    fold_into_convolutions(graph)
    fuse_attention(graph, biased)
    share_equal(graph)
    join_linears(graph)
    fold_constants(graph)
    return finish(graph)


def sampled(
    value: Tensor, shapes: list[list[int]], locations: Tensor, weights: Tensor, points: list[int], discrete: bool
) -> Tensor:
    """`detrt.models.ops.portable.reference` with sizes that are numbers, so that the compiler sees plain operators."""
    batch, _, heads, dim = value.shape
    queries = locations.shape[1]
    values = value.split([h * w for h, w in shapes], dim=1)
    places = locations.permute(0, 2, 1, 3, 4).flatten(0, 1).split(points, dim=2)
    samples = []
    for (height, width), level, location in zip(shapes, values, places, strict=True):
        grid = level.permute(0, 2, 3, 1).reshape(batch * heads, dim, height, width)
        if discrete:
            size = torch.tensor([width, height], dtype=location.dtype, device=location.device)
            cell = (location * size + 0.5).to(torch.int64)
            index = cell[..., 1].clamp(0, height - 1) * width + cell[..., 0].clamp(0, width - 1)
            flat = index.reshape(batch * heads, 1, -1).expand(-1, dim, -1)
            sample = grid.flatten(2).gather(2, flat).reshape(batch * heads, dim, queries, -1)
        else:
            # Coordinates in 16 bits are percents of a cell wrong, and the CPU's kernel in 16 bits gives NaN far outside.
            where = (2 * location - 1).to(torch.float32)
            sample = F.grid_sample(grid.to(torch.float32), where, mode="bilinear", padding_mode="zeros", align_corners=False)
        samples.append(sample)
    scale = weights.permute(0, 2, 1, 3).reshape(batch * heads, 1, queries, -1)
    out = (torch.cat(samples, dim=-1) * scale).sum(-1).to(value.dtype)
    return out.reshape(batch, heads * dim, queries).transpose(1, 2)


def lower_deformable(graph: fx.GraphModule) -> int:
    """Replace the op by `sampled`; how many there were. For devices without a kernel.

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
            new = graph.graph.call_function(sampled, tuple(args))
        new.meta["val"] = value_of(node)
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
        count += 1
    return count
