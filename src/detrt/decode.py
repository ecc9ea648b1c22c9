"""Reference of DecodeSpec: what a model returns -> `Detections`. NumPy only.

The rules, which every other runtime and the graph of `decode.in_graph` follow:

    scores      float32; sigmoid, or softmax over all columns of which the last ("no object") is dropped
    select      "query": each query gives its best class, the lower class id under ties;
                "topk": every (query, class) pair is a candidate
    order       score descending; equal scores by flat index (query * classes + class) ascending
    nms         with `decode.nms` only the `num_queries` best candidates are looked at; the rule is in
                `detrt.suppress`, on boxes that are clipped already
    cut         `max_detections` of the spec first, then score > threshold, then `class_ids`,
                then the caller's own `max_detections`
    boxes       cxcywh of the unpadded image -> xyxy pixels of the original image, clipped to it

A logit of minus infinity is a class that cannot be and has score 0. NaN, or plus infinity in logits
or boxes, means that the numbers of the model overflowed; it is refused, because a detector that
silently finds nothing is worse than one that stops.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from .detections import Detections, cxcywh_to_xyxy
from .errors import SessionError
from .spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PRED_BOXES, SCORES, ModelSpec
from .suppress import suppress

_OVERFLOW = (
    "numbers overflowed inside the model; build it again with --precision fp32, and check the checkpoint if it happens there too"
)


def decode(
    outputs: Mapping[str, NDArray],
    spec: ModelSpec,
    original_sizes_hw: Sequence[tuple[int, int]],
    *,
    threshold: float = 0.5,
    class_ids: Collection[int] | None = None,
    max_detections: int | None = None,
) -> list[Detections]:
    """One `Detections` for each image of the batch.

    outputs: `logits` (n, queries, classes) and `pred_boxes` (n, queries, 4), or with decoding in the
        graph `boxes` (n, k, 4), `scores` (n, k), `labels` (n, k) and `num_detections` (n,).
    threshold: keep scores above it, 0..1. class_ids: keep these classes only.

    Raises:
        SessionError: outputs are missing, have a shape that does not belong to the spec, or are NaN or
            infinite.
        ValueError: threshold or max_detections out of range.
    """
    check_threshold(threshold)
    if max_detections is not None and max_detections < 1:
        raise ValueError(f"max_detections must be at least 1; got {max_detections}")
    read = _read_decoded if spec.decode.in_graph else _read_raw
    rows = read(outputs, spec, original_sizes_hw, threshold)
    results = []
    for (boxes, scores, ids), (height, width) in zip(rows, original_sizes_hw, strict=True):
        boxes = np.clip(boxes, 0, np.array([width, height, width, height], np.float32))
        if spec.decode.nms != "none" and not spec.decode.nms_in_graph:
            stay, scores = suppress(boxes, scores, ids, spec.decode)
            boxes, scores, ids = (a[: spec.decode.max_detections] for a in (boxes[stay], scores, ids[stay]))
        keep = scores > np.float32(threshold)
        if class_ids is not None:
            keep &= np.isin(ids, np.array(sorted(class_ids), np.int64))
        boxes, scores, ids = (a[keep][:max_detections] for a in (boxes, scores, ids))
        labels = tuple(spec.label(i) for i in ids)
        results.append(Detections(boxes, scores, ids, labels, (int(height), int(width))))
    return results


def check_threshold(threshold: float, name: str = "threshold") -> None:
    if not (math.isfinite(threshold) and 0 <= threshold <= 1):
        raise ValueError(f"{name} must be from 0 to 1; got {threshold}")


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


Row = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]  # boxes, scores, class ids


def _read_raw(
    outputs: Mapping[str, NDArray], spec: ModelSpec, sizes_hw: Sequence[tuple[int, int]], threshold: float
) -> list[Row]:
    rule = spec.decode
    candidates = rule.max_detections if rule.nms == "none" else rule.num_queries
    background = rule.activation == "softmax"
    logits, boxes = checked_raw(outputs, len(sizes_hw), rule.num_queries, columns=rule.num_classes + background)
    scores = softmax(logits)[..., :-1] if background else sigmoid(logits)
    rows = []
    for image_scores, image_boxes, (height, width) in zip(scores, boxes, sizes_hw, strict=True):
        if rule.select == "query":
            best = image_scores.argmax(-1)
            flat = np.arange(rule.num_queries) * rule.num_classes + best
        else:
            flat = np.arange(image_scores.size)
        # Cutting by score before sorting changes nothing in the result and spares most of the sort.
        flat = flat[image_scores.reshape(-1)[flat] > np.float32(threshold)]
        order = np.argsort(-image_scores.reshape(-1)[flat], kind="stable")[:candidates]
        flat = flat[order]
        query, ids = np.divmod(flat, rule.num_classes)
        scale = np.array([width, height, width, height], np.float32)
        pixels = cxcywh_to_xyxy(image_boxes[query].astype(np.float32)) * scale
        rows.append((pixels, image_scores.reshape(-1)[flat], ids.astype(np.int64)))
    return rows


def checked_raw(outputs: Mapping[str, NDArray], images: int, queries: int, *, columns: int | None) -> tuple[NDArray, NDArray]:
    """`logits` (images, queries, columns) and `pred_boxes` (images, queries, 4); columns None: any number.

    Raises:
        SessionError: one is missing, has another shape, or holds NaN or infinity.
    """
    if columns is None:
        columns = next(reversed(np.shape(outputs.get(LOGITS, ()))), 0)
    logits = _take(outputs, LOGITS, (images, queries, columns))
    boxes = _take(outputs, PRED_BOXES, (images, queries, 4))
    if np.isnan(logits).any() or np.isposinf(logits).any():
        raise SessionError(f"the model returned NaN or infinite values in '{LOGITS}': {_OVERFLOW}")
    if not np.isfinite(boxes).all():
        raise SessionError(f"the model returned NaN or infinite values in '{PRED_BOXES}': {_OVERFLOW}")
    return logits, boxes


def _read_decoded(
    outputs: Mapping[str, NDArray], spec: ModelSpec, sizes_hw: Sequence[tuple[int, int]], threshold: float
) -> list[Row]:
    n, k = len(sizes_hw), spec.decode.max_detections
    boxes = _take(outputs, BOXES, (n, k, 4))
    scores = _take(outputs, SCORES, (n, k))
    labels = _take(outputs, LABELS, (n, k))
    counts = _take(outputs, NUM_DETECTIONS, (n,))
    rows = []
    for image_boxes, image_scores, ids, count in zip(boxes, scores, labels, counts, strict=True):
        if not 0 <= count <= k:
            raise SessionError(f"the model returned {NUM_DETECTIONS} = {count}; it must be from 0 to {k}")
        row = image_boxes[:count], image_scores[:count], ids[:count].astype(np.int64)
        if not (np.isfinite(row[0]).all() and np.isfinite(row[1]).all()):
            raise SessionError(f"the model returned NaN or infinite values in '{BOXES}' or '{SCORES}': {_OVERFLOW}")
        rows.append(row)
    return rows


def _take(outputs: Mapping[str, NDArray], name: str, shape: tuple[int, ...]) -> NDArray:
    if name not in outputs:
        raise SessionError(
            f"the model returned {sorted(outputs)}, but its spec promises '{name}'; "
            "the spec does not belong to this file: export it again"
        )
    array = np.asarray(outputs[name])
    if array.shape != shape:
        raise SessionError(
            f"the model returned '{name}' with shape {array.shape}; its spec promises {shape}; "
            "the spec does not belong to this file: export it again"
        )
    return array
