"""What an evaluation says beside average precision: curves and thresholds of classes, confusions, and whether two models differ.

Detections count as found at an IoU of 0.5, matched by pycocotools: at most 100 of an image, of objects that are no crowds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import files
from ..data.coco import CocoDataset
from ..detections import box_iou
from ..errors import OutputError
from .results import Row

RECALLS = np.linspace(0, 1, 101)  # at which pycocotools reads a curve
NOTHING = "(nothing)"


@dataclass(frozen=True, slots=True, eq=False)
class ClassCurve:
    """Precision and recall of a class, by the lowest score that is kept.

    scores: (n,) descending, each once. precision, recall: (n,) of the detections with at least that score. objects: annotated ones.
    """

    scores: NDArray[np.float64]
    precision: NDArray[np.float64]
    recall: NDArray[np.float64]
    objects: int

    @classmethod
    def of(cls, scores: NDArray, found: NDArray[np.bool_], objects: int) -> ClassCurve:
        """scores, found: of each detection, and whether it is an object."""
        order = np.argsort(-scores, kind="stable")
        scores, right = scores[order], np.cumsum(found[order])
        last = np.flatnonzero(np.append(scores[1:] != scores[:-1], True)) if len(scores) else np.zeros(0, int)
        return cls(scores[last], right[last] / (last + 1), right[last] / max(objects, 1), objects)

    @property
    def f1(self) -> NDArray[np.float64]:
        """(n,) harmonic mean of precision and recall; 0 where both are."""
        total = self.precision + self.recall
        return np.divide(2 * self.precision * self.recall, total, out=np.zeros_like(total), where=total > 0)

    def best(self, *, precision: float | None = None, recall: float | None = None) -> int | None:
        """The index of the best F1; or of the best recall of those with at least this precision, or of the best precision of those with at
        least this recall. The higher score of equal ones; None where there is none."""
        value, wanted = self.f1, np.ones(len(self.scores), bool)
        if precision is not None:
            value, wanted = self.recall, self.precision >= precision
        elif recall is not None:
            value, wanted = self.precision, self.recall >= recall
        if not wanted.any() or not self.recall[wanted].max() > 0:
            return None
        return int(np.argmax(np.where(wanted, value, -1)))

    def threshold(self, index: int) -> float:
        """A threshold that keeps scores down to that of the index: half way to the next lower one, since scores above it are kept."""
        lower = self.scores[index + 1] if index + 1 < len(self.scores) else 0.0
        return float((self.scores[index] + lower) / 2)


def curves_of(evaluation: Any, names: Mapping[Any, str]) -> dict[str, ClassCurve]:
    """Name -> curve of a category, of a COCOeval that was evaluated; those without objects are left out."""
    found: dict[str, ClassCurve] = {}
    for key, name in names.items():
        parts = _matches(evaluation, key)
        objects = sum(part["objects"] for part in parts)
        if objects:
            scores = np.concatenate([part["scores"] for part in parts])
            found[name] = ClassCurve.of(scores, np.concatenate([part["found"][0] for part in parts]), objects)
    return found


def _matches(evaluation: Any, category: Any) -> list[dict[str, Any]]:
    """What was matched in each image for a category: image (index), scores (d,), found (thresholds, d), objects. Ignored ones are left out."""
    params = evaluation.params
    first = params.catIds.index(category) * len(params.areaRng) * len(params.imgIds)
    parts = []
    for index in range(len(params.imgIds)):
        one = evaluation.evalImgs[first + index]
        if one is None:
            continue
        counted = ~np.asarray(one["dtIgnore"], bool)
        kept = counted[0]
        matched = (np.asarray(one["dtMatches"]) > 0).reshape(len(counted), -1)
        parts.append(
            {
                "image": index,
                "scores": np.asarray(one["dtScores"], float)[kept],
                "found": matched[:, kept] & counted[:, kept],
                "objects": int((np.asarray(one["gtIgnore"]) == 0).sum()),
            }
        )
    return parts


def best_thresholds(
    curves: Mapping[str, ClassCurve], *, precision: float | None = None, recall: float | None = None
) -> dict[str, float]:
    """The threshold of each class, see `ClassCurve.best`; classes without one are left out."""
    return {
        name: curve.threshold(index)
        for name, curve in curves.items()
        if (index := curve.best(precision=precision, recall=recall)) is not None
    }


def write_thresholds(
    curves: Mapping[str, ClassCurve], path: Path, *, precision: float | None = None, recall: float | None = None
) -> dict[str, float]:
    """Write the threshold of each class to a JSON file, `{"person": 0.41}`; see `ClassCurve.best`. Classes without one are left out.

    Raises:
        OutputError: no class has one, a score is no number from 0 to 1, or the file cannot be written.
    """
    found = best_thresholds(curves, precision=precision, recall=recall)
    if not found:
        raise OutputError(f"no class reaches what was asked of its threshold, so '{path}' would be empty; ask for less")
    if wrong := [value for value in found.values() if not 0 <= value <= 1]:
        raise OutputError(
            f"thresholds are from 0 to 1, and scores of these results lead to {wrong[0]:g}; bring the scores to 0..1"
        )
    rounded = {name: round(value, 7) for name, value in found.items()}  # half way between scores of six digits
    files.write_text(path, json.dumps(rounded, indent=1, ensure_ascii=False) + "\n")
    return rounded


@dataclass(frozen=True, slots=True)
class Confusion:
    """names: of the classes, the last one for nothing. counts: (n + 1, n + 1): objects of the row's class that were found as the
    column's; the last row has detections where nothing is, the last column objects that were missed. images: by id, (right, wrong):
    objects that were found as what they are, and all else that is counted."""

    names: tuple[str, ...]
    counts: NDArray[np.int64]
    images: Mapping[Any, tuple[int, int]]


def confusion_of(
    dataset: CocoDataset,
    rows: Sequence[Row],
    thresholds: Mapping[str, float],
    *,
    threshold: float = 0.5,
    iou: float = 0.5,
    names: Mapping[Any, str] | None = None,
) -> Confusion:
    """Which classes are taken for which. Boxes are paired above an IoU: of the same class first, then by their IoU.

    thresholds: by name, instead of `threshold`; scores above it count. names: of category ids; None: their own. Crowds and what is
    difficult are no objects, and a detection of their class that lies in one by more than `iou` of its area is none either.
    """
    names = names or dataset.names
    index = {key: i for i, key in enumerate(names)}
    size = len(names)
    counts = np.zeros((size + 1, size + 1), np.int64)
    found: dict[Any, list[Row]] = {}
    known: dict[Any, list[Row]] = {}
    images: dict[Any, tuple[int, int]] = {}
    before = 0
    for row in rows:
        if row["score"] > thresholds.get(names[row["category_id"]], threshold):
            found.setdefault(row["image_id"], []).append(row)
    crowds: dict[tuple[Any, Any], list[Row]] = {}
    for row in dataset.annotations:
        if row["iscrowd"]:
            crowds.setdefault((row["image_id"], row["category_id"]), []).append(row)
        else:
            known.setdefault(row["image_id"], []).append(row)
    for image in dataset.images:
        mine, theirs = known.get(image["id"], []), found.get(image["id"], [])
        true, given = ([index[row["category_id"]] for row in some] for some in (mine, theirs))
        overlaps = box_iou(_corners(mine), _corners(theirs))
        pairs = np.argwhere(overlaps > iou).tolist()
        pairs.sort(key=lambda pair: (true[pair[0]] != given[pair[1]], -overlaps[pair[0], pair[1]]))
        taken_true, taken_given, ignored = set(), set(), 0
        for i, j in pairs:
            if i not in taken_true and j not in taken_given:
                taken_true.add(i)
                taken_given.add(j)
                counts[true[i], given[j]] += 1
        for i, one in enumerate(true):
            counts[one, size] += i not in taken_true
        for j, one in enumerate(given):
            if j in taken_given:
                continue
            around = _corners(crowds.get((image["id"], theirs[j]["category_id"]), []))
            if (_part_in(_corners([theirs[j]])[0], around) > iou).any():
                ignored += 1
            else:
                counts[size, one] += 1
        right = int(counts.trace()) - before
        before += right
        images[image["id"]] = right, len(true) + len(given) - ignored - len(taken_true) - right
    return Confusion((*names.values(), NOTHING), counts, images)


def _corners(rows: Sequence[Row]) -> NDArray[np.float64]:
    boxes = np.array([row["bbox"] for row in rows], float).reshape(-1, 4)
    return np.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])


def _part_in(box: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """The part of the area of a box, (4,), that lies in each of (n, 4) others."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    area: NDArray[np.float64] = np.clip(sides, 0, None).prod(1) / max((box[2:] - box[:2]).prod(), 1e-12)
    return area


