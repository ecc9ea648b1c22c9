"""The best candidates of a model's raw outputs, chosen on the device, so that little is copied back."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.postprocess import Candidates, count_candidates
from ...spec import LOGITS, PRED_BOXES, ModelSpec
from .top_k import fits, top_k

# Columns of a packed candidate: value, place among (query, class), cxcywh. One more row holds the flags of overflow.
_COLUMNS = 6
_OVERFLOWS = ("", LOGITS, PRED_BOXES)
LARGEST_PLACE = 1 << 24  # whole numbers that float32 holds


def can_select(spec: ModelSpec) -> bool:
    """Whether this module knows the rule: raw outputs of a model of fixed classes."""
    rule = spec.decode
    return not rule.in_graph and spec.text is None and rule.num_queries * rule.num_classes < LARGEST_PLACE


def select(logits: Tensor, boxes: Tensor, spec: ModelSpec) -> Tensor:
    """(n, queries, columns) and (n, queries, 4) -> (n, k + 1, 6) float32, for `unpacked`. The rule is `decode`'s.

    The sigmoid is left to the reader: it changes no order, and the CPU's gives the CPU's scores.
    """
    rule, count = spec.decode, count_candidates(spec)
    logits, boxes = logits.float(), boxes.float()
    values = logits if rule.activation == "sigmoid" else logits.softmax(-1)[..., :-1]
    if rule.select == "query":
        best = values.argmax(-1)  # the first of equal ones
        values = values.gather(-1, best[..., None])[..., 0]
        flat = torch.arange(rule.num_queries, device=values.device) * rule.num_classes + best
        if count < rule.num_queries:
            values, order = _best(values, count)
            flat = flat.gather(-1, order)
    else:
        values, flat = _best(values.flatten(1), count)
    query = torch.div(flat, rule.num_classes, rounding_mode="floor")
    chosen = boxes.gather(1, query[..., None].expand(-1, -1, 4))
    rows = torch.cat((values[..., None], flat[..., None].float(), chosen), -1)
    bad_logits = (logits.isnan() | logits.isposinf()).flatten(1).any(-1)
    bad_boxes = ~boxes.isfinite().flatten(1).all(-1)
    flags = torch.stack((bad_logits, bad_boxes), -1).float()
    return torch.cat((rows, torch.nn.functional.pad(flags, (0, _COLUMNS - 2))[:, None]), 1)


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if values.is_cuda and fits(*values.shape, count):
        return top_k(values, count)
    return values.topk(count, dim=-1)


def unpacked(rows: NDArray[np.float32], images: int) -> Candidates:
    """What `select` gave, on the CPU, for the first `images` of the batch."""
    rows = rows[:images]
    flags = rows[:, -1, :2].any(0)
    overflow = _OVERFLOWS[int(np.argmax(flags)) + 1 if flags.any() else 0]
    return Candidates(rows[:, :-1, 0], rows[:, :-1, 1].astype(np.int64), rows[:, :-1, 2:], overflow)
