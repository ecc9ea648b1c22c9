"""The Triton kernel that resizes, pads and normalises the images of a batch; `resize.py` launches it.

One program writes a block of pixels of one image, in the integers of Pillow (`detrt.data.resample`). Each block computes the
first pass itself, which saves the image between the two passes and a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _level(total):
    return tl.minimum(tl.maximum(total >> 22, 0), 255)


@triton.jit
def resize_kernel(
    data, tables, rows, pixels, mask, rescale, mean_r, mean_g, mean_b, std_r, std_g, std_b, full_height, full_width,
    ROW: tl.constexpr, FLOAT: tl.constexpr, NORMALIZE: tl.constexpr, MASK: tl.constexpr,
    BLOCK_Y: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    image = tl.program_id(2)
    row = rows + image * ROW
    source = data + tl.load(row)
    source_height, source_width = tl.load(row + 1).to(tl.int32), tl.load(row + 2).to(tl.int32)
    height, width = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    x_first, x_weights = tables + tl.load(row + 5), tables + tl.load(row + 6)
    x_taps = tl.load(row + 7).to(tl.int32)
    y_first, y_weights = tables + tl.load(row + 8), tables + tl.load(row + 9)
    y_taps = tl.load(row + 10).to(tl.int32)
    down_first = tl.load(row + 11)
    y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    inside = (y < height)[:, None] & (x < width)[None, :]
    y_in, x_in = tl.minimum(y, height - 1), tl.minimum(x, width - 1)
    top, left = tl.load(y_first + y_in), tl.load(x_first + x_in)
    half = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32) + 2097152
    red, green, blue = half, half, half
    if down_first == 0:
        for i in range(0, y_taps):
            outer = tl.load(y_weights + i * height + y_in)[:, None]
            line = tl.minimum(top + i, source_height - 1).to(tl.int64)[:, None] * source_width
            r, g, b = half, half, half
            for j in range(0, x_taps):
                weight = tl.load(x_weights + j * width + x_in)[None, :]
                source_pixel = source + (line + tl.minimum(left + j, source_width - 1)[None, :]) * 3
                r += tl.load(source_pixel).to(tl.int32) * weight
                g += tl.load(source_pixel + 1).to(tl.int32) * weight
                b += tl.load(source_pixel + 2).to(tl.int32) * weight
            red += _level(r) * outer
            green += _level(g) * outer
            blue += _level(b) * outer
    else:
        for j in range(0, x_taps):
            outer = tl.load(x_weights + j * width + x_in)[None, :]
            column = tl.minimum(left + j, source_width - 1)[None, :]
            r, g, b = half, half, half
            for i in range(0, y_taps):
                weight = tl.load(y_weights + i * height + y_in)[:, None]
                line = tl.minimum(top + i, source_height - 1).to(tl.int64)[:, None] * source_width
                source_pixel = source + (line + column) * 3
                r += tl.load(source_pixel).to(tl.int32) * weight
                g += tl.load(source_pixel + 1).to(tl.int32) * weight
                b += tl.load(source_pixel + 2).to(tl.int32) * weight
            red += _level(r) * outer
            green += _level(g) * outer
            blue += _level(b) * outer
    zero = tl.zeros((BLOCK_Y, BLOCK_X), tl.int32)
    red, green, blue = (
        tl.where(inside, _level(red), zero),
        tl.where(inside, _level(green), zero),
        tl.where(inside, _level(blue), zero),
    )
    within = (y < full_height)[:, None] & (x < full_width)[None, :]
    plane = (tl.zeros((), tl.int64) + full_height) * full_width
    flat = y[:, None].to(tl.int64) * full_width + x[None, :]
    target = pixels + image.to(tl.int64) * 3 * plane + flat
    if FLOAT:
        r, g, b = red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)
        if NORMALIZE:
            none = tl.zeros((BLOCK_Y, BLOCK_X), tl.float32)
            r = tl.where(inside, tl.div_rn(r * rescale - mean_r, none + std_r), none)
            g = tl.where(inside, tl.div_rn(g * rescale - mean_g, none + std_g), none)
            b = tl.where(inside, tl.div_rn(b * rescale - mean_b, none + std_b), none)
        tl.store(target, r, within)
        tl.store(target + plane, g, within)
        tl.store(target + 2 * plane, b, within)
    else:
        tl.store(target, red.to(tl.uint8), within)
        tl.store(target + plane, green.to(tl.uint8), within)
        tl.store(target + 2 * plane, blue.to(tl.uint8), within)
    if MASK:
        tl.store(mask + image.to(tl.int64) * plane + flat, inside.to(tl.int64), within)
