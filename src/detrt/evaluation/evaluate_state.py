"""COCO evaluation that goes on after a kill, and evaluation of results that were saved before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import files
from ..backends.base import Session
from ..bundle import Bundle
from ..detector import Detector
from ..errors import ImageError, OutputError
from ..jobs.pool import DevicePool
from .coco import EvalReport, _image_files, asked_for_categories, category_of_class, read_annotations, score_rows, without_class

Row = dict[str, Any]
_SCHEMA = 1
_FIELDS = ("image_id", "category_id", "bbox", "score")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation: figures, the COCO results entries behind them, and how many images were resumed."""

    report: EvalReport
    rows: list[Row]
    resumed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The twelve figures by name, then per_class, images, detections, ..."""
        data = self.report.to_dict()
        return {**data.pop("metrics"), **data, "resumed": self.resumed}


def evaluate(
    session: Session | DevicePool,
    coco_json: Path | str,
    images_dir: Path | str,
    *,
    batch_size: int = 4,
    resume: Path | str | None = None,
    limit: int | None = None,
    model: str = "",
    decode: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """COCO average precision of a session, or of several devices, in batches.

    resume: a JSON-lines file that gets every batch when it is done; if it is there, those batches are not
    run again. The composition of the batches stays the same, because the padding of an image may depend
    on its neighbours, so a resumed run gives the same figures. limit: the first so many images.
    model: what the file is bound to (see `identity`). decode: of `Detector`, whose choice a `DevicePool` has made already;
    the file is bound to it as well, because the pixels differ.

    A model that takes a prompt is asked for the names of the categories, or for what it is bound to already.

    Raises:
        ImageError: as `evaluate_coco`. OutputError: the state belongs to another model, data set or
            batch size, or cannot be written. SpecError: no class in common.
    """
    from .coco import _pycocotools

    _pycocotools()  # before minutes of detection, not after them
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ImageError(f"batch and limit must be at least 1; got {batch_size} and {limit}")
    data = limited(read_annotations(Path(coco_json)), limit)
    paths = _image_files(data, Path(images_dir))
    if not isinstance(session, DevicePool):
        session = asked_for_categories(session, data["categories"])
    categories = category_of_class(session.spec, data["categories"])
    header = {
        "detrt_eval": _SCHEMA,
        "model": model,
        "ground_truth": files.sha256_of(Path(coco_json)),
        "batch": batch_size,
        "limit": limit,
        "decode": decode,
    }
    done = read_state(Path(resume), header) if resume is not None else {}
    ids = [image["id"] for image in data["images"]]
    batches = [range(first, min(first + batch_size, len(ids))) for first in range(0, len(ids), batch_size)]
    missing = [[paths[i] for i in batch] for batch in batches if not all(ids[i] in done for i in batch)]
    if isinstance(session, DevicePool):
        found = session.detect_batches(missing)
    else:
        found = map(Detector(session, threshold=0.0, batch_size=batch_size, decode=decode), missing)
    rows: dict[Any, list[Row]] = {}
    resumed, start = 0, time.perf_counter()
    with ExitStack() as stack:
        append = _appender(Path(resume), header, done, stack) if resume is not None else None
        for places in batches:
            batch = [ids[i] for i in places]
            if all(image in done for image in batch):
                rows |= {image: done[image] for image in batch}
                resumed += len(batch)
            else:
                fresh = {image: d.to_coco(image, categories) for image, d in zip(batch, next(found), strict=True)}
                rows |= fresh
                if append:
                    append(fresh)
            if progress:
                progress(len(rows), len(ids))
    flat = [row for image in ids for row in rows[image]]
    metrics, per_class = score_rows(data, flat)
    seconds = time.perf_counter() - start
    unknown = without_class(data, categories.values())
    return Evaluation(EvalReport(metrics, per_class, len(ids), len(flat), unknown, seconds), flat, resumed)


def evaluate_results(results: Path | str, coco_json: Path | str, *, limit: int | None = None) -> Evaluation:
    """COCO average precision of saved results: a COCO results file, or a state file of `evaluate`.

    Raises:
        ImageError: a file that is missing, damaged or of another form; entries of unknown images.
    """
    data = limited(read_annotations(Path(coco_json)), limit)
    rows = read_results(Path(results))
    known = {image["id"] for image in data["images"]}
    if limit is not None:
        rows = [row for row in rows if row["image_id"] in known]
    unknown = sorted({str(row["image_id"]) for row in rows if row["image_id"] not in known})
    if unknown:
        raise ImageError(
            f"'{results}' has results of {len(unknown)} images that '{coco_json}' does not name, e.g. "
            f"{', '.join(unknown[:3])}; give the annotations that the results were made for"
        )
    start = time.perf_counter()
    metrics, per_class = score_rows(data, rows)
    found = {row["category_id"] for row in rows}
    report = EvalReport(metrics, per_class, len(known), len(rows), without_class(data, found), time.perf_counter() - start)
    return Evaluation(report, rows)


def identity(ref: str, session: Session) -> str:
    """What a state file is bound to: the digest of the model's file, or its name where it has none."""
    path = getattr(session, "path", None)
    if path is not None and Path(path).is_file():
        return files.sha256_of(Path(path))
    if Path(ref).is_dir() and (Path(ref) / "detrt.json").is_file():
        return Bundle.open(ref).provenance.checkpoint_sha256
    return f"{session.backend} {ref}"


