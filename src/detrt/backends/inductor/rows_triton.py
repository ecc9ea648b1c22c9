"""Triton kernels of linear layers over few rows, such as the queries of a decoder; `kernels.py` launches them.

A library's matmul of 300 rows takes the time of its launch and of waiting for memory, whatever it multiplies. These kernels take less of
both: with EARLY they start while the kernel before them ends, and fetch their weights before they wait for its result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...models.ops.early_triton import wait_for_inputs


class RowTile(NamedTuple):
    """Rows of a program, outputs (or hidden units of a step), inputs of a step, and how it runs. inputs: 0 reads all at once."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# The fastest of eight for 100, 300 and 900 rows on an H200, with the weights in memory and not in the cache.
LINEAR_TILE = RowTile(32, 64, 64, 4, 4)
LONG_LINEAR_TILE = RowTile(16, 64, 128, 4, 4)
MORE_ROWS_TILE = RowTile(64, 64, 0, 4, 1)
# The fastest of ten likewise.
FFN_TILE = RowTile(64, 64, 0, 4, 1)
FEW_ROWS_FFN_TILE = RowTile(16, 64, 0, 4, 2)
FFN_PARTS = 16
FEW_ROWS, MORE_ROWS = 128, 512


def linear_rows_tile(rows: int, inputs: int) -> RowTile:
    if rows > MORE_ROWS:
        return MORE_ROWS_TILE
    return LINEAR_TILE if inputs <= 512 else LONG_LINEAR_TILE


def ffn_tile(rows: int) -> RowTile:
    return FEW_ROWS_FFN_TILE if rows <= FEW_ROWS else FFN_TILE


