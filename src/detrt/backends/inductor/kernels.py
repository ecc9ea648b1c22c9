"""PyTorch ops: linear layers and convolutions with fused epilogues, attention, and attention inside windows.

cuBLASLt and cuDNN add the bias, the residual and the ReLU before they write, so that the result is written once. PyTorch's
compiler does not use that: it writes the result of the matmul, reads it again, and writes it a second time.

Window attention is attention inside windows with a relative position bias and the mask of shifted windows: Liu et al., "Swin
Transformer", arXiv:2103.14030, section 3.2 and equation 4. One kernel reads the merged query, key and value as their matmul
wrote them, and writes what the output matmul reads; the scores stay in registers. PyTorch's fused attention takes no mask that
changes with the window, and needs three tensors. Attention without a bias reads them the same way: cuDNN's kernel for it, which PyTorch
calls, takes twice as long for a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...models.ops.compiling import decompose_when_compiled, kernel_wrapper
from ...models.ops.msda import triton_available

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

        contiguous = (qkv.contiguous(), bias.contiguous(), None if mask is None else mask.contiguous())
        return launch_windows(*contiguous, heads, scale, kernel_wrapper(qkv))
    return portable(qkv, bias, mask, heads, scale)


def kernel_supports(qkv: Tensor, heads: int) -> bool:
    """Whether the kernel supports these sizes and types."""
    dim = qkv.shape[2] // (3 * heads)
    return _has_kernel(qkv) and dim in (16, 32, 64) and qkv.shape[1] <= 256


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

ATTENTION = "detrt::attention"
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v, int[] at, int heads, int dim, float scale) -> Tensor")
ATTENTION_DIMS = (16, 32, 64)
# Products of queries and keys of all images and heads: with more, PyTorch's attention takes as long on an H100.
MAX_ATTENTION_PRODUCTS = 1 << 24


def _attention(q: Tensor, k: Tensor, v: Tensor, at: Sequence[int], heads: int, dim: int, scale: float) -> Tensor:
    """softmax(q k^T * scale) v of every image and head.

    q: (batch, queries, any width), k and v: (batch, keys, any width); the heads lie side by side from column `at[0]`, `at[1]` and `at[2]`
    on. They may be one tensor. Returns (batch, queries, heads * dim).

    Raises:
        ValueError: inconsistent shapes.
    """
    _check_attention(q, k, v, at, heads, dim)
    if _has_kernel(q) and dim in ATTENTION_DIMS:
        from .attention_triton import launch_attention

        return launch_attention(q.contiguous(), k.contiguous(), v.contiguous(), at, heads, dim, scale, launch=kernel_wrapper(q))
    end = heads * dim
    split = [t[..., a : a + end].unflatten(2, (heads, dim)).transpose(1, 2) for t, a in zip((q, k, v), at, strict=True)]
    weights = (split[0] @ split[1].transpose(-1, -2) * scale).softmax(-1).to(v.dtype)
    return (weights @ split[2]).transpose(1, 2).flatten(2)


def _check_attention(q: Tensor, k: Tensor, v: Tensor, at: Sequence[int], heads: int, dim: int) -> None:
    for t, start in zip((q, k, v), at, strict=True):
        if t.ndim != 3 or not 0 <= start <= t.shape[2] - heads * dim:
            raise ValueError(
                f"{ATTENTION}: expected (batch, tokens, width) with {heads} heads of {dim} from column {start} on; got {tuple(t.shape)}"
            )
    if k.shape[:2] != v.shape[:2] or q.shape[0] != k.shape[0]:
        raise ValueError(f"{ATTENTION}: keys and values must be of the same images; got {tuple(k.shape)} and {tuple(v.shape)}")


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, at: Sequence[int], heads: int, dim: int, scale: float) -> Tensor:
    _check_attention(q, k, v, at, heads, dim)
    return q.new_empty(q.shape[0], q.shape[1], heads * dim)


def attention_is_faster(batch: int, heads: int, queries: int, keys: int, dim: int) -> bool:
    """Whether the kernel takes less time than PyTorch's, which clears a buffer first, as measured on an H100."""
    return dim in ATTENTION_DIMS and batch * heads * queries * keys <= MAX_ATTENTION_PRODUCTS


