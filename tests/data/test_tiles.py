"""Tiles: windows, and detections that are joined over their edges, against objects that are known."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from large_scenes import compose, truth_of
from runtime_cases import make_session, make_spec, red

from detrt.data.tiles import Tiling, make_tiling, merge
from detrt.detections import Detections, box_iou
from detrt.detector import Detector
from detrt.errors import ArgumentError, SessionError
from detrt.tasks.masks import Masks


@pytest.mark.parametrize("size_hw", [(480, 640), (640, 640), (700, 1300), (641, 2000), (3000, 4000), (50, 3000)])
@pytest.mark.parametrize("overlap", [0, 0.2, 0.5])
def test_windows_cover_the_image_and_share_what_was_asked(size_hw, overlap):
    *tiles, whole = Tiling((640, 640), overlap).windows(size_hw)
    assert whole == (0, 0, *size_hw)
    seen = np.zeros(size_hw, int)
    for y0, x0, y1, x1 in tiles:
        seen[y0:y1, x0:x1] += 1
        assert (y1 - y0, x1 - x0) == (min(640, size_hw[0]), min(640, size_hw[1]))
    assert not tiles or seen.min() >= 1
    starts = sorted({x0 for _, x0, _, _ in tiles})
    assert all(b - a <= 640 * (1 - overlap) for a, b in itertools.pairwise(starts))


def ideal(boxes, ids, window, masks=None):
    """What a perfect detector finds in a window: what is visible of objects of which at least a tenth is there."""
    y0, x0, y1, x1 = window
    clipped = np.clip(boxes, [x0, y0, x0, y0], [x1, y1, x1, y1])
    area = np.prod(boxes[:, 2:] - boxes[:, :2], 1)
    seen = np.flatnonzero(np.prod(clipped[:, 2:] - clipped[:, :2], 1) >= 0.1 * area)
    inside = None if masks is None else Masks.from_array(masks[seen, y0:y1, x0:x1])
    scores = 0.6 + 0.3 * np.random.default_rng(len(seen) + x0).random(len(seen))
    labels = tuple(str(ids[i]) for i in seen)
    return Detections(clipped[seen] - [x0, y0, x0, y0], scores, ids[seen], labels, (y1 - y0, x1 - x0), masks=inside)


@pytest.mark.parametrize("seed", range(6))
def test_a_perfect_detector_stays_one(seed):
    """Objects of all sizes, also larger than a tile, come out once each, with their boxes and masks."""
    rng = np.random.default_rng(seed)
    size_hw, tiling = (400, 560), Tiling((160, 160), 0.25)
    boxes: list[np.ndarray] = []
    while len(boxes) < 12:
        w, h = rng.integers(8, 240 if len(boxes) < 2 else 60, 2)
        x, y = rng.integers(0, size_hw[1] - w), rng.integers(0, size_hw[0] - h)
        one = np.array([x, y, x + w, y + h], float)
        if not boxes or box_iou(one[None], np.array(boxes)).max() == 0:
            boxes.append(one)
    known, ids = np.array(boxes), rng.integers(0, 3, len(boxes))
    masks = np.zeros((len(boxes), *size_hw), bool)
    for mask, (x0, y0, x1, y1) in zip(masks, known.astype(int), strict=True):
        mask[y0:y1, x0:x1] = True
    parts = [(window, ideal(known, ids, window, masks)) for window in tiling.windows(size_hw)]
    found = merge(parts, tiling, size_hw)
    order, mine = np.lexsort(known.T), np.lexsort(found.boxes_xyxy.T)
    assert found.boxes_xyxy[mine].tolist() == known[order].tolist() and found.class_ids[mine].tolist() == ids[order].tolist()
    assert found.image_size_hw == size_hw and found.masks == Masks.from_array(masks[order][np.argsort(mine)])
    assert (np.diff(found.scores) <= 0).all()


def test_pieces_become_one_where_the_whole_image_shows_nothing():
    """An object longer than a tile, of which two tiles have pieces."""
    tiling, size_hw = Tiling((100, 100), 0.4), (100, 160)
    known = np.array([[10.0, 20, 150, 60]])
    mask = np.zeros((1, 100, 160), bool)
    mask[0, 20:60, 10:150] = True
    *windows, whole = tiling.windows(size_hw)
    parts = [(window, ideal(known, np.array([1]), window, mask)) for window in windows]
    none = ideal(known[:0], np.zeros(0, int), whole, mask[:0])
    found = merge([*parts, (whole, none)], tiling, size_hw)
    assert found.boxes_xyxy.tolist() == known.tolist() and np.array_equal(found.masks.to_array(), mask)


def test_a_doubtful_piece_does_not_make_a_box_larger():
    """Two sure pieces of an object, and an unsure box of the same class around it, which the whole image has."""
    tiling, size_hw = Tiling((100, 100), 0.4), (100, 160)
    known = np.array([[40.0, 20, 120, 60]])
    *windows, whole = tiling.windows(size_hw)
    parts = [(window, ideal(known, np.array([1]), window)) for window in windows]
    around = ideal(np.array([[25.0, 10, 135, 75]]), np.array([1]), whole)
    for score, box in ((0.2, known[0]), (0.59, [25.0, 10, 135, 75])):
        doubtful = replace(around, scores=np.array([score]))
        found = merge([*parts, (whole, doubtful)], tiling, size_hw)
        assert found.boxes_xyxy.tolist() == [list(box)], score


def test_a_mask_of_full_height():
    tiling, size_hw = Tiling((100, 100), 0.4), (100, 160)
    mask = np.zeros((1, 100, 160), bool)
    mask[0, :, 10:150] = True
    known = np.array([[10.0, 0, 150, 100]])
    found = merge([(w, ideal(known, np.array([0]), w, mask)) for w in tiling.windows(size_hw)], tiling, size_hw)
    assert found.masks == Masks.from_array(mask)


def test_neighbours_in_one_tile_stay():
    """Two objects of a class that overlap are no duplicates where one tile shows both."""
    tiling, size_hw = Tiling((100, 100), 0.4), (100, 160)
    known = np.array([[62.0, 20, 92, 60], [68, 20, 98, 60]])
    found = merge([(w, ideal(known, np.array([1, 1]), w)) for w in tiling.windows(size_hw)], tiling, size_hw)
    assert sorted(found.boxes_xyxy.tolist()) == known.tolist()


def test_batches_of_tiles_and_one_that_fits():
    log = []
    detector = Detector(make_session(make_spec(), log=log), threshold=0.2, batch_size=4, tile=40, overlap=0.0)
    small = detector(red(40, 40, 200))
    assert [shape[0] for shape in log] == [1] and len(small) == 1
    log.clear()
    detector([red(80, 80, 200), red(40, 80, 200)])
    assert [shape[0] for shape in log] == [4, 4]  # 4 + 1 and 2 + 1 windows, in batches of both images
    log.clear()
    plain = Detector(make_session(make_spec(), log=log), threshold=0.2)
    assert len(plain(red(80, 80, 200), tile="40x80", overlap=0, max_detections=1)) == 1 and len(log) == 3
    assert plain(red(40, 40, 200)) == small


@pytest.mark.parametrize(
    ("tile", "overlap", "word"),
    [
        (0, None, "tile"),
        (64, 1, "overlap"),
        (64, -0.1, "overlap"),
        (None, 0.2, "overlap"),
        (64, "a", "overlap"),
    ],
)
def test_what_is_no_tiling(tile, overlap, word):
    with pytest.raises((ArgumentError, ValueError), match=word):
        make_tiling(tile, overlap)


def test_an_overlap_of_numpy():
    assert make_tiling(np.int64(64), np.float32(0.25)) == Tiling((64, 64), 0.25)


def test_more_tiles_than_a_run_can_take():
    """Of an image, before any is made; the message is that of `cpp/tests/test_detector.cpp`."""
    with pytest.raises(
        SessionError, match="1200000001 tiles of 1x1, overlap 0.9, and at most 10000 are taken; give larger tiles"
    ):
        Tiling((1, 1), 0.9).windows((30000, 40000))
    assert len(Tiling((1, 1), 0.0).windows((99, 101))) == 10000
    detector = Detector(make_session(make_spec()), tile=1)
    with pytest.raises(SessionError, match="give larger tiles"):
        detector(red(200, 200, 200))


def test_many_detections_of_one_class_are_joined_in_time():
    """48 million pixels at a threshold of 0, as an evaluation has them: 30 s where each box is compared with all others."""
    rng = np.random.default_rng(0)
    tiling, size_hw = Tiling((640, 640)), (6000, 8000)
    parts = []
    for window in tiling.windows(size_hw):
        sides = np.array([window[3] - window[1], window[2] - window[0]])
        centre, half = rng.random((100, 2)) * sides, rng.random((100, 2)) * 60 + 5
        boxes = np.clip(np.hstack([centre - half, centre + half]), 0, np.tile(sides, 2))
        scores = np.sort(rng.random(100))[::-1]
        parts.append((window, Detections(boxes, scores, np.zeros(100, int), ("x",) * 100, (int(sides[1]), int(sides[0])))))
    start = time.process_time()  # which others that share the machine do not change
    found = merge(parts, tiling, size_hw)
    assert len(found) == 14226  # as where each is compared with all
    assert time.process_time() - start < 15


def times_found(found: Detections, scene) -> np.ndarray:
    """How often each object of a scene is found, surely and as what it is."""
    sure = found[found.scores > 0.5]
    same = np.equal.outer(scene.class_ids, sure.class_ids) & (box_iou(scene.boxes_xyxy, sure.boxes_xyxy) >= 0.5)
    return same.sum(1)


def ap_and_duplicates(detector: Detector, count: int, size_hw: tuple[int, int], objects: int, rows: int, columns: int):
    """(AP of tiles, of each scene alone, of each scene in the middle of a window of 640, which shows it at the scale of a tile; objects that
    were found more often than in any one tile)."""
    from detrt.evaluation.coco import score_rows

    scenes = [compose(seed, size_hw, objects, rows=rows, columns=columns) for seed in range(count)]
    assert min(len(scene.class_ids) for scene in scenes) >= objects
    truth = truth_of(scenes, Path("scenes"))
    alone, centred, tiled, twice = [], [], [], 0
    for number, scene in enumerate(scenes, 1):
        for y, x, _, (height, width) in scene.tiles:
            found = replace(detector(scene.image[y : y + height, x : x + width]), masks=None)
            alone += [
                {**row, "bbox": [row["bbox"][0] + x, row["bbox"][1] + y, *row["bbox"][2:]]} for row in found.to_coco(number)
            ]
            top, left = (
                max(0, min(s - (640 - cell) // 2, side - 640))
                for s, cell, side in zip((y, x), (height, width), size_hw, strict=True)
            )
            window = scene.image[top : max(top + 640, y + height), left : max(left + 640, x + width)]
            found = replace(detector(window), masks=None)
            at = (found.boxes_xyxy[:, :2] + found.boxes_xyxy[:, 2:]) / 2 + [left, top] - [x, y]
            found = found[((at >= 0) & (at < [width, height])).all(1)]
            centred += [
                {**row, "bbox": [row["bbox"][0] + left, row["bbox"][1] + top, *row["bbox"][2:]]} for row in found.to_coco(number)
            ]
        found = detector(scene.image, tile=640, overlap=0.2)
        tiled += replace(found, masks=None).to_coco(number)
        counts = times_found(found, scene)
        for index in np.flatnonzero(counts > 1):  # the model itself, which has no NMS, may find one twice in a tile
            x0, y0, x1, y1 = scene.boxes_xyxy[index]
            own = 0
            for top, left, bottom, right in Tiling((640, 640)).windows(size_hw):
                if left <= x0 and x1 <= right and top <= y0 and y1 <= bottom:
                    part = detector(scene.image[top:bottom, left:right])
                    moved = replace(part, boxes_xyxy=part.boxes_xyxy + [left, top, left, top])
                    own = max(own, times_found(moved, scene)[index])
            twice += counts[index] > own
    return *(score_rows(truth, rows)[0]["AP"] for rows in (tiled, alone, centred)), twice


@pytest.fixture
def shapes(exported):
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    with Detector(exported("embedded:shapes").path, threshold=0.02, batch_size=8, threads=1) as detector:
        yield detector


def test_a_large_scene(shapes):
    tiled, alone, _, twice = ap_and_duplicates(shapes, 1, (1100, 1500), 12, 2, 2)
    assert tiled >= 0.95 * alone > 0.8 and twice == 0


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(5, 6), (6, 8)])
def test_twenty_large_scenes(shapes, rows, columns):
    """Scenes of 6 rows are smaller than a tile, so that tiles show their objects smaller than the scene alone does."""
    tiled, alone, centred, twice = ap_and_duplicates(shapes, 20, (3000, 4000), 60, rows, columns)
    print(f"{rows}x{columns}: AP {tiled:.4f} in tiles, {alone:.4f} alone, {centred:.4f} at the scale of a tile")
    assert tiled >= 0.95 * (alone if rows == 5 else centred) > 0.8 and twice == 0
