"""The Triton kernel that ranks scores. Imported only where it runs; a door to `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _bounded(scores):
    """Finite, so that the sign of a difference tells the order; zeros lose their sign."""
    scores = tl.where(scores == scores, scores, LARGEST)
    return tl.minimum(tl.maximum(scores, -LARGEST), LARGEST) + 0.0


@triton.jit
def _next(scores):
    """The number after a bounded score."""
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + 1
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def rank_kernel(
    scores,
    places,
    values,
    indices,
    N: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The K best of each part of a row, in order: a score's place is how many are before it, counted.

    scores: (rows, N); a part is PART of them, the last one the rest. One program counts for BLOCK scores, WIDE others at a time, a
    multiple of BLOCK. values, indices: (rows, PARTS * K), where the part begins anew at every K. NAMED: places (rows, N) holds what to
    write as indices. Of equal scores the first comes first.
    """
    blocks: tl.constexpr = (PART + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block, part, row = program % blocks, (program // blocks) % PARTS, program // (blocks * PARTS)
    scores += row.to(tl.int64) * N
    begin = part * PART
    end = tl.minimum(begin + PART, N)
    i = begin + block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scores + i, mask=i < end, other=float("-inf"))
    mine = _bounded(own)[:, None]
    before = tl.zeros((BLOCK, WIDE), tl.uint32)
    here = block * BLOCK // WIDE
    for step in range((PART + WIDE - 1) // WIDE):
        j = begin + step * WIDE + tl.arange(0, WIDE)
        other = _bounded(tl.load(scores + j, mask=j < end, other=float("-inf")))
        # Equal ones that are wholly before come first, too.
        other = tl.where(step < here, _next(other), other)
        # The sign bit of a difference is counted by one instruction, a comparison by three.
        before += (mine - other[None, :]).to(tl.uint32, bitcast=True) >> 31
    j = begin + here * WIDE + tl.arange(0, WIDE)
    other = _bounded(tl.load(scores + j, mask=j < end, other=float("-inf")))
    before += ((other[None, :] == mine) & (j[None, :] < i[:, None])).to(tl.uint32)
    rank = tl.sum(before, 1).to(tl.int32)
    chosen = (i < end) & (rank < K)
    at = row.to(tl.int64) * (PARTS * K) + part * K + rank
    if NAMED:
        name = tl.load(places + row.to(tl.int64) * N + i, mask=chosen, other=0)
    else:
        name = i.to(tl.int64)
    tl.store(values + at, own, mask=chosen)
    tl.store(indices + at, name, mask=chosen)


def ranked(scores, places, k: int, part: int, launch=None, block: int = 16, wide: int = 512, warps: int = 4):
    """Run the kernel: the k best of every `part` scores of each row, (values, indices) of (rows, parts * k).

    scores: (rows, n) FP32, contiguous; every part has k of them at least. places: (rows, n) int64, or None for the scores' own.
    launch: what wraps the kernel for PyTorch's compiler.
    """
    rows, n = scores.shape
    parts = -(-n // part)
    values = scores.new_empty(rows, parts * k)
    indices = scores.new_empty(rows, parts * k, dtype=torch.int64)
    kernel = rank_kernel if launch is None else launch(rank_kernel)
    kernel[(-(-part // block) * parts * rows,)](
        scores,
        indices if places is None else places,
        values,
        indices,
        N=n,
        PART=part,
        PARTS=parts,
        K=k,
        NAMED=places is not None,
        BLOCK=block,
        WIDE=wide,
        num_warps=warps,
    )
    return values, indices
