"""Rewrites of PP-DocLayoutV2 and V3, see `detrt.models.rewrites`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from ..hooks import box_of_mask
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


def _masks(module: ModuleType, model: nn.Module) -> list[Patch]:
    return [*_order(module, model), (module, "mask_to_box_coordinate", box_of_mask)]


ORDER = Rewrite("take_along_dim is no operator of ONNX, and equal values have no order there", _order)
MASKS = Rewrite(
    "masks of every layer would be computed and stored, and boxes of masks are no selections that can be forced", _masks
)
