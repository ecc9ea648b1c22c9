from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from case_images import image_of
from PIL import Image
from runtime_cases import make_spec

from detrt.data.preprocess import (
    fit_size,
    group_by_size,
    plan_batches,
    preprocess,
    resized_size,
    shortest_edge_size,
    tensor_size,
)
from detrt.errors import ImageError, SpecError
from detrt.spec import ModelSpec

RNG = np.random.default_rng(1)
SHORTEST = {
    "resize": "shortest_edge",
    "height": 64,
    "width": 96,
    "shortest_edge": 64,
    "longest_edge": 96,
    "dynamic": True,
}
CASES = Path(__file__).parents[1] / "data/preprocess_cases.json"


def source(height, width):
    return RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_stretch_is_pillows_resize():
    image = source(30, 50)
    batch = preprocess([image], make_spec())
    expected = Image.fromarray(image).resize((12, 8), Image.Resampling.BILINEAR)
    pixels = batch.feeds["pixel_values"]
    assert list(batch.feeds) == ["pixel_values"] and pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels[0], np.asarray(expected).transpose(2, 0, 1))
    assert batch.original_sizes_hw == ((30, 50),) and batch.resized_sizes_hw == ((8, 12),)


@pytest.mark.parametrize("resample", ["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"])
def test_resample(resample):
    image = source(31, 17)
    found = preprocess([image], make_spec(resample=resample)).feeds["pixel_values"]
    expected = Image.fromarray(image).resize((12, 8), getattr(Image.Resampling, resample.upper()))
    np.testing.assert_array_equal(found[0], np.asarray(expected).transpose(2, 0, 1))


def test_float_input_is_raw_when_the_graph_normalises():
    image = source(8, 12)
    found = preprocess([image], make_spec(dtype="float32")).feeds["pixel_values"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[0], image.transpose(2, 0, 1))


def test_padding_comes_after_normalisation():
    spec = make_spec(
        **SHORTEST,
        mask=True,
        dtype="float32",
        normalize_in_graph=False,
        mean=(0.5, 0.4, 0.3),
        std=(0.2, 0.25, 0.5),
    )
    images = [source(32, 40), source(64, 32)]
    batch = preprocess(images, spec)
    pixels, mask = batch.feeds["pixel_values"], batch.feeds["pixel_mask"]
    assert batch.resized_sizes_hw == ((64, 80), (96, 48))
    assert pixels.shape == (2, 3, 96, 80) and mask.shape == (2, 96, 80) and mask.dtype == np.int64
    for row, size, (h, w) in zip(range(2), batch.original_sizes_hw, batch.resized_sizes_hw, strict=True):
        assert size == images[row].shape[:2]
        assert mask[row].sum() == h * w and mask[row, :h, :w].all()
        assert not pixels[row, :, h:].any() and not pixels[row, :, :, w:].any()
        small = np.asarray(Image.fromarray(images[row]).resize((w, h), Image.Resampling.BILINEAR))
        expected = (small / 255 - np.array(spec.input.mean)) / np.array(spec.input.std)
        np.testing.assert_allclose(pixels[row, :, :h, :w], expected.transpose(2, 0, 1), atol=2e-6)


def test_sides_are_padded_up_with_a_mask_and_rounded_down_without():
    image = source(50, 70)
    masked = preprocess([image], make_spec(**SHORTEST, mask=True, multiple_of=32))
    assert masked.resized_sizes_hw == ((64, 89),)
    assert masked.feeds["pixel_values"].shape == (1, 3, 64, 96)
    bare = preprocess([image], make_spec(**SHORTEST, multiple_of=16))
    assert bare.feeds["pixel_values"].shape == (1, 3, 64, 80) and list(bare.feeds) == ["pixel_values"]


def test_fit_pads_to_exactly_the_size():
    spec = make_spec(resize="fit", mask=True)
    batch = preprocess([source(40, 40), source(10, 60)], spec)
    assert batch.resized_sizes_hw == ((8, 8), (2, 12))
    assert batch.feeds["pixel_values"].shape == (2, 3, 8, 12)
    assert not batch.feeds["pixel_values"][0, :, :, 8:].any()


