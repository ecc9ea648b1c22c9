"""Detection as tensors: images and options in, detections out. `detrt serve` and Triton Inference Server have the same ones.

A request has a batch of images, whose number is the first axis of every tensor. All inputs but the images may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.worker_process import Bulk
from ..detections import Detections
from ..errors import number_of
from ..spec import ModelSpec, TensorInfo
from ..tasks import Task, tasks_of
from .errors import bad
from .kserve import BYTES
from .messages import MAX_DETECTIONS as MOST
from .messages import MAX_NAME, MAX_NAMES, MAX_PROMPT, ImageTask

IMAGE, PIXELS = "IMAGE", "PIXELS"
PROMPT, TASK, QUERY_IMAGES = "PROMPT", "TASK", "QUERY_IMAGES"
THRESHOLD, CLASSES, MAX_DETECTIONS = "THRESHOLD", "CLASSES", "MAX_DETECTIONS"
COUNT, SIZE = "COUNT", "SIZE"
_BATCH, _ROWS = "batch", "detections"


def _row(name: str, dtype: str, *sides: int | str) -> TensorInfo:
    return TensorInfo(name, dtype, (_BATCH, *sides))


_IMAGES = (_row(IMAGE, BYTES, 1), _row(PIXELS, "uint8", "height", "width", 3))
_ALWAYS = (_row(THRESHOLD, "float32", 1), _row(MAX_DETECTIONS, "int64", 1))


def detection_inputs(*, prompt: bool, task: bool, query_images: bool) -> tuple[TensorInfo, ...]:
    """The inputs of a model, by what it takes: of each request IMAGE or PIXELS, and any of the others.

    IMAGE: the content of an image file. PIXELS: RGB. PROMPT: one text, or class names; CLASSES: names, or ids as text; both may be
    filled up with empty elements, where the images of a request have different numbers. QUERY_IMAGES: files of what to find.
    """
    prompted = [
        (prompt, _row(PROMPT, BYTES, "names")),
        (task, _row(TASK, BYTES, 1)),
        (query_images, _row(QUERY_IMAGES, BYTES, "query images")),
        (not prompt, _row(CLASSES, BYTES, "classes")),
    ]
    return (*_IMAGES, *(row for wanted, row in prompted if wanted), *_ALWAYS)


@dataclass(frozen=True, slots=True)
class _Column:
    """An output with a row for each detection. sides: of a row. of: the rows of the detections of an image."""

    info: TensorInfo
    of: Callable[[Detections], Any]


def _column(name: str, dtype: str, *sides: int, of: Callable[[Detections], Any]) -> _Column:
    return _Column(_row(name, dtype, _ROWS, *sides), of)


_COLUMNS = (
    _column("BOXES", "float32", 4, of=lambda found: found.boxes_xyxy),
    _column("SCORES", "float32", of=lambda found: found.scores),
    _column("CLASS_IDS", "int64", of=lambda found: found.class_ids),
    _column("LABELS", BYTES, of=lambda found: [label.encode("utf-8", "backslashreplace") for label in found.labels]),
)
_SPANS = _column(
    "PHRASE_SPANS",
    "int64",
    2,
    of=lambda found: np.full((len(found), 2), -1) if found.phrase_spans is None else found.phrase_spans,
)


def _columns_of(spec: ModelSpec) -> tuple[_Column, ...]:
    return (*_COLUMNS, *map(_column_of, tasks_of(spec)), *[_SPANS] * (spec.text is not None))


def _column_of(task: Task) -> _Column:
    dtype = BYTES if task.dtype == "bytes" else task.dtype
    return _column(task.field.upper(), dtype, *task.sides, of=lambda found: task.to_rows(getattr(found, task.field)))


def detection_outputs(spec: ModelSpec) -> tuple[TensorInfo, ...]:
    """The outputs of a model.

    BOXES: x0, y0, x1, y1 in pixels of the image. CLASS_IDS, LABELS: and names. MASKS: run lengths, the "counts" of COCO's compressed
    form, of the SIZE (height, width) of the image. PHRASE_SPANS: first and end character in the prompt; -1 where it was a list.
    COUNT: detections of an image; rows behind it are filled with 0, and BYTES with nothing.
    """
    return (*(column.info for column in _columns_of(spec)), _row(COUNT, "int64", 1), _row(SIZE, "int64", 2))


def detection_tensors(found: Sequence[Detections], spec: ModelSpec, rows: int | None = None) -> dict[str, NDArray]:
    """The outputs for the images of a request. rows: for each image; None: as the one with most detections has, but at least 1."""
    rows = max([1, *map(len, found)]) if rows is None else rows
    outputs: dict[str, NDArray] = {}
    for column in _columns_of(spec):
        name, dtype, sides = column.info.name, column.info.dtype, column.info.shape[2:]
        shape: Any = (len(found), rows, *sides)
        outputs[name] = array = np.full(shape, b"", object) if dtype == BYTES else np.zeros(shape, dtype)
        for row, one in zip(array, found, strict=True):
            if len(one):
                row[: len(one)] = column.of(one)[:rows]
    outputs[COUNT] = np.array([[min(rows, len(one))] for one in found], np.int64)
    outputs[SIZE] = np.array([one.image_size_hw for one in found], np.int64)
    return outputs


def image_tasks(inputs: Mapping[str, NDArray], threshold: float) -> list[ImageTask]:
    """The tasks of a request, one for each image. inputs: of these names, types and numbers of axes. threshold: where none is given.

    Raises:
        Refused: no image, two kinds of images, or a value out of range.
    """
    given = [name for name in (IMAGE, PIXELS) if name in inputs]
    if len(given) != 1:
        what = "both" if given else "neither"
        raise bad(f"a request has {IMAGE} (the content of image files) or {PIXELS} (RGB), and this one has {what}")
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise bad(f"all inputs must have the same number of images, their first axis; got {counts}")

    def option(name: str, read: Callable[[NDArray], Any]) -> list[Any]:
        if name not in inputs:
            return [None] * counts[given[0]]
        return [read(row) for row in inputs[name]]

    columns = zip(
        [row if given[0] == PIXELS else Bulk(row.item()) for row in inputs[given[0]]],
        option(THRESHOLD, _score),
        option(CLASSES, lambda row: _names(CLASSES, row)),
        option(MAX_DETECTIONS, _most),
        option(PROMPT, _prompt),
        option(TASK, lambda row: _text(TASK, row.item(), MAX_PROMPT)),
        option(QUERY_IMAGES, lambda row: tuple((None, Bulk(one)) for one in _filled(row))),
        strict=True,
    )
    return [
        ImageTask(
            image, threshold if score is None else score, classes, most, prompt, task or "", queries or (), as_detections=True
        )
        for image, score, classes, most, prompt, task, queries in columns
    ]


def _score(row: NDArray) -> float:
    if not 0 <= (value := float(row.item())) <= 1:
        raise bad(f"{THRESHOLD} must be from 0 to 1; got {value:g}")
    return value


def _most(row: NDArray) -> int:
    if not 1 <= (value := int(row.item())) <= MOST:
        raise bad(f"{MAX_DETECTIONS} must be from 1 to {MOST}; got {value}")
    return value


def _prompt(row: NDArray) -> str | tuple[str, ...] | None:
    """One text, or class names."""
    found = _filled(row)
    if len(found) == 1:
        return _text(PROMPT, found[0], MAX_PROMPT)
    return _names(PROMPT, row)


def _names(name: str, row: NDArray) -> tuple[str, ...] | None:
    found = _filled(row)
    if len(found) > MAX_NAMES:
        raise bad(f"{name} has {number_of(len(found), 'name')}; at most {MAX_NAMES} are taken")
    return tuple(_text(name, one, MAX_NAME) for one in found) or None


def _filled(row: NDArray) -> list[bytes]:
    """The elements without the empty ones at the end."""
    found = list(row)
    while found and not len(found[-1]):
        del found[-1]
    return found


def _text(name: str, value: bytes, most: int) -> str:
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError as error:
        raise bad(f"{name} must be UTF-8; byte {error.start} is not") from None
    if len(text) > most:
        raise bad(f"{name} has {number_of(len(text), 'character')}; at most {most} are taken")
    return text