@triton.jit
def fetch_weights(
    weight, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr
):
    """Bring a part of a weight to the L2 cache, shared out among the programs of axis 0. LINES: of 64 elements, the most a program takes."""
    if EARLY:
        across: tl.constexpr = (COLUMNS + 63) // 64
        lines = tl.program_id(0) + tl.arange(0, LINES) * tl.num_programs(0)
        lines = tl.where(lines < ROWS * across, lines, 0)
        address = weight + start + lines // across * STRIDE + lines % across * 64
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def linear_rows_kernel(
    data, more, weight, bias, out, rows,
    ROW: tl.constexpr, AT: tl.constexpr, ADDED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, RELU_BEFORE: tl.constexpr, RELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N outputs of BLOCK_M rows; data @ weight.T + bias.

    data: (rows, ROW), of which the INPUTS columns from AT on are read. weight: (OUTPUTS, INPUTS). bias: (OUTPUTS,). out: (rows, OUTPUTS). RELU_BEFORE,
    RELU: of the data, of the result. ADDED: so many outputs, a multiple of BLOCK_N, read data + more, of one shape; the others data alone.
    Sums are FP32.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_N
    n, k = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    m_ok, n_ok = m < rows, n < OUTPUTS
    left = data + AT + m[:, None] * ROW + k[None, :]
    right = weight + n[None, :] * INPUTS + k[:, None]
    shift = tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if BLOCK_K >= INPUTS:
        k_ok = k < INPUTS
        b = tl.load(right, mask=n_ok[None, :] & k_ok[:, None], other=0.0)
        wait_for_inputs(EARLY)
        a = tl.load(left, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
        if ADDED > 0:
            extra = tl.load(more + m[:, None] * ROW + k[None, :], mask=m_ok[:, None] & k_ok[None, :] & (first < ADDED), other=0.0)
            a = (a.to(tl.float32) + extra.to(tl.float32)).to(a.dtype)
        if RELU_BEFORE:
            a = tl.where(a > 0, a, 0.0).to(a.dtype)
        total = tl.dot(a, b)
    else:
        fetch_weights(weight, first * INPUTS, 1, BLOCK_N * INPUTS, INPUTS, 128, EARLY)
        wait_for_inputs(EARLY)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in tl.range(0, INPUTS, BLOCK_K):
            if INPUTS % BLOCK_K == 0:
                a = tl.load(left + start, mask=m_ok[:, None], other=0.0)
                b = tl.load(right + start, mask=n_ok[None, :], other=0.0)
            else:
                k_ok = start + k < INPUTS
                a = tl.load(left + start, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
                b = tl.load(right + start, mask=n_ok[None, :] & k_ok[:, None], other=0.0)
            if ADDED > 0:
                inside = m_ok[:, None] & (start + k < INPUTS)[None, :] & (first < ADDED)
                extra = tl.load(more + m[:, None] * ROW + start + k[None, :], mask=inside, other=0.0)
                a = (a.to(tl.float32) + extra.to(tl.float32)).to(a.dtype)
            if RELU_BEFORE:
                a = tl.where(a > 0, a, 0.0).to(a.dtype)
            total = tl.dot(a, b, total)
    total += shift[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    tl.store(out + m[:, None] * OUTPUTS + n[None, :], total, mask=m_ok[:, None] & n_ok[None, :])


@triton.jit
def ffn_rows_kernel(
    data, weight1, bias1, weight2, out, rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of relu(data @ weight1.T + bias1) @ weight2.T over one of PARTS of the hidden units.

    data: (rows, WIDTH). weight1: (HIDDEN, WIDTH). weight2: (WIDTH, HIDDEN). out: (PARTS, rows, WIDTH), FP32. The hidden units are rounded to
    the type of the data, as separate layers do; sums are FP32. BLOCK_W: a power of two from WIDTH on.
    """
    part: tl.constexpr = HIDDEN // PARTS
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * part
    n, h = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_H)
    ok = (m < rows)[:, None] & (n < WIDTH)[None, :]
    at = m[:, None] * WIDTH + n[None, :]
    fetch_weights(weight1, first * WIDTH, 1, part * WIDTH, WIDTH, 256, EARLY)
    fetch_weights(weight2, first, WIDTH, part, HIDDEN, 256, EARLY)
    wait_for_inputs(EARLY)
    x = tl.load(data + at, mask=ok, other=0.0)
    total = tl.zeros((BLOCK_M, BLOCK_W), tl.float32)
    for step in tl.range(0, part, BLOCK_H):
        unit = first + step + h
        if BLOCK_W == WIDTH:
            up = tl.load(weight1 + unit[None, :] * WIDTH + n[:, None])
            down = tl.load(weight2 + n[None, :] * HIDDEN + unit[:, None])
        else:
            up = tl.load(weight1 + unit[None, :] * WIDTH + n[:, None], mask=(n < WIDTH)[:, None], other=0.0)
            down = tl.load(weight2 + n[None, :] * HIDDEN + unit[:, None], mask=(n < WIDTH)[None, :], other=0.0)
        hidden = tl.dot(x, up) + tl.load(bias1 + unit).to(tl.float32)[None, :]
        total = tl.dot(tl.maximum(hidden, 0.0).to(x.dtype), down, total)
    tl.store(out + tl.program_id(1) * rows * WIDTH + at, total, mask=ok)


@triton.jit
def sum_norm_kernel(
    parts, bias, residual, scale, shift, out, rows,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, EPS: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: a row of layer_norm(sum of the parts + bias + residual).

    parts: (PARTS, rows, WIDTH), FP32. bias, scale, shift: (WIDTH,). residual: (rows, WIDTH). The sum of parts and bias is
    rounded to the type of the result, as a linear layer does. LIMIT: of the magnitude of what is normalized; 0: none.
    """
    row = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    ok = n < WIDTH
    total = tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    factor = tl.load(scale + n, mask=ok, other=0.0).to(tl.float32)
    offset = tl.load(shift + n, mask=ok, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * WIDTH + n, mask=ok, other=0.0)
    total = total.to(out.dtype.element_ty).to(tl.float32)
    total += tl.load(residual + row * WIDTH + n, mask=ok, other=0.0).to(tl.float32)
    if LIMIT > 0:
        total = tl.minimum(tl.maximum(total, -LIMIT), LIMIT)
    centred = tl.where(ok, total - tl.sum(total, 0) / WIDTH, 0.0)
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + EPS)
    tl.store(out + row * WIDTH + n, scaled * factor + offset, mask=ok)


def launch_linear_rows(
    data, at: int, weight, bias, relu_before: bool, relu: bool, tile: RowTile, launch=None, more=None, added: int = 0
):
    """data, more: (rows, width), weight: (outputs, inputs), all contiguous; see `linear_rows_kernel`."""
    rows, width = data.shape
    outputs, inputs = weight.shape
    out = data.new_empty(rows, outputs)
    kernel = linear_rows_kernel if launch is None else launch(linear_rows_kernel)
    kernel[(-(-rows // tile.rows), -(-outputs // tile.outputs))](
        data,
        data if more is None else more,
        weight,
        bias,
        out,
        rows,
        ROW=width,
        AT=at,
        ADDED=added,
        OUTPUTS=outputs,
        INPUTS=inputs,
        RELU_BEFORE=relu_before,
        RELU=relu,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.outputs,
        BLOCK_K=tile.inputs or _block(inputs),
        EARLY=False,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def launch_ffn_rows(data, weight1, bias1, weight2, tile: RowTile, parts: int = FFN_PARTS, launch=None):
    """data: (rows, width), and the weights, contiguous; the parts of the sum, FP32; see `ffn_rows_kernel`."""
    rows, width = data.shape
    hidden = weight1.shape[0]
    out = data.new_empty(parts, rows, width, dtype=torch.float32)
    kernel = ffn_rows_kernel if launch is None else launch(ffn_rows_kernel)
    kernel[(-(-rows // tile.rows), parts)](
        data,
        weight1,
        bias1,
        weight2,
        out,
        rows,
        WIDTH=width,
        HIDDEN=hidden,
        PARTS=parts,
        BLOCK_M=tile.rows,
        BLOCK_H=tile.outputs,
        BLOCK_W=_block(width),
        EARLY=False,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def launch_sum_norm(parts, bias, residual, scale, shift, eps: float, launch=None, limit: float = 0.0):
    """parts: (parts, rows, width), FP32, residual: (rows, width), both contiguous; see `sum_norm_kernel`."""
    count, rows, width = parts.shape
    out = residual.new_empty(rows, width)
    kernel = sum_norm_kernel if launch is None else launch(sum_norm_kernel)
    kernel[(rows,)](
        parts,
        bias,
        residual,
        scale,
        shift,
        out,
        rows,
        PARTS=count,
        WIDTH=width,
        EPS=eps,
        LIMIT=limit,
        BLOCK=_block(width),
        EARLY=False,
        num_warps=2,
        num_stages=1,
    )
    return out


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
