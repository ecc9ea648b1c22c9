"""Prompts for whole batches of scenes, as arrays: the words of `detrt.data.scenes.phrases` without its strings.

An attribute is a number: colour and shape 0..11, fill 0..5, -1 for one that a phrase does not name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from phrases_model import NOUNS, vocabulary

from detrt.data.scenes.phrases import COLOR_NAMES, HELD_OUT_COLORS, HELD_OUT_FILLS, KIND_SHARES, KINDS, MAX_PHRASES, Phrase
from detrt.data.scenes.scene import CLASSES
from detrt.data.scenes.shapes import FILLS

CLASS_LIST_SHARE = 0.15  # of batches that ask for all shapes at once
SIMPLE_SHARES = (0.3, 0.1, 0.06, 0.0, 0.34, 0.2)  # instead of KIND_SHARES where phrases are to be simple
NEGATIVE_SHARE = 0.55  # of phrases that are changed away from the object they were made from
_SIZES = (len(COLOR_NAMES), len(FILLS), len(CLASSES))
_TABLE = vocabulary()
_VOWELS = "aeiou"


def _ids(words: tuple[str, ...]) -> np.ndarray:
    return np.array([_TABLE[word] for word in words])


_COLORS, _FILLS = _ids(COLOR_NAMES), _ids(FILLS)
_SHAPES = np.array([[*(_TABLE[w] for w in name.lower().split()), 0][:2] for name in (*CLASSES, *NOUNS)])
_STARTS_WITH_VOWEL = np.zeros(max(_TABLE.values()) + 1, bool)
for _word, _id in _TABLE.items():
    _STARTS_WITH_VOWEL[_id] = _word[0] in _VOWELS
_HELD_COLOR = np.zeros((_SIZES[0], _SIZES[2]), bool)
_HELD_FILL = np.zeros((_SIZES[1], _SIZES[2]), bool)
for _phrase in HELD_OUT_COLORS:
    _HELD_COLOR[COLOR_NAMES.index(_phrase.color), CLASSES.index(_phrase.shape)] = True
for _phrase in HELD_OUT_FILLS:
    _HELD_FILL[FILLS.index(_phrase.fill), CLASSES.index(_phrase.shape)] = True


@dataclass(frozen=True, slots=True)
class Prompts:
    """B prompts of up to T tokens and the phrases in them.

    ``input_ids`` and ``attention_mask`` (B, T) int64; ``owner`` (B, T) int64, the phrase of a token or
    -1; ``phrases`` (B, P, 3) int64 of colour, fill and shape; ``asked`` (B, P) bool, False for padding.
    """

    input_ids: np.ndarray
    attention_mask: np.ndarray
    owner: np.ndarray
    phrases: np.ndarray
    asked: np.ndarray


def held_out(phrases: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which phrases (..., 3) hold a held-out pair of colour and shape, and which one of fill and shape."""
    color, fill, shape = np.moveaxis(phrases, -1, 0)
    return (
        _HELD_COLOR[color, shape] & (color >= 0) & (shape >= 0),
        _HELD_FILL[fill, shape] & (fill >= 0) & (shape >= 0),
    )


def numbers(phrase: Phrase) -> tuple[int, int, int]:
    """The phrase as (colour, fill, shape)."""
    return (
        COLOR_NAMES.index(phrase.color) if phrase.color else -1,
        FILLS.index(phrase.fill) if phrase.fill else -1,
        CLASSES.index(phrase.shape) if phrase.shape else -1,
    )


