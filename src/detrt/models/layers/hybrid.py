"""The hybrid encoder of RT-DETR and its successors as their authors run it at sizes that are not square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

_PLACE = "position_embedding"  # in transformers' encoders


class AuthorsPositions(nn.Module):
    """The authors' position embedding, made of transformers'.

    The authors (`build_2d_sincos_position_embedding`) number the cells of a map column by column, and the tokens that they add it to
    line by line: token t has the embedding of the cell (t // height, t % height). transformers numbers both line by line. The two are
    equal for squares; otherwise the authors' is transformers' for the map with its sides exchanged.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, width: Any, height: Any, device: Any, dtype: Any) -> Tensor:
        """(1, height * width, channels): see the class."""
        return self.inner(width=height, height=width, device=device, dtype=dtype)


def take_authors_positions(module: nn.Module) -> None:
    """Put `AuthorsPositions` in every encoder layer of a model, in place. An encoder without attention has none."""
    for part in list(module.modules()):
        inner = getattr(part, _PLACE, None)
        if type(inner).__name__.endswith("SinePositionEmbedding"):
            setattr(part, _PLACE, AuthorsPositions(inner))
