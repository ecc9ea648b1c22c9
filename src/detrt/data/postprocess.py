"""Reference implementation of DecodeSpec: outputs of a model to `Detections`. NumPy only.

The rules, which every other runtime and the graph of `decode.in_graph` follow:

    scores      float32; sigmoid, or softmax over all columns of which the last ("no object") is dropped
    select      "query": the best class of each query, the lower class id under ties;
                "topk": every (query, class) pair is a candidate
    order       score descending; equal scores by flat index (query * classes + class) ascending
    nms         with `decode.nms` only the `num_queries` best candidates take part; see `suppress`; boxes are
                clipped before
    cut         `max_detections` of the spec first, then score > threshold (of the class, or of all), then `class_ids`,
                then the caller's own `max_detections`
    boxes       cxcywh of the unpadded image, or of the square around it -> xyxy pixels of the original image, clipped to it
    tasks       masks, reading order and quadrilaterals of the detections that remain; see `detrt.tasks`

A logit of minus infinity marks an impossible class, with score 0. NaN, or plus infinity in logits or boxes,
means that the model overflowed, and raises an error instead of returning no detections silently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..detections import Detections, cxcywh_to_xyxy
from ..errors import ArgumentError, SessionError, check_range
from ..spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PRED_BOXES, SCORES, DecodeSpec, ModelSpec
from ..tasks import extra_outputs, tasks_of
from .preprocess import resized_size


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best k (query, class) pairs of each image, selected on a device, before thresholds; in any order.

    values: (n, k) float32, logits if the activation is the sigmoid, else scores. flat: (n, k) int64, query * classes +
    class. boxes: (n, k, 4) float32 cxcywh of the pairs' queries. overflow: the output that had NaN or infinite values, or "".
    extras: the outputs of the model beside logits and boxes, of all queries, see `tasks.extra_outputs`.
    """

    values: NDArray[np.float32]
    flat: NDArray[np.int64]
    boxes: NDArray[np.float32]
    overflow: str = ""
    extras: Mapping[str, NDArray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DetectionFilter:
    """Which detections of an image are returned.

    threshold: keep scores above it, 0..1. class_ids: keep these classes only; None: all. max_detections: keep at most so many.
    class_thresholds: class id -> threshold of that class, instead of `threshold`.
    """

    threshold: float = 0.5
    class_ids: Collection[int] | None = None
    max_detections: int | None = None
    class_thresholds: Mapping[int, float] = field(default_factory=dict)


def decode(
    outputs: Mapping[str, NDArray] | Candidates,
    spec: ModelSpec,
    original_sizes_hw: Sequence[tuple[int, int]],
    *,
    threshold: float = 0.5,
    class_ids: Collection[int] | None = None,
    max_detections: int | None = None,
    class_thresholds: Mapping[int, float] | None = None,
) -> list[Detections]:
    """One `Detections` for each image of the batch.

    outputs: `logits` (n, queries, classes) and `pred_boxes` (n, queries, 4), or with decoding in the
        graph `boxes` (n, k, 4), `scores` (n, k), `labels` (n, k) and `num_detections` (n,); those of `tasks.extra_outputs`;
        or `Candidates`.
    threshold: keep scores above it, 0..1. class_ids: keep these classes only. class_thresholds: see `DetectionFilter`.

    Raises:
        SessionError: outputs are missing, do not have the shape of the spec, or are NaN or infinite.
        ValueError: threshold or max_detections out of range.
    """
    check_threshold(threshold)
    if max_detections is not None and max_detections < 1:
        raise ValueError(f"max_detections must be at least 1; got {max_detections}")
    own = class_thresholds or {}
    lowest = min([threshold, *own.values()])
    limits = _edges(original_sizes_hw)
    scales = _edges([spec.input.box_size(size) for size in original_sizes_hw])
    if isinstance(outputs, Candidates):
        rows, extras = _read_candidates(outputs, spec, scales, lowest), outputs.extras
    else:
        read = _read_decoded if spec.decode.in_graph else _read_raw
        rows = read(outputs, spec, scales, lowest)
        extras = {name: _read_extra(outputs, name, spec, len(scales)) for name in extra_outputs(spec)}
    results = []
    for image, (row, limit) in enumerate(zip(rows, limits, strict=True)):
        boxes, scores, ids, queries = row.boxes.clip(0, limit), row.scores, row.ids, row.queries
        if spec.decode.nms != "none" and not spec.decode.nms_in_graph:
            stay, scores = (found[: spec.decode.max_detections] for found in suppress(boxes, scores, ids, spec.decode))
            boxes, ids, queries = boxes[stay], ids[stay], queries[stay]
        wanted = scores > np.array([own.get(i, threshold) for i in ids.tolist()] if own else [threshold], np.float32)
        if class_ids is not None:
            wanted &= np.isin(ids, np.array(sorted(class_ids), np.int64))
        keep = np.flatnonzero(wanted)[:max_detections]
        height, width = original_sizes_hw[image]
        size = (int(height), int(width))
        found: dict[str, Any] = {}
        if extras:
            found, keep = _of_queries({name: arrays[image] for name, arrays in extras.items()}, queries, keep, size, spec)
        ids = ids[keep]
        results.append(Detections(boxes[keep], scores[keep], ids, tuple(map(spec.label, ids.tolist())), size, **found))
    return results


def _edges(sizes_hw: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """(n, 4): width, height, width, height of each size."""
    return np.array([(width, height, width, height) for height, width in sizes_hw], np.float32).reshape(-1, 4)


def _of_queries(
    extras: Mapping[str, NDArray],
    queries: NDArray[np.int64],
    keep: NDArray[np.int64],
    size_hw: tuple[int, int],
    spec: ModelSpec,
) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """What an image's detections have beside boxes, as fields of `Detections`, and their indices in the order of the result.

    Args:
        extras: outputs of one image. queries: of all candidates. keep: indices of the candidates that are returned.

    Raises:
        SessionError: NaN or infinite values.
    """
    found: dict[str, Any] = {}
    for task in sorted(tasks_of(spec), key=lambda task: not task.sorts):
        mine = queries[keep]
        arrays = {name: extras[name] if task.pairwise else extras[name][mine] for name in task.outputs(spec)}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise _overflowed(name)
        values = task.decode(arrays, mine, size_hw, _covered(spec, size_hw))
        if task.sorts:
            order = np.argsort(values, kind="stable")
            values, keep = values[order], keep[order]
        found[task.field] = values
    return found, keep


def _overflowed(*names: str) -> SessionError:
    return SessionError(
        f"the model returned NaN or infinite values in {' or '.join(map(repr, names))}: numbers overflowed inside the model; build it "
        "again with `precision=fp32`, and check the checkpoint if it happens there too"
    )


def _covered(spec: ModelSpec, size_hw: tuple[int, int]) -> tuple[float, float] | None:
    """The part of the maps of an image of this size that is not padding, in values; None for all."""
    if not spec.input.mask:
        return None
    height, width = resized_size(size_hw, spec.input)
    return height / spec.decode.mask_stride, width / spec.decode.mask_stride


def check_threshold(threshold: float, name: str = "threshold") -> None:
    check_range(name, threshold, 0, 1, ArgumentError)


def sigmoid(x: NDArray) -> NDArray[np.float32]:
    """Logistic function in float32 that does not overflow."""
    small = np.exp(-np.abs(np.asarray(x, np.float32)))
    return np.where(np.asarray(x) >= 0, 1, small) / (1 + small)


def softmax(x: NDArray) -> NDArray[np.float32]:
    """Softmax over the last axis in float32; a row of minus infinity only becomes zeros."""
    x = np.asarray(x, np.float32)
    top = x.max(-1, keepdims=True)
    weights = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)


@dataclass(frozen=True, slots=True)
class _Row:
    """Candidates of one image, best first. queries: index of each one in the outputs of `tasks.extra_outputs`."""

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    ids: NDArray[np.int64]
    queries: NDArray[np.int64]


def count_candidates(spec: ModelSpec) -> int:
    """Number of (query, class) pairs of an image that are considered."""
    rule = spec.decode
    pairs = rule.num_queries * (1 if rule.select == "query" else rule.num_classes)
    return min(pairs, rule.max_detections if rule.nms == "none" else rule.num_queries)


def _read_candidates(found: Candidates, spec: ModelSpec, scales: NDArray[np.float32], threshold: float) -> list[_Row]:
    """scales: (n, 4), width, height, width, height of what the boxes of each image are relative to; also below."""
    if found.overflow:
        raise _overflowed(found.overflow)
    scores = sigmoid(found.values) if spec.decode.activation == "sigmoid" else found.values
    # All images at once: NumPy's time for each call would hold a small model back on a GPU.
    above = (scores > np.float32(threshold)).reshape(-1).nonzero()[0]  # before sorting, as for raw outputs
    image = above // scores.shape[1]
    scores, flat = scores.reshape(-1), found.flat.reshape(-1)
    above = above[np.lexsort((flat[above], -scores[above], image))]  # image by image, so that `image` is theirs as before
    boxes = cxcywh_to_xyxy(found.boxes.reshape(-1, 4)[above].astype(np.float32)) * scales[image]
    queries, ids = np.divmod(flat[above], spec.decode.num_classes)
    scores = scores[above]
    ends = image.searchsorted(np.arange(len(found.values) + 1)).tolist()
    return [_Row(boxes[a:b], scores[a:b], ids[a:b], queries[a:b]) for a, b in pairwise(ends)]


def _read_raw(outputs: Mapping[str, NDArray], spec: ModelSpec, scales: NDArray[np.float32], threshold: float) -> list[_Row]:
    rule = spec.decode
    candidates = count_candidates(spec)
    background = rule.activation == "softmax"
    logits = checked_output(outputs, LOGITS, (len(scales), rule.num_queries, rule.num_classes + background))
    boxes = checked_output(outputs, PRED_BOXES, (len(scales), rule.num_queries, 4))
    scores = softmax(logits)[..., :-1] if background else sigmoid(logits)
    rows = []
    for image_scores, image_boxes, scale in zip(scores, boxes, scales, strict=True):
        if rule.select == "query":
            best = image_scores.argmax(-1)
            flat = np.arange(rule.num_queries) * rule.num_classes + best
        else:
            flat = np.arange(image_scores.size)
        # Filtering by score before sorting does not change the result, and avoids most of the sort.
        flat = flat[image_scores.reshape(-1)[flat] > np.float32(threshold)]
        order = np.argsort(-image_scores.reshape(-1)[flat], kind="stable")[:candidates]
        flat = flat[order]
        query, ids = np.divmod(flat, rule.num_classes)
        corners = cxcywh_to_xyxy(image_boxes[query].astype(np.float32)) * scale
        rows.append(_Row(corners, image_scores.reshape(-1)[flat], ids.astype(np.int64), query))
    return rows


def checked_output(outputs: Mapping[str, NDArray], name: str, shape: tuple[int, ...], *, finite: bool = True) -> NDArray:
    """An output of a model.

    shape: what its spec promises; a last side of -1 is any. finite: refuse NaN and infinity; logits may be minus infinity.

    Raises:
        SessionError: it is missing, has another shape, or values that it must not have.
    """
    if name not in outputs:
        raise SessionError(
            f"the model returned {sorted(outputs)}, but its spec promises '{name}'; "
            "the spec does not belong to this file: export it again"
        )
    array = np.asarray(outputs[name])
    if shape[-1] < 0:
        shape = (*shape[:-1], *array.shape[-1:])
    if array.shape != shape:
        raise SessionError(
            f"the model returned '{name}' with shape {array.shape}; its spec promises {shape}; "
            "the spec does not belong to this file: export it again"
        )
    if finite and name == LOGITS:
        bad = np.isnan(array).any() or np.isposinf(array).any()
    else:
        bad = finite and not np.isfinite(array).all()
    if bad:
        raise _overflowed(name)
    return array


def _read_extra(outputs: Mapping[str, NDArray], name: str, spec: ModelSpec, images: int) -> NDArray:
    """An output of `tasks.extra_outputs`: of all queries, or with decoding in the graph of all detections."""
    count, *inner = extra_outputs(spec)[name]
    sides = next(task.map_sides(spec, spec.input.size_hw) for task in tasks_of(spec) if name in task.outputs(spec))
    given = np.shape(outputs.get(name, ()))[2:]
    if sides and len(given) == len(sides) and 0 not in given:  # they follow those of the input, which may be symbolic
        sides = given
    return checked_output(outputs, name, (images, count, *inner, *sides), finite=False)


def _read_decoded(outputs: Mapping[str, NDArray], spec: ModelSpec, scales: NDArray[np.float32], threshold: float) -> list[_Row]:
    n, k = len(scales), spec.decode.max_detections
    # Not finite: rows after the number of detections may hold anything.
    boxes = checked_output(outputs, BOXES, (n, k, 4), finite=False)
    scores = checked_output(outputs, SCORES, (n, k), finite=False)
    labels = checked_output(outputs, LABELS, (n, k), finite=False)
    counts = checked_output(outputs, NUM_DETECTIONS, (n,), finite=False)
    rows = []
    for image_boxes, image_scores, ids, count in zip(boxes, scores, labels, counts, strict=True):
        if not 0 <= count <= k:
            raise SessionError(f"the model returned {NUM_DETECTIONS} = {count}; it must be from 0 to {k}")
        row = _Row(image_boxes[:count], image_scores[:count], ids[:count].astype(np.int64), np.arange(count))
        if not (np.isfinite(row.boxes).all() and np.isfinite(row.scores).all()):
            raise _overflowed(BOXES, SCORES)
        rows.append(row)
    return rows


def suppress(
    boxes: NDArray[np.float32], scores: NDArray[np.float32], ids: NDArray[np.int64], rule: DecodeSpec
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Non-maximum suppression inside each class: indices of the remaining boxes, best first, and their scores.

    The rule is that of mmcv's batched NMS, which separates classes by large offsets, without the rounding of these. "soft_nms"
    lowers scores.

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
            # Every pass drops low scores, also of other classes, as in mmcv.
            alive &= left >= np.float32(rule.nms_min_score)
    return np.array(order, np.int64), np.array(kept, np.float32)
