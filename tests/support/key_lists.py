"""Key lists of published checkpoints, and random weights for them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch

KEYS = Path(__file__).parents[1] / "data" / "keys"


def meta_state(name: str) -> dict[str, torch.Tensor]:
    """A published key list as tensors without values."""
    data = json.loads((KEYS / f"{name}.json").read_text("utf-8"))
    return {key: torch.empty([int(s) for s in shape.split("x") if s], device="meta") for key, shape in data["keys"].items()}


def random_state(name: str) -> dict[str, torch.Tensor]:
    """A published key list filled with seeded random numbers: parts of one long draw, which differ from key to key."""
    data = json.loads((KEYS / f"{name}.json").read_text("utf-8"))
    noise = torch.empty(1 << 20).normal_(0, 0.02, generator=torch.Generator().manual_seed(7))
    state = {}
    for index, (key, shape) in enumerate(data["keys"].items()):
        size = [int(side) for side in shape.split("x") if side]
        if key in data["values"]:
            state[key] = torch.tensor(data["values"][key]).reshape(size)
        elif key == "decoder.anchors":
            state[key] = torch.full(size, math.inf)  # as near an edge: it tells nothing but its count
        elif key.endswith("num_batches_tracked"):
            state[key] = torch.tensor(1000)
        elif key.endswith("bias_mask"):
            state[key] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(size[0] // 3)
        else:
            start, count = 257 * index, math.prod(size)
            long = noise if start + count <= len(noise) else noise.repeat((start + count) // len(noise) + 1)
            drawn = long[start : start + count].reshape(size).clone()
            state[key] = 50 * drawn.abs() if key.endswith("running_var") else drawn
    return state
