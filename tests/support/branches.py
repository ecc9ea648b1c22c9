"""Branches on names that one file alone may know, and mentions of them, read from a syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Set

METHODS = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "get",
    "setdefault",
    "pop",
    "partition",
    "split",
    "index",
    "find",
    "count",
    "of_kind",
    *("eq", "ne", "contains", "itemgetter", "methodcaller"),  # of `operator`
    *("match", "fullmatch", "search", "fnmatch", "fnmatchcase"),
    *("isdisjoint", "issubset", "issuperset", "intersection", "difference", "symmetric_difference"),
    *("__eq__", "__ne__", "__contains__", "__getitem__"),
}
FUNCTIONS = {"getattr", "hasattr", "dict", "filter"}
_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SETS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def folded(node: ast.AST) -> str | None:
    """The text of a constant, or of constants that are put together with +, * or `join`; None: no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = folded(node.left), folded(node.right)
        return None if left is None or right is None else left + right
    if (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and isinstance(count := getattr(node.right, "value", None), int)
    ):
        part = folded(node.left)
        return None if part is None else part * count
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.keywords:
        between = folded(node.func.value)
        if between is not None and node.func.attr in ("lower", "upper", "casefold", "strip") and not node.args:
            return between
        if between is not None and node.func.attr == "join" and len(node.args) == 1 and hasattr(node.args[0], "elts"):
            parts = [folded(one) for one in node.args[0].elts]
            return None if None in parts else between.join(parts)
    return None


def texts(node: ast.AST | None) -> Iterator[tuple[int, str]]:
    """(line, text) of what an expression, or a module without its docstrings, spells."""
    docstrings = {id(one.value) for one in ast.walk(node) if isinstance(one, ast.Expr)} if node is not None else set()
    for one in ast.walk(node) if node is not None else ():
        if id(one) not in docstrings and (text := folded(one)) is not None:
            yield one.lineno, text


def words(text: str) -> set[str]:
    """A text and, of one without spaces, such as a pattern, its words; in lower case."""
    found = {text.lower()}
    return found if re.search(r"\s", text) else found | set(re.split(r"[^\w-]+", text.lower()))


def strings(node: ast.AST | None, names: Set[str]) -> set[str]:
    """The names among the texts of an expression, in any case."""
    spelled = {word for _, text in texts(node) for word in words(text)}
    return {name for name in names if name.lower() in spelled}


def mentions(tree: ast.Module, names: Set[str]) -> list[tuple[int, str]]:
    """(line, name) of every text that is a name, or a pattern with one, of keywords, and of what is defined under a name. Docstrings and
    sentences may say one."""
    lower = {name.lower(): name for name in names}
    found = [(line, lower[word]) for line, text in texts(tree) for word in sorted(words(text) & lower.keys())]
    for node in ast.walk(tree):
        given = node.arg if isinstance(node, ast.keyword) else node.name if isinstance(node, _DEFINED) else None
        found += [(node.lineno, given)] if given in names else []
    return found


def identifiers(tree: ast.Module, names: Set[str]) -> list[tuple[int, str]]:
    """(line, name) of every variable, attribute and part of an import that is one, or the class of one: `NameForObjectDetection`."""
    found = []
    for node in ast.walk(tree):
        used = {getattr(node, "id", None), getattr(node, "attr", None)}
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = [part for alias in node.names for part in alias.name.split(".")]
            used = {*imported, *(getattr(node, "module", None) or "").split(".")}
        used |= {re.sub(r"(?:For[A-Z]\w*|Config|Model|ImageProcessor\w*)$", "", name) for name in used if name}
        found += [(node.lineno, name) for name in sorted(used & names)]
    return found


def bindings(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """(target, value) of what a statement or an expression gives a name."""
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets]
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        return [(node.target, node.value)]
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return [(node.target, node.iter)]
    if isinstance(node, ast.arguments):
        plain = [*node.posonlyargs, *node.args]
        pairs = [
            *zip(plain[len(plain) - len(node.defaults) :], node.defaults, strict=True),
            *zip(node.kwonlyargs, node.kw_defaults, strict=True),
        ]
        return [(argument, value) for argument, value in pairs if value is not None]
    return []


def _held(nodes: Iterable[ast.AST], names: Set[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for node in nodes:
        for target, value in bindings(node):
            if held := strings(value, names):
                for one in ast.walk(target):
                    name = getattr(one, "id", None) or getattr(one, "attr", None) or getattr(one, "arg", None)
                    if name:
                        found.setdefault(name, set()).update(held)
    return found


def constants(trees: Iterable[ast.Module], names: Set[str]) -> dict[str, set[str]]:
    """Name of a constant, or of a member of an enum -> the names that it holds."""
    found: dict[str, set[str]] = {}
    for tree in trees:
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for name, held in _held((statement for body in bodies for statement in body), names).items():
            found.setdefault(name, set()).update(held)
    return found


def branches(tree: ast.AST, names: Set[str], held: Mapping[str, set[str]]) -> list[tuple[int, str]]:
    """(line, name) of every comparison, membership, key, subscript, function that looks a text up, and `match`.

    held: what constants hold, as `constants` gives it; what is bound inside a function is added to it there.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    outside = [node for node in ast.walk(tree) if id(node) not in inside]
    found = _branches(outside, names, {**held, **_held(outside, names)})
    for function in functions:
        nodes = list(ast.walk(function))
        found += _branches(nodes, names, {**held, **_held(nodes, names)})
    return list(dict.fromkeys(found))


def _branches(nodes: Iterable[ast.AST], names: Set[str], held: Mapping[str, set[str]]) -> list[tuple[int, str]]:
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
        return {text for _, text in texts(part) if len(text) > 2 and any(name.startswith(text) for name in starts)}

    found: list[tuple[int, str]] = []
    for node in nodes:
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            if any(isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) for part in parts):
                found += [(node.lineno, text) for part in parts if part is not None for text in started(part)]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, SETS):
            parts = [side for side in (node.left, node.right) if isinstance(side, (ast.Set, ast.SetComp, ast.Call))]
        elif isinstance(node, ast.Dict):
            parts = list(node.keys)
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            parts = [*node.args, node.func.value] if node.func.attr.startswith("__") else list(node.args)
            if node.func.attr == "startswith":
                found += [(node.lineno, text) for part in parts if part is not None for text in started(part)]
        elif isinstance(node, ast.Attribute) and node.attr in METHODS and node.attr.startswith("__"):
            parts = [node.value]  # handed on, as to `filter`
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in METHODS | FUNCTIONS:
            parts = list(node.args)
            if node.func.id == "dict":
                found += [(node.lineno, one.arg) for one in node.keywords if one.arg in names]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.MatchMapping):
            parts = list(node.keys)
        found += [(node.lineno, name) for part in parts for name in sorted(named(part))]
    return found
