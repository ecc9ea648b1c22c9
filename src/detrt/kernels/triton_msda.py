"""The Triton kernel of multi-scale deformable attention. Imported only where it runs; the door to `triton`.

One program computes BLOCK_Q queries of one head. Values are read as vectors of 16 bytes along the channels;
coordinates, softmax and sums are FP32. All shapes but heads, head_dim, levels and points are run-time numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Adding and taking away 1.5 * 2**23 rounds to an integer with two plain additions; conversion instructions have a
# sixteenth of their throughput. The integer itself is the low bits of the sum.
ROUND = tl.constexpr(12582912.0)
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _sampled(
    value,  # of this batch and head
    places,  # locations or offsets of this batch and head
    weights,  # weights or logits of this batch and head
    references,  # of this batch
    q,
    q_ok,
    p,
    p_ok,
    level,
    height,
    width,
    start,
    count,
    top_logit,
    places_q,
    weights_q,
    references_q,
    references_l,
    value_t,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(BLOCK_Q, BLOCK_P, BLOCK_D) weighted samples and (BLOCK_Q, BLOCK_P) weights. level, height, width, start, count:
    numbers, or (1, BLOCK_P)."""
    ok = q_ok[:, None] & p_ok[None, :]
    at = places + q[:, None] * places_q + p[None, :] * 2
    x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    y = tl.load(at + 1, mask=ok, other=0.0).to(tl.float32)
    missing: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    weight = tl.load(weights + q[:, None] * weights_q + p[None, :], mask=ok, other=missing).to(tl.float32)
    if SOFTMAX:
        weight = tl.where(ok, tl.exp(weight - top_logit[:, None]), 0.0)
    w, h = width.to(tl.float32), height.to(tl.float32)
    if REFERENCE != 0:
        centre = references + q[:, None] * references_q + level * references_l
        cx = tl.load(centre, mask=ok, other=0.0).to(tl.float32)
        cy = tl.load(centre + 1, mask=ok, other=0.0).to(tl.float32)
        if REFERENCE == 4:
            share = scale / count.to(tl.float32)
            cx += x * share * tl.load(centre + 2, mask=ok, other=0.0).to(tl.float32)
            cy += y * share * tl.load(centre + 3, mask=ok, other=0.0).to(tl.float32)
            x, y = cx * w, cy * h
        else:
            x, y = cx * w + x, cy * h + y  # (c + x / w) * w
    else:
        x, y = x * w, y * h

    d = tl.arange(0, BLOCK_D)[None, None, :]
    channels = value + d
    if DISCRETE:
        ok = ok & (x == x) & (y == y)
        column = tl.minimum(tl.where(ok & (x > 0.0), x + 0.5, 0.0), w).to(tl.int32)
        row = tl.minimum(tl.where(ok & (y > 0.0), y + 0.5, 0.0), h).to(tl.int32)
        column, row = tl.minimum(column, width - 1), tl.minimum(row, height - 1)
        token = start + row * width + column
        if WIDE:
            token = token.to(tl.int64)
        inside = (ok & (column >= 0) & (row >= 0))[:, :, None]  # -1 in a level without cells
        if BLOCK_D != D:
            inside = inside & (d < D)
        sample = tl.load(channels + (token * value_t)[:, :, None], mask=inside, other=0.0).to(tl.float32)
        return sample * weight[:, :, None], weight

    x, y = x - 0.5, y - 0.5
    ok = ok & (x > -1.0) & (x < w) & (y > -1.0) & (y < h)  # false for what is not a number
    x, y = tl.where(ok, x, 0.0), tl.where(ok, y, 0.0)
    # x - 0.5 rounded is the cell to the left; on a cell it may be the one before, whose share is then zero.
    column, row = (x - 0.5) + ROUND, (y - 0.5) + ROUND
    right, low = x - (column - ROUND), y - (row - ROUND)  # shares of the cells to the right and below
    column = column.to(tl.int32, bitcast=True) - ROUND_BITS
    row = row.to(tl.int32, bitcast=True) - ROUND_BITS
    token = start + row * width + column
    step = width
    if WIDE:
        token, step = token.to(tl.int64), step.to(tl.int64)
    upper, under = weight * (1.0 - low), weight * low
    in_left, in_right = ok & (column >= 0), ok & (column < width - 1)
    in_upper, in_under = row >= 0, row < height - 1
    first = token * value_t
    below = first + step * value_t

    m00, m01 = (in_left & in_upper)[:, :, None], (in_right & in_upper)[:, :, None]
    m10, m11 = (in_left & in_under)[:, :, None], (in_right & in_under)[:, :, None]
    if BLOCK_D != D:
        m00, m01, m10, m11 = m00 & (d < D), m01 & (d < D), m10 & (d < D), m11 & (d < D)
    v00 = tl.load(channels + first[:, :, None], mask=m00, other=0.0)
    v01 = tl.load(channels + (first + value_t)[:, :, None], mask=m01, other=0.0)
    v10 = tl.load(channels + below[:, :, None], mask=m10, other=0.0)
    v11 = tl.load(channels + (below + value_t)[:, :, None], mask=m11, other=0.0)
    sample = v00.to(tl.float32) * (upper * (1.0 - right))[:, :, None]
    sample += v01.to(tl.float32) * (upper * right)[:, :, None]
    sample += v10.to(tl.float32) * (under * (1.0 - right))[:, :, None]
    sample += v11.to(tl.float32) * (under * right)[:, :, None]
    return sample, weight


