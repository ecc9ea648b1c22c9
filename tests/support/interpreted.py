"""Programs of this folder that run Triton's kernels on a CPU, each in a process of its own: Triton reads the switch when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

_ARRAYS = "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')"


def _loops_over_numbers() -> bool:
    """Whether the interpreter makes a number of a bound that a kernel has loaded, which it holds as an array of one."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton >= (3, 7) or numpy < (2, 4)


def run_interpreted(name: str) -> str:
    """What a program of this folder prints; skips where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch's CUDA builds)")
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    if done.returncode != 0 and _ARRAYS in done.stderr and not _loops_over_numbers():
        pytest.skip("the interpreter of Triton before 3.7 takes no bound of a loop from memory with NumPy 2.4 or later")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
