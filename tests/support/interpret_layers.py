"""Run by test_fusing.py with TRITON_INTERPRET=1: the kernels of layers against PyTorch's operators."""

import torch
import torch.nn.functional as F

from detrt.backends.inductor.attention_triton import AttentionTile, launch_attention
from detrt.backends.inductor.layers_triton import LinearTile, depthwise_tile, launch_depthwise, launch_linear_gelu
from detrt.backends.inductor.rows_triton import RowTile, launch_ffn_rows, launch_linear_rows, launch_sum_norm

generator = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=generator)


def equal(got, want, what):
    assert got.shape == want.shape and torch.allclose(got, want, atol=3e-5, rtol=1e-4), (what, float((got - want).abs().max()))


for batch, heads, queries, keys, dim, at in (
    (2, 3, 70, 70, 16, (0, 48, 96)),
    (1, 2, 33, 130, 32, (0, 0, 64)),
    (1, 1, 20, 9, 32, (0, 0, 0)),
    (2, 2, 64, 64, 64, (128, 0, 256)),
):
    width = heads * dim
    q = random(batch, queries, max(at) + width)
    k = q if queries == keys else random(batch, keys, max(at) + width)
    split = [t[..., a : a + width].unflatten(2, (heads, dim)).transpose(1, 2) for t, a in zip((q, k, k), at, strict=True)]
    want = F.scaled_dot_product_attention(*split, scale=0.3).transpose(1, 2).flatten(2)
    for tile in (AttentionTile(32, 32, 4, 2), AttentionTile(64, 64, 4, 1)):
        equal(launch_attention(q, k, k, at, heads, dim, 0.3, tile), want, (queries, keys, tile))

for batch, height, width, channels, side, stride, padding, relu in (
    (1, 9, 7, 24, 5, 1, (2, 2), True),
    (2, 8, 8, 70, 3, 2, (1, 1), False),
    (1, 5, 6, 64, 3, 1, (0, 1), True),
):
    data, weight, bias = random(batch, height, width, channels), random(side, side, channels), random(channels)
    kernel = weight.permute(2, 0, 1)[:, None]
    want = F.conv2d(data.permute(0, 3, 1, 2), kernel, bias, stride, padding, 1, channels)
    # The tiles for few pixels and for many.
    for pixels in (0, 1 << 20):
        got = launch_depthwise(data, weight, bias, stride, padding, relu, depthwise_tile(pixels, channels))
        equal(got.permute(0, 3, 1, 2), want.relu() if relu else want, (channels, side, pixels))

for rows, inputs, outputs in ((70, 48, 40), (33, 96, 130), (200, 100, 72)):
    data, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs)
    for tile in (LinearTile(32, 32, 32, 4, 2), LinearTile(64, 64, 64, 4, 2)):
        equal(launch_linear_gelu(data, weight, bias, tile), F.gelu(F.linear(data, weight, bias)), (rows, inputs, tile))

for rows, inputs, outputs in ((21, 48, 40), (40, 4, 70), (33, 96, 96)):
    wide, weight, bias = random(rows, inputs + 7), random(outputs, inputs), random(outputs)
    for before, after, tile in ((False, True, RowTile(16, 32, 0, 4, 1)), (True, False, RowTile(32, 16, 32, 4, 2))):
        part = wide[:, 5 : 5 + inputs]
        want = F.linear(part.relu() if before else part, weight, bias)
        got = launch_linear_rows(wide, 5, weight, bias, before, after, tile)
        equal(got, want.relu() if after else want, (rows, inputs, tile))
        data, more = random(rows, inputs), random(rows, inputs)
        want = torch.cat([F.linear(data + more, weight[:32], bias[:32]), F.linear(data, weight[32:], bias[32:])], 1)
        equal(launch_linear_rows(data, 0, weight, bias, False, False, tile, None, more, 32), want, (rows, inputs, tile))

for rows, width, hidden, parts in ((21, 48, 128, 2), (40, 64, 256, 4)):
    data, up, down = random(rows, width), random(hidden, width), random(width, hidden) / 8
    bias1, bias2, scale, shift = random(hidden), random(width), random(width), random(width)
    total = data + F.linear(F.linear(data, up, bias1).relu(), down, bias2)
    want, limited = (F.layer_norm(t, (width,), scale, shift, 1e-5) for t in (total, total.clamp(-1.0, 1.0)))
    for tile in (RowTile(16, 64, 0, 4, 2), RowTile(32, 32, 0, 4, 1)):
        sums = launch_ffn_rows(data, up, bias1, down, tile, parts)
        equal(launch_sum_norm(sums, bias2, data, scale, shift, 1e-5), want, (rows, hidden, tile))
        equal(launch_sum_norm(sums, bias2, data, scale, shift, 1e-5, limit=1.0), limited, (rows, hidden, tile))
print("equal")
