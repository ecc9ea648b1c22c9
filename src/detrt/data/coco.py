"""COCO annotation files: images, categories and annotations, and which class of a model is which category."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from .. import files
from ..class_names import NameIndex
from ..errors import ImageError, OutputError, SpecError, is_finite, number_of
from ..spec import ModelSpec
from ..tasks.masks import Masks

Entry = dict[str, Any]
ImageId = int | str

# VOC names of COCO classes; the RT-DETR checkpoints of the hub use them, and so do some annotation files.
_ALIASES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}

# Of a polygon, pixels. pycocotools draws its edges outside the image as well, and reads wrong memory where int32 ends.
_FARTHEST = 1_000_000


@dataclass(frozen=True)
class CocoDataset:
    """The content of a COCO annotation file; see `load_coco`.

    images: entries with `id` and `file_name`. categories: entries with `id` and `name`. annotations: entries with `image_id`,
    `category_id`, `bbox` ([x, y, width, height], pixels), `area` and `iscrowd`. folder: where the images lie, if the data set tells it.
    numbered: its images have no ids, and got 1, 2, ... in the order of `images` when it was read.
    """

    path: Path
    images: Sequence[Entry]
    categories: Sequence[Entry]
    annotations: Sequence[Entry]
    folder: Path | None = None
    numbered: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the file, or of what was read of a data set of many files."""
        if self.path.suffix == ".json":
            return files.sha256_of(self.path)
        content = json.dumps([self.images, self.categories, self.annotations])
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def names(self) -> dict[Any, str]:
        """Category id -> name, with its id where several categories that have annotations share one."""
        names = {entry["id"]: str(entry["name"]) for entry in self.categories}
        used = {entry["category_id"] for entry in self.annotations}
        times = Counter(names[key] for key in used)
        return {key: f"{name} (id {key})" if key in used and times[name] > 1 else name for key, name in names.items()}

    def image_id(self, image: str | os.PathLike) -> ImageId:
        """The id of an image by its path.

        Raises:
            OutputError: the file names no such image, or several.
        """
        found = self._find(image)
        if found is None:
            name = PurePath(image).name
            what = "several images" if self._ids_by_tail.get((name,), 0) is None else "no image"
            raise OutputError(f"'{self.path}' has {what} with the file name '{name}'; got '{os.fspath(image)}'")
        return found

    def check_size(self, image_id: ImageId, size_hw: tuple[int, int]) -> None:
        """Compare the size of an image (height, width in pixels, EXIF orientation applied) with that of its entry, where it has one.

        Raises:
            ImageError: they differ, so the boxes and masks of the annotations are those of another image.
        """
        image = self._images_by_id[image_id]
        stated = image.get("height"), image.get("width")
        if None not in stated and stated != size_hw:
            raise ImageError(
                f"'{image['file_name']}' has {size_hw[1]}x{size_hw[0]} pixels, '{self.path}' says {stated[1]}x{stated[0]}; give the "
                "images that the annotations were made for, or correct the entry"
            )

    def category_ids(self, spec: ModelSpec) -> dict[int, Any]:
        """Class id -> category id, for the classes of a model whose name is a category's (`match_categories`).

        Raises:
            SpecError: no name is in both, or a name that may be several categories.
        """
        return match_categories(spec.labels, self.categories, {entry["category_id"] for entry in self.annotations})

    def files(self, folder: str | os.PathLike) -> list[Path]:
        """The image files in `folder`, in the order of the annotations; see `file_in`.

        Raises:
            ImageError: some do not exist, or one is that of several images.
        """
        names = [image["file_name"] for image in self.images]
        paths = [file_in(Path(folder), name) for name in names]
        times = Counter(paths)
        missing = [
            path.name
            for path, name in zip(paths, names, strict=True)
            if not path.is_file() or (times[path] > 1 and path != Path(folder) / name)
        ]
        if missing:
            raise ImageError(
                f"{len(missing)} of {number_of(len(paths), 'annotated image')} are not in '{os.fspath(folder)}', e.g. "
                f"{', '.join(missing[:3])}; give the folder that the annotation file belongs to"
            )
        return paths

    def first(self, limit: int | None) -> CocoDataset:
        """The first images and their annotations; None: all."""
        return self if limit is None else self._with(self.images[:limit])

    def subset(self, paths: Sequence[str]) -> tuple[CocoDataset, list[ImageId | None]]:
        """The part of the data set that belongs to some images, and the id of each image; None: not annotated.

        Raises:
            ImageError: none of the images is in the data set.
        """
        ids = [self._find(path) for path in paths]
        wanted = set(ids)
        images = [image for image in self.images if image["id"] in wanted]
        if not images:
            shown = ", ".join(PurePath(path).name for path in paths[:3])
            raise ImageError(f"'{self.path}' names none of the images ({shown} ...); give the annotations that belong to them")
        return self._with(images), ids

    def _with(self, images: Sequence[Entry]) -> CocoDataset:
        ids = {image["id"] for image in images}
        return replace(self, images=images, annotations=[entry for entry in self.annotations if entry["image_id"] in ids])

    def _find(self, image: str | os.PathLike) -> ImageId | None:
        """The id by the longest tail of a path that the file knows."""
        parts = PurePath(image).parts
        tails = (self._ids_by_tail.get(parts[start:]) for start in range(len(parts)))
        return next((found for found in tails if found is not None), None)

    @cached_property
    def _images_by_id(self) -> Mapping[ImageId, Entry]:
        return {image["id"]: image for image in self.images}

    @cached_property
    def _ids_by_tail(self) -> Mapping[tuple[str, ...], ImageId | None]:
        """Tail of a path -> image id. Data sets name files with or without folders; a tail of two images identifies neither."""
        ids: dict[tuple[str, ...], ImageId | None] = {}
        for image in self.images:
            parts = PurePath(image["file_name"]).parts
            for tail in (parts[start:] for start in range(len(parts))):
                ids[tail] = image["id"] if ids.get(tail, image["id"]) == image["id"] else None
        return ids


