"""An output never replaces an input, in no command: the options are those that the commands declare."""

from __future__ import annotations

import hashlib
import os
import re

import pytest
from cli_support import cli, place  # noqa: F401 - fixtures
from text_models import write_text_bundle

from detrt import files
from detrt.cli import app, load_command
from detrt.cli.options import outputs_of
from detrt.errors import OutputError

NAMES = [one.name for one in app.registered_commands]
# Words of the help by which a reader knows that a path is written.
WRITTEN = re.compile(
    r"\b(write|writes)\b|to this file|resume file|output folder|read and updated|keep the bundles|new folder|plots of|annotated copies and|"
    r"model repository|the \.onnx file|folder of the bundle|files of the same names|Parquet and COCO results",
    re.IGNORECASE,
)


def parameters(name):
    return {one.name: one for one in load_command(name).params}


def written(name):
    return outputs_of(load_command(name).callback)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_command_writes_is_declared(name):
    """By the words of its help; an option that is not declared is taken for an input, and writing it is refused."""
    declared = written(name)
    for parameter, one in parameters(name).items():
        is_path = not getattr(one, "is_flag", False)
        assert (parameter in declared) == bool(is_path and WRITTEN.search(one.help or "")), (parameter, one.help)


def digests(folder):
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).digest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# What each command reads -> the words of a command line that reads it.
LINES = {
    "detect": ("detect", "bundle", "in/blue.png", "--coco-images", "gt.json", "--font", "font.ttf", "--spec", "spec.json"),
    "verify": ("verify", "bundle", "--against", "model.onnx", "--images", "in", "--ground-truth", "gt.json"),
    "eval": ("eval", "bundle", "--images", "in", "--ground-truth", "gt.json"),
    "bench": ("bench", "bundle", "--images", "in", "--ground-truth", "gt.json"),
    "build": ("build", "model.onnx", "--labels", "labels.txt", "--calibration", "in"),
    "export": ("export", "model.onnx", "-o", "fresh", "--labels", "labels.txt", "--calibration", "in"),
    "info": ("info", "bundle"),
    "encode-prompt": ("encode-prompt", "prompted", "--classes-from", "labels.txt"),
    "triton-repo": ("triton-repo", "bundle", "-o", "fresh"),
    "deepstream": ("deepstream", "bundle", "-o", "fresh"),
    "report": ("report", "checkpoint", "--ground-truth", "gt.json", "--images", "in", "--target", "onnx"),
}
READ = {
    "bundle": "bundle/detrt.json",
    "in/blue.png": "in/blue.png",
    "in": "in/black.png",
    "prompted": "prompted/detrt.json",
    "checkpoint": "checkpoint/config.json",
}


@pytest.fixture
def folder(place):
    write_text_bundle(place / "prompted")
    for name in ("gt.json", "font.ttf", "spec.json", "labels.txt"):
        (place / name).write_text("{}\n")
    (place / "checkpoint").mkdir()
    (place / "checkpoint" / "config.json").write_text("{}\n")
    (place / "checkpoint" / "model.safetensors").write_bytes(b"\x08" + bytes(20))
    return place


PAIRS = [
    (name, flag, word)
    for name, line in LINES.items()
    for flag, mark in ((max(parameters(name)[one].opts, key=len), mark) for one, mark in written(name).items())
    for word in line[1:]
    if not word.startswith("-") and word not in ("onnx", "fresh") and (mark.text or flag in ("--plot", "--timing-cache"))
]


def test_there_are_many_pairs():
    assert len(PAIRS) > 60 and {name for name, *_ in PAIRS} == set(LINES)


@pytest.mark.parametrize("name", LINES)
def test_every_pair_is_refused_and_nothing_changes(cli, folder, name):
    before = digests(folder)
    for flag, word in [(flag, word) for command, flag, word in PAIRS if command == name]:
        target = READ.get(word, word)
        done = cli(*LINES[name], flag, target, code=2)
        assert "would replace" in done.err and target in done.err and flag in done.err, (flag, target, done.err)
        assert digests(folder) == before


