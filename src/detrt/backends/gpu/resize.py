"""Resizing, padding and normalisation on the device that runs the model, equal to `detrt.data.preprocess` on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...data.resample import BITS
from ...models.ops.msda import triton_available
from ...spec import InputSpec
from .staging import FIELDS, ROW

BLOCK_Y, BLOCK_X, WARPS = 8, 64, 4


def resize_batch(
    block: Tensor, count: int, pixels: Tensor, mask: Tensor | None, spec: InputSpec, *, kernel: bool | None = None
) -> None:
    """Write the image inputs of a model from a block of bytes (`backends.gpu.staging`). All tensors are on one device.

    Args:
        block: (bytes,) uint8.
        count: number of images.
        pixels: (count, 3, H, W) uint8 or float32; written wholly, padding is 0.
        mask: (count, H, W) int64; written wholly, 1 = image, 0 = padding.
        spec: the input of the model.
        kernel: use the Triton kernel; None: if it can run.
    """
    rows = block[: count * ROW * 8].view(torch.int64).view(count, ROW)
    if triton_available() and pixels.is_cuda if kernel is None else kernel:
        _launch(block, rows, pixels, mask, spec)
        return
    pixels.zero_()
    if mask is not None:
        mask.zero_()
    for index, row in enumerate(rows.tolist()):
        facts = dict(zip(FIELDS, row, strict=False))
        height, width = facts["height"], facts["width"]
        image = _resized(block, facts)
        if not spec.normalize_in_graph:
            mean, std = (torch.tensor(v, dtype=torch.float32, device=image.device) for v in (spec.mean, spec.std))
            image = (image.to(torch.float32) * float(np.float32(spec.rescale)) - mean) / std
        pixels[index, :, :height, :width] = image.permute(2, 0, 1).to(pixels.dtype)
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
            source = (first + tap).clamp_(max=image.shape[axis] - 1)
            total = total + image.index_select(axis, source).to(torch.int32) * weights[tap].view(shape)
        assert isinstance(total, Tensor)
        image = (total >> BITS).clamp_(0, 255).to(torch.uint8)
    return image


def _launch(block: Tensor, rows: Tensor, pixels: Tensor, mask: Tensor | None, spec: InputSpec) -> None:
    from .resize_triton import resize_kernel

    count, _, height, width = pixels.shape
    grid = (-(-width // BLOCK_X), -(-height // BLOCK_Y), count)
    exact = [float(np.float32(v)) for v in (spec.rescale, *spec.mean, *spec.std)]
    resize_kernel[grid](
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
        NORMALIZE=not spec.normalize_in_graph,
        MASK=mask is not None,
        BLOCK_Y=BLOCK_Y,
        BLOCK_X=BLOCK_X,
        num_warps=WARPS,
        enable_fp_fusion=False,  # a fused multiply-add would round once less than the CPU
    )
