"""Programs of this folder that run Triton's kernels on a CPU, each in a process of its own: Triton reads the switch when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(name: str) -> str:
    """What a program of this folder prints; skips where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch's CUDA builds)")
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