def file_in(folder: Path, name: str) -> Path:
    """The file in a folder that annotations name; where it is not there, that of the longest tail of the name which is.

    Tools write folders of their own before it (/data/upload/1/a.jpg, data/images/a.jpg), after ?d= of an address, and with backslashes.
    """
    parts = [part for part in re.split(r"[\\/]|\?d=", name) if part]
    tails = (folder.joinpath(*parts[start:]) for start in range(len(parts)) if ".." not in parts[start:])
    return next((path for path in (folder / name, *tails) if path.is_file()), folder / name)


def load_coco(path: str | os.PathLike, *, annotations: bool = True) -> CocoDataset:
    """Read a COCO annotation file; `area` and `iscrowd` are filled in where they are missing or null.

    annotations: False where only images and categories are needed, as those of a test set, which has no annotations.

    Raises:
        ImageError: missing, not JSON, or without the needed fields; the message names the entry.
    """
    path = Path(path)
    if not path.is_file():
        raise ImageError(
            f"there is no annotation file '{path}'; give a COCO file (instances.json), a YOLO data.yaml or a Pascal VOC folder"
        )
    raw = files.read_json(path, "annotation file", ImageError, most=files.LONGEST_DATA_SET)
    images = _entries(raw, path, "images", ("id", "file_name"))
    categories = _entries(raw, path, "categories", ("id", "name"))
    for part, entries in (("images", images), ("categories", categories)):
        for index, entry in enumerate(entries):
            if not isinstance(entry["id"], (int, str)):
                raise ImageError(f"the annotation file '{path}': {part}[{index}] has the id {entry['id']!r}, not a number")
        if len({isinstance(entry["id"], str) for entry in entries}) > 1:  # pycocotools sorts them
            raise ImageError(f"the annotation file '{path}': ids of '{part}' are numbers and text; give all as numbers")
        id_, count = Counter(entry["id"] for entry in entries).most_common(1)[0]
        if count > 1:
            raise ImageError(f"the annotation file '{path}': {count} entries of '{part}' have the id {id_!r}; give each its own")
    for index, category in enumerate(categories):
        if not isinstance(category["name"], (str, int, float)) or isinstance(category["name"], bool):
            raise ImageError(f"the annotation file '{path}': categories[{index}] has the name {category['name']!r}, not text")
        category["name"] = str(category["name"])
    for index, image in enumerate(images):
        name = image["file_name"]
        if not isinstance(name, (str, int)) or isinstance(name, bool) or not str(name).strip():
            raise ImageError(f"the annotation file '{path}': images[{index}] has the file_name {name!r}, not the name of a file")
        for side in ("width", "height"):
            if not isinstance(image.get(side, 0), (int, float, type(None))):
                raise ImageError(
                    f"the annotation file '{path}': images[{index}] has the {side} {image[side]!r}, not a number of pixels"
                )
        image["file_name"] = str(name) if "/" in str(name) else str(name).replace("\\", "/")  # as tools on Windows write it
    if not annotations:
        return CocoDataset(path, images, categories, [])
    found = _entries(raw, path, "annotations", ("image_id", "category_id", "bbox"))
    image_ids, category_ids = {image["id"] for image in images}, {category["id"] for category in categories}
    for index, entry in enumerate(found):
        box = entry["bbox"]
        if not is_bbox(box):
            raise ImageError(f"the annotation file '{path}': annotations[{index}] has the bbox {box!r}, not 4 finite numbers")
        if min(box[2:]) < 0:
            raise ImageError(
                f"the annotation file '{path}': annotations[{index}] has the bbox {box!r}; width and height cannot be negative"
            )
        for field, known in (("image_id", image_ids), ("category_id", category_ids)):
            if not isinstance(entry[field], (int, str)) or entry[field] not in known:
                raise ImageError(f"the annotation file '{path}': annotations[{index}] has an unknown {field} {entry[field]!r}")
        for field, usual in (("area", box[2] * box[3]), ("iscrowd", 0)):
            if entry.get(field) is None:
                entry[field] = usual
        area = entry["area"]
        if not is_finite(area):
            raise ImageError(f"the annotation file '{path}': annotations[{index}] has the area {area!r}, not a number")
        if entry["iscrowd"] not in (0, 1):
            raise ImageError(f"the annotation file '{path}': annotations[{index}] has iscrowd {entry['iscrowd']!r}, not 0 or 1")
    return CocoDataset(path, images, categories, found)


