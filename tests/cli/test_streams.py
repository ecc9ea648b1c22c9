"""Names with control characters, formulas in CSV, and standard streams that are closed, full or read no further."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from cli_support import cli, place  # noqa: F401 - fixtures
from PIL import Image
from ports import free_port

from detrt.data.sinks import Record, csv_writer, jsonl_writer
from detrt.detections import Detections
from detrt.errors import printable

CONTROL = {
    "line1\nline2: 3 person": r"line1\nline2: 3 person",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b[2J": r"\x1b[2J",
    "a\rb": r"a\rb",
    "\x9b31m": r"\x9b31m",
    "\u202eexe.gpj": r"\u202eexe.gpj",
    "a\u2028b": r"a\u2028b",
    "a\x00b\x7f": r"a\x00b\x7f",
    "Ünïcode 犬 [1]": "Ünïcode 犬 [1]",
}


@pytest.mark.parametrize("text", CONTROL)
def test_control_characters_are_escaped(text):
    assert printable(text) == CONTROL[text]


@pytest.mark.parametrize("text", [text for text in CONTROL if "\x00" not in text])
def test_names_forge_no_line(cli, place, text):
    name = f"in/{text}.png".replace("]0;title", "title")
    Image.new("RGB", (24, 16), "red").save(name)
    done = cli("detect", "bundle", name, "--threshold", "0")
    assert len(done.out.splitlines()) == 1 and done.out.startswith(printable(name)[:8])
    assert not any(character in done.out + done.err for character in "\x1b\x07\x9b\u202e\r")
    missing = cli("detect", "bundle", name + "x\x1b[2J", code=2)
    assert "\x1b" not in missing.err
    first, *others = missing.err.splitlines()
    assert first.startswith("detrt: ") and all(line.startswith("  ") for line in others)


def test_a_value_of_a_file_fills_no_terminal(cli, place):
    image = {"id": 1, "file_name": "blue.png"}
    truth = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": ["x" * 1_000_000]}]}
    (place / "truth.json").write_text(json.dumps(truth))
    done = cli("eval", "bundle", "--ground-truth", "truth.json", code=2)
    assert len(done.err) < 10_000 and "categories[0] has the name ['xxx" in done.err and done.err.endswith("xxx'], not text\n")


FORMULAS = ["=HYPERLINK(1)", "+1", "-1", "@SUM(A1)", "\t=1", "'tis", "''", "plain", "=", "\uff1d1"]


def test_cells_of_csv_are_no_formulas_and_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Detections(np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int64), ("=label",), (16, 24))
    with csv_writer("cells.csv") as write:
        for text in FORMULAS:
            write(Record(text, found))
    with open("cells.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert not any(row[column].startswith(("=", "+", "-", "@", "\t")) for row in rows for column in ("image", "label"))
    assert [row["image"].removeprefix("'") for row in rows] == FORMULAS
    assert {row["label"] for row in rows} == {"'=label"}


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("writer", [csv_writer, jsonl_writer])
def test_rows_on_a_terminal_have_no_control_characters(monkeypatch, writer, terminal):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", out)
    found = Detections(np.zeros((1, 4), np.float32), np.ones(1, np.float32), np.zeros(1, np.int64), ("label",), (16, 24))
    with writer("-") as write:
        for text in CONTROL:
            write(Record(text, found))
    text = out.getvalue()
    if terminal:
        assert printable(text, keep="\n") == text and text.count("\n") == len(CONTROL) + (writer is csv_writer)
    if writer is jsonl_writer:
        assert [json.loads(line)["image"] for line in text.split("\n")[:-1]] == list(CONTROL)
        assert "Ünïcode 犬 [1]" in text
    else:
        rows = csv.DictReader(io.StringIO(text, newline=""))
        assert [row["image"] for row in rows] == list(CONTROL.values() if terminal else CONTROL)


def shell(line, folder):
    """A command line of the shell, in which `detrt` is this package."""
    command = f"detrt() {{ '{sys.executable}' -m detrt \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("detrt detect bundle in --json found.jsonl 2>&-", 0),
        ("detrt detect bundle in --json found.jsonl >&-", 0),
        ("detrt detect bundle in --json found.jsonl >&- 2>&- <&-", 0),
        ("detrt detect bundle in >&-", 2),
        ("detrt detect bundle in > /dev/full", 2),
        ("detrt info bundle >&-", 2),
        ("detrt info bundle > /dev/full", 2),
        ("detrt detect bundle nothing 2>&-", 2),
        ("detrt detect bundle in --json found.jsonl 2> /dev/full", 0),
        ("detrt detect bundle in --json found.jsonl 2< /dev/null", 0),
        ("detrt detect bundle in --json found.jsonl 2> >(true)", 0),
        ("detrt detect bundle nothing 2> /dev/full", 2),
    ],
)
def test_closed_and_full_streams_end_as_in_gnu_tools(place, line, code):
    done = shell(line, place)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stdout + done.stderr and "Exception ignored" not in done.stderr
    if "--json" in line:
        assert [json.loads(row)["image"] for row in (place / "found.jsonl").read_text().splitlines()] == [
            "in/black.png",
            "in/blue.png",
        ]
    if code == 2 and "2>" not in line:
        assert done.stderr.startswith("detrt: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_characters_that_stdout_does_not_have_are_escaped(place, encoding):
    """What Windows writes into a pipe, and a terminal of another language: a label is no reason to fail."""
    manifest = place / "bundle/detrt.json"
    data = json.loads(manifest.read_text("utf-8"))
    data["spec"]["labels"] = dict.fromkeys(data["spec"]["labels"], "снег")
    manifest.write_text(json.dumps(data))
    done = shell(f"PYTHONUTF8=0 PYTHONIOENCODING={encoding} detrt info bundle", place)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert r"\u0441\u043d\u0435\u0433" in done.stdout


def test_a_reader_that_has_enough_is_no_error(place):
    done = shell("detrt info bundle | head -1; echo ${PIPESTATUS[0]}", place)
    assert done.stdout.splitlines()[-1] == "0" and "Traceback" not in done.stderr


def test_a_server_outlives_the_reader_of_its_first_line(place):
    pytest.importorskip("fastapi", reason="needs the 'serve' extra")
    port = free_port()
    command = [sys.executable, "-m", "detrt", "serve", "bundle", "--port", str(port), "--workers", "1"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline().startswith("loading")
            server.stdout.close()
            for _ in range(300):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                    assert answer.status == 200
                    break
                time.sleep(0.2)
                assert server.poll() is None, server.stderr.read()
            else:
                pytest.fail("the server did not become ready")
        finally:
            server.terminate()
        assert server.wait(30) in (0, 143)
        assert "Traceback" not in server.stderr.read()
