"""The Triton kernels that rank scores and pack candidates; `top_k.py` launches them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _clamp(scores):
    """Finite scores, so that the sign of a difference gives the order; zeros lose their sign."""
    scores = tl.where(scores == scores, scores, LARGEST)
    return tl.minimum(tl.maximum(scores, -LARGEST), LARGEST) + 0.0


@triton.jit
def _next(scores):
    """The next larger number after a clamped score."""
    bits = scores.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) + 1
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def rank_kernel(
    scores,
    names,
    values,
    indices,
    N: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    K: tl.constexpr,
    HAS_NAMES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stable top-k of each chunk of a row: the rank of a score is the number of scores before it.

    scores: (rows, N), in chunks of CHUNK scores; the last chunk may be shorter. One program ranks BLOCK scores against WIDE others
    at a time, a multiple of BLOCK. values, indices: (rows, CHUNKS * K), K results for each chunk. HAS_NAMES: names (rows, N) holds
    the indices to write.
    """
    blocks: tl.constexpr = (CHUNK + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block, chunk, row = program % blocks, (program // blocks) % CHUNKS, program // (blocks * CHUNKS)
    scores += row.to(tl.int64) * N
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, N)
    i = begin + block * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(scores + i, mask=i < end, other=float("-inf"))
    mine = _clamp(own)[:, None]
    before = tl.zeros((BLOCK, WIDE), tl.uint32)
    here = block * BLOCK // WIDE
    for step in range((CHUNK + WIDE - 1) // WIDE):
        j = begin + step * WIDE + tl.arange(0, WIDE)
        other = _clamp(tl.load(scores + j, mask=j < end, other=float("-inf")))
        # Equal scores in earlier blocks come first, too.
        other = tl.where(step < here, _next(other), other)
        # The sign bit of a difference is counted by one instruction, a comparison by three.
        before += (mine - other[None, :]).to(tl.uint32, bitcast=True) >> 31
    j = begin + here * WIDE + tl.arange(0, WIDE)
    other = _clamp(tl.load(scores + j, mask=j < end, other=float("-inf")))
    before += ((other[None, :] == mine) & (j[None, :] < i[:, None])).to(tl.uint32)
    rank = tl.sum(before, 1).to(tl.int32)
    chosen = (i < end) & (rank < K)
    at = row.to(tl.int64) * (CHUNKS * K) + chunk * K + rank
    if HAS_NAMES:
        name = tl.load(names + row.to(tl.int64) * N + i, mask=chosen, other=0)
    else:
        name = i.to(tl.int64)
    tl.store(values + at, own, mask=chosen)
    tl.store(indices + at, name, mask=chosen)


def rank_scores(scores, names, k: int, chunk: int, launch=None, block: int = 16, wide: int = 512, warps: int = 4):
    """Run the kernel: (values, indices), both (rows, chunks * k), the top-k of each chunk.

    scores: (rows, n) FP32, contiguous; every chunk has at least k. names: (rows, n) int64 indices to return, or None for the
    positions of the scores. launch: wrapper of the kernel for PyTorch's compiler.
    """
    rows, n = scores.shape
    chunks = -(-n // chunk)
    values = scores.new_empty(rows, chunks * k)
    indices = scores.new_empty(rows, chunks * k, dtype=torch.int64)
    kernel = rank_kernel if launch is None else launch(rank_kernel)
    kernel[(-(-chunk // block) * chunks * rows,)](
        scores,
        indices if names is None else names,
        values,
        indices,
        N=n,
        CHUNK=chunk,
        CHUNKS=chunks,
        K=k,
        HAS_NAMES=names is not None,
        BLOCK=block,
        WIDE=wide,
        num_warps=warps,
    )
    return values, indices


@triton.jit
def pack_kernel(
    values, flat, logits, boxes, rows,
    N: tl.constexpr, QUERIES: tl.constexpr, CLASSES: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes the candidates of an image, and which outputs have values that they must not have. N: logits of an image."""
    image = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    rows += image * (K + 1) * COLUMNS
    boxes += image * QUERIES * 4
    for start in range(0, K, BLOCK):
        i = start + lanes
        inside = i < K
        index = tl.load(flat + image * K + i, inside, 0)
        row, box = rows + i * COLUMNS, boxes + index // CLASSES * 4
        tl.store(row, tl.load(values + image * K + i, inside, 0), inside)
        tl.store(row + 1, index.to(tl.float32), inside)
        for side in tl.static_range(4):
            tl.store(row + 2 + side, tl.load(box + side, inside, 0), inside)
    bad_logits = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        value = tl.load(logits + image * N + start + lanes, start + lanes < N, 0)
        bad_logits |= ((value != value) | (value == float("inf"))).to(tl.int32)
    bad_boxes = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, QUERIES * 4, BLOCK):
        value = tl.load(boxes + start + lanes, start + lanes < QUERIES * 4, 0)
        bad_boxes |= ((value != value) | (tl.abs(value) == float("inf"))).to(tl.int32)
    flags = tl.where(lanes == 0, tl.max(bad_logits, 0), tl.where(lanes == 1, tl.max(bad_boxes, 0), 0))
    tl.store(rows + K * COLUMNS + lanes, flags.to(tl.float32), lanes < COLUMNS)


def pack_candidates(values, flat, logits, boxes, classes: int, columns: int, block: int = 2048, warps: int = 8):
    """Run the kernel: (n, k + 1, columns) float32, see `top_k.select`.

    values, flat: (n, k) FP32 and int64. logits: (n, queries, ...) and boxes: (n, queries, 4) FP32. All are contiguous.
    """
    images, k = values.shape
    rows = values.new_empty(images, k + 1, columns)
    pack_kernel[(images,)](
        values,
        flat,
        logits,
        boxes,
        rows,
        N=logits[0].numel(),
        QUERIES=boxes.shape[1],
        CLASSES=classes,
        K=k,
        COLUMNS=columns,
        BLOCK=block,
        num_warps=warps,
    )
    return rows
