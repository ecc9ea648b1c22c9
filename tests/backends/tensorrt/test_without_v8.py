"""What TensorRT 8 alone needs goes with its folder and one line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs the 'export' extra")

from cli_support import write_onnx
from engine_graphs import rtx

import detrt

LINE = '    "v8",\n'


@pytest.fixture
def without(tmp_path, monkeypatch):
    """Runs Python with a copy of detrt that has no TensorRT 8."""
    copy = tmp_path / "src" / "detrt"
    shutil.copytree(Path(detrt.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    folder = copy / "backends" / "tensorrt"
    shutil.rmtree(folder / "v8")
    table = folder / "versions.py"
    text = table.read_text("utf-8")
    assert text.count(LINE) == 1
    table.write_text(text.replace(LINE, ""), "utf-8")

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)

    return run


def test_the_rest_is_imported_and_knows_the_other_versions(without):
    names = ("bindings", "build", "building", "opening", "session", "worker", "rewrite", "versions", "compare", "first_opening")
    script = "".join(f"import detrt.backends.tensorrt.{name}\n" for name in names)
    script += "from detrt.backends.tensorrt.versions import row_of\n"
    script += "assert row_of('tensorrt', '10.3').spoken().names_nodes and row_of('tensorrt-rtx', '1.7').spoken().names_nodes\n"
    done = without("-c", script + "row_of('tensorrt', '8.5.3')")
    assert "tensorrt 8.5.3 is older than 10.3, the oldest that detrt knows" in done.stderr


@rtx
def test_engines_of_tensorrt_rtx_are_built_and_read(without, tmp_path):
    write_onnx(tmp_path / "model.onnx")
    done = without("-m", "detrt", "build", "model.onnx", "-o", "bundle", "--target", "tensorrt-rtx", "--sm", "89")
    assert not done.returncode, done.stderr
    done = without("-m", "detrt", "info", "bundle")
    assert not done.returncode and "model.tensorrt-rtx-sm89.engine" in done.stdout
