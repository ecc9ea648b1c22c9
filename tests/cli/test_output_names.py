"""A path whose name says another format than what the option writes there is refused before any work."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from cli_support import cli, place, snapshot  # noqa: F401 - fixtures

from detrt.cli import _COMMANDS, load_command
from detrt.cli.options import FORMATS, Writes, check_name, outputs_of
from detrt.errors import DetrtError


@pytest.mark.parametrize(
    ("format", "wrong"),
    [("JSON", "a.csv"), ("JSON", "a.jsonl"), ("JSON", "A.JPG"), ("JSON lines", "a.csv"), ("CSV", "a.json"), ("CSV", "a.tsv"),
     ("HTML", "a.png"), ("HTML", "a.md"), ("HTML or Markdown", "a.json"), ("figure", "a.jpg"), ("graph", "a.engine"), ("folder", "a.mp4"),
     ("folder", "a.onnx")],
)  # fmt: skip
def test_the_name_of_another_format(tmp_path, format, wrong):
    with pytest.raises(DetrtError, match=f"--x writes .*{format}, and '{wrong}' has the name of another format, "):
        check_name("--x", wrong, Writes(format), {})


@pytest.mark.parametrize("format", list(FORMATS))
def test_other_names_are_taken(tmp_path, monkeypatch, format):
    """Those of the format, names without an end, and of a folder that is there."""
    names = [f"a{suffix}" for suffix in FORMATS[format]] + ["a", "a.v2", "/dev/stdout"]
    if format == "folder":
        monkeypatch.chdir(tmp_path)
        Path("a.onnx").mkdir()
        names.append("a.onnx")
    for name in names:
        check_name("--x", name, Writes(format), {})


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_txt_holds_data_and_nothing_else(format):
    """A page did not open in a browser, and a graph came into a folder `a.txt`."""
    with (
        contextlib.nullcontext()
        if format in ("JSON", "JSON lines", "CSV")
        else pytest.raises(DetrtError, match="name of another")
    ):
        check_name("--x", "a.txt", Writes(format), {})


@pytest.mark.parametrize("command", _COMMANDS)
def test_every_written_path_has_a_format(command):
    assert {mark.format for mark in outputs_of(load_command(command).callback).values()} <= set(FORMATS)


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["detect", "model.onnx", "in", "--json", "out.csv"], "--json writes JSON lines, and 'out.csv'", "--csv for .csv"),
        (["detect", "model.onnx", "in", "--csv", "out.json"], "--csv writes CSV, and 'out.json'", "--json or --coco for .json"),
        (["detect", "model.onnx", "in", "--save-dir", "out.mp4"], "--save-dir writes a folder", "the name of a folder"),
        (["info", "model.onnx", "--json", "out.html"], "'out.html'", "a name that ends in .json"),
        (["build", "model.onnx", "-o", "out.engine"], "--output writes a folder, and 'out.engine'", "the name of a folder"),
        (["export", "random:detr/tiny", "-o", "out.pt"], "--output writes a graph", "a name that ends in .onnx"),
        (["export", "random:detr/tiny", "-o", "out.txt"], "--output writes a graph", "a name that ends in .onnx"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_refuses_it(cli, place, arguments, names, advice):
    before = snapshot(place)
    cli.refused(*arguments, names=names, advice=advice)
    assert snapshot(place) == before
