"""The documentation as a site: every page is in the nav of mkdocs.yml, and mkdocs builds it without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def nav() -> list[str]:
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    return re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)


def test_every_page_is_in_the_nav():
    pages = sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))
    assert sorted(nav()) == sorted([*pages, "index.md"])  # index.md is README.md


def test_every_guide_is_in_the_readme():
    linked = re.findall(r"\]\(docs/([^)#]+\.md)", (ROOT / "README.md").read_text("utf-8"))
    assert {page for page in nav() if page.startswith(("guide/", "reference/"))} <= set(linked)


def test_the_api_page_has_every_public_name():
    import detrt

    named = re.findall(r"^::: (\S+)$", (DOCS / "reference" / "api.md").read_text("utf-8"), re.MULTILINE)
    homes = {
        f"{value.__module__}.{value.__qualname__}" for name in detrt.__all__ if not isinstance(value := getattr(detrt, name), str)
    }
    assert sorted(named) == sorted(homes)


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a guide."""
    lines = (DOCS / "guide" / page).read_text("utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ") and "---" not in line
    ]


def test_migrating_names_options_that_exist():
    from detrt.cli import app, load_command

    parameters = [parameter for command in app.registered_commands for parameter in load_command(command.name).params]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    named = {option for _, ours, _ in rows("migrating.md") for option in re.findall(r"(?<![\w-])--[\w-]+", ours)}
    assert len(named) > 20 and sorted(named - known) == []


def test_the_command_line_knows_the_options_of_migrating():
    """Each option of another tool is answered with a hint; those that detrt has under the same name need none."""
    from detrt.cli import app, load_command
    from detrt.cli.spellings import hint

    options = {c.name: [o for p in load_command(c.name).params for o in p.opts] for c in app.registered_commands}
    theirs = {option for cells in rows("migrating.md") for option in re.findall(r"(?<![\w-])--[\w-]+", cells[0])}
    ours = {option for names in options.values() for option in names}
    assert len(theirs) > 30
    assert sorted(o for o in theirs - ours if not hint(o, "build")) == []


def test_troubleshooting_quotes_messages_of_the_code():
    sources = " ".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    sources = re.sub(r"\s+", " ", re.sub(r"\"\s+f?\"", "", sources))
    sources = re.sub(r"\{number_of\([^{}]*'([^']+)'\)\}", r"{} \1s", sources)
    sources += re.sub(r"`([a-z_]+)`", lambda name: f"--{name[1].replace('_', '-')}", sources)  # as the command line spells fields
    quoted = {cell[0].split("`")[1] for cell in rows("troubleshooting.md") if cell[0].startswith("`")}
    parts = {part.strip(" ,;()'") for text in quoted for part in text.split("...")}
    elsewhere = {"FP32 GEMM is not supported"}  # TensorRT's own
    assert len(quoted) > 20 and sorted(part for part in parts - elsewhere if part and part not in sources) == []


@pytest.fixture
def hooks():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", DOCS / "mkdocs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_site(hooks):
    text = "[a](../../src/x.py) [b](../../README.md#install) [c](detect.md#inputs) [d](https://x.y/z) [e](../results/README.md)"
    moved = "a [b](../index.md#install) [c](detect.md#inputs) [d](https://x.y/z) [e](../results/README.md)"
    assert hooks._links(text, "docs/guide/export.md") == moved
    home = "![i](docs/images/demo.jpg) [f](docs/guide/detect.md) [l](LICENSE)"
    assert hooks._links(home, "") == "![i](images/demo.jpg) [f](guide/detect.md) l"


@pytest.mark.slow
def test_mkdocs_builds_it_without_a_warning(tmp_path):
    built = ROOT / "build" / "docs-venv" / "bin" / "python"
    if not built.exists() and any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs the 'docs' extra; make docs installs it")
    python = str(built) if built.exists() else sys.executable
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "reference" / "api.html").read_text("utf-8")
    assert all(f'id="{name}"' in api for name in ("detrt.detector.Detector", "detrt.pipeline.build"))
