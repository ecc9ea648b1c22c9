"""Seeded images of simple objects, drawn with numpy and Pillow alone.

The project's own small detector is trained and tested on these scenes, so the demo and every
test run without a download. A scene holds up to a dozen filled, turned, overlapping shapes on
a busy background, with the usual flaws of a camera image (noise, blur, JPEG artefacts).

``draw_scene(seed)`` gives the same image on every machine that has the same numpy and
Pillow; ``write_dataset`` puts a set of them on disk in the COCO format.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from ...system import CountProgress
from ...tasks.masks import Masks
from .shapes import COLORS, FILLS, MAX_ROTATION_DEG, SHAPES, Sprite, paint_sprite

CLASSES: tuple[str, ...] = tuple(SHAPES)

MIN_VISIBLE = 0.35  # an object with less of its silhouette in sight is left out altogether
MIN_SIDE = 64  # pixels of the smallest scene
_SIDES_PX = (240, 640)
_SIZES_PX = (20.0, 200.0)
_STREAM = 0x5CE7E5  # keeps these seeds apart from other uses of the same small integers


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One labelled object.

    ``class_id`` indexes :data:`CLASSES` (0-based); ``box_xyxy`` is the tight box of the whole
    silhouette (also the hidden part), clipped to the image, in pixels; ``visible`` is the
    fraction (0..1) of the silhouette's area that is inside the image and not covered.
    """

    class_id: int
    label: str
    color: str
    fill: str
    box_xyxy: tuple[float, float, float, float]
    visible: float


@dataclass(frozen=True, slots=True)
class Scene:
    """An image, (H, W, 3) uint8 RGB, and what is in it, from back to front.

    ``instances`` is (H, W) uint16: at each pixel the number of the object that is seen there, from 1 in the order of
    ``objects``; 0 is background.
    """

    image: np.ndarray
    objects: tuple[SceneObject, ...]
    instances: np.ndarray

    @property
    def masks(self) -> Masks:
        """The visible pixels of each object."""
        numbers = np.arange(1, len(self.objects) + 1, dtype=np.uint16)
        return Masks.from_array(self.instances == numbers[:, None, None])


