"""The wheel in an empty environment: what it holds, what it needs, and that it detects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import place  # noqa: F401 - fixture

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "detrt/py.typed",
    "detrt/serve/page/docs.html",
    "detrt/evaluation/report.html",
    "detrt/models/embedded/shapes/config.json",
)


def run(*command: object, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_in_an_empty_environment(place, tmp_path_factory):
    """`make wheel`, `pip install`, and a detection with the bundle that this environment built."""
    folder = tmp_path_factory.mktemp("wheel")
    try:
        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    except AssertionError as error:
        if "No matching distribution" in str(error) or "connection" in str(error).lower():
            pytest.skip("no package index can be reached, which has setuptools")
        raise
    (wheel,) = folder.glob("detrt-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name in names for name in FILES)
    assert not [name for name in names if name.startswith(("tests", "training", "benchmarks"))]
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=folder)
    detrt = folder / "env" / "bin" / "detrt"
    assert run(detrt, "--version", cwd=folder).startswith("detrt 0.")
    installed = run(python, "-m", "pip", "list", "--format=freeze", cwd=folder).lower()
    assert "torch" not in installed and "transformers" not in installed and "nvidia" not in installed
    rows = [json.loads(line) for line in run(detrt, "detect", "bundle", "in", "--json", "-", "-q", cwd=place).splitlines()]
    assert {row["image"]: len(row["detections"]) for row in rows} == {"in/blue.png": 3, "in/black.png": 0}
