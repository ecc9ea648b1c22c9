"""Every option of every command with values that are none: one clear line, exit code 2, nothing written, no input changed.

The command lines are made of the options that the commands declare, so that a new option cannot miss this.
"""

from __future__ import annotations

import itertools
import json
import os

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("torch", reason="needs the 'export' extra: build and report are among the commands")
from cli_support import cli, snapshot, write_images, write_onnx  # noqa: F401 - fixture
from text_models import write_text_bundle

from detrt.cli import _COMMANDS, load_command, main
from detrt.cli.options import outputs_of

# A command line of each command that works.
WORKS = {
    "build": "build model.onnx -o new --target onnx",
    "export": "export model.onnx -o new.onnx",
    "detect": "detect bundle in",
    "serve": "serve bundle",
    "verify": "verify bundle --against model.onnx --images in",
    "bench": "bench bundle --repeats 1",
    "report": "report model.onnx --target onnx --repeats 1",
    "info": "info bundle",
    "doctor": "doctor",
    "demo": "demo -o new",
    "eval": "eval bundle --images in --ground-truth truth.json",
    "demo-data": "demo-data new --count 1",
    "encode-prompt": "encode-prompt prompted -o new.json --prompt cat",
    "triton-repo": "triton-repo bundle -o new",
    "deepstream": "deepstream bundle -o new",
}
# A name of nothing, a number below all, a folder with images, nothing at all (an unset variable of a shell), a damaged JSON file, a text
# that is too long for a name, and one with a control character.
VALUES = ("gone.xyz", "-1", "in", "", "broken.json", "x" * 5000, "a\x1b[2Jb")
# Texts that may be anything: option -> why.
ANY_TEXT = {
    "--prompt": "words to find",
    "--task": "a sentence",
    "--name": "the name of a model",
    "--host": "an address, which is looked up when the server starts",
    "--allowed-hosts": "a name",
    "--plugin": "a path on another machine",
    "--ray-address": "an address",
    "--seed": "any number",
}


def valued(command):
    """Options that take a value."""
    for parameter in load_command(command).params:
        if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False):
            yield parameter


def lines():
    """Each option with every value in the first command that has it, and with one of them in each other command."""
    values, seen = itertools.cycle(VALUES), set()
    for command in _COMMANDS:
        writes = outputs_of(load_command(command).callback)
        for option in valued(command):
            flag = max(option.opts, key=len)
            tried = [next(values)] if flag in seen else VALUES
            seen.add(flag)
            for value in tried:
                anything = flag in ANY_TEXT or option.name in writes or (flag == "--images" and value == "in")
                accepted = value == option.default or (
                    command == "report" and flag == "--calibration" and value in ("broken.json", "in")
                )
                if accepted or (value and anything and not (flag == "--plugin" and command == "build")):
                    continue
                words = WORKS[command].split()
                for name in option.opts:
                    if name in words:
                        del words[words.index(name) : words.index(name) + 2]
                yield (*words, flag, value)


LINES = list(lines())


def outputs():
    for command in _COMMANDS:
        for name in outputs_of(load_command(command).callback):
            option = next(one for one in load_command(command).params if one.name == name)
            if option.param_type_name != "option":
                continue
            flag = max(option.opts, key=len)
            yield from ((command, flag, place) for place in ("truth.json/new", "/proc/new/new", "x" * 300))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("values")
    before = os.getcwd()
    os.chdir(path)
    truth = {"images": [{"id": 1, "file_name": "blue.png", "width": 24, "height": 16}], "annotations": []}
    try:
        write_onnx(path / "model.onnx")
        write_images(path / "in")
        write_text_bundle(path / "prompted")
        (path / "truth.json").write_text(json.dumps({**truth, "categories": [{"id": 1, "name": "blue"}]}))
        (path / "broken.json").write_text('{"images": [')
        assert main(["build", "model.onnx", "-o", "bundle", "--target", "onnx"]) == 0
        yield path, snapshot(path)
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    """What is accepted would run for long."""

    def accepted(*_, **__):
        raise AssertionError("the value was accepted")

    monkeypatch.setattr("detrt.serve.server.serve", accepted)


def test_there_are_two_hundred():
    assert len(LINES) > 600 and {line[0] for line in LINES} == set(_COMMANDS) - {
        "doctor"
    }  # which has --json alone, and was first


@pytest.mark.parametrize("command", _COMMANDS)
def test_wrong_values_are_refused_in_one_line(command, cli, folder, monkeypatch):
    path, before = folder
    monkeypatch.chdir(path)
    for line in LINES:
        if line[0] == command:
            check(cli(*line, code=None), line, path, before)


def check(result, line, path, before):
    shown = " ".join(line[:-1]) + f" {line[-1][:40]!r}"
    assert result.code == 2, f"exit code {result.code} of: {shown}\n{result.out}{result.err}"
    assert result.err.startswith("detrt: ") and result.err.count("\n") == 1, f"{shown}\n{result.err}"
    assert "Traceback" not in result.err and "\x1b" not in result.err and len(result.err) < 12000, f"{shown}\n{result.err}"
    assert "loading" not in result.out and result.out.count("\n") == 0, f"{shown}\n{result.out}"
    assert snapshot(path) == before, f"written or changed by: {shown}"


@pytest.mark.parametrize("command", _COMMANDS)
def test_places_that_cannot_be_written(command, cli, folder, monkeypatch):
    path, before = folder
    monkeypatch.chdir(path)
    for name, flag, place in outputs():
        if name == command:
            words = WORKS[command].split()
            for short in next(one.opts for one in load_command(command).params if flag in one.opts):
                if short in words:
                    del words[words.index(short) : words.index(short) + 2]
            result = cli(*words, flag, place, code=None)
            assert result.code == 2, f"exit code {result.code} of: {' '.join(words)} {flag} {place!r}\n{result.err}"
            assert result.err.count("detrt: ") == 1 and "Traceback" not in result.err, (words, flag, place, result.err)
            assert snapshot(path) == before, (words, flag, place)


@pytest.mark.parametrize("command", _COMMANDS)
def test_wrong_models_are_refused_in_one_line(command, cli, folder, monkeypatch):
    """The first argument: a name of nothing, a folder of images, an image, damaged JSON, nothing."""
    path, before = folder
    monkeypatch.chdir(path)
    words = WORKS[command].split()
    if command in ("doctor", "demo"):
        pytest.skip("takes no model")
    wrong = ("gone", "in", "in/blue.png", "broken.json", "", "ckpt:gone.pth", "hf:x", "embedded:x", "random:x", "x" * 5000)
    wrong = ("truth.json", "in", "", "truth.json/new") if command == "demo-data" else wrong
    for value in wrong:
        if ":" in value and command in ("serve", "bench"):
            continue  # read in a process of its own, whose answer other tests look at
        line = (words[0], value, *words[2:])
        check(cli(*line, code=None), (*line[:1], *line[2:], value), path, before)