def draw_scene(seed: int, *, size_hw: tuple[int, int] | None = None, max_objects: int = 12) -> Scene:
    """Draw the scene that belongs to ``seed`` (any integer from 0).

    ``size_hw`` fixes the image's height and width in pixels (at least 64 each); otherwise
    both vary. ``max_objects`` (0 or more) bounds the number of objects.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    if max_objects < 0:
        raise ValueError(f"max_objects must be at least 0, got {max_objects!r}")
    rng = np.random.default_rng(np.random.SeedSequence([_STREAM, int(seed)]))
    if size_hw is None:
        height, width = _random_size(rng)
    else:
        height, width = int(size_hw[0]), int(size_hw[1])
        if min(height, width) < MIN_SIDE:
            raise ValueError(f"size_hw must be at least {MIN_SIDE} px on each side, got {size_hw!r}")
    canvas = _background(rng, height, width)
    kept, instances = _choose_objects(rng, canvas, max_objects)
    for sprite, _ in reversed(kept):  # chosen front to back, drawn back to front
        canvas.paste(sprite.paint, (sprite.left, sprite.top), sprite.alpha)
    if rng.random() < 0.12:
        _draw_lines(rng, canvas, count=int(rng.integers(1, 3)), widest=2)
    image = _camera_flaws(rng, canvas)
    return Scene(image=image, objects=tuple(label for _, label in reversed(kept)), instances=instances)


def draw_images(count: int, size_hw: tuple[int, int], first: int = 0) -> list[np.ndarray]:
    """`count` scenes from number `first` on, as (H, W, 3) uint8 RGB images of `size_hw` pixels, at least MIN_SIDE on each side."""
    height, width = (max(MIN_SIDE, side) for side in size_hw)
    return [draw_scene(seed, size_hw=(height, width)).image for seed in range(first, first + count)]


def _random_size(rng: np.random.Generator) -> tuple[int, int]:
    """Height and width in pixels; sides differ by a factor of 16:9 at most."""
    long_side = int(rng.integers(_SIDES_PX[0] + 60, _SIDES_PX[1] + 1))
    shortest = max(_SIDES_PX[0], math.ceil(long_side * 9 / 16))
    short_side = int(rng.integers(shortest, long_side + 1))
    return (short_side, long_side) if rng.random() < 0.6 else (long_side, short_side)


def _muted_color(rng: np.random.Generator) -> np.ndarray:
    """A background colour, (3,) float: any lightness, little saturation."""
    return np.clip(rng.uniform(35, 225) + rng.uniform(-32, 32, size=3), 0, 255)


def _rgb(color: np.ndarray) -> tuple[int, int, int]:
    return int(color[0]), int(color[1]), int(color[2])


def _background(rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """Gradient or blotches, then texture, then unlabelled lines and blobs; RGB image."""
    base = _muted_color(rng)
    cells = int(rng.choice([2, 3, 5, 12, 30]))
    grid = base + rng.uniform(-1, 1, size=(cells, cells, 3)) * rng.uniform(4, 45)
    grid += rng.uniform(-1, 1, size=(cells, cells, 1)) * rng.uniform(0, 25)
    small = Image.fromarray(np.clip(grid, 0, 255).astype(np.uint8))
    canvas = small.resize((width, height), Image.Resampling.BICUBIC)
    kind = rng.random()
    if kind < 0.3:  # woven or grained texture
        step = int(rng.integers(2, 7))
        shape = (height // step + 1, width // step + 1)
        grain = Image.fromarray(rng.integers(0, 256, size=shape, dtype=np.uint8))
        grain = grain.resize((width, height), Image.Resampling.BILINEAR).convert("RGB")
        canvas = Image.blend(canvas, grain, float(rng.uniform(0.04, 0.16)))
    elif kind < 0.5:  # wallpaper: soft stripes or a soft grid
        turn, period = rng.uniform(0, math.pi), rng.uniform(9, 60)
        x, y = np.arange(width), np.arange(height)[:, None]
        wave = np.mod(x * math.cos(turn) + y * math.sin(turn), period) < period / 2
        if rng.random() < 0.4:
            wave ^= np.mod(y * math.cos(turn) - x * math.sin(turn), period) < period / 2
        mask = Image.fromarray(wave.astype(np.uint8) * np.uint8(rng.integers(20, 90)))
        canvas.paste(_rgb(_muted_color(rng)), (0, 0), mask)
    for _ in range(int(rng.integers(0, 5))):
        _draw_blob(rng, canvas)
    if rng.random() < 0.6:
        _draw_lines(rng, canvas, count=int(rng.integers(1, 7)), widest=4)
    return canvas


def _draw_blob(rng: np.random.Generator, canvas: Image.Image) -> None:
    """A soft, ragged patch of another muted colour."""
    size = int(rng.uniform(0.1, 0.5) * min(canvas.size))
    small = Image.new("L", (32, 32), 0)
    corners = int(rng.integers(5, 11))
    radii = rng.uniform(4, 14, size=corners)
    points = [
        (
            16 + float(r) * math.cos(2 * math.pi * k / corners),
            16 + float(r) * math.sin(2 * math.pi * k / corners),
        )
        for k, r in enumerate(radii)
    ]
    ImageDraw.Draw(small).polygon(points, fill=int(rng.integers(60, 170)))
    small = small.filter(ImageFilter.BoxBlur(1.5))
    mask = small.resize((size, size), Image.Resampling.BILINEAR)
    at = (
        int(rng.integers(-size // 2, canvas.width - size // 2)),
        int(rng.integers(-size // 2, canvas.height - size // 2)),
    )
    canvas.paste(_rgb(_muted_color(rng)), at, mask)


def _draw_lines(rng: np.random.Generator, canvas: Image.Image, *, count: int, widest: int) -> None:
    """Thin straight or broken lines, open so that they never make up a shape."""
    draw = ImageDraw.Draw(canvas)
    for _ in range(count):
        corners = int(rng.integers(2, 5))
        start = rng.uniform(0, 1, size=2) * canvas.size
        steps = rng.uniform(-0.5, 0.5, size=(corners - 1, 2)) * max(canvas.size)
        path = np.vstack([start, start + np.cumsum(steps, axis=0)])
        points = [(round(float(x)), round(float(y))) for x, y in path]
        color = _rgb(rng.uniform(0, 255, size=3))
        draw.line(points, fill=color, width=int(rng.integers(1, widest + 1)))


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Shared area of two xyxy boxes over the area of the smaller one."""
    w = min(a[2], b[2]) - max(a[0], b[0])
    h = min(a[3], b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    return w * h / min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def _choose_objects(
    rng: np.random.Generator, canvas: Image.Image, max_objects: int
) -> tuple[list[tuple[Sprite, SceneObject]], np.ndarray]:
    """Objects from front to back, and `Scene.instances`; the frontmost is fixed first, so visibility is final."""
    width, height = canvas.size
    covered = np.zeros((height, width), dtype=np.uint16)  # numbers from front to back
    if max_objects == 0 or rng.random() < 0.02:
        return [], covered
    wanted = 1 + int((max_objects - 1) * rng.random() ** 1.2 + 0.5)
    # Relative bounds as well, so that nothing is tiny once an image is resized for a model.
    smallest = max(_SIZES_PX[0], 0.06 * max(width, height))
    largest = min(_SIZES_PX[1], (0.55 if wanted <= 6 else 0.38) * min(width, height))
    largest = max(largest, smallest)
    local = np.asarray(canvas.resize((16, 16), Image.Resampling.BOX), dtype=np.float64)
    spots: list[tuple[tuple[float, ...], str]] = []
    kept: list[tuple[Sprite, SceneObject]] = []
    for _ in range(wanted):
        name = CLASSES[int(rng.integers(len(CLASSES)))]
        size = float(np.exp(rng.uniform(math.log(smallest), math.log(largest))))
        aspect = math.exp(float(rng.uniform(-0.32, 0.32))) if rng.random() < 0.7 else 1.0
        size_wh = (size * math.sqrt(aspect), size / math.sqrt(aspect))
        limit = MAX_ROTATION_DEG.get(name, 180.0)
        angle = float(rng.uniform(-limit, limit)) if rng.random() < 0.75 else 0.0
        center, spot = _find_spot(rng, width, height, size, [box for box, _ in spots])
        neighbours = {color for box, color in spots if _overlap(box, spot) > 0}
        cell = local[
            min(15, max(0, int(center[1] / height * 16))),
            min(15, max(0, int(center[0] / width * 16))),
        ]
        color, rgb = _choose_color(rng, cell, neighbours)
        fill = FILLS[int(rng.integers(len(FILLS)))]
        sprite = paint_sprite(name, center, size_wh, angle, rgb, fill, rng)
        visible = _place(sprite, covered, len(kept) + 1)
        if visible < MIN_VISIBLE:
            continue
        x0, y0, x1, y1 = sprite.box_xyxy
        box = (max(0.0, x0), max(0.0, y0), min(float(width), x1), min(float(height), y1))
        spots.append((spot, color))
        label = SceneObject(CLASSES.index(name), name, color, fill, box, visible)
        kept.append((sprite, label))
    return kept, np.where(covered > 0, len(kept) + 1 - covered, 0).astype(np.uint16)


def _find_spot(
    rng: np.random.Generator,
    width: int,
    height: int,
    size: float,
    taken: list[tuple[float, ...]],
) -> tuple[tuple[float, float], tuple[float, float, float, float]]:
    """A centre (x, y) and a rough box; most objects keep apart, some overlap."""
    margin = 0.0 if rng.random() < 0.1 else 0.42 * size
    allowed = 0.55 if rng.random() < 0.25 else 0.08
    for _ in range(8):
        cx = float(rng.uniform(margin, max(margin + 1, width - margin)))
        cy = float(rng.uniform(margin, max(margin + 1, height - margin)))
        spot = (cx - size / 2, cy - size / 2, cx + size / 2, cy + size / 2)
        if all(_overlap(spot, other) <= allowed for other in taken):
            break
    return (cx, cy), spot


def _choose_color(rng: np.random.Generator, behind: np.ndarray, avoid: set[str]) -> tuple[str, tuple[int, int, int]]:
    """A named colour that stands out from ``dependents`` ((3,) float RGB) and its neighbours."""
    names = tuple(COLORS)
    for _ in range(10):
        name = names[int(rng.integers(len(names)))]
        rgb = np.clip(np.asarray(COLORS[name]) + rng.uniform(-16, 16, size=3), 0, 255)
        if name not in avoid and float(np.abs(rgb - behind).max()) > 60:
            break
    return name, _rgb(rgb)


def _place(sprite: Sprite, covered: np.ndarray, number: int) -> float:
    """Visible fraction of ``sprite`` under what ``covered`` (H, W), numbers of objects, already holds.

    A sprite that shows enough is added to ``covered`` as ``number``; another one leaves it untouched.
    """
    solid = np.asarray(sprite.alpha) >= 128
    height, width = covered.shape
    x0, y0 = max(0, sprite.left), max(0, sprite.top)
    x1 = min(width, sprite.left + solid.shape[1])
    y1 = min(height, sprite.top + solid.shape[0])
    if x0 >= x1 or y0 >= y1:
        return 0.0
    inside = solid[y0 - sprite.top : y1 - sprite.top, x0 - sprite.left : x1 - sprite.left]
    window = covered[y0:y1, x0:x1]
    seen = inside & (window == 0)
    visible = int(np.count_nonzero(seen)) / max(1, int(np.count_nonzero(solid)))
    if visible >= MIN_VISIBLE:
        window[seen] = number
    return visible


def _camera_flaws(rng: np.random.Generator, canvas: Image.Image) -> np.ndarray:
    """Blur, brightness and contrast, noise, JPEG artefacts; returns (H, W, 3) uint8 RGB."""
    if rng.random() < 0.22:
        canvas = canvas.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.4, 1.3))))
    if rng.random() < 0.5:
        gain, lift = float(rng.uniform(0.72, 1.18)), float(rng.uniform(-22, 22))
        curve = [min(255, max(0, round((v - 128) * gain + 128 + lift))) for v in range(256)]
        canvas = canvas.point(curve * 3)
    image = np.asarray(canvas)
    if rng.random() < 0.45:
        strength = int(rng.integers(3, 34))
        noise = rng.integers(0, 256, size=image.shape, dtype=np.uint8).astype(np.int16)
        noise = (noise - 128) * strength >> 8
        image = np.clip(image + noise, 0, 255).astype(np.uint8)
    if rng.random() < 0.3:
        packed = io.BytesIO()
        Image.fromarray(image).save(packed, "JPEG", quality=int(rng.integers(35, 91)))
        packed.seek(0)
        image = np.asarray(Image.open(packed).convert("RGB"))
    return np.array(image, dtype=np.uint8, order="C")


