"""Run by test_on_device.py with TRITON_INTERPRET=1: the kernel of pictures against `preprocess`."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from detrt.kernels.pictures import fill_pictures
from detrt.on_device.staging import layout
from detrt.preprocess import preprocess
from detrt.spec import InputSpec


@dataclass
class Rule:
    in_graph: bool = False


@dataclass
class Spec:
    """What `preprocess` reads of a ModelSpec."""

    input: InputSpec
    decode: Any = field(default_factory=Rule)


rng = np.random.default_rng(1)
for given in (
    InputSpec("stretch", 40, 56),
    InputSpec("shortest_edge", 40, 56, 32, 60, "bicubic", mask=True, dynamic=True, multiple_of=8),
    InputSpec("fit", 48, 40, mask=True, dtype="float32", normalize_in_graph=False, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)),
):
    images = [rng.integers(0, 256, size, np.uint8) for size in ((50, 30, 3), (140, 33, 3))]
    want = preprocess(images, Spec(given))  # type: ignore[arg-type]
    plan = layout(images, want.resized_sizes_hw, given.resample)
    block = np.empty(plan.size, np.uint8)
    plan.write(block)
    pixels = torch.full(want.feeds["pixel_values"].shape, 9, dtype=getattr(torch, given.dtype))
    mask = torch.full((2, *pixels.shape[2:]), 9) if given.mask else None
    fill_pictures(torch.from_numpy(block), 2, pixels, mask, given, kernel=True)
    assert np.array_equal(pixels.numpy(), want.feeds["pixel_values"]), given
    assert mask is None or np.array_equal(mask.numpy(), want.feeds["pixel_mask"]), given
