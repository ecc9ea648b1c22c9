"""The commands and programs in README.md and docs/ are run as they stand.

Every fence of sh, bash or python is run in a temporary working folder, one for each document, in order, unless an
HTML comment `<!-- not run: REASON -->` stands on the line before it. The network is off.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from missing_packages import BLOCKER

from detrt.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("sh", "bash", "python")
LIMIT_S = 300  # one fence; only a hang takes so long
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run:((?:(?!-->).)*)-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Fence:
    document: str
    line: int
    language: str
    text: str
    reason: str | None  # why it is not run


def fences_of(name: str, text: str) -> list[Fence]:
    found = []
    for match in _FENCE.finditer(text):
        comment = _NOT_RUN.search(text, 0, match.start())
        reason = comment[1].strip() if comment else None
        line = text.count("\n", 0, match.start()) + 1
        found.append(Fence(name, line, match[1], match[2], reason))
    return found


FENCES = [f for d in DOCUMENTS for f in fences_of(d.relative_to(ROOT).as_posix(), d.read_text("utf-8"))]
_MAKE = re.compile(r"^make (\S+)", re.MULTILINE)
TO_RUN: dict[str, list[Fence]] = {}
for _fence in FENCES:
    # make sets up an environment from the network and runs this very suite: its targets are looked up instead.
    if _fence.language in RUN and _fence.reason is None and not _MAKE.search(_fence.text):
        TO_RUN.setdefault(_fence.document, []).append(_fence)


def test_reasons_are_given():
    empty = [f"{f.document}:{f.line}" for f in FENCES if f.reason == ""]
    assert not empty, f"'not run' needs a reason: {empty}"


def test_the_hub_is_marked():
    """A command that needs the network cannot be run by everyone who runs the tests."""
    wrong = [f"{f.document}:{f.line}" for f in FENCES if f.language in RUN and f.reason is None and "hf:" in f.text]
    assert not wrong, f"put '<!-- not run: needs the Hugging Face hub -->' before: {wrong}"


def test_fences_name_a_language():
    """A fence without a language is neither run nor marked; drawings and outputs say text."""
    command = re.compile(r"^\s*(\$ )?(detrt|python|make|pip) ", re.MULTILINE)
    wrong = [f"{f.document}:{f.line}" for f in FENCES if not f.language and command.search(f.text)]
    assert not wrong, f"commands in a fence without a language: {wrong}"


def test_make_targets_are_there():
    named = {name for f in FENCES for name in _MAKE.findall(f.text)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_reader():
    text = "a\n```sh\nx\n```\n<!-- not run: why -->\n```python\ny\n```\n<!-- not run: -->\n\n```sh\nz\n```\n```sh\nw\n```\n"
    found = fences_of("t", text)
    assert [(f.language, f.text, f.reason) for f in found] == [
        ("sh", "x\n", None),
        ("python", "y\n", "why"),
        ("sh", "z\n", ""),
        ("sh", "w\n", None),
    ]
    assert [f.line for f in found] == [2, 6, 11, 14]


def _listed(name: str) -> set[str]:
    """What stands in backticks in a document of the reference."""
    return set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "reference" / name).read_text("utf-8")))


def test_reference_names_every_command():
    from detrt.cli import app

    listed = " ".join(_listed("commands.md"))
    names = [c.name for c in app.registered_commands]
    assert names and [n for n in names if f"detrt {n}" not in listed] == []


def test_reference_names_the_public_api():
    import detrt

    assert sorted(set(detrt.__all__) - _listed("python.md")) == []


def test_reference_names_every_field():
    from dataclasses import fields

    from detrt.bundle import BundleFile, EngineFacts, Provenance
    from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TextSpec

    spec = {f.name for f in fields(ModelSpec)} - {"input", "decode"}
    spec |= {
        f"{part}.{f.name}"
        for part, kind in (("input", InputSpec), ("decode", DecodeSpec), ("text", TextSpec))
        for f in fields(kind)
    }
    rest = {f.name for kind in (Provenance, BundleFile, EngineFacts) for f in fields(kind)}
    assert sorted((spec | rest) - _listed("formats.md")) == []


def environment(folder: Path) -> dict[str, str]:
    """The commands of this Python first; no hub; no configuration of the person who runs the tests."""
    tools = folder / ".tools"
    tools.mkdir(exist_ok=True)
    script = tools / "detrt"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom detrt.cli import main\nsys.exit(main())\n")
    script.chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}


def test_options_of_commands_exist():
    """Also of those that are not run, or seldom."""
    from detrt.cli import app, load_command

    known = {
        command.name: {option for p in load_command(command.name).params for option in (*p.opts, *p.secondary_opts)}
        for command in app.registered_commands
    }
    used = [
        (f"{f.document}:{f.line}", name, option)
        for f in FENCES
        if f.language in RUN
        for name, rest in re.findall(r"^detrt ([\w-]+)([^#\n]*)", f.text.replace("\\\n", " "), re.MULTILINE)
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", rest)
    ]
    assert len(used) > 100 and [(at, name, option) for at, name, option in used if option not in known[name]] == []


QUICK_WITHOUT = ("embedded:phrases", "from detrt import")


def _cases() -> list[object]:
    """The README in every run, but the detector with a prompt, which tests/serve/test_app.py builds and tests/cli/test_prompt.py runs,
    and the Python API, whose functions have tests of their own; all of the README and the other documents, some minutes together, with
    the slow tests."""
    return [("README.md", QUICK_WITHOUT), *(pytest.param(d, (), marks=pytest.mark.slow) for d in TO_RUN)]


# Their readers have what the README's install brings, and no target beside it.
AS_INSTALLED = ("README.md", "docs/guide/getting-started.md", "docs/guide/quickstarts.md")
TARGETS_BESIDE = ("rtx", "trt", "gpu", "openvino", "onnxruntime-rtx")


@pytest.mark.parametrize(("document", "without"), _cases())
def test_commands_of(document, without, tmp_path):
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    shell = environment(tmp_path)
    if document in AS_INSTALLED:
        (tmp_path / "sitecustomize.py").write_text(BLOCKER)
        blocked = [name for extra in TARGETS_BESIDE for name in EXTRAS[extra]]
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        shell |= {"PYTHONPATH": path, "DETRT_BLOCKED": json.dumps(blocked)}
    else:
        pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    work = tmp_path / "work"
    work.mkdir()
    for fence in TO_RUN[document]:
        if any(text in fence.text for text in without):
            continue
        if "embedded:" in fence.text and not (ROOT / "src/detrt/models/embedded/shapes/model.safetensors").is_file():
            pytest.skip(f"{document}:{fence.line} needs the embedded model, which is not in this checkout")
        language = [sys.executable, "-c"] if fence.language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run(
            [*language, fence.text],
            cwd=work,
            env=shell,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{document}:{fence.line}\n{fence.text}\n{done.stdout[-3000:]}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 900
