"""Merge the outputs of the runs of a prompt, one for each chunk of its names, into those of one model.

A list of class names that is longer than the model takes runs in chunks, whose boxes are concatenated. A chunk labels an object
with the best of its own names only. For models with one class per query, cross-chunk NMS therefore drops a box that overlaps a
better one of another chunk (`CROSS_CHUNK_IOU`). No class is in two chunks, so that nothing has to be merged inside a class.

Where no name changes what another finds, nor the boxes, the logits of all chunks are columns of one result.

Where every phrase has queries of its own, and no phrase changes another's, those of all phrases and chunks are merged by
their scores, and only the best remain, so that masks of a long list need the memory of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.postprocess import checked_output
from ..detections import box_iou, cxcywh_to_xyxy
from ..errors import SessionError
from ..spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PRED_BOXES, SCORES, ModelSpec
from ..tasks import extra_outputs, output_names
from ..text.kinds import Chunk, EncodedPrompt, PromptKind
from ..text.tensors import PHRASE_MASK
from .base import Feeds, Outputs

CROSS_CHUNK_IOU = 0.9


@dataclass(frozen=True, slots=True)
class ChunkMerge:
    """How the outputs of the chunks of prompts are merged.

    Attributes:
        model: spec of the model itself.
        bound: spec of the model whose classes are the phrases; the merged outputs are its.
        prompts: one for all images, or one for each image of a batch.
    """

    model: ModelSpec
    bound: ModelSpec
    prompts: tuple[EncodedPrompt, ...]

    def merge(self, runs: Iterable[Outputs], count: int, texts: Callable[[int], Sequence[Feeds]]) -> Outputs:
        """Outputs of the first `count` images.

        runs: outputs of each chunk. texts: gives the text inputs of each chunk for a number of images.

        Raises:
            SessionError: an output is missing, has another shape than the spec promises, or values that it must not have.
        """
        if self.bound.decode.in_graph:
            return self._merge_decoded(list(runs), count)
        if self._kind.own_queries:
            return self._merge_phrases(runs, count, texts(count))
        return self._merge_raw(list(runs), count)

    @property
    def _kind(self) -> PromptKind:
        assert self.model.text is not None
        return self.model.text.prompt_kind

    def _chunk(self, image: int, number: int) -> Chunk:
        return self.prompts[image % len(self.prompts)].chunks[number]

    def _merge_raw(self, runs: Sequence[Outputs], count: int) -> Outputs:
        """Concatenate the queries of all chunks; classes of other chunks have logit minus infinity. Where chunks are not joined, all
        have the same queries."""
        queries, classes = self.model.decode.num_queries, self.bound.decode.num_classes
        logits = np.full((count, self.bound.decode.num_queries, classes), -np.inf, np.float32)
        boxes = np.zeros((count, self.bound.decode.num_queries, 4), np.float32)
        one = not self._kind.joins_queries
        for number, outputs in enumerate(runs):
            raw = checked_output(outputs, LOGITS, (count, queries, -1))
            rows = slice(0, queries) if one else slice(number * queries, (number + 1) * queries)
            boxes[:, rows] = checked_output(outputs, PRED_BOXES, (count, queries, 4))
            for image in range(count):
                chunk = self._chunk(image, number)
                classes_here = list(chunk.prompt.class_ids)
                if chunk.columns > raw.shape[-1]:
                    raise SessionError(
                        f"the model returned {raw.shape[-1]} columns of '{LOGITS}' for {chunk.columns} tokens or classes; "
                        "the spec does not belong to this file: export it again"
                    )
                found = chunk.by_class(raw[image, :, : chunk.columns])  # without padding
                logits[image, rows, classes_here] = found.T
        if len(runs) > 1 and not one and self.bound.decode.select == "query":
            chunk_of = np.repeat(np.arange(len(runs)), queries)
            for image in range(count):
                best = logits[image].max(-1)
                order = np.argsort(-best, kind="stable")
                corners = cxcywh_to_xyxy(boxes[image, order])
                kept = order[_cross_chunk_nms(corners, chunk_of[order], self.bound.decode.max_detections)]
                logits[image, np.setdiff1d(np.arange(len(best)), kept)] = -np.inf
        return {LOGITS: logits, PRED_BOXES: boxes}

    def _merge_phrases(self, runs: Iterable[Outputs], count: int, texts: Sequence[Feeds]) -> Outputs:
        """The best queries of all phrases, `num_queries` of each image; each has one class, the logits of the others are minus infinity."""
        queries = self.bound.decode.num_queries
        names, extras = output_names(self.bound), extra_outputs(self.bound)
        best: list[tuple[NDArray, ...]] = [()] * count  # (class ids, logits, boxes, and with masks their logits) of an image
        for number, outputs in enumerate(runs):
            phrases = texts[number][PHRASE_MASK].shape[1]
            sides = {LOGITS: (), PRED_BOXES: (4,), **{name: np.shape(outputs.get(name, ()))[3:] for name in extras}}
            arrays = [
                checked_output(outputs, name, (count, phrases, queries, *sides[name]), finite=name not in extras)
                for name in names
            ]
            for image in range(count):
                ids = self._chunk(image, number).prompt.class_ids  # without those of padding
                found = [np.repeat(ids, queries), *(array[image, : len(ids)].reshape(-1, *array.shape[3:]) for array in arrays)]
                old = best[image] or tuple(part[:0] for part in found)
                order = np.argsort(-np.concatenate([old[1], found[1]]), kind="stable")[:queries]
                before, new = order[order < len(old[0])], order[order >= len(old[0])] - len(old[0])
                best[image] = tuple(np.concatenate([a[before], b[new]]) for a, b in zip(old, found, strict=True))
        merged = np.full((count, queries, self.bound.decode.num_classes), -np.inf, np.float32)
        for image, (ids, scores, *_) in enumerate(best):
            merged[image, np.arange(queries), ids] = scores
        rest = [np.stack(parts) for parts in zip(*(one[2:] for one in best), strict=True)]
        return dict(zip(names, [merged, *rest], strict=True))

    def _merge_decoded(self, runs: Sequence[Outputs], count: int) -> Outputs:
        rule = self.bound.decode
        merge: dict[str, NDArray] = {
            BOXES: np.zeros((count, rule.max_detections, 4), np.float32),
            SCORES: np.zeros((count, rule.max_detections), np.float32),
            LABELS: np.zeros((count, rule.max_detections), np.int64),
            NUM_DETECTIONS: np.zeros(count, np.int64),
        }
        extras = extra_outputs(self.bound)
        for name in extras:
            merge[name] = np.zeros((count, rule.max_detections, *np.shape(runs[0][name])[2:]), np.float32)
        for image in range(count):
            rows = self._read_decoded(runs, image)
            boxes, scores, ids, *more = (np.concatenate(column) for column in zip(*rows, strict=True))
            order = np.argsort(-scores, kind="stable")
            if len(runs) > 1 and rule.select == "query":
                chunk_of = np.repeat(np.arange(len(rows)), [len(row[1]) for row in rows])
                order = order[_cross_chunk_nms(boxes[order], chunk_of[order], len(order))]
            boxes, scores, ids = boxes[order], scores[order], ids[order]
            kept = min(len(scores), rule.max_detections)
            merge[BOXES][image, :kept], merge[SCORES][image, :kept] = boxes[:kept], scores[:kept]
            merge[LABELS][image, :kept], merge[NUM_DETECTIONS][image] = ids[:kept], kept
            for name, one in zip(extras, more, strict=True):
                merge[name][image, :kept] = one[order[:kept]]
        return merge

    def _read_decoded(self, runs: Sequence[Outputs], image: int) -> list[tuple[NDArray, ...]]:
        """(boxes, scores, class ids), and with masks their logits, of one image in each run."""
        rows = []
        for number, outputs in enumerate(runs):
            class_ids = np.array(self._chunk(image, number).prompt.class_ids, np.int64)
            count_valid = int(outputs[NUM_DETECTIONS][image])
            labels = np.asarray(outputs[LABELS][image][:count_valid], np.int64)
            real = (labels >= 0) & (labels < len(class_ids))  # labels of padded phrases
            names = (BOXES, SCORES, *extra_outputs(self.bound))
            boxes, scores, *more = (outputs[name][image][:count_valid][real] for name in names)
            rows.append((boxes, scores, class_ids[labels[real]], *more))
        return rows


def _cross_chunk_nms(boxes: NDArray, chunk_of: NDArray, limit: int) -> list[int]:
    """Indices of the first `limit` xyxy boxes, best first, without those that overlap a better box of another chunk."""
    kept: list[int] = []
    for i in range(len(boxes)):
        others = [j for j in kept if chunk_of[j] != chunk_of[i]]
        if not (box_iou(boxes[i : i + 1], boxes[others]) > CROSS_CHUNK_IOU).any():
            kept.append(i)
            if len(kept) == limit:
                break
    return kept
