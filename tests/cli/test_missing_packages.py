"""Each command by each missing extra: it works, or it says in one line which extra to install. Never a traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("tokenizers", reason="needs the 'text' extra")
from cli_support import place  # noqa: F401 - fixture
from missing_packages import BLOCKER
from text_models import write_text_bundle

from detrt.cli import app
from detrt.errors import EXTRAS, MissingPackageError, install_hint, missing_package
from detrt.system import has_driver

ROOT = Path(__file__).resolve().parents[2]
TRUTH = {
    "images": [{"id": 1, "file_name": "blue.png", "width": 24, "height": 16}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 24, 16], "area": 384, "iscrowd": 0}],
    "categories": [{"id": 1, "name": "blue"}],
}
# Command -> extras that it may name where they are missing; with the others missing it must work.
COMMANDS: dict[str, set[str]] = {
    "--version": set(),
    "doctor": set(),
    "info --families": set(),
    "info bundle": set(),
    "info model.onnx": {"export"},
    "info random:yolos/tiny": {"export"},
    "export random:yolos/tiny -o x.onnx": {"export"},
    "build random:yolos/tiny -o b1 --target onnx": {"export"},
    "build random:yolos/tiny -o b0": {"export"},
    "build random:yolos/tiny -o b2 --target tensorrt-rtx --sm 89": {"export", "rtx"},
    "build random:yolos/tiny -o b3 --target tensorrt": {"export", "trt"},
    "build random:yolos/tiny -o b4 --target inductor --size 64": {"export"},
    "build model.onnx -o b5 --target onnx": {"export"},
    "build model.onnx -o b6 --target openvino": {"export", "openvino"},
    "detect bundle in": set(),
    "detect bundle in --save-dir runs --csv f.csv": set(),
    "detect random:yolos/tiny in": {"export"},
    "detect bundle video.mp4": {"video"},
    "detect bundle video.mp4 --live": {"video"},
    "detect bundle video.mp4 --track": {"video", "track"},
    "detect prompted in --prompt red": {"text"},
    "detect bundle in --cluster ray --output rows": {"ray"},
    "detect bundle in --image-decoder gpu": set(),
    "detect bundle in --backend onnxruntime-rtx": {"onnxruntime-rtx"} if has_driver() else set(),
    "verify bundle --images in": {"export"},
    "verify bundle --against model.onnx --images in": {"export"},
    "eval bundle --images in --ground-truth truth.json": {"eval"},
    "bench bundle --repeats 1 --warmup 0": set(),
    "bench bundle --repeats 1 --warmup 0 --plot p.svg": {"bench"},
    "bench random:yolos/tiny --size 64 --no-engine --repeats 1 --warmup 0": {"export"},
    "report random:yolos/tiny --target onnx --size 64 --precisions fp32 --batches 1 --repeats 1": {"export"},
    "serve bundle --host 203.0.113.7": {"serve"},
    "demo -o demo": {"export"},
    "demo-data scenes --count 1": set(),
    "encode-prompt prompted --prompt red -o prompt.json": {"text"},
    "triton-repo bundle -o repository": set(),
    "deepstream bundle -o app": {"export"},
}
SLOW = ("b2", "demo -o", "b4")  # builds, where nothing is missing
# What these say without anything missing: exit code 2 for another reason.
REFUSED = ("serve bundle", "--image-decoder gpu", "video.mp4", "verify bundle --images in", "--backend onnxruntime-rtx")

RUN = """
import contextlib, io, json, sys, traceback
from detrt.cli import main
rows = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except BaseException:
            code = 1
            traceback.print_exc()
    rows.append([line, code, out.getvalue() + err.getvalue()])
json.dump(rows, open("rows.json", "w"))
"""


def run_without(extras: set[str], commands: list[str], folder: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each command in a process that cannot import the packages of `extras`."""
    (folder / "truth.json").write_text(json.dumps(TRUTH))
    (folder / "video.mp4").write_bytes(b"no video")
    write_text_bundle(folder / "prompted")
    site = folder / ".site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER)
    brought = () if "export" in extras else ("yaml",)  # transformers needs it, so that it is there without [eval]
    blocked = [name for extra in extras for name in EXTRAS[extra] if name not in brought]
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "DETRT_BLOCKED": json.dumps(blocked)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {line: (code, output) for line, code, output in json.loads((folder / "rows.json").read_text())}


