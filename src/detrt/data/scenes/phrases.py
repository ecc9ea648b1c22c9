"""Captions for drawn scenes: phrases of colour, fill and shape, and the objects that they name.

The project's own prompted detector is trained and tested on these captions. A phrase names one to
three attributes of an object ("circle", "red circle", "striped star", "red dotted letter A", or
"red shape" where no shape is named); a prompt is a row of phrases, each ended by a full stop.

Some pairs of colour and shape, and of fill and shape, are held out (:data:`HELD_OUT_COLORS`,
:data:`HELD_OUT_FILLS`): no training caption holds both words of such a pair in one phrase, so a
prompt with one of them asks for a combination that was never named together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...system import CountProgress
from .scene import CLASSES, Scene, SceneObject, write_dataset
from .shapes import COLORS, FILLS

COLOR_NAMES: tuple[str, ...] = tuple(COLORS)
NOUN = "shape"  # stands where a phrase names no shape
MAX_PHRASES = 20
_STREAM = 0x9A5E5  # keeps these seeds apart from other uses of the same small integers
_HELD_OUT_SEED = 2303


@dataclass(frozen=True, slots=True, order=True)
class Phrase:
    """One to three attributes; "" where one is not named.

    ``color`` is a key of :data:`detrt.data.scenes.shapes.COLORS`, ``fill`` one of ``FILLS``, ``shape``
    one of :data:`detrt.data.scenes.scene.CLASSES`. ValueError for any other word, or for no word at all.
    """

    color: str = ""
    fill: str = ""
    shape: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("color", COLOR_NAMES), ("fill", FILLS), ("shape", CLASSES)):
            value = getattr(self, name)
            if value and value not in allowed:
                raise ValueError(f"unknown {name}: got {value!r}, allowed are {', '.join(allowed)}")
        if not (self.color or self.fill or self.shape):
            raise ValueError("a phrase must name a color, a fill or a shape; got none of them")

    def text(self, article: str = "") -> str:
        """The words, in English order: "red striped circle"; with ``article`` "a" or "the" before them."""
        words = " ".join(word for word in (self.color, self.fill, self.shape or NOUN) if word)
        if article == "a" and words[0] in "aeiou":
            article = "an"
        return f"{article} {words}" if article else words

    def matches(self, item: SceneObject) -> bool:
        """Whether every attribute that the phrase names is the object's."""
        return self.color in ("", item.color) and self.fill in ("", item.fill) and self.shape in ("", item.label)


def _held_out() -> tuple[tuple[Phrase, ...], tuple[Phrase, ...]]:
    """Every colour and every shape once, and every fill once with six different shapes."""
    rng = np.random.default_rng(_HELD_OUT_SEED)
    colors = tuple(
        Phrase(color=color, shape=CLASSES[k]) for color, k in zip(COLOR_NAMES, rng.permutation(len(CLASSES)), strict=True)
    )
    fills = tuple(
        Phrase(fill=fill, shape=CLASSES[k]) for fill, k in zip(FILLS, rng.permutation(len(CLASSES))[: len(FILLS)], strict=True)
    )
    return colors, fills


HELD_OUT_COLORS, HELD_OUT_FILLS = _held_out()
_HELD_OUT_PAIRS = {(p.color, p.shape) for p in HELD_OUT_COLORS} | {(p.fill, p.shape) for p in HELD_OUT_FILLS}
SHAPE_PHRASES: tuple[Phrase, ...] = tuple(Phrase(shape=name) for name in CLASSES)
COLOR_PHRASES: tuple[Phrase, ...] = tuple(Phrase(color=c, shape=s) for c in COLOR_NAMES for s in CLASSES)


def is_held_out(phrase: Phrase) -> bool:
    """Whether the phrase holds both words of a held-out pair."""
    return (phrase.color, phrase.shape) in _HELD_OUT_PAIRS or (phrase.fill, phrase.shape) in _HELD_OUT_PAIRS


def prompt_of(phrases: Sequence[Phrase], article: str = "") -> str:
    """The phrases as one prompt, in lower case: "red circle. striped star."; "" for no phrase."""
    return " ".join(f"{phrase.text(article)}." for phrase in phrases).lower()


@dataclass(frozen=True, slots=True)
class Caption:
    """A prompt and, for each of its phrases, the indices of the scene's objects that it names.

    ``found[i]`` belongs to ``phrases[i]`` and is () for a phrase without an object.
    """

    prompt: str
    phrases: tuple[Phrase, ...]
    found: tuple[tuple[int, ...], ...]


