"""Sinks of detections: JSON lines, COCO results, CSV. Files are written atomically; "-" is stdout."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ..detections import Detections
from ..errors import OutputError, printable
from ..files import naming, writing
from ..spec import ModelSpec
from .coco import CocoDataset

STDOUT = "-"
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "'", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_CORNERS = ["x0", "y0", "x1", "y1"]
LIVE_COLUMNS, TRACK_COLUMNS = ["wall_time", "latency_s"], ["track_id"]  # further ones, of cameras and of tracked frames
CSV_COLUMNS = ["image", "frame", "time_s", "width", "height", "label", "class_id", "score", *_CORNERS]


@dataclass(frozen=True, slots=True)
class Record:
    """Detections of one image, or of one frame of a video or a camera.

    image: the path of the caller. wall_time, latency_s: of a camera: when the frame arrived, and seconds until its detections.
    """

    image: str
    detections: Detections
    frame: int | None = None
    time_s: float | None = None
    wall_time: datetime.datetime | None = None
    latency_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; see docs/guide/detect.md."""
        height, width = self.detections.image_size_hw
        data: dict[str, Any] = {"image": self.image}
        if self.frame is not None:
            data |= {"frame": self.frame, "time_s": round(self.time_s or 0.0, 6)}
        if self.wall_time is not None:
            data |= {"wall_time": self.wall_time.isoformat(timespec="milliseconds"), "latency_s": round(self.latency_s or 0.0, 4)}
        if self.detections.prompt:
            data["prompt"] = self.detections.prompt
        return data | {"width": width, "height": height, "detections": self.detections.to_list()}


Write = Callable[[Record], None]


@contextlib.contextmanager
def jsonl_writer(path: str | os.PathLike) -> Iterator[Write]:
    """One JSON object per line; on stdout each line is flushed. Raises OutputError."""
    with _text_target(path) as file:
        terminal = file.isatty()

        def write(record: Record) -> None:
            with naming(path):
                line = json.dumps(record.to_dict(), ensure_ascii=False)
                if terminal and printable(line) != line:  # the control characters above 0x7f, which JSON leaves as they are
                    line = json.dumps(record.to_dict())
                file.write(line + "\n")
                if os.fspath(path) == STDOUT:
                    file.flush()

        yield write


@contextlib.contextmanager
def text_writer() -> Iterator[Write]:
    """One line per image for people, on stdout: "street.jpg: 2 person, 1 dog". Raises OutputError."""
    with _text_target(STDOUT) as file:

        def write(record: Record) -> None:
            counts = Counter(record.detections.labels)
            found = ", ".join(f"{number} {printable(label)}" for label, number in counts.most_common()) or "nothing"
            frame = "" if record.frame is None else f" frame {record.frame}"
            with naming(STDOUT):
                file.write(f"{printable(record.image)}{frame}: {found}\n")
                file.flush()

        yield write


@contextlib.contextmanager
def csv_writer(path: str | os.PathLike, extra: Sequence[str] = ()) -> Iterator[Write]:
    """One row per detection, columns CSV_COLUMNS and `extra` ones; an image without detections has none. Raises OutputError.

    On a terminal, which would obey them, control characters are written as escapes; elsewhere they are kept.
    """
    with _text_target(path) as file:
        terminal = file.isatty()
        columns = [*CSV_COLUMNS, *extra]
        rows = csv.DictWriter(_LineFeeds(file), columns, lineterminator="\r\n")
        rows.writeheader()

        def write(record: Record) -> None:
            data = record.to_dict()
            common = {key: data[key] for key in columns if key in data}
            for found in data["detections"]:
                corners = dict(zip(_CORNERS, found.pop("box_xyxy"), strict=True))
                own = {key: value for key, value in found.items() if key in columns}  # no column holds masks and phrases
                with naming(path):
                    rows.writerow({key: _cell(value, terminal) for key, value in (common | own | corners).items()})

        yield write


@dataclass(frozen=True, slots=True)
class _LineFeeds:
    """Rows of CSV that end in a line feed. Of line breaks within cells, `csv` quotes those alone that rows end in: both of "\\r\\n"."""

    file: TextIO

    def write(self, row: str) -> None:
        self.file.write(row.removesuffix("\r\n") + "\n")


def _cell(value: Any, terminal: bool) -> Any:
    """A text that a spreadsheet would run as a formula gets an apostrophe in front, and so does one that has an apostrophe there, so
    that a reader gets the text back by taking one apostrophe away (OWASP, CSV injection)."""
    if not isinstance(value, str):
        return value
    text = f"'{value}" if value.startswith(_FORMULA) else value
    return printable(text) if terminal else text


@contextlib.contextmanager
def coco_writer(path: str | os.PathLike, spec: ModelSpec, truth: CocoDataset | None = None) -> Iterator[Write]:
    """A COCO results file, as pycocotools' `loadRes` reads it.

    truth: image ids by file name, and category ids by class name; other classes are left out. Without it images are numbered 1, 2, ... in order and the class id is the category id.

    Raises:
        OutputError: it cannot be written; an image that is not in `truth`.
        SpecError: no class in common.
    """
    categories = None if truth is None else truth.category_ids(spec)
    with _text_target(path) as file:
        number, mark = 0, "["

        # Written immediately: at threshold 0 the rows of a data set would fill the memory.
        def write(record: Record) -> None:
            nonlocal number, mark
            number += 1
            image_id = number if truth is None else truth.image_id(record.image)
            with naming(path):
                for row in record.detections.to_coco(image_id, categories):
                    file.write(f"{mark}{json.dumps(row)}")
                    mark = ",\n"

        yield write
        with naming(path):
            file.write("[]\n" if mark == "[" else "]\n")


def check_stdout_once(paths: Sequence[str | os.PathLike | None]) -> None:
    """Raise OutputError when two outputs would be mixed on stdout, or two have one path."""
    seen = set()
    for path in map(os.fspath, filter(None, paths)):
        place = path if path == STDOUT else os.path.realpath(path)
        if place in seen:
            raise OutputError(f"two outputs have the name '{path}'; give each output its own")
        seen.add(place)


@contextlib.contextmanager
def _text_target(path: str | os.PathLike) -> Iterator[TextIO]:
    """A text stream to a file that appears at the end, or to stdout.

    A BrokenPipeError, if the reader of stdout has closed it, is raised unchanged.
    """
    if os.fspath(path) != STDOUT:
        with (
            writing(path) as temporary,
            # A file name that is not UTF-8 has lone surrogates, which JSON writes as "\udc80".
            open(temporary, "w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            yield file
        return
    with contextlib.suppress(AttributeError):  # a replaced stdout may not be reconfigurable
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    yield sys.stdout
    with naming(path):
        sys.stdout.flush()
