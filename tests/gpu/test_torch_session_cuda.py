"""PyTorch on an NVIDIA GPU against PyTorch on the CPU: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest

from detrt.compare import Gate
from detrt.parity import verify
from detrt.scenes import draw_scene
from detrt.sources import load_source
from detrt.torch_session import TorchSession

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _full_precision() -> None:
    """TF32 keeps 10 bits of the mantissa; the gate is that of FP32."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("reference", ["embedded:shapes", "random:deformable_detr/tiny", "random:detr/tiny"])
def test_detections_on_the_gpu_equal_those_on_the_cpu(reference: str) -> None:
    source = load_source(reference)
    on_cpu = TorchSession(source)
    pictures = [draw_scene(seed).image for seed in range(900_000_100, 900_000_116)]
    on_gpu = TorchSession(load_source(reference), device="cuda:0")
    report = verify(on_cpu, on_gpu, pictures, gate=Gate(), batch_size=4)
    assert on_gpu.backend == "torch-cuda"
    assert report.failures == []