@dataclass(frozen=True, slots=True)
class Difference:
    """AP of two models on the same images. low, high: of the 95 % interval of the difference, second less first, by `samples` draws of
    images with replacement, the same for both. images: file name -> difference of the AP on that image alone, the worst first."""

    first: float
    second: float
    low: float
    high: float
    samples: int
    images: Mapping[str, float]

    @property
    def difference(self) -> float:
        return self.second - self.first


def compare(first: Any, second: Any, dataset: CocoDataset, *, samples: int = 1000, seed: int = 0) -> Difference:
    """Whether two models differ, from their evaluated COCOevals of one data set: a paired bootstrap over images."""
    sides = [_Resampled(first), _Resampled(second)]
    count = len(first.params.imgIds)
    rng = np.random.default_rng(seed)
    once = np.ones(count, np.int64)
    drawn = (np.bincount(rng.integers(0, count, count), minlength=count) for _ in range(samples))
    differences = [sides[1].ap(weights) - sides[0].ap(weights) for weights in drawn]
    low, high = np.nanpercentile(differences, [2.5, 97.5])
    names = {entry["id"]: entry["file_name"] for entry in dataset.images}
    alone = {
        names[key]: sides[1].ap(row) - sides[0].ap(row)
        for key, row in zip(first.params.imgIds, np.eye(count, dtype=np.int64), strict=True)
    }
    worst = sorted((item for item in alone.items() if not np.isnan(item[1])), key=lambda item: item[1])
    return Difference(sides[0].ap(once), sides[1].ap(once), float(low), float(high), samples, dict(worst))


