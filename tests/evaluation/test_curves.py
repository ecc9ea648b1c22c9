"""Curves, thresholds, confusions and differences, against scikit-learn's definitions, supervision and pycocotools itself."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
from detrt.data.coco import CocoDataset
from detrt.detections import box_iou
from detrt.errors import OutputError
from detrt.evaluation.coco import evaluated, score_rows
from detrt.evaluation.curves import ClassCurve, compare, confusion_of, curves_of, write_thresholds

NAMES = {1: "cat", 2: "dog", 3: "bird"}


def make(seed: int, images: int = 8, noise: float = 4.0):
    """(data set, results): objects on a grid, found about where they are, some as another class, some missed, some twice."""
    rng = np.random.default_rng(seed)
    truth, rows = [], []
    for image in range(1, images + 1):
        for x, y in itertools.product((10, 60, 110), (10, 60)):
            category = int(rng.integers(1, 4))
            box = [float(x), float(y), *rng.uniform(20, 40, 2).tolist()]
            truth.append({"image_id": image, "category_id": category, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
            for _ in range(int(rng.integers(0, 3))):
                given = category if rng.random() < 0.8 else int(rng.integers(1, 4))
                moved = [v + float(rng.normal(0, noise)) for v in box]
                rows.append({"image_id": image, "category_id": given, "bbox": moved, "score": round(float(rng.random()), 2)})
    entries = [{"id": i, "file_name": f"{i}.png", "height": 100, "width": 160} for i in range(1, images + 1)]
    return CocoDataset(Path("x"), entries, [{"id": i, "name": name} for i, name in NAMES.items()], truth), rows


def simple_matches(dataset, rows, category):
    """(scores, found) of a class by COCO's rule at an IoU of 0.5, written down anew: best score first, the best free object."""
    scores, found = [], []
    for image in dataset.images:
        known = [e["bbox"] for e in dataset.annotations if (e["image_id"], e["category_id"]) == (image["id"], category)]
        given = [r for r in rows if (r["image_id"], r["category_id"]) == (image["id"], category)]
        free = set(range(len(known)))
        corners = [[x, y, x + w, y + h] for x, y, w, h in known]
        for row in sorted(given, key=lambda row: -row["score"]):
            x, y, w, h = row["bbox"]
            iou = box_iou(np.array([[x, y, x + w, y + h]]), np.array(corners).reshape(-1, 4))[0]
            best = max((i for i in free if iou[i] >= 0.5), key=lambda i: iou[i], default=None)
            free.discard(best)
            scores.append(row["score"])
            found.append(best is not None)
    return np.array(scores), np.array(found)


@pytest.mark.parametrize("seed", range(4))
def test_curves_are_those_of_the_definition(seed):
    dataset, rows = make(seed)
    curves = curves_of(evaluated(dataset, rows), NAMES)
    assert set(curves) == set(NAMES.values())
    for category, name in NAMES.items():
        scores, found = simple_matches(dataset, rows, category)
        objects = sum(e["category_id"] == category for e in dataset.annotations)
        curve = curves[name]
        assert curve.objects == objects and curve.scores.tolist() == sorted(set(scores.tolist()), reverse=True)
        for score, precision, recall in zip(curve.scores, curve.precision, curve.recall, strict=True):
            kept = scores >= score
            assert precision == pytest.approx(found[kept].mean()) and recall == pytest.approx(found[kept].sum() / objects)
        try:
            from sklearn.metrics import precision_recall_curve
        except ImportError:
            continue
        precision, recall, thresholds = precision_recall_curve(found, scores)
        assert curve.scores == pytest.approx(thresholds[::-1]) and curve.precision == pytest.approx(precision[:-1][::-1])
        assert curve.recall == pytest.approx(recall[:-1][::-1] * found.sum() / objects)


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_are_the_best_of_all(seed, tmp_path):
    """By trying every threshold; scores above it are kept, as a detector does."""
    dataset, rows = make(seed)
    curves = curves_of(evaluated(dataset, rows), NAMES)
    best = write_thresholds(curves, tmp_path / "best.json")
    assert json.loads((tmp_path / "best.json").read_text()) == best
    for category, name in NAMES.items():
        scores, found = simple_matches(dataset, rows, category)
        objects = curves[name].objects

        def f1(threshold, scores=scores, found=found, objects=objects):
            kept = scores > threshold
            return 2 * found[kept].sum() / max(kept.sum() + objects, 1)

        assert f1(best[name]) == pytest.approx(max(map(f1, np.arange(-0.005, 1, 0.01))))
        for wanted in (0.6, 0.9):
            index = curves[name].best(precision=wanted)
            kept = [scores > t for t in np.arange(-0.005, 1, 0.01) if (scores > t).any() and found[scores > t].mean() >= wanted]
            most = max((found[one].sum() / objects for one in kept), default=0)
            assert (curves[name].recall[index] if index is not None else 0) == pytest.approx(most)
            index = curves[name].best(recall=wanted)
            assert index is None or curves[name].recall[index] >= wanted


