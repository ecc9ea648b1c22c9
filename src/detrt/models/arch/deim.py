"""DEIM on D-FINE and on RT-DETRv2: SiLU where those have ReLU, in the heads and the decoder layers.

Huang et al., arXiv:2412.04234; configs `deim_dfine` and `deim_rtdetrv2`, `activation: silu`, `mlp_act: silu`. On
D-FINE keys and shapes are those of D-FINE, so no file tells which of them it is; on RT-DETRv2 the head that
places the queries has one layer more (`query_pos_method: as_reg`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DFineForObjectDetection, RTDetrV2ForObjectDetection
from transformers.models.d_fine import modeling_d_fine as stock
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as stock_v2


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


class SiluHeadV2(stock_v2.RTDetrV2MLPPredictionHead):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = nn.functional.silu(layer(x))
        return self.layers[-1](x)


class DeimRtDetrV2(RTDetrV2ForObjectDetection):
    """Takes and returns what `RTDetrV2ForObjectDetection` does."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.decoder.query_pos_head = SiluHeadV2(4, config.d_model, config.d_model, num_layers=3)
        for module in self.modules():
            if type(module) is stock_v2.RTDetrV2MLPPredictionHead:
                module.__class__ = SiluHeadV2
