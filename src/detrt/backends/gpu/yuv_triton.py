"""The Triton kernel that converts a 4:2:0 frame to upright RGB, with the arithmetic of `Colours`; `yuv.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rgb_kernel(
    luma, blue, red, rgb, height, width, luma_row, chroma_row, base, down, across,
    offset, luma_k, red_v, green_u, green_v, blue_u,
    CHROMA_STEP: tl.constexpr, INTERLACED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK pixels of one row. The pixel of row r and column c goes to pixel
    base + r * down + c * across of the result, which rotates the frame."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    light = tl.load(luma + row.to(tl.int64) * luma_row + column, inside, 0).to(tl.int32)
    if INTERLACED:
        chroma = row // 4 * 2 + row % 2
    else:
        chroma = row // 2
    half = chroma.to(tl.int64) * chroma_row + (column // 2) * CHROMA_STEP
    u = tl.load(blue + half, inside, 128).to(tl.int32) * 8 - 1024
    v = tl.load(red + half, inside, 128).to(tl.int32) * 8 - 1024
    light = ((light * 8 - offset) * luma_k) >> 16
    r = light + ((v * red_v) >> 16)
    g = light + ((u * green_u) >> 16) + ((v * green_v) >> 16)
    b = light + ((u * blue_u) >> 16)
    target = rgb + (base + row.to(tl.int64) * down + column * across) * 3
    tl.store(target, tl.minimum(tl.maximum(r, 0), 255).to(tl.uint8), inside)
    tl.store(target + 1, tl.minimum(tl.maximum(g, 0), 255).to(tl.uint8), inside)
    tl.store(target + 2, tl.minimum(tl.maximum(b, 0), 255).to(tl.uint8), inside)
