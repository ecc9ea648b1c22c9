"""What exports of prompted models are compared with: transformers' own model under detrt's tensor names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.base import text_inputs
from ..spec import ATTENTION_MASK, CLASS_MASK, INPUT_IDS, PIXEL_MASK, ModelSpec
from .arch.grounding_dino import PADDED_LOGIT
from .contract import contract
from .load import Source
from .wrapper import ExportModule


class StockTextModule(ExportModule):
    """The library's own forward, without detrt's modules and rewrites; raw outputs only.

    kind "tokens": pixel_values, pixel_mask, input_ids, attention_mask, as of a single graph, whatever
    `spec.text.tower` says. kind "classes": the inputs of the detector's graph.
    Returns logits (batch, queries, tokens or classes), padding `PADDED_LOGIT`, and pred_boxes
    (batch, queries, 4).
    """

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        assert spec.text is not None
        super().__init__(source.module, spec)
        self.kind = spec.text.kind
        self.names = [info.name for info in contract(spec)[0][: 1 + spec.input.mask]]
        self.names += [INPUT_IDS, ATTENTION_MASK] if self.kind == "tokens" else text_inputs(spec)

    @property
    def input_names(self) -> list[str]:
        return self.names

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        pixels = self.normalized(pixel_values, mask)
        if self.kind == "classes":
            return self._classes(pixels, feeds)
        ids, attention = feeds[INPUT_IDS], feeds[ATTENTION_MASK]
        outputs = self.model(pixel_values=pixels, pixel_mask=mask, input_ids=ids, attention_mask=attention, return_dict=True)
        # The library pads to its longest prompt, with infinity.
        logits = outputs.logits[:, :, : ids.shape[1]]
        return logits.masked_fill(attention[:, None, :] == 0, PADDED_LOGIT), outputs.pred_boxes

    def _classes(self, pixels: Tensor, feeds: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Image by image where counts differ: in the library, padded classes take part in the selection."""
        model: Any = self.model
        features, task, seen = (feeds[name] for name in text_inputs(self.spec) if name != CLASS_MASK)
        counts = feeds[CLASS_MASK].sum(1).tolist()
        maps = model.encoder(model.vision_backbone(pixels), return_dict=True).extracted_states
        alone = [slice(i, i + 1) for i in range(len(counts))]
        groups = [slice(None)] if len(set(counts)) == 1 else alone
        parts = []
        for rows in groups:
            names = features[rows, : counts[rows][0]].transpose(0, 1)
            outputs = model.decoder(
                [level[rows] for level in maps],
                names,
                task[rows].transpose(0, 1),
                seen[rows],
                return_dict=True,
            )
            missing = features.shape[1] - names.shape[0]
            logits = torch.nn.functional.pad(outputs.decoder_classes[-1], (0, missing), value=PADDED_LOGIT)
            parts.append((logits, outputs.decoder_coords[-1]))
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class StockTower(torch.nn.Module):
    """The library's own text model of kind "classes".

    input_ids, attention_mask (n, tokens) -> text_features (n, tokens, d), class_features (n, d).
    """

    input_names = (INPUT_IDS, ATTENTION_MASK)

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model = source.module.language_backbone

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        features = self.model(input_ids, mask=torch.ones_like(attention_mask), encode_type="task")[0].transpose(0, 1)
        names = self.model(input_ids, encode_type="class")
        return features * attention_mask.unsqueeze(-1).to(features.dtype), names
