"""Pictures that become RGB on the device: frames as their codec leaves them, and files that a GPU decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.raw_image import Picture, YuvPicture
from .staging import Image, Layout
from .yuv import fill_rgb


@dataclass(frozen=True, slots=True, eq=False)
class GpuPicture(Picture):
    """An upright picture on a GPU. pixels: (height, width, 3) uint8 RGB, any strides. ready: a CUDA event after which it
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


def bring(block: Tensor, plan: Layout, images: Sequence[Image]) -> list[Picture]:
    """Copy what lies on the device already into its place, on the current stream; the pictures that must stay until then."""
    kept: list[Picture] = []
    for source in plan.sources:
        image = images[source.index]
        if isinstance(image, GpuPicture):
            _wait(image.ready, image.pixels)
            height, width, _ = image.shape
            block[source.rgb : source.rgb + height * width * 3].view(height, width, 3).copy_(image.pixels)
        elif isinstance(image, YuvPicture) and image.on_gpu:
            _wait(image.ready, None)
            for (place, shape), plane in zip(source.planes, image.planes, strict=True):
                # The capsule itself: PyAV knows no stream that it could wait for.
                given = torch.from_dlpack(plane.__dlpack__())
                block[place : place + given.numel()].view(shape).copy_(given)
        else:
            continue
        kept.append(image)
    return kept


def make(block: Tensor, plan: Layout, images: Sequence[Image]) -> None:
    """Make RGB of frames, on the current stream, from their planes in the block."""
    for source in plan.sources:
        image = images[source.index]
        if not isinstance(image, YuvPicture):
            continue
        planes = [block[place : place + int(np.prod(shape))].view(shape) for place, shape in source.planes]
        y, u, v = planes if len(planes) == 3 else (planes[0], planes[1][..., 0], planes[1][..., 1])
        rgb = block[source.rgb : source.rgb + image.height * image.width * 3]
        fill_rgb(rgb, y, u, v, image.colours, image.turns, image.fields)


def _wait(ready: Any, pixels: Tensor | None) -> None:
    if ready is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    if pixels is not None:
        pixels.record_stream(stream)
