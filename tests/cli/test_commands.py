"""The command line as such: help, usage, imports, pipes; and the small commands."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import COMMAND, cli, place, run_process, write_onnx  # noqa: F401 - fixtures
from onnx_models import make_spec
from random_rows import FAMILIES

from detrt.cli import main
from detrt.models.load import BY_NAME, EMBEDDED

COMMANDS = ["build", "export", "detect", "verify", "bench", "info", "doctor", "demo", "demo-data"]
HEAVY = ["torch", "transformers", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx_bindings", "PIL", "numpy", "av"]
has_demo_model = pytest.mark.skipif(
    not (EMBEDDED["embedded:shapes"] / "config.json").is_file(), reason="the embedded model is not there"
)


def best_times(command):
    """(seconds, processor seconds), the best of several runs of a command."""
    seconds, cpu = [], []
    for _ in range(8):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if min(seconds) < 0.3:
            break
    return min(seconds), min(cpu)


def test_help_is_fast():
    """0.3 s; on a machine that is slow or busy, at most twice the processor time of the smallest program with such help."""
    seconds, cpu = best_times([*COMMAND, "--help"])
    if seconds >= 0.3:
        program = "import typer; a = typer.Typer(); a.command('x')(lambda: 0); a.command('y')(lambda: 0); a(['--help'])"
        _, bare = best_times([sys.executable, "-c", program])
        assert cpu < 2 * bare, f"detrt --help took {seconds} s, {cpu} of processor time; the smallest such program {bare}"


@pytest.mark.parametrize("arguments", [["--help"], ["build", "--help"], ["detect", "-h"]], ids=" ".join)
def test_help_loads_nothing_heavy(arguments):
    code = (
        "import sys; from detrt.cli import main\n"
        f"assert main({arguments!r}) == 0\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command(cli):
    out = cli("--help").out
    assert all(f" {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_commands(cli, command):
    out = cli(command, "--help").out
    assert f"Usage: detrt {command}" in out


def test_help_says_what_the_defaults_are(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = cli("build", "--help").out
    for default in ("[default: onnx]", "[default: 17]", "[default: auto]", "[default: raw]", "default 1,1,8"):
        assert default in out, default


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nope"], "'nope'"),
        (["no\\pe"], "'no\\\\pe'"),
        (["no  pe\n"], "no such command"),
        (["predict", "model=a\x1b[2J", "imgsz=64"], "--size 64"),
        (["--nope"], "--nope"),
        (["build", "m.onnx", "-o", "o", "--nope"], "--nope"),
        (["build", "m.onnx"], "-o bundle"),
        (["build"], "model"),
        (["detect", "m.onnx"], "inputs"),
        (["verify", "m.onnx"], "--images"),
        (["export", "m", "-o", "o", "--opset", "many"], "--opset"),
        (["detect", "m.onnx", "x", "--every", "0"], "--every"),
        (["demo-data", "d", "--count", "0"], "--count"),
        (["info", "a", "b"], "b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(cli, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    result = cli(*arguments, code=2)
    assert re.fullmatch(r"detrt: [^\n]*\n", result.err) and word in result.err
    assert result.out == "" and "Traceback" not in result.err and "\x1b" not in result.err and not os.listdir(tmp_path)


def test_no_arguments_show_help(cli):
    result = cli(code=None)
    assert "Usage: detrt" in result.out + result.err and "Traceback" not in result.err


@pytest.mark.parametrize("arguments", [["info", "--families"], ["doctor"], ["doctor", "--json", "-"]], ids=" ".join)
def test_reader_of_a_pipe_leaves(arguments):
    process = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("info", "--families")])
def test_output_beyond_the_limit_of_files_is_a_message(tmp_path, arguments):
    """As `ulimit -f` sets it: it was a traceback."""
    line = " ".join(map(shlex.quote, (*COMMAND, *arguments)))
    with open(tmp_path / "out", "w") as out:
        done = subprocess.run(["bash", "-c", f"ulimit -f 0; {line}"], stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2 and "standard output" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["info", "--families"], ["doctor", "--json", "-"], ["--help"]], ids=" ".join)
def test_standard_output_is_full(arguments):
    with open("/dev/full", "w") as full:
        result = run_process(*arguments, stdout=full)
    assert result.code == 2
    assert result.err == "detrt: cannot write 'standard output': the disk is full; free space or give another output path\n"


def test_a_bug_is_not_hidden(monkeypatch):
    """What is not a DetrtError must not look like bad input."""
    monkeypatch.setattr("detrt.system.diagnose", lambda abilities: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_families(cli):
    rows = cli("info", "--families", "--json", "-").json
    assert [row["family"] for row in rows] == list(BY_NAME)
    table = cli("info", "--families").out
    assert all(name in table and (row["example"] in table) for name, row in zip(BY_NAME, rows, strict=True))
    licences = {row["family"]: row["licence"] for row in rows}
    assert all(licences.values()) and "PML-1.0" in licences["rf_detr"] and licences["co_dino"] == "MIT"
    assert {row["family"] for row in rows if row["fewer queries"] == "yes"} == {f.name for f in BY_NAME.values() if f.reducible}
    fixed = next(family for family in FAMILIES if not family.dynamic)
    assert f"{fixed.name}: fixed size, because" in table


def test_doctor(cli, tmp_path):
    text = cli("doctor").out
    assert "onnxruntime" in text and "build TensorRT-RTX engines" in text
    data = cli("doctor", "--json", "-").json
    assert {"machine", "gpus", "packages", "targets", "transformers_tested"} == set(data)
    found = {package["name"]: package["version"] for package in data["packages"]}
    assert found["onnxruntime"] and "tensorrt" in found
    assert "build and run compiled packages on the CPU" in {target["name"] for target in data["targets"]}
    assert all(t["works"] or t["detail"].startswith("needs ") for t in data["targets"])
    cli("doctor", "--json", tmp_path / "d.json")
    assert set(json.loads((tmp_path / "d.json").read_text())) == set(data)


def test_demo_data(cli, tmp_path):
    place = tmp_path / "new" / "scenes"
    assert "2 scenes" in cli("demo-data", place, "--count", 2, "--seed", 5).out
    truth = json.loads((place / "annotations.json").read_text())
    assert [row["file_name"] for row in truth["images"]] == ["000001.jpg", "000002.jpg"]
    assert sorted(p.name for p in (place / "images").iterdir()) == ["000001.jpg", "000002.jpg"]
    cli.refused("demo-data", place, names=str(place), advice="give a new or empty folder")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["scenes"]


@pytest.mark.slow
def test_bench(cli, tmp_path):
    """One model in a child process; the figures that must be there and cannot be zero."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    arguments = ["--size", "64", "--no-engine", "--no-torch", "--repeats", 2, "--warmup", 0]
    text = cli("bench", "random:yolos/tiny", *arguments, "--json", tmp_path / "b.json").out
    assert "yolos/tiny" in text and "64x64" in text
    row = json.loads((tmp_path / "b.json").read_text())["rows"][0]
    assert row["parameters"] > 0 and row["nodes"] > 0 and row["check_error"] < 1e-3
    assert {(found["backend"], found["scope"]) for found in row["latency"]} == {
        ("onnxruntime-cpu", "forward"),
        ("onnxruntime-cpu", "end_to_end"),
    }
    assert all(len(found["samples_ms"]) == 2 and found["min_ms"] > 0 for found in row["latency"])


