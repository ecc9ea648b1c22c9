"""Wrappers of detectors with tensors as inputs and outputs, for tracing, compiling and comparing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..spec import (
    LOGITS,
    MASK_LOGITS,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    TARGET_SIZES,
    ModelSpec,
    text_inputs,
)
from ..tasks import extra_outputs, output_names
from ..text.tensors import ATTENTION_MASK, CLASS_FEATURES, INPUT_IDS, PHRASE_FEATURES, PHRASE_MASK, TEXT_ENCODER_INPUTS
from .contract import contract, text_encoder_contract
from .families import BY_NAME
from .nms_op import surviving
from .source import Source
from .stock import EncoderStock


class ExportModule(nn.Module):
    """A detector with the input and output contract of its spec.

    pixel_values: (batch, 3, height, width); raw RGB 0..255 when the spec normalises in the graph.
    pixel_mask: (batch, height, width) int64, 1 = image; only when `spec.input.mask`.
    target_sizes: (batch, 2) int64, original (height, width); only when `spec.decode.in_graph`.
    Returns (logits, pred_boxes), or (boxes, scores, labels, num_detections), and the outputs of `tasks.extra_outputs`.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        entry = spec.input
        self.input_names = [PIXEL_VALUES] + [PIXEL_MASK] * entry.mask + [TARGET_SIZES] * spec.decode.in_graph
        self.output_names = output_names(spec)
        # (pixels * rescale - mean) / std as one multiply and one add.
        scale = [entry.rescale / s for s in entry.std]
        shift = [-m / s for m, s in zip(entry.mean, entry.std, strict=True)]
        self.register_buffer("pixel_scale", torch.tensor(scale, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("pixel_shift", torch.tensor(shift, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        pixels = self.normalized(pixel_values, mask)
        if mask is not None:
            outputs = self.model(pixel_values=pixels, pixel_mask=mask, return_dict=True)
        else:
            outputs = self.model(pixel_values=pixels, return_dict=True)
        found = named_outputs(outputs, self.spec)
        if not self.spec.decode.in_graph:
            return tuple(found[name] for name in self.output_names)
        masks = [found[name] for name in extra_outputs(self.spec)]
        return self.decode(found[LOGITS], found[PRED_BOXES], feeds[TARGET_SIZES], *masks)

    def normalized(self, pixel_values: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, 3, height, width) float32 as the checkpoint expects it; padding is set to 0."""
        pixels = pixel_values
        if self.spec.input.normalize_in_graph:
            pixels = pixels.to(torch.float32) * self.pixel_scale
            if any(self.spec.input.mean):
                pixels = pixels + self.pixel_shift
        return pixels if mask is None else pixels * mask.unsqueeze(1).to(pixels.dtype)

    def decode(self, logits: Tensor, pred_boxes: Tensor, target_sizes: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
        """The rule of `spec.decode` on tensors; equals `detrt.data.postprocess` on NumPy arrays."""
        rule = self.spec.decode
        if rule.activation == "softmax":
            probabilities = logits.float().softmax(-1)[..., :-1]
        else:
            probabilities = logits.float().sigmoid()
        if rule.select == "query":
            best, classes = probabilities.max(-1)
            picked = self.best_queries(best, classes)
        else:
            picked = self.best_pairs(probabilities, rule.num_classes)
        return self.finished(*picked, pred_boxes, target_sizes, *masks)

    def best_queries(self, best: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(scores, labels, queries), each (batch, max_detections), of the queries with the best scores."""
        scores, query = best.topk(self.spec.decode.max_detections, dim=1)
        return scores, classes.gather(1, query), query

    def best_pairs(self, probabilities: Tensor, classes: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(scores, labels, queries), each (batch, n), of the best pairs of a query and a class."""
        rule = self.spec.decode
        count = max(rule.num_queries, rule.max_detections) if rule.nms_in_graph else rule.max_detections
        scores, index = probabilities.flatten(1).topk(count, dim=1)
        query = torch.div(index, classes, rounding_mode="floor")
        return scores, index - query * classes, query

    def finished(
        self,
        scores: Tensor,
        labels: Tensor,
        query: Tensor,
        pred_boxes: Tensor,
        target_sizes: Tensor,
        *masks: Tensor,
        phrases: Any = 1,
    ) -> tuple[Tensor, ...]:
        """Boxes of the selected queries in pixels of the image, after NMS if the graph has it, and their mask logits.

        phrases: how many of them have queries of their own.
        """
        rule = self.spec.decode
        boxes = pred_boxes.float().gather(1, query.unsqueeze(-1).expand(-1, -1, 4))
        centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
        corners = torch.cat([centre - half, centre + half], dim=-1).clamp(0.0, 1.0)
        if rule.nms_in_graph:
            scores = surviving(corners, scores, labels, rule.num_classes, rule.nms_iou)
            # Suppressed boxes have score 0 and go to the end, after `num_detections`.
            scores, order = scores.topk(rule.max_detections, dim=1)
            labels = labels.gather(1, order)
            corners = corners.gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
            query = query.gather(1, order)
        size = target_sizes.to(torch.float32).flip(-1).repeat(1, 2).unsqueeze(1)  # (batch, 1, 4): w h w h
        enough = scores >= rule.score_threshold
        if rule.nms_in_graph:
            enough = enough & (scores > 0)
        count = enough.to(torch.int64).sum(1)
        # One Gather of whole maps; torch.gather would need an index for each of their values.
        first = torch.arange(target_sizes.shape[0], device=query.device).unsqueeze(1) * (rule.num_queries * phrases)
        rows = [maps.flatten(0, 1)[query + first] for maps in masks]
        if self.spec.input.resize == "square":
            return torch.minimum(corners * size.amax(-1, keepdim=True), size), scores, labels, count, *rows
        return corners * size, scores, labels, count, *rows


def named_outputs(outputs: Any, spec: ModelSpec) -> dict[str, Tensor]:
    """What a detector of transformers returned for a batch, as the raw outputs of the contract."""
    found = {LOGITS: outputs.logits, PRED_BOXES: outputs.pred_boxes}
    if spec.has_masks:
        found[MASK_LOGITS] = outputs.out_masks if "out_masks" in outputs else outputs.pred_masks
    row = BY_NAME.get(spec.family)
    return found if row is None or row.raw_outputs is None else {**found, **row.raw_outputs(outputs, spec.decode.num_queries)}


class TextExportModule(ExportModule):
    """A prompted detector with the input and output contract of its spec; see `detrt.models.contract`.

    With `spec.text.encoder` empty it takes token ids, and runs the text encoder itself. Returns
    (logits, pred_boxes) with a logit for each token or class, or (boxes, scores, labels, num_detections),
    where a label is the number of a phrase or of a class; with masks mask_logits.
    """

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        assert spec.text is not None
        assert source.family.detector is not None
        super().__init__(source.family.detector(source.module), spec)
        self.text_encoder = None if spec.text.encoder else text_encoder_of(source, spec)
        self.input_names = [info.name for info in contract(spec)[0]]

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        pixels = self.normalized(pixel_values, mask)
        if self.text_encoder is not None:
            ids, attention = feeds[INPUT_IDS], feeds[ATTENTION_MASK]
            features, seen, positions = self.text_encoder(ids, attention)
            text = [features, attention, seen, positions]
        else:
            # Where it is a mask of tokens alone, only decoding needs to know the phrases.
            text = [feeds[name] for name in text_inputs(self.spec) if name != PHRASE_MASK or PHRASE_FEATURES in feeds]
        outputs = self.model(pixels, *([] if mask is None else [mask]), *text)[: 2 + self.spec.has_masks]
        return self.decoded(outputs, feeds) if self.spec.decode.in_graph else outputs

    def decoded(self, outputs: Sequence[Tensor], feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Raw outputs -> (boxes, scores, labels, num_detections), and with masks mask_logits."""
        logits, boxes, *masks = outputs
        probabilities = logits.float().sigmoid()
        assert self.spec.text is not None
        if self.spec.text.prompt_kind.own_queries:
            scores, query, phrase = self.best_pairs(probabilities, logits.shape[2])
            rows = phrase * logits.shape[2] + query
            flat = [part.flatten(1, 2) for part in (boxes, *masks)]
            # Of an input: the trace would take the axis of an output as fixed.
            phrases = feeds[PHRASE_MASK].shape[1]
            return self.finished(scores, phrase, rows, flat[0], feeds[TARGET_SIZES], *flat[1:], phrases=phrases)
        if PHRASE_MASK in feeds:
            picked = self.best_queries(*best_phrases(probabilities, feeds[PHRASE_MASK]))
        elif self.spec.decode.select == "query":
            picked = self.best_queries(*probabilities.max(-1))
        else:
            picked = self.best_pairs(probabilities, logits.shape[2])
        return self.finished(*picked, boxes, feeds[TARGET_SIZES])


def best_phrases(probabilities: Tensor, phrase_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(batch, queries) best score of any phrase, and the number of that phrase.

    The score of a phrase is the largest of its tokens, so that the best phrase is that of the best token; a token
    of several phrases counts for the first. probabilities: (batch, queries, tokens).
    phrase_mask: (batch, phrases, tokens).
    """
    mask = phrase_mask.to(probabilities.dtype)
    best, token = (probabilities * mask.amax(1).unsqueeze(1)).max(-1)
    return best, mask.argmax(1).gather(1, token)


class TextEncoderModule(nn.Module):
    """A text encoder: input_ids and attention_mask (batch, tokens) int64 -> the outputs of `text_encoder_contract`."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.model = text_encoder_of(source, spec)
        inputs, outputs = text_encoder_contract(spec)
        self.input_names, self.output_names = [i.name for i in inputs], [o.name for o in outputs]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.model(input_ids, attention_mask)


def text_encoder_of(source: Source, spec: ModelSpec) -> nn.Module:
    assert spec.text is not None and source.family.text_encoder is not None
    return source.family.text_encoder(source.module, spec.text)


class QueryEncoderModule(ExportModule):
    """An encoder of query images: pixel_values as the detector takes them -> class_features (batch, d)."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        assert source.family.query_encoder is not None
        super().__init__(source.family.query_encoder(source.module), spec)
        self.input_names, self.output_names = [PIXEL_VALUES], [CLASS_FEATURES]

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        return (self.model(self.normalized(pixel_values, None)),)


class StockQueryEncoder(QueryEncoderModule):
    """The same by the functions of transformers."""

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        super().__init__(source, spec)
        self.model = source.module

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        model: Any = self.model
        grid = model.image_embedder(self.normalized(pixel_values, None))[0]
        return (model.embed_image_query(grid.flatten(1, 2), grid)[0].squeeze(1),)


class StockTextModule(ExportModule):
    """The forward of transformers under detrt's tensor names, the reference of exports of prompted models; raw outputs only.

    Inputs are those of the detector's graph; of a model that takes token ids itself pixel_values, pixel_mask, input_ids and
    attention_mask, whatever `spec.text.encoder` says. For outputs see `Stock.forward`.
    """

    def __init__(self, source: Source, spec: ModelSpec) -> None:
        assert spec.text is not None and source.family.stock is not None
        super().__init__(source.module, spec)
        self.stock, self.reads_ids = source.family.stock()(), spec.text.prompt_kind.reads_ids
        self.input_names = [info.name for info in contract(spec)[0][: 1 + spec.input.mask]]
        self.input_names += TEXT_ENCODER_INPUTS if self.reads_ids else text_inputs(spec)

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        return self.stock.forward(self.model, self.normalized(pixel_values, mask), mask, feeds)[: 2 + self.spec.has_masks]


class StockTextEncoder(torch.nn.Module):
    """The text model of transformers, of a model that has one by itself: input_ids, attention_mask (n, tokens) -> the outputs of
    `text_encoder_contract`."""

    input_names = TEXT_ENCODER_INPUTS

    def __init__(self, source: Source) -> None:
        super().__init__()
        assert source.family.stock is not None
        stock = source.family.stock()()
        assert isinstance(stock, EncoderStock)
        self.stock, self.model = stock, source.module

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        return self.stock.encode(self.model, input_ids, attention_mask)
