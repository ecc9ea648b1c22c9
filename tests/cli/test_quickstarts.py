"""The lines of docs/guide/quickstarts.md that a checkpoint of the reader's needs, on folders and files of tiny random models."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import urllib.request
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("fastapi", reason="needs the 'serve' extra")
from authors_files import module_of, write_file
from checkpoint_folders import save_folder
from cli_support import cli  # noqa: F401 - fixture
from deimv2_files import write_released
from dino_reference import keys as key_lists
from dino_reference.weights import fill
from PIL import Image
from serve_support import Server

from detrt.data.scenes.scene import draw_scene

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "quickstarts.md"
EDGES, SQUARE = ({"size": {"shortest_edge": 128, "longest_edge": 192}}, {"size": {"height": 128, "width": 128}})
# As tests/models/checkpoints/test_dino_cli.py has them.
RESNET = {"kind": "resnet", "depths": (1, 1, 1, 1), "width": 8}
SMALL = {"dim": 32, "ffn": 48, "layers": 2, "queries": 20, "classes": 3}


def folder_of(name, settings):
    """A writer of a folder in transformers format. settings: of its image processor."""
    return lambda path, request: save_folder(request.getfixturevalue("tiny")(name), path, settings)


def file_of(case):
    """A writer of the authors' file, with class names beside it."""
    return lambda path, request: write_file(case, path, module_of(case))


def dino_file(make):
    """A writer of a file of mmdetection or the original code. make: the names and shapes of its tensors."""

    def write(path, request):
        torch.save({"model": fill(make())}, path)
        path.with_name("names.txt").write_text("a\nb\nc\n")

    return write


def deimv2_folder(path, request):
    """The released Atto, as a folder with the corrected class. Random weights of this family are no proof: they enlarge rounding."""
    shutil.copytree(request.getfixturevalue("real_data") / "checkpoints" / "deimv2-atto-coco", path)


def deimv2_file(path, request):
    write_released(request.getfixturevalue("real_data"), "atto", path)
    path.with_name("names.txt").write_text("".join(f"thing {i}\n" for i in range(80)))


# Checkpoint in the page -> what stands for it: name of the case -> writer.
CHECKPOINTS = {
    "tuned-detr/": {"detr": folder_of("detr", EDGES), "deformable_detr": folder_of("deformable_detr", EDGES)},
    "tuned-lw-detr/": {"lw_detr": folder_of("lw_detr", SQUARE), "yolos": folder_of("yolos", EDGES)},
    "tuned-rf-detr/": {"rf_detr": folder_of("rf_detr", None)},
    "tuned-deimv2/": {"deimv2-upstream": deimv2_folder},
    "ckpt:deimv2.pth": {"deimv2": deimv2_file},
    "ckpt:dino.pth": {
        "dino": dino_file(lambda: key_lists.dino(RESNET, (1, 2, 3), 4, **SMALL)),
        "co_dino": dino_file(lambda: key_lists.co_dino(RESNET, fc=16, **SMALL)),
        "d_fine-seg": file_of("d_fine-seg"),
        "ecseg": file_of("ecseg"),
    },
    "tuned-grounding-dino/": {
        "grounding_dino": folder_of("grounding_dino", EDGES),
        "omdet_turbo": folder_of("omdet_turbo", SQUARE),
    },
}
QUICK = ("lw_detr",)


def lines_of(checkpoint):
    """The commands of the section that builds a checkpoint; where two are alternatives, the one that builds it."""
    fences = re.findall(r"```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (fence,) = [text for text in fences if f"build {checkpoint} " in text]
    lines = [shlex.split(line)[1:] for line in fence.splitlines()]
    return [line for line in lines if line[0] != "build" or line[1] == checkpoint]


def test_checkpoints_of_the_page_are_tried():
    fences = re.findall(r"<!-- not run: the .*?```sh\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    named = {line.split()[2] for fence in fences for line in fence.splitlines() if line.startswith("detrt build ")}
    assert named == set(CHECKPOINTS)


CASES = [pytest.param(c, n, marks=[] if n in QUICK else [pytest.mark.slow]) for c, some in CHECKPOINTS.items() for n in some]


@pytest.mark.parametrize(("checkpoint", "name"), CASES)
def test_lines(cli, request, tmp_path, monkeypatch, checkpoint, name):
    monkeypatch.chdir(tmp_path)
    CHECKPOINTS[checkpoint][name](tmp_path / checkpoint.removeprefix("ckpt:"), request)
    (tmp_path / "photos").mkdir()
    for index in range(2):  # long ones: DINO makes their shortest edge 800, up to a longest of 1333
        Image.fromarray(draw_scene(index, size_hw=(80, 480)).image).save(tmp_path / "photos" / f"{index}.jpg")
    build, verify, detect, serve = lines_of(checkpoint)
    assert [build[0], verify[0], detect[0], serve[0]] == ["build", "verify", "detect", "serve"]
    assert "equal to PyTorch" in cli(*build).out
    assert cli(*verify, "--json", "verify.json", code=None).code in (0, 3)
    assert json.loads(Path("verify.json").read_text())["failures"] == []
    if "--threshold" in detect:
        del detect[(at := detect.index("--threshold")) : at + 2]
    cli(*detect, "--threshold", "0", "--json", "found.jsonl")
    found = [json.loads(line) for line in Path("found.jsonl").read_text().splitlines()]
    assert len(found) == 2 and all(one["detections"] for one in found) and len(list(Path("runs").rglob("*.jpg"))) == 2
    with Server(*serve[1:], "--workers", 1) as running, urllib.request.urlopen(running.address + "/v1/models") as answer:
        (model,) = json.load(answer)["models"]
    assert model["name"] == "bundle" and model["takes_prompt"] == ("--prompt" in verify)
