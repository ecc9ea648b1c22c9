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
def _pair(places, index, mask):
    """x and y, which lie side by side, in one read: half the requests, and requests are what many queries wait for."""
    if places.dtype.element_ty == tl.float32:
        both = tl.load(places.to(tl.pointer_type(tl.int64)) + index, mask=mask, other=0)
        return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        half: tl.constexpr = places.dtype.element_ty
        pair = tl.load(places.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
        left, upper = pair.to(tl.int16).to(half, bitcast=True), (pair >> 16).to(tl.int16).to(half, bitcast=True)
        return left.to(tl.float32), upper.to(tl.float32)


@triton.jit
def _add(
    total,
    norm,
    value,  # of this batch and head
    places,  # locations or offsets of this batch and head
    weights,  # weights or logits of this batch and head
    cx,
    cy,
    cw,
    ch,
    q,
    q_ok,
    p,
    p_ok,
    height,
    width,
    start,
    top_logit,
    places_q,
    weights_q,
    VALUE_T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Adds the points p of the queries q to total (BLOCK_Q, BLOCK_P, BLOCK_D), and their weights to norm (BLOCK_Q, BLOCK_P).
    cx, cy, cw, ch: (BLOCK_Q, 1) or (BLOCK_Q, BLOCK_P); height, width, start: numbers or (1, BLOCK_P)."""
    ok = q_ok[:, None] & p_ok[None, :]
    if PAIRS:
        x, y = _pair(places, q[:, None] * (places_q // 2) + p[None, :], ok)
    else:
        at = places + q[:, None] * places_q + p[None, :] * 2
        x = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        y = tl.load(at + 1, mask=ok, other=0.0).to(tl.float32)
    missing: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    weight = tl.load(weights + q[:, None] * weights_q + p[None, :], mask=ok, other=missing).to(tl.float32)
    if SOFTMAX:
        weight = tl.exp(weight - top_logit[:, None])
        norm += weight
    w, h = width.to(tl.float32), height.to(tl.float32)
    near_x, near_y = x, y  # from the reference to the sample, in cells; without a reference the location
    if REFERENCE == 4:
        near_x, near_y = x * (cw * w), y * (ch * h)
        x, y = (cx + x * cw) * w, (cy + y * ch) * h
    elif REFERENCE == 2:
        x, y = cx * w + x, cy * h + y  # (cx + x / w) * w
    else:
        x, y = x * w, y * h

    d = tl.arange(0, BLOCK_D)[None, None, :]
    channels = value + d
    wide: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns, rows = width.to(tl.uint32), height.to(tl.uint32)
    if DISCRETE:
        column = tl.minimum(tl.maximum(x + 0.5, 0.0), w).to(tl.int32)
        row = tl.minimum(tl.maximum(y + 0.5, 0.0), h).to(tl.int32)
        column, row = tl.minimum(column, width - 1), tl.minimum(row, height - 1)
        token = (start + row * width + column).to(wide)
        # -1 in a level without cells
        inside = ((x == x) & (y == y) & (column.to(tl.uint32) < columns) & (row.to(tl.uint32) < rows))[:, :, None]
        if BLOCK_D != D:
            inside = inside & (d < D)
        cell = tl.load(channels + (token * VALUE_T)[:, :, None], mask=inside, other=0.0)
        return total + cell.to(tl.float32) * weight[:, :, None], norm

    # One cell and more outside is as far as it gets; what is not a number is there too, since the larger of it and a
    # number is the number.
    x = tl.minimum(tl.maximum(x - 0.5, -2.0), w + 1.0)
    y = tl.minimum(tl.maximum(y - 0.5, -2.0), h + 1.0)
    # x - 0.5 rounded is the cell to the left; on a cell it may be the one before, whose share is then zero.
    column, row = (x - 0.5) + ROUND, (y - 0.5) + ROUND
    # Shares of the cells to the right and below.
    if value.dtype.element_ty == tl.float32:
        # x is known to a part of its own size, which on a level of 500 cells is more than FP32's sums lose. So the shares
        # are worked out once more, with one rounding each after the large numbers have cancelled.
        left_x, upper_y = 0.5 + (column - ROUND), 0.5 + (row - ROUND)
        if REFERENCE == 0:
            right, low = tl.fma(near_x, w, -left_x), tl.fma(near_y, h, -upper_y)
        else:
            right, low = tl.fma(cx, w, -left_x) + near_x, tl.fma(cy, h, -upper_y) + near_y
        right, low = tl.minimum(tl.maximum(right, 0.0), 1.0), tl.minimum(tl.maximum(low, 0.0), 1.0)
    else:
        right, low = x - (column - ROUND), y - (row - ROUND)
    column = column.to(tl.int32, bitcast=True) - ROUND_BITS
    row = row.to(tl.int32, bitcast=True) - ROUND_BITS
    in_left, in_right = column.to(tl.uint32) < columns, (column + 1).to(tl.uint32) < columns
    in_upper, in_under = row.to(tl.uint32) < rows, (row + 1).to(tl.uint32) < rows
    under = weight * low
    upper = weight - under
    w11, w01 = under * right, upper * right
    w10, w00 = under - w11, upper - w01
    here = (start + row * width + column).to(wide) * VALUE_T
    below = here + width.to(wide) * VALUE_T

    m00, m01 = (in_left & in_upper)[:, :, None], (in_right & in_upper)[:, :, None]
    m10, m11 = (in_left & in_under)[:, :, None], (in_right & in_under)[:, :, None]
    if BLOCK_D != D:
        m00, m01, m10, m11 = m00 & (d < D), m01 & (d < D), m10 & (d < D), m11 & (d < D)
    upper_cells, under_cells = channels + here[:, :, None], channels + below[:, :, None]
    v00 = tl.load(upper_cells, mask=m00, other=0.0)
    v01 = tl.load(upper_cells + VALUE_T, mask=m01, other=0.0)
    v10 = tl.load(under_cells, mask=m10, other=0.0)
    v11 = tl.load(under_cells + VALUE_T, mask=m11, other=0.0)
    total += v00.to(tl.float32) * w00[:, :, None]
    total += v01.to(tl.float32) * w01[:, :, None]
    total += v10.to(tl.float32) * w10[:, :, None]
    total += v11.to(tl.float32) * w11[:, :, None]
    return total, norm


@triton.jit
def _centres(references, q, ok, level, share, references_q, references_l, REFERENCE: tl.constexpr):
    """Centre of each query's reference in 0..1, and what an offset of one is of its width and height."""
    cx, cy, cw, ch = 0.0, 0.0, 0.0, 0.0
    if REFERENCE != 0:
        at = references + q[:, None] * references_q + level * references_l
        cx = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        cy = tl.load(at + 1, mask=ok, other=0.0).to(tl.float32)
        if REFERENCE == 4:
            cw = share * tl.load(at + 2, mask=ok, other=0.0).to(tl.float32)
            ch = share * tl.load(at + 3, mask=ok, other=0.0).to(tl.float32)
    return cx, cy, cw, ch


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
    scale,
    BEFORE: tl.constexpr,
    UPTO: tl.constexpr,
    BLOCK_P: tl.constexpr,
    VALUE_T: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The points BEFORE to UPTO, all of one level, added to the sums."""
    share = scale / (UPTO - BEFORE)
    cx, cy, cw, ch = _centres(references, q, q_ok[:, None], level, share, references_q, references_l, REFERENCE)
    for block in tl.static_range((UPTO - BEFORE + BLOCK_P - 1) // BLOCK_P):
        p = BEFORE + block * BLOCK_P + tl.arange(0, BLOCK_P)
        total, norm = _add(
            total, norm, value, places, weights, cx, cy, cw, ch, q, q_ok, p, p < UPTO, height, width, start, top_logit,
            places_q, weights_q, VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
        )  # fmt: skip
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
    BLOCK_D: tl.constexpr,
    LEVELS: tl.constexpr,
    POINTS: tl.constexpr,
    BOUNDS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    REFERENCE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    DISCRETE: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """out[b, q, head] = sum over points of weight * bilinear sample; see `detrt.models.ops.msda.reference`.

    VALUE_T: elements from one token to the next. BOUNDS: 12 bits a level, the number of points up to and with that level.
    BLOCK_ALL: the power of two from POINTS on. AT_ONCE: all points of a query side by side (few queries); otherwise
    BLOCK_P points of a level at a time (many). HEADS_FIRST: neighbouring programs are heads of the same queries. REFERENCE: 0 (places are locations), 2 or 4 (places are offsets from
    points or boxes). WIDE: 64-bit indices. PAIRS: places are aligned in pairs.
    """
    scale = tl.cast(scale, tl.float32)  # PyTorch's compiler hands over Python's numbers as FP64
    program = tl.program_id(0)
    if HEADS_FIRST:
        head, block = program % HEADS, (program // HEADS) % blocks
    else:
        head, block = (program // blocks) % HEADS, program % blocks
    q = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
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
    block_p: tl.constexpr = BLOCK_ALL if AT_ONCE else BLOCK_P
    total3 = tl.zeros((BLOCK_Q, block_p, BLOCK_D), tl.float32)
    norm2 = tl.zeros((BLOCK_Q, block_p), tl.float32)
    if AT_ONCE:
        level = tl.zeros((1, BLOCK_ALL), tl.int32)
        height = tl.zeros((1, BLOCK_ALL), tl.int32)
        width = tl.zeros((1, BLOCK_ALL), tl.int32)
        first = tl.zeros((1, BLOCK_ALL), tl.int32)
        count = tl.full((1, BLOCK_ALL), 1, tl.int32)
        for index in tl.static_range(LEVELS):
            h, w, size = _level(shapes, index, start, tokens)
            here = ((every >= ((BOUNDS << 12 >> 12 * index) & 4095)) & (every < ((BOUNDS >> 12 * index) & 4095)))[None, :]
            level = tl.where(here, index, level)
            height = tl.where(here, h, height)
            width = tl.where(here, w, width)
            first = tl.where(here, start, first)
            count = tl.where(here, ((BOUNDS >> 12 * index) & 4095) - ((BOUNDS << 12 >> 12 * index) & 4095), count)
            start += size
        inside = q_ok[:, None] & (every < POINTS)[None, :]
        cx, cy, cw, ch = _centres(
            references, q, inside, level, scale / count.to(tl.float32), references_q, references_l, REFERENCE
        )
        total3, norm2 = _add(
            total3, norm2, value, places, weights, cx, cy, cw, ch, q, q_ok, every, every < POINTS, height, width, first,
            top_logit, places_q, weights_q,
            VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
        )  # fmt: skip
    else:
        for index in tl.static_range(LEVELS):
            h, w, size = _level(shapes, index, start, tokens)
            total3, norm2 = _add_level(
                total3, norm2, value, places, weights, references, q, q_ok, index, h, w, start, top_logit,
                places_q, weights_q, references_q, references_l, scale,
                (BOUNDS << 12 >> 12 * index) & 4095, (BOUNDS >> 12 * index) & 4095, BLOCK_P,
                VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
            )  # fmt: skip
            start += size
    total = tl.sum(total3, 1)
    if SOFTMAX:
        total = total * (1.0 / tl.sum(norm2, 1))[:, None]
    # Sizes that do not fit the value cannot raise an error from here; they must not pass for a result either.
    total = tl.where(start == tokens, total, float("nan"))

    d = tl.arange(0, BLOCK_D)
    row = (batch * queries + q) * (HEADS * D) + head * D
    mask = q_ok[:, None] & (d < D)[None, :]
    tl.store(out + row[:, None] + d[None, :], total, mask=mask)