@pytest.mark.parametrize("spelling", ["./in/../in/blue.png", "link.png", "hard.png", "{absolute}", "folder/blue.png"])
def test_a_file_is_found_under_its_other_names(cli, folder, spelling):
    (folder / "link.png").symlink_to("in/blue.png")
    os.link(folder / "in/blue.png", folder / "hard.png")
    (folder / "folder").symlink_to("in")
    before = digests(folder)
    spelling = spelling.format(absolute=folder / "in/blue.png")
    done = cli("detect", "bundle", "in/blue.png", "--json", spelling, code=2)
    assert "would replace" in done.err
    assert digests(folder) == before


@pytest.mark.parametrize("inputs", ["in", "in/*.png", "in/**/b*.png"])
def test_files_of_folders_and_patterns_count(cli, folder, inputs):
    before = digests(folder)
    assert "would replace" in cli("detect", "bundle", inputs, "--csv", "in/blue.png", code=2).err
    assert digests(folder) == before
    (folder / "in" / "found.jsonl").write_text("{}\n")  # of an earlier run, which is not read
    assert cli("detect", "bundle", inputs, "--json", "in/found.jsonl").code == 0


@pytest.mark.parametrize("target", ["checkpoint/model.safetensors", "in/blue.png", "model.onnx"])
def test_a_text_replaces_no_other_kind_of_file(cli, folder, target):
    """Also one that the command does not read."""
    before = digests(folder)
    assert "no text" in cli("info", "bundle", "--json", target, code=2).err
    assert digests(folder) == before


@pytest.mark.parametrize(
    "line",
    [
        ("info", "model.onnx", "--json"),
        ("build", "model.onnx", "-o", "new", "--json"),
        ("eval", "found.json", "--ground-truth", "gt.json", "--save"),
    ],
)
def test_no_file_replaces_the_manifest_of_a_bundle(cli, folder, line):
    """JSON over JSON, also of a bundle that is not read: it did not open afterwards."""
    before = digests(folder)
    assert "would replace the manifest of a bundle" in cli(*line, "bundle/detrt.json", code=2).err
    assert digests(folder) == before


@pytest.mark.parametrize(
    "line",
    [("export", "model.onnx", "bundle"), ("export", "model.onnx", "bundle/model.onnx"), ("deepstream", "model.onnx", "bundle")],
)
def test_a_graph_replaces_none_of_a_bundle(cli, folder, line):
    """Its digest in the manifest would be that of the one before, and the bundle would not open again."""
    *words, output = line
    before = digests(folder)
    assert "'bundle' is a bundle, whose 'model.onnx' would be replaced" in cli(*words, "-o", output, code=2).err
    assert digests(folder) == before


@pytest.mark.parametrize("name", LINES)
def test_a_file_is_not_named_as_standard_output_is(cli, folder, name):
    """Where `-` is standard output, `--help` says so; elsewhere no file `-` is written."""
    before = digests(folder)
    tried = 0
    for one, mark in written(name).items():
        parameter = parameters(name)[one]
        flag = max(parameter.opts, key=len)
        if "stdout" in parameter.help or not mark.path or flag in LINES[name] or set(parameter.opts) & set(LINES[name]):
            continue
        assert f"{flag} is '-'" in cli(*LINES[name], flag, "-", code=2).err
        tried += 1
        assert digests(folder) == before
    assert tried or name in ("export", "info", "triton-repo", "deepstream")


@pytest.mark.parametrize("name", NAMES)
def test_help_says_where_standard_output_is(name):
    for one, mark in written(name).items():
        assert not (mark.path and "stdout" in (parameters(name)[one].help or "")), one


def test_two_outputs_need_two_paths(cli, folder):
    assert "both write" in cli("detect", "bundle", "in", "--json", "found", "--csv", "./found", code=2).err
    assert not (folder / "found").exists()


def test_outputs_of_earlier_runs_are_replaced(cli, folder):
    for _ in range(2):
        assert cli("detect", "bundle", "in", "--json", "found.jsonl", "--csv", "found.csv").code == 0
        assert cli("info", "bundle", "--json", "bundle/info.json").code == 0
        assert cli("build", "model.onnx", "-o", "again", "--target", "onnx", "--json", "again.json").code == 0


def test_an_undeclared_output_is_refused_when_it_is_written(tmp_path):
    path = tmp_path / "read.txt"
    path.write_text("kept")
    with files.keeping([path]), pytest.raises(OutputError, match="would be replaced"):
        files.write_text(tmp_path / "." / "read.txt", "lost")
    assert path.read_text() == "kept"
    files.write_text(path, "new")