DEPTHWISE = "detrt::depthwise_conv"
_LIBRARY.define("depthwise_conv(Tensor data, Tensor weight, Tensor bias, int stride, int[] padding, bool relu) -> Tensor")


def _depthwise(data: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: Sequence[int], relu: bool) -> Tensor:
    """A convolution of each channel with its own kernel, the bias and ReLU; cuDNN runs two kernels for it, and PyTorch a third.

    data: (batch, channels, height, width), read with channels last. weight: (rows, columns, channels). bias: (channels,). padding: (rows,
    columns), on both sides. The result has channels last in memory.
    """
    if _has_kernel(data):
        from .layers_triton import launch_depthwise

        rows = data.permute(0, 2, 3, 1).contiguous()
        return launch_depthwise(rows, weight, bias, stride, padding, relu, launch=kernel_wrapper(data)).permute(0, 3, 1, 2)
    kernel = weight.permute(2, 0, 1)[:, None]
    out = torch.conv2d(data, kernel, bias, [stride, stride], list(padding), [1, 1], weight.shape[2])
    return (out.relu() if relu else out).contiguous(memory_format=torch.channels_last)


def _depthwise_fake(data: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: Sequence[int], relu: bool) -> Tensor:
    batch, channels, *sides = data.shape
    out = [(side + 2 * pad - size) // stride + 1 for side, pad, size in zip(sides, padding, weight.shape[:2], strict=True)]
    return data.new_empty(batch, *out, channels).permute(0, 3, 1, 2)


LINEAR_GELU = "detrt::linear_gelu"
_LIBRARY.define("linear_gelu(Tensor data, Tensor weight, Tensor bias) -> Tensor")


def _linear_gelu(data: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(data @ weight.T + bias), with the error function: (..., in), (out, in), (out,) -> (..., out)."""
    if _has_kernel(data):
        from .layers_triton import launch_linear_gelu

        rows = data.reshape(-1, data.shape[-1]).contiguous()
        out = launch_linear_gelu(rows, weight.contiguous(), bias, launch=kernel_wrapper(data))
        return out.view(*data.shape[:-1], weight.shape[0])
    return torch.nn.functional.gelu(torch.nn.functional.linear(data, weight, bias))


def linear_gelu_is_faster(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the kernel takes less time than cuBLAS with an elementwise kernel behind it, as measured on an H100.

    It saves writing and reading the result, which is what takes the time of layers with few inputs, such as Swin's first ones.
    """
    return inputs <= 192 and rows * outputs >= 1 << 22


LINEAR_ROWS, FFN_ROWS = "detrt::linear_rows", "detrt::ffn_rows"
_LIBRARY.define(
    "linear_rows(Tensor data, int at, Tensor weight, Tensor bias, bool relu_before, bool relu, Tensor? more=None, int added=0) -> Tensor"
)
# What `added` is a multiple of, unless it is all outputs.
ADDED_MULTIPLE = 64
_LIBRARY.define(
    "ffn_rows(Tensor data, Tensor weight1, Tensor bias1, Tensor weight2, Tensor bias2, Tensor scale, Tensor shift, float eps, "
    "float limit=0.0) -> Tensor"
)


def _linear_rows(
    data: Tensor,
    at: int,
    weight: Tensor,
    bias: Tensor,
    relu_before: bool,
    relu: bool,
    more: Tensor | None = None,
    added: int = 0,
) -> Tensor:
    """A linear layer over few rows: (..., width), (out, in), (out,) -> (..., out); of the data the `in` columns from `at` on are read.

    relu_before, relu: of the data, of the result. more: of the shape of the data, which must be `in` wide; the first `added` outputs are
    those of data + more.
    """
    if _has_kernel(data):
        from .rows_triton import launch_linear_rows, linear_rows_tile

        rows, other = _rows(data), None if more is None else _rows(more)
        tile, wrapper = linear_rows_tile(rows.shape[0], weight.shape[1]), kernel_wrapper(data)
        out = launch_linear_rows(rows, at, weight.contiguous(), bias, relu_before, relu, tile, wrapper, other, added)
        return out.view(*data.shape[:-1], weight.shape[0])
    columns = data[..., at : at + weight.shape[1]]
    if more is not None:
        first = torch.nn.functional.linear(columns + more, weight[:added], bias[:added])
        out = torch.cat([first, torch.nn.functional.linear(columns, weight[added:], bias[added:])], -1)
    else:
        out = torch.nn.functional.linear(columns.relu() if relu_before else columns, weight, bias)
    return out.relu() if relu else out


def _linear_rows_fake(data: Tensor, at: int, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    return data.new_empty(*data.shape[:-1], weight.shape[0])


def linear_rows_is_faster(rows: int, inputs: int, outputs: int) -> bool:
    """Whether the kernel takes less time than cuBLAS, as measured on an H200."""
    if rows < 2 or inputs % 4:
        return False
    if rows <= 512:
        return (inputs <= 512 and outputs <= 1024) or (inputs <= 1024 and outputs <= 256)
    return rows <= 1024 and inputs <= 256 and outputs <= 512


def _ffn_rows(
    data: Tensor,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    limit: float = 0.0,
) -> Tensor:
    """layer_norm(data + linear(relu(linear(data)))) over few rows: (..., width) -> (..., width).

    weight1: (hidden, width). weight2: (width, hidden). scale, shift: (width,). limit: of the magnitude of the sum; 0: none. Each program takes a part of the hidden units, so that many
    multiprocessors read weights; a second kernel adds the parts in FP32.
    """
    if _has_kernel(data):
        from .rows_triton import ffn_tile, launch_ffn_rows, launch_sum_norm

        rows, wrapper = _rows(data), kernel_wrapper(data)
        tile = ffn_tile(rows.shape[0])
        parts = launch_ffn_rows(rows, weight1.contiguous(), bias1, weight2.contiguous(), tile, launch=wrapper)
        return launch_sum_norm(parts, bias2, rows, scale, shift, eps, wrapper, limit).view(data.shape)
    hidden = torch.nn.functional.linear(data, weight1, bias1).relu()
    total = data + torch.nn.functional.linear(hidden, weight2, bias2)
    total = total.clamp(-limit, limit) if limit else total
    return torch.nn.functional.layer_norm(total, scale.shape, scale, shift, eps)


def _ffn_rows_fake(data: Tensor, *_: Any, **__: Any) -> Tensor:
    return data.new_empty(data.shape)


def ffn_rows_is_faster(rows: int, width: int, hidden: int) -> bool:
    """Whether the kernels take less time than two of cuBLAS and the norm, as measured on an H200."""
    return 1 < rows <= 512 and width <= 256 and hidden % 1024 == 0 and hidden <= 2048


def _rows(data: Tensor) -> Tensor:
    return data.reshape(-1, data.shape[-1]).contiguous()


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and triton_available() and tensor.dtype in (torch.float16, torch.bfloat16)


for _name, _kernel, _shapes in (
    (ATTENTION, _attention, _attention_fake),
    (DEPTHWISE, _depthwise, _depthwise_fake),
    (LINEAR_GELU, _linear_gelu, _linear_relu_fake),
    (LINEAR_ROWS, _linear_rows, _linear_rows_fake),
    (FFN_ROWS, _ffn_rows, _ffn_rows_fake),
):
    torch.library.register_fake(_name, _shapes, lib=_LIBRARY)
    _LIBRARY.impl(_name.removeprefix("detrt::"), _kernel, "CompositeExplicitAutograd")
    decompose_when_compiled(_name, _kernel, _LIBRARY)
attention = torch.ops.detrt.attention.default
depthwise_conv = torch.ops.detrt.depthwise_conv.default
linear_gelu = torch.ops.detrt.linear_gelu.default
linear_rows = torch.ops.detrt.linear_rows.default
ffn_rows = torch.ops.detrt.ffn_rows.default
