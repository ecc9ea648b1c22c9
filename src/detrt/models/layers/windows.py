"""Attention inside the windows of a map whose sides need no multiple of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def blocks_of(side: Any, size: int) -> Any:
    """How many blocks of a size cover a side, which may be symbolic.

    The quotient rises with the side, so that a compiler knows its largest value. Of a remainder, `-side % size`, TensorRT-RTX takes the range
    of sides as the largest, and plans memory for maps that are so much larger behind every padding.
    """
    return (side + size - 1) // size


def pad_to_multiple(x: Tensor, multiple: int, axis: int) -> Tensor:
    """Zeros behind the map whose height is this axis of x and whose width the next, up to the next multiple."""
    height, width = (blocks_of(side, multiple) * multiple - side for side in x.shape[axis : axis + 2])
    return F.pad(x, (0, 0) * (x.ndim - axis - 2) + (0, width, 0, height))


def in_windows(x: Tensor, size: int, attend: Callable[[Tensor], Tensor], shift: int = 0) -> Tensor:
    """Attention inside the windows of a map, (batch, h, w, dim).

    size: side of a window; 0 is the whole map. attend: (groups, tokens, dim) -> the same. Zero padding takes part. shift: of the
    windows, cyclic, in cells.
    """
    batch, height, width, dim = x.shape
    if not size:
        return attend(x.flatten(1, 2)).view(batch, height, width, dim)
    rows, columns = blocks_of(height, size), blocks_of(width, size)
    x = pad_to_multiple(x, size, 1)
    if shift:
        x = torch.roll(x, (-shift, -shift), (1, 2))
    x = x.view(batch, rows, size, columns, size, dim).permute(0, 1, 3, 2, 4, 5)
    x = attend(x.reshape(-1, size * size, dim))
    x = x.view(batch, rows, columns, size, size, dim).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(batch, rows * size, columns * size, dim)
    if shift:
        x = torch.roll(x, (shift, shift), (1, 2))
    return x[:, :height, :width]
