"""Seeded random tensors for a list of original keys."""

import torch


def fill(keys, seed=0):
    """name -> tensor for name -> shape; the tensors that follow from others are computed from them."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in keys.items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "num_batches_tracked":
            state[name] = torch.tensor(7)
        elif leaf == "relative_position_index":
            state[name] = window_index(round(shape[0] ** 0.5))
        elif leaf in ("freqs_cos", "freqs_sin"):
            state[name] = rotary(round(shape[0] ** 0.5), shape[1], leaf)
        elif leaf == "running_var":
            state[name] = torch.rand(shape, generator=generator) + 0.6
        elif len(shape) < 2:
            centre = 1.0 if leaf == "weight" else 0.0
            state[name] = centre + 0.1 * torch.randn(shape, generator=generator)
        elif "embed" in leaf or ("embed" in name and len(shape) == 2 and "class" not in name and "bbox" not in name):
            state[name] = torch.randn(shape, generator=generator)
        else:
            fan_in = torch.Size(shape[1:]).numel()
            state[name] = torch.randn(shape, generator=generator) / fan_in**0.5
    for name in state:
        if name.startswith(("transformer.decoder.class_embed.", "transformer.decoder.bbox_embed.")):
            state[name] = state[name.removeprefix("transformer.decoder.")].clone()
    return state


def rotary(side, head, leaf):
    """(side**2, head): the table of rotary positions of a square of patches."""
    table = torch.empty(side, side, head)
    for row in range(side):
        for column in range(side):
            for channel in range(head):
                place = row if channel < head // 2 else column
                power = channel % (head // 2) // 2 * 2 / (head // 2)
                angle = torch.tensor(place / side * 16 / 10000**power)
                table[row, column, channel] = angle.cos() if leaf == "freqs_cos" else angle.sin()
    return table.view(-1, head)


def window_index(size):
    """Swin's table row of every pair of tokens of a window, pair by pair."""
    index = torch.empty(size * size, size * size, dtype=torch.int64)
    for a in range(size * size):
        for b in range(size * size):
            dy, dx = a // size - b // size, a % size - b % size
            index[a, b] = (dy + size - 1) * (2 * size - 1) + dx + size - 1
    return index
