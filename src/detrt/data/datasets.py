"""Annotated data sets as they are: COCO, YOLO and Pascal VOC, recognised by what is there.

    COCO        a JSON file, or a folder with it, in the folder itself, in its `annotations/`, or in its `valid/`, `test/` or `train/`,
                with "annotations", "instances" or "result" in its name
    YOLO        `data.yaml`, or its folder: `names`, and images of `val`, else `test`, else `train`; labels lie in `labels/` where the
                images lie in `images/`, else beside them. Boxes, with points of poses or without, or polygons. Or a folder with
                `classes.txt`, `images/` and `labels/`; or `obj.data` of Darknet, which CVAT writes as YOLO 1.1, or its folder
    Pascal VOC  a folder of XML files, or the folder above `Annotations/` and `JPEGImages/`, or above `valid/`, `test/` and `train/`

`:val`, `:test` or `:train` behind a folder, or a `data.yaml`, chooses that part. VOC corners are taken as they are, as in COCO: x from `xmin` to
`xmax`, without the pixel by which the files of the original challenge begin later. What is `difficult` there counts neither as found nor
as missed.
"""

from __future__ import annotations

import math
import os
import reprlib
import warnings
import xml.etree.ElementTree as xml
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from ..errors import ImageError, number_of
from ..files import read_lines, read_yaml
from .coco import CocoDataset, Entry, file_in, load_coco
from .images import IMAGE_FORMATS, IMAGE_SUFFIXES, available, natural_key, orientation_of

PARTS = ("val", "test", "train")
_SETTINGS = (".yaml", ".yml", ".data")  # of files that describe a YOLO data set


def load_dataset(path: str | os.PathLike, *, annotations: bool = True) -> CocoDataset:
    """Read a data set; `folder` of the result is where its images lie, None of a COCO file.

    annotations: as of `load_coco`.

    Raises:
        ImageError: missing, damaged, or in no known form. MissingPackageError: PyYAML, for `data.yaml`, is not installed.
    """
    place, part = _split(Path(path))
    if place.is_file() and place.suffix.lower() in _SETTINGS:
        return _yolo(place, part, annotations)
    if not place.is_dir():
        return load_coco(path, annotations=annotations)
    if (settings := _settings_of(place)) is not None:
        return _yolo(settings, part, annotations)
    if (voc := _voc_folders(place, part)) is not None:
        return _voc(*voc, annotations)
    if (file := _coco_file(place, part)) is not None:
        read = load_coco(file, annotations=annotations)
        return replace(read, folder=image_folder(file, [image["file_name"] for image in read.images]))
    raise ImageError(
        f"'{place}' is no data set that is known: give a COCO file (instances.json), a YOLO data.yaml or its folder, or a Pascal VOC folder "
        "with Annotations/ and JPEGImages/"
    )


def is_dataset(path: Path) -> bool:
    """Whether a path is that of a data set of another form than a COCO file, or a part of one. A folder of images is none, whatever files
    of annotations are beside them."""
    place, part = _split(path)
    if _settings_of(place) is not None or place.suffix.lower() in _SETTINGS:
        return True
    if (voc := _voc_folders(place, part)) is not None:
        return voc[0] != place
    return _coco_file(place, part) is not None and not any(one.suffix.lower() in IMAGE_SUFFIXES for one in place.iterdir())


def _voc_folders(place: Path, part: str) -> tuple[Path, Path, str] | None:
    """Of Pascal VOC: the folders of the annotations and of the images, and the part that is chosen among them; None: there are none."""
    if (place / "Annotations").is_dir():
        return place / "Annotations", place / "JPEGImages", part
    if _xml_files(place):
        return place, place, part
    parts = (folder for name in _wanted(part) for folder in _part_folders(place, name) if _xml_files(folder))
    return next(((folder, folder, "") for folder in parts), None)


def _wanted(part: str) -> Sequence[str]:
    return [part] if part else PARTS


def _part_folders(place: Path, part: str) -> list[Path]:
    return [place / part, *([place / "valid"] if part == "val" else [])]


def _xml_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.xml") if not path.name.startswith(".")]


