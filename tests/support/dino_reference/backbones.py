"""ResNet and Swin on original key names; `w` is a dict of tensors, `p` the prefix of the backbone."""

import torch
import torch.nn.functional as F


def linear(w, name, x):
    return x @ w[f"{name}.weight"].T + (w.get(f"{name}.bias", 0.0))


def layer_norm(w, name, x):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def batch_norm(w, name, x):
    shape = (1, -1, 1, 1)
    scale = w[f"{name}.weight"] / torch.sqrt(w[f"{name}.running_var"] + 1e-5)
    shift = w[f"{name}.bias"] - w[f"{name}.running_mean"] * scale
    return x * scale.view(shape) + shift.view(shape)


def resnet(w, p, image, stages):
    x = F.conv2d(image, w[f"{p}conv1.weight"], stride=2, padding=3)
    x = F.max_pool2d(batch_norm(w, f"{p}bn1", x).clamp(min=0), 3, 2, 1)
    found = []
    for stage in range(4):
        block = 0
        while f"{p}layer{stage + 1}.{block}.conv1.weight" in w:
            name = f"{p}layer{stage + 1}.{block}."
            stride = 2 if stage and not block else 1
            y = batch_norm(w, f"{name}bn1", F.conv2d(x, w[f"{name}conv1.weight"])).clamp(min=0)
            y = F.conv2d(y, w[f"{name}conv2.weight"], stride=stride, padding=1)
            y = batch_norm(w, f"{name}bn2", y).clamp(min=0)
            y = batch_norm(w, f"{name}bn3", F.conv2d(y, w[f"{name}conv3.weight"]))
            if f"{name}downsample.0.weight" in w:
                x = batch_norm(w, f"{name}downsample.1", F.conv2d(x, w[f"{name}downsample.0.weight"], stride=stride))
            x = (x + y).clamp(min=0)
            block += 1
        if stage in stages:
            found.append(x)
    return found


def window_bias(table, size):
    """Section 3.2: one number for each relative place of two tokens, (tokens, tokens, heads)."""
    tokens = size * size
    bias = torch.empty(tokens, tokens, table.shape[1])
    for a in range(tokens):
        for b in range(tokens):
            dy, dx = a // size - b // size, a % size - b % size
            bias[a, b] = table[(dy + size - 1) * (2 * size - 1) + dx + size - 1]
    return bias


def swin_block(w, name, x, size, shift, heads):
    """x: (height, width, dim) of one image."""
    height, width, dim = x.shape
    y = layer_norm(w, f"{name}norm1", x)
    rows, columns = -(-height // size) * size, -(-width // size) * size
    padded = torch.zeros(rows, columns, dim)
    padded[:height, :width] = y
    region = torch.zeros(rows, columns)
    if shift:
        padded = torch.roll(padded, (-shift, -shift), (0, 1))
        number = 0
        for v in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
            for h in (slice(0, -size), slice(-size, -shift), slice(-shift, None)):
                region[v, h] = number
                number += 1
    bias = window_bias(w[f"{name}attn.relative_position_bias_table"], size)
    out = torch.zeros(rows, columns, dim)
    for top in range(0, rows, size):
        for left in range(0, columns, size):
            tokens = padded[top : top + size, left : left + size].reshape(-1, dim)
            where = region[top : top + size, left : left + size].flatten()
            q, k, v = linear(w, f"{name}attn.qkv", tokens).split(dim, -1)
            parts = []
            for head in range(heads):
                s = slice(head * dim // heads, (head + 1) * dim // heads)
                score = q[:, s] @ k[:, s].T / (dim // heads) ** 0.5 + bias[:, :, head]
                score = score + (where[:, None] != where[None, :]) * -100.0
                parts.append(torch.softmax(score, -1) @ v[:, s])
            mixed = linear(w, f"{name}attn.proj", torch.cat(parts, -1))
            out[top : top + size, left : left + size] = mixed.view(size, size, dim)
    if shift:
        out = torch.roll(out, (shift, shift), (0, 1))
    x = x + out[:height, :width]
    y = linear(w, f"{name}mlp.fc1", layer_norm(w, f"{name}norm2", x))
    y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
    return x + linear(w, f"{name}mlp.fc2", y)


def swin(w, p, image, stages, size):
    return [torch.stack(maps) for maps in zip(*(swin_image(w, p, one, stages, size) for one in image), strict=True)]


def swin_image(w, p, image, stages, size):
    _, height, width = image.shape
    padded = torch.zeros(3, -(-height // 4) * 4, -(-width // 4) * 4)
    padded[:, :height, :width] = image
    x = F.conv2d(padded[None], w[f"{p}patch_embed.proj.weight"], w[f"{p}patch_embed.proj.bias"], stride=4)[0]
    x = layer_norm(w, f"{p}patch_embed.norm", x.permute(1, 2, 0))
    found = []
    for stage in range(4):
        block = 0
        while f"{p}layers.{stage}.blocks.{block}.norm1.weight" in w:
            name = f"{p}layers.{stage}.blocks.{block}."
            heads = w[f"{name}attn.relative_position_bias_table"].shape[1]
            x = swin_block(w, name, x, size, size // 2 if block % 2 else 0, heads)
            block += 1
        if stage in stages:
            found.append(layer_norm(w, f"{p}norm{stage}", x).permute(2, 0, 1))
        if stage < 3:
            height, width, dim = x.shape
            even = torch.zeros(height + height % 2, width + width % 2, dim)
            even[:height, :width] = x
            merged = torch.cat([even[0::2, 0::2], even[1::2, 0::2], even[0::2, 1::2], even[1::2, 1::2]], -1)
            x = linear(
                w,
                f"{p}layers.{stage}.downsample.reduction",
                layer_norm(w, f"{p}layers.{stage}.downsample.norm", merged),
            )
    return found