def check(results: dict[str, tuple[int, str]], missing: set[str]) -> None:
    missing = missing | {extra for extra, names in EXTRAS.items() if importlib.util.find_spec(names[0]) is None}
    for line, (code, output) in results.items():
        assert "Traceback" not in output and code in (0, 2), f"{line}: exit code {code}\n{output}"
        assert "pip install detrt" not in output and "'detrt[" not in output, line
        errors = [text for text in output.splitlines() if text.startswith("detrt: ")]
        needed = COMMANDS[line] & missing
        if needed:
            assert code == 2 and len(errors) == 1, f"{line}: {output}"
            assert any(f"[{','.join(some)}]'" in errors[0] for some in _subsets(needed)), f"{line}: {errors}"
        elif not any(part in line for part in REFUSED):
            assert code == 0, f"{line}: {output}"
        else:
            assert code == 2 and ".[" not in errors[0], f"{line}: {errors}"


def _subsets(extras: set[str]) -> list[list[str]]:
    return [[one] for one in extras] + [sorted(extras)]


def test_commands_without_any_extra(place):
    """What `pip install` alone gives: numpy, Pillow, typer, rich and onnxruntime."""
    before = sorted(os.listdir(place))
    results = run_without(set(EXTRAS), list(COMMANDS), place)
    check(results, set(EXTRAS))
    assert "b2" not in os.listdir(place) and set(before) <= set(os.listdir(place))
    both = results["build random:yolos/tiny -o b2 --target tensorrt-rtx --sm 89"][1]
    assert "'torch, tensorrt_rtx_bindings'" in both and ".[export,rtx]" in both


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_commands_without_one_extra(place, extra):
    if extra not in ("export", "rtx"):
        pytest.importorskip("transformers", reason="needs the 'export' extra")
    lines = [line for line in COMMANDS if extra in COMMANDS[line] or not any(part in line for part in SLOW)]
    # transformers does not load without tokenizers, nor trackers without supervision, nor Ray's data sets without pandas.
    missing = {extra, *{"text": {"export"}, "supervision": {"track"}, "pandas": {"ray"}}.get(extra, ())}
    check(run_without(missing, lines, place), missing)


def test_every_command_is_in_the_matrix():
    names = {c.name for c in app.registered_commands}
    assert names == {line.split()[0] for line in COMMANDS} - {"--version"}


def test_extras_are_those_of_the_package():
    """An extra for another CUDA brings the same modules."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        declared = set(tomllib.load(file)["project"]["optional-dependencies"])
    assert {name.partition("-cu")[0] for name in declared - {"dev", "docs"}} == set(EXTRAS)


def test_no_message_installs_an_unclaimed_name():
    """`detrt` is on no package index: whoever claims the name would get what our users type."""
    pattern = re.compile(r"pip install (?:-\S+ )*['\"]?detrt\b")
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "Dockerfile"]
    assert [(path.name, found) for path in texts for found in pattern.findall(path.read_text("utf-8"))] == []


def test_public_names_without_torch(tmp_path):
    """The README's import line: names that need torch say so, the others load."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    code = (
        "from detrt import Detector, ExportConfig, build, load_source, verify\n"
        "from detrt.errors import MissingPackageError\n"
        "try:\n    from detrt import export_onnx\n"
        "except MissingPackageError as error:\n    print(error)"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "DETRT_BLOCKED": json.dumps(EXTRAS["export"])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'torch'" in done.stdout and install_hint("export") in done.stdout


@pytest.mark.parametrize(("module", "extra"), [("torch", "export"), ("cuda.bindings", "gpu"), ("av", "video")])
def test_module_names_their_extra(module, extra):
    error = missing_package(ModuleNotFoundError(f"No module named {module!r}", name=module), "this")
    assert isinstance(error, MissingPackageError) and error.extra == extra
    assert str(error).endswith(
        f"run: pip install -e '.[{extra}]' in a clone of detrt, or add [{extra}] to how detrt was installed"
    )


def test_unknown_modules_are_a_bug():
    assert missing_package(ModuleNotFoundError("No module named 'detrt.gone'", name="detrt.gone"), "this") is None


def test_no_extra_is_needed_for_onnxruntime():
    assert str(MissingPackageError("onnxruntime", "", "running ONNX files")).endswith("run: pip install onnxruntime")
