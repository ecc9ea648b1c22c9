"""Non-maximum suppression by `DecodeSpec.nms`: the rule of mmcv's batched NMS. NumPy only.

Boxes suppress one another inside a class. mmcv moves classes apart by an offset instead; that is the
same rule without the rounding that large offsets bring.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..spec import DecodeSpec


def suppress(
    boxes: NDArray[np.float32], scores: NDArray[np.float32], ids: NDArray[np.int64], rule: DecodeSpec
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Indices of the boxes that stay, best first, and their scores (lower ones for "soft_nms").

    boxes: (n, 4) xyxy. scores: (n,), descending. ids: (n,).
    """
    if rule.nms == "none" or not len(scores):
        return np.arange(len(scores)), scores
    order, kept = [], []
    left = scores.astype(np.float32).copy()
    alive = np.ones(len(scores), bool)
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    while alive.any():
        best = int(np.where(alive, left, -np.inf).argmax())
        order.append(best)
        kept.append(left[best])
        alive[best] = False
        others = np.flatnonzero(alive & (ids == ids[best]))
        corner = np.maximum(boxes[others, :2], boxes[best, :2])
        inner = np.clip(np.minimum(boxes[others, 2:], boxes[best, 2:]) - corner, 0, None).prod(-1)
        union = area[others] + area[best] - inner
        iou = np.divide(inner, union, out=np.zeros_like(inner), where=union > 0)
        if rule.nms == "nms":
            alive[others[iou > np.float32(rule.nms_iou)]] = False
        else:
            left[others] *= np.where(iou >= np.float32(rule.nms_iou), 1 - iou, np.float32(1))
            # Every pass drops what is too low, also in other classes, as mmcv does.
            alive &= left >= np.float32(rule.nms_min_score)
    return np.array(order, np.int64), np.array(kept, np.float32)
