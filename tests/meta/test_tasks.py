"""No branch outside `tasks/` depends on the name of a task, its outputs or its keys: read from the syntax trees."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest
from branches import branches, constants

from detrt import spec, tasks
from detrt.detections import Detections

PACKAGE = Path(spec.__file__).parent
OUTPUTS = {
    name: {getattr(spec, name)} for name in ("MASK_LOGITS", "ORDER_LOGITS", "SUCCESSOR_LOGITS", "QUADS", "INSTANCE_SEGMENTATION")
}  # what constants hold
NAMES = {name for task in tasks.TASKS for name in (task.field, task.key)}.union(*OUTPUTS.values())
# Keys of COCO's annotations and of transformers' results; the outputs of any model of transformers with masks; a model's own parts.
OTHER_MEANINGS = {
    ("data/coco.py", "segmentation"),
    ("data/datasets.py", "segmentation"),
    ("data/scenes/scene.py", "segmentation"),
    ("evaluation/coco.py", "segmentation"),
    ("models/published.py", "segmentation"),
    ("models/hub.py", "segmentation"),  # the end of names of classes
    ("detections.py", "masks"),  # what people type for them
    ("models/wrapper.py", "mask_logits"),
    ("models/reduce.py", "mask_"),
    ("spec.py", "instance-segmentation"),  # `has_masks` itself
}


def asked(tree: ast.Module) -> set[str]:
    return {name for _, name in branches(tree, NAMES, {**constants([tree], NAMES), **OUTPUTS})}


def test_no_branch_depends_on_a_task():
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("tasks/", "models/families/")):  # a family's row makes the outputs of its own tasks
            found |= {(name, word) for word in asked(ast.parse(path.read_text("utf-8")))}
    assert found - OTHER_MEANINGS == set(), "an attribute or a method of the task's row says it: src/detrt/tasks"
    assert not OTHER_MEANINGS - found, "an exception that nothing uses any more"


@pytest.mark.parametrize(
    "line",
    [
        'if task.field == "masks": pass',
        'if name in ("reading_order", "quads"): pass',
        'x = {"segmentation": 1}[key]',
        'x = row.get("quad")',
        "if MASK_LOGITS in outputs: pass",
        "x = {ORDER_LOGITS: 1}",
        "x = outputs[spec.QUADS]",
        "if spec.task == INSTANCE_SEGMENTATION: pass",
        'match key:\n    case "masks" | "quads": pass',
        'OWN = ("masks", "quads")\nif field in OWN: pass',
        'class Kind(Enum):\n    ORDER = "reading_order"\nif kind is Kind.ORDER: pass',
        "x = dict(masks=1)[field]",
        'def f(field):\n    own = "masks"\n    return field == own',
        'def f(field, own="quads"):\n    return field == own',
        'if any(field == own for own in ("masks", "quads")): pass',
        'if operator.eq(field, "masks"): pass',
        'x = list(filter("masks".__eq__, fields))',
        'if {"masks", "quads"} & {field}: pass',
        'x = dict([("masks", 1)])[field]',
        'x = getattr(found, "reading_order")',
        'if field == "reading" + "_order": pass',
        'if re.match("masks|quads", field): pass',
        'if field.upper() == "MASKS": pass',
        'if field[:5] == "masks": pass',
    ],
)
def test_a_planted_branch_is_seen(line):
    assert asked(ast.parse(line))


def test_rows_are_whole():
    own = {one.name for one in fields(Detections)}
    for attribute in ("field", "key", "title"):
        assert len({getattr(task, attribute) for task in tasks.TASKS}) == len(tasks.TASKS)
    for task in tasks.TASKS:
        assert task.field in own, "a field of the detections"
