"""Branches on names that one file alone may know, read from a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Set

METHODS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "get",
    "pop",
    "partition",
    "split",
    "index",
    "count",
    "of_kind",
}


def strings(node: ast.AST | None, names: Set[str]) -> set[str]:
    """The names among the texts of an expression."""
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant)) if node is not None else ()
    return {value for value in constants if isinstance(value, str) and value in names}


def constants(trees: Iterable[ast.Module], names: Set[str]) -> dict[str, set[str]]:
    """Name of a constant, or of a member of an enum -> the names that it holds."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for statement in (statement for body in bodies for statement in body):
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and (held := strings(statement.value, names)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for name in (one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)):
                    found.setdefault(name, set()).update(held)
    return found


def branches(tree: ast.AST, names: Set[str], held: Mapping[str, set[str]]) -> list[tuple[int, str]]:
    """(line, name) of every comparison, membership, key, subscript, method that looks a text up, and `match`.

    held: what constants hold, as `constants` gives it.
    """
    starts = [name for name in names if len(name) > 3]

    def named(node: ast.AST | None) -> set[str]:
        if node is None:
            return set()
        used = {
            one.id if isinstance(one, ast.Name) else one.attr
            for one in ast.walk(node)
            if isinstance(one, (ast.Name, ast.Attribute))
        }
        return strings(node, names).union(*(held[name] for name in used & held.keys()))

    def started(part: ast.AST) -> set[str]:
        """Texts with which a name starts."""
        texts = {one.value for one in ast.walk(part) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
        return {text for text in texts if len(text) > 2 and any(name.startswith(text) for name in starts)}

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
            if node.func.attr == "startswith":
                found += [(node.lineno, text) for part in parts if part is not None for text in started(part)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
            found += [(node.lineno, one.arg) for one in node.keywords if one.arg in names]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.MatchMapping):
            parts = list(node.keys)
        found += [(node.lineno, name) for part in parts for name in sorted(named(part))]
    return found
