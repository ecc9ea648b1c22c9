"""Nothing outside `detrt.backends` depends on which backend runs a model: `SessionInfo` says what callers may ask."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "detrt"
OUTSIDE = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if "backends" not in p.parts)
# Facts of `SessionInfo` that were once read from a session by getattr or hasattr.
FACTS = {"note", "path", "facts", "profile", "gpu_name", "images", "sizes", "min_batch", "max_batch", "compute_capability"}
FACTS |= {"model", "of", "selections", "backend", "image_runner"}


def problems(tree: ast.AST) -> list[str]:
    """Tests for concrete session classes, parsed names of backends, and facts that are read by their names."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = [ast.unparse(argument) for argument in node.args]
            if node.func.id in ("isinstance", "issubclass"):
                classes = {word.strip("() ") for word in words[1].replace("|", ",").split(",")}
                if any(name.endswith("Session") and name != "Session" for name in classes):
                    found.append(f"{node.lineno}: {ast.unparse(node)}")
            if node.func.id in ("getattr", "hasattr") and "session" in words[0].lower() and words[1].strip("'") in FACTS:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, node.func.value
            if method in ("startswith", "endswith") and is_name(owner):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = [side for side in sides if isinstance(side, ast.Constant) and isinstance(side.value, str)]
            if texts and any(is_name(side) for side in sides):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def is_name(node: ast.AST) -> bool:
    """`session.backend` or `session.info.name`: the name that is shown to people."""
    text = ast.unparse(node)
    return text.endswith(("session.backend", ".info.name", "info.backend"))


@pytest.mark.parametrize("module", OUTSIDE)
def test_sessions_are_known_by_their_info_alone(module: str) -> None:
    assert problems(ast.parse((PACKAGE / module).read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(session, OnnxSession)",
        "isinstance(model, (int, PromptedSession))",
        "session.info.name.startswith('tensorrt')",
        "side.session.backend.endswith('cpu')",
        "'cuda' in session.info.name",
        "session.info.backend == 'openvino'",
        "getattr(session, 'facts', None)",
    ],
)
def test_the_check_sees(code: str) -> None:
    assert problems(ast.parse(code))


@pytest.mark.parametrize(
    "code", ["isinstance(model, Session)", "session.info.backend not in row.names", "getattr(config, 'backend')"]
)
def test_the_check_lets_pass(code: str) -> None:
    assert not problems(ast.parse(code))
