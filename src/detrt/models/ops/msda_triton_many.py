"""The Triton kernel of multi-scale deformable attention for many queries. Imported only where it runs.

It does what `triton_msda` does, for encoders, where every token is a query. A row of a program is a query and one of its
heads. What makes it faster there:

* Heads side by side. What a warp reads at once lies in different banks of the first-level cache when the cells belong to
  different heads; the cells of one head lie a multiple of 128 bytes apart, and half of them had to wait.
* No masks. The block of four cells is moved into the level, and a cell's share is one less its distance, if that is not
  negative: a cell that is missing weighs nothing, and its neighbour is read in its place.
* One thread works out where a sample lies and what its cells weigh, and hands it to the threads that read the cells: for
  that the places of BLOCK_P points of all rows are at least as many as threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .msda_triton import ROUND, ROUND_BITS, _pair


@triton.jit
def _share(distance):
    """What a cell gives: nothing from a distance of one on, or where the distance is not a number."""
    return tl.maximum(1.0 - tl.abs(distance), 0.0)


@triton.jit
def _corner(place, last):
    """The first of the two cells around a place, as a number and as the bits of that number plus ROUND. Compared as
    integers, so that even what is not a number gives a cell of the level. On a cell it may be the one before."""
    bits = ((place - 0.5) + ROUND).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(bits, ROUND_BITS), last)
    return bits.to(tl.float32, bitcast=True) - ROUND, bits


@triton.jit
def _add_sample(
    total, channels, value, right, under, token, w00, w01, w10, w11, VALUE_T: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Adds one sample of each row to total (ROWS, D); token and the weights are (ROWS,)."""
    wide: tl.constexpr = tl.int64 if WIDE else tl.int32
    at = (token.to(wide) * VALUE_T)[:, None] + channels
    v00 = tl.load(value + at)
    v01 = tl.load((value + right) + at)
    v10 = tl.load((value + under) + at)
    v11 = tl.load((value + (under + right)) + at)
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
    total, norm, channels, value, places, weights, references,
    places_at, weights_at, references_at, q_ok, top_logit, h, w, start, tokens, scale,
    BEFORE: tl.constexpr, UPTO: tl.constexpr, VALUE_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
    REFERENCE: tl.constexpr, SOFTMAX: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Adds the points BEFORE to UPTO, all of one level, BLOCK_P at a time."""
    missing: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    some = (h > 0) & (w > 0) & (start + h * w <= tokens)
    h, w = tl.where(some, h, 1), tl.where(some, w, 1)
    first = tl.where(some, start, 0) - ROUND_BITS * w - ROUND_BITS
    # A level that is empty or ends after the value is infinitely far away; so is a second row or column of one.
    half = tl.where(some, 0.5, float("inf"))
    next_x, next_y = tl.where(w > 1, 1.0, float("inf")), tl.where(h > 1, 1.0, float("inf"))
    right, under = tl.where(w > 1, VALUE_T, 0), tl.where(h > 1, w, 0)
    if WIDE:
        under = under.to(tl.int64)
    under = under * VALUE_T
    last_x, last_y = tl.maximum(w - 2, 0) + ROUND_BITS, tl.maximum(h - 2, 0) + ROUND_BITS
    fw, fh = w.to(tl.float32), h.to(tl.float32)
    cx, cy, cw, ch = 0.0, 0.0, 0.0, 0.0
    if REFERENCE != 0:
        centre, there = references + references_at[None, :], q_ok[None, :]
        cx = tl.load(centre, mask=there, other=0.0).to(tl.float32)
        cy = tl.load(centre + 1, mask=there, other=0.0).to(tl.float32)
        if REFERENCE == 4:
            share = scale / (UPTO - BEFORE)
            cw = share * tl.load(centre + 2, mask=there, other=0.0).to(tl.float32)
            ch = share * tl.load(centre + 3, mask=there, other=0.0).to(tl.float32)
    for step in tl.static_range((UPTO - BEFORE + BLOCK_P - 1) // BLOCK_P):
        p = BEFORE + step * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        ok = q_ok[None, :]
        if (UPTO - BEFORE) % BLOCK_P:
            ok = ok & (p < UPTO)
        if PAIRS:
            x, y = _pair(places, (places_at // 2)[None, :] + p, ok)
        else:
            x = tl.load(places + places_at[None, :] + p * 2, mask=ok, other=0.0).to(tl.float32)
            y = tl.load(places + places_at[None, :] + p * 2 + 1, mask=ok, other=0.0).to(tl.float32)
        weight = tl.load(weights + weights_at[None, :] + p, mask=ok, other=missing).to(tl.float32)
        if SOFTMAX:
            weight = tl.exp(weight - top_logit[None, :])
            norm += weight
        if REFERENCE == 4:
            x, y = (cx + x * cw) * fw - half, (cy + y * ch) * fh - half
        elif REFERENCE == 2:
            x, y = (cx * fw - half) + x, (cy * fh - half) + y
        else:
            x, y = x * fw - half, y * fh - half
        column, column_bits = _corner(x, last_x)
        line, line_bits = _corner(y, last_y)
        x -= column
        y -= line
        token = line_bits * w + column_bits + first
        left, far = _share(x), _share(x - next_x)
        near, low = _share(y) * weight, _share(y - next_y) * weight
        w00, w01, w10, w11 = left * near, far * near, left * low, far * low
        if BLOCK_P == 1:
            total = _add_sample(
                total, channels, value, right, under, tl.reshape(token, (ROWS,)), tl.reshape(w00, (ROWS,)),
                tl.reshape(w01, (ROWS,)), tl.reshape(w10, (ROWS,)), tl.reshape(w11, (ROWS,)), VALUE_T, WIDE,
            )  # fmt: skip
        elif BLOCK_P == 2:
            n0, n1 = _halves(token)
            a0, a1 = _halves(w00)
            b0, b1 = _halves(w01)
            c0, c1 = _halves(w10)
            d0, d1 = _halves(w11)
            total = _add_sample(total, channels, value, right, under, n0, a0, b0, c0, d0, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, under, n1, a1, b1, c1, d1, VALUE_T, WIDE)
        else:
            n0, n1, n2, n3 = _quarters(token, ROWS)
            a0, a1, a2, a3 = _quarters(w00, ROWS)
            b0, b1, b2, b3 = _quarters(w01, ROWS)
            c0, c1, c2, c3 = _quarters(w10, ROWS)
            d0, d1, d2, d3 = _quarters(w11, ROWS)
            total = _add_sample(total, channels, value, right, under, n0, a0, b0, c0, d0, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, under, n1, a1, b1, c1, d1, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, under, n2, a2, b2, c2, d2, VALUE_T, WIDE)
            total = _add_sample(total, channels, value, right, under, n3, a3, b3, c3, d3, VALUE_T, WIDE)
    return total, norm


@triton.jit
def msda_many_kernel(
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
    places_b,
    places_q,
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
    BESIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[b, q, head] as `triton_msda.msda_kernel` computes it, whose arguments have the same names here.

    D is a power of two. BESIDE: heads of a program, side by side; they divide HEADS. BLOCK_P: 1, 2 or 4.
    """
    ROWS: tl.constexpr = BLOCK_Q * BESIDE
    scale = tl.cast(scale, tl.float32)  # PyTorch's compiler hands over Python's numbers as FP64
    program = tl.program_id(0)
    heads, block = (program // blocks) % (HEADS // BESIDE) * BESIDE, program % blocks
    batch = (program // blocks // (HEADS // BESIDE)).to(tl.int64)
    row = tl.arange(0, ROWS)
    head = row % BESIDE
    q = block * BLOCK_Q + row // BESIDE
    q_ok = q < queries
    if WIDE:
        q = q.to(tl.int64)
    value += batch * value_b + heads * D
    places += batch * places_b + heads * (POINTS * 2)
    weights += batch * weights_b + heads * POINTS
    references += batch * references_b
    places_at, weights_at = q * places_q + head * (2 * POINTS), q * weights_q + head * POINTS

    channels = (head * D)[:, None] + tl.arange(0, D)[None, :]

    top_logit = tl.zeros((ROWS,), tl.float32)
    if SOFTMAX:
        every = tl.arange(0, BLOCK_ALL)
        mask = q_ok[:, None] & (every < POINTS)[None, :]
        logits = tl.load(weights + weights_at[:, None] + every[None, :], mask=mask, other=float("-inf")).to(tl.float32)
        top_logit = tl.where(q_ok, tl.max(logits, 1), 0.0)

    norm = tl.zeros((BLOCK_P, ROWS), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    start = tl.zeros((), tl.int32)
    for level in tl.static_range(LEVELS):
        h = tl.load(shapes + 2 * level).to(tl.int32)
        w = tl.load(shapes + 2 * level + 1).to(tl.int32)
        total, norm = _add_level(
            total, norm, channels, value, places, weights, references + level * references_l,
            places_at, weights_at, q * references_q, q_ok, top_logit, h, w, start, tokens, scale,
            (BOUNDS << 12 >> 12 * level) & 4095, (BOUNDS >> 12 * level) & 4095,
            VALUE_T, ROWS, BLOCK_P, REFERENCE, SOFTMAX, WIDE, PAIRS,
        )  # fmt: skip
        start += h * w
    # Sizes that do not fit the value cannot raise an error from here; they must not pass for a result either.
    factor = tl.where(start == tokens, 1.0, float("nan")) + tl.zeros((ROWS,), tl.float32)
    if SOFTMAX:
        factor = factor / tl.sum(norm, 0)
    out += batch * queries * (HEADS * D) + heads * D
    tl.store(out + (q.to(tl.int64) * (HEADS * D))[:, None] + channels, total * factor[:, None], mask=q_ok[:, None])
