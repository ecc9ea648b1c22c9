"""The selection of queries of LW-DETR and RF-DETR as their authors run it on large maps."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

_PLACE = "gen_encoder_output_proposals"  # in transformers' models


def _proposals(self: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the class gives, with no position left out: (features, proposals, mask of those to leave out)."""
    features, proposals, left_out = getattr(type(self), _PLACE)(self, *args, **kwargs)
    return features, proposals, torch.zeros_like(left_out)


def take_authors_selection(module: nn.Module) -> None:
    """Let positions at the border take part in the selection, in place.

    A position within 0.01 of the border, which maps of 50 cells and more have, has features and a proposal of zeros in both codes. The
    authors score it like the others and may select it; transformers gives it the score -inf.
    """
    for part in module.modules():
        if hasattr(part, _PLACE):
            setattr(part, _PLACE, MethodType(_proposals, part))