def write_dataset(
    folder: str | os.PathLike[str],
    count: int,
    *,
    seed: int = 0,
    progress: CountProgress | None = None,
    categories: Sequence[str] = CLASSES,
    categories_of: Callable[[SceneObject], Sequence[int]] = lambda item: (item.class_id,),
) -> Path:
    """Write ``count`` scenes to ``folder`` in the COCO format and return the folder.

    ``folder/images/000001.jpg`` ... and ``folder/annotations.json``; category ids run from 1
    in the order of ``categories``, boxes are (x, y, width, height) in pixels, masks the visible
    pixels, and areas those of the boxes. ``categories_of``
    gives the indices of an object's categories, one annotation for each. Everything is built
    beside ``folder`` and renamed at the end, so a run that stops half-way leaves no half-written
    data set. ``progress(done, total)`` is called after every image.
    """
    folder = Path(folder)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count must be an integer of at least 1, got {count!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**20:
        raise ValueError(f"seed must be an integer from 0 to {2**20 - 1}, got {seed!r}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(
            f"cannot write a data set to {folder}: a file of that name exists; give another folder or move the file away"
        )
    if folder.is_dir() and any(folder.iterdir()):
        held = sum(1 for _ in folder.iterdir())
        raise ValueError(
            f"refusing to overwrite {folder}: it already holds {held} entries; "
            "give a new or empty folder, or delete this one first"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        (partial / "images").mkdir(parents=True)
        document = _write_images(partial / "images", count, seed, progress, categories, categories_of)
        (partial / "annotations.json").write_text(json.dumps(document), encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return folder


def _write_images(
    images: Path,
    count: int,
    seed: int,
    progress: CountProgress | None,
    categories: Sequence[str],
    categories_of: Callable[[SceneObject], Sequence[int]],
) -> dict:
    """Write the images and return the COCO document that describes them."""
    document: dict = {
        "info": {"description": "scenes drawn by detrt.data.scenes.scene", "seed": seed},
        "images": [],
        "categories": [{"id": k + 1, "name": name} for k, name in enumerate(categories)],
        "annotations": [],
    }
    for index in range(count):
        scene = draw_scene(seed * 2**20 + index)
        name = f"{index + 1:06d}.jpg"
        Image.fromarray(scene.image).save(images / name, quality=95, subsampling=0)
        height, width = scene.image.shape[:2]
        document["images"].append({"id": index + 1, "file_name": name, "height": height, "width": width})
        masks = scene.masks.to_coco()
        labels = [
            (item, mask, category) for item, mask in zip(scene.objects, masks, strict=True) for category in categories_of(item)
        ]
        for item, mask, category in labels:
            x0, y0, x1, y1 = item.box_xyxy
            document["annotations"].append(
                {
                    "id": len(document["annotations"]) + 1,
                    "image_id": index + 1,
                    "category_id": category + 1,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": 0,
                    "segmentation": mask,
                    "attributes": {
                        "color": item.color,
                        "fill": item.fill,
                        "visible": round(item.visible, 4),
                    },
                }
            )
        if progress is not None:
            progress(index + 1, count)
    return document
