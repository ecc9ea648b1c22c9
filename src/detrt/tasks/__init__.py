"""The tasks beside boxes, one file each; a row says what is known of one, see `base.Task`.

A task joins detrt with its file, its line here, its facts in `DecodeSpec` and its field in `Detections`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PRED_BOXES, SCORES
from .base import Task
from .masks import InstanceMasks
from .quads import Quadrilaterals
from .reading_order import ReadingOrder

if TYPE_CHECKING:
    from ..spec import ModelSpec

TASKS: tuple[Task, ...] = (InstanceMasks(), ReadingOrder(), Quadrilaterals())  # in the order of the outputs of graphs


def tasks_of(spec: ModelSpec) -> tuple[Task, ...]:
    """The tasks of a model."""
    return tuple(task for task in TASKS if task.outputs(spec))


def output_names(spec: ModelSpec) -> list[str]:
    """Names of the outputs of a detector, in the order of its graph."""
    names = [BOXES, SCORES, LABELS, NUM_DETECTIONS] if spec.decode.in_graph else [LOGITS, PRED_BOXES]
    return names + [*extra_outputs(spec)]


def extra_outputs(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Outputs after boxes and scores: names, and the sides of each after the batch, without those of `Task.map_sides`."""
    return {name: sides for task in TASKS for name, sides in task.outputs(spec).items()}