@triton.jit
def _add_level(
    total,
    norm,
    value,
    places,
    weights,
    references,
    q,
    q_ok,
    level,
    height,
    width,
    start,
    top_logit,
    places_q,
    weights_q,
    references_q,
    references_l,
    value_t,
    scale,
    BEFORE: tl.constexpr,
    UPTO: tl.constexpr,
    BLOCK_P: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The points BEFORE to UPTO, all of one level, added to the sums."""
    count = tl.full((), UPTO - BEFORE, tl.int32)
    for block in tl.static_range((UPTO - BEFORE + BLOCK_P - 1) // BLOCK_P):
        p = BEFORE + block * BLOCK_P + tl.arange(0, BLOCK_P)
        sample, weight = _sampled(
            value, places, weights, references, q, q_ok, p, p < UPTO, level, height, width, start, count, top_logit,
            places_q, weights_q, references_q, references_l, value_t, scale,
            D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE,
        )  # fmt: skip
        total += sample
        norm += weight
    return total, norm


@triton.jit
def _level(shapes, index, start, tokens):
    """Height, width and cells of a level; height and width are 0, so that nothing is read, where it ends after the value."""
    h = tl.load(shapes + 2 * index).to(tl.int32)
    w = tl.load(shapes + 2 * index + 1).to(tl.int32)
    fits = start + h * w <= tokens
    return tl.where(fits, h, 0), tl.where(fits, w, 0), h * w


@triton.jit
def msda_kernel(
    value,
    shapes,
    references,
    places,
    weights,
    out,
    queries,
    tokens,
    blocks,
    value_b,
    value_t,
    places_b,
    places_q,
    weights_b,
    weights_q,
    references_b,
    references_q,
    references_l,
    scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
    POINTS: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[b, q, head] = sum over points of weight * bilinear sample; see `detrt.kernels.portable.reference`.

    BOUNDS: 12 bits a level, the number of points up to and with that level. BLOCK_ALL: the power of two from POINTS on.
    AT_ONCE: all points of a query side by side (few queries); otherwise BLOCK_P points of a level at a time (many).
    REFERENCE: 0 (places are locations), 2 or 4 (places are offsets from points or boxes). WIDE: 64-bit indices.
    """
    program = tl.program_id(0)
    q = (program % blocks) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    head = (program // blocks) % HEADS
    batch = (program // blocks // HEADS).to(tl.int64)
    q_ok = q < queries
    if WIDE:
        q = q.to(tl.int64)
    value += batch * value_b + head * D
    places += batch * places_b + head * (POINTS * 2)
    weights += batch * weights_b + head * POINTS
    references += batch * references_b

    every = tl.arange(0, BLOCK_ALL)
    top_logit = tl.zeros((BLOCK_Q,), tl.float32)
    if SOFTMAX:
        mask = q_ok[:, None] & (every < POINTS)[None, :]
        logits = tl.load(weights + q[:, None] * weights_q + every[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        top_logit = tl.where(q_ok, tl.max(logits, 1), 0.0)

    start = tl.zeros((), tl.int32)
    if AT_ONCE:
        level = tl.zeros((1, BLOCK_ALL), tl.int32)
        height = tl.zeros((1, BLOCK_ALL), tl.int32)
        width = tl.zeros((1, BLOCK_ALL), tl.int32)
        first = tl.zeros((1, BLOCK_ALL), tl.int32)
        count = tl.zeros((1, BLOCK_ALL), tl.int32)
        for index in tl.static_range(LEVELS):
            h, w, size = _level(shapes, index, start, tokens)
            here = ((every >= ((BOUNDS << 12 >> 12 * index) & 4095)) & (every < ((BOUNDS >> 12 * index) & 4095)))[None, :]
            level = tl.where(here, index, level)
            height = tl.where(here, h, height)
            width = tl.where(here, w, width)
            first = tl.where(here, start, first)
            count = tl.where(here, ((BOUNDS >> 12 * index) & 4095) - ((BOUNDS << 12 >> 12 * index) & 4095), count)
            start += size
        sample, weight = _sampled(
            value, places, weights, references, q, q_ok, every, every < POINTS, level, height, width, first, count,
            top_logit, places_q, weights_q, references_q, references_l, value_t, scale,
            D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE,
        )  # fmt: skip
        total = tl.sum(sample, 1)
        norm = tl.sum(weight, 1)
    else:
        total3 = tl.zeros((BLOCK_Q, BLOCK_P, BLOCK_D), tl.float32)
        norm2 = tl.zeros((BLOCK_Q, BLOCK_P), tl.float32)
        for index in tl.static_range(LEVELS):
            h, w, size = _level(shapes, index, start, tokens)
            total3, norm2 = _add_level(
                total3, norm2, value, places, weights, references, q, q_ok, index, h, w, start, top_logit,
                places_q, weights_q, references_q, references_l, value_t, scale,
                (BOUNDS << 12 >> 12 * index) & 4095, (BOUNDS >> 12 * index) & 4095, BLOCK_P,
                D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE,
            )  # fmt: skip
            start += size
        total = tl.sum(total3, 1)
        norm = tl.sum(norm2, 1)
    if SOFTMAX:
        total = total / norm[:, None]
    # Sizes that do not fit the value cannot raise an error from here; they must not pass for a result either.
    total = tl.where(start == tokens, total, float("nan"))

    d = tl.arange(0, BLOCK_D)
    row = (batch * queries + q) * (HEADS * D) + head * D
    mask = q_ok[:, None] & (d < D)[None, :]
    tl.store(out + row[:, None] + d[None, :], total, mask=mask)
