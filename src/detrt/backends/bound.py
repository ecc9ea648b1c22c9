"""A model with a prompt is a detector of fixed classes: the phrases.

`BoundSession` feeds the text with every batch of images and turns what comes back into the outputs of a model whose
classes are the phrases, so that detect, verify, evaluate and whatever else runs a Session need not know about text.
A list of names that is longer than the model takes is run in parts, and the boxes of the parts are put side by side. A
part does not know the names of the others and names an object by the best of its own. So, for models of which each
query has one class, a box is left out where a better one of another part covers the same place (`SAME_PLACE_IOU`).
No class is in two parts, so there is nothing to merge inside a class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.postprocess import checked_raw
from ..data.raw_image import Picture
from ..detections import Detections, box_iou, cxcywh_to_xyxy
from ..errors import PromptError, SessionError
from ..spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PIXEL_VALUES, PRED_BOXES, SCORES, ModelSpec
from ..text.postprocess import PHRASES, TEXT_THRESHOLD, decode_tokens, phrase_logits
from ..text.tokenizer import Asked, Part, TokenPart
from .base import Feeds, Outputs, Session, TensorInfo, text_inputs
from .prompted import PromptedSession

SAME_PLACE_IOU = 0.9


class BoundSession:
    """A Session of fixed classes: a `PromptedSession` with its prompt.

    asked: one prompt for all images, or one for each image of the batch that `run` gets.
    phrases: one of PHRASES; anything but "best" is for `found`, which then needs the token logits.
    every_class: a query may have several classes, which average precision counts; not with decoding in the graph.

    `spec` is the model's without its text part, with the phrases as labels. Closing it closes the model.

    Raises:
        PromptError: phrases that this model or this prompt cannot have.
    """

    def __init__(
        self, model: PromptedSession, asked: Sequence[Asked], *, phrases: str = "best", every_class: bool = False
    ) -> None:
        if phrases not in PHRASES:
            raise PromptError(f"phrases must be one of {', '.join(PHRASES)}; got {phrases!r}")
        if phrases != "best":
            _check_tokens_way(model, asked, phrases)
        if len(asked) > 1 and any(len(one.parts) > 1 for one in asked):
            raise PromptError("lists of class names that are asked for in parts cannot share a batch with other prompts")
        self.model, self.asked, self.phrases = model, tuple(asked), phrases
        self._texts: dict[int, list[Feeds]] = {}
        self.spec = _bound_spec(model.spec, self.asked, every_class)
        texts = text_inputs(model.spec)
        self.inputs: tuple[TensorInfo, ...] = tuple(info for info in model.inputs if info.name not in texts)
        self.outputs: tuple[TensorInfo, ...] = _bound_outputs(model.outputs, self.spec)
        self.backend, self.max_batch, self.note = model.backend, model.max_batch, model.note
        for name in ("path", "facts", "profile", "gpu_name"):
            if hasattr(model, name):
                setattr(self, name, getattr(model, name))
        if unknown := list(dict.fromkeys(name for one in asked for name in one.unknown)):
            shown = ", ".join(repr(name) for name in unknown[:5]) + (" ..." if len(unknown) > 5 else "")
            text = f"the tokenizer of this model knows no part of {shown}; it cannot tell such phrases apart"
            self.note = f"{self.note}; {text}" if self.note else text

    @property
    def parts(self) -> int:
        """Runs of the detector for one batch."""
        return len(self.asked[0].parts)

    def with_text(self, feeds: Feeds, part: int = 0) -> Feeds:
        """Feeds of the model itself: images and text. part: of a list that is asked for in parts."""
        count = len(feeds[PIXEL_VALUES])
        return {**feeds, **self.model.text_feeds(self._parts_of(count, part))}

    @property
    def pictures(self) -> BoundPictures | None:
        """What resizes and runs on the GPU, where the model's own session can; `detector_of` has the runner."""
        runner = getattr(self.model.detector, "pictures", None)
        return None if runner is None or self.phrases != "best" else BoundPictures(self, runner)

    def run(self, feeds: Feeds) -> Outputs:
        """Run one batch of images.

        Raises:
            SessionError: as the model's own `run`; another number of images than of prompts.
        """
        runs = [self.model.run(self.with_text(feeds, part)) for part in range(self.parts)]
        return self.merged(runs, len(feeds[PIXEL_VALUES]))

    def merged(self, runs: Sequence[Outputs], count: int) -> Outputs:
        """The model's outputs for each part of the list, as those of one model; of the first `count` images."""
        return self._merged_decoded(runs, count) if self.spec.decode.in_graph else self._merged_raw(runs, count)

    def texts(self, count: int) -> list[Feeds]:
        """The text inputs for `count` images with one prompt, one entry for each part; the same objects every time."""
        if count not in self._texts:
            self._texts[count] = [self.model.text_feeds(self._parts_of(count, part)) for part in range(self.parts)]
        return self._texts[count]

    def found(
        self,
        feeds: Feeds,
        sizes_hw: Sequence[tuple[int, int]],
        *,
        threshold: float,
        text_threshold: float = TEXT_THRESHOLD,
        max_detections: int | None = None,
    ) -> list[Detections]:
        """Detections whose labels are made of tokens (`phrases` "tokens" or "tokens-of-best"); see `text_decode`."""
        parts = [part for part in self._parts_of(len(sizes_hw), 0) if isinstance(part, TokenPart)]
        tokenizer = self.model.tokenizer
        return decode_tokens(
            self.model.run(self.with_text(feeds)),
            self.model.spec,
            sizes_hw,
            [part.ids for part in parts],
            [part.phrase_mask for part in parts],
            tokenizer.decode,
            threshold=threshold,
            text_threshold=text_threshold,
            frame_ids=tokenizer.frame_ids if self.phrases == "tokens-of-best" else (),
            max_detections=max_detections,
        )

    def named(self, index: int, detections: Detections) -> Detections:
        """Detections of image `index` of a batch with the phrases of its prompt, and where they stand in it."""
        prompt = self._asked_for(index).prompt
        labels = detections.labels
        if self.phrases == "best":
            names = prompt.names
            labels = tuple(names[int(i)] for i in detections.class_ids)
        if prompt.listed:
            return replace(detections, labels=labels)
        spans = tuple((prompt.phrases[i].start, prompt.phrases[i].end) for i in detections.class_ids)
        return replace(detections, labels=labels, phrase_spans=spans, prompt=prompt.text)

    def close(self) -> None:
        self.model.close()

    def __enter__(self) -> BoundSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked_for(self, index: int) -> Asked:
        return self.asked[index if len(self.asked) > 1 else 0]

    def _parts_of(self, count: int, part: int) -> list[Part]:
        if len(self.asked) not in (1, count):
            raise SessionError(f"there are {len(self.asked)} prompts for a batch of {count} images; give one for each image")
        return [self._asked_for(image).parts[part] for image in range(count)]

    def _merged_raw(self, runs: Sequence[Outputs], count: int) -> Outputs:
        """Queries of all parts after one another; what a part was not asked for has minus infinity."""
        queries, classes = self.model.spec.decode.num_queries, self.spec.decode.num_classes
        logits = np.full((count, queries * len(runs), classes), -np.inf, np.float32)
        boxes = np.zeros((count, queries * len(runs), 4), np.float32)
        for number, outputs in enumerate(runs):
            raw, raw_boxes = checked_raw(outputs, count, queries, columns=None)
            rows = slice(number * queries, (number + 1) * queries)
            boxes[:, rows] = raw_boxes
            for image, part in enumerate(self._parts_of(count, number)):
                found = _by_phrase(raw[image], part)
                logits[image, rows, list(part.prompt.class_ids)] = found.T
        if len(runs) > 1 and self.spec.decode.select == "query":
            part_of = np.repeat(np.arange(len(runs)), queries)
            for image in range(count):
                best = logits[image].max(-1)
                order = np.argsort(-best, kind="stable")
                corners = cxcywh_to_xyxy(boxes[image, order])
                kept = order[_one_a_place(corners, part_of[order], self.spec.decode.max_detections)]
                logits[image, np.setdiff1d(np.arange(len(best)), kept)] = -np.inf
        return {LOGITS: logits, PRED_BOXES: boxes}

    def _merged_decoded(self, runs: Sequence[Outputs], count: int) -> Outputs:
        rule = self.spec.decode
        merged: dict[str, NDArray] = {
            BOXES: np.zeros((count, rule.max_detections, 4), np.float32),
            SCORES: np.zeros((count, rule.max_detections), np.float32),
            LABELS: np.zeros((count, rule.max_detections), np.int64),
            NUM_DETECTIONS: np.zeros(count, np.int64),
        }
        for image in range(count):
            rows = self._decoded_rows(runs, count, image)
            boxes, scores, ids = (np.concatenate(column) for column in zip(*rows, strict=True))
            order = np.argsort(-scores, kind="stable")
            if len(runs) > 1 and rule.select == "query":
                part_of = np.repeat(np.arange(len(rows)), [len(row[1]) for row in rows])
                order = order[_one_a_place(boxes[order], part_of[order], len(order))]
            boxes, scores, ids = boxes[order], scores[order], ids[order]
            kept = min(len(scores), rule.max_detections)
            merged[BOXES][image, :kept], merged[SCORES][image, :kept] = boxes[:kept], scores[:kept]
            merged[LABELS][image, :kept], merged[NUM_DETECTIONS][image] = ids[:kept], kept
        return merged

    def _decoded_rows(self, runs: Sequence[Outputs], count: int, image: int) -> list[tuple[NDArray, NDArray, NDArray]]:
        """(boxes, scores, class ids) of one image in each run."""
        rows = []
        for number, outputs in enumerate(runs):
            class_ids = np.array(self._parts_of(count, number)[image].prompt.class_ids, np.int64)
            taken = int(outputs[NUM_DETECTIONS][image])
            labels = np.asarray(outputs[LABELS][image][:taken], np.int64)
            real = (labels >= 0) & (labels < len(class_ids))  # a phrase of the padding is no phrase
            rows.append((outputs[BOXES][image][:taken][real], outputs[SCORES][image][:taken][real], class_ids[labels[real]]))
        return rows


