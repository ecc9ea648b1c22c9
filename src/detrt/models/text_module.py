"""The modules that are traced for a prompted model: its detector, and its text tower."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..backends.base import text_inputs
from ..spec import ATTENTION_MASK, INPUT_IDS, PHRASE_MASK, PIXEL_MASK, TARGET_SIZES, ModelSpec
from .arch.grounding_dino import GroundingDetector, GroundingText
from .arch.omdet_turbo import OmDetDetector, OmDetText
from .contract import contract, tower_contract
from .load import Source
from .wrapper import ExportModule


class TextExportModule(ExportModule):
    """A prompted detector with the input and output contract of its spec; see `detrt.models.contract`.

    With `spec.text.tower` empty it takes token ids, and runs the text tower itself. Returns
    (logits, pred_boxes) with a logit for each token or class, or (boxes, scores, labels, num_detections),
    where a label is the number of a phrase or of a class.
    """

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        assert spec.text is not None
        tokens = spec.text.kind == "tokens"
        super().__init__(GroundingDetector(source.module) if tokens else OmDetDetector(source.module), spec)
        self.tower = None if spec.text.tower else tower_of(source, spec)

    @property
    def input_names(self) -> list[str]:
        return [info.name for info in contract(self.spec)[0]]

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        pixels = self.normalized(pixel_values, mask)
        if self.tower is not None:
            ids, attention = feeds[INPUT_IDS], feeds[ATTENTION_MASK]
            features, seen, positions = self.tower(ids, attention)
            text = [features, attention, seen, positions]
        else:
            text = [feeds[name] for name in text_inputs(self.spec) if name != PHRASE_MASK]
        logits, boxes = self.model(pixels, *([] if mask is None else [mask]), *text)
        return self.decoded(logits, boxes, feeds) if self.spec.decode.in_graph else (logits, boxes)

    def decoded(self, logits: Tensor, boxes: Tensor, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Raw outputs -> (boxes, scores, labels, num_detections)."""
        probabilities = logits.float().sigmoid()
        if PHRASE_MASK in feeds:
            picked = self.best_queries(*best_phrases(probabilities, feeds[PHRASE_MASK]))
        else:
            picked = self.best_pairs(probabilities, logits.shape[2])
        return self.finished(*picked, boxes, feeds[TARGET_SIZES])


def best_phrases(probabilities: Tensor, phrase_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, queries) best score of any phrase, and the number of that phrase.

    The score of a phrase is the largest of its tokens', so the best phrase is that of the best token of any;
    a token of several phrases counts for the first. probabilities: (batch, queries, tokens).
    phrase_mask: (batch, phrases, tokens).
    """
    mask = phrase_mask.to(probabilities.dtype)
    best, token = (probabilities * mask.amax(1).unsqueeze(1)).max(-1)
    return best, mask.argmax(1).gather(1, token)


class TowerModule(nn.Module):
    """A text tower: input_ids and attention_mask (batch, tokens) int64 -> the outputs of `tower_contract`."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = tower_of(source, spec)
        inputs, outputs = tower_contract(spec)
        self.input_names, self.output_names = [i.name for i in inputs], [o.name for o in outputs]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.model(input_ids, attention_mask)


def tower_of(source: Source, spec: ModelSpec) -> nn.Module:
    assert spec.text is not None
    if spec.text.kind == "tokens":
        return GroundingText(source.module, spec.text.separators)
    return OmDetText(source.module)
