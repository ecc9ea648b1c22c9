"""The Triton kernel of multi-scale deformable attention; `msda_launch.py` launches it.

One program computes BLOCK_Q queries of one head. Values are read as vectors of 16 bytes along the channels;
coordinates, softmax and sums are FP32. All shapes but heads, head_dim, levels and points are run-time numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .early_triton import wait_for_inputs

# Adding and subtracting 1.5 * 2**23 rounds to an integer with two additions; conversion instructions have a sixteenth of the
# throughput. The integer is in the low bits of the sum.
ROUND = tl.constexpr(12582912.0)
ROUND_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _pair(locations, index, mask):
    """Read adjacent x and y with one load: half the memory requests, which limit calls with many queries."""
    if locations.dtype.element_ty == tl.float32:
        bits = tl.load(locations.to(tl.pointer_type(tl.int64)) + index, mask=mask, other=0)
        return bits.to(tl.int32).to(tl.float32, bitcast=True), (bits >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        half: tl.constexpr = locations.dtype.element_ty
        pair = tl.load(locations.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)
        left, upper = pair.to(tl.int16).to(half, bitcast=True), (pair >> 16).to(tl.int16).to(half, bitcast=True)
        return left.to(tl.float32), upper.to(tl.float32)


@triton.jit
def _samples(
    locations, weights, q, q_ok, p, p_ok, max_logit, locations_q, weights_q, SOFTMAX: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """x and y of the points p of the queries q, as they are given, and their weights, before the softmax's division."""
    ok = q_ok[:, None] & p_ok[None, :]
    if PAIRS:
        x, y = _pair(locations, q[:, None] * (locations_q // 2) + p[None, :], ok)
    else:
        pointers = locations + q[:, None] * locations_q + p[None, :] * 2
        x = tl.load(pointers, mask=ok, other=0.0).to(tl.float32)
        y = tl.load(pointers + 1, mask=ok, other=0.0).to(tl.float32)
    missing: tl.constexpr = float("-inf") if SOFTMAX else 0.0
    weight = tl.load(weights + q[:, None] * weights_q + p[None, :], mask=ok, other=missing).to(tl.float32)
    if SOFTMAX:
        weight = tl.exp(weight - max_logit[:, None])
    return x, y, weight


@triton.jit
def _nearest(
    total, channels, weight, x, y, w, h, start, height, width,
    VALUE_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the nearest pixels of samples at (x, y) pixels to total (BLOCK_Q, BLOCK_P, BLOCK_D). channels: of the first token."""
    wide: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns, rows = width.to(tl.uint32), height.to(tl.uint32)
    column = tl.minimum(tl.maximum(x + 0.5, 0.0), w).to(tl.int32)
    row = tl.minimum(tl.maximum(y + 0.5, 0.0), h).to(tl.int32)
    column, row = tl.minimum(column, width - 1), tl.minimum(row, height - 1)
    token = (start + row * width + column).to(wide)
    # -1 in an empty level
    inside = ((x == x) & (y == y) & (column.to(tl.uint32) < columns) & (row.to(tl.uint32) < rows))[:, :, None]
    if BLOCK_D != D:
        inside = inside & (tl.arange(0, BLOCK_D)[None, None, :] < D)
    pixel = tl.load(channels + (token * VALUE_T)[:, :, None], mask=inside, other=0.0)
    return total + pixel.to(tl.float32) * weight[:, :, None]


@triton.jit
def _bilinear(
    total, channels, weight, column, row, right_fraction, lower_fraction, start, height, width,
    VALUE_T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the four pixels around samples to total (BLOCK_Q, BLOCK_P, BLOCK_D). column, row: of the upper left ones;
    right_fraction, lower_fraction: of the pixels to the right and below."""
    wide: tl.constexpr = tl.int64 if WIDE else tl.int32
    columns, rows = width.to(tl.uint32), height.to(tl.uint32)
    in_left, in_right = column.to(tl.uint32) < columns, (column + 1).to(tl.uint32) < columns
    in_upper, in_lower = row.to(tl.uint32) < rows, (row + 1).to(tl.uint32) < rows
    lower = weight * lower_fraction
    upper = weight - lower
    w11, w01 = lower * right_fraction, upper * right_fraction
    w10, w00 = lower - w11, upper - w01
    upper_left = (start + row * width + column).to(wide) * VALUE_T
    lower_left = upper_left + width.to(wide) * VALUE_T

    m00, m01 = (in_left & in_upper)[:, :, None], (in_right & in_upper)[:, :, None]
    m10, m11 = (in_left & in_lower)[:, :, None], (in_right & in_lower)[:, :, None]
    if BLOCK_D != D:
        d = tl.arange(0, BLOCK_D)[None, None, :]
        m00, m01, m10, m11 = m00 & (d < D), m01 & (d < D), m10 & (d < D), m11 & (d < D)
    upper_pixels, lower_pixels = channels + upper_left[:, :, None], channels + lower_left[:, :, None]
    v00 = tl.load(upper_pixels, mask=m00, other=0.0)
    v01 = tl.load(upper_pixels + VALUE_T, mask=m01, other=0.0)
    v10 = tl.load(lower_pixels, mask=m10, other=0.0)
    v11 = tl.load(lower_pixels + VALUE_T, mask=m11, other=0.0)
    total += v00.to(tl.float32) * w00[:, :, None]
    total += v01.to(tl.float32) * w01[:, :, None]
    total += v10.to(tl.float32) * w10[:, :, None]
    total += v11.to(tl.float32) * w11[:, :, None]
    return total


@triton.jit
def _add(
    total,
    norm,
    value,  # of this batch and head
    locations,  # locations or offsets of this batch and head
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
    max_logit,
    locations_q,
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
    """Add the points p of the queries q to total (BLOCK_Q, BLOCK_P, BLOCK_D), and their weights to norm (BLOCK_Q, BLOCK_P).
    cx, cy, cw, ch: (BLOCK_Q, 1) or (BLOCK_Q, BLOCK_P); height, width, start: numbers or (1, BLOCK_P)."""
    x, y, weight = _samples(
        locations, weights, q, q_ok, p, p_ok, max_logit, locations_q, weights_q, SOFTMAX, PAIRS
    )  # fmt: skip
    if SOFTMAX:
        norm += weight
    w, h = width.to(tl.float32), height.to(tl.float32)
    delta_x, delta_y = x, y  # from the reference to the sample, in pixels; without a reference, the location
    if REFERENCE == 4:
        delta_x, delta_y = x * (cw * w), y * (ch * h)
        x, y = (cx + x * cw) * w, (cy + y * ch) * h
    elif REFERENCE == 2:
        x, y = cx * w + x, cy * h + y  # (cx + x / w) * w
    else:
        x, y = x * w, y * h
    channels = value + tl.arange(0, BLOCK_D)[None, None, :]
    if DISCRETE:
        return _nearest(total, channels, weight, x, y, w, h, start, height, width, VALUE_T, D, BLOCK_D, WIDE), norm

    # Clamp to one pixel outside of the level. NaN is moved there too, because the maximum of NaN and a number is the number.
    x = tl.minimum(tl.maximum(x - 0.5, -2.0), w + 1.0)
    y = tl.minimum(tl.maximum(y - 0.5, -2.0), h + 1.0)
    # x - 0.5 rounded is the pixel to the left; exactly on a pixel it may be the one before, whose weight is then zero.
    column, row = (x - 0.5) + ROUND, (y - 0.5) + ROUND
    # Fractions of the pixels to the right and below.
    if value.dtype.element_ty == tl.float32:
        # The rounding error of x is relative to x, which on a level of 500 pixels exceeds that of the FP32 sums. So the fractions
        # are computed again, with one rounding after the large numbers have cancelled.
        left_x, upper_y = 0.5 + (column - ROUND), 0.5 + (row - ROUND)
        if REFERENCE == 0:
            right_fraction, lower_fraction = tl.fma(delta_x, w, -left_x), tl.fma(delta_y, h, -upper_y)
        else:
            right_fraction, lower_fraction = tl.fma(cx, w, -left_x) + delta_x, tl.fma(cy, h, -upper_y) + delta_y
        right_fraction, lower_fraction = (
            tl.minimum(tl.maximum(right_fraction, 0.0), 1.0),
            tl.minimum(tl.maximum(lower_fraction, 0.0), 1.0),
        )
    else:
        right_fraction, lower_fraction = x - (column - ROUND), y - (row - ROUND)
    column = column.to(tl.int32, bitcast=True) - ROUND_BITS
    row = row.to(tl.int32, bitcast=True) - ROUND_BITS
    total = _bilinear(
        total, channels, weight, column, row, right_fraction, lower_fraction, start, height, width, VALUE_T, D, BLOCK_D, WIDE
    )  # fmt: skip
    return total, norm


@triton.jit
def _centres(references, q, ok, level, fraction, references_q, references_l, REFERENCE: tl.constexpr):
    """Centre of each query's reference in 0..1, and the width and height that an offset of one stands for."""
    cx, cy, cw, ch = 0.0, 0.0, 0.0, 0.0
    if REFERENCE != 0:
        pointers = references + q[:, None] * references_q + level * references_l
        cx = tl.load(pointers, mask=ok, other=0.0).to(tl.float32)
        cy = tl.load(pointers + 1, mask=ok, other=0.0).to(tl.float32)
        if REFERENCE == 4:
            cw = fraction * tl.load(pointers + 2, mask=ok, other=0.0).to(tl.float32)
            ch = fraction * tl.load(pointers + 3, mask=ok, other=0.0).to(tl.float32)
    return cx, cy, cw, ch


@triton.jit
def _add_level(
    total,
    norm,
    value,
    locations,
    weights,
    references,
    q,
    q_ok,
    level,
    height,
    width,
    start,
    max_logit,
    locations_q,
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
    """Add the points BEFORE to UPTO, all of one level, to the sums."""
    fraction = scale / (UPTO - BEFORE)
    cx, cy, cw, ch = _centres(references, q, q_ok[:, None], level, fraction, references_q, references_l, REFERENCE)
    for block in tl.static_range((UPTO - BEFORE + BLOCK_P - 1) // BLOCK_P):
        p = BEFORE + block * BLOCK_P + tl.arange(0, BLOCK_P)
        total, norm = _add(
            total, norm, value, locations, weights, cx, cy, cw, ch, q, q_ok, p, p < UPTO, height, width, start, max_logit,
            locations_q, weights_q, VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
        )  # fmt: skip
    return total, norm


@triton.jit
def _level(shapes, index, start, tokens):
    """Height, width and number of pixels of a level; height and width are 0 if it ends after the value, so that nothing is read."""
    h = tl.load(shapes + 2 * index).to(tl.int32)
    w = tl.load(shapes + 2 * index + 1).to(tl.int32)
    valid = start + h * w <= tokens
    return tl.where(valid, h, 0), tl.where(valid, w, 0), h * w


@triton.jit
def _levels_of_points(
    shapes, all_points, start, tokens, LEVELS: tl.constexpr, BOUNDS: tl.constexpr, BLOCK_ALL: tl.constexpr
):  # fmt: skip
    """Of the level of each point, (1, BLOCK_ALL): its index, height, width, first token and number of points; and the number of
    tokens of all levels."""
    level = tl.zeros((1, BLOCK_ALL), tl.int32)
    height = tl.zeros((1, BLOCK_ALL), tl.int32)
    width = tl.zeros((1, BLOCK_ALL), tl.int32)
    level_start = tl.zeros((1, BLOCK_ALL), tl.int32)
    count = tl.full((1, BLOCK_ALL), 1, tl.int32)
    for index in tl.static_range(LEVELS):
        h, w, size = _level(shapes, index, start, tokens)
        own = ((all_points >= ((BOUNDS << 12 >> 12 * index) & 4095)) & (all_points < ((BOUNDS >> 12 * index) & 4095)))[None, :]
        level = tl.where(own, index, level)
        height = tl.where(own, h, height)
        width = tl.where(own, w, width)
        level_start = tl.where(own, start, level_start)
        count = tl.where(own, ((BOUNDS >> 12 * index) & 4095) - ((BOUNDS << 12 >> 12 * index) & 4095), count)
        start += size
    return level, height, width, level_start, count, start


@triton.jit
def _max_logit(weights, q, q_ok, all_points, weights_q, POINTS: tl.constexpr, SOFTMAX: tl.constexpr):
    """The largest logit of each query, (BLOCK_Q,); 0 after the last query, and without a softmax."""
    if not SOFTMAX:
        return tl.zeros(q.shape, tl.float32)
    mask = q_ok[:, None] & (all_points < POINTS)[None, :]
    logits = tl.load(weights + q[:, None] * weights_q + all_points[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(q_ok, tl.max(logits, 1), 0.0)


@triton.jit
def msda_kernel(
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
    EARLY: tl.constexpr,
):
    """out[b, q, head] = sum over points of weight * bilinear sample; see `detrt.models.ops.msda.reference`.

    VALUE_T: elements from one token to the next. BOUNDS: cumulative number of points, 12 bits per level.
    BLOCK_ALL: POINTS, rounded up to a power of two. AT_ONCE: all points of a query in parallel (few queries); otherwise
    BLOCK_P points of a level at a time (many). HEADS_FIRST: neighbouring programs are heads of the same queries. REFERENCE: 0
    (sampling locations), 2 or 4 (offsets from points or boxes). WIDE: 64-bit indices. PAIRS: places are aligned in pairs.
    """
    scale = tl.cast(scale, tl.float32)  # PyTorch's compiler passes Python floats as FP64
    program = tl.program_id(0)
    wait_for_inputs(EARLY)
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
    locations += batch * locations_b + head * (POINTS * 2)
    weights += batch * weights_b + head * POINTS
    references += batch * references_b
    all_points = tl.arange(0, BLOCK_ALL)
    max_logit = _max_logit(weights, q, q_ok, all_points, weights_q, POINTS, SOFTMAX)

    start = tl.zeros((), tl.int32)
    block_p: tl.constexpr = BLOCK_ALL if AT_ONCE else BLOCK_P
    total3 = tl.zeros((BLOCK_Q, block_p, BLOCK_D), tl.float32)
    norm2 = tl.zeros((BLOCK_Q, block_p), tl.float32)
    if AT_ONCE:
        level, height, width, level_start, count, start = _levels_of_points(
            shapes, all_points, start, tokens, LEVELS, BOUNDS, BLOCK_ALL
        )
        inside = q_ok[:, None] & (all_points < POINTS)[None, :]
        cx, cy, cw, ch = _centres(
            references, q, inside, level, scale / count.to(tl.float32), references_q, references_l, REFERENCE
        )
        total3, norm2 = _add(
            total3, norm2, value, locations, weights, cx, cy, cw, ch, q, q_ok, all_points, all_points < POINTS, height, width, level_start,
            max_logit, locations_q, weights_q,
            VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
        )  # fmt: skip
    else:
        for index in tl.static_range(LEVELS):
            h, w, size = _level(shapes, index, start, tokens)
            total3, norm2 = _add_level(
                total3, norm2, value, locations, weights, references, q, q_ok, index, h, w, start, max_logit,
                locations_q, weights_q, references_q, references_l, scale,
                (BOUNDS << 12 >> 12 * index) & 4095, (BOUNDS >> 12 * index) & 4095, BLOCK_P,
                VALUE_T, D, BLOCK_D, REFERENCE, SOFTMAX, DISCRETE, WIDE, PAIRS,
            )  # fmt: skip
            start += size
    total = tl.sum(total3, 1)
    if SOFTMAX:
        total = total * (1.0 / tl.sum(norm2, 1))[:, None]
    # A kernel cannot raise for sizes that do not match the value, so the result is NaN.
    total = tl.where(start == tokens, total, float("nan"))

    d = tl.arange(0, BLOCK_D)
    row = (batch * queries + q) * (HEADS * D) + head * D
    tl.store(out + row[:, None] + d[None, :], total, mask=q_ok[:, None] & (d < D)[None, :])