class BoundPictures:
    """As `on_device.PictureRunner`, for a prompt that is the same for all pictures."""

    def __init__(self, bound: BoundSession, runner: Any) -> None:
        self._bound, self._runner = bound, runner

    def submit(
        self, images: Sequence[NDArray[np.uint8] | Picture], size_hw: Any = None, batch: int | None = None
    ) -> BoundPending:
        """Begin a batch, one run for each part of the list of names."""
        texts = self._bound.texts(max(len(images), batch or 0))
        return BoundPending(self._bound, [self._runner.submit(images, size_hw, batch, text) for text in texts], len(images))

    def decoder(self) -> Any:
        """As `PictureRunner.decoder`."""
        return self._runner.decoder()


class BoundPending:
    """A batch on its way through all parts."""

    def __init__(self, bound: BoundSession, runs: Sequence[Any], count: int) -> None:
        self._bound, self._runs, self._count = bound, runs, count

    def outputs(self) -> Outputs:
        return self._bound.merged([run.outputs() for run in self._runs], self._count)


def detector_of(session: Session) -> Session:
    """The session that runs the graph of images: of a model that takes a prompt, its detector."""
    if isinstance(session, BoundSession):
        session = session.model
    return session.detector if isinstance(session, PromptedSession) else session


def model_spec(session: Session) -> ModelSpec:
    """The spec of the model itself, without a prompt."""
    return detector_of(session).spec


