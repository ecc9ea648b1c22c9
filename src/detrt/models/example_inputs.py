"""Inputs for tracing and checking: images with structure, ragged padding, and unequal target sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..spec import (
    ATTENTION_MASK,
    CLASS_FEATURES,
    CLASS_MASK,
    INPUT_IDS,
    PHRASE_FEATURES,
    PHRASE_MASK,
    PIXEL_MASK,
    PIXEL_VALUES,
    TARGET_SIZES,
    TASK_FEATURES,
    TASK_MASK,
    TEXT_FEATURES,
    ModelSpec,
    text_inputs,
)
from .source import Source
from .wrapper import TextEncoderModule


def example_feeds(spec: ModelSpec, batch: int, size_hw: tuple[int, int], seed: int = 0) -> dict[str, NDArray]:
    """Feeds of a model by its spec; every image of the batch is different.

    Smooth shapes with edges and noise, because on white noise top-k selections would be ties.
    """
    rng = np.random.default_rng(seed)
    height, width = size_hw
    ys, xs = np.mgrid[0:height, 0:width].astype(np.float32)
    images = np.empty((batch, 3, height, width), np.float32)
    for image in images:
        for channel in image:
            fy, fx, phase = rng.uniform(0.5, 6.0, 3)
            channel[...] = 110 + 60 * np.sin(fy * ys / height * 6.28 + phase) * np.cos(fx * xs / width * 6.28)
        for _ in range(8):
            y0, x0 = rng.integers(0, height), rng.integers(0, width)
            h, w = rng.integers(4, max(5, height // 3)), rng.integers(4, max(5, width // 3))
            image[:, y0 : y0 + h, x0 : x0 + w] = rng.uniform(0, 255, (3, 1, 1))
    images += rng.normal(0, 6, images.shape)
    pixels = np.clip(np.rint(images), 0, 255).astype(np.uint8)
    feeds: dict[str, NDArray] = {}
    if spec.input.normalize_in_graph:
        feeds[PIXEL_VALUES] = pixels.astype(spec.input.dtype)
    else:
        mean, std = (np.array(v, np.float32).reshape(3, 1, 1) for v in (spec.input.mean, spec.input.std))
        feeds[PIXEL_VALUES] = (pixels.astype(np.float32) * np.float32(spec.input.rescale) - mean) / std
    if spec.input.mask:
        mask = np.zeros((batch, height, width), np.int64)
        for index in range(batch):
            # One image fills the tensor; the others are padded on the right and at the bottom.
            rows = height if index == 0 else height - (index * 37) % (height // 3) - 1
            columns = width if index == 0 else width - (index * 53) % (width // 3) - 1
            mask[index, :rows, :columns] = 1
        feeds[PIXEL_MASK] = mask
        feeds[PIXEL_VALUES] = feeds[PIXEL_VALUES] * mask[:, None].astype(feeds[PIXEL_VALUES].dtype)
    if spec.decode.in_graph:
        sizes = [[height * 2 + 3 * i, width * 3 + 5 * i] for i in range(batch)]
        feeds[TARGET_SIZES] = np.array(sizes, np.int64)
    return feeds


# Prompts for tracing and checking, as token ids: phrases of random words, every row of another length.
Ids = tuple[NDArray[np.int64], NDArray[np.int64]]  # input_ids and attention_mask, (rows, tokens)


def example_ids(source: Source, rows: int, tokens: int, seed: int = 0) -> Ids:
    """Prompts whose longest has `tokens` ids; each row is another prompt.

    Kind "tokens": phrases of one to three words, each closed by a separator, inside the frame; other kinds: words between the
    first and the last id of a CLIP vocabulary.
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
        if spec.text.kind != "tokens":
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
    """Feeds without a text encoder: token ids, their mask, and the phrases of a graph that decodes."""
    feeds = {INPUT_IDS: ids[0], ATTENTION_MASK: ids[1]}
    if spec.decode.in_graph:
        feeds[PHRASE_MASK] = example_phrases(ids[0], spec)
    return feeds


# Maps an array of token ids and its mask to the outputs of a text encoder, by name.
TextEncoder = Callable[[NDArray, NDArray], Mapping[str, NDArray]]


def image_feeds(spec: ModelSpec, batch: int, size_hw: tuple[int, int], seed: int = 0) -> dict[str, NDArray]:
    """Image feeds of a prompted detector."""
    feeds = example_feeds(spec, batch, size_hw, seed)
    return {name: feeds[name] for name in (PIXEL_VALUES, PIXEL_MASK, TARGET_SIZES) if name in feeds}


def torch_text_encoder(source: Source, spec: ModelSpec) -> TextEncoder:
    """The text encoder on arrays, run by PyTorch."""
    module = TextEncoderModule(source, spec).eval()

    def run(ids: NDArray, mask: NDArray) -> dict[str, NDArray]:
        with torch.no_grad():
            found = module(torch.from_numpy(ids), torch.from_numpy(mask))
        return {name: tensor.numpy() for name, tensor in zip(module.output_names, found, strict=True)}

    return run


def text_feeds(source: Source, spec: ModelSpec, ids: Ids, text_encoder: TextEncoder) -> dict[str, NDArray]:
    """Text feeds of a detector, one prompt per image.

    Kind "classes": all rows of the batch are names; image i has all classes but i of them, and its task is row i. Kind "phrases":
    image i has the prompts of all rows from its own on, but the last image only its own. Kind "names": as "classes", without tasks.
    """
    assert spec.text is not None
    feeds = token_feeds(ids, spec)
    if spec.text.kind == "tokens":
        if spec.text.encoder:
            feeds |= text_encoder(*ids)
        return {name: feeds[name] for name in text_inputs(spec)}
    batch = len(ids[0])
    if spec.text.kind == "phrases":
        features = text_encoder(*ids)[TEXT_FEATURES]
        rows = (np.arange(batch)[:, None] + np.arange(batch)) % batch  # (batch, phrases)
        mask = ids[1][rows]
        mask[-1, 1:] = 0
        return {PHRASE_FEATURES: features[rows] * mask[..., None].astype(np.float32), PHRASE_MASK: mask}
    names = example_ids(source, batch + 2, 7, seed=batch)
    features = text_encoder(*names)[CLASS_FEATURES]
    mask = np.ones((batch, len(names[0])), np.int64)
    for image in range(batch):
        mask[image, len(names[0]) - image :] = 0
    repeated = np.repeat(features[None], batch, 0) * mask[..., None].astype(np.float32)
    classes = {CLASS_FEATURES: repeated, CLASS_MASK: mask}
    if spec.text.kind == "names":
        return classes
    return {**classes, TASK_FEATURES: text_encoder(*ids)[TEXT_FEATURES], TASK_MASK: ids[1]}
