"""Sampling of multi-scale deformable attention (arXiv:2010.04159) as one Triton kernel, for training.

The stock class calls ``grid_sample`` per level; its backward pass scatters into channels that are far
apart. Here a thread block reads and adds to the channels of one head side by side. ``fuse`` checks
outputs and gradients against the stock class before it replaces it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.grounding_dino import modeling_grounding_dino as stock

try:
    import triton
    import triton.language as tl
except ImportError:  # the CPU build of torch has none; nothing here is called then
    triton = None

BLOCK = 32

if triton is not None:

    @triton.jit
    def _corner(value, row, ix, iy, width, height, heads, head, depth, ok):
        """Values (BLOCK, D) of one corner, zero outside the image; also its offsets and its mask."""
        inside = ok & (ix >= 0) & (ix < width) & (iy >= 0) & (iy < height)
        at = ((row + iy * width + ix) * heads + head)[:, None] * depth.shape[0] + depth[None, :]
        inside = inside[:, None] & (depth[None, :] >= 0)
        return tl.load(value + at, mask=inside, other=0.0).to(tl.float32), at, inside

    @triton.jit
    def _forward(
        value,
        places,
        weights,
        shapes,
        starts,
        out,
        queries,
        positions,
        heads,
        LEVELS: tl.constexpr,
        POINTS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok, depth = q < queries, tl.arange(0, D)
        sample = ((batch * queries + q) * heads + head).to(tl.int64) * (LEVELS * POINTS)
        total = tl.zeros((BLOCK, D), tl.float32)
        for level in tl.static_range(LEVELS):
            height, width = tl.load(shapes + 2 * level), tl.load(shapes + 2 * level + 1)
            row = (batch * positions + tl.load(starts + level)).to(tl.int64)
            for point in tl.static_range(POINTS):
                s = sample + level * POINTS + point
                x = tl.load(places + 2 * s, mask=ok, other=0.0) * width - 0.5
                y = tl.load(places + 2 * s + 1, mask=ok, other=0.0) * height - 0.5
                w = tl.load(weights + s, mask=ok, other=0.0)
                left, top = tl.floor(x), tl.floor(y)
                fx, fy = (x - left)[:, None], (y - top)[:, None]
                ix, iy = left.to(tl.int64), top.to(tl.int64)
                a, _, _ = _corner(value, row, ix, iy, width, height, heads, head, depth, ok)
                b, _, _ = _corner(value, row, ix + 1, iy, width, height, heads, head, depth, ok)
                c, _, _ = _corner(value, row, ix, iy + 1, width, height, heads, head, depth, ok)
                d, _, _ = _corner(value, row, ix + 1, iy + 1, width, height, heads, head, depth, ok)
                mixed = (a * (1 - fx) + b * fx) * (1 - fy) + (c * (1 - fx) + d * fx) * fy
                total += mixed * w[:, None]
        at = ((batch * queries + q) * heads + head).to(tl.int64)[:, None] * D + depth[None, :]
        tl.store(out + at, total, mask=ok[:, None] & (depth[None, :] >= 0))

    @triton.jit
    def _backward(
        value,
        places,
        weights,
        shapes,
        starts,
        grad,
        grad_value,
        grad_places,
        grad_weights,
        queries,
        positions,
        heads,
        LEVELS: tl.constexpr,
        POINTS: tl.constexpr,
        D: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        ok, depth = q < queries, tl.arange(0, D)
        sample = ((batch * queries + q) * heads + head).to(tl.int64) * (LEVELS * POINTS)
        at = ((batch * queries + q) * heads + head).to(tl.int64)[:, None] * D + depth[None, :]
        g = tl.load(grad + at, mask=ok[:, None] & (depth[None, :] >= 0), other=0.0)
        for level in tl.static_range(LEVELS):
            height, width = tl.load(shapes + 2 * level), tl.load(shapes + 2 * level + 1)
            row = (batch * positions + tl.load(starts + level)).to(tl.int64)
            for point in tl.static_range(POINTS):
                s = sample + level * POINTS + point
                x = tl.load(places + 2 * s, mask=ok, other=0.0) * width - 0.5
                y = tl.load(places + 2 * s + 1, mask=ok, other=0.0) * height - 0.5
                w = tl.load(weights + s, mask=ok, other=0.0)
                left, top = tl.floor(x), tl.floor(y)
                fx, fy = x - left, y - top
                ix, iy = left.to(tl.int64), top.to(tl.int64)
                a, at_a, in_a = _corner(value, row, ix, iy, width, height, heads, head, depth, ok)
                b, at_b, in_b = _corner(value, row, ix + 1, iy, width, height, heads, head, depth, ok)
                c, at_c, in_c = _corner(value, row, ix, iy + 1, width, height, heads, head, depth, ok)
                d, at_d, in_d = _corner(value, row, ix + 1, iy + 1, width, height, heads, head, depth, ok)
                gw = g * w[:, None]
                tl.atomic_add(grad_value + at_a, gw * ((1 - fx) * (1 - fy))[:, None], mask=in_a, sem="relaxed")
                tl.atomic_add(grad_value + at_b, gw * (fx * (1 - fy))[:, None], mask=in_b, sem="relaxed")
                tl.atomic_add(grad_value + at_c, gw * ((1 - fx) * fy)[:, None], mask=in_c, sem="relaxed")
                tl.atomic_add(grad_value + at_d, gw * (fx * fy)[:, None], mask=in_d, sem="relaxed")
                sa, sb = tl.sum(g * a, 1), tl.sum(g * b, 1)
                sc, sd = tl.sum(g * c, 1), tl.sum(g * d, 1)
                mixed = (sa * (1 - fx) + sb * fx) * (1 - fy) + (sc * (1 - fx) + sd * fx) * fy
                tl.store(grad_weights + s, mixed, mask=ok)
                tl.store(grad_places + 2 * s, w * width * ((sb - sa) * (1 - fy) + (sd - sc) * fy), mask=ok)
                tl.store(grad_places + 2 * s + 1, w * height * ((sc - sa) * (1 - fx) + (sd - sb) * fx), mask=ok)


class _Sample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, places, weights, shapes, starts):
        value = value.contiguous()
        places, weights = (x.float().contiguous() for x in (places, weights))
        batch, positions, heads, depth = value.shape
        queries, levels, points = weights.shape[1], weights.shape[3], weights.shape[4]
        out = torch.empty(batch, queries, heads, depth, dtype=value.dtype, device=value.device)
        grid = (triton.cdiv(queries, BLOCK), batch * heads)
        sizes = {"LEVELS": levels, "POINTS": points, "D": depth, "BLOCK": BLOCK}
        _forward[grid](value, places, weights, shapes, starts, out, queries, positions, heads, **sizes)
        ctx.save_for_backward(value, places, weights, shapes, starts)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx, grad):
        value, places, weights, shapes, starts = ctx.saved_tensors
        batch, positions, heads, _ = value.shape
        queries = weights.shape[1]
        grads = (
            torch.zeros(value.shape, device=value.device),
            torch.empty_like(places),
            torch.empty_like(weights),
        )
        grid = (triton.cdiv(queries, BLOCK), batch * heads)
        _backward[grid](
            value,
            places,
            weights,
            shapes,
            starts,
            grad.float().contiguous(),
            *grads,
            queries,
            positions,
            heads,
            **ctx.sizes,
        )
        return grads[0].to(value.dtype), grads[1], grads[2], None, None


class FusedSampling(nn.Module):
    """In place of the stock ``MultiScaleDeformableAttention``; same arguments, adds up in float32."""

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        out = _Sample.apply(value, sampling_locations, attention_weights, value_spatial_shapes, level_start_index)
        return out.flatten(2)


def difference(device: torch.device) -> float:
    """Largest relative difference of output and gradients to the stock class, on random input."""
    shapes = [(12, 16), (6, 8), (3, 4), (2, 2)]
    total = sum(h * w for h, w in shapes)
    sizes = torch.tensor(shapes, device=device)
    starts = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)[:-1]])
    results = []
    modules: tuple[nn.Module, ...] = (stock.MultiScaleDeformableAttention(), FusedSampling())
    for module in modules:
        torch.manual_seed(0)
        value = torch.randn(2, total, 8, 16, device=device, requires_grad=True)
        places = (torch.rand(2, 70, 8, 4, 2, 2, device=device) * 1.4 - 0.2).requires_grad_()
        weights = torch.randn(2, 70, 8, 4, 2, device=device).requires_grad_()
        out = module(value, sizes, shapes, starts, places, weights.softmax(-1), 64)
        (out * torch.randn(out.shape, device=device)).sum().backward()
        results.append([out.detach(), value.grad, places.grad, weights.grad])
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))


def fuse(model: nn.Module, device: torch.device) -> bool:
    """Replace the sampling of every deformable attention of ``model``; False where that is not possible."""
    if triton is None or device.type != "cuda":
        return False
    found = difference(device)
    if not found < 1e-4:
        raise RuntimeError(f"the fused sampling differs from the stock class by {found:.2g}; allowed is 1e-4")
    for module in model.modules():
        if isinstance(module, stock.GroundingDinoMultiscaleDeformableAttention):
            module.add_module("attn", FusedSampling())
    return True
