"""Rules about the files of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1000
CODE = (".py", ".cpp", ".cu", ".hpp", ".h")


def tracked() -> list[Path]:
    """The tracked files that are there; a source archive without git has all of its files."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def texts(*suffixes: str) -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in tracked() if p.suffix in suffixes}


@cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of a module; several tests look at every file."""
    return list(ast.walk(ast.parse(text)))


def test_no_file_is_too_long():
    long = {name: text.count("\n") for name, text in texts(*CODE).items() if text.count("\n") > LIMIT}
    assert not long, f"more than {LIMIT} lines: {long}"


def test_functions_and_commands_are_short():
    """100 lines a function, 80 a command with its options."""
    long = {}
    for path in sorted((ROOT / "src/detrt").rglob("*.py")):
        name = path.relative_to(ROOT / "src/detrt").as_posix()
        for node in nodes(path.read_text("utf-8")):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > (80 if name.startswith("cli/") else 100):
                    long[name, node.name] = lines
    assert not long, long


def test_a_class_name_is_defined_once():
    """TritonPythonModel is the name that Triton looks for in every model file."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/detrt").rglob("*.py")):
        for node in nodes(path.read_text("utf-8")):
            if isinstance(node, ast.ClassDef) and node.name != "TritonPythonModel":
                found.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_no_grab_bags():
    assert [p.name for p in tracked() if p.stem in ("utils", "util", "helpers", "misc", "common")] == []


def debris(source: str) -> list[int]:
    """Lines of definitions whose docstring holds the seam of two string literals: a line that ends in a lone quote."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in nodes(source) if isinstance(node, documented)]
    return [getattr(node, "lineno", 1) for node in found if re.search(r' "\n\s*"', ast.get_docstring(node, clean=False) or "")]


def test_docstrings_hold_no_debris():
    assert debris('def f():\n    """What it "\n    "does."""\n') == [1]
    assert not debris('def f():\n    """Takes "a" or\n    "b"."""\n')
    wrong = [f"{name}:{line}" for name, text in texts(".py").items() for line in debris(text)]
    assert not wrong, wrong


def silent(source: str) -> list[int]:
    """Lines of handlers that catch everything by leaving the type out, or drop what they caught without a word.

    A handler that names its exceptions, does nothing and says why in a comment on that line is a decision.
    """
    found = []
    for node in nodes(source):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            nothing = all(isinstance(part, ast.Pass) for part in node.body)
            if node.type is None or (broad and nothing):
                found.append(node.lineno)
    return found


def test_no_silent_handlers():
    wrong = [f"{name}:{line}" for name, text in texts(".py").items() for line in silent(text)]
    assert not wrong, wrong


def test_a_pass_says_why():
    wrong = []
    for name, text in texts(".py").items():
        lines = text.splitlines()
        for number, line in enumerate(lines):
            if re.match(r"\s*except .*:\s*(#.*)?$", line) and number + 1 < len(lines):
                after = lines[number + 1]
                if after.strip().startswith("pass") and "#" not in after + line:
                    wrong.append(f"{name}:{number + 2}")
    assert not wrong, f"a handler that does nothing must say why: {wrong}"


def test_handlers_are_found():
    sample = "try:\n x\nexcept:\n y\ntry:\n x\nexcept Exception:\n pass\ntry:\n x\nexcept OSError:\n pass\n"
    assert silent(sample) == [3, 7]


def test_no_paths_of_one_machine():
    """Paths of build machines and homes; the parts are put together so that this file is not found itself."""
    pattern = re.compile(r"(?<![\w./-])/(?:" + "|".join(("work", "opt/wh" + "eels", "home/\\w+", "ro" + "ot")) + r")/")
    wrong = []
    for name, text in texts(".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".cpp", ".hpp", ".cu", ".json").items():
        wrong += [f"{name}:{n}" for n, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    assert not wrong, wrong


def test_every_marker_is_declared():
    declared = set(re.findall(r'^\s*"(\w+): ', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE))
    builtin = {"parametrize", "skip", "skipif", "xfail", "usefixtures", "filterwarnings"}
    used = {name for text in texts(".py").values() for name in re.findall(r"pytest\.mark\.(\w+)", text)}
    assert {"gpu", "network", "slow"} <= declared
    assert used - builtin <= declared, used - builtin - declared


def test_license():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text("utf-8")


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_of_the_documentation():
    """Links between the documents, to their headings, and to files of the repository lead somewhere."""
    wrong = []
    for path in documents():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text("utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            to = path.parent / target if target else path
            if not to.exists() or (anchor and anchor not in anchors(to.read_text("utf-8"))):
                wrong.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert not wrong, wrong


def test_paths_in_the_documentation():
    """A file of the repository that a document names by its path is there."""
    pattern = re.compile(r"(?<![\w/.-])((?:src|tests|benchmarks|training|deploy)/[\w./-]+\.\w+)")
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in documents()
        for name in pattern.findall(path.read_text("utf-8"))
        if not (ROOT / name.rstrip(".")).exists()
    }
    assert not wrong, wrong
