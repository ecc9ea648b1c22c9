"""Triton kernels of layers whose libraries write their result twice; `kernels.py` launches them."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...models.ops.early_triton import wait_for_inputs


class DepthwiseTile(NamedTuple):
    """Pixels and channels of a program, and its warps."""

    pixels: int
    channels: int
    warps: int


class LinearTile(NamedTuple):
    """Rows, outputs and inputs of a program's step, and how it runs."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# The fastest of seven (H100) to eleven (H200). Few pixels need small tiles, so that all multiprocessors have work.
SMALL_DEPTHWISE_TILE = DepthwiseTile(16, 32, 4)
DEPTHWISE_TILE = DepthwiseTile(32, 64, 4)
NARROW_DEPTHWISE_TILE = DepthwiseTile(64, 32, 4)
# The fastest of nine on an H100.
LINEAR_TILE = LinearTile(64, 128, 64, 4, 3)


@triton.jit
def depthwise_kernel(
    data,
    weight,
    bias,
    out,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    TOP: tl.constexpr,
    LEFT: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: BLOCK_C channels of BLOCK_P pixels of one image.

    data: (batch, HEIGHT, WIDTH, CHANNELS). weight: (ROWS, COLUMNS, CHANNELS). bias: (CHANNELS,). out: (batch, OUT_HEIGHT, OUT_WIDTH,
    CHANNELS). TOP, LEFT: padding. Sums are FP32.
    """
    pixels: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image = tl.program_id(2).to(tl.int64)
    y, x = p // OUT_WIDTH * STRIDE - TOP, p % OUT_WIDTH * STRIDE - LEFT
    p_ok, c_ok = p < pixels, c < CHANNELS
    source = data + image * (HEIGHT * WIDTH * CHANNELS)
    wait_for_inputs(EARLY)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float32) + tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    for row in tl.static_range(ROWS):
        for column in tl.static_range(COLUMNS):
            inside = p_ok & (y + row >= 0) & (y + row < HEIGHT) & (x + column >= 0) & (x + column < WIDTH)
            index = ((y + row) * WIDTH + x + column)[:, None] * CHANNELS + c[None, :]
            value = tl.load(source + index, mask=inside[:, None] & c_ok[None, :], other=0.0)
            factor = tl.load(weight + (row * COLUMNS + column) * CHANNELS + c, mask=c_ok, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    target = out + image * (pixels * CHANNELS) + p[:, None] * CHANNELS + c[None, :]
    tl.store(target, total, mask=p_ok[:, None] & c_ok[None, :])


def depthwise_tile(pixels: int, channels: int) -> DepthwiseTile:
    """The tile for so many pixels of all images."""
    if pixels < 4096:
        return SMALL_DEPTHWISE_TILE
    return NARROW_DEPTHWISE_TILE if channels % DEPTHWISE_TILE.channels else DEPTHWISE_TILE


def launch_depthwise(data, weight, bias, stride: int, padding, relu: bool, tile: DepthwiseTile | None = None, launch=None):
    """data: (batch, height, width, channels), weight: (rows, columns, channels), both contiguous; see `depthwise_kernel`."""
    batch, height, width, channels = data.shape
    rows, columns, _ = weight.shape
    out_height = (height + 2 * padding[0] - rows) // stride + 1
    out_width = (width + 2 * padding[1] - columns) // stride + 1
    # A symbolic batch size must not be compared: that would fix it.
    tile = tile or depthwise_tile((batch if isinstance(batch, int) else 1) * out_height * out_width, channels)
    out = data.new_empty(batch, out_height, out_width, channels)
    kernel = depthwise_kernel if launch is None else launch(depthwise_kernel)
    kernel[(-(-out_height * out_width // tile.pixels), -(-channels // tile.channels), batch)](
        data,
        weight,
        bias,
        out,
        HEIGHT=height,
        WIDTH=width,
        CHANNELS=channels,
        OUT_HEIGHT=out_height,
        OUT_WIDTH=out_width,
        ROWS=rows,
        COLUMNS=columns,
        STRIDE=stride,
        TOP=padding[0],
        LEFT=padding[1],
        RELU=relu,
        BLOCK_P=tile.pixels,
        BLOCK_C=tile.channels,
        EARLY=False,
        num_warps=tile.warps,
        num_stages=1,
    )
    return out


@triton.jit
def linear_gelu_kernel(
    data,
    weight,
    bias,
    out,
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: BLOCK_N outputs of BLOCK_M rows; gelu(data @ weight.T + bias), with the error function, in FP32.

    data: (rows, INPUTS). weight: (OUTPUTS, INPUTS). bias: (OUTPUTS,). out: (rows, OUTPUTS). GROUP: blocks of rows that are next to each
    other in time, so that they read the same weights.
    """
    program = tl.program_id(0)
    wide: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    high = tl.cdiv(rows, BLOCK_M)
    group = program // (GROUP * wide)
    first = group * GROUP
    size = tl.minimum(high - first, GROUP)
    m = (first + program % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (program % (GROUP * wide)) // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_ok, n_ok = m < rows, n < OUTPUTS
    left = data + m.to(tl.int64)[:, None] * INPUTS + k[None, :]
    right = weight + n[None, :] * INPUTS + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_K):
        if INPUTS % BLOCK_K == 0:
            a = tl.load(left + start, mask=m_ok[:, None], other=0.0)
            b = tl.load(right + start, mask=n_ok[None, :], other=0.0)
        else:
            k_ok = start + k < INPUTS
            a = tl.load(left + start, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
            b = tl.load(right + start, mask=n_ok[None, :] & k_ok[:, None], other=0.0)
        total = tl.dot(a, b, total)
    total += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)[None, :]
    # The sum of matmul and bias is rounded, as the separate operators do.
    total = total.to(out.dtype.element_ty).to(tl.float32)
    total = 0.5 * total * (1.0 + tl.erf(total * 0.7071067811865476))
    tl.store(out + m.to(tl.int64)[:, None] * OUTPUTS + n[None, :], total, mask=m_ok[:, None] & n_ok[None, :])


def launch_linear_gelu(data, weight, bias, tile: LinearTile = LINEAR_TILE, launch=None):
    """data: (rows, inputs), weight: (outputs, inputs), both contiguous; see `linear_gelu_kernel`."""
    rows, inputs = data.shape
    outputs = weight.shape[0]
    out = data.new_empty(rows, outputs)
    kernel = linear_gelu_kernel if launch is None else launch(linear_gelu_kernel)
    kernel[((rows + tile.rows - 1) // tile.rows * -(-outputs // tile.outputs),)](
        data,
        weight,
        bias,
        out,
        rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
