"""The C++ runtime as `make cpp-build` left it, and a small bundle that its libtorch backend runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from native import BUILD, CLASSES, QUERIES, SIDES, package, small_module, tensors

from detrt.backends.base import FakeSession
from detrt.models import trust
from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TensorInfo


@pytest.fixture(scope="session")
def build() -> Path:
    if not (BUILD / "detrt-run").is_file():
        pytest.skip(f"the C++ runtime is not built in '{BUILD}'; run: make cpp-build")
    return BUILD


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The build under the sanitizers; it has no backend, which makes its programs start quickly."""
    folder = BUILD.parent / "sanitize"
    if not (folder / "detrt-run").is_file():
        pytest.skip(f"the C++ runtime is not built in '{folder}'; run: make cpp-build")
    return folder


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    labels = {0: "cat", 1: 'a "dog"', 2: "oiseau é"}
    rule = DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, 10)
    return ModelSpec("test", InputSpec("stretch", *SIDES, resample="bicubic"), rule, labels, name="tiny")


@pytest.fixture(scope="session")
def module():
    """A detector of 12 places whose scores and boxes follow from the pixels; large enough to notice a wrong pixel."""
    pytest.importorskip("torch", reason="needs the 'export' extra")
    return small_module()


@pytest.fixture(scope="session")
def bundle(module, spec, tmp_path_factory) -> Path:
    return compiled(module, spec, tmp_path_factory.mktemp("bundle"))


def compiled(module, spec: ModelSpec, folder: Path) -> Path:
    trust.remember(package(module, spec, folder))
    return folder


@pytest.fixture(scope="session")
def session(module, spec) -> FakeSession:
    return in_process(module, spec)


def in_process(module, spec: ModelSpec) -> FakeSession:
    """The same module in this process."""
    import torch

    groups = tensors(masks=spec.has_masks)
    made = [tuple(TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in group) for group in groups]

    def forward(feeds):
        with torch.inference_mode():
            results = module(torch.from_numpy(feeds["pixel_values"]))
        return {info.name: result.numpy() for info, result in zip(made[1], results, strict=True)}

    return FakeSession(spec, made[0], made[1], forward)


@pytest.fixture(scope="session")
def masked(module, spec, tmp_path_factory) -> tuple[Path, FakeSession]:
    """(bundle, session) of the module with a map for each query."""
    import torch

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.boxes = module
            self.features = torch.nn.Conv2d(3, QUERIES, 4, stride=4)

        def forward(self, pixel_values):
            return (*self.boxes(pixel_values), self.features(pixel_values.to(torch.float32) / 255))

    rule = replace(spec.decode, mask_stride=4)
    spec = replace(spec, task="instance-segmentation", decode=rule)
    head = Masked().eval()
    return compiled(head, spec, tmp_path_factory.mktemp("masked")), in_process(head, spec)


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> list[Path]:
    """Images in the forms that cameras and programs write, drawn here."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(5)
    y, x = np.mgrid[0:61, 0:83]
    smooth = np.stack([x * 3 % 256, y * 4 % 256, (x + y) * 2 % 256], -1)
    source = Image.fromarray(np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8))
    grey = source.convert("L")
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    with_alpha = source.convert("RGBA")
    with_alpha.putalpha(grey)
    exif = Image.Exif()

    def save(image: Image.Image, name: str, **options) -> None:
        image.save(folder / name, **options)

    for orientation in range(1, 9):
        exif[0x0112] = orientation
        save(source, f"turned{orientation}.jpg", exif=exif, quality=90)
    save(source, "turned.png", exif=exif)
    save(source, "plain.jpg", quality=75)
    save(source, "progressive.jpg", progressive=True, quality=60)
    save(source, "full.jpg", subsampling=0, quality=95)
    save(source, "half.jpg", subsampling=1, quality=85)
    save(grey, "grey.jpg")
    save(source.convert("CMYK"), "inks.jpg", quality=90)
    save(source, "plain.png")
    save(grey, "grey.png")
    save(source.quantize(17), "palette.png")
    save(source.quantize(3), "palette2.png", bits=2)
    save(grey.convert("1"), "bits.png")
    save(wide, "grey16.png")
    save(with_alpha, "alpha.png")
    save(source.convert("LA"), "grey-alpha.png")
    save(source, "plain.ppm")
    save(grey, "grey.pgm")
    return sorted(folder.iterdir())