def test_thresholds_that_no_class_has(tmp_path):
    curve = ClassCurve.of(np.array([0.5]), np.array([False]), 3)
    assert curve.best() is None and ClassCurve.of(np.zeros(0), np.zeros(0, bool), 3).best() is None
    with pytest.raises(OutputError, match="no class"):
        write_thresholds({"cat": curve}, tmp_path / "x.json")
    beyond = ClassCurve.of(np.array([60.0]), np.array([True]), 1)
    with pytest.raises(OutputError, match="from 0 to 1, and scores of these results lead to 30"):
        write_thresholds({"cat": beyond}, tmp_path / "x.json")
    assert not list(tmp_path.iterdir())


def test_a_threshold_lies_between_scores_of_six_digits(tmp_path):
    """Scores in results have six digits, and those of detections more: what rounds to 0.500001 is above the threshold."""
    curve = ClassCurve.of(np.array([0.500001, 0.5]), np.array([True, False]), 1)
    assert 0.5 < write_thresholds({"cat": curve}, tmp_path / "x.json")["cat"] < 0.5000006


def test_categories_of_one_name_are_kept_apart():
    """Where both have annotations; one without, which tools write for a group, changes nothing."""
    dataset, rows = make(0)
    plain = score_rows(dataset, rows)[1]
    dataset = replace(dataset, categories=[*({"id": key, "name": "cat"} for key in (1, 2)), {"id": 3, "name": "bird"}])
    assert score_rows(dataset, rows)[1] == {"cat (id 1)": plain["cat"], "cat (id 2)": plain["dog"], "bird": plain["bird"]}
    assert set(curves_of(evaluated(dataset, rows), dataset.names)) == {"cat (id 1)", "cat (id 2)", "bird"}
    dataset = replace(dataset, categories=[{"id": key, "name": name} for key, name in [*NAMES.items(), (0, "cat"), (9, "dog")]])
    assert score_rows(dataset, rows)[1] == plain


NAMES_OF_ALL_KINDS = ["_background_", "costs $5 or $x_{$", "", "a" * 60, "2026-01-01T10-00-00_cam3_frame000123.jpg", "a\nb"]


def test_names_of_all_kinds_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the 'bench' extra")
    from detrt.data.figure import label_text, new_figure, save_figure

    figure = new_figure(4, 3)
    ax = figure.subplots()
    for number, name in enumerate(NAMES_OF_ALL_KINDS):
        ax.plot([number], label=label_text(name, 24))
    ax.set_xticks(range(len(NAMES_OF_ALL_KINDS)), NAMES_OF_ALL_KINDS)
    ax.set_title(NAMES_OF_ALL_KINDS[1])
    shown = [text.get_text() for text in ax.legend().get_texts()]
    assert len(shown) == len(NAMES_OF_ALL_KINDS) and all(shown) and max(map(len, shown)) <= 24
    assert shown[4].startswith("2026") and shown[4].endswith("0123.jpg")
    save_figure(figure, tmp_path / "x.png")


