"""Files of COCO results: results entries, and the state from which an evaluation resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from .. import files
from ..data.coco import is_bbox
from ..errors import ImageError, OutputError, is_finite

Row = dict[str, Any]
_SCHEMA = 1
_FIELDS = ("image_id", "category_id", "bbox", "score")


class ResumeFile(AbstractContextManager):
    """A JSON-lines file that an evaluation appends every batch to: a header, then one line per image.

    Args:
        path: the file; it is made where there is none.
        about: what the results depend on. A file with another header belongs to another run.

    Attributes:
        done: image id -> rows that the file holds. A last line that was cut off is left out.

    Raises:
        OutputError: the file belongs to another run, is not a resume file, or cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        header = {"detrt_eval": _SCHEMA, **about}
        self.done = self._read(header)
        self._file = self._open(header)

    def append(self, rows: Mapping[Any, Sequence[Row]]) -> None:
        """Add a batch: image id -> rows. Raises OutputError."""
        with files.naming(self.path):
            self._file.writelines(json.dumps({"image_id": image, "rows": found}) + "\n" for image, found in rows.items())
            self._file.flush()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, header: Mapping[str, Any]) -> dict[Any, list[Row]]:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return {}
        lines = _complete_lines(self.path)
        if not lines or not isinstance(lines[0], dict) or "detrt_eval" not in lines[0]:
            raise OutputError(f"'{self.path}' is not a state file of detrt eval; give another `resume=FILE`")
        before = {"decode": "cpu", "tile": "", **lines[0]}  # older files do not name the decoder, and were made without tiles
        other = [f"{key} {before.get(key)!r}, now {value!r}" for key, value in header.items() if before.get(key) != value]
        if other:
            raise OutputError(
                f"'{self.path}' belongs to another run ({'; '.join(other)}); give another `resume=FILE` or delete it"
            )
        return {line["image_id"]: line["rows"] for line in lines[1:]}

    def _open(self, header: Mapping[str, Any]) -> TextIO:
        """The file at the end of its complete lines."""
        with files.naming(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a", encoding="utf-8")
            if size := self.path.stat().st_size:
                complete = self.path.read_bytes().rfind(b"\n") + 1
                if complete < size:
                    file.truncate(complete)
            else:
                file.write(json.dumps(header) + "\n")
                file.flush()
            return file


def read_results(path: Path) -> list[Row]:
    """Entries of a COCO results file, or of a resume file.

    Raises:
        ImageError: missing, damaged, or an entry without the fields of COCO results.
    """
    if not path.is_file():
        what = f"'{path}' is a folder, not a results file" if path.is_dir() else f"there is no results file '{path}'"
        raise ImageError(f"{what}; make one with: `detect(coco=True)`, or `eval(save=True)`")
    with open(path, "rb") as file:
        resumed = file.read(13) == b'{"detrt_eval"'
    if resumed:
        lines = _complete_lines(path)[1:]
        if not all(isinstance(line, dict) and isinstance(line.get("rows"), list) for line in lines):
            raise ImageError(f"the resume file '{path}' has a line without the rows of an image; start again with another one")
        rows: Any = [row for line in lines for row in line["rows"]]
    else:
        rows = files.read_json(path, "results file", ImageError, most=files.LONGEST_DATA_SET)
    if not isinstance(rows, list):
        raise ImageError(f"the results file '{path}' must hold a list; got {type(rows).__name__}")
    for index, row in enumerate(rows):
        missing = [name for name in _FIELDS if not isinstance(row, dict) or name not in row]
        if not missing and not all(isinstance(row[name], (int, str)) for name in ("image_id", "category_id")):
            what = f"the image_id {row['image_id']!r} and category_id {row['category_id']!r}, which are no ids"
            raise ImageError(f"the results file '{path}': entry {index} has {what}; it is not a COCO results file")
        if missing or not is_bbox(row["bbox"]) or not is_finite(row["score"]):
            what = f"no {', '.join(missing)}" if missing else f"the bbox {row['bbox']!r} and score {row['score']!r}"
            raise ImageError(f"the results file '{path}': entry {index} has {what}; it is not a COCO results file")
    return rows


def write_results(rows: Sequence[Row], path: Path | str) -> None:
    """Write a COCO results file; raises OutputError."""
    files.write_text(Path(path), json.dumps(list(rows)) + "\n")


def _complete_lines(path: Path) -> list[Any]:
    """JSON values of the lines; a line without its end was being written when the run was killed."""
    raw = path.read_bytes()
    complete = raw[: raw.rfind(b"\n") + 1]
    try:
        return [files.parse_json(line) for line in complete.decode("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise OutputError(f"'{path}' is damaged ({error}); delete it and start again") from None
