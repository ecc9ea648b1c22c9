"""A 4:2:0 video frame to upright RGB on the device, equal to what `detrt.data.video` gives on the CPU."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import torch
from torch import Tensor

from ...data.raw_image import Colours, yuv_to_rgb
from ...models.ops.msda import triton_available

BLOCK = 512


def fill_rgb(
    rgb: Tensor,
    y: Tensor,
    u: Tensor,
    v: Tensor,
    colours: Colours,
    turns: int = 0,
    fields: bool = False,
    *,
    kernel: bool | None = None,
) -> None:
    """Write a frame as RGB.

    rgb: (pixels * 3,) uint8, contiguous. y: (height, width) uint8; u, v: half of that, rounded up; rows and, for u and v,
    columns may have strides. turns, fields: as in `YuvPicture`. All on one device. kernel: use the Triton kernel;
    None: where Triton can run it.
    """
    height, width = y.shape
    if not (triton_available() and rgb.is_cuda if kernel is None else kernel):
        image = yuv_to_rgb(y.cpu().numpy(), u.cpu().numpy(), v.cpu().numpy(), colours, fields)
        rgb.copy_(torch.from_numpy(np.ascontiguousarray(np.rot90(image, turns))).reshape(-1))
        return
    from .yuv_triton import rgb_kernel

    base, down, across = (
        (0, width, 1),
        ((width - 1) * height, 1, -height),
        (height * width - 1, -width, -1),
        (height - 1, -1, height),
    )[turns % 4]
    rgb_kernel[(height, -(-width // BLOCK))](
        y,
        u,
        v,
        rgb,
        height,
        width,
        y.stride(0),
        u.stride(0),
        base,
        down,
        across,
        *astuple(colours),
        CHROMA_STEP=u.stride(1),
        INTERLACED=fields,
        BLOCK=BLOCK,
        num_warps=4,
    )
