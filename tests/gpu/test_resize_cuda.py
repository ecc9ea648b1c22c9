"""Resizing, running and choosing on an NVIDIA GPU against the CPU's way: `pytest -m gpu tests/gpu/test_resize_cuda.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from detrt.backends.batches import BATCHES_ON_GPU
from detrt.backends.gpu.resize import resize_batch
from detrt.backends.gpu.staging import layout
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.data.preprocess import preprocess
from detrt.data.scenes.scene import draw_scene
from detrt.detector import Detector
from detrt.spec import PIXEL_MASK, PIXEL_VALUES, InputSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "given",
    [
        InputSpec("stretch", 640, 640),
        InputSpec("shortest_edge", 800, 1344, 800, 1333, mask=True, dynamic=True, multiple_of=32),
        InputSpec("fit", 480, 640, resample="bicubic", mask=True, dtype="float32", normalize_in_graph=False, std=(0.2, 0.3, 0.4)),
        InputSpec("stretch", 320, 320, dtype="float32", resample="lanczos"),
    ],
    ids=["stretch", "padded", "normalised", "raw float"],
)
def test_pixels_equal_pillows(given: InputSpec) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        images = [rng.integers(0, 256, (*rng.integers(20, 1500, 2), 3), np.uint8) for _ in range(3)]
        want = preprocess(images, SimpleNamespace(input=given, decode=SimpleNamespace(in_graph=False)))  # type: ignore[arg-type]
        plan = layout(images, want.resized_sizes_hw, given.resample)
        block = np.empty(plan.upload_size, np.uint8)
        plan.write(block, images)
        pixels = torch.full(want.feeds[PIXEL_VALUES].shape, 9, dtype=getattr(torch, given.dtype), device="cuda")
        mask = torch.full((3, *pixels.shape[2:]), 9, device="cuda") if given.mask else None
        resize_batch(torch.from_numpy(block).cuda(), 3, pixels, mask, given)
        assert np.array_equal(pixels.cpu().numpy(), want.feeds[PIXEL_VALUES])
        assert mask is None or np.array_equal(mask.cpu().numpy(), want.feeds[PIXEL_MASK])


def same(session: Any, reference: Any, box_px: float, score: float) -> None:
    images = [draw_scene(seed).image for seed in range(900_000_100, 900_000_112)]
    there, here = Detector(session, threshold=0.3), Detector(session, threshold=0.3, on_device=False)
    assert there.ahead == BATCHES_ON_GPU and here.ahead == 0
    exact = Detector(reference, threshold=0.3)
    for got, want, cpu in zip(there(images), here(images), exact(images), strict=True):
        assert got.labels == want.labels == cpu.labels
        assert np.abs(got.boxes_xyxy - want.boxes_xyxy).max(initial=0) < 0.5
        assert np.abs(got.scores - want.scores).max(initial=0) < 1e-3
        assert np.abs(got.boxes_xyxy - cpu.boxes_xyxy).max(initial=0) < box_px
        assert np.abs(got.scores - cpu.scores).max(initial=0) < score


def test_onnx_runtime_on_the_gpu(tmp_path: Any) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has no CUDA provider")
    from detrt.export import ExportConfig, export_onnx
    from detrt.models.load import load_source

    path = tmp_path / "model.onnx"
    export_onnx(load_source("embedded:shapes"), path, ExportConfig(check=False))
    same(OnnxSession(path, provider="cuda"), OnnxSession(path), 0.5, 1e-3)


def test_a_package_on_the_gpu(tmp_path: Any) -> None:
    from detrt.cli import main

    folder = str(tmp_path / "bundle")
    command = [
        "build",
        "embedded:shapes",
        "-o",
        folder,
        "--target",
        "inductor",
        "--device",
        "cuda",
        "--size",
        "320",
        "--no-check",
    ]
    assert main(command) == 0
    with open_session(folder, backend="inductor") as session:
        assert session.info.name == "inductor-cuda"
        same(session, open_session(folder, backend="onnxruntime"), 0.5, 1e-3)
