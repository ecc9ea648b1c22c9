"""What a person sees in a terminal of 80 columns, through a terminal emulator."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

fcntl = pytest.importorskip("fcntl", reason="there are no pseudo-terminals here")
pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
pyte = pytest.importorskip("pyte", reason="needs the 'dev' extra")
pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
import termios

from cli_support import COMMAND, cli, place  # noqa: F401 - fixtures
from PIL import Image

from detrt.cli import show

COLUMNS, LINES = 80, 24


def screen_of(*arguments: str, cwd: Path, stdout: int | None = None) -> list[str]:
    """Lines of the terminal after a command, those that scrolled out included. stdout: a file instead of the terminal."""
    screen = pyte.HistoryScreen(COLUMNS, LINES, history=1000)
    stream = pyte.ByteStream(screen)
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=cwd,
        stdin=child,
        stdout=child if stdout is None else stdout,
        stderr=child,
        env={**environment, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(child)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            data = os.read(parent, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        stream.feed(data)
    os.close(parent)
    assert process.wait(60) == 0, "\n".join(screen.display)
    old = ["".join(row[column].data for column in range(COLUMNS)) for row in screen.history.top]
    return [line.rstrip() for line in (*old, *screen.display)]


@pytest.fixture
def many(place):
    for index in range(12):
        Image.new("RGB", (24, 16), "blue").save(place / "in" / f"{index:02}.png")
    return place


def test_results_and_progress_do_not_overwrite_each_other(many):
    shown = screen_of("detect", "bundle", "in", "-t", "0.7", cwd=many)
    results = [f"in/{index:02}.png: 2 blue" for index in range(12)] + ["in/black.png: nothing", "in/blue.png: 2 blue"]
    assert [line for line in shown if ".png" in line] == results
    assert not any("━" in line or "╺" in line for line in shown), "the bar is still there"


def test_json_lines_are_not_wrapped(many):
    shown = screen_of("detect", "bundle", "in/blue.png", "--json", "-", cwd=many)
    text = "".join(line.ljust(COLUMNS) for line in shown)
    assert text.startswith('{"image": "in/blue.png"') and '"score"' in text and "━" not in text


def test_results_in_a_pipe_stay_there(many, tmp_path):
    """The bar is on the terminal, and every line in the file."""
    with open(tmp_path / "out.txt", "wb") as file:
        shown = screen_of("detect", "bundle", "in", "-t", "0.7", cwd=many, stdout=file.fileno())
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert len(lines) == 14 and all(line.endswith((": 2 blue", ": nothing")) for line in lines)
    assert not any(".png:" in line for line in shown)


def test_tables_fit_80_columns(cli, place, monkeypatch):
    """No line is wider, and no word of a name is broken."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for arguments in (
        ["info", "--families"],
        ["info", "bundle"],
        ["info", "model.onnx"],
        ["doctor"],
        ["bench", "bundle", "--repeats", "2", "--warmup", "1"],
    ):
        lines = cli(*arguments).out.splitlines()
        wide = [
            line for line in lines if len(line) > COLUMNS and not re.match("rf_detr: |to install|more of|.* medians of", line)
        ]
        assert not wide, wide
    families = cli("info", "--families").out
    for name in ("table-transformer", "conditional_detr", "mm_grounding_dino", "hf:microsoft/table-transformer-detection"):
        assert name in families


def test_a_wide_table_is_printed_in_parts(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    columns = ["model", "backend", *(f"column {index}" for index in range(12))]
    show.table("title", columns, [[f"{name}{i}" for i, name in enumerate(columns)] for _ in range(2)], keys=2)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    heads = [line for line in lines if line.lstrip().startswith("model ")]
    assert len(heads) > 1 and all("backend" in head for head in heads)
    assert [f"column {index}" in " ".join(heads) for index in range(12)] == [True] * 12
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_word_of_a_table_is_broken(width, capsys, monkeypatch):
    """Words, paths and long names, also in key columns and beside numbers; and every character of a digest, which fits no line."""
    monkeypatch.setenv("COLUMNS", str(width))
    path = "/data/checkpoints/deimv2-femto-coco/second-run.fine-tuned"
    error = (
        "the calibration images give activations above the range of FP16 in model.encoder.layers.0.self_attn.out_proj; use bf16"
    )
    columns = ("model", "precision", "batch", "p50 ms", "p90 ms", "images/s", "build s", "MB", "AP", "check")
    rows = [
        (path, "fp32", "1", "100.25", "104.50", "9.9", "105.3", "12.1", "0.2881", "detects what the graph does"),
        ("shapes", "int8", "8", "90.00", "91.00", "11.1", "300.0", "4.0", "", error),
    ]
    show.table("", columns, rows, right=range(2, 9), keys=3)
    show.table(
        "", ("package", "version", "for"), [("tensorrt-rtx-cu13-bindings", "1.7.1.116", f"Detections.to_supervision, {error}")]
    )
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= width
    cells = {piece for line in lines for piece in line.split()}
    words = {word for text in (*columns, *error.split(), *(cell for row in rows for cell in row[1:9])) for word in text.split()}
    long = {"model.encoder.layers.0.self_attn.out_proj;"}
    assert words - long <= cells, words - long - cells
    assert {"deimv2-femto-coco/", "tensorrt-rtx-cu13-bindings"} & cells and "self_" not in cells - {"self_"}
    digest = "0123456789abcdef" * 8
    show.table("", ("", ""), [("sha256", digest)])
    assert "".join(capsys.readouterr().out.split()) == f"sha256{digest}"


def test_columns_of_bench_have_names_of_their_own():
    from detrt.cli.bench import BUNDLE_COLUMNS, CHECKPOINT_COLUMNS

    for columns in (BUNDLE_COLUMNS, CHECKPOINT_COLUMNS):
        names = [name for name, _ in columns]
        assert len(set(names)) == len(names)


def test_info_is_a_page(cli, place):
    text = cli("info", "bundle").out
    assert text.startswith("bundle: bundle\n") and "classes" in text and "model.onnx" in text
    assert "files[0]" not in text and "decode." not in text and "{" not in text
    assert cli("info", "bundle", "--json", "-").json["files"][0]["path"] == "model.onnx"


def test_a_class_stays_in_its_line(cli, place):
    """A line break in its name would forge a line of the summary."""
    path = place / "bundle" / "detrt.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["spec"]["labels"] = {str(number): f"c{number}\nran on  forged" for number in range(3)}
    path.write_text(json.dumps(manifest))
    for command in (("detect", "bundle", "in"), ("info", "bundle")):
        cli.refused(*command, names="must be one line of text; got 'c0\\nran on  forged'", advice="labels")


def test_title_of_a_table_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    title = "b/shapes3: 6 images, 600 detections"
    show.table(title, ("", "value"), [("AP", "0.5")], right=(1,))
    assert capsys.readouterr().out.splitlines()[0].strip() == title


if __name__ == "__main__":
    print("\n".join(screen_of(*sys.argv[1:], cwd=Path.cwd())))
