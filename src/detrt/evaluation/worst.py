"""Images of an evaluation that are worth a look: those with most errors, and those on which another model is better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.images import load_image
from ..detections import Detections
from .coco import EvalReport
from .curves import Difference
from .results import Row

SHOWN_IMAGES = 8


@dataclass(frozen=True, slots=True)
class ShownImage:
    """pixels: (H, W, 3) uint8. sides: what is drawn on it, next to each other: name and detections."""

    pixels: NDArray[np.uint8]
    sides: Sequence[tuple[str, Detections]]
    caption: str


def worst_images(report: EvalReport, most: int = SHOWN_IMAGES) -> Iterator[ShownImage]:
    """Images with most objects that were missed, taken for others or found where nothing is, at the threshold of best F1 of each class."""
    if report.dataset is None or report.confusion is None or not report.paths:
        return
    known, found = _by_image(report, report.dataset.annotations), _by_image(report, report.rows)
    counts = report.confusion.images
    for key in sorted(counts, key=lambda key: -counts[key][1])[:most]:
        right, wrong = counts[key]
        if not wrong:
            return
        caption = f"{report.paths[key].name}: {right} right, {wrong} wrong or missed"
        yield _shown(report, key, {"annotated": known[key], "found": _kept(found[key], report)}, caption)


def lost_images(report: EvalReport, other: EvalReport, difference: Difference, most: int = SHOWN_IMAGES) -> Iterator[ShownImage]:
    """Images whose AP is lowest beside that of another model, the worst first; each model at its own thresholds of best F1."""
    if report.dataset is None or not report.paths:
        return
    keys = {entry["file_name"]: entry["id"] for entry in report.dataset.images}
    models = {"the other": other, "this one": report}
    found = {name: _by_image(report, one.rows) for name, one in models.items()}
    known = _by_image(report, report.dataset.annotations)
    for name, value in islice(((name, value) for name, value in difference.images.items() if value < 0), most):
        key = keys[name]
        sides = {side: _kept(rows[key], models[side]) for side, rows in found.items()}
        yield _shown(report, key, {"annotated": known[key], **sides}, f"{report.paths[key].name}: AP {value:+.3f}")


def _by_image(report: EvalReport, rows: Sequence[Row]) -> dict[Any, list[Row]]:
    assert report.dataset is not None
    found: dict[Any, list[Row]] = {entry["id"]: [] for entry in report.dataset.images}
    for row in rows:
        found[row["image_id"]].append(row)
    return found


def _kept(rows: Sequence[Row], report: EvalReport) -> list[Row]:
    return [row for row in rows if row["score"] > report.best.get(report.names[row["category_id"]], 0.5)]


def _shown(report: EvalReport, key: Any, sides: Mapping[str, Sequence[Row]], caption: str) -> ShownImage:
    pixels = load_image(report.paths[key])
    numbers = list(report.names)  # a category has one colour on all images
    drawn = []
    for name, rows in sides.items():
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (row["bbox"] for row in rows)]
        scores = np.array([row.get("score", 1.0) for row in rows])
        ids = np.array([numbers.index(row["category_id"]) for row in rows], int)
        labels = tuple(report.names[row["category_id"]] for row in rows)
        size_hw = (pixels.shape[0], pixels.shape[1])
        drawn.append((name, Detections(np.array(boxes).reshape(-1, 4), scores, ids, labels, size_hw)))
    return ShownImage(pixels, drawn, caption)
