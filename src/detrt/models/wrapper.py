"""ExportModule: tensors in, tensors out; the one module that is traced, compiled and compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, SCORES, TARGET_SIZES, ModelSpec
from .nms_op import surviving


class ExportModule(nn.Module):
    """A detector with the input and output contract of its spec.

    pixel_values: (batch, 3, height, width); raw RGB 0..255 when the spec normalises in the graph.
    pixel_mask: (batch, height, width) int64, 1 = image; only when `spec.input.mask`.
    target_sizes: (batch, 2) int64, original (height, width); only when `spec.decode.in_graph`.
    Returns (logits, pred_boxes), or (boxes, scores, labels, num_detections); see `detrt.spec`.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        entry = spec.input
        # (pixels * rescale - mean) / std as one multiply and one add.
        scale = [entry.rescale / s for s in entry.std]
        shift = [-m / s for m, s in zip(entry.mean, entry.std, strict=True)]
        self.register_buffer("pixel_scale", torch.tensor(scale, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("pixel_shift", torch.tensor(shift, dtype=torch.float32).view(1, 3, 1, 1), persistent=False)

    @property
    def input_names(self) -> list[str]:
        names = [PIXEL_VALUES]
        if self.spec.input.mask:
            names.append(PIXEL_MASK)
        if self.spec.decode.in_graph:
            names.append(TARGET_SIZES)
        return names

    @property
    def output_names(self) -> list[str]:
        return [BOXES, SCORES, LABELS, NUM_DETECTIONS] if self.spec.decode.in_graph else [LOGITS, PRED_BOXES]

    def forward(self, pixel_values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        feeds = dict(zip(self.input_names[1:], rest, strict=True))
        mask = feeds.get(PIXEL_MASK)
        pixels = self.normalized(pixel_values, mask)
        if mask is not None:
            outputs = self.model(pixel_values=pixels, pixel_mask=mask, return_dict=True)
        else:
            outputs = self.model(pixel_values=pixels, return_dict=True)
        if not self.spec.decode.in_graph:
            return outputs.logits, outputs.pred_boxes
        return self.decode(outputs.logits, outputs.pred_boxes, feeds[TARGET_SIZES])

    def normalized(self, pixel_values: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, 3, height, width) float32 as the checkpoint wants it; padding is 0, whatever it was before."""
        pixels = pixel_values
        if self.spec.input.normalize_in_graph:
            pixels = pixels.to(torch.float32) * self.pixel_scale
            if any(self.spec.input.mean):
                pixels = pixels + self.pixel_shift
        return pixels if mask is None else pixels * mask.unsqueeze(1).to(pixels.dtype)

    def decode(self, logits: Tensor, pred_boxes: Tensor, target_sizes: Tensor) -> tuple[Tensor, ...]:
        """The rule of `spec.decode` as tensor algebra; equal to `detrt.data.postprocess` on NumPy arrays."""
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
        return self.finished(*picked, pred_boxes, target_sizes)

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
        self, scores: Tensor, labels: Tensor, query: Tensor, pred_boxes: Tensor, target_sizes: Tensor
    ) -> tuple[Tensor, ...]:
        """Boxes of the picked queries in pixels of the image, after NMS where the graph has it."""
        rule = self.spec.decode
        boxes = pred_boxes.float().gather(1, query.unsqueeze(-1).expand(-1, -1, 4))
        centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
        corners = torch.cat([centre - half, centre + half], dim=-1).clamp(0.0, 1.0)
        if rule.nms_in_graph:
            scores = surviving(corners, scores, labels, rule.num_classes, rule.nms_iou)
            # Suppressed boxes have score 0 and go to the end, where nobody counts them.
            scores, order = scores.topk(rule.max_detections, dim=1)
            labels = labels.gather(1, order)
            corners = corners.gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        size = target_sizes.to(torch.float32).flip(-1).repeat(1, 2).unsqueeze(1)  # (batch, 1, 4): w h w h
        enough = scores >= rule.score_threshold
        if rule.nms_in_graph:
            enough = enough & (scores > 0)
        count = enough.to(torch.int64).sum(1)
        return corners * size, scores, labels, count
