"""No branch outside `models/families` depends on the name of a family: read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from branches import branches, constants, identifiers, mentions

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


# Hints for names of other libraries, and the layout of an ONNX file that the package rfdetr writes.
OTHER_MEANINGS = {("__init__.py", "rtdetr"), ("__init__.py", "detr"), ("graph/layouts.py", "rfdetr")}


def asked(tree: ast.Module, held: dict[str, set[str]], *, layers: bool = False) -> list[tuple[int, str]]:
    """Names of families that a module says, if only in a pattern; layers: of torch, which are named like families, and may not branch."""
    if layers:
        return branches(tree, NAMES, held)
    return branches(tree, NAMES, {}) + mentions(tree, NAMES) + identifiers(tree, NAMES)


def test_no_branch_depends_on_a_family():
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in FILES}
    held = constants(trees.values(), NAMES)
    found = {
        (name, word.lower())
        for name, tree in trees.items()
        for _, word in asked(tree, held, layers=name.startswith("models/layers/"))
    }
    assert found - OTHER_MEANINGS == set(), "a fact or a function of the family's row says it: src/detrt/models/families"
    assert not OTHER_MEANINGS - found, "an exception that nothing uses any more"


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
        'def f(family):\n    own = "rf_detr"\n    return family == own',
        'def f(family, own="rf_detr"):\n    return family == own',
        'def f(family, *, own="rf_detr"):\n    return own is family',
        'if any(family == own for own in ("detr", "eomt")): pass',
        'def f(family):\n    for own in ("detr", "eomt"):\n        if own == family: pass',
        'class A:\n    def f(self, family):\n        self.own = "rf_detr"\n        return family == self.own',
        'if (own := "rf_detr") and own == family: pass',
        'if operator.eq(family, "rf_detr"): pass',
        'if "rf_detr".__eq__(family): pass',
        'x = list(filter("rf_detr".__eq__, families))',
        'if {"rf_detr", "detr"} & {family}: pass',
        'if {family}.issubset({"rf_detr"}): pass',
        'if re.fullmatch("rf_detr|detr", family): pass',
        'if fnmatch(family, "rf_detr*"): pass',
        'x = dict([("rf_detr", 1)])[family]',
        'x = getattr(handlers, "rf_detr")',
        'if family == "rf_" + "detr": pass',
        'if family == "_".join(("rf", "detr")): pass',
        'if family.upper() == "RF_DETR": pass',
        'if family == "RF_DETR".lower(): pass',
        'if family[:3] == "rf_": pass',
        'x = table.setdefault("rf_detr", 1)',
        'x = lambda family, own="rf_detr": family == own',
        'match family:\n    case own if own == "eomt": pass',
    ],
)
@pytest.mark.parametrize("layers", [False, True])
def test_a_planted_branch_is_seen(line, layers):
    tree = ast.parse(line)
    assert asked(tree, constants([tree], NAMES), layers=layers)


@pytest.mark.parametrize(
    "line",
    [
        'x = [("rf_detr", 1)]',
        "call(rf_detr=1)",
        "def eomt(): pass",
        "class Handlers:\n    def d_fine(self): pass\ngetattr(Handlers(), family)()",
        "from .families.rf_detr import settings",
        "from .families import eomt",
        "import detrt.models.families.dino",
        "isinstance(module, DetrForObjectDetection)",
        "isinstance(module, transformers.RfDetrForObjectDetection)",
        'x = f"{y}|rf_detr"',
    ],
)
def test_a_planted_mention_is_seen(line):
    """Outside of layers no name is said at all."""
    assert asked(ast.parse(line), {})


def test_sentences_may_name_a_family():
    assert not asked(ast.parse('"""rf_detr"""\nraise ValueError("DETR and rf_detr take one size")'), {})
