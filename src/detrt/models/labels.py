"""Class names of the data sets that published checkpoints were trained on, chosen by the number of classes.

`label_sets/*.txt` hold one name per line: the category lists of COCO 2017 (cocodataset.org), Objects365 v2
(objects365.org) and LVIS v1 (lvisdataset.org, by id from 1), spelt as there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .. import files
from ..errors import SourceError, SpecError, number_of, one_line

# Ids of COCO categories that were never annotated; published ids skip them.
_COCO_GAPS = frozenset((12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
_FOLDER = Path(__file__).with_name("label_sets")


def _names(label_set: str) -> list[str]:
    return (_FOLDER / f"{label_set}.txt").read_text("utf-8").splitlines()


@cache
def label_sets() -> dict[int, tuple[str, dict[int, str]]]:
    """Number of columns of a head -> title of the label set, and its class names by column."""
    coco, objects = _names("coco"), _names("objects365")
    published = [number for number in range(1, 91) if number not in _COCO_GAPS]
    return {
        80: ("COCO", dict(enumerate(coco))),
        91: ("COCO by published ids", dict(zip(published, coco, strict=True))),
        365: ("Objects365", dict(enumerate(objects))),
        366: ("Objects365 by published ids", dict(enumerate(objects, 1))),
        1203: ("LVIS", dict(enumerate(_names("lvis")))),
    }


def labels_for(classes: int) -> dict[int, str] | None:
    """Class names for a head with so many columns; None if no set has that many."""
    found = label_sets().get(classes)
    return dict(found[1]) if found else None


def choose(
    classes: int,
    *,
    file: Path | str | None = None,
    stored: Mapping[int, str] | Sequence[str] = (),
    first: int | None = None,
    published: Mapping[int, tuple[str, Sequence[str]]] | None = None,
    ref: str = "",
) -> tuple[dict[int, str], str]:
    """Class names by column of a head, and a note on their origin: a file, the checkpoint, or a known label set.

    classes: columns of the head. stored: names in the checkpoint, by id or in order. first: column of the first
    name of a list; None where nothing tells. published: of the family's own published models, number of columns -> (title, names).

    Raises:
        SourceError: no names, and no set with that many classes. SpecError: a file that does not match the head.
    """

    if file:
        names = read_labels(file, classes, first)
        return names, f"class names of '{file}'{_start(names, classes)}"
    if first is None and not isinstance(stored, Mapping) and len(stored) == classes - 1 > 0:
        raise SpecError(f"'{ref}' has {len(stored)} {_ONE_MORE.format(classes)}")
    if stored:
        names = dict(stored) if isinstance(stored, Mapping) else dict(enumerate(stored, first or 0))
        # A fine-tuned head may keep the columns of its pre-training, which have no name then; the names of the label set have its ids.
        whole = first is not None and set(names.values()) != set((labels_for(classes) or {}).values())
        if max(names) < classes and (isinstance(stored, Mapping) or whole or len(names) >= classes - 1):
            return names, f"{number_of(len(names), 'class name')} of the checkpoint{_start(names, classes)}"
    unfit = f"; {number_of(len(stored), 'name')} in the checkpoint do not fit and were not used" if stored else ""
    sets = label_sets() | {count: (title, dict(enumerate(names))) for count, (title, names) in (published or {}).items()}
    found = sets.get(classes)
    if found is not None:
        return dict(found[1]), f"class names of {found[0]}, by their number{unfit}"
    known = ", ".join(f"{count} ({name})" for count, (name, _) in sets.items())
    raise SourceError(
        f"'{ref}' has {number_of(classes, 'class')} and names none, and no label set has so many; known: {known}{unfit}. "
        "Give the names with `labels=FILE`, one per line"
    )


_ONE_MORE = (
    "names, and the head has {} columns: one is of the background or of no class. Say which column the first name is for: "
    "`labels_start=0` (RF-DETR 1.5 and newer, and of YOLO data sets) or `labels_start=1` (ids from 1, as of COCO and RF-DETR up to 1.4)"
)


def _start(names: Mapping[int, str], classes: int) -> str:
    """Words on the column of the first name, where the head has more columns than names."""
    return "" if len(names) == classes else f", '{names[min(names)]}' is column {min(names)} (`labels_start`)"


def read_labels(path: Path | str, classes: int, first: int | None = None) -> dict[int, str]:
    """Class names from a text file (one per line), or from a JSON or YAML file: a list, an object of id to name, or such a one as `names`
    (YOLO data.yaml), `id2label` (config.json of transformers) or `categories` (COCO).

    first: column of the head that the first name is for. A list may then be shorter than the head. Ids are moved to begin there; where
        the head ends before the last of them, as those of COCO skip some, names have the order of their ids.

    Raises:
        SpecError: unreadable, empty, or not as many names as the head has classes.
    """
    names, lines, lowest = _named(path)
    if first is not None:
        moved = {first + number - (lowest or 0): name for number, name in names.items()}
        if lowest is not None and max(moved, default=0) >= classes:
            moved = dict(enumerate((names[number] for number in sorted(names)), first))
        count = len(names) if lines is None else lines
        if not names or first < 0 or first + count > classes:
            raise SpecError(
                f"`labels_start={first}` with the {number_of(count, 'name')} of '{path}' needs columns {first}..{first + count - 1}, and the head has "
                f"0..{classes - 1}"
            )
        return moved
    if lines == classes - 1:
        raise SpecError(f"labels file '{path}' has {lines} {_ONE_MORE.format(classes)}")
    if not names or max(names) >= classes or min(names) < 0 or (lines is not None and lines != classes):
        by_order = "where columns begin with the first of these ids, say which: `labels_start=0`, or 1; else "
        by_order = by_order if lowest is not None and len(names) <= classes else ""
        raise SpecError(
            f"labels file '{path}' has {number_of(len(names), 'name')} (ids up to {max(names, default=-1)}), but the head has {number_of(classes, 'class')} (ids "
            f"0..{classes - 1}); {by_order}give the labels that this checkpoint was trained with"
        )
    return names


def count_labels(path: Path | str, first: int | None = None) -> int:
    """How many classes a file of names is for: its lines, or the ids up to the largest; from column `first` on. Raises SpecError."""
    names, lines, lowest = _named(path)
    if lowest is None and lines is not None:
        return (first or 0) + lines
    return max(names, default=-1) + 1 if first is None else first + max(names, default=-1) - (lowest or 0) + 1


def _named(path: Path | str) -> tuple[dict[int, str], int | None, int | None]:
    """Class id -> name of a labels file; its number of names, None for a JSON object, whose ids are columns; and its lowest id, None
    where it says no ids.

    A blank line or name keeps its id free. Ids of COCO's categories are those of the data set, which a training may number in another way.
    """
    path = Path(path)
    if path.suffix.lower() in (".yaml", ".yml"):
        data = files.read_yaml(path, "labels file", extra="export")
    elif path.suffix.lower() == ".json":
        data = files.read_json(path, "labels file", unique=True)
    else:
        lines = files.read_names(path, "labels file", advice=_AS_JSON)
        return {number: line for number, line in enumerate(lines) if line}, len(lines), None
    if isinstance(data, dict):  # a file of a data set or a model, which has more than its class names
        data = next(stored_names(data), data)
    try:
        found = names_in(data)
    except ValueError as error:
        raise SpecError(
            f"labels file '{path}' must hold names as a list or as an object of id to name, alone or as \"names\" (YOLO data.yaml), "
            f'"id2label" (config.json), "categories" (COCO) or one of {", ".join(NAME_KEYS)}; got {one_line(str(error), 100)}'
        ) from None
    named = dict(found) if isinstance(found, Mapping) else dict(enumerate(found))
    count = len(named) if isinstance(data, list) else None
    return (
        {key: name for key, name in named.items() if name},
        count,
        min(found, default=None) if isinstance(found, Mapping) else None,
    )


# Keys under which files have their class names, the first counts most; and those of which the names are keys, and ids the values.
NAME_KEYS = ("classes", "CLASSES", "class_names", "names", "id2label", "class_to_idx", "label2id", "labels", "categories")
_BY_NAME = ("class_to_idx", "label2id")


def stored_names(data: Mapping[Any, Any]) -> Iterator[Any]:
    """What a file of a model or a data set has as class names, for `names_in`."""
    for key in NAME_KEYS:
        value = data.get(key)
        if key in _BY_NAME and isinstance(value, Mapping) and all(type(number) is int for number in value.values()):
            value = {number: name for name, number in value.items()}
        if value is not None:
            yield value


def names_in(value: object) -> Mapping[int, str] | Sequence[str]:
    """Class names of a value by id or in order: a list, an object of id to name or of name to id, or entries with `id` and `name`, as of COCO.
    A name without letters is "".

    Raises:
        ValueError: it is something else.
    """
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(one, Mapping) and {"id", "name"} <= set(one) for one in value)
    ):
        value = {one["id"]: one["name"] for one in value}
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        raise ValueError("no names" if isinstance(value, (Mapping, list, tuple)) else type(value).__name__)
    pairs = list(value.items() if isinstance(value, Mapping) else enumerate(value))
    are_ids, have_ids = (all(_ID.fullmatch(str(pair[at]).strip()) for pair in pairs) for at in (0, 1))
    if isinstance(value, Mapping) and have_ids and not are_ids:
        pairs = [(number, name) for name, number in pairs]
    for key, name in pairs:
        if not (_is_name(name) and _ID.fullmatch(str(key).strip())):
            raise ValueError(f"the name {name!r} of id {key!r}")
    named = {int(key): str(name).strip() for key, name in pairs}
    if len(named) < len(pairs):
        raise ValueError("an id twice")
    return named if isinstance(value, Mapping) else tuple(named.values())


_ID = re.compile(r"-?\d{1,9}")
_AS_JSON = (
    'ids and names are read from a file .json with {"0": "person", ...}, and such marks in names from a list, ["1 cent", ...]'
)


def _is_name(value: object) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)
