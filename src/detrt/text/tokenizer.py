"""Tokenization of prompts with the tokenizer of a model. The only runtime module that imports `tokenizers`.

The file is the `tokenizer.json` beside the model; neither torch nor transformers is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError, PromptError, SpecError, one_line
from .prompts import PhraseSpan, Prompt, class_list, parse_prompt

if TYPE_CHECKING:
    from ..spec import TextSpec
    from .kinds import EncodedPrompt


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
            reason = one_line(error, 200)
            raise SpecError(f"{name} cannot be read ({reason}); export the model again with detrt export") from None
        # Lengths are decided here: silent truncation would change the prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        marks = [self._tokenizer.id_to_token(i) for i in text.separators]
        if wrong := [i for i in (text.pad_id, *text.separators) if self._tokenizer.id_to_token(i) is None]:
            raise SpecError(f"{name} has no tokens {wrong}, which the spec names: it belongs to another model; export it again")
        # The model itself ends phrases at these; the framing tokens are longer than a character.
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
        if task and not self.text.prompt_kind.takes_task:
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
        return self.text.prompt_kind.encode(self, prompt, limit, max_phrases)

    def pieces(self, texts: Sequence[str], *, framed: bool = True) -> list[Any]:
        """What the library makes of each text: `ids`, and `offsets` in characters. framed: with the tokens that frame a prompt."""
        return list(self._tokenizer.encode_batch(list(texts), add_special_tokens=framed))

    @property
    def frame(self) -> int:
        """How many tokens frame a prompt."""
        return int(self._tokenizer.num_special_tokens_to_add(False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def unknown_of(self, phrases: Sequence[PhraseSpan], encodings: Sequence[Any]) -> tuple[str, ...]:
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
        return [ids.tolist() for prompt in prompts for chunk in prompt.chunks for ids in chunk.tokens]

    return rows(a) == rows(b)


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
