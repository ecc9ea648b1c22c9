"""The Triton kernel of multi-scale deformable attention for many queries; `msda_launch.py` launches it.

It computes the same as `msda_triton`, for encoders, where every token is a query. A row of a program is a query and one of its
heads. It is faster there for three reasons:

* Several heads per program. The reads of a warp fall into different banks of the L1 cache if the pixels belong to different heads;
  the pixels of one head are a multiple of 128 bytes apart, which causes bank conflicts.
* No masks. The block of four pixels is moved into the level, and the weight of a pixel is one minus its distance, at least zero: a
  pixel outside has weight zero, and its neighbour is read instead.
* One thread computes the location and weights of a sample and passes them to the threads that read the pixels. This needs at least
  as many (point, row) pairs of BLOCK_P points as threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .msda_triton import ROUND, ROUND_BITS, _pair


@triton.jit
def _pixel_weight(distance):
    """Weight of a pixel by its distance: zero from a distance of one on, and for NaN."""
    return tl.maximum(1.0 - tl.abs(distance), 0.0)


@triton.jit
def _corner(coordinate, last):
    """The first of the two pixels around a coordinate, as a number and as the bits of that number plus ROUND. Compared as
    integers, so that even NaN gives a pixel of the level. Exactly on a pixel it may be the one before."""
    bits = ((coordinate - 0.5) + ROUND).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, ROUND_BITS), last)
    return bits.to(tl.float32, bitcast=True) - ROUND, bits


@triton.jit
def _add_sample(
    total, channels, value, right, lower, token, w00, w01, w10, w11, VALUE_T: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Add one sample of each row to total (ROWS, D); token and the weights are (ROWS,)."""
    wide: tl.constexpr = tl.int64 if WIDE else tl.int32
    offsets = (token.to(wide) * VALUE_T)[:, None] + channels
    v00 = tl.load(value + offsets)
    v01 = tl.load((value + right) + offsets)
    v10 = tl.load((value + lower) + offsets)
    v11 = tl.load((value + (lower + right)) + offsets)
    total += v00.to(tl.float32) * w00[:, None]
    total += v01.to(tl.float32) * w01[:, None]
    total += v10.to(tl.float32) * w10[:, None]
    total += v11.to(tl.float32) * w11[:, None]
    return total


@triton.jit
def _halves(pairs):
    """(2, ROWS) as two of (ROWS,)."""
    return tl.split(tl.trans(pairs))


