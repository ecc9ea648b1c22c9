"""The kinds of prompt, a class each: what a prompt is, how it is tokenized, what the graph takes and returns, how long it may be.

No other code asks which kind it is. `TextSpec.prompt_kind` is the object of a model's kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PromptError, number_of
from .prompts import Prompt, chunks, with_last_dot
from .tensors import (
    ATTENTION_MASK,
    CLASS_FEATURES,
    CLASS_MASK,
    CLASSES_AXIS,
    INPUT_IDS,
    PHRASE_FEATURES,
    PHRASE_MASK,
    PHRASES_AXIS,
    TASK_FEATURES,
    TASK_MASK,
    TEXT_ENCODER_INPUTS,
    TEXT_FEATURES,
    TEXT_POSITION_IDS,
    TEXT_SELF_MASK,
    TOKENS_AXIS,
)

if TYPE_CHECKING:
    from ..spec import ModelSpec, TextSpec
    from .tokenizer import PromptTokenizer

Ids = NDArray[np.int64]
Feeds = dict[str, NDArray]
Triple = tuple[int, int, int]  # min, opt and max of an axis
Rows = tuple[Ids, Ids]  # input_ids and attention_mask, (rows, tokens)
Axes = tuple[int | str, ...]
Encode = Callable[[Ids, Ids], Mapping[str, NDArray]]  # a text encoder: its outputs by name
Draw = Callable[[int], Rows]

# (min, opt, max) as far as the model allows. The shortest prompt that says anything is one word, a full stop and the frame.
_TOKENS, _CLASSES, _PHRASES = (4, 32, 256), (1, 16, 1000), (1, 8, 128)


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One run of a model of kind `TokenPrompts`.

    prompt: the phrases of this run. ids: (tokens,) int64, with the framing tokens.
    phrase_mask: (phrases, tokens) bool, which tokens belong to which phrase; separators belong to none.
    """

    prompt: Prompt
    ids: Ids
    phrase_mask: NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def columns(self) -> int:
        """Logits of a query."""
        return len(self.ids)

    @property
    def tokens(self) -> list[Ids]:
        return [self.ids]

    def by_class(self, logits: NDArray) -> NDArray:
        """(queries, columns) -> (queries, phrases)."""
        return phrase_logits(logits, self.phrase_mask)

    def to_json(self) -> dict[str, Any]:
        return {"phrase_mask": [np.flatnonzero(row).tolist() for row in self.phrase_mask]}


