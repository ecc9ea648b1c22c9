"""No branch outside `models/families` depends on the name of a family: read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from branches import branches, constants

from detrt.models.families import BY_NAME

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "detrt"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "models" / "families" not in path.parents]


def names() -> set[str]:
    """What a family is called: in detrt, in transformers, by its classes and processor, files and random models."""
    found: set[str] = set()
    for row in BY_NAME.values():
        found |= {row.name, row.model_type, row.processor.name, row.text_processor, *row.classes, *row.inside, *row.not_read}
        found |= {one.name for one in (*row.formats, *row.random)} | ({row.upstream.name} if row.upstream else set())
    return found - {""}


NAMES = names()


def test_no_branch_depends_on_a_family():
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    held = constants(trees.values(), NAMES)
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in branches(tree, NAMES, held)
    ]
    assert wrong == [], "a fact or a function of the family's row says it: src/detrt/models/families"


@pytest.mark.parametrize(
    "line",
    [
        'if family == "rf_detr": pass',
        'if family in ("detr", "yolos"): pass',
        'x = {"deimv2": 1}[family]',
        'x = BY_NAME["eomt"]',
        'x = sizes.get("sam3")',
        'if name.startswith("eomt"): pass',
        'match family:\n    case "d_fine" | "deim": pass',
        'OWN = ("dino", "co_dino")\nif family in OWN: pass',
        'class Kind(Enum):\n    OWL = "owlvit"\nif family == Kind.OWL: pass',
        'if processor != "Owlv2": pass',
        'if row.model_type == "dab-detr": pass',
        'match row:\n    case {"detr": found}: pass',
        "x = dict(yolos=1)[family]",
    ],
)
def test_a_planted_branch_is_seen(line):
    tree = ast.parse(line)
    assert branches(tree, NAMES, constants([tree], NAMES))
