"""No branch outside `models/families` depends on the name of a family: read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from detrt.models.families import BY_NAME

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "detrt"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "models" / "families" not in path.parents]
METHODS = {"startswith", "endswith", "removeprefix", "removesuffix", "get", "pop", "partition", "split", "index", "count"}


def names() -> set[str]:
    """What a family is called: in detrt, in transformers, by its classes and processor, files and random models."""
    found: set[str] = set()
    for row in BY_NAME.values():
        found |= {row.name, row.model_type, row.processor.name, row.text_processor, *row.classes, *row.inside, *row.not_read}
        found |= {one.name for one in (*row.formats, *row.random)} | ({row.upstream.name} if row.upstream else set())
    return found - {""}


NAMES = names()
STARTS = tuple(name for name in NAMES if len(name) > 3)


def strings(node: ast.AST | None) -> set[str]:
    """Strings in an expression that branch on a family when they are compared."""
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant)) if node is not None else ()
    return {value for value in constants if isinstance(value, str) and value in NAMES}


def constants(trees: list[ast.Module]) -> dict[str, set[str]]:
    """Name of a constant, or of a member of an enum -> family names that it holds."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for statement in (statement for body in bodies for statement in body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and (held := strings(statement.value)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for name in (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)):
                    found.setdefault(name, set()).update(held)
    return found


def branches(tree: ast.Module, held: dict[str, set[str]]) -> list[tuple[int, str]]:
    """(line, family name) of every comparison, membership, key, subscript, method that looks a string up, and `match`."""

    def named(node: ast.AST | None) -> set[str]:
        if node is None:
            return set()
        used = {
            one.id if isinstance(one, ast.Name) else one.attr
            for one in ast.walk(node)
            if isinstance(one, (ast.Name, ast.Attribute))
        }
        return strings(node).union(*(held[name] for name in used & held.keys()))

    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            parts = list(node.args)
            starts = {
                one.value
                for part in node.args
                for one in ast.walk(part)
                if node.func.attr == "startswith"
                and isinstance(one, ast.Constant)
                and isinstance(one.value, str)
                and len(one.value) > 2
            }
            found += [(node.lineno, start) for start in starts if any(name.startswith(start) for name in STARTS)]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        found += [(node.lineno, name) for part in parts for name in sorted(named(part))]
    return found


def test_no_branch_depends_on_a_family():
    trees = {path: ast.parse(path.read_text("utf-8")) for path in FILES}
    held = constants(list(trees.values()))
    wrong = [f"{path.relative_to(PACKAGE)}:{line}: {name}" for path, tree in trees.items() for line, name in branches(tree, held)]
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
    ],
)
def test_a_planted_branch_is_seen(line):
    tree = ast.parse(line)
    assert branches(tree, constants([tree]))
