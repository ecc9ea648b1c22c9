"""The public API for type checkers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import detrt

ROOT = Path(__file__).resolve().parents[2]


def test_package_is_marked_as_typed():
    assert (Path(detrt.__file__).parent / "py.typed").is_file()


def test_public_api_and_programs_type_check():
    """With the settings of `make lint`; an ignored error that is none any more fails as well."""
    pytest.importorskip("mypy", reason="needs the 'dev' extra")
    done = subprocess.run([sys.executable, "-m", "mypy", "--no-incremental"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
