"""A plain Triton kernel of deformable attention, as one writes it in an afternoon; a baseline, not detrt's kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def plain_kernel(value, shapes, places, weights, out, queries, tokens, HEADS: tl.constexpr, D: tl.constexpr, L: tl.constexpr, POINTS: tl.constexpr, TOTAL: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """8 queries of one head a program, 16-bit values, FP32 coordinates and sums. POINTS: 8 bits per level."""
    q = tl.program_id(0) * B + tl.arange(0, B)
    head, batch = tl.program_id(1), tl.program_id(2)
    ok, d = q < queries, tl.arange(0, D)
    total = tl.zeros((B, D), tl.float32)
    start = batch * tokens
    done = 0
    for level in tl.static_range(L):
        h, w = tl.load(shapes + 2 * level).to(tl.int32), tl.load(shapes + 2 * level + 1).to(tl.int32)
        for point in tl.static_range((POINTS >> (8 * level)) & 255):
            s = ((batch * queries + q) * HEADS + head) * TOTAL + done + point
            x = tl.load(places + 2 * s, mask=ok, other=0.0).to(tl.float32) * w - 0.5
            y = tl.load(places + 2 * s + 1, mask=ok, other=0.0).to(tl.float32) * h - 0.5
            a = tl.load(weights + s, mask=ok, other=0.0).to(tl.float32)
            x0, y0 = tl.floor(x), tl.floor(y)
            for dy in tl.static_range(2):
                for dx in tl.static_range(2):
                    ix, iy = x0.to(tl.int32) + dx, y0.to(tl.int32) + dy
                    share = a * (1 - tl.abs(x - x0 - dx)) * (1 - tl.abs(y - y0 - dy))
                    inside = ok & (ix >= 0) & (ix < w) & (iy >= 0) & (iy < h)
                    at = ((start + iy * w + ix) * HEADS + head) * D
                    v = tl.load(value + at[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
                    total += v * share[:, None]
        start += h * w
        done += (POINTS >> (8 * level)) & 255
    tl.store(out + (((batch * queries + q) * HEADS + head) * D)[:, None] + d[None, :], total, mask=ok[:, None])


def plain_msda(value, shapes, places, weights, points):
    """value (batch, tokens, heads, dim), places (batch, queries, heads, points, 2), weights (batch, queries, heads, points)."""
    batch, tokens, heads, dim = value.shape
    queries = places.shape[1]
    out = torch.empty(batch, queries, heads * dim, dtype=value.dtype, device=value.device)
    packed = sum(count << (8 * level) for level, count in enumerate(points))
    plain_kernel[(triton.cdiv(queries, 8), heads, batch)](
        value, shapes, places, weights, out, queries, tokens,
        HEADS=heads, D=dim, L=len(points), POINTS=packed, TOTAL=sum(points), B=8, num_warps=1,
    )  # fmt: skip
    return out
