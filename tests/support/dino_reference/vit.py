"""Co-DETR's ViT (EVA-02 blocks, windows) and its feature pyramid on original key names, patch by patch."""

import math

import torch
import torch.nn.functional as F

from .backbones import linear


def normed(w, name, x, eps):
    """LayerNorm over the last axis."""
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / (variance + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def turned(x, row, column, height, width):
    """One head of one token: channels 2i and 2i+1 as a plane, turned by the row in the first half, then by the column."""
    size = len(x)
    out = torch.empty(size)
    for pair in range(size // 2):
        inside = pair % (size // 4)
        place = row / height * 16 if pair < size // 4 else column / width * 16
        angle = place / 10000 ** (2 * inside / (size // 2))
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(w, name, x, heads):
    """x: (height, width, dim), all of which attends to all."""
    height, width, dim = x.shape
    tokens = x.reshape(-1, dim)
    q = tokens @ w[f"{name}.q_proj.weight"].T + w[f"{name}.q_bias"]
    k = tokens @ w[f"{name}.k_proj.weight"].T
    v = tokens @ w[f"{name}.v_proj.weight"].T + w[f"{name}.v_bias"]
    size = dim // heads
    found = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        places = [(row, column, height, width) for row in range(height) for column in range(width)]
        qs = torch.stack([turned(one, *place) for one, place in zip(q[:, part], places, strict=True)])
        ks = torch.stack([turned(one, *place) for one, place in zip(k[:, part], places, strict=True)])
        found.append(torch.softmax(qs @ ks.T / size**0.5, -1) @ v[:, part])
    return linear(w, f"{name}.proj", torch.cat(found, -1)).view(height, width, dim)


def block(w, name, x, heads, window):
    height, width, dim = x.shape
    y = normed(w, f"{name}.norm1", x, 1e-6)
    if window:
        rows, columns = -(-height // window) * window, -(-width // window) * window
        padded, out = torch.zeros(rows, columns, dim), torch.zeros(rows, columns, dim)
        padded[:height, :width] = y
        for top in range(0, rows, window):
            for left in range(0, columns, window):
                part = (slice(top, top + window), slice(left, left + window))
                out[part] = attention(w, f"{name}.attn", padded[part], heads)
        y = out[:height, :width]
    else:
        y = attention(w, f"{name}.attn", y, heads)
    x = x + y
    y = normed(w, f"{name}.norm2", x, 1e-6)
    gate = linear(w, f"{name}.mlp.w1", y)
    y = normed(w, f"{name}.mlp.ffn_ln", gate * torch.sigmoid(gate) * linear(w, f"{name}.mlp.w2", y), 1e-6)
    return x + linear(w, f"{name}.mlp.w3", y)


def vit(w, image, windowed):
    """(n, 3, h, w) -> [(n, dim, h/16, w/16)]. windowed: indices of the blocks with windows."""
    table = w["backbone.pos_embed"][:, 1:]
    side = round(table.shape[1] ** 0.5)
    tokens, size = w["backbone.rope_win.freqs_cos"].shape
    found = []
    for one in image:
        x = F.conv2d(one[None], w["backbone.patch_embed.proj.weight"], w["backbone.patch_embed.proj.bias"], stride=16)
        grid = table.view(1, side, side, -1).permute(0, 3, 1, 2)
        x = (x + F.interpolate(grid, x.shape[-2:], mode="bicubic", align_corners=False))[0].permute(1, 2, 0)
        index = 0
        while f"backbone.blocks.{index}.norm1.weight" in w:
            window = round(tokens**0.5) if index in windowed else 0
            x = block(w, f"backbone.blocks.{index}", x, x.shape[-1] // size, window)
            index += 1
        found.append(normed(w, "backbone.out_norm", x, 1e-5).permute(2, 0, 1))
    return [torch.stack(found)]


# Kinds of the layers of each level, as the config's neck has them; numbers are indices in the checkpoint's names.
PYRAMID = {
    "p2": (
        "up",
        "conv",
        "norm",
        "gelu",
        "up",
        "conv",
        "norm",
        "gelu",
        "conv",
        "norm",
        "gelu",
        "conv",
        "norm",
    ),
    "p3": ("up", "conv", "norm", "gelu", "conv", "norm", "gelu", "conv", "norm"),
    "p4": ("conv", "norm", "gelu", "conv", "norm"),
    "p5": ("pool", "conv", "norm", "gelu", "conv", "norm"),
    "p6": ("pool", "half", "norm", "gelu", "conv", "norm", "gelu", "conv", "norm"),
}


def pyramid(w, x):
    found = []
    for level, kinds in PYRAMID.items():
        y = x
        for index, kind in enumerate(kinds):
            name = f"neck.{level}.{index}"
            if kind == "up":
                y = y.repeat_interleave(2, 2).repeat_interleave(2, 3)
            elif kind == "pool":
                y = F.max_pool2d(y, 3, 2, 1)
            elif kind == "gelu":
                y = 0.5 * y * (1 + torch.erf(y / 2**0.5))
            elif kind == "norm":
                y = normed(w, name, y.permute(0, 2, 3, 1), 1e-6).permute(0, 3, 1, 2)
            else:
                kernel = w[f"{name}.weight"]
                y = F.conv2d(y, kernel, stride=2 if kind == "half" else 1, padding=kernel.shape[-1] // 2)
        found.append(y)
    return found
