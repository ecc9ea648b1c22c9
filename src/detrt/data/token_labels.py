"""Labels of boxes by token logits. NumPy only.

Two rules for models with a logit for each token:

    best phrase     score of (query, phrase) = the largest sigmoid(logit) of the phrase's tokens; the phrases are then
                    classes like those of any other model (`text.kinds.phrase_logits`), and `postprocess` does the rest
    tokens          as published (arXiv:2303.05499 and its code, also transformers' processor): the score of a box is
                    its largest sigmoid(logit) over all tokens, and its label is the text of the tokens above
                    `text_threshold`, which may be a part of a phrase or parts of several (`decode_tokens`)
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..detections import Detections, cxcywh_to_xyxy
from ..spec import LOGITS, PRED_BOXES, ModelSpec
from ..text.kinds import phrase_logits
from .postprocess import checked_output, sigmoid

PHRASES = ("best", "tokens", "tokens-of-best")
TEXT_THRESHOLD = 0.25  # of both published processors


def published_tokens(
    probabilities: NDArray, ids: Sequence[int], text_threshold: float, *, max_tokens: int, frame_ids: Sequence[int] = ()
) -> list[list[int]]:
    """Ids of the tokens above a threshold for each box: IDEA-Research's `get_phrases_from_posmap`.

    probabilities: (boxes, tokens). The first token and the one at `max_tokens` - 1, the last of a prompt of
    full length, never count. frame_ids: with them, only tokens between the two of these ids around the best token
    count (the `remove_combined` of its `predict`); with the best token one of them, those before it.
    """
    probabilities = probabilities[:, : len(ids)]
    above = probabilities > text_threshold
    above[:, 0] = False
    above[:, max_tokens - 1 :] = False
    frames = [i for i, token in enumerate(ids) if token in frame_ids]
    if frames:
        for row, best in zip(above, probabilities.argmax(-1), strict=True):
            # As in the original, the list wraps around for a best token before all frames, so that nothing is left.
            at = min(bisect.bisect_left(frames, int(best)), len(frames) - 1)
            row[: frames[at - 1] + 1] = False
            row[frames[at] :] = False
    return [[int(ids[i]) for i in np.flatnonzero(row)] for row in above]


def decode_tokens(
    outputs: Mapping[str, NDArray],
    spec: ModelSpec,
    original_sizes_hw: Sequence[tuple[int, int]],
    ids: Sequence[Sequence[int]],
    masks: Sequence[NDArray[np.bool_]],
    to_text: Callable[[Sequence[int]], str],
    *,
    threshold: float,
    text_threshold: float = TEXT_THRESHOLD,
    frame_ids: Sequence[int] = (),
    max_detections: int | None = None,
) -> list[Detections]:
    """Detections with labels by the published rule, best score first; the class id is that of the best phrase.

    outputs: `logits` (n, queries, tokens) and `pred_boxes` (n, queries, 4). ids: token ids of each image's prompt.
    masks: (phrases, tokens) of each. to_text: text of token ids; dots are removed, as published.

    Raises:
        SessionError: outputs that are missing, of a wrong shape, or NaN or infinite.
    """
    assert spec.text is not None
    logits = checked_output(outputs, LOGITS, (len(original_sizes_hw), spec.decode.num_queries, -1))
    boxes = checked_output(outputs, PRED_BOXES, (len(original_sizes_hw), spec.decode.num_queries, 4))
    results = []
    for image, (height, width) in enumerate(original_sizes_hw):
        length = len(ids[image])
        probabilities = sigmoid(logits[image, :, :length])
        best = probabilities.max(-1)
        order = np.argsort(-best, kind="stable")
        order = order[best[order] > np.float32(threshold)][: min(spec.decode.max_detections, max_detections or len(order))]
        scale = np.array([width, height, width, height], np.float32)
        pixels = np.clip(cxcywh_to_xyxy(boxes[image, order].astype(np.float32)) * scale, 0, scale)
        chosen = published_tokens(
            probabilities[order], ids[image], text_threshold, max_tokens=spec.text.max_tokens, frame_ids=frame_ids
        )
        labels = tuple(to_text(row).replace(".", "") for row in chosen)
        classes = phrase_logits(logits[image, order, :length], masks[image]).argmax(-1)
        results.append(Detections(pixels, best[order], classes, labels, (int(height), int(width))))
    return results
