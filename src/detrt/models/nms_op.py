"""Class-aware hard NMS as one op, which becomes ONNX NonMaxSuppression.

Soft-NMS has no ONNX operator and stays outside the graph (`detrt.data.postprocess`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OP = "detrt::nms_select"


def reference(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """(selected, 3) int64: image, class, box; the definition of ONNX NonMaxSuppression for scores above 0.

    boxes: (batch, n, 4) xyxy. scores: (batch, classes, n). A box goes when its IoU with a better one of
    its class is above `iou`.
    """
    rows = []
    for image in range(scores.shape[0]):
        for label in range(scores.shape[1]):
            left = torch.argsort(scores[image, label], descending=True, stable=True)
            left = left[scores[image, label][left] > 0]
            while len(left):
                best, left = left[0], left[1:]
                rows.append(torch.stack([torch.tensor(image), torch.tensor(label), best]))
                a, b = boxes[image, best], boxes[image, left]
                inner = (torch.minimum(a[2:], b[:, 2:]) - torch.maximum(a[:2], b[:, :2])).clamp(min=0).prod(-1)
                union = (a[2:] - a[:2]).prod() + (b[:, 2:] - b[:, :2]).prod(-1) - inner
                left = left[~(inner > iou * union)]
    return torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.int64)


_LIBRARY = torch.library.Library("detrt", "FRAGMENT")
_LIBRARY.define("nms_select(Tensor boxes, Tensor scores, float iou) -> Tensor")
_LIBRARY.impl("nms_select", reference, "CompositeExplicitAutograd")


def onnx_symbolic(g: Any, boxes: Any, scores: Any, iou: Any) -> Any:
    """TorchScript symbolic: one NonMaxSuppression without a limit of boxes."""
    from torch.onnx import symbolic_helper

    limit = g.op("Constant", value_t=torch.tensor([2**31 - 1], dtype=torch.int64))
    overlap = g.op("Constant", value_t=torch.tensor([symbolic_helper._parse_arg(iou, "f")], dtype=torch.float32))
    least = g.op("Constant", value_t=torch.tensor([0.0], dtype=torch.float32))
    return g.op("NonMaxSuppression", boxes, scores, limit, overlap, least)


def surviving(boxes: Tensor, scores: Tensor, labels: Tensor, classes: int, iou: float) -> Tensor:
    """(batch, n) scores with those of suppressed boxes set to 0.

    boxes: (batch, n, 4) xyxy. scores, labels: (batch, n).
    """
    of_class = labels.unsqueeze(1) == torch.arange(classes, device=labels.device).view(1, -1, 1)
    chosen = torch.ops.detrt.nms_select(boxes, scores.unsqueeze(1) * of_class.to(scores.dtype), iou)
    keep = torch.zeros_like(scores).index_put((chosen[:, 0], chosen[:, 2]), torch.ones((), dtype=scores.dtype))
    return scores * keep
