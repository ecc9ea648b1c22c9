"""Tests of the scene generator: numpy and Pillow only, no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from detrt.data.scenes import scene as scenes
from detrt.data.scenes.scene import CLASSES, MIN_VISIBLE, Scene, draw_scene, write_dataset
from detrt.data.scenes.shapes import COLORS, FILLS, MAX_ROTATION_DEG, SHAPES, silhouette


@pytest.fixture(scope="module")
def many() -> list[Scene]:
    return [draw_scene(seed) for seed in range(120)]


def test_same_seed_gives_the_same_scene_and_another_seed_another() -> None:
    one, two, other = draw_scene(7), draw_scene(7), draw_scene(8)
    assert np.array_equal(one.image, two.image) and np.array_equal(one.instances, two.instances)
    assert one.objects == two.objects
    assert one.image.shape != other.image.shape or not np.array_equal(one.image, other.image)


def test_a_fresh_interpreter_draws_the_same_image() -> None:
    code = "import zlib; from detrt.data.scenes.scene import draw_scene; print(zlib.crc32(draw_scene(11).image.tobytes()))"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert runs[0] == runs[1] != ""


def test_images_and_labels_are_well_formed(many: list[Scene]) -> None:
    for scene in many:
        assert scene.image.dtype == np.uint8
        assert scene.image.ndim == 3 and scene.image.shape[2] == 3
        assert scene.image.flags.c_contiguous
        assert all(240 <= side <= 640 for side in scene.image.shape[:2])
        assert len(scene.objects) <= 12
        for item in scene.objects:
            assert item.label == CLASSES[item.class_id]
            assert item.color in COLORS and item.fill in FILLS
            assert MIN_VISIBLE <= item.visible <= 1.0
            x0, y0, x1, y1 = item.box_xyxy
            assert 0 <= x0 < x1 <= scene.image.shape[1]
            assert 0 <= y0 < y1 <= scene.image.shape[0]


def test_every_class_color_and_fill_appears_in_both_orientations(many: list[Scene]) -> None:
    items = [item for scene in many for item in scene.objects]
    assert {item.label for item in items} == set(CLASSES)
    assert {item.color for item in items} == set(COLORS)
    assert {item.fill for item in items} == set(FILLS)
    assert {scene.image.shape[0] > scene.image.shape[1] for scene in many} == {True, False}
    sizes = [max(i.box_xyxy[2] - i.box_xyxy[0], i.box_xyxy[3] - i.box_xyxy[1]) for i in items]
    assert min(sizes) < 40 and max(sizes) > 130
    assert any(item.visible < 0.8 for item in items), "no scene holds a covered object"


def test_size_and_object_count_can_be_fixed() -> None:
    scene = draw_scene(3, size_hw=(200, 310), max_objects=2)
    assert scene.image.shape == (200, 310, 3)
    assert len(scene.objects) <= 2
    assert draw_scene(3, max_objects=0).objects == ()


@pytest.mark.parametrize("seed", [-1, 1.5, True, "4"])
def test_a_bad_seed_is_named(seed: object) -> None:
    with pytest.raises(ValueError, match="seed must be an integer"):
        draw_scene(seed)  # type: ignore[arg-type]


def test_too_small_a_image_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 64 px"):
        draw_scene(0, size_hw=(32, 400))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("size", [24.0, 130.0])
def test_silhouette_box_is_tight(name: str, size: float) -> None:
    mask, rim, left, top, box = silhouette(name, (300.3, 200.7), (size, 0.8 * size), 20.0)
    alpha = np.asarray(mask)
    rows, columns = np.flatnonzero(alpha.max(1)), np.flatnonzero(alpha.max(0))
    seen = (left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1)
    # The box lies on a finer grid than the mask, so the two agree to within one pixel.
    for got, whole, outward in zip(box, seen, (1, 1, -1, -1), strict=True):
        assert 0 <= (got - whole) * outward < 1
    assert np.all(np.asarray(rim) <= alpha)


def test_shapes_are_mirror_symmetric() -> None:
    """Training flips images, which is right only as long as this holds."""
    for name in SHAPES:
        mask = np.asarray(silhouette(name, (300.0, 300.0), (401.0, 401.0), 0.0)[0], dtype=int)
        columns = np.flatnonzero(mask.max(0))
        mask = mask[:, columns[0] : columns[-1] + 1] >= 128
        unequal = np.count_nonzero(mask != mask[:, ::-1])
        assert unequal <= 0.03 * np.count_nonzero(mask), name
    assert set(MAX_ROTATION_DEG) <= set(SHAPES)


def test_boxes_are_tight_in_the_drawn_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """One object on a flat background: what differs from the background is the box."""
    monkeypatch.setattr(scenes, "_background", lambda rng, h, w: Image.new("RGB", (w, h), (128, 100, 60)))
    monkeypatch.setattr(scenes, "_camera_flaws", lambda rng, source: np.array(source))
    monkeypatch.setattr(scenes, "_draw_lines", lambda *args, **kwargs: None)
    checked = 0
    for seed in range(40):
        scene = draw_scene(seed, max_objects=1)
        if not scene.objects:
            continue
        distance = np.abs(scene.image.astype(int) - (128, 100, 60)).max(2)
        if scene.objects[0].fill != "plain":
            continue  # a pattern may hold the background's own colour
        rows, columns = np.flatnonzero(distance.max(1)), np.flatnonzero(distance.max(0))
        seen = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        assert np.abs(np.subtract(scene.objects[0].box_xyxy, seen)).max() <= 1.0
        drawn = distance > distance.max() / 2
        mask = scene.masks.to_array()[0]
        assert (mask & drawn).sum() > 0.97 * (mask | drawn).sum()
        checked += 1
    assert checked >= 3


def test_masks_are_what_is_seen_of_the_objects(many: list[Scene]) -> None:
    covered = 0
    for scene in many:
        masks = scene.masks.to_array()
        assert len(masks) == len(scene.objects) and masks.shape[1:] == scene.image.shape[:2] == scene.instances.shape
        assert (masks.sum(0) <= 1).all(), "two objects are seen at one pixel"
        for item, mask in zip(scene.objects, masks, strict=True):
            ys, xs = np.nonzero(mask)
            x0, y0, x1, y1 = item.box_xyxy
            assert x0 - 1 <= xs.min() and xs.max() + 1 <= x1 + 1 and y0 - 1 <= ys.min() and ys.max() + 1 <= y1 + 1
            covered += item.visible < 0.8
    assert covered > 5


def test_the_object_in_front_covers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects are painted from back to front: each paints its mask anew over those before it."""
    layers: list[np.ndarray] = []
    original = Image.Image.paste

    def paste(self: Image.Image, *args: object) -> None:
        if self.size == (200, 200) and len(args) == 3 and isinstance(args[0], Image.Image):
            layer = Image.new("L", self.size)
            original(layer, args[2], args[1])
            layers.append(np.asarray(layer) >= 128)
        original(self, *args)

    monkeypatch.setattr(Image.Image, "paste", paste)
    overlaps = 0
    for seed in range(30):
        layers.clear()
        scene = draw_scene(seed, size_hw=(200, 200))
        assert len(layers) == len(scene.objects)
        for k, mask in enumerate(scene.masks.to_array()):
            above = np.any(layers[k + 1 :], axis=0) if layers[k + 1 :] else np.zeros((200, 200), bool)
            assert np.array_equal(mask, layers[k] & ~above)
            overlaps += bool((layers[k] & above).any())
    assert overlaps > 5


