"""kill -9 at each system call of a command that writes, renames or removes: what it replaces is the old content or the new, whole."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")

import numpy as np
from cli_support import COMMAND, write_images, write_onnx
from killed import Call, calls_of, kill, some_of, without_strace
from PIL import Image

from detrt import files
from detrt.bundle import Bundle, writing_bundle
from detrt.data.video import read_frames, video_writer

pytestmark = pytest.mark.skipif(bool(without_strace()), reason=without_strace() or "strace works")


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
    if importlib.util.find_spec("av") is not None:
        with video_writer(folder / "clip.mp4", fps=5, size=(16, 24)) as write:
            for shade in (0, 128, 255):
                write(np.full((16, 24, 3), (0, 0, shade), np.uint8))
    (folder / "parts" / "detections").mkdir(parents=True)
    images = [{"id": i, "file_name": f"{name}.png", "width": 24, "height": 16} for i, name in enumerate(("black", "blue"))]
    box = {"id": 1, "image_id": 1, "category_id": 0, "bbox": [2, 2, 8, 8], "area": 64, "iscrowd": 0}
    truth = {"images": images, "annotations": [box], "categories": [{"id": 0, "name": "red"}]}
    (folder / "truth.json").write_text(json.dumps(truth))
    for name in ("old", "new"):
        model = str(folder / f"{name}.onnx")
        assert main(["build", model, "-o", str(folder / name), "--target", "onnx"]) == 0
    return folder


BUILD = (*COMMAND, "build", "new.onnx", "-o", "bundle", "--target", "onnx")
DETECT = (*COMMAND, "detect", "old.onnx", "in", "--json", "results.json")
EVAL = ("eval", "old.onnx", "--ground-truth", "truth.json", "--images", "in", "--batch", "1")
SAVE = (*COMMAND, *EVAL, "--save", "results.json")
RESUME = (*COMMAND, *EVAL, "--resume", "state.jsonl")
PART = (
    sys.executable,
    "-c",
    "from detrt.jobs.ray.parquet import results_to_bytes as rows\nfrom detrt.jobs.ray.storage import ResultFolder\n"
    "ResultFolder('parts').write('detections/part-000000.parquet', rows([], {'run': 'new'}))",
)


MANY = (
    *(*COMMAND, "detect", "old.onnx", "in", "clip.mp4", "-t", "0.1"),
    *("--save-dir", "out/copies", "--save-txt", "out/labels", "--save-crops", "out/crops"),
)
PAGE = (*COMMAND, *EVAL, "--report", "page.html")


def check_build(folder: Path, call: Call) -> bool:
    """Kill `build` into an old bundle; whether the new one is there."""
    before = os.listdir(folder)
    (folder / "old").rename(folder / "bundle")
    old, new = bundle_of(folder / "bundle"), bundle_of(folder / "new")
    kill(folder, call, BUILD)
    found = bundle_of(folder / "bundle")
    assert found in (old, new) and old != new, f"killed at {call}"
    with writing_bundle(folder / "bundle") as fresh:  # as the next build does
        shutil.copytree(folder / "new", fresh, dirs_exist_ok=True)
    assert bundle_of(folder / "bundle") == new
    assert sorted(os.listdir(folder / "bundle")) == sorted(os.listdir(folder / "new")), f"killed at {call}"
    assert sorted(os.listdir(folder)) == sorted(set(before) - {"old"} | {"bundle"}), f"killed at {call}"
    return found == new


def check_file(folder: Path, call: Call, arguments: tuple[str, ...], path: Path) -> list[str]:
    """Kill a command that replaces a file; its lines then. The next one that writes it leaves it alone in its folder."""
    path.write_text('"old"\n')
    others = set(os.listdir(path.parent))
    kill(folder, call, arguments)
    lines = path.read_text("utf-8", "replace").splitlines()
    files.write_text(path, "the next")
    assert set(os.listdir(path.parent)) == others, f"killed at {call}"
    return lines


def check_detect(folder: Path, call: Call) -> bool:
    lines = [json.loads(line) for line in check_file(folder, call, DETECT, folder / "results.json")]
    assert lines == ["old"] or len(lines) == 2, f"killed at {call}: {lines}"
    return lines != ["old"]


def check_save(folder: Path, call: Call) -> bool:
    lines = [json.loads(line) for line in check_file(folder, call, SAVE, folder / "results.json")]
    assert lines == ["old"] or len(lines[0]) == 8, f"killed at {call}: {lines}"
    return lines != ["old"]


def check_resume(folder: Path, call: Call) -> bool:
    """Kill an evaluation that keeps its state, and resume it: the results are those of one run. Whether both images were done."""
    kill(folder, call, RESUME)
    done = len((folder / "state.jsonl").read_bytes().splitlines()) if (folder / "state.jsonl").exists() else 0
    for more in (("--resume", "state.jsonl", "--save", "resumed.json"), ("--save", "whole.json")):
        subprocess.run([*COMMAND, *EVAL, *more], cwd=folder, check=True, capture_output=True)
    assert (folder / "resumed.json").read_text() == (folder / "whole.json").read_text() != "[]\n"
    return done == 3


def check_part(folder: Path, call: Call) -> bool:
    part = folder / "parts" / "detections" / "part-000000.parquet"
    lines = check_file(folder, call, PART, part)
    assert lines == ['"old"'] or (lines[0].startswith("PAR1") and lines[-1].endswith("PAR1")), f"killed at {call}"
    return lines != ['"old"']


def check_many(folder: Path, call: Call) -> bool:
    """Kill a command that writes a file for each image: each that is there is whole, and the next run leaves all of them, and no others."""
    kill(folder, call, MANY)
    found = sorted(path.relative_to(folder / "out").as_posix() for path in files_in(folder / "out"))
    for path in files_in(folder / "out"):
        if path.suffix == ".txt":
            assert all(len(line.split()) == 5 for line in path.read_text().splitlines()), f"killed at {call}: {path}"
        elif path.suffix in (".png", ".jpg"):
            Image.open(path).load()
        elif path.suffix == ".mp4":
            assert len(list(read_frames(path))) == 3, f"killed at {call}"
        else:
            assert len([json.loads(line) for line in path.read_text().splitlines()]) == 5, f"killed at {call}"
    subprocess.run(MANY, cwd=folder, check=True, capture_output=True)
    again = sorted(path.relative_to(folder / "out").as_posix() for path in (folder / "out").rglob("*") if path.is_file())
    assert len(again) > 10 and set(found) <= set(again) and not [name for name in again if "/." in name], f"killed at {call}"
    return len(found) == len(again)


def files_in(folder: Path) -> list[Path]:
    """Those that are there for others, which hidden ones are not."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


def check_page(folder: Path, call: Call) -> bool:
    lines = check_file(folder, call, PAGE, folder / "page.html")
    assert lines == ['"old"'] or lines[-1].endswith("</html>"), f"killed at {call}"
    return lines != ['"old"']


CHECKS = {
    "many": (check_many, MANY),
    "page": (check_page, PAGE),
    "build": (check_build, BUILD),
    "detect": (check_detect, DETECT),
    "save": (check_save, SAVE),
    "resume": (check_resume, RESUME),
    "part": (check_part, PART),
}
NEEDS = {"many": "av", "page": "pycocotools", "save": "pycocotools", "resume": "pycocotools", "part": "pyarrow"}


def outcomes(begun: Path, folder: Path, command: str, some: int | None) -> list[bool]:
    """Whether the new content was there after a kill at each call, or at so many of them."""
    check, arguments = CHECKS[command]
    if command in NEEDS:
        pytest.importorskip(NEEDS[command], reason=f"needs {NEEDS[command]}")
    shutil.copytree(begun, folder)
    (folder / "old").rename(folder / "bundle")
    calls = calls_of(folder, arguments)
    assert "write" in {name for name, _ in calls}
    found = []
    for call in some_of(calls, some):
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