class _LogitForEach:
    """A run with a logit for each of what it asks for."""

    __slots__ = ()

    def by_class(self, logits: NDArray) -> NDArray:
        """(queries, columns) as they are."""
        return logits

    def to_json(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class ClassChunk(_LogitForEach):
    """One run of a model of another kind. names: the ids of each class name; task: of the task, if any; framed."""

    prompt: Prompt
    names: tuple[Ids, ...]
    task: Ids

    @property
    def length(self) -> int:
        return len(self.names)

    @property
    def columns(self) -> int:
        """Logits of a query."""
        return len(self.prompt.class_ids)

    @property
    def tokens(self) -> list[Ids]:
        return [*self.names, self.task]

    def features(self, encoded: Mapping[bytes, NDArray]) -> NDArray[np.float32]:
        """(names, d), of what the text encoder returned for each of `names`."""
        return np.stack([encoded[ids.tobytes()] for ids in self.names])


@dataclass(frozen=True, slots=True)
class ImageChunk(_LogitForEach):
    """Image queries of one run, in place of names. images: (images, d) float32 of the encoder of query images."""

    prompt: Prompt
    images: NDArray[np.float32]
    names: ClassVar[tuple[Ids, ...]] = ()  # nothing for a text encoder
    tokens: ClassVar[tuple[Ids, ...]] = ()

    @property
    def length(self) -> int:
        return len(self.images)

    @property
    def columns(self) -> int:
        """Logits of a query."""
        return len(self.images)

    def features(self, encoded: Mapping[bytes, NDArray]) -> NDArray[np.float32]:
        """(images, d)."""
        return self.images


Chunk = TokenChunk | ClassChunk | ImageChunk


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A tokenized prompt: one chunk, or several for a list that is longer than the model takes.

    unknown: phrases whose tokens are all unknown to the tokenizer; the model cannot distinguish them.
    of_images: whether images are asked for, see `ImageQueries`.
    """

    prompt: Prompt
    chunks: tuple[Chunk, ...]
    unknown: tuple[str, ...] = ()
    of_images: bool = False


class PromptEncoder(Protocol):
    """What `PromptKind.feeds` needs of a model that is open."""

    def fit(self, axis: str, length: int) -> int:
        """The shortest length of an axis of the prompt that its graphs take, at least `length`."""

    def alone(self, ids: Ids) -> Mapping[str, NDArray]:
        """All outputs of the text encoder for one row of token ids, which runs by itself."""

    def rows(self, output: str, ids: Sequence[Ids], *, names: bool) -> Mapping[bytes, NDArray]:
        """One output of the text encoder for each of some rows, by their bytes. names: they are names of classes."""


class PromptKind(ABC):
    """A kind of prompt.

    Attributes:
        name: in `TextSpec.kind` and in files.
        encoder_outputs: what its text encoder returns.
        counted: axis of the graph that says how many phrases or names one run takes.
        reads_ids: the checkpoint's own model takes the token ids of a prompt with each image, so that one graph can do so as well.
        encodes: what the text encoder runs over, where `reads_ids` does not hold.
        token_scores: there is a logit for each token.
        takes_task: a sentence says what to do.
        takes_images: images may be asked for in place of names, see `ImageQueries`.
        own_queries: every phrase has queries of its own, and may have masks; no phrase changes what another finds.
        joins_queries: the queries of several chunks are joined; else all chunks have the same ones, or the best of all remain.
        pads: a run may have phrases or names that nobody asked for, as padding; where `own_queries` holds, each would cost a run of
            the decoder.
        native: the C++ runtime runs it.
    """

    name: ClassVar[str]
    encoder_outputs: ClassVar[tuple[str, ...]]
    counted: ClassVar[str] = CLASSES_AXIS
    reads_ids: ClassVar[bool] = False
    encodes: ClassVar[str] = ""
    token_scores: ClassVar[bool] = False
    takes_task: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    own_queries: ClassVar[bool] = False
    joins_queries: ClassVar[bool] = False
    pads: ClassVar[bool] = True
    native: ClassVar[bool] = False

    @abstractmethod
    def inputs(self, spec: ModelSpec) -> list[str]:
        """Names of the text inputs of the detector, in the order of its graph."""

    def logit_axes(self, queries: int) -> tuple[Axes, Axes]:
        """(axes of boxes, axes of logits behind these)."""
        return ("batch", queries), (CLASSES_AXIS,)

    def most(self, spec: ModelSpec) -> int | None:
        """Phrases or names of one run; None: as many as its tokens allow."""
        return spec.decode.num_classes

    @abstractmethod
    def describe(self, spec: ModelSpec) -> str:
        """What a prompt may be, in words."""

    @abstractmethod
    def lengths(self, spec: ModelSpec, *, one_phrase: bool = False) -> dict[str, Triple]:
        """Axis of the prompt -> (min, opt, max) that an engine is built for. one_phrase: with `own_queries`, one at a time."""

    def fixed_lengths(self, text: TextSpec, most: int, wanted: int | None, usual: int) -> tuple[int, int]:
        """(tokens, phrases or names) of a graph that takes one length; the second is 0 where only tokens count.

        most: names or phrases of one run. wanted: the caller's length; None takes `usual`, or what costs nothing more.
        """
        return text.max_tokens, min(wanted or usual, most)

    def encode(self, tokenizer: PromptTokenizer, prompt: Prompt, limit: int, most: int | None) -> EncodedPrompt:
        """Tokenize a prompt.

        limit: tokens of a run, or of a name. most: phrases or names of a run.

        Raises:
            PromptError: too many tokens or phrases, or a phrase without any token.
        """
        names, unknown = _names(tokenizer, prompt, limit)
        return _in_chunks(prompt, names, np.zeros(0, np.int64), unknown, most)

    @abstractmethod
    def feeds(self, spec: ModelSpec, chunks: Sequence[Any], encoder: PromptEncoder) -> Feeds:
        """Text inputs of the detector for a batch, one chunk of this kind for each image; may hold more than its graph takes."""

    def example_row(self, rng: np.random.Generator, words: list[int], length: int, text: TextSpec, size: int) -> list[int]:
        """Token ids of a random prompt, at most `length`. words: ids to choose from; size: of the vocabulary."""
        return [size - 2, *words[: length - 2], size - 1]  # between the first and the last id of a CLIP vocabulary

    @abstractmethod
    def example_feeds(self, spec: ModelSpec, ids: Rows, encode: Encode, draw: Draw) -> Feeds:
        """Text inputs of the detector for random prompts, one for each image. draw: gives that many more rows of names."""


class TokenPrompts(PromptKind):
    """One text of phrases, and a logit for each of its tokens (Grounding DINO); `separators` end a phrase."""

    name = "tokens"
    encoder_outputs = (TEXT_FEATURES, TEXT_SELF_MASK, TEXT_POSITION_IDS)
    counted = PHRASES_AXIS
    reads_ids = token_scores = joins_queries = native = True

    def inputs(self, spec: ModelSpec) -> list[str]:
        assert spec.text is not None
        features = [TEXT_FEATURES, ATTENTION_MASK, TEXT_SELF_MASK, TEXT_POSITION_IDS]
        return (features if spec.text.encoder else list(TEXT_ENCODER_INPUTS)) + [PHRASE_MASK] * spec.decode.in_graph

    def logit_axes(self, queries: int) -> tuple[Axes, Axes]:
        return ("batch", queries), (TOKENS_AXIS,)

    def most(self, spec: ModelSpec) -> int | None:
        return None

    def describe(self, spec: ModelSpec) -> str:
        assert spec.text is not None
        return f"phrases, up to {number_of(spec.text.max_tokens, 'token')}"

    def lengths(self, spec: ModelSpec, *, one_phrase: bool = False) -> dict[str, Triple]:
        assert spec.text is not None
        return {TOKENS_AXIS: _up_to(_TOKENS, spec.text.max_tokens), PHRASES_AXIS: _PHRASES}

    def fixed_lengths(self, text: TextSpec, most: int, wanted: int | None, usual: int) -> tuple[int, int]:
        return min(wanted or usual, text.max_tokens), 0

    def encode(self, tokenizer: PromptTokenizer, prompt: Prompt, limit: int, most: int | None) -> EncodedPrompt:
        encodings = tokenizer.pieces([phrase.text for phrase in prompt.phrases], framed=False)
        unknown = tokenizer.unknown_of(prompt.phrases, encodings)
        if not prompt.listed:
            chunk = self.chunk_of(tokenizer, prompt)
            if len(chunk.ids) > limit:
                raise PromptError(
                    f"the prompt has {number_of(len(chunk.ids), 'token')} ({tokenizer.frame} of them frame it), this model takes at most {limit}; make "
                    "it shorter, or give a list of class names (a line each in the file of `classes_from`), which runs in chunks"
                )
            _check_count(prompt, most)
            return EncodedPrompt(prompt, (chunk,), unknown)
        lengths = [len(encoding.ids) + 1 for encoding in encodings]  # and the dot after it
        room = limit - tokenizer.frame
        if too_long := [i for i, length in enumerate(lengths) if length > room]:
            i = too_long[0]
            raise PromptError(
                f"the class name {prompt.phrases[i].text[:60]!r} (number {prompt.class_ids[i]}) has {number_of(lengths[i] - 1, 'token')}, "
                f"this model takes at most {room - 1} in one name; shorten it"
            )
        split = chunks(lengths, room, most)
        whole = [prompt] if len(split) == 1 else [prompt.part(indices) for indices in split]
        return EncodedPrompt(prompt, tuple(self.chunk_of(tokenizer, some) for some in whole), unknown)

    @staticmethod
    def chunk_of(tokenizer: PromptTokenizer, prompt: Prompt) -> TokenChunk:
        (encoding,) = tokenizer.pieces([with_last_dot(prompt.text)])
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        word = (spans[:, 1] > spans[:, 0]) & ~np.isin(ids, tokenizer.text.separators)
        bounds = np.array([(p.start, p.end) for p in prompt.phrases], np.int64)
        inside = (spans[None, :, 0] >= bounds[:, :1]) & (spans[None, :, 1] <= bounds[:, 1:])
        return TokenChunk(prompt, ids, inside & word[None])

    def feeds(self, spec: ModelSpec, chunks: Sequence[TokenChunk], encoder: PromptEncoder) -> Feeds:
        assert spec.text is not None
        count, length = len(chunks), encoder.fit(TOKENS_AXIS, max(len(chunk.ids) for chunk in chunks))
        ids, mask = padded([chunk.ids for chunk in chunks], length, spec.text.pad_id)
        feeds: Feeds = {INPUT_IDS: ids, ATTENTION_MASK: mask}
        if spec.decode.in_graph:
            most = encoder.fit(PHRASES_AXIS, max(len(chunk.phrase_mask) for chunk in chunks))
            phrases = np.zeros((count, most, length), np.int64)
            for row, chunk in enumerate(chunks):
                phrases[row, : len(chunk.phrase_mask), : len(chunk.ids)] = chunk.phrase_mask
            feeds[PHRASE_MASK] = phrases
        if not spec.text.encoder:
            return feeds
        rows = [encoder.alone(chunk.ids) for chunk in chunks]
        features = np.zeros((count, length, rows[0][TEXT_FEATURES].shape[-1]), np.float32)
        # Padding attends to itself only: a softmax over nothing is NaN.
        self_mask = np.tile(np.eye(length, dtype=np.int64), (count, 1, 1))
        positions = np.zeros((count, length), np.int64)
        for row, (chunk, encoded) in enumerate(zip(chunks, rows, strict=True)):
            n = len(chunk.ids)
            features[row, :n] = encoded[TEXT_FEATURES]
            self_mask[row, :n, :n] = encoded[TEXT_SELF_MASK]
            positions[row, :n] = encoded[TEXT_POSITION_IDS]
        return {**feeds, TEXT_FEATURES: features, TEXT_SELF_MASK: self_mask, TEXT_POSITION_IDS: positions}

    def example_row(self, rng: np.random.Generator, words: list[int], length: int, text: TextSpec, size: int) -> list[int]:
        """Phrases of one to three words, each closed by a separator, inside the frame."""
        begin, end, *stops = text.separators
        prompt, since, phrase = [begin], 0, 1 + int(rng.integers(3))
        while len(prompt) < length - 2:
            # Mostly full stops, now and then a question mark.
            stop = since == phrase
            prompt.append(stops[int(rng.random() < 0.2) % len(stops)] if stop else words[len(prompt) % len(words)])
            since, phrase = (0, 1 + int(rng.integers(3))) if stop else (since + 1, phrase)
        if prompt[-1] in stops:
            prompt[-1] = words[0]
        return [*prompt, stops[0], end][:length]

    def example_feeds(self, spec: ModelSpec, ids: Rows, encode: Encode, draw: Draw) -> Feeds:
        assert spec.text is not None
        feeds = token_feeds(ids, spec)
        if spec.text.encoder:
            feeds |= encode(*ids)
        return {name: feeds[name] for name in self.inputs(spec)}


class _NameList(PromptKind):
    """A list of names, and a logit for each of them."""

    def inputs(self, spec: ModelSpec) -> list[str]:
        return [CLASS_FEATURES, CLASS_MASK]

    def lengths(self, spec: ModelSpec, *, one_phrase: bool = False) -> dict[str, Triple]:
        assert spec.text is not None
        return {TOKENS_AXIS: _up_to(_TOKENS, spec.text.max_tokens), CLASSES_AXIS: _up_to(_CLASSES, spec.decode.num_classes)}

    def feeds(self, spec: ModelSpec, chunks: Sequence[ClassChunk | ImageChunk], encoder: PromptEncoder) -> Feeds:
        encoded = encoder.rows(CLASS_FEATURES, [ids for chunk in chunks for ids in chunk.names], names=True)
        rows = [chunk.features(encoded) for chunk in chunks]
        most = encoder.fit(CLASSES_AXIS, max(map(len, rows)))
        classes = np.zeros((len(rows), most, rows[0].shape[-1]), np.float32)
        class_mask = np.zeros((len(rows), most), np.int64)
        for image, features in enumerate(rows):
            classes[image, : len(features)] = features
            class_mask[image, : len(features)] = 1
        return {CLASS_FEATURES: classes, CLASS_MASK: class_mask}

    def example_feeds(self, spec: ModelSpec, ids: Rows, encode: Encode, draw: Draw) -> Feeds:
        """All rows of `draw` are names; image i has all classes but i of them."""
        batch = len(ids[0])
        names = draw(batch + 2)
        features = encode(*names)[CLASS_FEATURES]
        mask = np.ones((batch, len(names[0])), np.int64)
        for image in range(batch):
            mask[image, len(names[0]) - image :] = 0
        repeated = np.repeat(features[None], batch, 0) * mask[..., None].astype(np.float32)
        return {CLASS_FEATURES: repeated, CLASS_MASK: mask}


class ClassPrompts(_NameList):
    """Class names and a task, a sentence (OmDet-Turbo)."""

    name = "classes"
    encoder_outputs = (TEXT_FEATURES, CLASS_FEATURES)
    encodes = "every name and once for the task"
    takes_task = joins_queries = native = True

    def inputs(self, spec: ModelSpec) -> list[str]:
        return [*super().inputs(spec), TASK_FEATURES, TASK_MASK]

    def describe(self, spec: ModelSpec) -> str:
        assert spec.text is not None
        return f"up to {number_of(spec.decode.num_classes, 'class name')}, and a task, up to {number_of(spec.text.max_tokens, 'token')} each"

    def encode(self, tokenizer: PromptTokenizer, prompt: Prompt, limit: int, most: int | None) -> EncodedPrompt:
        names, unknown = _names(tokenizer, prompt, limit)
        task = np.array(tokenizer.pieces([prompt.task or default_task(prompt)])[0].ids, np.int64)
        if len(task) > limit:
            if prompt.task:
                raise PromptError(
                    f"the task has {number_of(len(task), 'token')}, this model takes at most {limit}; make it shorter, or leave it out"
                )
            # The published processor truncates its sentence of many names in the same way.
            task = np.concatenate([task[: limit - 1], task[-1:]])
        if not prompt.listed:  # the names of one prompt see each other
            _check_count(prompt, most)
        return _in_chunks(prompt, names, task, unknown, most)

    def feeds(self, spec: ModelSpec, chunks: Sequence[Any], encoder: PromptEncoder) -> Feeds:
        feeds = super().feeds(spec, chunks, encoder)
        count, length = len(chunks), encoder.fit(TOKENS_AXIS, max(len(chunk.task) for chunk in chunks))
        sentences = encoder.rows(TEXT_FEATURES, [chunk.task for chunk in chunks], names=False)
        tasks = np.zeros((count, length, sentences[chunks[0].task.tobytes()].shape[-1]), np.float32)
        task_mask = np.zeros((count, length), np.int64)
        for row, chunk in enumerate(chunks):
            n = len(chunk.task)
            tasks[row, :n] = sentences[chunk.task.tobytes()]
            task_mask[row, :n] = 1
        return {**feeds, TASK_FEATURES: tasks, TASK_MASK: task_mask}

    def example_feeds(self, spec: ModelSpec, ids: Rows, encode: Encode, draw: Draw) -> Feeds:
        """As of a list of names; the task of image i is row i of the ids."""
        feeds = super().example_feeds(spec, ids, encode, draw)
        return {**feeds, TASK_FEATURES: encode(*ids)[TEXT_FEATURES], TASK_MASK: ids[1]}


class NamePrompts(_NameList):
    """Class names alone, of which none changes what another finds, nor the boxes (OWL-ViT, OWLv2)."""

    name = "names"
    encoder_outputs = (CLASS_FEATURES,)
    encodes = "every name"
    takes_images = True

    def describe(self, spec: ModelSpec) -> str:
        assert spec.text is not None
        return f"class names, up to {spec.decode.num_classes} in one run, up to {number_of(spec.text.max_tokens, 'token')} each"


class PhrasePrompts(PromptKind):
    """Phrases that do not see each other, each with queries of its own (SAM 3)."""

    name = "phrases"
    encoder_outputs = (TEXT_FEATURES,)
    counted = PHRASES_AXIS
    encodes = "every phrase"
    own_queries = True
    pads = False

    def inputs(self, spec: ModelSpec) -> list[str]:
        return [PHRASE_FEATURES, PHRASE_MASK]

    def logit_axes(self, queries: int) -> tuple[Axes, Axes]:
        return ("batch", PHRASES_AXIS, queries), ()

    def describe(self, spec: ModelSpec) -> str:
        assert spec.text is not None
        return f"phrases, up to {spec.decode.num_classes} in one run, up to {number_of(spec.text.max_tokens, 'token')} each"

    def lengths(self, spec: ModelSpec, *, one_phrase: bool = False) -> dict[str, Triple]:
        assert spec.text is not None
        return {
            # Padded as the published processor does. With a symbolic length TensorRT 8.5 did not end within 20 minutes.
            TOKENS_AXIS: (spec.text.max_tokens,) * 3,
            # One at a time is what the authors do, and what most prompts are.
            PHRASES_AXIS: (1, 1, 1 if one_phrase else spec.decode.num_classes),
        }

    def fixed_lengths(self, text: TextSpec, most: int, wanted: int | None, usual: int) -> tuple[int, int]:
        return text.max_tokens, min(wanted or 1, most)  # each costs time, also the padded ones

    def feeds(self, spec: ModelSpec, chunks: Sequence[ClassChunk], encoder: PromptEncoder) -> Feeds:
        assert spec.text is not None
        given = [chunk.names for chunk in chunks]
        found = encoder.rows(TEXT_FEATURES, [ids for names in given for ids in names], names=True)
        most = encoder.fit(PHRASES_AXIS, max(len(names) for names in given))
        length = encoder.fit(TOKENS_AXIS, max(len(ids) for names in given for ids in names))
        features = np.zeros((len(given), most, length, spec.text.features), np.float32)
        mask = np.zeros((len(given), most, length), np.int64)
        for row, names in enumerate(given):
            for column, ids in enumerate(names):
                features[row, column, : len(ids)] = found[ids.tobytes()]
                mask[row, column, : len(ids)] = 1
        return {PHRASE_FEATURES: features, PHRASE_MASK: mask}

    def example_feeds(self, spec: ModelSpec, ids: Rows, encode: Encode, draw: Draw) -> Feeds:
        """Image i has the prompts of all rows from its own on, but the last image only its own."""
        batch = len(ids[0])
        features = encode(*ids)[TEXT_FEATURES]
        rows = (np.arange(batch)[:, None] + np.arange(batch)) % batch  # (batch, phrases)
        mask = ids[1][rows]
        mask[-1, 1:] = 0
        return {PHRASE_FEATURES: features[rows] * mask[..., None].astype(np.float32), PHRASE_MASK: mask}


KINDS: dict[str, PromptKind] = {kind.name: kind for kind in (TokenPrompts(), ClassPrompts(), PhrasePrompts(), NamePrompts())}


def default_task(prompt: Prompt) -> str:
    """The sentence that OmDet-Turbo's processor makes of class names."""
    return f"Detect {', '.join(phrase.text for phrase in prompt.phrases)}."


def phrase_logits(logits: NDArray, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """(queries, tokens) and (phrases, tokens) -> (queries, phrases): the largest logit of each phrase's tokens.

    The sigmoid is monotonic, so that the largest logit has the largest score. A phrase without
    tokens gets minus infinity, which is score 0.
    """
    result = np.full((logits.shape[0], len(mask)), -np.inf, np.float32)
    for column, row in enumerate(mask):
        if row.any():
            result[:, column] = logits[:, row].max(-1)
    return result


def padded(rows: Sequence[Ids], length: int, pad_id: int) -> Rows:
    """Rows of token ids -> input_ids and attention_mask, (rows, length) int64."""
    ids = np.full((len(rows), length), pad_id, np.int64)
    mask = np.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    return ids, mask


def token_feeds(ids: Rows, spec: ModelSpec) -> Feeds:
    """Feeds without a text encoder: token ids, their mask, and the phrases of a graph that decodes."""
    feeds: Feeds = {INPUT_IDS: ids[0], ATTENTION_MASK: ids[1]}
    if spec.decode.in_graph:
        assert spec.text is not None
        feeds[PHRASE_MASK] = _between_separators(ids[0], spec.text)
    return feeds


def _between_separators(ids: Ids, text: TextSpec) -> Ids:
    """(rows, phrases, tokens) int64: the tokens between two separators are a phrase."""
    rows = []
    for line in ids:
        number, found = 0, []
        for token in line:
            ends = int(token) in text.separators
            found.append(-1 if ends or int(token) == text.pad_id else number)
            number += ends
        used = sorted({n for n in found if n >= 0})
        rows.append([used.index(n) if n >= 0 else -1 for n in found])
    count = max(max(row) for row in rows) + 1
    return (np.array(rows)[:, None] == np.arange(max(count, 1))[None, :, None]).astype(np.int64)


def _up_to(lengths: Triple, limit: int) -> Triple:
    low, usual, high = lengths
    return min(low, limit), min(usual, limit), min(high, limit)


def _check_count(prompt: Prompt, most: int | None) -> None:
    if most is not None and len(prompt.phrases) > most:
        raise PromptError(
            f"the prompt has {number_of(len(prompt.phrases), 'phrase')}, this model takes at most {most} in a run; make it shorter, or "
            "give a list of class names (a line each in the file of `classes_from`), which runs in chunks"
        )


def _names(tokenizer: PromptTokenizer, prompt: Prompt, limit: int) -> tuple[tuple[Ids, ...], tuple[str, ...]]:
    """Framed ids of each phrase, each by itself; phrases of unknown tokens only."""
    texts = [phrase.text for phrase in prompt.phrases]
    encodings = tokenizer.pieces(texts)
    unknown = tokenizer.unknown_of(prompt.phrases, tokenizer.pieces(texts, framed=False))
    for text, encoding in zip(texts, encodings, strict=True):
        if len(encoding.ids) > limit:
            raise PromptError(
                f"the class name {text[:60]!r} has {number_of(len(encoding.ids), 'token')}, this model takes at most {limit} "
                "in one name; shorten it. Names end with a dot: 'cat. dog.'"
            )
    return tuple(np.array(encoding.ids, np.int64) for encoding in encodings), unknown


def _in_chunks(prompt: Prompt, names: tuple[Ids, ...], task: Ids, unknown: tuple[str, ...], most: int | None) -> EncodedPrompt:
    split = chunks([0] * len(names), 0, most)
    if len(split) == 1:
        return EncodedPrompt(prompt, (ClassChunk(prompt, names, task),), unknown)
    several = (ClassChunk(prompt.part(indices), tuple(names[i] for i in indices), task) for indices in split)
    return EncodedPrompt(prompt, tuple(several), unknown)