def test_target_sizes_for_decoding_in_the_graph():
    batch = preprocess([source(4, 5), source(6, 7)], make_spec(decode={"in_graph": True}))
    sizes = batch.feeds["target_sizes"]
    assert sizes.dtype == np.int64 and sizes.tolist() == [[4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("original", "short", "long", "expected"),
    [
        ((480, 640), 800, 1333, (800, 1066)),
        ((427, 640), 800, 1333, (800, 1199)),
        ((640, 427), 800, 1333, (1199, 800)),
        ((300, 1000), 800, 1333, (400, 1333)),
        ((800, 800), 800, 1333, (800, 800)),
        ((1, 1), 800, 1333, (800, 800)),
        ((1, 10000), 800, 1333, (1, 1333)),
        ((10000, 1), 800, 1333, (1333, 1)),
        ((100, 200), 50, None, (50, 100)),
    ],
)
def test_shortest_edge_size(original, short, long, expected):
    assert shortest_edge_size(original, short, long) == expected


@pytest.mark.parametrize(
    ("original", "target", "expected"),
    [
        ((480, 640), (640, 640), (480, 640)),
        ((640, 480), (640, 640), (640, 480)),
        ((3, 2), (5, 5), (5, 3)),
        ((1, 10000), (8, 12), (1, 12)),
        ((10000, 1), (8, 12), (8, 1)),
        ((7, 7), (8, 12), (8, 8)),
    ],
)
def test_fit_size(original, target, expected):
    assert fit_size(original, target) == expected


def test_sizes_are_never_zero_nor_outside():
    specs = [
        make_spec(),
        make_spec(resize="fit"),
        make_spec(**SHORTEST, mask=True, multiple_of=32),
        make_spec(**SHORTEST, multiple_of=16),
    ]
    for original in [(1, 10000), (10000, 1), (1, 1), (1, 2), (9999, 10000), (17, 16384)]:
        for spec in specs:
            height, width = resized_size(original, spec.input)
            limit = 96 if spec.input.resize == "shortest_edge" else 12
            assert 1 <= height <= limit and 1 <= width <= limit, (original, spec.input)
        batch = preprocess([np.zeros((*original, 3), np.uint8)], specs[2])
        assert batch.feeds["pixel_mask"].any()


def test_group_by_size():
    sizes = [(50, 70), (70, 50), (100, 140), (50, 71)]
    bare = make_spec(**SHORTEST, multiple_of=16)
    assert group_by_size(sizes, bare) == [[0, 2, 3], [1]]
    assert group_by_size(sizes, make_spec(**SHORTEST, mask=True)) == [[0, 1, 2, 3]]
    assert group_by_size(sizes, make_spec()) == [[0, 1, 2, 3]]
    assert group_by_size([], bare) == [] == group_by_size([], make_spec())
    with pytest.raises(SpecError, match=r"group_by_size"):
        preprocess([source(*size) for size in sizes[:2]], bare)


@pytest.mark.parametrize(
    ("changes", "choices", "groups"),
    [
        (dict(SHORTEST, mask=True), {}, [[0, 2], [1], [3], [4]]),
        (dict(SHORTEST, mask=True, multiple_of=32), {}, [[0, 2, 3], [1], [4]]),
        (dict(SHORTEST, mask=True), {"size_hw": (32, 48)}, [[0, 1, 2, 3, 4]]),
        (dict(SHORTEST, mask=True, dynamic=False, pad=True, height=96, width=96), {}, [[0, 1, 2, 3, 4]]),
        (dict(SHORTEST, multiple_of=16), {}, [[0, 2, 3], [1], [4]]),
        ({}, {}, [[0, 1, 2, 3, 4]]),
        ({"resize": "fit", "mask": True}, {}, [[0, 1, 2, 3, 4]]),
        ({"dynamic": True}, {"sizes": [(8, 12), (12, 8)]}, [[0, 2, 3, 4], [1]]),
    ],
    ids=["mask", "mask-rounded", "mask-one-size", "mask-padded", "no-mask", "stretch", "fit", "several-sizes"],
)
def test_no_image_shares_a_batch_with_a_larger_one(changes, choices, groups):
    """Each is prepared as it is alone: padding that a neighbour brings changes what a model finds, mask or not."""
    sizes = [(50, 70), (70, 50), (100, 140), (50, 71), (50, 50)]
    spec = make_spec(**changes)
    plans = plan_batches(sizes, spec.input, **choices)
    assert [list(plan.indices) for plan in plans] == groups
    for plan in plans:
        assert {tensor_size(sizes[index], spec.input, **choices) for index in plan.indices} == {plan.tensor_hw}
        for place, index in enumerate(plan.indices):
            (alone,) = plan_batches([sizes[index]], spec.input, **choices)
            assert (alone.tensor_hw, alone.resized_hw) == (plan.tensor_hw, plan.resized_hw[place : place + 1])


def test_other_size():
    assert preprocess([source(9, 9)], make_spec(dynamic=True), size_hw=(4, 6)).feeds["pixel_values"].shape[2:] == (4, 6)
    masked = make_spec(**SHORTEST, mask=True, multiple_of=32)
    batch = preprocess([source(10, 20)], masked, size_hw=(32, 32))
    assert batch.resized_sizes_hw == ((16, 32),) and batch.feeds["pixel_values"].shape == (1, 3, 32, 32)
    bare = make_spec(**SHORTEST, multiple_of=16)
    assert preprocess([source(10, 20)], bare, size_hw=(48, 48)).feeds["pixel_values"].shape == (1, 3, 16, 48)
    assert preprocess([source(9, 9)], make_spec(), size_hw=(8, 12)).resized_sizes_hw == ((8, 12),)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, (16, 12), ["16x12", "8x12", "export the checkpoint again with `size=16x12`"]),
        ({"dynamic": True, "height": 32, "width": 64, "multiple_of": 32}, (40, 64), ["40x64", "32"]),
        ({"dynamic": True}, (0, 4), ["0x4", "positive"]),
    ],
)
def test_bad_size(changes, size, words):
    with pytest.raises(SpecError) as caught:
        preprocess([source(5, 5)], make_spec(**changes), size_hw=size)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], ["empty"]),
        ([np.zeros((4, 4, 3), np.float32)], ["image 0", "float32 (4, 4, 3)"]),
        ([np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4), np.uint8)], ["image 1", "(4, 4)"]),
        ([np.zeros((3, 4, 4), np.uint8)], ["(3, 4, 4)"]),
        ([np.zeros((0, 4, 3), np.uint8)], ["no pixels", "(0, 4, 3)"]),
        (["a.jpg"], ["str", "load_image"]),
    ],
    ids=lambda v: "-".join(v)[:20] if v and isinstance(v[0], str) else "",
)
def test_bad_images(images, words):
    with pytest.raises(ImageError) as caught:
        preprocess(images, make_spec())
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("case", json.loads(CASES.read_text())["cases"], ids=lambda case: case["name"])
def test_stored_cases(case):
    """The file that other runtimes are tested with still says what this one does."""
    spec = ModelSpec.from_dict(case["spec"])
    images = [image_of(image) for image in case["images"]]
    batch = preprocess(images, spec, size_hw=tuple(case["size_hw"]) if case["size_hw"] else None)
    assert [list(size) for size in batch.resized_sizes_hw] == case["resized_sizes_hw"]
    assert sorted(batch.feeds) == sorted(case["feeds"])
    for name, stored in case["feeds"].items():
        found = batch.feeds[name]
        assert found.dtype.name == stored["dtype"] and list(found.shape) == stored["shape"]
        np.testing.assert_allclose(found.reshape(-1), stored["values"], atol=stored["atol"], rtol=0)


@pytest.mark.parametrize("changes", [{}, {"dtype": "float32", "normalize_in_graph": False}, {**SHORTEST, "mask": True}])
def test_threads_give_the_same(changes):
    images = [source(30 + 7 * i, 50 + i) for i in range(9)]
    one = preprocess(images, make_spec(**changes))
    with ThreadPoolExecutor(3) as pool:
        other = preprocess(images, make_spec(**changes), pool=pool)
    assert one.resized_sizes_hw == other.resized_sizes_hw and list(one.feeds) == list(other.feeds)
    for name, value in one.feeds.items():
        np.testing.assert_array_equal(value, other.feeds[name])


def test_an_error_in_a_thread_is_raised():
    with ThreadPoolExecutor(2) as pool, pytest.raises(ImageError, match="image 1"):
        preprocess([source(4, 4), source(4, 4).astype(np.float32)], make_spec(), pool=pool)
