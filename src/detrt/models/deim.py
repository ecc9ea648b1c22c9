"""DEIM on D-FINE: D-FINE with SiLU where D-FINE has ReLU, in its heads and its decoder layers.

The keys and shapes of the two are the same, so no file tells which of them it is
(Huang et al., arXiv:2412.04234; configs `deim_dfine`, `activation: silu`, `mlp_act: silu`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DFineForObjectDetection
from transformers.models.d_fine import modeling_d_fine as stock


class SiluHead(stock.DFineMLPPredictionHead):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = nn.functional.silu(layer(x))
        return self.layers[-1](x)


class DeimDFine(DFineForObjectDetection):
    """Takes and returns what `DFineForObjectDetection` does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for owner in (self.model.enc_bbox_head, self.model.decoder):
            for module in owner.modules():
                if isinstance(module, stock.DFineMLPPredictionHead):
                    module.__class__ = SiluHead
                elif isinstance(module, stock.DFineMLP):
                    module.act = nn.SiLU()
