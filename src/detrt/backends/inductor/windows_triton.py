"""The Triton kernel of attention inside windows (Swin); `kernels.py` launches it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def windows_kernel(
    qkv,
    bias,
    mask,
    out,
    SCALE: tl.constexpr,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    MASKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one window. Scores never leave the registers.

    qkv: (windows, N, 3 * HEADS * D). bias: (HEADS, N, N). mask: (MASKS, N, N), added to every MASKS-th window; no mask if
    MASKS is 0. out: (windows, N, HEADS * D). Scores, softmax and sums are FP32. D is a power of two from 16 on.
    """
    blocks: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    block, head, window = program % blocks, (program // blocks) % HEADS, program // (blocks * HEADS)
    row: tl.constexpr = 3 * HEADS * D
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    m_ok = m < N
    base = qkv + window.to(tl.int64) * (N * row) + head * D
    q = tl.load(base + m[:, None] * row + d[None, :], mask=m_ok[:, None], other=0.0)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, D), tl.float32)
    for start in tl.static_range(0, N, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        n_ok = n < N
        k = tl.load(base + HEADS * D + n[None, :] * row + d[:, None], mask=n_ok[None, :], other=0.0)
        v = tl.load(base + 2 * HEADS * D + n[:, None] * row + d[None, :], mask=n_ok[:, None], other=0.0)
        inside = m_ok[:, None] & n_ok[None, :]
        index = m[:, None] * N + n[None, :]
        scores = tl.dot(q, k) * SCALE
        scores += tl.load(bias + head * (N * N) + index, mask=inside, other=0.0).to(tl.float32)
        if MASKS > 0:
            scores += tl.load(mask + (window % MASKS) * (N * N) + index, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(n_ok[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        decay = tl.exp(maximum - new_maximum)
        norm = norm * decay + tl.sum(weights, 1)
        total = total * decay[:, None] + tl.dot(weights.to(v.dtype), v)
        maximum = new_maximum
    total = total / norm[:, None]
    target = out + window.to(tl.int64) * (N * HEADS * D) + head * D + m[:, None] * (HEADS * D) + d[None, :]
    tl.store(target, total, mask=m_ok[:, None])


def launch_windows(qkv, bias, mask, heads: int, scale: float, launch=None, block_m: int = 0, block_n: int = 0, warps: int = 0):
    """Run the kernel over contiguous tensors; see `windows_kernel`. launch: wrapper of the kernel for PyTorch's compiler."""
    windows, tokens, width = qkv.shape
    dim = width // (3 * heads)
    out = qkv.new_empty(windows, tokens, heads * dim)
    block_m, block_n = block_m or 64, block_n or (64 if tokens <= 64 else 32)
    blocks = -(-tokens // block_m)
    kernel = windows_kernel if launch is None else launch(windows_kernel)
    kernel[(blocks * heads * windows,)](
        qkv,
        bias,
        bias if mask is None else mask,
        out,
        SCALE=float(scale),
        N=tokens,
        HEADS=heads,
        D=dim,
        MASKS=0 if mask is None else mask.shape[0],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=warps or 4,
        num_stages=1,
    )
    return out