def test_a_covered_object_is_neither_labelled_nor_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects on one spot: only what shows enough of itself under the rest may stay."""
    spot = (60.0, 60.0, 140.0, 140.0)
    monkeypatch.setattr(scenes, "_find_spot", lambda *args: ((100.0, 100.0), spot))
    painted: list[tuple[int, int]] = []
    original = Image.Image.paste

    def paste(self: Image.Image, *args: object) -> None:
        if self.size == (200, 200) and len(args) == 3 and isinstance(args[0], Image.Image):
            painted.append(args[0].size)
        original(self, *args)

    monkeypatch.setattr(Image.Image, "paste", paste)
    dropped = 0
    for seed in range(20):
        painted.clear()
        scene = draw_scene(seed, size_hw=(200, 200), max_objects=12)
        assert len(painted) == len(scene.objects)
        assert all(item.visible >= MIN_VISIBLE for item in scene.objects)
        if scene.objects:
            assert scene.objects[-1].visible > 0.99, "the frontmost object is never covered"
        dropped += len(scene.objects) <= 3
    assert dropped >= 10


def test_dataset_is_valid_coco(tmp_path) -> None:
    calls: list[tuple[int, int]] = []
    folder = write_dataset(tmp_path / "set", 6, seed=5, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(k, 6) for k in range(1, 7)]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    document = json.loads((folder / "annotations.json").read_text(encoding="utf-8"))
    assert [c["name"] for c in document["categories"]] == list(CLASSES)
    assert [c["id"] for c in document["categories"]] == list(range(1, len(CLASSES) + 1))
    sizes = {}
    for image in document["images"]:
        with Image.open(folder / "images" / image["file_name"]) as source:
            assert source.size == (image["width"], image["height"])
        sizes[image["id"]] = (image["width"], image["height"])
    assert len({a["id"] for a in document["annotations"]}) == len(document["annotations"]) > 0
    for annotation in document["annotations"]:
        x, y, w, h = annotation["bbox"]
        width, height = sizes[annotation["image_id"]]
        assert x >= 0 and y >= 0 and w > 0 and h > 0 and x + w <= width and y + h <= height
        assert annotation["area"] == pytest.approx(w * h)
        assert annotation["iscrowd"] == 0
        assert set(annotation["attributes"]) == {"color", "fill", "visible"}


def test_dataset_loads_with_pycocotools(tmp_path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    folder = write_dataset(tmp_path / "set", 3)
    loaded = coco.COCO(str(folder / "annotations.json"))
    assert len(loaded.getImgIds()) == 3
    assert len(loaded.getCatIds()) == len(CLASSES)
    for index, image in enumerate(loaded.getImgIds()):
        masks = [loaded.annToMask(entry) for entry in loaded.loadAnns(loaded.getAnnIds([image]))]
        assert np.array_equal(masks, draw_scene(index).masks.to_array())


def test_a_filled_folder_is_not_overwritten(tmp_path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_dataset(folder, 1)  # an empty folder is fine
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(ValueError, match=r"refusing to overwrite .*already holds 2 entries.*delete"):
        write_dataset(folder, 2)
    assert sorted(path.name for path in folder.rglob("*")) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="a file of that name exists"):
        write_dataset(tmp_path / "file", 1)
    with pytest.raises(ValueError, match="count must be an integer"):
        write_dataset(tmp_path / "none", 0)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_nothing(tmp_path, failure: type[BaseException]) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise failure()

    with pytest.raises(failure):
        write_dataset(tmp_path / "set", 4, progress=stop)
    assert list(tmp_path.iterdir()) == []
