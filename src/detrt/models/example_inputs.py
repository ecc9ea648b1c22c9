"""Inputs for tracing and checking: images with structure, ragged padding, and unequal target sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ..spec import PIXEL_MASK, PIXEL_VALUES, TARGET_SIZES, ModelSpec
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

    See `PromptKind.example_row`.
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
        prompt = spec.text.prompt_kind.example_row(rng, words, length, spec.text, size)
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    return ids, mask


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
    """Text feeds of a detector, one prompt per image; see `PromptKind.example_feeds`."""
    assert spec.text is not None
    batch = len(ids[0])
    return spec.text.prompt_kind.example_feeds(spec, ids, text_encoder, lambda rows: example_ids(source, rows, 7, seed=batch))
