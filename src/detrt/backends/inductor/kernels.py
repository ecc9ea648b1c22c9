"""Products and convolutions whose activation happens where they write their result, as PyTorch ops.

cuBLASLt and cuDNN add the bias, the residual and the ReLU before they write, so that the result goes through memory once.
PyTorch's compiler does not use that: it writes the product, reads it again, and writes it a second time.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
