"""A model that takes a prompt: its detector, its text tower and its tokenizer behind one Session.

The text tower runs once for each prompt that is new; what it made is kept (`CACHE_SIZE` prompts, `NAMES_SIZE`
class names of kind "classes"), so that a video, a folder or a server pays for the text once.
`PromptedSession.bind` gives a session of fixed classes, which everything that runs a detector can use.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.postprocess import checked_raw
from ..data.raw_image import Picture
from ..detections import Detections, box_iou, cxcywh_to_xyxy
from ..errors import PromptError, SessionError
from ..spec import (
    ATTENTION_MASK,
    BOXES,
    CLASS_FEATURES,
    CLASS_MASK,
    INPUT_IDS,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PHRASE_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TASK_FEATURES,
    TASK_MASK,
    TEXT_FEATURES,
    TEXT_POSITION_IDS,
    TEXT_SELF_MASK,
    TOWER_INPUTS,
    ModelSpec,
    TensorInfo,
    TextSpec,
    text_inputs,
)
from ..text.postprocess import PHRASES, TEXT_THRESHOLD, decode_tokens, phrase_logits
from ..text.prompts import Prompt
from ..text.tokenizer import Asked, ClassPart, Part, PromptTokenizer, TokenPart
from .base import Feeds, Outputs, Session

CACHE_SIZE = 64  # prompts, and tasks; one of 256 tokens is 0.8 MB, a usual one of 16 tokens 20 kB
NAMES_SIZE = 4096  # class names, of 2 kB each

# TensorRT prepares kernels, and records a CUDA graph, for every new combination of input shapes; prompts are padded
# to a multiple of this, so that there are at most 16 of them. The masks make it exact. ONNX Runtime has no such cost.
ENGINE_BUCKET = 16

# Axis of the number of tokens, or of classes, of every text input.
_TOKEN_AXES = {
    INPUT_IDS: (1,),
    ATTENTION_MASK: (1,),
    TEXT_FEATURES: (1,),
    TEXT_SELF_MASK: (1, 2),
    TEXT_POSITION_IDS: (1,),
    PHRASE_MASK: (2,),
    TASK_FEATURES: (1,),
    TASK_MASK: (1,),
}
_CLASS_AXES = {CLASS_FEATURES: (1,), CLASS_MASK: (1,)}
_PHRASE_AXES = {PHRASE_MASK: (1,)}


class PromptedSession:
    """A Session of a model with a text part.

    detector: takes images and text features (or token ids, where the model is one graph). tower: the text
    tower, None for a model of one graph. tokenizer: of the model. cache_size: prompts whose features are kept.
    Closing it closes both sessions.

    Raises:
        SessionError: a tower is missing, or is not one.
    """

    def __init__(
        self, detector: Session, tokenizer: PromptTokenizer, tower: Session | None = None, *, cache_size: int = CACHE_SIZE
    ) -> None:
        if detector.spec.text is None:
            raise SessionError("this model has fixed classes and takes no prompt; open it without a tokenizer")
        if cache_size < 1:
            raise SessionError(f"cache_size must be at least 1; got {cache_size}")
        needed = bool(detector.spec.text.tower)
        if needed != (tower is not None):
            what = f"needs its text tower '{detector.spec.text.tower}'" if needed else "is one graph and has no text tower"
            raise SessionError(f"this model {what}; open the bundle or the ONNX file with detrt.open_session")
        if tower is not None and {info.name for info in tower.inputs} != set(TOWER_INPUTS):
            raise SessionError(f"the text tower must take {list(TOWER_INPUTS)}; got {[i.name for i in tower.inputs]}")
        self.detector, self.tower, self.tokenizer = detector, tower, tokenizer
        self.spec: ModelSpec = detector.spec
        self.text: TextSpec = detector.spec.text
        self.inputs: tuple[TensorInfo, ...] = detector.inputs
        self.outputs: tuple[TensorInfo, ...] = detector.outputs
        self.backend, self.max_batch = detector.backend, detector.max_batch
        self.note: str = getattr(detector, "note", "")
        # What else sessions tell about themselves, where the detector does.
        for name in ("path", "facts", "profile", "gpu_name"):
            if hasattr(detector, name):
                setattr(self, name, getattr(detector, name))
        self._lock = threading.RLock()
        self._asked: _Kept = _Kept(cache_size)
        self._features, self._names = _Kept(cache_size), _Kept(NAMES_SIZE)
        # Two graphs run one after the other, so both must take a length.
        both = [detector] if tower is None else [detector, tower]
        self._tokens = _Lengths(both, _TOKEN_AXES, limit=self.text.max_tokens)
        most = self.spec.decode.num_classes if self.text.kind == "classes" else None
        self._classes = _Lengths([detector], _CLASS_AXES, limit=most)
        self._phrases = _Lengths([detector], _PHRASE_AXES)

    def ask(self, prompt: str | Sequence[str] | Prompt, task: str = "") -> Asked:
        """A prompt made ready: parsed, tokenised, and in parts where a list is longer than the model takes.

        Raises:
            PromptError: nothing to look for, too many tokens, or a task for a model without one.
        """
        parsed = self.tokenizer.parse(prompt, task)
        with self._lock:
            if (asked := self._asked.get(parsed)) is None:
                most = self._classes.high if self.text.kind == "classes" else self._phrases.high
                made = self.tokenizer.ask(parsed, max_tokens=self._tokens.high, max_phrases=most)
                asked = self._asked.put(parsed, made)
        return asked

    def bind(
        self,
        prompts: str | Sequence[str] | Prompt | Asked,
        *,
        task: str = "",
        phrases: str = "best",
        every_class: bool = False,
    ) -> BoundSession:
        """A session of fixed classes, the phrases of one prompt or of a list of class names; see `BoundSession`."""

        asked = prompts if isinstance(prompts, Asked) else self.ask(prompts, task)
        return BoundSession(self, [asked], phrases=phrases, every_class=every_class)

    def with_parts(self, detector: Session, tower: Session | None) -> PromptedSession:
        """The same model run by other sessions, e.g. ones that round."""
        made = PromptedSession(detector, self.tokenizer, tower, cache_size=self._asked.size)
        made.note = "; ".join(dict.fromkeys(note for note in (self.note, made.note) if note))
        return made

    def text_feeds(self, parts: Sequence[Part]) -> Feeds:
        """The text inputs of the detector for a batch, one part of a prompt for each image."""
        names = {info.name for info in self.inputs}
        feeds = self._class_feeds(parts) if self.text.kind == "classes" else self._token_feeds(parts)
        return {name: array for name, array in feeds.items() if name in names}

    def run(self, feeds: Feeds) -> Outputs:
        """Run the detector; feeds hold the images and the text inputs (see `text_feeds`)."""
        missing = [name for name in text_inputs(self.spec) if name not in feeds]
        if missing:
            raise PromptError(
                f"this model finds what a prompt names, and there is none (inputs {missing} are not fed); give --prompt "
                "(Python: Detector.open(..., prompt=...), or session.bind(prompt))"
            )
        return self.detector.run(feeds)

    def close(self) -> None:
        self.detector.close()
        if self.tower is not None:
            self.tower.close()

    def __enter__(self) -> PromptedSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token_feeds(self, parts: Sequence[Part]) -> dict[str, NDArray]:
        given = [part for part in parts if isinstance(part, TokenPart)]
        count, length = len(given), self._tokens.fit(max(part.length for part in given))
        ids = np.full((count, length), self.text.pad_id, np.int64)
        mask = np.zeros((count, length), np.int64)
        for row, part in enumerate(given):
            ids[row, : part.length] = part.ids
            mask[row, : part.length] = 1
        feeds = {INPUT_IDS: ids, ATTENTION_MASK: mask}
        if self.spec.decode.in_graph:
            most = self._phrases.fit(max(len(part.phrase_mask) for part in given))
            phrases = np.zeros((count, most, length), np.int64)
            for row, part in enumerate(given):
                phrases[row, : len(part.phrase_mask), : part.length] = part.phrase_mask
            feeds[PHRASE_MASK] = phrases
        if self.tower is None:
            return feeds
        made = [self._tower_row(part.ids) for part in given]
        width = made[0][TEXT_FEATURES].shape[-1]
        features = np.zeros((count, length, width), np.float32)
        # A token of the padding looks at itself only: without anything to look at, a softmax is not a number.
        self_mask = np.tile(np.eye(length, dtype=np.int64), (count, 1, 1))
        positions = np.zeros((count, length), np.int64)
        for row, (part, kept) in enumerate(zip(given, made, strict=True)):
            n = part.length
            features[row, :n] = kept[TEXT_FEATURES]
            self_mask[row, :n, :n] = kept[TEXT_SELF_MASK]
            positions[row, :n] = kept[TEXT_POSITION_IDS]
        return {**feeds, TEXT_FEATURES: features, TEXT_SELF_MASK: self_mask, TEXT_POSITION_IDS: positions}

    def _class_feeds(self, parts: Sequence[Part]) -> dict[str, NDArray]:
        given = [part for part in parts if isinstance(part, ClassPart)]
        count = len(given)
        names = self._kept_rows(self._names, CLASS_FEATURES, [ids for part in given for ids in part.names])
        sentences = self._kept_rows(self._features, TEXT_FEATURES, [part.task for part in given])
        most = self._classes.fit(max(len(part.names) for part in given))
        length = self._tokens.fit(max(len(part.task) for part in given))
        classes = np.zeros((count, most, names[given[0].names[0].tobytes()].shape[-1]), np.float32)
        class_mask = np.zeros((count, most), np.int64)
        tasks = np.zeros((count, length, sentences[given[0].task.tobytes()].shape[-1]), np.float32)
        task_mask = np.zeros((count, length), np.int64)
        for row, part in enumerate(given):
            for column, ids in enumerate(part.names):
                classes[row, column] = names[ids.tobytes()]
            class_mask[row, : len(part.names)] = 1
            n = len(part.task)
            tasks[row, :n] = sentences[part.task.tobytes()]
            task_mask[row, :n] = 1
        return {CLASS_FEATURES: classes, CLASS_MASK: class_mask, TASK_FEATURES: tasks, TASK_MASK: task_mask}

    def _tower_row(self, ids: NDArray) -> dict[str, NDArray]:
        # Made one at a time, so that what is kept does not depend on the neighbours in a batch.
        with self._lock:
            kept = self._features.get(ids.tobytes())
            return self._features.put(ids.tobytes(), self._run_tower([ids])[0]) if kept is None else kept

    def _kept_rows(self, kept: _Kept, output: str, rows: Sequence[NDArray]) -> dict[bytes, NDArray]:
        """One output of the tower for each row of token ids, in one run for all that are new."""
        with self._lock:
            found = {ids.tobytes(): kept.get(ids.tobytes()) for ids in rows}
            new = {ids.tobytes(): ids for ids in rows if found[ids.tobytes()] is None}
            for key, row in zip(new, self._run_tower(list(new.values())), strict=True):
                found[key] = kept.put(key, row[output])
        return found

    def _run_tower(self, rows: Sequence[NDArray]) -> list[dict[str, NDArray]]:
        """What the tower makes of each row of token ids, without the padding."""
        assert self.tower is not None
        results = []
        size = min(self.tower.max_batch or len(rows), len(rows)) if rows else 0
        fixed = next(info.shape[0] for info in self.tower.inputs if info.name == INPUT_IDS)
        for start in range(0, len(rows), size or 1):
            some = rows[start : start + size]
            count = fixed if isinstance(fixed, int) else len(some)
            length = self._tokens.fit(max(len(ids) for ids in some))
            ids = np.full((count, length), self.text.pad_id, np.int64)
            mask = np.zeros((count, length), np.int64)
            for row in range(count):
                given = some[min(row, len(some) - 1)]
                ids[row, : len(given)] = given
                mask[row, : len(given)] = 1
            made = self.tower.run({INPUT_IDS: ids, ATTENTION_MASK: mask})
            for row, given in enumerate(some):
                results.append(_row(made, row, len(given)))
        return results


def _row(made: Outputs, row: int, length: int) -> dict[str, NDArray]:
    cut: dict[str, Callable[[NDArray], NDArray]] = {
        TEXT_FEATURES: lambda a: a[row, :length],
        TEXT_SELF_MASK: lambda a: a[row, :length, :length],
        TEXT_POSITION_IDS: lambda a: a[row, :length],
        CLASS_FEATURES: lambda a: a[row],
    }
    # Copies: a view would keep the padded arrays of the whole batch.
    kept = {name: np.array(cut[name](array)) for name, array in made.items() if name in cut}
    for name in (TEXT_FEATURES, CLASS_FEATURES):
        if name in kept and not np.isfinite(kept[name]).all():
            raise SessionError(
                f"the text tower returned NaN or infinite values in '{name}': numbers overflowed inside it; build it again "
                "with --precision fp32"
            )
    return kept


class _Lengths:
    """Which lengths of an axis some sessions take: from their engines' profiles, and from fixed axes."""

    def __init__(self, sessions: Sequence[Session], axes: dict[str, tuple[int, ...]], limit: int | None = None) -> None:
        self.low, self.high, self.step = 1, limit, 1
        for session in sessions:
            if session.backend.startswith("tensorrt"):
                self.step = ENGINE_BUCKET
            profile = getattr(session, "profile", {})
            for info in session.inputs:
                for axis in axes.get(info.name, ()):
                    length = info.shape[axis]
                    low, high = (1, None) if isinstance(length, str) else (length, length)
                    if info.name in profile:
                        low, high = int(profile[info.name][0][axis]), int(profile[info.name][2][axis])
                    self.low = max(self.low, low)
                    if high is not None:
                        self.high = high if self.high is None else min(self.high, high)

    def fit(self, length: int) -> int:
        """The shortest length that the sessions take, at least `length`; the padding is masked."""
        length = max(self.low, -(-length // self.step) * self.step)
        return length if self.high is None else min(length, self.high)


class _Kept:
    """The entries that were used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: Hashable, value: Any) -> Any:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self.size:
            self._entries.popitem(last=False)
        return value


# A model with a prompt is a detector of fixed classes: the phrases.
#
# `BoundSession` feeds the text with every batch of images and turns what comes back into the outputs of a model whose
# classes are the phrases, so that detect, verify, evaluate and whatever else runs a Session need not know about text.
# A list of names that is longer than the model takes is run in parts, and the boxes of the parts are put side by side. A
# part does not know the names of the others and names an object by the best of its own. So, for models of which each
# query has one class, a box is left out where a better one of another part covers the same place (`SAME_PLACE_IOU`).
# No class is in two parts, so there is nothing to merge inside a class.
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
