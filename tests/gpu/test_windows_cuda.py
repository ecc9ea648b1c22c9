"""Fused layers, attention, and attention inside windows on an NVIDIA GPU: `pytest -m gpu tests/gpu/test_windows_cuda.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from relative_norm import relative

from detrt.backends.inductor.kernels import (
    attention,
    conv_relu,
    depthwise_conv,
    linear_gelu,
    linear_relu,
    portable,
    window_attention,
)
from detrt.models.layers.swin import shift_mask

pytestmark = pytest.mark.gpu

TYPES = {"fp16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 8e-3)}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("window", "heads", "dim", "masked"), [(12, 6, 32, True), (12, 24, 32, False), (7, 3, 32, True), (4, 2, 16, True)]
)
def test_windows_equal_fp64(window, heads, dim, masked, kind):
    dtype, allowed = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    tokens = window**2
    mask = shift_mask(3 * window, 2 * window, window).to(dtype) if masked else None
    qkv = torch.randn(12, tokens, 3 * heads * dim, generator=generator).to(dtype)
    bias = torch.randn(heads, tokens, tokens, generator=generator).to(dtype)
    want = portable(*(None if t is None else t.double() for t in (qkv, bias, mask)), heads, dim**-0.5)
    given = [None if t is None else t.cuda() for t in (qkv, bias, mask)]
    assert relative(window_attention(*given, heads, dim**-0.5), want) < allowed
    compiled = torch.compile(lambda *args: window_attention(*args, heads, dim**-0.5) * 2, fullgraph=True)
    assert relative(compiled(*given), 2 * want) < allowed


@pytest.mark.parametrize("kind", TYPES)
def test_epilogues_equal_fp64(kind):
    dtype, allowed = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((3, 50, 256), (512, 256), (512,)))
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).relu()
    assert relative(linear_relu(x.cuda(), weight.cuda(), bias.cuda()), want) < allowed
    for size, stride, width in ((3, 2, 64), (1, 1, 64), (7, 2, 4)):
        data = torch.randn(2, width, 41, 30, generator=generator).to(dtype)
        kernel = torch.randn(128, width, size, size, generator=generator).to(dtype) / (width * size**2) ** 0.5
        offset = torch.randn(128, generator=generator).to(dtype)
        shape = ([stride] * 2, [size // 2] * 2, [1, 1], 1)
        whole = torch.conv2d(data.double(), kernel.double(), offset.double(), *shape)
        residual = torch.randn(whole.shape, generator=generator).to(dtype)
        for added in (None, residual):
            want = (whole if added is None else whole + added.double()).relu()
            given = [data.cuda(), kernel.cuda(), offset.cuda(), None if added is None else added.cuda()]
            found = conv_relu(*given, *shape)
            assert found.is_contiguous(memory_format=torch.channels_last)
            assert relative(found, want) < allowed, (size, added is not None)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("heads", "dim", "queries", "keys"), [(8, 32, 850, 850), (8, 32, 100, 850), (6, 64, 400, 400), (12, 16, 37, 37)]
)
def test_attention_equals_fp64(heads, dim, queries, keys, kind):
    dtype, allowed = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    width = heads * dim
    q, k = (torch.randn(2, n, 3 * width, generator=generator).to(dtype) for n in (queries, keys))
    if queries == keys:
        k = q
    at = [0, width, 2 * width]
    want = attention(q.double(), k.double(), k.double(), at, heads, dim, dim**-0.5)
    given = [t.cuda() for t in (q, k, k)]
    assert relative(attention(*given, at, heads, dim, dim**-0.5), want) < allowed
    compiled = torch.compile(lambda *t: attention(*t, at, heads, dim, dim**-0.5) * 2, fullgraph=True)
    assert relative(compiled(*given), 2 * want) < allowed


@pytest.mark.parametrize("kind", TYPES)
def test_layers_equal_fp64(kind):
    dtype, allowed = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    for channels, side, stride, relu in ((192, 5, 1, True), (100, 3, 2, False)):
        shapes = ((2, channels, 41, 30), (side, side, channels), (channels,))
        data, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in shapes)
        rest = (stride, [side // 2] * 2, relu)
        want = depthwise_conv(data.double(), weight.double(), bias.double(), *rest)
        assert relative(depthwise_conv(data.cuda(), weight.cuda(), bias.cuda(), *rest), want) < allowed
    x, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((3, 777, 96), (384, 96), (384,)))
    want = linear_gelu(x.double(), weight.double(), bias.double())
    assert relative(linear_gelu(x.cuda(), weight.cuda(), bias.cuda()), want) < allowed
