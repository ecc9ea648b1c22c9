"""Tracks of a drawn scene whose objects move, cross and leave, against the known ones, by the IDF1 of `trackers`."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("trackers", reason="needs the 'track' extra")
from trackers.eval.identity import compute_identity_metrics

from detrt.data.draw import draw_detections
from detrt.data.scenes.scene import CLASSES, MIN_VISIBLE
from detrt.data.scenes.shapes import COLORS, paint_sprite
from detrt.data.sinks import Record
from detrt.detections import Detections, box_iou
from detrt.jobs.run import ImageResult
from detrt.jobs.track import Tracker, track_objects

HEIGHT, WIDTH = 320, 480
STEPS, FPS = 40, 10
# Class, colour, first centre and pixels per second. Two cross in the middle, one enters late, one leaves.
MOVING = (
    ("star", "red", (60, 70), (60, 10)),
    ("heart", "blue", (420, 130), (-60, 0)),
    ("circle", "green", (240, 260), (25, -10)),
    ("hexagon", "purple", (-60, 230), (45, 0)),
    ("cross", "orange", (400, 250), (40, 0)),
)


def draw_scene(time_s: float) -> tuple[np.ndarray, dict[int, tuple[float, ...]]]:
    """The image at a time, and object -> box of those that are seen."""
    from PIL import Image

    canvas = Image.new("RGB", (WIDTH, HEIGHT), (205, 200, 190))
    owner = Image.new("L", (WIDTH, HEIGHT), 255)  # the object in front
    sprites = {}
    for number, (name, colour, (x, y), (dx, dy)) in enumerate(MOVING):
        centre = (x + dx * time_s, y + dy * time_s)
        sprite = paint_sprite(name, centre, (64, 64), 10, COLORS[colour], "plain", np.random.default_rng(number))
        canvas.paste(sprite.paint, (sprite.left, sprite.top), sprite.alpha)
        owner.paste(number, (sprite.left, sprite.top), sprite.alpha.point(lambda value: 255 * (value > 127)))
        sprites[number] = sprite
    boxes = {}
    for number, sprite in sprites.items():
        left, top, right, bottom = sprite.box_xyxy
        visible = (np.asarray(owner) == number).sum() / (np.asarray(sprite.alpha) > 127).sum()
        if visible >= MIN_VISIBLE:
            boxes[number] = (max(left, 0), max(top, 0), min(right, WIDTH), min(bottom, HEIGHT))
    return np.asarray(canvas), boxes


def idf1(truth: list[dict[int, tuple]], found: list[Detections]) -> float:
    kept = [one[one.track_ids >= 0] for one in found]
    boxes = [np.array(list(one.values()), np.float64).reshape(-1, 4) for one in truth]
    ious = [box_iou(a, b.boxes_xyxy) for a, b in zip(boxes, kept, strict=True)]
    measured = compute_identity_metrics([np.array(list(one), int) for one in truth], [one.track_ids for one in kept], ious)
    return measured["IDF1"]


def exact(boxes: dict[int, tuple[float, ...]], rng: np.random.Generator, missed: float) -> Detections:
    """Detections of the known boxes, two pixels off, in random order, some of them missing."""
    kept = [n for n in rng.permutation(list(boxes)) if rng.random() > missed]
    xyxy = np.array([boxes[n] for n in kept]).reshape(-1, 4) + rng.normal(0, 2, (len(kept), 4))
    ids = [CLASSES.index(MOVING[n][0]) for n in kept]
    return Detections(xyxy, rng.uniform(0.5, 1, len(kept)), ids, [CLASSES[i] for i in ids], (HEIGHT, WIDTH))


@pytest.mark.parametrize("drop", [0.0, 0.5], ids=["every frame", "half of the frames"])
def test_tracks_of_two_sources_at_once(drop):
    """Detections that jitter and are missing, at irregular times: frames of two sources in turn, each with its own ids."""
    rng = np.random.default_rng(3)
    tracker = Tracker()
    truth, found = {"a": [], "b": []}, {"a": [], "b": []}
    for step in range(90):
        for source, shift in (("a", 0.0), ("b", 1.5)):
            if rng.random() < drop:
                continue
            boxes = draw_scene(step / 15 + shift)[1]
            given = exact(boxes, rng, missed=0.05)
            tracked = tracker.update(source, given, step / 15)
            np.testing.assert_array_equal(tracked.boxes_xyxy, given.boxes_xyxy)
            missing = {n: box for n, box in boxes.items() if (box_iou([box], given.boxes_xyxy) > 0.3).any()}
            truth[source].append(missing)
            found[source].append(tracked)
    assert idf1(truth["a"], found["a"]) >= 0.95 and idf1(truth["b"], found["b"]) >= 0.95
    swapped = [one if i % 2 else found["b"][min(i, len(found["b"]) - 1)] for i, one in enumerate(found["a"])]
    assert idf1(truth["a"], swapped) < 0.9, "the measure sees frames of another source"


def test_scores_that_start_and_continue_a_track():
    tracker = Tracker(start_score=0.6)
    box = np.array([[10, 10, 60, 60]], np.float32)

    def ids(score, step):
        return tracker.update("a", Detections(box + step, [score], [0], ["x"], (100, 100)), step / 10).track_ids.tolist()

    assert [ids(0.5, 0), ids(0.5, 1), ids(0.7, 2), ids(0.8, 3)][:3] == [[-1], [-1], [-1]]
    assert ids(0.3, 4) == ids(0.9, 5) != [-1], "a low score continues the track"
    assert tracker.update("a", Detections([], [], [], [], (100, 100)), 0.6).track_ids.shape == (0,)


def test_outputs_of_tracked_frames():
    tracker = Tracker()
    found = Detections([[10, 40, 60, 90], [120, 40, 180, 90]], [0.9, 0.8], [0, 1], ["a", "b"], (100, 200))
    results = [ImageResult("clip", Record("clip", found, i, i / 10), None) for i in range(3)]
    *_, last = track_objects([*results, ImageResult("photo", Record("photo", found), None)], tracker)
    assert last.record.detections.track_ids is None, "an image file has no tracks"
    tracked = [one.record for one in track_objects(results, Tracker())]
    first, after = (json.loads(json.dumps(one.to_dict()))["detections"] for one in (tracked[0], tracked[-1]))
    assert [row["track_id"] for row in first] == [None, None]
    assert len({row["track_id"] for row in after}) == 2 and None not in [row["track_id"] for row in after]
    detections = tracked[-1].detections
    assert detections[1:].track_ids.tolist() == [detections.track_ids[1]]
    assert detections.to_supervision().tracker_id.tolist() == detections.track_ids.tolist()
    grey = np.full((100, 200, 3), 128, np.uint8)
    assert (np.asarray(draw_detections(grey, detections)) != np.asarray(draw_detections(grey, found))).any()


def test_the_embedded_detector_on_a_moving_scene(tmp_path):
    """From pixels: the detector of the project, then tracks."""
    pytest.importorskip("av", reason="needs the 'video' extra")
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    from detrt.cli import main
    from detrt.data.video import video_writer

    truth = []
    with video_writer(tmp_path / "scene.mp4", fps=FPS, size=(HEIGHT, WIDTH)) as write:
        for step in range(STEPS):
            image, boxes = draw_scene(step / FPS)
            truth.append(boxes)
            write(image)
    lines = tmp_path / "found.jsonl"
    code = main(["detect", "embedded:shapes", str(tmp_path / "scene.mp4"), "--track", "-t", "0.4", "--json", str(lines), "-q"])
    assert code == 0
    found = []
    for line in lines.read_text().splitlines():
        rows = json.loads(line)["detections"]
        ids = np.array([-1 if row["track_id"] is None else row["track_id"] for row in rows], np.int64)
        boxes = [row["box_xyxy"] for row in rows]
        scores, classes = [row["score"] for row in rows], [row["class_id"] for row in rows]
        found.append(Detections(boxes, scores, classes, [CLASSES[i] for i in classes], (HEIGHT, WIDTH), track_ids=ids))
    assert len(found) == STEPS and idf1(truth, found) >= 0.95
