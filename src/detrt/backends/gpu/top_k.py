"""Stable top-k of scores as a PyTorch op, and the selection of the best candidates on the device.

PyTorch's `topk` selects with one block of threads and sorts with another, which leaves a GPU idle for thousands of scores. The
kernel here computes the rank of each score by counting the scores before it: n * n comparisons, or fewer in two steps, with the
top-k of each chunk first. Equal scores keep their order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.postprocess import Candidates, count_candidates
from ...models.ops.compiling import decompose_when_compiled, kernel_wrapper
from ...models.ops.msda import triton_available
from ...spec import LOGITS, PRED_BOXES, ModelSpec

OP = "detrt::top_k"

# With so many comparisons the kernel is still faster than PyTorch's, on an H200 (docs/results/kernel.md).
MAX_COMPARISONS, MAX_CHUNKS = 150_000_000, 16
_LIBRARY = torch.library.Library("detrt", "FRAGMENT")
_LIBRARY.define("top_k(Tensor scores, int k) -> (Tensor, Tensor)")


def _run(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, indices), both (rows, k): top-k of each row, descending, stable (the lowest index wins ties).

    scores: (rows, n) FP32. Infinities and NaN rank as the largest finite number and are returned as they are.

    Raises:
        ValueError: scores of another shape or type, or fewer than k.
    """
    _check(scores, k)
    rows, n = scores.shape
    if scores.device.type == "cuda" and triton_available() and is_faster(rows, n, k):
        from .top_k_triton import rank_scores

        launch = kernel_wrapper(scores)
        chunk = chunk_length(n, k)
        values, indices = rank_scores(scores.contiguous(), None, k, chunk, launch)
        return (values, indices) if chunk >= n else rank_scores(values, indices, k, values.shape[1], launch)
    return portable(scores, k)


def is_faster(rows: int, n: int, k: int) -> bool:
    """Whether the kernel is faster than PyTorch's `topk`."""
    return 1 <= k <= n and rows * _comparisons(n, k, chunk_length(n, k)) <= MAX_COMPARISONS


def chunk_length(n: int, k: int) -> int:
    """Length of the chunks of the first step, for the fewest comparisons; each chunk holds at least k scores."""
    sizes = {n} | {-(-n // chunks) for chunks in range(2, min(MAX_CHUNKS, n // k) + 1)}
    allowed = [chunk for chunk in sizes if n - (-(-n // chunk) - 1) * chunk >= k]
    return min(allowed, key=lambda chunk: _comparisons(n, k, chunk))


def _comparisons(n: int, k: int, chunk: int) -> int:
    chunks = -(-n // chunk)
    return n * chunk + ((chunks * k) ** 2 if chunks > 1 else 0)


def portable(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Reference implementation in PyTorch operators."""
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
decompose_when_compiled(OP, _run, _LIBRARY)
top_k = torch.ops.detrt.top_k.default

# Columns of a packed candidate: value, flat index into (query, class), cxcywh. One more row holds the flags of overflow.
_COLUMNS = 6
_OVERFLOWS = ("", LOGITS, PRED_BOXES)
MAX_FLAT_INDEX = 1 << 24  # integers that float32 holds


def can_select(spec: ModelSpec) -> bool:
    """Whether `select` supports the model: raw outputs and fixed classes."""
    rule = spec.decode
    return not rule.in_graph and spec.text is None and rule.num_queries * rule.num_classes < MAX_FLAT_INDEX


def select(logits: Tensor, boxes: Tensor, spec: ModelSpec) -> Tensor:
    """(n, queries, columns) and (n, queries, 4) -> (n, k + 1, 6) float32, for `unpack`. Selects as `detrt.data.postprocess` does.

    The sigmoid is applied on the CPU: it changes no order, and scores equal those of the CPU.
    """
    rule, count = spec.decode, count_candidates(spec)
    logits, boxes = logits.float(), boxes.float()
    values = logits if rule.activation == "sigmoid" else logits.softmax(-1)[..., :-1]
    if rule.select == "query":
        best = values.argmax(-1)  # stable: the first of equal ones
        values = values.gather(-1, best[..., None])[..., 0]
        flat = torch.arange(rule.num_queries, device=values.device) * rule.num_classes + best
        if count < rule.num_queries:
            values, order = _best(values, count)
            flat = flat.gather(-1, order)
    else:
        values, flat = _best(values.flatten(1), count)
    if values.is_cuda and triton_available():  # one launch instead of twenty
        from .top_k_triton import pack_candidates

        tensors = (tensor.contiguous() for tensor in (values, flat, logits, boxes))
        return pack_candidates(*tensors, rule.num_classes, _COLUMNS)
    return pack(values, flat, logits, boxes, rule.num_classes)


def pack(values: Tensor, flat: Tensor, logits: Tensor, boxes: Tensor, classes: int) -> Tensor:
    """Reference of `pack_candidates` in PyTorch operators."""
    query = torch.div(flat, classes, rounding_mode="floor")
    chosen = boxes.gather(1, query[..., None].expand(-1, -1, 4))
    rows = torch.cat((values[..., None], flat[..., None].float(), chosen), -1)
    bad_logits = (logits.isnan() | logits.isposinf()).flatten(1).any(-1)
    bad_boxes = ~boxes.isfinite().flatten(1).all(-1)
    flags = torch.stack((bad_logits, bad_boxes), -1).float()
    return torch.cat((rows, torch.nn.functional.pad(flags, (0, _COLUMNS - 2))[:, None]), 1)


def _best(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if values.is_cuda and is_faster(*values.shape, count):
        return top_k(values, count)
    return values.topk(count, dim=-1)


def unpack(rows: NDArray[np.float32], images: int, extras: Mapping[str, NDArray] | None = None) -> Candidates:
    """Candidates of the first `images` of the batch, from the result of `select` on the CPU, and the other outputs beside it."""
    rows = rows[:images]
    flags = rows[:, -1, :2].any(0)
    overflow = _OVERFLOWS[int(np.argmax(flags)) + 1 if flags.any() else 0]
    others = {name: array[:images] for name, array in (extras or {}).items()}
    return Candidates(rows[:, :-1, 0], rows[:, :-1, 1].astype(np.int64), rows[:, :-1, 2:], overflow, others)
