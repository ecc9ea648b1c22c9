"""A number of things in a message is written by `number_of`, which knows the singular: no "1 images"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from detrt.errors import number_of

SOURCE = Path(__file__).resolve().parents[2] / "src" / "detrt"
# A word in the plural directly behind a number, at most one word before it: " images", " class names"; not " images/s".
PLURAL = re.compile(r" (?!bytes|of |as |is |was |has |on )(?:[a-z]+ )?([a-zA-Z]{2,}(?<![siu])s)\b(?!/)")


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (2, "query", "2 queries"),
        (2, "class", "2 classes"),
        (2, "box", "2 boxes"),
        (3, "untraced shape", "3 untraced shapes"),
        (2, "GPU", "2 GPUs"),
    ],
)
def test_a_number_with_its_noun(count, noun, text):
    assert number_of(count, noun) == text


def plurals(text: str) -> list[str]:
    """What stands behind `{len(...)}` in a plural that does not become a singular."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, behind in zip(node.values, node.values[1:], strict=False):
            counted = isinstance(value, ast.FormattedValue) and ast.unparse(value.value).startswith("len(")
            if counted and isinstance(behind, ast.Constant) and (match := PLURAL.match(behind.value)):
                found.append(f"line {node.lineno}: {ast.unparse(value.value)}{match[0]}")
    return found


def test_counts_have_a_singular():
    found = {str(path.relative_to(SOURCE)): plurals(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}, "write number_of(len(...), 'noun')"


def test_plurals_are_found():
    assert plurals('f"{len(names)} images of {x}"') == ["line 1: len(names) images"]
    assert plurals("f\"{len(names)} of them, {len(a)} images/s, {number_of(len(names), 'image')}\"") == []
