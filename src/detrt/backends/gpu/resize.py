"""Resized, padded and normalised pictures on the device that runs the model, equal to `detrt.data.preprocess` on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...data.resample import BITS
from ...models.ops.msda import triton_available
from ...spec import InputSpec
from .staging import FIELDS, ROW

BLOCK_Y, BLOCK_X, WARPS = 8, 64, 4


def fill_pictures(
    block: Tensor, count: int, pixels: Tensor, mask: Tensor | None, given: InputSpec, *, kernel: bool | None = None
) -> None:
    """Make the input of a model from a block of bytes (`on_device.staging`).

    block: (bytes,) uint8. count: pictures. pixels: (count, 3, H, W) uint8 or float32, written wholly; padding is 0.
    mask: (count, H, W) int64, likewise: 1 where the picture is. All on one device. kernel: use the Triton kernel; None:
    where Triton can run it.
    """
    rows = block[: count * ROW * 8].view(torch.int64).view(count, ROW)
    if triton_available() and pixels.is_cuda if kernel is None else kernel:
        _launch(block, rows, pixels, mask, given)
        return
    pixels.zero_()
    if mask is not None:
        mask.zero_()
    for index, row in enumerate(rows.tolist()):
        facts = dict(zip(FIELDS, row, strict=False))
        height, width = facts["height"], facts["width"]
        picture = _resized(block, facts)
        if not given.normalize_in_graph:
            mean, std = (torch.tensor(v, dtype=torch.float32, device=picture.device) for v in (given.mean, given.std))
            picture = (picture.to(torch.float32) * float(np.float32(given.rescale)) - mean) / std
        pixels[index, :, :height, :width] = picture.permute(2, 0, 1).to(pixels.dtype)
        if mask is not None:
            mask[index, :height, :width] = 1


def _resized(block: Tensor, facts: dict[str, int]) -> Tensor:
    height, width, start = facts["source_height"], facts["source_width"], facts["source"]
    image = block[start : start + height * width * 3].view(height, width, 3)
    words = block[: block.numel() // 4 * 4].view(torch.int32)
    for axis, name, length in ((0, "y", facts["height"]), (1, "x", facts["width"]))[:: 1 if facts["down_first"] else -1]:
        first = words[facts[f"{name}_first"] :][:length].long()
        taps = facts[f"{name}_taps"]
        weights = words[facts[f"{name}_weights"] :][: taps * length].view(taps, length)
        shape = [1, 1, 1]
        shape[axis] = length
        total: Tensor | int = 1 << (BITS - 1)
        for tap in range(taps):
            place = (first + tap).clamp_(max=image.shape[axis] - 1)
            total = total + image.index_select(axis, place).to(torch.int32) * weights[tap].view(shape)
        assert isinstance(total, Tensor)
        image = (total >> BITS).clamp_(0, 255).to(torch.uint8)
    return image


def _launch(block: Tensor, rows: Tensor, pixels: Tensor, mask: Tensor | None, given: InputSpec) -> None:
    from .resize_triton import pictures_kernel

    count, _, height, width = pixels.shape
    grid = (-(-width // BLOCK_X), -(-height // BLOCK_Y), count)
    exact = [float(np.float32(v)) for v in (given.rescale, *given.mean, *given.std)]
    pictures_kernel[grid](
        block,
        block[: block.numel() // 4 * 4].view(torch.int32),
        rows,
        pixels,
        pixels if mask is None else mask,
        *exact,
        height,
        width,
        ROW=ROW,
        FLOAT=pixels.dtype == torch.float32,
        NORMALIZE=not given.normalize_in_graph,
        MASK=mask is not None,
        BLOCK_Y=BLOCK_Y,
        BLOCK_X=BLOCK_X,
        num_warps=WARPS,
        enable_fp_fusion=False,  # a fused multiply-add would round once less than the CPU
    )
