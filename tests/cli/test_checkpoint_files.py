"""Original checkpoint files through the commands: what is said, what is recorded, and what is refused with exit code 2."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import torch
from cli_support import Result
from dino_reference import keys as key_lists
from dino_reference.weights import fill
from payload import Payload

from detrt.backends.open import open_session
from detrt.cli import main
from detrt.data.scenes.scene import write_dataset
from detrt.errors import SpecError

RESNET = {"kind": "resnet", "depths": (1, 1, 1, 1), "width": 8}
SMALL = {"dim": 32, "ffn": 48, "layers": 2, "queries": 20}


def run(*arguments: object) -> Result:
    """A command in this process, also for fixtures of a whole module."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A Co-DINO of seven classes, a file of names, and two images."""
    folder = tmp_path_factory.mktemp("originals")
    state = fill(key_lists.co_dino(RESNET, fc=16, classes=7, **SMALL))
    torch.save({"state_dict": state}, folder / "seven.pth")
    (folder / "names.txt").write_text("\n".join("abcdefg"), "utf-8")
    write_dataset(folder / "scenes", 2)
    return folder


@pytest.fixture(scope="module")
def bundle(files):
    """Built once, with hard NMS and names of its own."""
    done = run(
        "build",
        f"ckpt:{files}/seven.pth",
        "-o",
        files / "b",
        "--target",
        "onnx",
        "--labels",
        files / "names.txt",
        "--nms",
        "hard",
        "--size",
        "96",
    )
    assert done.code == 0, done.err
    return files / "b", done


def test_a_build_says_and_keeps_how_the_file_was_read(bundle, files):
    folder, done = bundle
    assert done.err.count("note: seven.pth: Sense-X Co-DETR or mmdetection CO-DETR (weights): classes 7") == 1
    assert "class names of" in done.err and "classes 7, queries 20" in done.err
    options = json.loads((folder / "detrt.json").read_text("utf-8"))["provenance"]["options"]
    assert options["labels"] == str(files / "names.txt") and options["export"]["nms"] == "hard"
    assert options["loading"][0].startswith("seven.pth: Sense-X Co-DETR or mmdetection CO-DETR (weights): classes 7")
    shown = json.loads(run("info", folder, "--json", "-").out)
    assert shown["loading"] == options["loading"] and shown["nms"] == "nms, IoU 0.8"


def test_verify_finds_the_file_and_its_names_again(bundle, files):
    folder, _ = bundle
    done = run("verify", folder, "--images", files / "scenes" / "images", "--limit", "1", "--batches", "1")
    assert done.code == 0, done.err + done.out
    assert "verdict: the same detections" in done.out


def test_detect_takes_names_for_a_checkpoint_only(bundle, files):
    folder, _ = bundle
    image = sorted((files / "scenes" / "images").iterdir())[0]
    found = run(
        "detect",
        f"ckpt:{files}/seven.pth",
        image,
        "--labels",
        files / "names.txt",
        "--json",
        "-",
        "-t",
        "0.1",
    )
    assert found.code == 0, found.err
    rows = json.loads(found.out.splitlines()[0])["detections"]
    assert rows and {row["label"] for row in rows} <= set("abcdefg")
    refused = run("detect", folder, image, "--labels", files / "names.txt")
    assert refused.code == 2 and "has its own; leave it out" in refused.err
    with pytest.raises(SpecError, match="`family=detr` says how a checkpoint is read"):
        open_session(folder, family="detr")


@pytest.mark.slow
def test_nms_in_the_graph_by_option(files, tmp_path):
    reference = f"ckpt:{files}/seven.pth"
    names = ("--labels", files / "names.txt", "--size", "64", "--no-check")
    assert run("export", reference, "-o", tmp_path / "m.onnx", *names, "--decode", "graph", "--nms", "graph-hard").code == 0
    shown = json.loads(run("info", tmp_path / "m.onnx", "--json", "-").out)
    assert shown["nms"] == "nms, IoU 0.8, in the graph" and shown["operators"]["NonMaxSuppression"] == 1
    wrong = run("export", reference, "-o", tmp_path / "n.onnx", *names, "--nms", "graph")
    assert wrong.code == 2 and "--nms graph needs --decode graph" in wrong.err
    assert run("export", reference, "-o", tmp_path / "n.onnx", *names, "--nms", "maybe").code == 2
    assert not (tmp_path / "n.onnx").exists()


def _half(files: Path, folder: Path) -> Path:
    state = torch.load(files / "seven.pth", weights_only=True)["state_dict"]
    torch.save(dict(list(state.items())[::2]), folder / "half.pth")
    return folder / "half.pth"


def _quantised(files: Path, folder: Path) -> Path:
    state = torch.load(files / "seven.pth", weights_only=True)["state_dict"]
    key = "query_head.cls_branches.0.weight"
    torch.save({**state, key: state[key].to(torch.int8)}, folder / "int8.pth")
    return folder / "int8.pth"


def _code(files: Path, folder: Path) -> Path:
    (folder / "code.pth").write_bytes(pickle.dumps(Payload(folder / "was-run")))
    return folder / "code.pth"


def _shard(files: Path, folder: Path) -> Path:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(b"x")
    return path


def _no_state(files: Path, folder: Path) -> Path:
    torch.save({"epoch": 3}, folder / "state.pth")
    return folder / "state.pth"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_half, "missing|incomplete|keys of no model"),
        (_quantised, "is quantised"),
        (_code, "refused and not run|damaged"),
        (_shard, "one shard"),
        (_no_state, "holds no state dict"),
        (lambda files, folder: files / "seven.pth", "7 classes and names none"),
    ],
)
@pytest.mark.parametrize("command", ("build", "export"))
def test_bad_files_leave_nothing_behind(command, make, words, files, tmp_path):
    path = make(files, tmp_path)
    done = run(command, f"ckpt:{path}", "-o", tmp_path / "out")
    assert done.code == 2 and "Traceback" not in done.err
    assert re.search(words, done.err), done.err
    assert not (tmp_path / "out").exists() and not (tmp_path / "was-run").exists()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")]


@pytest.mark.parametrize("command", (("build", "-o", "x"), ("detect", "a.jpg"), ("info",), ("verify", "--images", "a.jpg")))
def test_a_wrong_family_is_refused_everywhere(command, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jpg").write_bytes(sorted((files / "scenes" / "images").iterdir())[0].read_bytes())
    name, *rest = command
    for family, words in (("rt_detr", "another family|incomplete"), ("yolo", "there is no family 'yolo'")):
        done = run(name, f"ckpt:{files}/seven.pth", *rest, "--family", family)
        assert done.code == 2 and re.search(words, done.err), done.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jpg"]


def test_which_families_have_original_files():
    rows = {row["family"]: row["original files"] for row in json.loads(run("info", "--families", "--json", "-").out)}
    assert (
        rows["detr"] == ["facebookresearch DETR", "facebookresearch DETR, DC5"]
        and rows["yolos"] == ["hustvl YOLOS"]
        and rows["eomt"] == ["tue-mps EoMT"]
        and rows["owlvit"] == []
    )
    assert rows["co_dino"] == ["Sense-X Co-DETR", "mmdetection CO-DETR"]
