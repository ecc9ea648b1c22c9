"""Tests here need an NVIDIA GPU, and say so where there is none."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _needs_a_gpu() -> None:
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no CUDA device")
