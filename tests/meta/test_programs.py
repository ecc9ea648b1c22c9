"""The programs of benchmarks/ and training/: each says what it is, runs with today's detrt, and answers wrong input in one line."""

from __future__ import annotations

import ast
import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]

pytest.importorskip("torch", reason="needs the 'export' extra")

BENCHMARKS = ROOT / "benchmarks"
PROGRAMS = re.findall(r"^\| `([\w/.]+)` ", (BENCHMARKS / "README.md").read_text("utf-8"), re.MULTILINE)
SOURCES = sorted([*BENCHMARKS.rglob("*.py"), *(ROOT / "training").glob("*.py")])


@pytest.fixture
def program(monkeypatch, capfd):
    """program(name, *arguments): (exit code, standard output, standard error) of a program in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def run(name: str, *arguments: object) -> tuple[int, str, str]:
        path = BENCHMARKS / name if (BENCHMARKS / name).is_file() else ROOT / "training" / name
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        sys.path.insert(0, str(path.parent))
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(path), run_name="__main__")
        return int(ended.value.code or 0), *capfd.readouterr()

    yield run
    ours = {path.stem for path in SOURCES}
    for name in set(sys.modules) - before:
        if name in ours:
            del sys.modules[name]


def needs(name: str) -> None:
    for package in {
        "load": ("psutil",),
        "fuzz": ("psutil", "httpx", "schemathesis", "hypothesis"),
        "measure_triton": ("psutil",),
    }.get(Path(name).stem, ()):
        pytest.importorskip(package)
    if Path(name).stem == "measure_int8_cpu":
        pytest.importorskip("openvino")


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(program, name):
    needs(name)
    code, out, _ = program(name, "--help")
    text = ast.get_docstring(ast.parse((BENCHMARKS / name).read_text("utf-8")))
    assert code == 0 and out.startswith(f"usage: {Path(name).name}") and text.splitlines()[0] in out, out


NONE = "/nowhere/at/all"
WRONG = {
    "load/load.py": [(NONE, NONE), ("embedded:shapes", NONE), ("embedded:shapes", NONE, "--seconds", "0")],
    "load/fuzz.py": [("embedded:shapes", NONE), ("embedded:shapes", NONE, "--count", "0")],
    "measure_agreement.py": [(), ("out", "fp16", "no-model"), ("out", "int3", "detr")],
    "measure_devices.py": [
        (NONE, NONE, "--devices", "cpu"),
        (NONE, "FOLDER", "--devices", "cpu", "--images", "1"),
        ("embedded:shapes", "FOLDER", "--devices", "tpu"),
        ("embedded:shapes", "FOLDER", "--devices", "cpu", "--images", "0"),
    ],
    "measure_inductor.py": [
        ("out", "--models", "no-model"),
        ("out", "--baseline", NONE),
        ("out", "--seconds", "0"),
        ("out", "--models", "detr", "--kinds", "rtx-nobody", "--graphs", "FOLDER"),
        ("out", "--models", "detr", "--kinds", "rtx-authors"),
        ("out", "--models", "detr", "--kinds", "base"),
        ("out", "--models", "detr", "--device", "cpu"),
        ("out", "ours|random:detr|-|fp16"),
    ],
    "tables.py": [(NONE,), ()],
    "measure_low_types.py": [("out", "no-model")],
    "measure_few_rows.py": [("out", "--rows", "0"), ()],
    "measure_msda.py": [("--out",)],
    "measure_real_arithmetic.py": [(NONE, "embedded:shapes")],
    "measure_reduced.py": [(NONE,), ()],
    "measure_tensorrt.py": [(NONE, "1", "bundle"), ("FOLDER", "-1", "bundle"), ("FOLDER", "0", "bundle")],
    "measure_engines.py": [("time", NONE, "out"), ("time", "FOLDER", "out"), ("build", NONE, "out", "a=b"), ()],
    "measure_image_path.py": [(), ("embedded:shapes", "--threads", "0")],
    "measure_host_work.py": [("0",), ("none",)],
    "measure_cpu.py": [
        ("dance", "FOLDER"),
        (),
        ("measure", "FOLDER", "no-model"),
        ("measure", "FOLDER"),
        ("table", NONE),
        ("row", "FOLDER"),
    ],
    "measure_int8_cpu.py": [("FOLDER", NONE, "FOLDER", "a=b.xml"), ()],
    "measure_streams.py": [("embedded:shapes", NONE), (NONE, "FILE"), ("embedded:shapes", "FILE", "--seconds", "0")],
    "measure_embedded_masks.py": [("FOLDER", "--scenes", "0"), ("FOLDER", "--detrt-run", NONE)],
    "measure_masks.py": [(NONE,)],
    "measure_triton.py": [(NONE,), (), ("bundle", "--workers", "0")],
    "compare_exporters.py": [
        ("export", "FOLDER", "--authors", NONE),
        ("build", NONE),
        ("time", "FOLDER"),
        ("time", "FOLDER", "out"),
        ("export", "FOLDER", "no-model", "--authors", "FOLDER"),
        ("build", "FOLDER", "--sm", "60"),
    ],
}


BCCD = ("BCCD", "--out", "out", "--smoke")
TINY = (*BCCD, "--model", "random:rt_detr_v2/tiny", "--size", "64")
# Those of training/ that people give models or data of their own.
TRAINING = {
    "train_bccd.py": [
        (NONE, "--out", "out"),
        (*BCCD, "--config", "{}", "--model", "random:nope"),
        (*BCCD, "--model", "embedded:shapes"),
        (*BCCD, "--model", "random:dino/tiny"),
        (*BCCD, "--model", "random:grounding_dino/tiny"),
        (*TINY, "--size", "65"),
        *(
            (*TINY, "--config", config)
            for config in ("{", "[1]", '{"none": 1}', '{"decoder_layers": "x"}', '{"decoder_layers": -1}')
        ),
    ],
    "measure_precision.py": [("FOLDER", NONE, "fp16")],
    "measure_prompted.py": [(NONE, "640"), ("random:detr/tiny", "64"), ("random:detr/tiny", "64x")],
    "finetune_with_trainer.py": [(NONE, "--out", "out")],
}
LINES = [(name, given) for lines in (WRONG, TRAINING) for name, rows in lines.items() for given in rows]


def _write_bccd(folder):
    """One image without cells, as the data set has its files."""
    (folder / "coco_annotations").mkdir(parents=True)
    (folder / "BCCD" / "JPEGImages").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(folder / "BCCD" / "JPEGImages" / "a.jpg")
    entry = {"id": 1, "file_name": "a.jpg", "width": 64, "height": 64}
    data = {"images": [entry], "annotations": [], "categories": [{"id": 1, "name": "RBC"}]}
    (folder / "coco_annotations" / "instances_train.json").write_text(json.dumps(data), "utf-8")


def test_each_program_has_wrong_input():
    assert set(WRONG) == set(PROGRAMS)


@pytest.mark.parametrize(("name", "arguments"), LINES, ids=str)
def test_wrong_input_is_one_line(program, name, arguments, tmp_path, monkeypatch):
    needs(name)
    if "BCCD" in arguments:
        _write_bccd(tmp_path / "BCCD")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER/a.jpg").write_bytes(b"")
    (tmp_path / "FILE").write_bytes(b"")
    code, _, said = program(name, *arguments)
    lines = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]
    assert code == 2 and len(lines) == 1 and lines[0].startswith(f"{Path(name).name}"), (code, said)
    assert not (tmp_path / "out").exists()


CHECKED = ("detrt", "transformers")  # the types of the second one are none of mypy's


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_that_programs_import_exist(path):
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] not in CHECKED:
            continue
        try:
            module = importlib.import_module(node.module)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith(CHECKED):
                raise
            continue  # a package of a GPU
        for one in node.names:
            if not hasattr(module, one.name):
                importlib.import_module(f"{node.module}.{one.name}")


def test_devices_are_measured(program, exported, tmp_path):
    """The program opens workers as `detrt detect --device` does."""
    from detrt.data.scenes.scene import write_dataset

    write_dataset(tmp_path, 4, seed=1)
    code, out, said = program(
        "measure_devices.py",
        exported("embedded:shapes").path,
        tmp_path / "images",
        "--devices",
        "cpu",
        "--images",
        8,
        "--batch",
        2,
    )
    row = json.loads(out)
    assert code == 0 and row["images_per_second"] > 0 and row["backend"].endswith("on cpu"), said


def test_only_whole_packages_have_stand_ins(monkeypatch):
    """An installed package tries modules that are absent in it and goes on without them: it would take a stand-in for the module."""
    import compare_exporters

    monkeypatch.setattr(compare_exporters, "LEFT_OUT", {"no_such_package", "email"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("torch.utils.tensorboard", "no_such_package", "no_such_package.part"):
        monkeypatch.setitem(sys.modules, name, sys)  # which puts back at the end what was there
        del sys.modules[name]
    compare_exporters.leave_out()
    assert importlib.import_module("no_such_package.part").anything
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("email.no_such_part")
