"""Tokenization of prompts with the tokenizer of a model. The only runtime module that imports `tokenizers`.

The file is the `tokenizer.json` beside the model; neither torch nor transformers is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingPackageError, PromptError, SpecError
from ..spec import TextSpec
from .prompts import PhraseSpan, Prompt, chunks, class_list, parse_prompt, with_last_dot

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One run of a model of kind "tokens".

    prompt: the phrases of this run. ids: (tokens,) int64, with the framing tokens.
    phrase_mask: (phrases, tokens) bool, which tokens belong to which phrase; separators belong to none.
    """

    prompt: Prompt
    ids: Ids
    phrase_mask: NDArray[np.bool_]

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class ClassChunk:
    """One run of a model of kind "classes", "phrases" or "names". names: the ids of each class name; task: of the task, if any; framed."""

    prompt: Prompt
    names: tuple[Ids, ...]
    task: Ids

    @property
    def length(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """Image queries of one run of a model of kind "names". features: (images, d) float32 of its encoder of query images."""

    prompt: Prompt
    features: NDArray[np.float32]

    @property
    def length(self) -> int:
        return len(self.features)


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


class PromptTokenizer:
    """The tokenizer of one model.

    file: the path of `tokenizer.json`, or its content. text: the text part of the model's spec.

    Raises:
        SpecError: the file is missing, damaged, or does not belong to the spec.
        MissingPackageError: the package tokenizers is not installed.
    """

    def __init__(self, file: str | os.PathLike | bytes, text: TextSpec) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise MissingPackageError("tokenizers", "text", "a model that takes a prompt") from None
        self.text = text
        name = "the tokenizer of the model" if isinstance(file, bytes) else f"the tokenizer '{os.fspath(file)}'"
        content = file if isinstance(file, bytes) else _content(Path(file))
        try:
            self._tokenizer: Any = Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises plain Exceptions
            reason = " ".join(str(error).split())[:200]
            raise SpecError(f"{name} cannot be read ({reason}); export the model again with detrt export") from None
        # Lengths are decided here: silent truncation would change the prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        marks = [self._tokenizer.id_to_token(i) for i in text.separators]
        if wrong := [i for i in (text.pad_id, *text.separators) if self._tokenizer.id_to_token(i) is None]:
            raise SpecError(f"{name} has no tokens {wrong}, which the spec names: it belongs to another model; export it again")
        # Of kind "tokens" the model itself ends phrases at these; the framing tokens are longer than a character.
        self.separators = "".join(mark for mark in marks if len(mark) == 1) or "."
        dot = self._tokenizer.token_to_id(".")
        frame = [i for i, mark in zip(text.separators, marks, strict=True) if len(mark) > 1]
        self.frame_ids = tuple(frame) + (() if dot is None else (dot,))
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        self._unknown = None if unknown is None else self._tokenizer.token_to_id(unknown)

    def parse(self, prompt: str | Sequence[str] | Prompt, task: str = "") -> Prompt:
        """A prompt from text or from a list of class names.

        Raises:
            PromptError: an empty prompt, half a character (a lone surrogate), or a task for a model without one.
        """
        if task and self.text.kind != "classes":
            raise PromptError("this model takes no task, only a prompt; leave the task out")
        if isinstance(prompt, str):
            prompt = parse_prompt(prompt, separators=self.separators, task=task)
        elif not isinstance(prompt, Prompt):
            if not isinstance(prompt, Sequence):
                raise PromptError(f"a prompt is a text or a list of class names; got {type(prompt).__name__}")
            prompt = class_list(prompt, task=task)
        try:
            f"{prompt.text}{prompt.task}".encode()
        except UnicodeEncodeError as error:
            # Of bytes that are not those of the terminal's character set, Python makes surrogates.
            raise PromptError(
                f"the prompt is not UTF-8 text: character {error.start} is {error.object[error.start]!r}; set the terminal to UTF-8, or "
                "give a file with `prompt_file` or `classes_from`"
            ) from None
        return prompt

    def encode(self, prompt: Prompt, *, max_tokens: int | None = None, max_phrases: int | None = None) -> EncodedPrompt:
        """Tokenize a prompt; a list of names that is too long is split into chunks.

        max_tokens, max_phrases: what the model takes in one run; at most `text.max_tokens` tokens.

        Raises:
            PromptError: too many tokens or phrases, or a phrase without any token.
        """
        limit = min(self.text.max_tokens, max_tokens or self.text.max_tokens)
        if self.text.kind != "tokens":
            return self._encode_classes(prompt, limit, max_phrases)
        encodings = self._tokenizer.encode_batch([p.text for p in prompt.phrases], add_special_tokens=False)
        frame = self._tokenizer.num_special_tokens_to_add(False)
        unknown = self._check_words(prompt.phrases, encodings)
        if not prompt.listed:
            chunk = self._token_chunk(prompt)
            if len(chunk.ids) > limit:
                raise PromptError(
                    f"the prompt has {len(chunk.ids)} tokens ({frame} of them frame it), this model takes at most {limit}; make "
                    "it shorter, or give a list of class names (a line each in the file of `classes_from`), which runs in chunks"
                )
            self._check_count(len(prompt.phrases), max_phrases)
            return EncodedPrompt(prompt, (chunk,), unknown)
        lengths = [len(encoding.ids) + 1 for encoding in encodings]  # and the dot after it
        room = limit - frame
        if too_long := [i for i, length in enumerate(lengths) if length > room]:
            i = too_long[0]
            raise PromptError(
                f"the class name {prompt.phrases[i].text[:60]!r} (number {prompt.class_ids[i]}) has {lengths[i] - 1} tokens, "
                f"this model takes at most {room - 1} in one name; shorten it"
            )
        split = chunks(lengths, room, max_phrases)
        whole = [prompt] if len(split) == 1 else [prompt.part(indices) for indices in split]
        return EncodedPrompt(prompt, tuple(self._token_chunk(some) for some in whole), unknown)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def _token_chunk(self, prompt: Prompt) -> TokenChunk:
        encoding = self._tokenizer.encode(with_last_dot(prompt.text))
        ids = np.array(encoding.ids, np.int64)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        word = (spans[:, 1] > spans[:, 0]) & ~np.isin(ids, self.text.separators)
        bounds = np.array([(p.start, p.end) for p in prompt.phrases], np.int64)
        inside = (spans[None, :, 0] >= bounds[:, :1]) & (spans[None, :, 1] <= bounds[:, 1:])
        return TokenChunk(prompt, ids, inside & word[None])

    def _encode_classes(self, prompt: Prompt, limit: int, max_phrases: int | None) -> EncodedPrompt:
        encodings = self._tokenizer.encode_batch([p.text for p in prompt.phrases])
        plain = self._tokenizer.encode_batch([p.text for p in prompt.phrases], add_special_tokens=False)
        unknown = self._check_words(prompt.phrases, plain)
        for phrase, encoding in zip(prompt.phrases, encodings, strict=True):
            if len(encoding.ids) > limit:
                raise PromptError(
                    f"the class name {phrase.text[:60]!r} has {len(encoding.ids)} tokens, this model takes at most {limit} "
                    "in one name; shorten it. Names end with a dot: 'cat. dog.'"
                )
        names = tuple(np.array(encoding.ids, np.int64) for encoding in encodings)
        if self.text.kind == "classes":
            task = self._encode_task(prompt, limit)
        else:
            task = np.zeros(0, np.int64)
        # Phrases do not see each other, and run in chunks with the same result.
        if not prompt.listed and self.text.kind == "classes":
            self._check_count(len(prompt.phrases), max_phrases)
        split = chunks([0] * len(names), 0, max_phrases)
        if len(split) == 1:
            return EncodedPrompt(prompt, (ClassChunk(prompt, names, task),), unknown)
        several = (ClassChunk(prompt.part(indices), tuple(names[i] for i in indices), task) for indices in split)
        return EncodedPrompt(prompt, tuple(several), unknown)

    def _encode_task(self, prompt: Prompt, limit: int) -> Ids:
        task = np.array(self._tokenizer.encode(prompt.task or default_task(prompt)).ids, np.int64)
        if len(task) > limit:
            if prompt.task:
                raise PromptError(
                    f"the task has {len(task)} tokens, this model takes at most {limit}; make it shorter, or leave it out"
                )
            # The published processor truncates its sentence of many names in the same way.
            task = np.concatenate([task[: limit - 1], task[-1:]])
        return task

    @staticmethod
    def _check_count(count: int, most: int | None) -> None:
        if most is not None and count > most:
            raise PromptError(
                f"the prompt has {count} phrases, this model takes at most {most} in a run; make it shorter, or "
                "give a list of class names (a line each in the file of `classes_from`), which runs in chunks"
            )

    def _check_words(self, phrases: Sequence[PhraseSpan], encodings: Sequence[Any]) -> tuple[str, ...]:
        """Phrases of unknown tokens only. Raises PromptError for a phrase without tokens."""
        unknown = []
        for phrase, encoding in zip(phrases, encodings, strict=True):
            words = [i for i in encoding.ids if i not in self.text.separators]
            if not words:
                raise PromptError(
                    f"the phrase {phrase.text[:60]!r} gives no token: it has only marks that the tokenizer drops or reads as "
                    "the end of a phrase; write a word"
                )
            if self._unknown is not None and all(i == self._unknown for i in words):
                unknown.append(phrase.text)
        return tuple(unknown)


def same_tokens(a: Sequence[EncodedPrompt], b: Sequence[EncodedPrompt]) -> bool:
    """Whether two tokenizers return the same tokens for the same prompts."""

    def rows(prompts: Sequence[EncodedPrompt]) -> list[list[int]]:
        chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
        of_texts = [c for c in chunks if not isinstance(c, ImageChunk)]
        return [ids.tolist() for c in of_texts for ids in ((c.ids,) if isinstance(c, TokenChunk) else (*c.names, c.task))]

    return rows(a) == rows(b)


def default_task(prompt: Prompt) -> str:
    """The sentence that OmDet-Turbo's processor makes of class names."""
    return f"Detect {', '.join(phrase.text for phrase in prompt.phrases)}."


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SpecError(
            f"there is no tokenizer '{path}', which this model needs to read a prompt; export the model again, or copy it "
            "there from where the model was exported"
        ) from None
    except OSError as error:
        raise SpecError(f"the tokenizer '{path}' cannot be read: {error.strerror}; export the model again") from None
