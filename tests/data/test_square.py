"""The resize of OWLv2, beside transformers' own, which blurs and interpolates with SciPy."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the reference computes with it")
pytest.importorskip("torch", reason="needs the 'export' extra")
transformers = pytest.importorskip("transformers", reason="needs the 'export' extra")

from detrt.data.preprocess import preprocess
from detrt.data.square import resize_in_square
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

# Larger and smaller than the result, with the longer side in both directions, equal to it, and of a few pixels.
SIZES = [(150, 200), (131, 77), (96, 96), (96, 60), (40, 55), (501, 700), (2, 5)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_pixels_are_those_of_transformers(size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    processor = transformers.Owlv2ImageProcessorPil(size={"height": 96, "width": 96}, do_normalize=False)
    (want,) = processor(images=image, return_tensors="np", input_data_format="channels_last")["pixel_values"]
    found = resize_in_square(image, (96, 96))
    assert found.dtype == np.float32 and found.shape == (96, 96, 3)
    np.testing.assert_allclose(found.transpose(2, 0, 1) / 255, want, atol=1e-6)
    below, right = round(96 * size[0] / max(size)), round(96 * size[1] / max(size))
    far = 8 + 96 // max(size)
    assert not found[below + far :].any() and not found[:, right + far :].any()


def test_a_batch_of_unequal_images():
    entry = InputSpec("square", 96, 96, antialias=False, dtype="float32")
    spec = ModelSpec("owlv2", entry, DecodeSpec("sigmoid", "query", 4, 2, 4), {})
    images = [np.full((*size, 3), 200, np.uint8) for size in ((30, 60), (120, 80))]
    made = preprocess(images, spec)
    assert made.feeds["pixel_values"].shape == (2, 3, 96, 96) and made.original_sizes_hw == ((30, 60), (120, 80))
    for image, row in zip(images, made.feeds["pixel_values"], strict=True):
        np.testing.assert_array_equal(row, resize_in_square(image, (96, 96)).transpose(2, 0, 1))