def matches(phrases: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """(B, P, M) bool: whether phrase p of (B, P, 3) names object m of (B, M, 3)."""
    named, held = phrases[:, :, None], objects[:, None]
    return ((named == -1) | (named == held)).all(-1)


def draw_phrases(
    objects: np.ndarray, counts: np.ndarray, rng: np.random.Generator, simple: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Phrases (B, P, 3) for scenes with ``objects`` (B, M, 3), and which of them are asked, (B, P) bool.

    Of the objects the first ``counts`` (B,) are real. No phrase holds a held-out pair: where one was drawn,
    it loses its shape or the other word. With the probability ``simple`` most phrases of the batch name one
    attribute only.
    """
    batch = len(objects)
    shares = SIMPLE_SHARES if rng.random() < simple else KIND_SHARES
    if rng.random() < CLASS_LIST_SHARE:
        phrases = np.full((batch, _SIZES[2], 3), -1)
        phrases[..., 2] = rng.permuted(np.tile(np.arange(_SIZES[2]), (batch, 1)), axis=1)
        return phrases, np.ones(phrases.shape[:2], bool)
    most = int(rng.integers(1, MAX_PHRASES + 1))
    shape = (batch, most)
    rows = np.arange(batch)[:, None]
    anything = np.stack([rng.integers(0, size, shape) for size in _SIZES], -1)
    safe = np.maximum(counts, 1)[:, None]
    phrases = objects[rows, (rng.random(shape) * safe).astype(np.int64)]
    other = objects[rows, (rng.random(shape) * safe).astype(np.int64)]
    negative = rng.random(shape) < NEGATIVE_SHARE
    changed = np.arange(3) == rng.integers(0, 3, shape)[..., None]
    how = rng.random(shape)
    phrases = np.where((negative & (how < 0.4))[..., None] & changed, anything, phrases)
    phrases = np.where((negative & (how >= 0.4) & (how < 0.75))[..., None] & changed, other, phrases)
    nothing = (negative & (how >= 0.75)) | (counts == 0)[:, None]
    phrases = np.where(nothing[..., None], anything, phrases)
    kinds = np.array(KINDS)[rng.choice(len(KINDS), shape, p=shares)]
    phrases = np.where(kinds, phrases, -1)
    bad_color, bad_fill = held_out(phrases)
    drop_shape = rng.random(shape) < 0.5
    phrases[..., 2] = np.where((bad_color | bad_fill) & drop_shape, -1, phrases[..., 2])
    phrases[..., 0] = np.where(bad_color & ~drop_shape, -1, phrases[..., 0])
    phrases[..., 1] = np.where(bad_fill & ~drop_shape, -1, phrases[..., 1])
    lengths = rng.integers((most + 1) // 2, most + 1, batch)
    return phrases, np.arange(most) < lengths[:, None]


def write(phrases: np.ndarray, asked: np.ndarray, rng: np.random.Generator | None = None, multiple: int = 1) -> Prompts:
    """Tokens of the prompts; with ``rng`` with articles, other nouns and other orders of the words.

    Without it they are those of ``Phrase.text``. The number of tokens is padded to a ``multiple``.
    """
    batch, most = asked.shape
    color, fill, shape = np.moveaxis(phrases, -1, 0)
    first = np.where(color >= 0, _COLORS[color], 0)
    second = np.where(fill >= 0, _FILLS[fill], 0)
    noun = np.full(asked.shape, len(CLASSES))
    article = np.zeros(asked.shape, np.int64)
    if rng is not None:
        swap = rng.random(asked.shape) < 0.3
        first, second = np.where(swap, second, first), np.where(swap, first, second)
        noun = noun + rng.integers(0, len(NOUNS), asked.shape)
    names = _SHAPES[np.where(shape >= 0, shape, noun)]
    if rng is not None:
        style = rng.choice(3, (batch, 1), p=(0.6, 0.25, 0.15))
        leading = np.where(first > 0, first, np.where(second > 0, second, names[..., 0]))
        one = np.where(_STARTS_WITH_VOWEL[leading], _TABLE["an"], _TABLE["a"])
        article = np.where(style == 1, one, np.where(style == 2, _TABLE["the"], 0))
    stops = np.full(asked.shape, _TABLE["."])
    pieces = np.stack([article, first, second, names[..., 0], names[..., 1], stops], -1) * asked[..., None]
    owner = np.broadcast_to(np.arange(most)[:, None], pieces.shape[1:])
    owner = np.where(np.arange(pieces.shape[-1]) == pieces.shape[-1] - 1, -1, owner)  # a stop belongs to none
    flat = pieces.reshape(batch, -1)
    owner = np.broadcast_to(owner.reshape(1, -1), flat.shape)
    order = np.argsort(flat == 0, axis=1, kind="stable")
    used = (flat > 0).sum(1)
    longest = int(used.max(initial=0))
    rows = np.arange(batch)[:, None]
    ids = np.zeros((batch, -(-(longest + 2) // multiple) * multiple), np.int64)
    owners = np.full(ids.shape, -1)
    ids[:, 1 : longest + 1] = flat[rows, order[:, :longest]]
    owners[:, 1 : longest + 1] = np.where(ids[:, 1 : longest + 1] > 0, owner[rows, order[:, :longest]], -1)
    ids[:, 0] = _TABLE["[CLS]"]
    ids[np.arange(batch), used + 1] = _TABLE["[SEP]"]
    mask = (np.arange(ids.shape[1]) < (used + 2)[:, None]).astype(np.int64)
    return Prompts(ids, mask, owners, phrases, asked)


def token_targets(prompts: Prompts, objects: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(B, M, T) bool: whether a token belongs to a phrase that names the object."""
    named = matches(prompts.phrases, objects) & prompts.asked[..., None]
    named &= np.arange(objects.shape[1]) < counts[:, None, None]
    rows = np.arange(len(objects))[:, None]
    return (named[rows, prompts.owner] & (prompts.owner >= 0)[..., None]).transpose(0, 2, 1)
