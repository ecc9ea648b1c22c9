"""kill -9 at each system call of a command that writes, renames or removes: what it replaces is the old content or the new, whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")

from cli_support import COMMAND, write_images, write_onnx

from detrt.bundle import Bundle, writing_bundle

CALLS = (
    "write,pwrite64,writev,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,ftruncate,"
    "fsync,fdatasync,fallocate,copy_file_range,sendfile"
)


def without_strace() -> str:
    """Why system calls cannot be made fatal here, or nothing."""
    if shutil.which("strace") is None:
        return "needs strace (apt-get install strace), which kills a process at a system call"
    tried = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace may trace no process here: {tried.stderr.strip()}"


pytestmark = pytest.mark.skipif(bool(without_strace()), reason=without_strace() or "strace works")


Call = tuple[str, int]  # name of a system call, and its number among those of that name


def strace(folder: Path, options: list[str], arguments: tuple[str, ...]) -> int:
    """The exit code of a command whose main thread is traced."""
    done = subprocess.run(
        ["strace", "-qq", "-e", f"trace={CALLS}", *options, *COMMAND, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
        timeout=300,
    )
    assert done.returncode in (0, -signal.SIGKILL, 128 + signal.SIGKILL), done.stderr
    return done.returncode


def calls_of(folder: Path, arguments: tuple[str, ...]) -> list[Call]:
    """The calls of a command, in order."""
    assert strace(folder, ["-o", "trace"], arguments) == 0
    counts: Counter[str] = Counter()
    calls = []
    for name in re.findall(r"^(\w+)\(", (folder / "trace").read_text("utf-8", "replace"), re.MULTILINE):
        counts[name] += 1
        calls.append((name, counts[name]))
    return calls


def kill(folder: Path, call: Call, arguments: tuple[str, ...]) -> None:
    """Run a command that ends at a call."""
    options = ["-o", os.devnull, "-e", f"inject={call[0]}:signal=KILL:when={call[1]}"]
    assert strace(folder, options, arguments) != 0, f"it never came to {call}"


def bundle_of(folder: Path) -> dict[str, bytes]:
    """What a bundle lists, each file compared with its digest."""
    bundle = Bundle.open(folder)
    return {entry.path.rpartition("/")[2]: bundle.checked_path(entry).read_bytes() for entry in bundle.files}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with an old and a new model, bundles of both, and old and new results of the same images."""
    from detrt.cli import main

    folder = tmp_path_factory.mktemp("begun")
    write_onnx(folder / "old.onnx")
    write_onnx(folder / "new.onnx", width=16)
    write_images(folder / "in")
    for name in ("old", "new"):
        model = str(folder / f"{name}.onnx")
        assert main(["build", model, "-o", str(folder / name), "--target", "onnx"]) == 0
    return folder


BUILD = ("build", "new.onnx", "-o", "bundle", "--target", "onnx")
DETECT = ("detect", "old.onnx", "in", "--json", "results.json")


def check_build(folder: Path, call: Call) -> bool:
    """Kill `build` into an old bundle; whether the new one is there."""
    (folder / "old").rename(folder / "bundle")
    old, new = bundle_of(folder / "bundle"), bundle_of(folder / "new")
    kill(folder, call, BUILD)
    found = bundle_of(folder / "bundle")
    assert found in (old, new) and old != new, f"killed at {call}"
    with writing_bundle(folder / "bundle") as fresh:  # as the next build does
        shutil.copytree(folder / "new", fresh, dirs_exist_ok=True)
    assert bundle_of(folder / "bundle") == new
    assert sorted(os.listdir(folder / "bundle")) == sorted(os.listdir(folder / "new")), f"killed at {call}"
    assert sorted(os.listdir(folder)) == sorted(["bundle", "in", "new", "new.onnx", "old.onnx"]), f"killed at {call}"
    return found == new


def check_detect(folder: Path, call: Call) -> bool:
    """Kill `detect` that replaces results; whether the new ones are there."""
    (folder / "results.json").write_text('"old"\n')
    kill(folder, call, DETECT)
    lines = [json.loads(line) for line in (folder / "results.json").read_text("utf-8").splitlines()]
    assert lines == ["old"] or len(lines) == 2, f"killed at {call}: {lines}"
    return lines != ["old"]


CHECKS = {"build": (check_build, BUILD), "detect": (check_detect, DETECT)}


def outcomes(begun: Path, folder: Path, command: str, some: int | None) -> list[bool]:
    """Whether the new content was there after a kill at each call, or at so many of them."""
    check, arguments = CHECKS[command]
    shutil.copytree(begun, folder)
    (folder / "old").rename(folder / "bundle")
    calls = calls_of(folder, arguments)
    assert {"write", "rename", "fsync"} <= {name for name, _ in calls}
    chosen = calls if some is None else calls[:: -(-len(calls) // some)] + calls[-1:]
    found = []
    for call in chosen:
        shutil.rmtree(folder)
        shutil.copytree(begun, folder)
        found.append(check(folder, call))
    return found


@pytest.mark.parametrize(("command", "some"), [("build", 3), ("detect", 1)])
def test_some_calls(begun, tmp_path, command, some):
    found = outcomes(begun, tmp_path / "place", command, some)
    assert found == sorted(found) and not found[0] and found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("command", CHECKS)
def test_each_call(begun, tmp_path, command):
    found = outcomes(begun, tmp_path / "place", command, None)
    assert found == sorted(found) and not found[0] and found[-1]  # one moment separates the old content and the new
