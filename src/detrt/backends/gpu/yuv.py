"""Conversion of 4:2:0 video frames to upright RGB on the device, equal to `detrt.data.video` on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.given import tensor_pixels
from ...data.raw_image import ORIENTATIONS, Colours, LoadedImage, RawImage, YuvImage, upright, yuv_to_rgb
from ...models.ops.msda import triton_available
from .staging import BatchLayout

BLOCK = 512


def fill_rgb(
    rgb: Tensor,
    y: Tensor,
    u: Tensor,
    v: Tensor,
    colours: Colours,
    orientation: int = 1,
    fields: bool = False,
    *,
    kernel: bool | None = None,
) -> None:
    """Write a frame as RGB.

    All tensors are on one device.

    Args:
        rgb: (height * width * 3,) uint8, contiguous; written.
        y: (height, width) uint8; rows may have strides.
        u: half of that, rounded up; rows and columns may have strides.
        v: as `u`.
        colours: the conversion.
        orientation: as in `YuvImage`.
        fields: as in `YuvImage`.
        kernel: use the Triton kernel; None: if it can run.
    """
    height, width = y.shape
    if not (triton_available() and rgb.is_cuda if kernel is None else kernel):
        image = yuv_to_rgb(y.cpu().numpy(), u.cpu().numpy(), v.cpu().numpy(), colours, fields)
        rgb.copy_(torch.from_numpy(upright(image, orientation)).reshape(-1))
        return
    from .yuv_triton import rgb_kernel

    exchanged, rows, columns = ORIENTATIONS[orientation]
    # Steps in the upright image, in pixels, from one row of the frame to the next and from one column to the next.
    steps = (1, height) if exchanged else (width, 1)
    down_reversed, across_reversed = (columns, rows) if exchanged else (rows, columns)
    down, across = (-step if flipped else step for step, flipped in zip(steps, (down_reversed, across_reversed), strict=True))
    base = steps[0] * (height - 1) * down_reversed + steps[1] * (width - 1) * across_reversed
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


@dataclass(frozen=True, slots=True, eq=False)
class GpuImage(RawImage):
    """An upright image on a GPU. pixels: (height, width, 3) uint8 RGB, any strides. ready: CUDA event after which it
    is written, or None."""

    pixels: Tensor
    ready: Any = None

    @property
    def shape(self) -> tuple[int, int, int]:
        height, width, _ = self.pixels.shape
        return height, width, 3

    def rgb(self) -> NDArray[np.uint8]:
        if self.ready is not None:
            self.ready.synchronize()
        return np.ascontiguousarray(self.pixels.cpu().numpy())


def gpu_image(tensor: Tensor) -> GpuImage:
    """A tensor of an image, as `data.given.tensor_pixels` takes it, on its device; in use by the caller's current stream.

    Raises:
        ImageError: it is no image.
    """
    pixels = tensor_pixels(tensor)
    pixels = pixels[..., :3] if pixels.shape[2] > 1 else pixels.expand(-1, -1, 3)
    ready = None
    if pixels.is_cuda:
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(pixels.device))
    return GpuImage(pixels, ready)


def copy_to_block(block: Tensor, plan: BatchLayout, images: Sequence[LoadedImage]) -> list[RawImage]:
    """Copy images that are on the device already into the block, on the current stream.

    Returns the copied images; their memory must live until the copies are done.
    """
    copied: list[RawImage] = []
    for source in plan.sources:
        image = images[source.index]
        if isinstance(image, GpuImage):
            _wait(image.ready, image.pixels)
            height, width, _ = image.shape
            block[source.rgb : source.rgb + height * width * 3].view(height, width, 3).copy_(image.pixels)
        elif isinstance(image, YuvImage) and image.on_gpu:
            _wait(image.ready, None)
            for (offset, shape), plane in zip(source.planes, image.planes, strict=True):
                # The capsule itself, because PyAV's `__dlpack__` takes no stream to wait for.
                pixels = torch.from_dlpack(plane.__dlpack__())
                block[offset : offset + pixels.numel()].view(shape).copy_(pixels)
        else:
            continue
        copied.append(image)
    return copied


def convert_to_rgb(block: Tensor, plan: BatchLayout, images: Sequence[LoadedImage]) -> None:
    """Convert the planes of frames in the block to RGB, on the current stream."""
    for source in plan.sources:
        image = images[source.index]
        if not isinstance(image, YuvImage):
            continue
        planes = [block[offset : offset + int(np.prod(shape))].view(shape) for offset, shape in source.planes]
        y, u, v = planes if len(planes) == 3 else (planes[0], planes[1][..., 0], planes[1][..., 1])
        rgb = block[source.rgb : source.rgb + image.height * image.width * 3]
        fill_rgb(rgb, y, u, v, image.colours, image.orientation, image.fields)


def _wait(ready: Any, pixels: Tensor | None) -> None:
    if ready is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    if pixels is not None:
        pixels.record_stream(stream)
