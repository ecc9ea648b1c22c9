"""A model that takes a prompt: its detector, its text encoder and its tokenizer behind one Session.

The text encoder runs once for each new prompt; its outputs are cached (`CACHE_SIZE` prompts, `NAMES_SIZE` class names),
so that a video, a folder or a server pays for the text once.

A model with a bound prompt is a session of fixed classes, the phrases (`BoundSession`): it feeds the text with every batch
of images and converts the outputs to those of a model whose classes are the phrases, so that other code does not depend on
text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.images import load_image
from ..data.postprocess import Candidates, DetectionFilter, sigmoid, suppress
from ..data.preprocess import BatchPlan, SizeHW, preprocess
from ..data.raw_image import LoadedImage
from ..data.token_labels import PHRASES, TEXT_THRESHOLD, decode_tokens
from ..detections import Detections, cxcywh_to_xyxy
from ..errors import PromptError, SessionError, check_one_of, number_of
from ..spec import (
    BOXES,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    ModelSpec,
    TensorInfo,
    TextSpec,
    text_inputs,
)
from ..tasks import extra_outputs
from ..text.kinds import Chunk, EncodedPrompt, Ids, ImageChunk, padded
from ..text.prompts import ImageQueries, Prompt
from ..text.prompts import chunks as split_in_chunks
from ..text.tensors import (
    ATTENTION_MASK,
    AXES,
    CLASS_FEATURES,
    INPUT_IDS,
    LENGTH_AXES,
    TEXT_ENCODER_INPUTS,
    TEXT_FEATURES,
    TEXT_POSITION_IDS,
    TEXT_SELF_MASK,
    TOKENS_AXIS,
)
from ..text.tokenizer import PromptTokenizer
from .base import BaseSession, Choices, Feeds, ImageRunner, Outputs, PendingOutputs, Session, no_prompt
from .merge_chunks import ChunkMerge

CACHE_SIZE = 64  # prompts and tasks; 0.8 MB for 256 tokens, 20 kB for a typical 16 tokens
NAMES_SIZE = 4096  # class names, of 2 kB each

# Some backends prepare kernels, and record a CUDA graph, for every new combination of input shapes; prompts are padded
# to a multiple of this, so that there are at most 16 of them. The masks make it exact.
ENGINE_BUCKET = 16

Prompts = str | Sequence[str] | Prompt | ImageQueries  # one prompt: a text, a list of class names, or images
QUERY_NMS_IOU = 0.3  # of what an image query finds, as in transformers


class PromptedSession(BaseSession):
    """A Session of a model with a text part. Closing it closes both of its sessions.

    Args:
        detector: takes images and text features (or token ids, if the model is one graph).
        tokenizer: of the model.
        text_encoder: None for a model of one graph.
        query_encoder: opens the session of the encoder of query images, which is closed after each query; None for a model without one.
        cache_size: prompts whose features are cached.

    Attributes:
        before_run: called before each run of the detector; what it raises ends a list that runs in chunks.

    Raises:
        SessionError: the text encoder is missing or invalid.
    """

    before_run: Callable[[], None] | None = None

    def __init__(
        self,
        detector: Session,
        tokenizer: PromptTokenizer,
        text_encoder: Session | None = None,
        *,
        query_encoder: Callable[[], Session] | None = None,
        cache_size: int = CACHE_SIZE,
    ) -> None:
        text = detector.spec.text
        if text is None:
            raise SessionError("this model has fixed classes and takes no prompt; open it without a tokenizer")
        if cache_size < 1:
            raise SessionError(f"cache_size must be at least 1; got {cache_size}")
        required = bool(text.encoder)
        if required != (text_encoder is not None):
            what = f"needs its text encoder '{text.encoder}'" if required else "is one graph and has no text encoder"
            raise SessionError(f"this model {what}; open the bundle or the ONNX file with detrt.open_session")
        if text_encoder is not None and {info.name for info in text_encoder.inputs} != set(TEXT_ENCODER_INPUTS):
            raise SessionError(
                f"the text encoder must take {list(TEXT_ENCODER_INPUTS)}; got {[i.name for i in text_encoder.inputs]}"
            )
        self.detector, self.text_encoder, self.tokenizer = detector, text_encoder, tokenizer
        self.spec: ModelSpec = detector.spec
        self.text: TextSpec = text
        self.query_encoder = query_encoder
        takes_images = query_encoder is not None and not self.spec.decode.in_graph
        self._info = replace(detector.info, text=text, takes_query_images=takes_images)
        self._lock = threading.RLock()
        self._features, self._names, self._queries = _Cache(cache_size), _Cache(NAMES_SIZE), _Cache(cache_size)
        # Both graphs must take a length.
        both = [detector] if text_encoder is None else [detector, text_encoder]
        self.kind = text.prompt_kind
        limits = {TOKENS_AXIS: text.max_tokens, self.kind.counted: self.kind.most(self.spec)}
        self._lengths = {
            axis: _Lengths(
                both, axis, limit=limits.get(axis), bucket=ENGINE_BUCKET if axis == TOKENS_AXIS or self.kind.pads else 1
            )
            for axis in LENGTH_AXES
        }
        tokens, phrases = (self._lengths[axis].high for axis in (TOKENS_AXIS, self.kind.counted))
        tokenize = functools.partial(tokenizer.encode, max_tokens=tokens, max_phrases=phrases)
        self._tokenized = functools.lru_cache(cache_size)(tokenize)

    def encode(self, prompt: Prompts, task: str = "") -> EncodedPrompt:
        """Parse and tokenize a prompt, in chunks if a list is longer than the model takes.

        Raises:
            PromptError: an empty prompt, too many tokens, a task for a model without one, or images for a model that takes none.
            ImageError: a query image that cannot be read.
        """
        if isinstance(prompt, ImageQueries):
            return self._encode_images(prompt, task)
        return self._tokenized(self.tokenizer.parse(prompt, task))

    def bind(
        self,
        *prompts: Prompts,
        task: str = "",
        phrases: str = "best",
        text_threshold: float = TEXT_THRESHOLD,
        every_class: bool = False,
    ) -> BoundSession:
        """A session of fixed classes: the phrases of one prompt for all images, or of one prompt for each image of a batch.

        Args:
            prompts: texts, or lists of class names.
            task: for models that take one.
            phrases: "best" names a box by its best phrase; "tokens" and "tokens-of-best" by its tokens above
                `text_threshold`, see `TokenLabelSession`.
            every_class: a query may have several classes, as average precision counts; not with decoding in the graph.

        Raises:
            PromptError: a bad prompt, or `phrases` that this model or prompt does not support.
        """
        check_one_of("`phrases`", phrases, PHRASES, PromptError)
        encoded = [self.encode(prompt, task) for prompt in prompts]
        if all(one.prompt == encoded[0].prompt for one in encoded):
            encoded = encoded[:1]
        if phrases == "best":
            return BoundSession(self, encoded, every_class=every_class)
        return TokenLabelSession(self, encoded, text_threshold=text_threshold, of_best=phrases == "tokens-of-best")

    def with_sessions(self, detector: Session, text_encoder: Session | None) -> PromptedSession:
        """The same model with other sessions, e.g. ones that emulate low precision."""
        size, query_encoder = self._features.size, self.query_encoder
        other = PromptedSession(detector, self.tokenizer, text_encoder, query_encoder=query_encoder, cache_size=size)
        other._info = replace(other.info, notes=tuple(dict.fromkeys((*self.info.notes, *other.info.notes))))
        return other

    def text_feeds(self, chunks: Sequence[Chunk]) -> Feeds:
        """The text inputs of the detector for a batch, one chunk of a prompt for each image."""
        names = {info.name for info in self.inputs}
        return {name: array for name, array in self.kind.feeds(self.spec, chunks, self).items() if name in names}

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run the detector; feeds hold the images and the text inputs (see `text_feeds`)."""
        missing = [name for name in text_inputs(self.spec) if name not in feeds]
        if missing:
            raise PromptError(
                f"this model finds what a prompt names, and there is none (inputs {missing} are not fed); give `prompt`, or "
                "call session.bind(prompt)"
            )
        if self.before_run is not None:
            self.before_run()
        return self.detector.run(feeds, force)

    def close(self) -> None:
        self.detector.close()
        if self.text_encoder is not None:
            self.text_encoder.close()

    def _encode_images(self, queries: ImageQueries, task: str) -> EncodedPrompt:
        if not self.kind.takes_images:
            raise PromptError(f"this model ({self.spec.family}) takes no query image, only text: give a prompt")
        if task:
            raise PromptError("a query image takes no task; leave the task out")
        if self.query_encoder is None:
            raise PromptError(
                "this model comes without its encoder of query images, which turns them into what to find; export or build it again with "
                "`image_queries`"
            )
        if self.spec.decode.in_graph:
            raise PromptError(
                f"query images need the scores of all patches, since of overlapping boxes (IoU above {QUERY_NMS_IOU}) the best is kept; "
                "this graph decodes by itself: export the model again without `decode=graph`"
            )
        found, encoder = [], None
        with self._lock, contextlib.ExitStack() as stack:
            for source in queries.images:  # one decoded image at a time
                image = None if isinstance(source, bytes) else load_image(source)
                content = source if image is None else b"%d %d " % image.shape[:2] + image.tobytes()
                key = hashlib.sha256(content).digest()
                feature = self._queries.get(key)
                if feature is None:
                    encoder = encoder or stack.enter_context(contextlib.closing(self.query_encoder()))
                    image = load_image(source) if image is None else image
                    feature = self._queries.put(key, self._encode_image(encoder, image))
                found.append(feature)
        features, prompt = np.stack(found), queries.prompt()
        split = split_in_chunks([0] * len(found), 0, self._lengths[self.kind.counted].high)
        return EncodedPrompt(prompt, tuple(ImageChunk(prompt.part(some), features[some]) for some in split), of_images=True)

    def _encode_image(self, encoder: Session, image: NDArray[np.uint8]) -> NDArray[np.float32]:
        pixels = preprocess([image], self.spec).feeds[PIXEL_VALUES]
        features = np.array(encoder.run({PIXEL_VALUES: pixels})[CLASS_FEATURES][0], np.float32)
        if not np.isfinite(features).all():
            raise SessionError("the encoder of query images returned NaN or infinite values; export the model again")
        return features

    def fit(self, axis: str, length: int) -> int:
        """The shortest length of an axis of the prompt that the sessions take, at least `length`; the padding is masked."""
        return self._lengths[axis].fit(length)

    def alone(self, ids: Ids) -> dict[str, NDArray]:
        """Outputs of the text encoder for one row of token ids, cached; one at a time, so that they do not depend on others of a batch."""
        with self._lock:
            row = self._features.get(ids.tobytes())
            return self._features.put(ids.tobytes(), self._run_text_encoder([ids])[0]) if row is None else row

    def rows(self, output: str, ids: Sequence[Ids], *, names: bool) -> dict[bytes, NDArray]:
        """One output of the text encoder for each row of token ids, cached, with one run for all new rows. names: of classes."""
        cache = self._names if names else self._features
        with self._lock:
            found = {row.tobytes(): cache.get(row.tobytes()) for row in ids}
            new = {row.tobytes(): row for row in ids if found[row.tobytes()] is None}
            for key, row in zip(new, self._run_text_encoder(list(new.values())), strict=True):
                found[key] = cache.put(key, row[output])
        return found

    def _run_text_encoder(self, rows: Sequence[NDArray]) -> list[dict[str, NDArray]]:
        """Outputs of the text encoder for each row of token ids, without the padding."""
        assert self.text_encoder is not None
        results = []
        size = min(self.text_encoder.info.max_batch or len(rows), len(rows)) if rows else 0
        for start in range(0, len(rows), size or 1):
            some = rows[start : start + size]
            count = self.text_encoder.info.fixed_batch or len(some)
            length = self.fit(TOKENS_AXIS, max(len(ids) for ids in some))
            ids, mask = padded([some[min(row, len(some) - 1)] for row in range(count)], length, self.text.pad_id)
            made = self.text_encoder.run({INPUT_IDS: ids, ATTENTION_MASK: mask})
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
                f"the text encoder returned NaN or infinite values in '{name}': numbers overflowed inside it; build it again "
                "with `precision=fp32`"
            )
    return kept


