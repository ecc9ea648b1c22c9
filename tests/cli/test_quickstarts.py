"""The lines of docs/guide/quickstarts.md that a folder of the reader's needs, on folders of tiny random models."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
from checkpoint_folders import save_folder
from cli_support import cli  # noqa: F401 - fixture
from serve_support import Server

from detrt.data.scenes.scene import write_dataset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "quickstarts.md"
# Folder in the page -> tiny models that stand for it, and the settings of their image processor.
EDGES, SQUARE = ({"size": {"shortest_edge": 128, "longest_edge": 192}}, {"size": {"height": 128, "width": 128}})
FOLDERS = {
    "tuned-detr": [("detr", EDGES), ("deformable_detr", EDGES)],
    "tuned-lw-detr": [("lw_detr", SQUARE), ("yolos", EDGES)],
    "tuned-rf-detr": [("rf_detr", None)],
    "tuned-grounding-dino": [("grounding_dino", EDGES), ("omdet_turbo", SQUARE)],
}
QUICK = ("lw_detr",)


def lines_of(folder):
    """The commands of the section that builds a folder."""
    (fence,) = [text for text in re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if f"build {folder}/" in text]
    return [shlex.split(line)[1:] for line in fence.splitlines()]


def test_folders_of_the_page_are_tried():
    named = re.findall(r"^detrt build (tuned-[\w-]+)/", PAGE.read_text("utf-8"), re.MULTILINE)
    assert set(named) - {"tuned-deimv2"} == set(FOLDERS)


CASES = [(folder, name, settings) for folder, models in FOLDERS.items() for name, settings in models]


@pytest.mark.parametrize(
    ("folder", "name", "settings"), [pytest.param(*c, marks=[] if c[1] in QUICK else [pytest.mark.slow]) for c in CASES]
)
def test_lines(cli, tiny, tmp_path, monkeypatch, folder, name, settings):
    monkeypatch.chdir(tmp_path)
    save_folder(tiny(name), tmp_path / folder, settings)
    write_dataset(tmp_path / "photos", 2, seed=0)
    build, verify, detect, serve = lines_of(folder)
    assert [build[0], verify[0], detect[0], serve[0]] == ["build", "verify", "detect", "serve"]
    assert "equal to PyTorch" in cli(*build).out
    assert cli(*verify, "--json", "verify.json", code=None).code in (0, 3)
    failures = json.loads(Path("verify.json").read_text())["failures"]
    if name == "grounding_dino":  # transformers scores separators as well, which random weights like as much as phrases
        failures = [text for text in failures if not text.startswith("against transformers' ")]
    assert failures == []
    cli(*detect, "--threshold", "0", "--json", "found.jsonl")
    found = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert len(found) == 2 and all(one["detections"] for one in found) and len(list(Path("runs").rglob("*.jpg"))) == 2
    with Server(*serve[1:], "--workers", 1) as running, urllib.request.urlopen(running.address + "/v1/models") as answer:
        (model,) = json.load(answer)["models"]
    assert model["name"] == "bundle" and model["takes_prompt"] == ("--prompt" in verify)
