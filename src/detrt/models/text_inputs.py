"""Prompts for tracing and checking, as token ids: phrases of random words, every row of another length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import ATTENTION_MASK, INPUT_IDS, PHRASE_MASK, ModelSpec
from .load import Source

Ids = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids and attention_mask, (rows, tokens)


def example_ids(source: Source, rows: int, tokens: int, seed: int = 0) -> Ids:
    """Prompts whose longest has `tokens` ids; each row is another prompt.

    Kind "tokens": phrases of one to three words, each closed by a separator, inside the frame; kind
    "classes": words between the first and the last id of a CLIP vocabulary.
    """
    spec, config = source.spec, source.module.config.text_config
    assert spec.text is not None
    rng = np.random.default_rng(seed)
    ids = np.full((rows, tokens), spec.text.pad_id, np.int64)
    mask = np.zeros_like(ids)
    taken = {*spec.text.separators, spec.text.pad_id}
    size = int(config.vocab_size)
    for row in range(rows):
        length = max(4, tokens - 2 * row) if tokens > 4 else tokens
        words = [int(w) for w in rng.integers(1, size - 2, length) if int(w) not in taken]
        if spec.text.kind == "classes":
            prompt = [size - 2, *words[: length - 2], size - 1]
        else:
            prompt = _phrases(rng, words, length, spec.text.separators)
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    return ids, mask


def _phrases(rng: Any, words: list[int], length: int, separators: tuple[int, ...]) -> list[int]:
    begin, end, *stops = separators
    prompt, since, phrase = [begin], 0, 1 + int(rng.integers(3))
    while len(prompt) < length - 2:
        # Mostly full stops, now and then a question mark.
        stop = since == phrase
        prompt.append(stops[int(rng.random() < 0.2) % len(stops)] if stop else words[len(prompt) % len(words)])
        since, phrase = (0, 1 + int(rng.integers(3))) if stop else (since + 1, phrase)
    if prompt[-1] in stops:
        prompt[-1] = words[0]
    return [*prompt, stops[0], end][:length]


def example_phrases(ids: NDArray, spec: ModelSpec) -> NDArray[np.int64]:
    """(rows, phrases, tokens) int64: the tokens between two separators are a phrase."""
    assert spec.text is not None
    rows = []
    for line in ids:
        number, found = 0, []
        for token in line:
            ends = int(token) in spec.text.separators
            found.append(-1 if ends or int(token) == spec.text.pad_id else number)
            number += ends
        used = sorted({n for n in found if n >= 0})
        rows.append([used.index(n) if n >= 0 else -1 for n in found])
    count = max(max(row) for row in rows) + 1
    return (np.array(rows)[:, None] == np.arange(max(count, 1))[None, :, None]).astype(np.int64)


def token_feeds(ids: Ids, spec: ModelSpec) -> dict[str, NDArray]:
    """The feeds that need no text tower: token ids, their mask, and the phrases of a graph that decodes."""
    feeds = {INPUT_IDS: ids[0], ATTENTION_MASK: ids[1]}
    if spec.decode.in_graph:
        feeds[PHRASE_MASK] = example_phrases(ids[0], spec)
    return feeds