@pytest.mark.parametrize(
    ("arguments", "names", "advice"),
    [
        (["random:nope"], "random:nope", "write random:<name>"),
        (["nowhere"], "nowhere", "give a bundle"),
        (["nowhere", "--prompt", "a cat"], "nowhere", "give a bundle"),
        (["embedded:shapes", "--repeats", 0], "got 0", "from 1 to"),
        (["embedded:shapes", "--threads", 0], "got 0", "left out for all cores"),
        (["embedded:shapes", "--size", "100000000"], "'100000000'", "from 1 to 16384"),
        (["embedded:shapes", "--size", "x"], "'x'", "such as 480x640"),
    ],
    ids=str,
)
def test_bench_refuses(cli, arguments, names, advice):
    cli.refused("bench", *arguments, names=names, advice=advice)


@has_demo_model
@pytest.mark.slow
def test_demo(cli, tmp_path):
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    out = cli("demo", "-o", tmp_path / "demo", "--target", "tensorrt-rtx", "--sm", "89").out
    stages = ("load", "export", "check", "engine tensorrt-rtx-sm89", "verify", "detect", "prompted: detect")
    assert all(stage in out for stage in stages)
    for phrase in ("purple ring", "black square", "white letter A", "striped crescent", "dotted circle"):
        assert phrase in out
    assert "green star" not in out  # named in the prompt, but not in the image
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"detrt.json", "model.onnx", "image.png", "annotated.png", "detections.jsonl", "phrases", "prompted.png"} <= names
    found = json.loads((tmp_path / "demo/detections.jsonl").read_text())
    assert found["detections"] and all(row["score"] > 0.5 and row["segmentation"] for row in found["detections"])


@has_demo_model
def test_demo_refuses(cli, place):
    cli.refused("demo", "-o", "in", names="'in'", advice="give a new or empty folder")
    cli.refused("demo", "--sm", "89", names="--sm 89", advice="--target tensorrt-rtx")
    cli.refused("demo", "--target", "tensorrt-rtx", "--sm", "99", names="99", advice="Type for example --sm")
    assert sorted(os.listdir(place)) == ["bundle", "in", "model.onnx"]


def test_masks_of_a_model_that_has_none(cli, place):
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    truth = {
        "images": [{"id": 1, "file_name": "blue.png", "height": 16, "width": 24}],
        "categories": [{"id": 1, "name": "blue"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "segmentation": [[0, 0, 4, 0, 4, 4]]}],
    }
    Path("truth.json").write_text(json.dumps(truth))
    arguments = ("eval", "model.onnx", "--images", "in", "--ground-truth", "truth.json")
    cli.refused(*arguments, "--iou-type", "segm", names="boxes alone", advice="leave it out, or give bbox")
    cli.refused(*arguments, "--iou-type", "panoptic", names="'panoptic'", advice="bbox, segm")
    write_onnx(place / "masked.onnx", make_spec(masks=True))
    advice = "compare models of one task"
    cli.refused(
        "verify", "masked.onnx", "--against", "model.onnx", "--images", "in", names="instance-segmentation", advice=advice
    )
    cli.refused(
        "verify", "model.onnx", "--against", "masked.onnx", "--images", "in", names="instance-segmentation", advice=advice
    )