def _settings_of(folder: Path) -> Path | None:
    """The file that describes a YOLO data set in its folder: `classes.txt` beside `labels/` where no YAML file does."""
    names = ("data.yaml", "data.yml", *(["classes.txt"] if (folder / "labels").is_dir() else []), "obj.data")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _coco_file(place: Path, part: str) -> Path | None:
    """The COCO file of a folder, as tools lay it out; None: there is none, or it is not clear which."""

    def files_in(folder: Path) -> list[Path]:
        return [
            one
            for one in sorted(folder.glob("*.json"))
            if not one.name.startswith(".") and any(word in one.stem for word in ("annotations", "instances", "result"))
        ]

    wanted = _wanted(part)
    for folder in (place, place / "annotations"):
        found = files_in(folder)
        if len(found) == 1 and not part:
            return found[0]
        for name in wanted:
            if len(of_part := [one for one in found if name in one.stem.lower()]) == 1:
                return of_part[0]
    for name in wanted:
        for folder in _part_folders(place, name):
            if len(found := files_in(folder)) == 1:
                return found[0]
    return None


def folder_of_images(dataset: CocoDataset) -> Path:
    """Where the images of a data set lie: the folder that it tells, or the one that `image_folder` finds. Raises ImageError."""
    return dataset.folder or image_folder(dataset.path, [str(image["file_name"]) for image in dataset.images])


def image_folder(path: Path, names: Sequence[str]) -> Path:
    """The folder with the images of a COCO file.

    Raises:
        ImageError: no known folder has all of them.
    """
    kind = path.stem.rpartition("_")[2]
    folders = [base / sub for base in (path.parent, path.parent.parent) for sub in ("", "images", kind, f"images/{kind}")]
    if not names:
        raise ImageError(f"'{path}' names no images; give a COCO file with images")
    place, missing = folders[0], names
    for folder in folders:
        absent = [name for name in names if not file_in(folder, name).is_file()]
        if not absent:
            return folder
        if len(absent) < len(missing):
            place, missing = folder, absent
    if missing is names:
        raise ImageError(
            f"the {number_of(len(names), 'image')} of '{path}' are in none of {', '.join(map(str, folders))}; put the file beside them"
        )
    raise ImageError(
        f"{len(missing)} of the {number_of(len(names), 'image')} of '{path}' are not in '{place}', where the others are, e.g. "
        f"{', '.join(missing[:3])}; put them there, or remove their entries"
    )


def _split(path: Path) -> tuple[Path, str]:
    """A path without `:test` and the like, and that part; "" where there is none."""
    name, colon, part = path.name.rpartition(":")
    if colon and part in PARTS and not path.exists():
        return path.with_name(name), part
    return path, ""


def _yolo(file: Path, part: str, annotations: bool) -> CocoDataset:
    settings = _read_settings(file)
    names = settings.get("names")
    if isinstance(names, list):
        names = dict(enumerate(names))
    elif isinstance(names, Mapping):
        names = {int(key) if isinstance(key, str) and key.isdecimal() else key: name for key, name in names.items()}
    if not isinstance(names, Mapping) or not names or not all(type(key) is int for key in names):
        raise ImageError(f"'{file}' has no `names`, a list of class names or numbers with names; got {reprlib.repr(names)[:80]}")
    for key, name in names.items():
        if not isinstance(name, str):
            raise ImageError(
                f"'{file}': the name of class {key} is {reprlib.repr(name)[:80]}, not text; write it with quotes, such as \"null\""
            )
    entries = [name for name in _wanted(part) if settings.get(name)]
    if not entries:
        raise ImageError(f"'{file}' names no images as {part or ', '.join(PARTS)}; add one, such as val: images/val")
    paths = _yolo_images(file, settings, entries[0])
    images: list[Entry] = []
    rows: list[Entry] = []
    for number, path in enumerate(paths, 1):
        height, width = size_of(path)
        images.append({"id": number, "file_name": os.path.relpath(path, file.parent), "height": height, "width": width})
        label = _label_of(path)
        if not annotations or label is None:
            continue
        for index, line in enumerate(read_lines(label, "YOLO label", ImageError), 1):
            if line:
                row = _yolo_row(line, f"'{label}', line {index}", names, (height, width), points="kpt_shape" in settings)
                rows.append({"id": len(rows) + 1, "image_id": number, "iscrowd": 0, **row})
    if annotations and not rows:
        sought = " or ".join(f"'{place}'" for place in _label_places(paths[0]))
        raise ImageError(f"the labels of '{file}' have no object; that of '{paths[0]}' would be {sought}; put the labels there")
    categories = [{"id": key, "name": str(name)} for key, name in sorted(names.items())]
    return CocoDataset(file, images, categories, rows, folder=file.parent, numbered=True)