def limited(data: dict[str, list[Row]], limit: int | None) -> dict[str, list[Row]]:
    """The first images of a data set and their annotations."""
    if limit is None or limit >= len(data["images"]):
        return data
    images = data["images"][:limit]
    kept = {image["id"] for image in images}
    annotations = [entry for entry in data["annotations"] if entry["image_id"] in kept]
    return {**data, "images": images, "annotations": annotations}


def read_state(path: Path, header: dict[str, Any]) -> dict[Any, list[Row]]:
    """Image id -> rows of a state file; empty where there is none. A last line that was cut off is left out.

    Raises:
        OutputError: it belongs to another run, or is not a state file.
    """
    if not path.exists() or path.stat().st_size == 0:
        return {}
    lines = _lines(path)
    if not lines or not isinstance(lines[0], dict) or "detrt_eval" not in lines[0]:
        raise OutputError(f"'{path}' is not a state file of detrt eval; give another --resume FILE")
    was = {"decode": "cpu", **lines[0]}  # files of before that choice do not name it
    other = [f"{key} {was.get(key)!r}, now {value!r}" for key, value in header.items() if was.get(key) != value]
    if other:
        raise OutputError(f"'{path}' belongs to another run ({'; '.join(other)}); give another --resume FILE or delete it")
    return {line["image_id"]: line["rows"] for line in lines[1:]}


def read_results(path: Path) -> list[Row]:
    """Entries of a COCO results file, or of a state file.

    Raises:
        ImageError: missing, damaged, or an entry without the fields of COCO results.
    """
    if not path.is_file():
        raise ImageError(f"there is no results file '{path}'; make one with: detrt detect --coco, or detrt eval --save")
    text = path.read_text("utf-8", errors="replace")
    if text.startswith('{"detrt_eval"'):
        return [row for line in _lines(path)[1:] for row in line["rows"]]
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ImageError(f"the results file '{path}' cannot be read as JSON: {error}") from None
    if not isinstance(rows, list):
        raise ImageError(f"the results file '{path}' must hold a list; got {type(rows).__name__}")
    for index, row in enumerate(rows):
        missing = [name for name in _FIELDS if not isinstance(row, dict) or name not in row]
        if missing or not _is_box(row["bbox"]) or not isinstance(row["score"], (int, float)):
            what = f"no {', '.join(missing)}" if missing else f"the bbox {row['bbox']!r} and score {row['score']!r}"
            raise ImageError(f"the results file '{path}': entry {index} has {what}; it is not a COCO results file")
    return rows


def _is_box(box: object) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(isinstance(v, (int, float)) for v in box)


def _lines(path: Path) -> list[Any]:
    """JSON values of the complete lines; a line without its end was being written when the run was killed."""
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    try:
        return [json.loads(line) for line in whole.decode("utf-8").splitlines() if line.strip()]
    except ValueError as error:
        raise OutputError(f"'{path}' is damaged ({error}); delete it and start again") from None


def _appender(
    path: Path, header: dict[str, Any], done: dict[Any, list[Row]], stack: ExitStack
) -> Callable[[dict[Any, list[Row]]], None]:
    """A function that appends one batch of rows, after the lines that are whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if done or (path.exists() and path.stat().st_size):
            raw = path.read_bytes()
            with open(path, "r+b") as file:
                file.truncate(raw.rfind(b"\n") + 1)
        fresh = not path.exists() or path.stat().st_size == 0
        file = stack.enter_context(path.open("a", encoding="utf-8"))
        if fresh:
            file.write(json.dumps(header) + "\n")
            file.flush()
    except OSError as error:
        raise files.output_error(path, error) from error

    def append(rows: dict[Any, list[Row]]) -> None:
        try:
            file.writelines(_state_lines(rows))
            file.flush()
        except OSError as error:
            raise files.output_error(path, error) from error

    return append


def _state_lines(rows: dict[Any, list[Row]]) -> Iterator[str]:
    return (json.dumps({"image_id": image, "rows": found}) + "\n" for image, found in rows.items())


def write_results(rows: Sequence[Row], path: Path | str) -> None:
    """Write a COCO results file; raises OutputError."""
    files.write_text(Path(path), json.dumps(list(rows)) + "\n")
