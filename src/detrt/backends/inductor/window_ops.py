"""Attention inside windows with a relative position bias and the mask of shifted windows, as a PyTorch op.

Liu et al., "Swin Transformer", arXiv:2103.14030, sections 3.2 and equation 4. One kernel reads the joined query, key and
value as their product wrote them, and writes what the output product reads; the scores stay in registers. Fused attention
of PyTorch takes no mask that changes with the window, and wants three tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.ops.msda import see_through, triton_available

OP = "detrt::window_attention"
_LIBRARY = torch.library.Library("detrt", "FRAGMENT")
_LIBRARY.define("window_attention(Tensor qkv, Tensor bias, Tensor? mask, int heads, float scale) -> Tensor")


def _run(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    """softmax(q k^T * scale + bias + mask) v of every window and head.

    qkv: (windows, tokens, 3 * heads * dim). bias: (heads, tokens, tokens). mask: (masks, tokens, tokens), window i gets
    mask i % masks; or None. Gives (windows, tokens, heads * dim).

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check(qkv, bias, mask, heads)
    if fits(qkv, heads):
        from .windows_triton import attend

        traced = type(qkv) not in (Tensor, torch.nn.Parameter)
        parts = (qkv.contiguous(), bias.contiguous(), None if mask is None else mask.contiguous())
        return attend(*parts, heads, scale, torch.library.wrap_triton if traced else None)
    return portable(qkv, bias, mask, heads, scale)


def fits(qkv: Tensor, heads: int) -> bool:
    """Whether the kernel takes these sizes and types."""
    dim = qkv.shape[2] // (3 * heads)
    low = qkv.dtype in (torch.float16, torch.bfloat16)
    return qkv.device.type == "cuda" and triton_available() and low and dim in (16, 32, 64) and qkv.shape[1] <= 256


def portable(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    """The definition, in plain operators."""
    windows, tokens, width = qkv.shape
    q, k, v = qkv.view(windows, tokens, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-1, -2) * scale + bias
    if mask is not None:
        scores = (scores.unflatten(0, (-1, mask.shape[0])) + mask[:, None]).flatten(0, 1)
    weights = scores.softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2).reshape(windows, tokens, width // 3)


def _check(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int) -> None:
    windows, tokens, width = qkv.shape
    if width % (3 * heads):
        raise ValueError(f"{OP}: the last side of qkv must be a multiple of 3 * {heads} heads; got {tuple(qkv.shape)}")
    if tuple(bias.shape) != (heads, tokens, tokens):
        raise ValueError(f"{OP}: bias must be {(heads, tokens, tokens)}; got {tuple(bias.shape)}")
    if mask is not None and (tuple(mask.shape[1:]) != (tokens, tokens) or windows % mask.shape[0]):
        raise ValueError(
            f"{OP}: mask must be (masks, {tokens}, {tokens}) with masks a divisor of {windows} windows; got {tuple(mask.shape)}"
        )


@torch.library.register_fake(OP, lib=_LIBRARY)
def _fake(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    _check(qkv, bias, mask, heads)
    return qkv.new_empty(qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3)


_LIBRARY.impl("window_attention", _run, "CompositeExplicitAutograd")
see_through(OP, _run, _LIBRARY)

window_attention = torch.ops.detrt.window_attention.default