def find(scene: Scene, phrases: Sequence[Phrase]) -> tuple[tuple[int, ...], ...]:
    """For each phrase the indices into ``scene.objects`` of the objects that it names."""
    return tuple(tuple(k for k, item in enumerate(scene.objects) if p.matches(item)) for p in phrases)


def caption_scene(scene: Scene, seed: int, *, phrases: int = 8, held_out: bool = False) -> Caption:
    """A random prompt for ``scene``; the same one for the same scene, seed and number of phrases.

    ``phrases`` (1..20) is the number of different phrases asked for. Half of them, rounded up, have no
    object: most of these share a word with an object of the scene. The other half name objects of the
    scene; where it has too few different ones, phrases without an object fill up. ``held_out`` says
    whether phrases with a held-out pair may occur. Prompts are in lower case; one in four has articles.
    """
    if isinstance(phrases, bool) or not isinstance(phrases, int) or not 1 <= phrases <= MAX_PHRASES:
        raise ValueError(f"phrases must be an integer from 1 to {MAX_PHRASES}, got {phrases!r}")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    rng = np.random.default_rng(np.random.SeedSequence([_STREAM, int(seed)]))
    chosen: list[Phrase] = []

    def take(wanted: int, present: bool) -> None:
        for _ in range(60 * wanted):
            if wanted == 0:
                return
            phrase = _draw_phrase(rng, scene, present)
            if phrase in chosen or (is_held_out(phrase) and not held_out):
                continue
            if any(map(phrase.matches, scene.objects)) == present:
                chosen.append(phrase)
                wanted -= 1

    if scene.objects:
        take(phrases // 2, True)
    take(phrases - len(chosen), False)
    order = rng.permutation(len(chosen))
    shuffled = tuple(chosen[k] for k in order)
    article = ("a", "the")[int(rng.integers(2))] if rng.random() < 0.25 else ""
    return Caption(prompt_of(shuffled, article), shuffled, find(scene, shuffled))


def _draw_phrase(rng: np.random.Generator, scene: Scene, present: bool) -> Phrase:
    """A phrase of an object of the scene, or one that is near it or has nothing to do with it."""
    whole = Phrase(
        COLOR_NAMES[int(rng.integers(len(COLOR_NAMES)))],
        FILLS[int(rng.integers(len(FILLS)))],
        CLASSES[int(rng.integers(len(CLASSES)))],
    )
    if scene.objects and (present or rng.random() < 0.7):
        item = scene.objects[int(rng.integers(len(scene.objects)))]
        near = Phrase(item.color, item.fill, item.label)
        if not present:
            name = ("color", "fill", "shape")[int(rng.integers(3))]
            near = replace(near, **{name: getattr(whole, name)})
        whole = near
    kind = int(rng.choice(6, p=KIND_SHARES))
    color, fill, shape = KINDS[kind]
    return Phrase(whole.color if color else "", whole.fill if fill else "", whole.shape if shape else "")


# What a phrase may name (colour, fill, shape), and how often.
KINDS: tuple[tuple[bool, bool, bool], ...] = (
    (False, False, True),
    (True, False, True),
    (False, True, True),
    (True, True, True),
    (True, False, False),
    (False, True, False),
)
KIND_SHARES: tuple[float, ...] = (0.14, 0.34, 0.22, 0.14, 0.09, 0.07)


def write_phrase_dataset(
    folder: str | os.PathLike[str],
    count: int,
    *,
    seed: int = 0,
    phrases: Sequence[Phrase] = COLOR_PHRASES,
    progress: CountProgress | None = None,
) -> Path:
    """As :func:`detrt.data.scenes.scene.write_dataset`, with ``phrases`` as the categories (ids from 1, in order).

    An object gets one annotation for each phrase that names it; by default there are 144 phrases of
    colour and shape, so each object has exactly one. The images are those of ``write_dataset``.
    """
    if not phrases or len(set(phrases)) != len(phrases):
        raise ValueError(f"phrases must be different from each other and at least one, got {len(phrases)}")

    def categories_of(item: SceneObject) -> list[int]:
        return [k for k, phrase in enumerate(phrases) if phrase.matches(item)]

    names = [phrase.text().lower() for phrase in phrases]
    return write_dataset(folder, count, seed=seed, progress=progress, categories=names, categories_of=categories_of)
