"""Pictures that become RGB on the device: frames as their codec leaves them, and files that a GPU decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.frames import fill_rgb
from ..pictures import Picture, YuvPicture
from .staging import Made


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


def make(block: Tensor, made: Made) -> None:
    """Write the RGB of a picture into its place of the block, on the current stream."""
    picture = made.picture
    height, width, _ = picture.shape
    rgb = block[made.place : made.place + height * width * 3]
    if isinstance(picture, GpuPicture):
        _wait(picture.ready, picture.pixels)
        rgb.view(height, width, 3).copy_(picture.pixels)
        return
    assert isinstance(picture, YuvPicture)
    if picture.on_gpu:
        # The capsules themselves: PyAV knows no stream that it could wait for.
        y, both = (torch.from_dlpack(plane.__dlpack__()) for plane in picture.planes)
        _wait(picture.ready, None)
        u, v = both[..., 0], both[..., 1]
    else:
        y, u, v = (
            block[place : place + plane.size].view(plane.shape) for place, plane in zip(made.planes, picture.planes, strict=True)
        )
    fill_rgb(rgb, y, u, v, picture.colours, picture.turns)


def _wait(ready: Any, pixels: Tensor | None) -> None:
    if ready is None:
        return
    stream = torch.cuda.current_stream()
    stream.wait_event(ready)
    if pixels is not None:
        pixels.record_stream(stream)
