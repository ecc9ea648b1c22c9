"""The k best of many scores, in order, as a PyTorch op.

PyTorch's `topk` selects with one block of threads and sorts with another, which for thousands of scores leaves a GPU idle.
Here each score's place is counted: it is the number of scores before it. That is n * n comparisons, or fewer in two steps: the best
of each part first. Equal scores stay in their order, so that a model's queries do, too.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.postprocess import Candidates, count_candidates
from ...models.ops.msda import see_through, triton_available
from ...spec import LOGITS, PRED_BOXES, ModelSpec

OP = "detrt::top_k"

# Comparisons that are done sooner than PyTorch's kernels, on an H200 (docs/results/kernel.md).
MOST_COMPARISONS, MOST_PARTS = 150_000_000, 16
_LIBRARY = torch.library.Library("detrt", "FRAGMENT")
_LIBRARY.define("top_k(Tensor scores, int k) -> (Tensor, Tensor)")


def _run(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices), both (rows, k): the k largest of each row from the largest on, of equal ones the first first.

    scores: (rows, n) FP32. Infinities and what is not a number rank as the largest finite numbers, but are given as they are.

    Raises:
        ValueError: scores of another shape or type, or fewer than k.
    """
    _check(scores, k)
    rows, n = scores.shape
    if scores.device.type == "cuda" and triton_available() and fits(rows, n, k):
        from .top_k_triton import ranked

        launch = torch.library.wrap_triton if type(scores) not in (Tensor, torch.nn.Parameter) else None
        part = part_of(n, k)
        values, indices = ranked(scores.contiguous(), None, k, part, launch)
        return (values, indices) if part >= n else ranked(values, indices, k, values.shape[1], launch)
    return portable(scores, k)


def fits(rows: int, n: int, k: int) -> bool:
    """Whether the kernel is the faster way."""
    return 1 <= k <= n and rows * _comparisons(n, k, part_of(n, k)) <= MOST_COMPARISONS


def part_of(n: int, k: int) -> int:
    """How many scores are compared with one another first, for the fewest comparisons; each part holds k at least."""
    sizes = {n} | {-(-n // parts) for parts in range(2, min(MOST_PARTS, n // k) + 1)}
    whole = [part for part in sizes if n - (-(-n // part) - 1) * part >= k]
    return min(whole, key=lambda part: _comparisons(n, k, part))


def _comparisons(n: int, k: int, part: int) -> int:
    parts = -(-n // part)
    return n * part + ((parts * k) ** 2 if parts > 1 else 0)


def portable(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The definition, in plain operators."""
    largest = torch.finfo(torch.float32).max
    indices = scores.nan_to_num(nan=largest).argsort(dim=1, descending=True, stable=True)[:, :k].contiguous()
    return scores.gather(1, indices), indices


def _check(scores: Tensor, k: int) -> None:
    if scores.dim() != 2 or scores.dtype != torch.float32 or not 1 <= k <= scores.shape[1]:
        raise ValueError(
            f"{OP}: scores must be (rows, n) float32 with n from k = {k} on; got {tuple(scores.shape)} {scores.dtype}"
        )


@torch.library.register_fake(OP, lib=_LIBRARY)
def _fake(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    _check(scores, k)
    return scores.new_empty(scores.shape[0], k), scores.new_empty(scores.shape[0], k, dtype=torch.int64)


_LIBRARY.impl("top_k", _run, "CompositeExplicitAutograd")
see_through(OP, _run, _LIBRARY)
top_k = torch.ops.detrt.top_k.default

# The best candidates of a model's raw outputs, chosen on the device, so that little is copied back.

# Columns of a packed candidate: value, place among (query, class), cxcywh. One more row holds the flags of overflow.
_COLUMNS = 6
_OVERFLOWS = ("", LOGITS, PRED_BOXES)
LARGEST_PLACE = 1 << 24  # integers that float32 holds


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