def with_text(session: Session, feeds: Feeds) -> Feeds:
    """Feeds of `detector_of(session)`: with the text where a prompt is bound (of a list in parts, the first)."""
    return session.with_text(feeds) if isinstance(session, BoundSession) else feeds


def _check_tokens_way(model: PromptedSession, asked: Sequence[Asked], phrases: str) -> None:
    if model.text.kind != "tokens":
        raise PromptError(f"phrases {phrases!r} needs a score for each token, this model has one for each class; use 'best'")
    if model.spec.decode.in_graph:
        raise PromptError(
            f"phrases {phrases!r} needs the scores of the tokens, which a graph with decoding keeps to itself; use 'best', or "
            "export the model without --decode graph"
        )
    if any(one.prompt.listed for one in asked):
        raise PromptError(f"phrases {phrases!r} is for a prompt, not for a list of class names; use 'best'")


def _bound_spec(spec: ModelSpec, asked: Sequence[Asked], every_class: bool) -> ModelSpec:
    rule, parts = spec.decode, len(asked[0].parts)
    classes = max(one.prompt.num_classes for one in asked)
    rule = replace(rule, num_classes=classes)
    if parts > 1 and not rule.in_graph:
        rule = replace(rule, num_queries=rule.num_queries * parts)
    if every_class and not rule.in_graph:
        rule = replace(rule, select="topk")
    # Labels belong to one prompt; with several, `named` gives them.
    labels = asked[0].prompt.names if len(asked) == 1 else {}
    return replace(spec, decode=rule, labels=labels, text=None)


def _bound_outputs(outputs: tuple[TensorInfo, ...], spec: ModelSpec) -> tuple[TensorInfo, ...]:
    rule = spec.decode
    shapes = {LOGITS: (rule.num_queries, rule.num_classes), PRED_BOXES: (rule.num_queries, 4)}
    kept = (LOGITS, PRED_BOXES, BOXES, SCORES, LABELS, NUM_DETECTIONS)
    return tuple(
        TensorInfo(i.name, i.dtype, (i.shape[0], *shapes[i.name]) if i.name in shapes else i.shape)
        for i in outputs
        if i.name in kept
    )


def _one_a_place(boxes: NDArray, part_of: NDArray, most: int) -> list[int]:
    """Indices of the first `most` xyxy boxes, best first, that no better one of another part lies on."""
    kept: list[int] = []
    for i in range(len(boxes)):
        others = [j for j in kept if part_of[j] != part_of[i]]
        if not (box_iou(boxes[i : i + 1], boxes[others]) > SAME_PLACE_IOU).any():
            kept.append(i)
            if len(kept) == most:
                break
    return kept


def _by_phrase(logits: NDArray, part: Part) -> NDArray[np.float32]:
    """(queries, columns) -> (queries, phrases), without the columns of the padding."""
    if part.length > logits.shape[-1]:
        raise SessionError(
            f"the model returned {logits.shape[-1]} columns of '{LOGITS}' for {part.length} tokens or classes; "
            "the spec does not belong to this file: export it again"
        )
    if isinstance(part, TokenPart):
        return phrase_logits(logits[:, : part.length], part.phrase_mask)
    return np.asarray(logits[:, : part.length], np.float32)