class _Resampled:
    """The AP of pycocotools for images that are taken several times, or not."""

    def __init__(self, evaluation: Any) -> None:
        self._classes = []
        for key in evaluation.params.catIds:
            parts = _matches(evaluation, key)
            if not any(part["objects"] for part in parts):
                continue
            scores = np.concatenate([part["scores"] for part in parts])
            order = np.argsort(-scores, kind="stable")
            images = np.repeat([part["image"] for part in parts], [len(part["scores"]) for part in parts])[order]
            objects = np.zeros(len(evaluation.params.imgIds), np.int64)
            objects[[part["image"] for part in parts]] = [part["objects"] for part in parts]
            self._classes.append((images, np.concatenate([part["found"] for part in parts], 1)[:, order], objects))

    def ap(self, weights: NDArray[np.int64]) -> float:
        """weights: how often each image is taken. NaN where no object is."""
        values = []
        for images, found, objects in self._classes:
            total = int(objects @ weights)
            if not total:
                continue
            times = weights[images]
            right, wrong = np.cumsum(found * times, 1), np.cumsum(~found * times, 1)
            recall, precision = right / total, right / np.maximum(right + wrong, 1)
            precision = np.maximum.accumulate(precision[:, ::-1], 1)[:, ::-1]
            read = np.zeros((len(found), len(RECALLS)))
            for row, one, best in zip(read, recall, precision, strict=True):
                at = np.searchsorted(one, RECALLS, side="left")
                row[: np.count_nonzero(at < len(one))] = best[at[at < len(one)]]
            values.append(read.mean())
        return float(np.mean(values)) if values else float("nan")