@pytest.mark.parametrize("seed", range(4))
def test_confusions_are_those_of_supervision(seed):
    sv = pytest.importorskip("supervision", reason="needs the 'supervision' extra")
    dataset, rows = make(seed)
    given, known = [], []
    for image in dataset.images:
        for into, entries in ((given, rows), (known, dataset.annotations)):
            own = [e for e in entries if e["image_id"] == image["id"]]
            boxes = np.array([e["bbox"] for e in own]).reshape(-1, 4)
            boxes[:, 2:] += boxes[:, :2]
            scores = np.array([e.get("score", 1.0) for e in own])
            into.append(sv.Detections(xyxy=boxes, class_id=np.array([e["category_id"] - 1 for e in own], int), confidence=scores))
    theirs = sv.ConfusionMatrix.from_detections(given, known, list(NAMES.values()), conf_threshold=0.305, iou_threshold=0.5)
    ours = confusion_of(dataset, rows, {}, threshold=0.305)
    assert ours.counts.tolist() == theirs.matrix.astype(int).tolist() and ours.names[:3] == tuple(NAMES.values())
    sums = np.array(list(ours.images.values())).sum(0).tolist()
    assert sums == [ours.counts.trace(), ours.counts.sum() - ours.counts.trace()] and len(ours.images) == len(dataset.images)
    above = confusion_of(dataset, rows, {"cat": 1.0}, threshold=0.305).counts
    assert above[:, 0].sum() == 0 and above[:, 1:3].sum() >= ours.counts[:, 1:3].sum() - 1


@pytest.mark.parametrize("seed", range(4))
def test_crowds_are_neither_missed_nor_found_wrongly(seed):
    """What is found where nothing is, are the detections that pycocotools neither pairs nor ignores at an IoU of 0.5."""
    dataset, rows = make(seed)
    rng = np.random.default_rng(seed)
    for entry in dataset.annotations:
        entry["iscrowd"] = int(rng.random() < 0.5)
        entry["category_id"] = 1
    rows = [{**row, "category_id": 1} for row in rows]
    evaluation = evaluated(dataset, rows)
    everything = [e for e in evaluation.evalImgs if e is not None and e["aRng"] == evaluation.params.areaRng[0]]
    alone = sum(int((~(e["dtMatches"][0].astype(bool) | e["dtIgnore"][0])).sum()) for e in everything)
    paired = sum(int((e["dtMatches"][0].astype(bool) & ~e["dtIgnore"][0]).sum()) for e in everything)
    found = confusion_of(dataset, rows, {}, threshold=0.0)
    # pycocotools pairs in the order of scores, detrt in that of IoU: as many pairs, but for a contested object.
    assert abs(int(found.counts[-1].sum()) - alone) <= 1 and abs(int(found.counts.trace()) - paired) <= 1
    assert alone < len(rows) - paired, "some lie in a crowd"
    objects = sum(not entry["iscrowd"] for entry in dataset.annotations)
    assert found.counts[:-1].sum() == objects


def resampled(dataset, rows, drawn):
    """The data set of the images that were drawn, each of its own."""
    images, truth, found = [], [], []
    for number, image in enumerate(drawn, 1):
        images.append({**dataset.images[image], "id": number})
        truth += [{**e, "image_id": number} for e in dataset.annotations if e["image_id"] == dataset.images[image]["id"]]
        found += [{**r, "image_id": number} for r in rows if r["image_id"] == dataset.images[image]["id"]]
    return CocoDataset(dataset.path, images, dataset.categories, truth), found


def test_the_interval_is_that_of_pycocotools():
    """The same images drawn, and each data set evaluated by pycocotools."""
    dataset, rows = make(1, images=6)
    rows = [{**row, "score": row["score"] + 1e-6 * i} for i, row in enumerate(rows)]  # equal scores depend on the order
    worse = [{**row, "bbox": [v + 4 for v in row["bbox"]]} for row in rows]
    found = compare(evaluated(dataset, rows), evaluated(dataset, worse), dataset, samples=20, seed=3)
    assert found.first == pytest.approx(score_rows(dataset, rows)[0]["AP"], abs=1e-9)
    assert found.second == pytest.approx(score_rows(dataset, worse)[0]["AP"], abs=1e-9)
    rng = np.random.default_rng(3)
    differences = []
    for _ in range(20):
        drawn = rng.integers(0, 6, 6)
        (one, mine), (two, theirs) = resampled(dataset, rows, drawn), resampled(dataset, worse, drawn)
        differences.append(score_rows(two, theirs)[0]["AP"] - score_rows(one, mine)[0]["AP"])
    assert (found.low, found.high) == pytest.approx(tuple(np.percentile(differences, [2.5, 97.5])), abs=1e-9)
    assert (
        found.high < 0
        and list(found.images.values()) == sorted(found.images.values())
        and set(found.images) == {f"{i}.png" for i in range(1, 7)}
    )
