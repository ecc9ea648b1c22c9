"""The command line in process and in processes of its own, and what a refusal has to look like."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from onnx_models import make_model, make_spec
from PIL import Image

from detrt.cli import main
from detrt.spec import ModelSpec

# The console script, whether or not its folder is on the path.
COMMAND = (sys.executable, "-c", "import sys; from detrt.cli import main; sys.exit(main())")


def shades(folder, count, bad=()):
    """Images whose amount of blue is their number, so that every answer belongs to one of them."""
    folder.mkdir(parents=True)
    for index in range(count):
        path = folder / f"{index:03d}.png"
        Image.new("RGB", (24 + index % 5, 16), (0, 0, 140 + index)).save(path)
        if index in bad:
            path.write_bytes(path.read_bytes()[:40])
    return folder


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Standard output as JSON lines; fails if anything else is on it."""
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs `detrt` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int | None = 0) -> Result:
        self._capsys.readouterr()
        got = main([str(argument) for argument in arguments])
        result = Result(got, *self._capsys.readouterr())
        assert code is None or got == code, f"exit code {got}, expected {code}\n{result.out}\n{result.err}"
        return result

    def refused(self, *arguments: object, names: str, advice: str, code: int = 2) -> str:
        """Run something that must be refused; the error. names: the value that it must name, literally;
        advice: a pattern of the next step."""
        return check_refusal(self(*arguments, code=None), names=names, advice=advice, code=code)


def check_refusal(result: Result, *, names: str, advice: str, code: int = 2) -> str:
    assert result.code == code, f"exit code {result.code}, expected {code}\n{result.out}\n{result.err}"
    assert "Traceback" not in result.err and "Traceback" not in result.out
    errors = [line for line in result.err.splitlines() if line.startswith("detrt: ")]
    assert len(errors) == 1, f"not exactly one error:\n{result.err}"
    message = result.err[result.err.index("detrt: ") :]
    assert names in message, f"{names!r} is not named in: {message}"
    assert re.search(advice, message), f"no next step like {advice!r} in: {message}"
    return message


def run_process(*arguments: object, cwd: Path | None = None, **options: Any) -> Result:
    """`detrt` in a process of its own."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        text=True,
        capture_output="stdout" not in options,
        env={**os.environ, "COLUMNS": "200"},
        timeout=120,
        **({"stderr": subprocess.PIPE} if "stdout" in options else {}),
        **options,
    )
    return Result(done.returncode, done.stdout or "", done.stderr)


def snapshot(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too -> digest of its content; folders end in a slash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        found[name + "/" * path.is_dir()] = "" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def write_onnx(path: Path, spec: ModelSpec | None = None, **changes: Any) -> Path:
    """A detector of a few nodes; blue images have two detections above 0.7, black ones none."""
    path.write_bytes(make_model(spec or make_spec(**changes)))
    return path


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, colour in {"blue.png": "blue", "black.png": "black"}.items():
        Image.new("RGB", (24, 16), colour).save(folder / name)
    return folder


@pytest.fixture
def cli(capsys):
    return Cli(capsys)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a model, a bundle of it (without an engine) and two images."""
    monkeypatch.chdir(tmp_path)
    write_onnx(tmp_path / "model.onnx")
    write_images(tmp_path / "in")
    assert main(["build", "model.onnx", "-o", "bundle", "--target", "onnx", "--json", str(tmp_path / "j")]) == 0
    (tmp_path / "j").unlink()
    return tmp_path