def match_categories(labels: Mapping[int, str], categories: Iterable[Entry], used: Collection[Any] = ()) -> dict[int, Any]:
    """Class id -> category id, for the classes whose name is a category's.

    An exact name comes first; then case, underscores and spaces do not matter, and then VOC names count as the COCO ones, on both sides.
    used: ids of categories that have annotations; of several categories with one name, the one among them is taken, since exports of
    some tools list the name of a class again as that of its group.

    Raises:
        SpecError: no name is in both (the message shows some of each), or a name that may be several categories.
    """
    names = {category["id"]: category["name"] for category in categories}
    index = NameIndex(names, (_plain, _canonical))
    matched = {}
    for class_id, label in labels.items():
        found = index.keys(label)
        if len(found) > 1:
            found = [category for category in found if category in used] or found
        if len(found) > 1:
            raise SpecError(
                f"the annotations have {number_of(len(found), 'category')} called {names[found[0]]!r} (ids {', '.join(map(str, found))}), and the "
                f"model one class; give categories their own names"
            )
        if found:
            matched[class_id] = found[0]
    if not matched:
        has, wants = list(labels.values())[:3], list(names.values())[:3]
        raise SpecError(
            f"no class of the model has the name of a category: the model has {has} ..., the annotations {wants} ...; give the "
            "names of this checkpoint with `labels=FILE` when it is exported, or the annotations that belong to the model"
        )
    return matched


def is_bbox(box: object) -> bool:
    """Whether a value is [x, y, width, height], each less than a billion pixels."""
    return isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) and abs(v) < 1e9 for v in box)


def check_masks(dataset: CocoDataset) -> None:
    """Compare the masks of annotations with what pycocotools reads.

    Raises:
        ImageError: an image without its size, or an annotation without a mask; the message names it.
    """
    for index, image in enumerate(dataset.images):
        if not all(isinstance(image.get(side), int) for side in ("height", "width")):
            raise ImageError(f"the annotation file '{dataset.path}': images[{index}] has no height and width, which masks need")
    sizes = {image["id"]: [image["height"], image["width"]] for image in dataset.images}
    for index, entry in enumerate(dataset.annotations):
        if not is_segmentation(entry.get("segmentation"), sizes[entry["image_id"]]):
            raise ImageError(
                f"the annotation file '{dataset.path}': annotations[{index}] has no mask of its image (segmentation: polygons of 3 or "
                "more points in pixels, or run lengths of the image's size); correct it, or compare boxes: `iou_type=bbox`"
            )


def is_segmentation(value: object, size_hw: Sequence[int]) -> bool:
    """Whether a value is a mask as pycocotools takes it: polygons, or run lengths of an image of this size."""
    if isinstance(value, list):
        polygons = (isinstance(one, list) and len(one) >= 6 and len(one) % 2 == 0 for one in value)
        return bool(value) and all(polygons) and all(_is_coordinate(v) for one in value for v in one)
    if not isinstance(value, dict) or value.get("size") != list(size_hw):
        return False
    counts = value.get("counts")
    # pycocotools reads past the end of a text whose last letter says that more follow.
    if isinstance(counts, str) and counts and counts[-1] < "P" and all("0" <= letter <= "o" for letter in counts):
        counts = Masks.from_coco([value], (size_hw[0], size_hw[1])).counts[0].tolist()
    if not isinstance(counts, list) or not all(isinstance(v, int) and v >= 0 for v in counts):
        return False
    return sum(counts) == size_hw[0] * size_hw[1]


def _is_coordinate(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _FARTHEST


def _entries(raw: object, path: Path, part: str, fields: Sequence[str]) -> list[Entry]:
    """Copies of the entries of one list of the file, each checked for its fields."""
    entries = raw.get(part) if isinstance(raw, dict) else None
    if entries == []:
        raise ImageError(f"the list '{part}' of the annotation file '{path}' is empty; give a COCO instances file with {part}")
    if not isinstance(entries, list):
        raise ImageError(f"the annotation file '{path}' has no list '{part}'; it is not a COCO instances file")
    for index, entry in enumerate(entries):
        missing = [field for field in fields if not isinstance(entry, dict) or field not in entry]
        if missing:
            raise ImageError(f"the annotation file '{path}': {part}[{index}] has no {', '.join(missing)}")
    return [dict(entry) for entry in entries]


def _plain(name: object) -> str:
    return " ".join(str(name).lower().replace("_", " ").split())


def _canonical(name: object) -> str:
    plain = _plain(name)
    return _ALIASES.get(plain, plain)
