"""DEIM on the decoders of D-FINE and RT-DETRv2, for versions of transformers with and without DEIMv2."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import DFineForObjectDetection, RTDetrV2ForObjectDetection
from transformers.models.d_fine import modeling_d_fine as stock
from transformers.models.rt_detr_v2 import modeling_rt_detr_v2 as stock_v2


class _SiluLayers:
    """The forward pass of a box head with SiLU."""

    layers: nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = nn.functional.silu(layer(x))
        return self.layers[-1](x)


class SiluHead(_SiluLayers, stock.DFineMLPPredictionHead):
    pass


class DeimDFine(DFineForObjectDetection):
    """DEIM on D-FINE: SiLU instead of ReLU in the heads and decoder layers; otherwise as `DFineForObjectDetection`.

    Huang et al., arXiv:2412.04234; config `deim_dfine`: `activation: silu`, `mlp_act: silu`. Keys and shapes are those of D-FINE, so
    that a file does not identify the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for owner in (self.model.enc_bbox_head, self.model.decoder):
            for module in owner.modules():
                if isinstance(module, stock.DFineMLPPredictionHead):
                    module.__class__ = SiluHead
                elif isinstance(module, stock.DFineMLP):
                    module.act = nn.SiLU()


class SiluHeadV2(_SiluLayers, stock_v2.RTDetrV2MLPPredictionHead):
    pass


class DeimRtDetrV2(RTDetrV2ForObjectDetection):
    """DEIM on RT-DETRv2 (config `deim_rtdetrv2`): SiLU instead of ReLU, and one more layer in the query position head
    (`query_pos_method: as_reg`); otherwise as `RTDetrV2ForObjectDetection`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.decoder.query_pos_head = SiluHeadV2(4, config.d_model, config.d_model, num_layers=3)
        for module in self.modules():
            if type(module) is stock_v2.RTDetrV2MLPPredictionHead:
                module.__class__ = SiluHeadV2
