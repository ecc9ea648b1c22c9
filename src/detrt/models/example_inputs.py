"""Inputs for tracing and checking: pictures with structure, ragged padding, and unequal target sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..spec import PIXEL_MASK, PIXEL_VALUES, TARGET_SIZES, ModelSpec


def example_feeds(spec: ModelSpec, batch: int, size_hw: tuple[int, int], seed: int = 0) -> dict[str, NDArray]:
    """Feeds of a model by its spec; every image of the batch is different.

    Smooth shapes with edges and noise, so that top-k selections are not all ties as on plain noise.
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
            # One image fills the tensor; the others are padded at the right and at the bottom.
            rows = height if index == 0 else height - (index * 37) % (height // 3) - 1
            columns = width if index == 0 else width - (index * 53) % (width // 3) - 1
            mask[index, :rows, :columns] = 1
        feeds[PIXEL_MASK] = mask
        feeds[PIXEL_VALUES] = feeds[PIXEL_VALUES] * mask[:, None].astype(feeds[PIXEL_VALUES].dtype)
    if spec.decode.in_graph:
        sizes = [[height * 2 + 3 * i, width * 3 + 5 * i] for i in range(batch)]
        feeds[TARGET_SIZES] = np.array(sizes, np.int64)
    return feeds
