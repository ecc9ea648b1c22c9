"""Words of docs/reference/glossary.md: the worst private ones stay out of code, messages and documents."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Private word -> the standard one.
BANNED = {
    r"whole[ -]numbers?\b": "integer",
    r"images a run\b": "batch size",
    r"images a second\b": "images per second",
    r"for want of\b": "out of; because there are too few",
    r"text towers?\b": "text encoder",
    r"with commas\b": "comma-separated",
    r"gone on (from|with)\b": "resumed",
    r"prove that it arrived": "verify that it matches PyTorch",
    r"\bone a line\b": "one per line",
    r"takes offence": "rejects",
    r"keys do not tell|does not tell\b": "cannot be inferred",
    r"where (the|two) graphs part\b": "first node that differs",
    r"gives what its image gives alone": "batch invariance",
    r"waits for company": "max queue delay",
    r"\bpictures?\b": "image",
    r"\bback[- ]ends?\b": "backend",
    r"(?-i:\bSMs? [\d|]|\b(for|is|has) SM\b)": "compute capability",
    r"\bdoor to\b": "the only module that imports",
    r"\banew\b": "again",
    r"\bwork(ed|s) out\b": "computed",
    r"\btold apart\b": "distinguished",
    r"\b(go|goes|went) wrong\b": "fail",
    r"\bfirst-level cache\b": "L1 cache",
    r"\bmatrix products?\b|\bproducts and convolutions\b": "matmul",
    r"\bwhole or not at all\b": "atomic",
    r"\bby turns\b": "interleaved",
    r"\b(bytes|rows|pixels|points|boxes|pass|line|one (row|line|number)) an? (level|layer|row|image|batch|query|side|token)\b": "per",
}
# Names that still have such a word: path -> patterns. Nothing else may be added; the second test keeps the list short.
ALLOWED: dict[str, tuple[str, ...]] = {
    "src/detrt/backends/tensorrt/bindings.py": (r"\bdoor to\b",),
    "src/detrt/backends/tensorrt/build.py": (r"\bwhole or not at all\b",),
    "src/detrt/backends/tensorrt/config.py": (r"\bmatrix products?\b|\bproducts and convolutions\b",),
    "src/detrt/backends/tensorrt/worker.py": (r"whole[ -]numbers?\b", r"\banew\b"),
}
SUFFIXES = (".py", ".md", ".cpp", ".hpp", ".h", ".cu", ".html", ".js")
ITSELF = ("docs/reference/glossary.md", "tests/meta/test_words.py")


def texts() -> dict[str, str]:
    try:
        command = ["git", "ls-files", "-z", "src", "cpp", "docs", "README.md", "benchmarks", "training"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = [n for n in listed.split("\0") if n.endswith(SUFFIXES) and n not in ITSELF and (ROOT / n).is_file()]
    return {name: (ROOT / name).read_text("utf-8") for name in names}


def found(text: str) -> list[str]:
    """The banned patterns in a text. Line breaks, comment signs and quotes between two words do not hide them."""
    flat = re.sub(r"[\s\"'#/*]+", " ", text)
    return [pattern for pattern in BANNED if re.search(pattern, flat, re.IGNORECASE)]


def test_private_words_stay_out():
    wrong = [
        f"{name}: {pattern!r}; the word is {BANNED[pattern]!r}"
        for name, text in texts().items()
        for pattern in found(text)
        if pattern not in ALLOWED.get(name, ())
    ]
    assert not wrong, "\n".join(wrong)


def test_allowances_are_needed():
    has = {name: found(text) for name, text in texts().items() if name in ALLOWED}
    idle = {name: [p for p in patterns if p not in has.get(name, ())] for name, patterns in ALLOWED.items()}
    assert not {name: patterns for name, patterns in idle.items() if patterns}


def test_words_are_found():
    assert set(found('must be a "whole\n    # number" with\ncommas')) == {r"whole[ -]numbers?\b", r"with commas\b"}
