"""The Triton kernel of attention without a bias; `kernels.py` launches it."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ...models.ops.early_triton import wait_for_inputs

LOG2_E = 1.4426950408889634


class AttentionTile(NamedTuple):
    """Queries and keys of a program's step, and how it runs."""

    queries: int
    keys: int
    warps: int
    stages: int


TILE = AttentionTile(64, 64, 4, 3)  # the fastest of eight on an H100, from 100 to 1600 queries


@triton.jit
def _step(q, k_rows, v_rows, start, maximum, norm, total, SCALE: tl.constexpr, N: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """Scores of BLOCK_N keys from `start` on, added to the running softmax. LAST: some of the keys may be beyond the end."""
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    if LAST:
        inside = n < N
        k = tl.load(k_rows + n[None, :] * K_ROW + d[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(v_rows + n[:, None] * V_ROW + d[None, :], mask=inside[:, None], other=0.0)
        scores = tl.where(inside[None, :], tl.dot(q, k) * SCALE, float("-inf"))
    else:
        k = tl.load(k_rows + n[None, :] * K_ROW + d[:, None])
        v = tl.load(v_rows + n[:, None] * V_ROW + d[None, :])
        scores = tl.dot(q, k) * SCALE
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    norm = norm * decay + tl.sum(weights, 1)
    total = tl.dot(weights.to(v.dtype), v, total * decay[:, None])
    return new_maximum, norm, total


@triton.jit
def attention_kernel(
    q,
    k,
    v,
    out,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one image. Scores never leave the registers.

    q: (batch, M, Q_ROW), heads side by side from column Q_AT on; k and v: (batch, N, ...) likewise. out: (batch, M, HEADS * D). SCALE: of
    the scores, times log2(e). Scores, softmax and sums are FP32. D is a power of two from 16 on.
    """
    blocks: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    program = tl.program_id(0)
    block, head, image = program % blocks, (program // blocks) % HEADS, (program // (blocks * HEADS)).to(tl.int64)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    m_ok = m < M
    wait_for_inputs(EARLY)
    q_tile = tl.load(q + image * (M * Q_ROW) + Q_AT + head * D + m[:, None] * Q_ROW + d[None, :], mask=m_ok[:, None], other=0.0)
    k_rows = k + image * (N * K_ROW) + K_AT + head * D
    v_rows = v + image * (N * V_ROW) + V_AT + head * D
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    norm = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, D), tl.float32)
    whole: tl.constexpr = N // BLOCK_N * BLOCK_N
    for start in tl.range(0, whole, BLOCK_N):
        maximum, norm, total = _step(
            q_tile, k_rows, v_rows, start, maximum, norm, total, SCALE, N, K_ROW, V_ROW, D, BLOCK_N, False
        )
    if whole < N:
        maximum, norm, total = _step(
            q_tile, k_rows, v_rows, whole, maximum, norm, total, SCALE, N, K_ROW, V_ROW, D, BLOCK_N, True
        )
    target = out + image * (M * HEADS * D) + head * D + m[:, None] * (HEADS * D) + d[None, :]
    tl.store(target, total / norm[:, None], mask=m_ok[:, None])


def launch_attention(q, k, v, at, heads: int, dim: int, scale: float, tile: AttentionTile = TILE, launch=None):
    """Run the kernel over contiguous tensors; see `attention_kernel`. launch: wrapper of the kernel for PyTorch's compiler."""
    batch, queries, _ = q.shape
    out = q.new_empty(batch, queries, heads * dim)
    kernel = attention_kernel if launch is None else launch(attention_kernel)
    kernel[(-(-queries // tile.queries) * heads * batch,)](
        q,
        k,
        v,
        out,
        SCALE=float(scale) * LOG2_E,
        M=queries,
        N=k.shape[1],
        Q_ROW=q.shape[2],
        K_ROW=k.shape[2],
        V_ROW=v.shape[2],
        Q_AT=at[0],
        K_AT=at[1],
        V_AT=at[2],
        HEADS=heads,
        D=dim,
        BLOCK_M=tile.queries,
        BLOCK_N=tile.keys,
        EARLY=False,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out
