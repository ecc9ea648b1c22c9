"""Prompts: phrases, or a list of class names. Text only, no tokens.

A prompt is phrases that end with a separator: "a cat. a remote control." A phrase is the text between two
separators, without surrounding white space; its span is in characters of the original prompt. Equal phrases are not
merged. The last separator may be missing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import files
from ..errors import PromptError, number_of, one_line

if TYPE_CHECKING:
    from ..data.images import ImageSource

_LONGEST_FILE = 4 * 1024 * 1024  # bytes


@dataclass(frozen=True, slots=True)
class PhraseSpan:
    """A part of a prompt: `prompt.text[start:end] == text`."""

    text: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """Phrases to look for.

    text: the original prompt, or the names of a list joined with ". ".
    class_ids: the class id of each phrase: its index in a prompt, its line number (from 0) in a list.
    listed: made from a list of names; it may take several runs, and its detections have no spans.
    task: sentence for models that take one; "" is the model's own rule.
    """

    text: str
    phrases: tuple[PhraseSpan, ...]
    class_ids: tuple[int, ...]
    listed: bool = False
    task: str = ""

    @property
    def names(self) -> dict[int, str]:
        """Class id -> phrase."""
        return {i: phrase.text for i, phrase in zip(self.class_ids, self.phrases, strict=True)}

    @property
    def num_classes(self) -> int:
        return max(self.class_ids) + 1

    def part(self, indices: Sequence[int]) -> Prompt:
        """A prompt of some of the phrases of a list, with their class ids."""
        names = [self.phrases[i].text for i in indices]
        return joined(names, [self.class_ids[i] for i in indices], self.task)


@dataclass(frozen=True, slots=True)
class ImageQueries:
    """Images of what to find, instead of words: each shows one object that fills it, and is a class of its own.

    images: what `load_image` takes. names: of the classes; empty for the names of the files, or "image 0" and so on.

    Raises:
        PromptError: no image, or another number of names.
    """

    images: tuple[ImageSource, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.images:
            raise PromptError("there is no image to find others like it; give at least one")
        if self.names and len(self.names) != len(self.images):
            raise PromptError(
                f"there are {number_of(len(self.names), 'name')} of {number_of(len(self.images), 'query image')}; give one for each, or none"
            )

    def prompt(self) -> Prompt:
        """The names as a list of classes."""
        found = self.names or [
            Path(image).stem if isinstance(image, (str, os.PathLike)) else f"image {index}"
            for index, image in enumerate(self.images)
        ]
        return joined(found, range(len(found)))


def parse_prompt(text: str, *, separators: str = ".", task: str = "") -> Prompt:
    """Split a prompt into phrases.

    separators: characters of which each ends a phrase.

    Raises:
        PromptError: no text, or no phrase in it.
    """
    if not isinstance(text, str):
        raise PromptError(f'a prompt is text such as "a cat. a remote control."; got {text!r}')
    phrases = []
    start = 0
    for end in [i for i, c in enumerate(text) if c in separators] + [len(text)]:
        piece = text[start:end]
        if phrase := piece.strip():
            first = start + len(piece) - len(piece.lstrip())
            phrases.append(PhraseSpan(phrase, first, first + len(phrase)))
        start = end + 1
    if not phrases:
        what = "the prompt is empty" if not text.strip() else f"the prompt {one_line(text, 60)!r} has no words"
        raise PromptError(f'{what}; name what to look for, each with a dot behind it: "a cat. a remote control."')
    return Prompt(text, tuple(phrases), tuple(range(len(phrases))), task=task)


def with_last_dot(text: str) -> str:
    """A prompt whose last phrase ends as the others do.

    Without it the published sub-sentence masks of that phrase depend on the padding of the batch; the authors' code adds the dot,
    too. It lies after every span.
    """
    return text if text.rstrip().endswith(".") else text + "."


def class_list(names: Sequence[str], *, task: str = "") -> Prompt:
    """A prompt of class names, e.g. the lines of a file; the class id of a name is its index.

    Empty and repeated names (ignoring letter case and spaces) are skipped; their numbers stay
    free. Dots at the end of a name are left out.

    Raises:
        PromptError: no name is left.
    """
    if isinstance(names, str):
        raise PromptError(f"class names are a list of texts; got one text, {one_line(names, 60)!r}")
    seen: set[str] = set()
    kept: list[tuple[int, str]] = []
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise PromptError(f"class names are texts; name {number} is {name!r}")
        name = " ".join(name.split()).rstrip(". ")
        if name and name.casefold() not in seen:
            seen.add(name.casefold())
            kept.append((number, name))
    if not kept:
        raise PromptError("the list of class names is empty; give one name a line, e.g. 'person'")
    return joined([name for _, name in kept], [number for number, _ in kept], task)


def joined(names: Sequence[str], class_ids: Sequence[int], task: str = "") -> Prompt:
    """The prompt "name. name." of a list of names."""
    phrases = []
    start = 0
    for name in names:
        phrases.append(PhraseSpan(name, start, start + len(name)))
        start += len(name) + 2
    return Prompt(". ".join(names) + ".", tuple(phrases), tuple(class_ids), listed=True, task=task)


def chunks(lengths: Sequence[int], limit: int, most: int | None = None) -> list[list[int]]:
    """Indices of a list in chunks of at most `most` entries, whose lengths sum up to at most `limit`, in order.

    Each length must be at most the limit.
    """
    found: list[list[int]] = []
    total = 0
    for index, length in enumerate(lengths):
        if not found or total + length > limit or len(found[-1]) == most:
            found.append([])
            total = 0
        found[-1].append(index)
        total += length
    return found


def read_prompt_file(path: str | os.PathLike) -> str:
    """The one prompt in a text file (UTF-8); line breaks are spaces.

    Raises:
        PromptError: the file is missing, too large, empty, not text, or a list with other marks than names.
    """
    text = " ".join(files.read_text(path, "prompt file", PromptError, most=_LONGEST_FILE).split())
    if not text:
        raise PromptError(f"the prompt file '{os.fspath(path)}' is empty; write a prompt into it, e.g. a cat. a dog.")
    return text


def read_class_file(path: str | os.PathLike) -> list[str]:
    """The lines of a text file (UTF-8), one class name a line; an empty line keeps its number free.

    Raises:
        PromptError: the file is missing, too large, empty or not text.
    """
    lines = files.read_names(path, "class file", PromptError, most=_LONGEST_FILE)
    if not any(lines):
        raise PromptError(f"the class file '{os.fspath(path)}' is empty; write one class name a line")
    return lines
