"""Large images composed of scenes whose objects are known, and what each scene has alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from detrt.data.coco import CocoDataset
from detrt.data.scenes.scene import CLASSES, draw_scene

CATEGORIES = [{"id": i, "name": name} for i, name in enumerate(CLASSES)]


@dataclass(frozen=True)
class LargeScene:
    """image: (H, W, 3) uint8. boxes_xyxy, class_ids: of its objects. tiles: (y, x, number of the scene, size_hw) of the scenes."""

    image: NDArray[np.uint8]
    boxes_xyxy: NDArray[np.float64]
    class_ids: list[int]
    tiles: list[tuple[int, int, int, tuple[int, int]]]


def compose(seed: int, size_hw: tuple[int, int], objects: int, *, rows: int, columns: int) -> LargeScene:
    """A grid of scenes with at least so many objects; the cells behind the last one needed are without objects. Cells have different
    sizes, so that no regular grid of tiles falls on them."""
    rng = np.random.default_rng(seed)

    def edges(side: int, count: int) -> list[int]:
        moved = rng.uniform(-0.12, 0.12, count + 1) * (np.arange(count + 1) % count > 0)
        return np.rint((np.arange(count + 1) + moved) * side / count).astype(int).tolist()

    ys, xs = edges(size_hw[0], rows), edges(size_hw[1], columns)
    image = np.zeros((*size_hw, 3), np.uint8)
    boxes, ids, tiles = [], [], []
    cells = [(y, x) for y in range(rows) for x in range(columns)]
    for number, (i, j) in enumerate(map(tuple, rng.permutation(cells).tolist())):
        y, x, cell_hw = ys[i], xs[j], (ys[i + 1] - ys[i], xs[j + 1] - xs[j])
        scene_seed = 10_000 * (seed + 1) + number
        scene = draw_scene(scene_seed, size_hw=cell_hw, max_objects=12 if len(boxes) < objects else 0)
        image[y : y + cell_hw[0], x : x + cell_hw[1]] = scene.image
        boxes += [np.array(one.box_xyxy) + (x, y, x, y) for one in scene.objects]
        ids += [one.class_id for one in scene.objects]
        tiles.append((y, x, scene_seed, cell_hw))
    return LargeScene(image, np.array(boxes).reshape(-1, 4), ids, tiles)


def truth_of(scenes: list[LargeScene], path) -> CocoDataset:
    """The objects of the images, numbered from 1, in COCO's form."""
    images = [
        {"id": i, "file_name": f"{i}.png", "height": s.image.shape[0], "width": s.image.shape[1]} for i, s in enumerate(scenes, 1)
    ]
    rows = []
    for i, scene in enumerate(scenes, 1):
        for (x0, y0, x1, y1), class_id in zip(scene.boxes_xyxy.tolist(), scene.class_ids, strict=True):
            area = (x1 - x0) * (y1 - y0)
            rows.append({"image_id": i, "category_id": class_id, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": area, "iscrowd": 0})
    return CocoDataset(path, images, CATEGORIES, rows)
