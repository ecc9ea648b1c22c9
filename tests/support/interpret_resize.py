"""Run by test_on_device.py with TRITON_INTERPRET=1: the kernels of images and frames against their references."""

from types import SimpleNamespace

import numpy as np
import torch

from detrt.backends.gpu.resize import resize_batch
from detrt.backends.gpu.staging import layout
from detrt.backends.gpu.yuv import fill_rgb
from detrt.data.preprocess import preprocess
from detrt.data.raw_image import Colours
from detrt.spec import InputSpec

rng = np.random.default_rng(1)
for given in (
    InputSpec("stretch", 40, 56),
    InputSpec("shortest_edge", 40, 56, 32, 60, "bicubic", mask=True, dynamic=True, multiple_of=8),
    InputSpec("fit", 48, 40, mask=True, dtype="float32", normalize_in_graph=False, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)),
):
    images = [rng.integers(0, 256, size, np.uint8) for size in ((50, 30, 3), (140, 33, 3))]
    want = preprocess(images, SimpleNamespace(input=given, decode=SimpleNamespace(in_graph=False)))  # type: ignore[arg-type]
    plan = layout(images, want.resized_sizes_hw, given.resample)
    block = np.empty(plan.upload_size, np.uint8)
    plan.write(block, images)
    pixels = torch.full(want.feeds["pixel_values"].shape, 9, dtype=getattr(torch, given.dtype))
    mask = torch.full((2, *pixels.shape[2:]), 9) if given.mask else None
    resize_batch(torch.from_numpy(block), 2, pixels, mask, given, kernel=True)
    assert np.array_equal(pixels.numpy(), want.feeds["pixel_values"]), given
    assert mask is None or np.array_equal(mask.numpy(), want.feeds["pixel_mask"]), given

# Frames in both forms of chroma, in each orientation, with an odd width, and with rows longer than the image.
for orientation in range(1, 9):
    for height, width in ((34, 50), (16, 513)):
        half = (height + 1) // 2, (width + 1) // 2
        luma = torch.from_numpy(rng.integers(0, 256, (height, width + 7), np.uint8))[:, :width]
        both = torch.from_numpy(rng.integers(0, 256, (*half, 2), np.uint8))
        blue, red = both[..., 0], both[..., 1]
        colours = Colours.of(1, orientation % 2 == 0)
        fields = height % 4 == 0
        for u, v in ((blue, red), (blue.contiguous(), red.contiguous())):
            got, want = torch.zeros(2, height * width * 3, dtype=torch.uint8)
            fill_rgb(got, luma, u, v, colours, orientation, fields, kernel=True)
            fill_rgb(want, luma, u, v, colours, orientation, fields, kernel=False)
            assert torch.equal(got, want), (orientation, height, width)
