"""Rewrites of PP-DocLayoutV2 and V3, see `detrt.models.rewrites`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from ..rewrites import Patch, Rewrite, TorchForTracing


class _TorchForDocuments(TorchForTracing):
    """`torch` for PP-DocLayoutV2 and V3: an operator that ONNX lacks, and no outputs of layers but the last, which alone are read."""

    @staticmethod
    def take_along_dim(data: Tensor, indices: Tensor, dim: int) -> Tensor:
        return data.gather(dim, indices)

    @staticmethod
    def argsort(data: Tensor, dim: int = -1, descending: bool = False) -> Tensor:
        # The key of a flag and its position is unique: the order does not depend on how a runtime orders equal values.
        place = torch.arange(data.shape[dim], device=data.device)
        return torch.argsort(data.to(torch.float32) * data.shape[dim] - place, dim=dim, descending=descending)

    @staticmethod
    def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        return tensors[-1].unsqueeze(1) if dim == 1 else torch.stack(tuple(tensors), dim)


def _order(module: ModuleType, model: nn.Module) -> list[Patch]:
    return [(module, "torch", _TorchForDocuments())]


def box_of_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., height, width) bool -> (..., 4) cxcywh of the pixels that are set, relative to the map; 0 where there are none.

    As `mask_to_box_coordinate` of PP-DocLayoutV3, whose decoder starts from it, but by a top-k selection: where a logit is within
    rounding of 0, a box moves by a pixel, which is a selection as well. Without infinities, which FP16 has not.
    """
    columns, rows = mask.to(dtype).amax(-2), mask.to(dtype).amax(-1)
    lengths = columns.shape[-1], rows.shape[-1]
    ends = []
    for start in (True, False):
        for present, length, other in zip((columns, rows), lengths, lengths[::-1], strict=True):
            place = torch.arange(length, device=mask.device).to(dtype)
            far = length - place if start else place + 1
            ends.append(torch.nn.functional.pad(present * far, (0, other)))
    chosen = torch.topk(torch.stack(ends, -2), 1, dim=-1)[1][..., 0].to(dtype)
    filled = rows.amax(-1)
    left, top = (chosen[..., i] * filled / lengths[i] for i in (0, 1))
    right, bottom = ((chosen[..., 2 + i] + 1) * filled / lengths[i] for i in (0, 1))
    return torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], -1)


def _masks(module: ModuleType, model: nn.Module) -> list[Patch]:
    return [*_order(module, model), (module, "mask_to_box_coordinate", box_of_mask)]


ORDER = Rewrite("take_along_dim is no operator of ONNX, and equal values have no order there", _order)
MASKS = Rewrite(
    "masks of every layer would be computed and stored, and boxes of masks are no selections that can be forced", _masks
)
