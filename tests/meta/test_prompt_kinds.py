"""No branch outside `text/kinds.py` depends on the kind of a prompt: read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from branches import bindings, branches, constants, texts

from detrt.text import kinds
from detrt.text.tensors import LENGTH_AXES

PACKAGE = Path(kinds.__file__).parents[1]
OWN = {"text/kinds.py", "text/tensors.py"}  # the second names axes
NAMES = set(kinds.KINDS)
CLASSES = {type(kind).__name__ for kind in kinds.KINDS.values()} | {"TokenChunk", "ClassChunk", "ImageChunk"}
READERS = {"getattr", "hasattr", "vars", "asdict", "attrgetter"}
# Words that mean something else: keys of results, requests, checkpoints and data sets, keywords of other tools, and the option `phrases`.
OTHER_MEANINGS = {
    ("detector.py", "phrases"),
    ("cli/detect.py", "phrases"),
    ("cli/describe.py", "classes"),
    ("cli/spellings.py", "classes"),
    ("evaluation/report.py", "classes"),
    ("evaluation/coco.py", "names"),
    ("serve/app.py", "classes"),
    ("serve/openapi.py", "classes"),
    ("serve/request.py", "classes"),
    ("export/prompted.py", "tokens"),
    ("models/foreign.py", "names"),
    ("models/load_options.py", "names"),
    ("models/checkpoints/state_file.py", "classes"),
    ("models/checkpoints/loader.py", "classes"),
    ("models/families/eomt.py", "classes"),
    ("models/families/yolos.py", "classes"),
    ("data/datasets.py", "names"),
    ("backends/prompt_file.py", "phrases"),
    ("data/scenes/phrases.py", "classes"),
    ("data/scenes/scene.py", "classes"),
    ("jobs/ray/job.py", "phrases"),
    ("models/load.py", "phrases"),
}
# What labels a box, models inside detrt, where a name is found instead, and help of an option.
OTHER_CONSTANTS = {"PHRASES", "EMBEDDED", "_ELSEWHERE", "text_threshold"}


def asked(tree: ast.Module, held: dict[str, set[str]]) -> set[str]:
    """Names of kinds that a module branches on, and reads of a kind by another way than `prompt_kind`."""
    found = {name for _, name in branches(tree, NAMES, held)} | {text for _, text in texts(tree) if text in CLASSES}
    made = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}  # `ImageChunk(...)` makes one
    bound = [pair for node in ast.walk(tree) for pair in bindings(node)]
    aliases = {"text"} | {ast.unparse(target) for target, value in bound if ast.unparse(value).split(".")[-1] == "text"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "kind" and _last(node.value) in aliases:
            found.add("text.kind")
        if isinstance(node, ast.Attribute) and node.attr == "name" and ast.unparse(node.value).endswith("prompt_kind"):
            found.add("prompt_kind.name")
        if isinstance(node, ast.Call) and _last(node.func) in READERS and node.args:
            given = {text for _, text in texts(node)}
            if "text.kind" in given or (_last(node.args[0]) in aliases and (given == {"kind"} or len(node.args) == 1)):
                found.add("text.kind")
        if isinstance(node, ast.Compare) and any(_last(one) == "KINDS" for one in ast.walk(node) if isinstance(one, ast.expr)):
            found.add("KINDS")
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in CLASSES and id(node) not in made:
            found.add(name)
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("text.kinds"):
            found |= {alias.name for alias in node.names if alias.name in CLASSES - {"ImageChunk"} or alias.asname}
    return found


def _last(node: ast.AST) -> str:
    return ast.unparse(node).split(".")[-1]


def test_no_branch_depends_on_a_kind_of_prompt():
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).as_posix() not in OWN]
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in modules}
    # A family's row says its kind, as data.
    held = constants((tree for name, tree in trees.items() if not name.startswith("models/families/")), NAMES)
    held = {name: values for name, values in held.items() if name not in OTHER_CONSTANTS}
    found = {(name, word) for name, tree in trees.items() for word in asked(tree, held)}
    # What a file of a prompt says of its kind.
    assert found - OTHER_MEANINGS == {("backends/prompt_file.py", "text.kind")}, "ask an attribute of `text.prompt_kind`"
    assert not OTHER_MEANINGS - found, "an exception that nothing uses any more"


@pytest.mark.parametrize(
    "line",
    [
        'if spec.text.kind == "tokens": pass',
        'if "phrases" != text.kind: pass',
        'if family.text in ("classes", "names"): pass',
        'x = {"tokens": 1, "names": 2}[family.text]',
        "x = dict(classes=1).get(family.text)",
        'x = sizes.get("names")',
        "if text.kind in KNOWN: pass",
        "x = table[spec.text.kind]",
        'match kind:\n    case "phrases" | "names": pass',
        'match row:\n    case {"tokens": found}: pass',
        'OWN = ("classes", "names")\nif kind in OWN: pass',
        'class Kind(Enum):\n    OWL = "names"\nif kind is Kind.OWL: pass',
        "if isinstance(text.prompt_kind, PhrasePrompts): pass",
        "if type(kind) is kinds.NamePrompts: pass",
        "match chunk:\n    case TokenChunk(): pass",
        "rows = [one for one in chunks if isinstance(one, ImageChunk)]",
        "from ..text.kinds import TokenPrompts",
        "from ..text.kinds import TokenChunk as Other",
        'if text.prompt_kind.name.startswith("tok"): pass',
        'def f(text):\n    own = "tokens"\n    return own == text.prompt_kind.x',
        'def f(kind, own="phrases"):\n    return kind == own',
        'if any(kind == own for own in ("tokens", "names")): pass',
        'if operator.eq(kind, "tokens"): pass',
        'x = list(filter("tokens".__eq__, kinds))',
        'if {"tokens", "names"} & {kind}: pass',
        'x = dict([("tokens", 1)])[kind]',
        'if kind == "to" + "kens": pass',
        'if re.match("tokens|names", kind): pass',
        "x = vars(text)[key]",
        'x = getattr(text, "kind")',
        'x = operator.attrgetter("text.kind")(spec)',
        'if type(text.prompt_kind).__name__ == "TokenPrompts": pass',
        "kind = spec.text\nx = kind.kind in KNOWN",
        "x = text.prompt_kind is KINDS[own]",
        "x = getattr(self, text.prompt_kind.name)",
    ],
)
def test_a_planted_branch_is_seen(line):
    tree = ast.parse(line)
    assert asked(tree, constants([tree], NAMES))


def test_every_kind_says_what_it_is():
    for name, kind in kinds.KINDS.items():
        assert kind.name == name and kind.encoder_outputs and kind.counted in LENGTH_AXES
        assert kind.reads_ids != bool(kind.encodes), "a text encoder by itself runs over something"
        for method in ("inputs", "describe", "lengths", "feeds", "example_feeds"):
            assert getattr(type(kind), method) is not getattr(kinds.PromptKind, method)
