"""The functions that an image, a checkpoint, a request and a prompt pass: no more than docs/reference/architecture.md says."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from detrt.data.sinks import Record
from detrt.detections import Detections

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "count_hops.py"
ROW = re.compile(r"^\| (image|checkpoint|request|prompt) \|.*\| +(\d+) \| +(\d+) \| +(\d+) \|$", re.MULTILINE)


def table() -> dict[str, tuple[int, int, int]]:
    """Journey -> (at most, before, now)."""
    text = (ROOT / "docs" / "reference" / "architecture.md").read_text("utf-8")
    return {found[1]: tuple(int(number) for number in found.groups()[1:]) for found in ROW.finditer(text)}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("count_hops", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_state_the_bars_of_the_script(script):
    assert {journey: row[0] for journey, row in table().items()} == script.BAR
    lists = (ROOT / "docs" / "results" / "hops.md").read_text("utf-8")
    for journey, (_, before, now) in table().items():
        assert f"Before, commit 107a94a ({before}):" in lists and f"Now ({now}):" in lists, journey


@pytest.mark.slow
@pytest.mark.parametrize("journey", ["image", "checkpoint", "request", "prompt"])
def test_journeys_are_no_longer_than_documented(journey, tmp_path):
    if journey == "checkpoint":
        pytest.importorskip("tensorrt_rtx", reason="the checkpoint is built into an engine of TensorRT-RTX")
    found = tmp_path / "hops.json"
    subprocess.run([sys.executable, str(SCRIPT), journey, "--json", str(found)], check=True, capture_output=True)
    hops = json.loads(found.read_text("utf-8"))[journey]
    assert 0 < len(hops) <= table()[journey][2], hops


@dataclass
class Keeper:
    """What `detrt` classes look like to the script."""

    held: object

    def close(self) -> None: ...


def recorder(script, journey, value, tmp_path):
    made = script.Recorder(journey, value, str(tmp_path / "log.jsonl"))
    made.before = set()
    return made


def test_what_keeps_the_thing_for_others_is_not_the_thing(script, tmp_path, monkeypatch):
    counting = recorder(script, "prompt", "a cat.", tmp_path)
    monkeypatch.setattr(Keeper, "__module__", "detrt.backends.base")
    empty = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64), (), (8, 8))
    assert counting.holds(Record("a cat.", empty), made=False) and counting.holds(["a cat."], made=False)
    assert not counting.holds(Keeper("a cat."), made=False)


def test_images_of_pillow_are_images_and_its_pens_are_not(script, tmp_path):
    counting = recorder(script, "image", "photo.jpg", tmp_path)
    image = Image.new("RGB", (8, 8))
    assert counting.data(image) and not counting.data(ImageDraw.Draw(image))


def test_the_reference_of_a_loaded_checkpoint_and_bare_names_are_names(script, tmp_path):
    counting = recorder(script, "checkpoint", "embedded:shapes", tmp_path)
    assert counting.equals("embedded:shapes") and counting.equals(Path("out/model.onnx")) and counting.equals("out/model.engine")
    assert not counting.equals("model.onnx")
    counting.loaded = True
    assert not counting.equals("embedded:shapes")