@triton.jit
def _quarters(four, ROWS: tl.constexpr):
    """(4, ROWS) as four of (ROWS,), in an order of their own."""
    even, odd = tl.split(tl.reshape(tl.trans(four), (ROWS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _add_level(
    total, norm, channels, value, locations, weights, references,
    locations_at, weights_at, references_at, q_ok, max_logit, h, w, start, tokens, scale,
    BEFORE: tl.constexpr, UPTO: tl.constexpr, VALUE_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    REFERENCE: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the points BEFORE to UPTO, all of one level, BLOCK_P at a time."""
    missing: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    valid = (h > 0) & (w > 0) & (start + h * w <= tokens)
    h, w = tl.where(valid, h, 1), tl.where(valid, w, 1)
    first = tl.where(valid, start, 0) - ROUND_BITS * w - ROUND_BITS
    # An empty level, or one that ends after the value, is infinitely far away; so is the second row or column of a level of one.
    half = tl.where(valid, 0.5, float("inf"))
    next_x, next_y = tl.where(w > 1, 1.0, float("inf")), tl.where(h > 1, 1.0, float("inf"))
    right, lower = tl.where(w > 1, VALUE_T, 0), tl.where(h > 1, w, 0)
    if WIDE:
        lower = lower.to(tl.int64)
    lower = lower * VALUE_T
    last_x, last_y = tl.maximum(w - 2, 0) + ROUND_BITS, tl.maximum(h - 2, 0) + ROUND_BITS
    fw, fh = w.to(tl.float32), h.to(tl.float32)
    cx, cy, cw, ch = 0.0, 0.0, 0.0, 0.0
    if REFERENCE != 0:
        centre, in_queries = references + references_at[None, :], q_ok[None, :]
        cx = tl.load(centre, mask=in_queries, other=0.0).to(tl.float32)
        cy = tl.load(centre + 1, mask=in_queries, other=0.0).to(tl.float32)
        if REFERENCE == 4:
            fraction = scale / (UPTO - BEFORE)
            cw = fraction * tl.load(centre + 2, mask=in_queries, other=0.0).to(tl.float32)
            ch = fraction * tl.load(centre + 3, mask=in_queries, other=0.0).to(tl.float32)
    for step in tl.static_range((UPTO - BEFORE + BLOCK_P - 1) // BLOCK_P):
        p = BEFORE + step * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        ok = q_ok[None, :]
        if (UPTO - BEFORE) % BLOCK_P:
            ok = ok & (p < UPTO)
        if PAIRS:
            x, y = _pair(locations, (locations_at // 2)[None, :] + p, ok)
        else:
            x = tl.load(locations + locations_at[None, :] + p * 2, mask=ok, other=0.0).to(tl.float32)
            y = tl.load(locations + locations_at[None, :] + p * 2 + 1, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(weights + weights_at[None, :] + p, mask=ok, other=missing).to(tl.float32)
        if SOFTMAX:
            weight = tl.exp(weight - max_logit[None, :])
            norm += weight
        if REFERENCE == 4:
            x, y = (cx + x * cw) * fw - half, (cy + y * ch) * fh - half
        elif REFERENCE == 2:
            x, y = (cx * fw - half) + x, (cy * fh - half) + y
        else:
            x, y = x * fw - half, y * fh - half
        column, column_bits = _corner(x, last_x)
        row, row_bits = _corner(y, last_y)
        x -= column
        y -= row
        token = row_bits * w + column_bits + first
        left_weight, right_weight = _pixel_weight(x), _pixel_weight(x - next_x)
        upper_weight, lower_weight = _pixel_weight(y) * weight, _pixel_weight(y - next_y) * weight
        w00, w01, w10, w11 = (
            left_weight * upper_weight,
            right_weight * upper_weight,
            left_weight * lower_weight,
            right_weight * lower_weight,
        )
        if BLOCK_P == 1:
            total = _add_sample(
                total, channels, value, right, lower, tl.reshape(token, (ROWS,)), tl.reshape(w00, (ROWS,)),
                tl.reshape(w01, (ROWS,)), tl.reshape(w10, (ROWS,)), tl.reshape(w11, (ROWS,)), VALUE_T, WIDE,
            )  # fmt: skip
        elif BLOCK_P == 2:
            n0, n1 = _halves(token)
            a0, a1 = _halves(w00)
            b0, b1 = _halves(w01)
            c0, c1 = _halves(w10)
            d0, d1 = _halves(w11)
            total = _add_sample(total, channels, value, right, lower, n0, a0, b0, c0, d0, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, lower, n1, a1, b1, c1, d1, VALUE_T, WIDE)
        else:
            n0, n1, n2, n3 = _quarters(token, ROWS)
            a0, a1, a2, a3 = _quarters(w00, ROWS)
            b0, b1, b2, b3 = _quarters(w01, ROWS)
            c0, c1, c2, c3 = _quarters(w10, ROWS)
            d0, d1, d2, d3 = _quarters(w11, ROWS)
            total = _add_sample(total, channels, value, right, lower, n0, a0, b0, c0, d0, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, lower, n1, a1, b1, c1, d1, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, lower, n2, a2, b2, c2, d2, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, lower, n3, a3, b3, c3, d3, VALUE_T, WIDE)
    return total, norm


@triton.jit
def msda_many_queries_kernel(
    value,
    shapes,
    references,
    locations,
    weights,
    out,
    queries,
    tokens,
    blocks,
    value_b,
    locations_b,
    locations_q,
    weights_b,
    weights_q,
    references_b,
    references_q,
    references_l,
    scale,
    HEADS: tl.constexpr,
    VALUE_T: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    POINTS: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[b, q, head] as in `msda_triton.msda_kernel`, with the same argument names.

    D is a power of two. HEADS_PER_PROGRAM: a divisor of HEADS. BLOCK_P: 1, 2 or 4.
    """
    ROWS: tl.constexpr = BLOCK_Q * HEADS_PER_PROGRAM
    scale = tl.cast(scale, tl.float32)  # PyTorch's compiler passes Python floats as FP64
    program = tl.program_id(0)
    heads, block = (program // blocks) % (HEADS // HEADS_PER_PROGRAM) * HEADS_PER_PROGRAM, program % blocks
    batch = (program // blocks // (HEADS // HEADS_PER_PROGRAM)).to(tl.int64)
    row = tl.arange(0, ROWS)
    head = row % HEADS_PER_PROGRAM
    q = block * BLOCK_Q + row // HEADS_PER_PROGRAM
    q_ok = q < queries
    if WIDE:
        q = q.to(tl.int64)
    value += batch * value_b + heads * D
    locations += batch * locations_b + heads * (POINTS * 2)
    weights += batch * weights_b + heads * POINTS
    references += batch * references_b
    locations_at, weights_at = q * locations_q + head * (2 * POINTS), q * weights_q + head * POINTS

    channels = (head * D)[:, None] + tl.arange(0, D)[None, :]

    max_logit = tl.zeros((ROWS,), tl.float32)
    if SOFTMAX:
        all_points = tl.arange(0, BLOCK_ALL)
        mask = q_ok[:, None] & (all_points < POINTS)[None, :]
        logits = tl.load(weights + weights_at[:, None] + all_points[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        max_logit = tl.where(q_ok, tl.max(logits, 1), 0.0)

    norm = tl.zeros((BLOCK_P, ROWS), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    start = tl.zeros((), tl.int32)
    for level in tl.static_range(LEVELS):
        h = tl.load(shapes + 2 * level).to(tl.int32)
        w = tl.load(shapes + 2 * level + 1).to(tl.int32)
        total, norm = _add_level(
            total, norm, channels, value, locations, weights, references + level * references_l,
            locations_at, weights_at, q * references_q, q_ok, max_logit, h, w, start, tokens, scale,
            (BOUNDS << 12 >> 12 * level) & 4095, (BOUNDS >> 12 * level) & 4095,
            VALUE_T, ROWS, BLOCK_P, REFERENCE, SOFTMAX, WIDE, PAIRS,
        )  # fmt: skip
        start += h * w
    # A kernel cannot raise for sizes that do not match the value, so the result is NaN.
    factor = tl.where(start == tokens, 1.0, float("nan")) + tl.zeros((ROWS,), tl.float32)
    if SOFTMAX:
        factor = factor / tl.sum(norm, 0)
    out += batch * queries * (HEADS * D) + heads * D
    tl.store(out + (q.to(tl.int64) * (HEADS * D))[:, None] + channels, total * factor[:, None], mask=q_ok[:, None])
