"""Programs of this folder that run Triton's kernels on a CPU, each in a process of its own: Triton reads the switch when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Where `make interpreter` puts Triton for an environment that has none.
FOLDERS = sorted(Path(__file__).resolve().parents[2].glob("build/interpreter-*"))
_ARRAYS = "InterpreterError: TypeError('only 0-dimensional arrays can be converted to Python scalars')"


def run_interpreted(name: str) -> str:
    """What a program of this folder prints; skips where Triton is not installed."""
    environment, installed = os.environ | {"TRITON_INTERPRET": "1"}, find_spec("triton") is not None
    if not installed:
        if not FOLDERS:
            pytest.skip("Triton is not installed: make interpreter")
        environment["PYTHONPATH"] = os.pathsep.join([str(FOLDERS[-1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 and installed and _ARRAYS in done.stderr:
        pytest.skip("the interpreter of Triton before 3.7 takes no bound of a loop from memory with NumPy 2.4 or later")
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()