def _yolo_images(file: Path, settings: Mapping[str, Any], part: str) -> list[Path]:
    """The image files of a part, in natural order."""
    base = file.parent / str(settings.get("path") or "")
    given = settings[part] if isinstance(settings[part], list) else [settings[part]]
    found: list[Path] = []
    for entry in map(str, given):
        # Exports of some tools write ../valid/images for a folder beside the file.
        places = [root / name for root in (base, file.parent) for name in (entry, entry.removeprefix("../"))]
        place = next((one for one in places if one.exists()), None)
        if place is None:
            other = next((name for name in PARTS if name != part and settings.get(name)), "")
            more = f", or choose another part: '{file}:{other}'" if other else ""
            raise ImageError(
                f"'{file}': there is no '{places[0]}', which '{part}' names; correct it, or 'path' of the file{more}"
            )
        if place.is_dir():
            files = (p for p in place.rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES and not p.name.startswith("."))
            found += sorted(files, key=natural_key)
        else:
            for line in filter(None, read_lines(place, "list of images", ImageError)):
                named = [file_in(root, line) for root in (base, place.parent)]
                found.append(next((one for one in named if one.is_file()), named[0]))
    found = list(dict.fromkeys(found))
    if not found:
        raise ImageError(f"'{file}': `{part}` has no images ({' '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def _label_places(image: Path) -> list[Path]:
    """Where the label of an image may lie: in `labels/` instead of `images/`, or beside it."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("images")] = "labels"
    return [path.with_suffix(".txt") for path in dict.fromkeys((Path(*parts), image))]


def _label_of(image: Path) -> Path | None:
    """The label of an image; None: it has none."""
    return next((path for path in _label_places(image) if path.exists()), None)


SLACK = 0.01  # by which tools let boxes stand out, as ultralytics does


def _yolo_row(line: str, where: str, names: Mapping[int, Any], size_hw: tuple[int, int], *, points: bool) -> Entry:
    """`class x y width height` or `class x y x y x y ...`, fractions of the image; a number behind a box is its score.

    points: what stands behind a box are the points of a pose.
    """
    words = line.split()
    try:
        number, *values = map(float, words)
        class_id = int(number)
    except (ValueError, OverflowError):
        raise ImageError(f"{where}: {line[:80]!r} has a word that is no number; it is not a YOLO label") from None
    if class_id != number:
        raise ImageError(f"{where}: a class is an integer; got {words[0]!r}")
    if points:
        values = values[:4]
    if class_id not in names:
        raise ImageError(f"{where}: class {class_id} has no name in data.yaml, which has {min(names)} to {max(names)}")
    if len(values) < 4 or not all(map(math.isfinite, values)) or (len(values) > 5 and len(values) % 2):
        raise ImageError(
            f"{where}: a label is a class and 4 numbers of a box, or 3 or more points of a polygon; got {line[:80]!r}"
        )
    height, width = size_hw
    most = max(values[:4] if len(values) <= 5 else values)
    if min(values) < -SLACK or most > 1 + SLACK or (len(values) <= 5 and min(values[2:4]) < 0):
        raise ImageError(
            f"{where}: {line[:80]!r} is outside of the image; numbers are fractions of its width and height, from 0 to 1"
        )
    if len(values) <= 5:
        x, y, w, h = values[0] * width, values[1] * height, values[2] * width, values[3] * height
        return {"category_id": class_id, "bbox": [x - w / 2, y - h / 2, w, h], "area": w * h}
    points = [value * side for value, side in zip(values, [width, height] * (len(values) // 2), strict=True)]
    (x0, x1), (y0, y1) = ((min(side), max(side)) for side in (points[0::2], points[1::2]))
    area = abs(sum(points[i - 2] * points[i + 1] - points[i] * points[i - 1] for i in range(0, len(points), 2))) / 2
    return {"category_id": class_id, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": area, "segmentation": [points]}


def _voc(annotations: Path, folder: Path, part: str, needed: bool) -> CocoDataset:
    """needed: objects are."""
    files = sorted((path for path in annotations.rglob("*.xml") if not path.name.startswith(".")), key=natural_key)
    if part:
        listing = annotations.parent / "ImageSets" / "Main" / f"{part}.txt"
        if not listing.is_file():
            raise ImageError(f"there is no '{listing}', which would name the images of the part '{part}'; leave :{part} out")
        lines = filter(None, read_lines(listing, "list of images", ImageError))
        places = [annotations / f"{line}.xml" for line in lines]  # or with a number behind the name
        files = list(
            dict.fromkeys(p if p.is_file() else p.with_name(f"{p.name.split()[0].removesuffix('.xml')}.xml") for p in places)
        )
    if not files:
        raise ImageError(f"'{annotations}' has no XML files of Pascal VOC")
    images: list[Entry] = []
    found: list[tuple[int, str, list[float], int]] = []
    for number, file in enumerate(files, 1):
        try:
            root = xml.parse(file).getroot()
            name, size = _text(root, "filename"), root.find("size")
            sides = None if size is None else (int(float(_text(size, "height"))), int(float(_text(size, "width"))))
            for one in root.findall("object"):
                x0, y0, x1, y1 = (float(_text(one, f"bndbox/{key}")) for key in ("xmin", "ymin", "xmax", "ymax"))
                box = [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)]
                if not all(map(math.isfinite, box)):
                    raise ValueError(f"the box {box}")
                found.append((number, _text(one, "name"), box, _difficult(one)))
        except OSError as error:
            raise ImageError(f"the annotation file '{file}' cannot be read: {error.strerror}") from None
        except (xml.ParseError, LookupError, OverflowError, ValueError) as error:  # LookupError: an encoding that does not exist
            raise ImageError(f"'{file}' is not an annotation file of Pascal VOC: {error}") from None
        if not (folder / name).is_file():  # tools write the name of another suffix, or none
            name = next((p.name for p in sorted(folder.glob(f"{file.stem}.*")) if p.suffix.lower() in IMAGE_SUFFIXES), name)
        if sides is None or not all(sides):
            sides = size_of(folder / name)
        images.append({"id": number, "file_name": name, "height": sides[0], "width": sides[1]})
    if needed and not found:
        raise ImageError(f"none of the {len(files)} XML files in '{annotations}' has an object; give annotations with objects")
    ids = {name: number for number, name in enumerate(sorted({name for _, name, _, _ in found}), 1)}
    rows = [
        {
            "id": i,
            "image_id": image,
            "category_id": ids[name],
            "bbox": box,
            "area": box[2] * box[3],
            "iscrowd": difficult,
        }
        for i, (image, name, box, difficult) in enumerate(found, 1)
    ]
    categories = [{"id": i, "name": name} for name, i in ids.items()]
    return CocoDataset(annotations, images, categories, rows, folder=folder, numbered=True)


def _difficult(element: xml.Element) -> int:
    text = (element.findtext("difficult") or "0").strip().lower()
    if text not in ("0", "1", "false", "true", "unspecified"):
        raise ValueError(f"<difficult> is {text!r}, not 0 or 1")
    return int(text in ("1", "true"))


def _text(element: xml.Element, key: str) -> str:
    text = element.findtext(key)
    if text is None or not text.strip():
        raise ValueError(f"it has no <{key}>")
    return text.strip()


def size_of(path: Path) -> tuple[int, int]:
    """(height, width) of an image file as it is shown, from its header. Raises ImageError."""
    try:
        with warnings.catch_warnings(), Image.open(path, formats=available(IMAGE_FORMATS)) as image:
            warnings.simplefilter("ignore")
            width, height = image.size
            turned = orientation_of(image) > 4
    except FileNotFoundError:
        raise ImageError(f"there is no image '{path}', which the annotations name; check the path") from None
    except Exception as error:  # Pillow's parsers raise nearly anything for a hostile header
        raise ImageError(f"'{path}' cannot be read as an image: {error}") from None
    return (width, height) if turned else (height, width)


def _read_settings(file: Path) -> Mapping[str, Any]:
    """`names`, and the images of parts, of a file that describes a YOLO data set."""
    if file.suffix.lower() == ".txt":  # classes.txt
        return {"names": _names_in(file), "val": "images"}
    if file.suffix.lower() == ".data":  # classes = 2, train = data/train.txt, valid = ..., names = data/obj.names
        pairs = [line.partition("=") for line in read_lines(file, "annotation file", ImageError)]
        given = {key.strip(): value.strip() for key, sign, value in pairs if sign and value.strip()}
        paths = {key: file_in(file.parent, value) for key, value in given.items() if key in ("names", "valid", *PARTS)}
        names = _names_in(paths.pop("names")) if "names" in paths else None
        return {"names": names, **{"val" if key == "valid" else key: str(path.absolute()) for key, path in paths.items()}}
    data = read_yaml(file, "annotation file", ImageError, extra="eval", advice="give the data.yaml of a YOLO data set")
    if not isinstance(data, Mapping):
        raise ImageError(f"'{file}' holds no settings of a YOLO data set; it has names: and val:")
    return data


def _names_in(file: Path) -> list[str]:
    return [line for line in read_lines(file, "list of classes", ImageError) if line]
