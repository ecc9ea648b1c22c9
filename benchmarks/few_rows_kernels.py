"""Kernels of whole sequences of layers over few rows, which are slower than detrt's kernels of single layers; for measure_few_rows.py.

A program takes BLOCK_M rows through a sequence. Widths are powers of two, but for the outputs of the last layer. Sums are FP32; between
layers results are rounded to the type of the data, as separate layers do. EARLY: see `detrt.backends.inductor.early`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from detrt.backends.inductor.rows_triton import fetch_weights
from detrt.models.ops.early_triton import wait_for_inputs


@triton.jit
def copy_kernel(data, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """An elementwise kernel with an early start, as PyTorch's compiler writes it: it stands before what is measured."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    value = tl.load(data + i, mask=i < size, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + i, value, mask=i < size)


@triton.jit
def _norm(total, scale, shift, WIDTH: tl.constexpr, EPS: tl.constexpr):
    n = tl.arange(0, WIDTH)
    centred = total - (tl.sum(total, 1) / WIDTH)[:, None]
    scaled = centred * tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + EPS)[:, None]
    return scaled * tl.load(scale + n).to(tl.float32)[None, :] + tl.load(shift + n).to(tl.float32)[None, :]


@triton.jit
def chain_kernel(
    data, weight1, bias1, weight2, bias2, weight3, bias3, scale, shift, out, rows,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, OUTPUTS: tl.constexpr, EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OUTPUTS, at most 16: a head of three layers. 0: a feed-forward network, layer_norm(relu(data @ w1.T + b1) @ w2.T + b2 + data)."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, h = tl.arange(0, WIDTH), tl.arange(0, BLOCK_H)
    m_ok = (m < rows)[:, None]
    at = m[:, None] * WIDTH + n[None, :]
    fetch_weights(weight1, 0, 1, HIDDEN * WIDTH, WIDTH, 256, EARLY)
    fetch_weights(weight2, 0, WIDTH, HIDDEN, HIDDEN, 256, EARLY)
    wait_for_inputs(EARLY)
    x = tl.load(data + at, mask=m_ok, other=0.0)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for step in tl.range(0, HIDDEN, BLOCK_H):
        unit = step + h
        up = tl.load(weight1 + unit[None, :] * WIDTH + n[:, None])
        down = tl.load(weight2 + n[None, :] * HIDDEN + unit[:, None])
        hidden = tl.dot(x, up) + tl.load(bias1 + unit).to(tl.float32)[None, :]
        total = tl.dot(tl.maximum(hidden, 0.0).to(x.dtype), down, total)
    total += tl.load(bias2 + n).to(tl.float32)[None, :]
    if OUTPUTS > 0:
        o = tl.arange(0, 16)
        last = tl.load(weight3 + o[None, :] * WIDTH + n[:, None], mask=(o < OUTPUTS)[None, :], other=0.0)
        offset = tl.load(bias3 + o, mask=o < OUTPUTS, other=0.0).to(tl.float32)
        result = tl.dot(tl.maximum(total, 0.0).to(x.dtype), last) + offset[None, :]
        tl.store(out + m[:, None] * OUTPUTS + o[None, :], result, mask=m_ok & (o < OUTPUTS)[None, :])
    else:
        total = total.to(x.dtype).to(tl.float32) + x.to(tl.float32)
        tl.store(out + at, _norm(total, scale, shift, WIDTH, EPS), mask=m_ok)


@triton.jit
def layer_norm_kernel(
    data, weight1, bias1, residual, scale, shift, weight2, bias2, normed, out, rows,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """normed = layer_norm(data @ w1.T + b1 + residual). OUTPUTS: of the next layer, out = normed @ w2.T + b2; 0: none."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = tl.arange(0, WIDTH), tl.arange(0, BLOCK_K)
    m_ok = (m < rows)[:, None]
    at = m[:, None] * WIDTH + n[None, :]
    fetch_weights(weight1, 0, 1, WIDTH * WIDTH, WIDTH, 128, EARLY)
    if OUTPUTS > 0:
        fetch_weights(weight2, 0, 1, WIDTH * OUTPUTS, WIDTH, 128, EARLY)
    wait_for_inputs(EARLY)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        a = tl.load(data + m[:, None] * WIDTH + start + k[None, :], mask=m_ok, other=0.0)
        total = tl.dot(a, tl.load(weight1 + n[None, :] * WIDTH + start + k[:, None]), total)
    total += tl.load(bias1 + n).to(tl.float32)[None, :]
    total = total.to(normed.dtype.element_ty).to(tl.float32) + tl.load(residual + at, mask=m_ok, other=0.0).to(tl.float32)
    y = _norm(total, scale, shift, WIDTH, EPS).to(normed.dtype.element_ty)
    tl.store(normed + at, y, mask=m_ok)
    if OUTPUTS > 0:
        for start in tl.range(0, OUTPUTS, BLOCK_N):
            c = start + tl.arange(0, BLOCK_N)
            b = tl.load(weight2 + c[None, :] * WIDTH + n[:, None], mask=(c < OUTPUTS)[None, :], other=0.0)
            result = tl.dot(y, b) + tl.load(bias2 + c, mask=c < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            tl.store(out + m[:, None] * OUTPUTS + c[None, :], result, mask=m_ok & (c < OUTPUTS)[None, :])


@triton.jit
def norm_layer_kernel(
    data, residual, scale, shift, weight, bias, normed, out, rows,
    WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """normed = layer_norm(data + residual), by each program again for its BLOCK_N outputs; out = normed @ weight.T + bias."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WIDTH)
    m_ok, n_ok = (m < rows)[:, None], n < OUTPUTS
    at = m[:, None] * WIDTH + k[None, :]
    b = tl.load(weight + n[None, :] * WIDTH + k[:, None], mask=n_ok[None, :], other=0.0)
    offset = tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    total = tl.load(data + at, mask=m_ok, other=0.0).to(tl.float32) + tl.load(residual + at, mask=m_ok, other=0.0).to(tl.float32)
    y = _norm(total, scale, shift, WIDTH, EPS).to(out.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(normed + at, y, mask=m_ok)
    tl.store(out + m[:, None] * OUTPUTS + n[None, :], tl.dot(y, b) + offset[None, :], mask=m_ok & n_ok[None, :])