class _Lengths:
    """Lengths of an axis that all of some sessions take, from profiles of engines and fixed axes."""

    def __init__(
        self,
        sessions: Sequence[Session],
        axis: str,
        limit: int | None = None,
        bucket: int = ENGINE_BUCKET,
    ) -> None:
        self.low, self.high, self.step = 1, limit, 1
        for session in sessions:
            if session.info.few_lengths:
                self.step = bucket
            profile = session.info.profile
            for info in session.inputs:
                for place in (place for place, name in enumerate(AXES.get(info.name, ())) if name == axis):
                    length = info.shape[place]
                    low, high = (1, None) if isinstance(length, str) else (length, length)
                    if info.name in profile:
                        low, high = int(profile[info.name][0][place]), int(profile[info.name][2][place])
                    self.low = max(self.low, low)
                    if high is not None:
                        self.high = high if self.high is None else min(self.high, high)

    def fit(self, length: int) -> int:
        """The shortest length that the sessions take, at least `length`; the padding is masked."""
        length = max(self.low, -(-length // self.step) * self.step)
        return length if self.high is None else min(length, self.high)


class _Cache:
    """A least-recently-used cache of `size` entries."""

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


class BoundSession(BaseSession):
    """A Session of fixed classes: a `PromptedSession` with its prompt; see `PromptedSession.bind`.

    `spec` is that of the model without its text part, with the phrases as labels. Closing it closes the model.

    Raises:
        PromptError: several prompts, of which one is in chunks.
    """

    def __init__(self, model: PromptedSession, prompts: Sequence[EncodedPrompt], *, every_class: bool = False) -> None:
        if len({one.of_images for one in prompts}) > 1:
            raise PromptError("query images and texts cannot share a batch")
        if len(prompts) > 1 and any(len(one.chunks) > 1 for one in prompts):
            raise PromptError("lists of class names that run in chunks cannot share a batch with other prompts")
        self.model = model
        self._texts: dict[int, list[Feeds]] = {}
        rule, chunks = model.spec.decode, len(prompts[0].chunks)
        rule = replace(rule, num_classes=max(one.prompt.num_classes for one in prompts))
        if chunks > 1 and not rule.in_graph and model.kind.joins_queries:
            rule = replace(rule, num_queries=rule.num_queries * chunks)
        if every_class and not rule.in_graph:
            rule = replace(rule, select="topk")
        # Labels belong to one prompt; with several, `postprocess` gives them.
        labels = prompts[0].prompt.names if len(prompts) == 1 else {}
        self.spec = replace(model.spec, decode=rule, labels=labels, text=None)
        texts = text_inputs(model.spec)
        self._info = replace(
            model.info,
            inputs=tuple(info for info in model.inputs if info.name not in texts),
            outputs=_bound_outputs(model.outputs, self.spec),
            text=None,
        )
        self.prompts = tuple(prompts)
        self._merging = ChunkMerge(model.spec, self.spec, self.prompts)
        if unknown := list(dict.fromkeys(name for one in prompts for name in one.unknown)):
            shown = ", ".join(repr(name) for name in unknown[:5]) + (" ..." if len(unknown) > 5 else "")
            self.add_note(f"the tokenizer of this model knows no part of {shown}; it cannot tell such phrases apart")

    def bind(self, *prompts: Prompts, **options: Any) -> BoundSession:
        """The same model with another prompt."""
        return self.model.bind(*prompts, **options)

    @property
    def chunks(self) -> int:
        """Runs of the detector for one batch."""
        return len(self.prompts[0].chunks)

    def with_text(self, feeds: Feeds) -> Feeds:
        """Feeds of the model itself: images and text; of a list that runs in chunks, that of the first."""
        return {**feeds, **self.texts(len(feeds[PIXEL_VALUES]))[0]}

    @property
    def image_runner(self) -> ImageRunner | None:
        runner = self.model.detector.image_runner
        return None if runner is None else BoundImageRunner(self, runner)

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch of images.

        Raises:
            SessionError: as `run` of the model; another number of images than of prompts.
        """
        self._refuse(force)
        count = len(feeds[PIXEL_VALUES])
        return self.merge((self.model.run({**feeds, **text}) for text in self.texts(count)), count)

    def merge(self, runs: Iterable[Outputs], count: int) -> Outputs:
        """Merge the outputs for each chunk of the list into those of one model; of the first `count` images."""
        return self._merging.merge(runs, count, self.texts)

    def texts(self, count: int) -> list[Feeds]:
        """The text inputs for `count` images, one entry for each chunk; the same objects every time.

        Raises:
            SessionError: another number of images than of prompts.
        """
        prompts = self.prompts
        if len(prompts) not in (1, count):
            raise SessionError(
                f"there are {number_of(len(prompts), 'prompt')} for a batch of {number_of(count, 'image')}; give one for each image"
            )
        if count not in self._texts:
            self._texts[count] = [
                self.model.text_feeds([prompts[image % len(prompts)].chunks[chunk] for image in range(count)])
                for chunk in range(self.chunks)
            ]
        return self._texts[count]

    def postprocess(self, outputs: Outputs | Candidates, sizes_hw: Sequence[SizeHW], keep: DetectionFilter) -> list[Detections]:
        """As in any session, with the phrases of the prompt of each image and their spans."""
        if self.prompts[0].of_images:
            assert isinstance(outputs, dict)  # its graph does not decode
            outputs = self._best_of_overlapping(outputs, keep)
        found = super().postprocess(outputs, sizes_hw, keep)
        return [self._with_labels(index, detections) for index, detections in enumerate(found)]

    def close(self) -> None:
        self.model.close()

    def _with_labels(self, index: int, detections: Detections) -> Detections:
        prompt = self.prompts[index % len(self.prompts)].prompt
        names = prompt.names
        return _with_spans(prompt, replace(detections, labels=tuple(names[int(i)] for i in detections.class_ids)))

    def _best_of_overlapping(self, outputs: Outputs, keep: DetectionFilter) -> Outputs:
        """Outputs without the patches whose boxes overlap a better one of the same query; before boxes are clipped, as transformers does."""
        rule = replace(self.spec.decode, nms="nms", nms_iou=QUERY_NMS_IOU)
        logits = np.array(outputs[LOGITS])
        scores, ids = sigmoid(logits.max(-1)), logits.argmax(-1)
        corners = cxcywh_to_xyxy(outputs[PRED_BOXES].astype(np.float32))
        for image in range(len(logits)):
            order = np.argsort(-scores[image], kind="stable")
            order = order[scores[image, order] > np.float32(keep.threshold)]  # the others suppress none of these
            kept, _ = suppress(corners[image, order], scores[image, order], ids[image, order], rule)
            logits[image, np.setdiff1d(np.arange(logits.shape[1]), order[kept])] = -np.inf
        return {**outputs, LOGITS: logits}


class TokenLabelSession(BoundSession):
    """A bound prompt whose boxes are labelled by their tokens, as published, and not by their best phrase.

    `run` returns the outputs of the model, a logit for each token; for `postprocess` see `decode_tokens`.

    Args:
        text_threshold: tokens with scores above it label a box.
        of_best: only tokens of the sub-sentence around the best one.

    Raises:
        PromptError: a model or a prompt without token scores.
    """

    def __init__(self, model: PromptedSession, prompts: Sequence[EncodedPrompt], *, text_threshold: float, of_best: bool) -> None:
        name = "tokens-of-best" if of_best else "tokens"
        if not model.kind.token_scores:
            raise PromptError(f"phrases {name!r} needs a score for each token, this model has one for each class; use 'best'")
        if model.spec.decode.in_graph:
            raise PromptError(
                f"phrases {name!r} needs the scores of the tokens, which a graph with decoding does not return; use 'best', or "
                "export the model without `decode=graph`"
            )
        if any(one.prompt.listed for one in prompts):
            raise PromptError(f"phrases {name!r} is for a prompt, not for a list of class names; use 'best'")
        super().__init__(model, prompts)
        self._text_threshold, self._of_best = text_threshold, of_best

    @property
    def image_runner(self) -> ImageRunner | None:
        return None

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        return self.model.run(self.with_text(feeds), force)

    def postprocess(self, outputs: Outputs | Candidates, sizes_hw: Sequence[SizeHW], keep: DetectionFilter) -> list[Detections]:
        assert isinstance(outputs, dict)  # there is no image runner
        prompts = [self.prompts[index % len(self.prompts)] for index in range(len(sizes_hw))]
        chunks: list[Any] = [chunk for one in prompts for chunk in one.chunks]  # one each, with a mask of its phrases
        tokenizer = self.model.tokenizer
        found = decode_tokens(
            outputs,
            self.model.spec,
            sizes_hw,
            [chunk.ids for chunk in chunks],
            [chunk.phrase_mask for chunk in chunks],
            tokenizer.decode,
            threshold=keep.threshold,
            text_threshold=self._text_threshold,
            frame_ids=tokenizer.frame_ids if self._of_best else (),
            max_detections=keep.max_detections,
        )
        return [_with_spans(one.prompt, detections) for one, detections in zip(prompts, found, strict=True)]


class BoundImageRunner:
    """An `ImageRunner` for a prompt that is the same for all images: one run for each chunk."""

    def __init__(self, bound: BoundSession, runner: Any) -> None:
        self._bound, self._runner = bound, runner

    def submit(self, images: Sequence[LoadedImage], plan: BatchPlan) -> _BoundPending:
        texts = self._bound.texts(len(images))
        return _BoundPending(self._bound, [self._runner.submit(images, plan, text) for text in texts], len(images))

    def stage_times(self, images: Sequence[LoadedImage], plan: BatchPlan, repeats: int) -> dict[str, list[float]]:
        times: dict[str, list[float]] = self._runner.stage_times(images, plan, repeats, self._bound.texts(len(images))[0])
        return times

    def decoder(self) -> Any:
        return self._runner.decoder()


class _BoundPending:
    def __init__(self, bound: BoundSession, runs: Sequence[PendingOutputs], count: int) -> None:
        self._bound, self._runs, self._count = bound, runs, count

    def outputs(self) -> Outputs:
        return self._bound.merge((run.outputs() for run in self._runs), self._count)  # type: ignore[misc]  # no candidates


def detector_of(session: Session) -> Session:
    """The session that runs the graph of images: of a model that takes a prompt, its detector."""
    model = unbound(session)
    return model.detector if isinstance(model, PromptedSession) else model


def unbound(session: Session) -> Session:
    """The session, or its model if a prompt is bound."""
    return session.model if isinstance(session, BoundSession) else session


def model_spec(session: Session) -> ModelSpec:
    """The spec of the model itself, without a prompt."""
    return detector_of(session).spec


def with_text(session: Session, feeds: Feeds) -> Feeds:
    """Feeds of `detector_of(session)`: with the text if a prompt is bound (of a list in chunks, the first)."""
    return session.with_text(feeds) if isinstance(session, BoundSession) else feeds


def prompt_groups(session: Session, prompts: Sequence[Prompts], task: str = "") -> list[list[int]]:
    """Indices of prompts that may share a batch: all, unless a list of class names runs in chunks.

    Raises:
        PromptError: fixed classes, or a bad prompt.
    """
    model = unbound(session)
    if not isinstance(model, PromptedSession):
        raise no_prompt()
    encoded = [model.encode(prompt, task) for prompt in prompts]
    if all(len(one.chunks) == 1 for one in encoded):
        kinds = ([i for i, one in enumerate(encoded) if one.of_images is images] for images in (False, True))
        return [indices for indices in kinds if indices]
    groups: dict[Prompt, list[int]] = {}
    for index, one in enumerate(encoded):
        groups.setdefault(one.prompt, []).append(index)
    return list(groups.values())


def require_prompt(session: Session) -> None:
    """Raise PromptError if the model takes a prompt and none is bound."""
    if session.info.text is not None:
        last = ", `classes_from` or `query_image`" if session.info.takes_query_images else " or `classes_from`"
        raise PromptError(
            f"this model finds what a prompt names, and there is none; give `prompt='a cat. a dog.'`, `prompt_file`{last}"
        )


def _with_spans(prompt: Prompt, detections: Detections) -> Detections:
    """Detections with the positions of their phrases in the text of a prompt."""
    if prompt.listed:
        return detections
    spans = tuple((prompt.phrases[i].start, prompt.phrases[i].end) for i in detections.class_ids)
    return replace(detections, phrase_spans=spans, prompt=prompt.text)


def _bound_outputs(outputs: tuple[TensorInfo, ...], spec: ModelSpec) -> tuple[TensorInfo, ...]:
    rule = spec.decode
    shapes = {LOGITS: (rule.num_queries, rule.num_classes), PRED_BOXES: (rule.num_queries, 4)}
    extras = extra_outputs(spec)
    kept = (*shapes, BOXES, SCORES, LABELS, NUM_DETECTIONS, *extras)
    found = []
    for i in outputs:
        shape = (i.shape[0], *shapes[i.name]) if i.name in shapes else i.shape
        if i.name in extras and not rule.in_graph:
            shape = (i.shape[0], rule.num_queries, *i.shape[-2:])
        found += [TensorInfo(i.name, i.dtype, shape)] * (i.name in kept)
    return tuple(found)
