"""PyTorch ops: linear layers and convolutions with fused epilogues, and window attention.

cuBLASLt and cuDNN add the bias, the residual and the ReLU before they write, so that the result is written once. PyTorch's
compiler does not use that: it writes the result of the matmul, reads it again, and writes it a second time.

Window attention is attention inside windows with a relative position bias and the mask of shifted windows: Liu et al., "Swin
Transformer", arXiv:2103.14030, section 3.2 and equation 4. One kernel reads the merged query, key and value as their matmul
wrote them, and writes what the output matmul reads; the scores stay in registers. PyTorch's fused attention takes no mask that
changes with the window, and needs three tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.ops.msda import decompose_when_compiled, triton_available

LINEAR_RELU = "detrt::linear_relu"
CONV_RELU = "detrt::conv_relu"
_LIBRARY = torch.library.Library("detrt", "FRAGMENT")
_LIBRARY.define("linear_relu(Tensor data, Tensor weight, Tensor bias) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))
_LIBRARY.define(
    "conv_relu(Tensor data, Tensor weight, Tensor bias, Tensor? residual, int[] stride, int[] padding, int[] dilation, "
    "int groups) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _linear_relu(data: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(data @ weight.T + bias): (..., in), (out, in), (out,) -> (..., out)."""
    rows = data.reshape(-1, data.shape[-1])
    return torch.ops.aten._addmm_activation.default(bias, rows, weight.t()).view(*data.shape[:-1], weight.shape[0])


def _linear_relu_fake(data: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return data.new_empty(*data.shape[:-1], weight.shape[0])


def _conv_relu(
    data: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """relu(conv2d(data) + residual), the result with channels last in memory."""
    out = torch.conv2d(data, weight, bias, stride, padding, dilation, groups)
    out = out if residual is None else out + residual
    return out.relu().contiguous(memory_format=torch.channels_last)


def _conv_relu_cuda(
    data: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    data, weight = (t.contiguous(memory_format=torch.channels_last) for t in (data, weight))
    if residual is None:
        out = torch.ops.aten.cudnn_convolution_relu.default(data, weight, bias, stride, padding, dilation, groups)
    else:
        residual = residual.contiguous(memory_format=torch.channels_last)
        out = torch.ops.aten.cudnn_convolution_add_relu.default(
            data, weight, residual, 1.0, bias, stride, padding, dilation, groups
        )
    return out.contiguous(memory_format=torch.channels_last)


def _conv_relu_fake(
    data: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    out = torch.conv2d(data, weight, bias, stride, padding, dilation, groups)
    return torch.empty(out.shape, dtype=out.dtype, device=out.device, memory_format=torch.channels_last)


_LIBRARY.impl("linear_relu", _linear_relu, "CompositeExplicitAutograd")
_LIBRARY.impl("conv_relu", _conv_relu, "CPU")
_LIBRARY.impl("conv_relu", _conv_relu_cuda, "CUDA")
torch.library.register_fake(LINEAR_RELU, _linear_relu_fake, lib=_LIBRARY)
torch.library.register_fake(CONV_RELU, _conv_relu_fake, lib=_LIBRARY)
linear_relu = torch.ops.detrt.linear_relu.default
conv_relu = torch.ops.detrt.conv_relu.default

OP = "detrt::window_attention"
_LIBRARY.define("window_attention(Tensor qkv, Tensor bias, Tensor? mask, int heads, float scale) -> Tensor")


def _run(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    """softmax(q k^T * scale + bias + mask) v of every window and head.

    qkv: (windows, tokens, 3 * heads * dim). bias: (heads, tokens, tokens). mask: (masks, tokens, tokens), window i gets
    mask i % masks; or None. Returns (windows, tokens, heads * dim).

    Raises:
        ValueError: inconsistent shapes.
    """
    _check(qkv, bias, mask, heads)
    if kernel_supports(qkv, heads):
        from .windows_triton import launch_windows

        traced = type(qkv) not in (Tensor, torch.nn.Parameter)
        contiguous = (qkv.contiguous(), bias.contiguous(), None if mask is None else mask.contiguous())
        return launch_windows(*contiguous, heads, scale, torch.library.wrap_triton if traced else None)
    return portable(qkv, bias, mask, heads, scale)


def kernel_supports(qkv: Tensor, heads: int) -> bool:
    """Whether the kernel supports these sizes and types."""
    dim = qkv.shape[2] // (3 * heads)
    low = qkv.dtype in (torch.float16, torch.bfloat16)
    return qkv.device.type == "cuda" and triton_available() and low and dim in (16, 32, 64) and qkv.shape[1] <= 256


def portable(qkv: Tensor, bias: Tensor, mask: Tensor | None, heads: int, scale: float) -> Tensor:
    """Reference implementation in PyTorch operators."""
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
        raise ValueError(f"{OP}: the last axis of qkv must be a multiple of 3 * {heads} heads; got {tuple(qkv.shape)}")
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
decompose_when_compiled(OP, _run, _LIBRARY)
window_attention = torch.ops.detrt.window_attention.default
