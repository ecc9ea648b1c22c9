"""`detrt.data.preprocess` against transformers' image processors: sizes for many images, pixels for some."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

from document_processors import resized
from transformers.image_transforms import get_size_with_aspect_ratio
from transformers.models.yolos.image_processing_pil_yolos import get_size_with_aspect_ratio_yolos

from detrt.data.images import load_image
from detrt.data.preprocess import preprocess, resized_size, shortest_edge_size
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
OWN = {"dtype": "float32", "normalize_in_graph": False}
EDGE = {"shortest_edge": 800, "longest_edge": 1333, "dynamic": True}
IMAGES = Path(__file__).parents[3] / "shared/data/images/coco_permissive"


def spec_of(**given):
    return ModelSpec("test", InputSpec(**given), DecodeSpec("sigmoid", "topk", 4, 3, 4), {})


def random_sizes(count, edges):
    rng = np.random.default_rng(3)
    for _ in range(count):
        height, width = (int(v) for v in rng.integers(1, 3000, 2))
        edge = int(rng.choice(edges))
        kind = rng.integers(6)
        yield (edge, width) if kind == 0 else (height, edge) if kind == 1 else (height, width)


@pytest.mark.parametrize(("short", "long"), [(800, 1333), (480, 640), (600, 1000), (512, 864), (300, 2000)])
def test_sizes_are_those_of_transformers(short, long):
    for size in random_sizes(10_000, (short, long)):
        expected = get_size_with_aspect_ratio(size, short, long)
        assert shortest_edge_size(size, short, long) == tuple(max(1, side) for side in expected), size


def test_sizes_are_those_of_yolos():
    spec = spec_of(resize="shortest_edge", height=800, width=1056, multiple_of=16, **EDGE)
    for size in random_sizes(20_000, (800, 1333)):
        expected = get_size_with_aspect_ratio_yolos(size, 800, 1333)
        assert resized_size(size, spec.input) == tuple(max(16, side) for side in expected), size


def images():
    rng = np.random.default_rng(5)
    yield [
        rng.integers(0, 256, (61, 90, 3), dtype=np.uint8),
        rng.integers(0, 256, (120, 44, 3), dtype=np.uint8),
    ]


def theirs(name, sample_images, **options):
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    return getattr(transformers, name)(**options)(images=sample_images, return_tensors="np")


def check(sample_images, spec, expected, atol=3e-6):
    found = preprocess(sample_images, spec).feeds
    assert found["pixel_values"].shape == expected["pixel_values"].shape
    np.testing.assert_allclose(found["pixel_values"], expected["pixel_values"], atol=atol)
    if spec.input.mask:
        np.testing.assert_array_equal(found["pixel_mask"], expected["pixel_mask"])


@pytest.mark.parametrize("name", ["DetrImageProcessorPil", "DeformableDetrImageProcessorPil"])
@pytest.mark.parametrize(("short", "long"), [(64, 100), (40, 400)])
def test_shortest_edge_batch(name, short, long):
    spec = spec_of(
        resize="shortest_edge", height=short, width=long, shortest_edge=short, longest_edge=long,
        dynamic=True, mask=True, **IMAGENET, **OWN,
    )  # fmt: skip
    for sample_images in images():
        size = {"shortest_edge": short, "longest_edge": long}
        check(sample_images, spec, theirs(name, sample_images, size=size))


def test_shortest_edge_yolos():
    spec = spec_of(
        resize="shortest_edge", height=64, width=96, shortest_edge=64, longest_edge=100, dynamic=True,
        multiple_of=16, **IMAGENET, **OWN,
    )  # fmt: skip
    for sample_images in images():
        for image in sample_images:
            size = {"shortest_edge": 64, "longest_edge": 100}
            check([image], spec, theirs("YolosImageProcessorPil", [image], size=size))


@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "nearest"])
def test_stretch(resample):
    spec = spec_of(resize="stretch", height=48, width=64, resample=resample, **OWN)
    number = ("nearest", "lanczos", "bilinear", "bicubic").index(resample)
    for sample_images in images():
        size = {"height": 48, "width": 64}
        check(sample_images, spec, theirs("RTDetrImageProcessorPil", sample_images, size=size, resample=number))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="without AVX2 PyTorch rounds each step by itself"
)
@pytest.mark.parametrize("side", [48, 168, 576])
def test_without_antialiasing(side):
    """RF-DETR's processor, which itself needs torchvision: rescale, then this resize in float32."""
    rng = np.random.default_rng(9)
    spec = spec_of(resize="stretch", height=side, width=side, antialias=False, **IMAGENET, **OWN)
    for size in ((61, 90), (side, 2 * side), (480, 640), (427, 640)):
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None] * (1 / 255)
        resized = torch.nn.functional.interpolate(
            pixels, size=(side, side), mode="bilinear", align_corners=False, antialias=False
        )
        mean, std = (torch.tensor(IMAGENET[name]).view(3, 1, 1) for name in ("mean", "std"))
        check([image], spec, {"pixel_values": ((resized - mean) / std).numpy()}, atol=1e-5)


@pytest.mark.parametrize("rounded", [True, False], ids=["v2 and v3", "v4"])
def test_bicubic_without_antialiasing(rounded):
    """PP-DocLayout's processors, which themselves need torchvision."""
    rng = np.random.default_rng(9)
    spec = spec_of(resize="stretch", height=96, width=96, resample="bicubic", antialias=False, rounded=rounded, **OWN)
    for size in ((61, 90), (96, 96), (480, 640), (301, 96)):
        image = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        check([image], spec, {"pixel_values": resized(image, 96, rounded=rounded)}, atol=1e-5)


@pytest.mark.skipif(not IMAGES.is_dir(), reason=f"{IMAGES.name} is not there")
def test_photographs():
    listed = json.loads((IMAGES / "annotations/instances_val2017.json").read_text())["images"]
    sample_images = []
    for row in listed[:3]:
        image = load_image(IMAGES / "val2017" / row["file_name"])
        assert image.shape == (row["height"], row["width"], 3)
        sample_images.append(image)
    spec = spec_of(resize="shortest_edge", height=800, width=1056, mask=True, **EDGE, **IMAGENET, **OWN)
    check(sample_images, spec, theirs("DetrImageProcessorPil", sample_images))
