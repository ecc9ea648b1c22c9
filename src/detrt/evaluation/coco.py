"""COCO average precision of any session, with pycocotools."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import numpy as np

from .. import files
from ..backends.base import Session
from ..backends.prompted import PromptedSession
from ..bundle import Bundle
from ..detections import Detections
from ..detector import Detector
from ..errors import ImageError, MissingPackageError, OutputError, SpecError
from ..spec import ModelSpec

# The twelve figures in the order of pycocotools' `COCOeval.stats`.
METRICS = (
    "AP",
    "AP50",
    "AP75",
    "APsmall",
    "APmedium",
    "APlarge",
    "AR1",
    "AR10",
    "AR100",
    "ARsmall",
    "ARmedium",
    "ARlarge",
)

# VOC's names for COCO classes; the RT-DETR checkpoints of the hub use them.
_ALIASES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Result of `evaluate_coco`.

    metrics: METRICS -> 0..1, None where no object of that size is annotated.
    per_class: category name -> AP, None where none is annotated. without_class: annotated categories
    that the model has no class for; they count as never found. seconds: time of detection only.
    """

    metrics: Mapping[str, float | None]
    per_class: Mapping[str, float | None]
    images: int
    detections: int
    without_class: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate_coco(
    detector_or_session: Detector | Session,
    coco_json: Path | str,
    images_dir: Path | str,
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> EvalReport:
    """Average precision on a data set in COCO's format.

    Every detection counts (threshold 0, the model's own number of boxes). Classes belong to categories
    by name, whatever their numbers. A model that takes a prompt is asked for the names of the categories.
    What is passed in stays open. progress: called with (done, all).

    Raises:
        MissingPackageError: pycocotools is not installed.
        ImageError: the annotation file is missing or damaged, or pictures are not in `images_dir`.
        SpecError: no class of the model has the name of a category.
    """
    data, files = read_data(coco_json, images_dir)
    session = detector_or_session.session if isinstance(detector_or_session, Detector) else detector_or_session
    session = asked_for_categories(session, data["categories"])
    size_hw = detector_or_session.size_hw if isinstance(detector_or_session, Detector) else None
    categories = category_of_class(session.spec, data["categories"])
    detector = Detector(session, threshold=0.0, batch_size=batch_size, size_hw=size_hw)
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    for index, found in enumerate(detector.stream(files)):
        rows += found.to_coco(data["images"][index]["id"], categories)
        if progress:
            progress(index + 1, len(files))
    seconds = time.perf_counter() - start

    metrics, per_class = score_rows(data, rows)
    return EvalReport(metrics, per_class, len(files), len(rows), without_class(data, categories.values()), seconds)


def read_data(coco_json: str | os.PathLike, images_dir: str | os.PathLike) -> tuple[dict[str, list[dict[str, Any]]], list[Path]]:
    """(annotations, files of the pictures); all that can be missing is looked for, before minutes of detection.

    Raises:
        MissingPackageError, ImageError: as `evaluate_coco`.
    """
    _pycocotools()
    data = read_annotations(Path(coco_json))
    return data, _image_files(data, Path(images_dir))


def asked_for_categories(session: Session, categories: list[dict[str, Any]]) -> Session:
    """The session; a model that takes a prompt and has none is asked for the names of the categories, as a list.

    All pairs of a box and a name count, as in the published evaluation of Grounding DINO on COCO.
    """
    if not isinstance(session, PromptedSession):
        return session
    return session.bind([str(category["name"]).replace("_", " ") for category in categories], every_class=True)


def score_rows(
    data: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]]
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """(METRICS, category name -> AP) of COCO results entries against annotations (`read_annotations`).

    Raises:
        MissingPackageError: pycocotools is not installed.
    """
    coco_class, eval_class = _pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress and its table
        evaluation = eval_class(_index(coco_class, data, data["annotations"]), _index(coco_class, data, rows), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # precision: (IoU thresholds, recalls, categories, areas, largest counts)
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    names = {category["id"]: category["name"] for category in data["categories"]}
    return (
        {name: _figure(value) for name, value in zip(METRICS, evaluation.stats, strict=True)},
        {names[key]: _mean(precision[:, :, k]) for k, key in enumerate(evaluation.params.catIds)},
    )


def without_class(data: dict[str, list[dict[str, Any]]], found: Collection[int]) -> tuple[str, ...]:
    """Names of the annotated categories that are not in `found` (category ids)."""
    names = {category["id"]: category["name"] for category in data["categories"]}
    used = {annotation["category_id"] for annotation in data["annotations"]}
    return tuple(names[key] for key in sorted(used - set(found)))


def subset(
    data: dict[str, list[dict[str, Any]]], paths: Sequence[str]
) -> tuple[dict[str, list[dict[str, Any]]], list[int | None]]:
    """The part of a data set that belongs to some images, and the id of each image; None: not annotated.

    Raises:
        ImageError: none of the images is in the data set.
    """
    by_name: dict[str, int | None] = {}
    for image in data["images"]:
        parts = PurePath(str(image["file_name"])).parts
        for start in range(len(parts)):  # sets name files with or without folders
            tail = "/".join(parts[start:])
            by_name[tail] = image["id"] if by_name.get(tail, image["id"]) == image["id"] else None
    ids: list[int | None] = []
    for path in paths:
        parts = PurePath(path).parts
        tails = ("/".join(parts[start:]) for start in range(len(parts)))
        ids.append(next((by_name[tail] for tail in tails if by_name.get(tail) is not None), None))
    kept = {i for i in ids if i is not None}
    if not kept:
        shown = ", ".join(PurePath(path).name for path in paths[:3])
        raise ImageError(f"the annotation file names none of the images ({shown} ...); give the one that belongs to them")
    return {
        "images": [image for image in data["images"] if image["id"] in kept],
        "annotations": [entry for entry in data["annotations"] if entry["image_id"] in kept],
        "categories": data["categories"],
    }, ids


def read_annotations(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The images, annotations and categories of a COCO file, with `area` and `iscrowd` filled in.

    Raises:
        ImageError: missing, not JSON, or without the fields that detection needs; the message names the entry.
    """
    if not path.is_file():
        raise ImageError(f"there is no annotation file '{path}'; give a COCO instances JSON file")
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ImageError(f"the annotation file '{path}' cannot be read as JSON: {error}") from None
    fields = {"images": ("id", "file_name"), "categories": ("id", "name"), "annotations": ("image_id", "category_id", "bbox")}
    data: dict[str, list[dict[str, Any]]] = {}
    for part, needed in fields.items():
        entries = raw.get(part) if isinstance(raw, dict) else None
        if not isinstance(entries, list) or not entries:
            raise ImageError(f"the annotation file '{path}' has no list '{part}'; it is not a COCO instances file")
        for index, entry in enumerate(entries):
            missing = [f for f in needed if not isinstance(entry, dict) or f not in entry]
            if missing:
                raise ImageError(f"the annotation file '{path}': {part}[{index}] has no {', '.join(missing)}")
        data[part] = [dict(entry) for entry in entries]
    images = {image["id"] for image in data["images"]}
    categories = {category["id"] for category in data["categories"]}
    for index, entry in enumerate(data["annotations"]):
        box = entry["bbox"]
        if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, (int, float)) for v in box):
            raise ImageError(f"the annotation file '{path}': annotations[{index}] has the bbox {box!r}, not 4 numbers")
        for field, known in (("image_id", images), ("category_id", categories)):
            if entry[field] not in known:
                raise ImageError(f"the annotation file '{path}': annotations[{index}] has an unknown {field} {entry[field]!r}")
        entry.setdefault("area", box[2] * box[3])
        entry.setdefault("iscrowd", 0)
    return data


def category_of_class(spec: ModelSpec, categories: list[dict[str, Any]]) -> dict[int, int]:
    """Class id -> category id, for the classes whose name is a category's.

    Raises:
        SpecError: no name is in both; the message shows some of each.
    """
    by_name = {_key(category["name"]): category["id"] for category in categories}
    found = {class_id: by_name[_key(name)] for class_id, name in spec.labels.items() if _key(name) in by_name}
    if not found:
        has, wants = list(spec.labels.values())[:3], [category["name"] for category in categories][:3]
        raise SpecError(
            f"no class of the model has the name of a category: the model has {has} ..., the annotations {wants} "
            "...; give the names of this checkpoint with --labels FILE when it is exported"
        )
    return found


def _key(name: object) -> str:
    text = " ".join(str(name).lower().replace("_", " ").split())
    return _ALIASES.get(text, text)


def _image_files(data: dict[str, list[dict[str, Any]]], folder: Path) -> list[Path]:
    files = [folder / str(image["file_name"]) for image in data["images"]]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ImageError(
            f"{len(missing)} of {len(files)} annotated images are not in '{folder}', e.g. {', '.join(missing[:3])}; "
            "give the folder that the annotation file belongs to"
        )
    return files


def _index(coco_class: Any, data: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]]) -> Any:
    """A pycocotools data set in memory; its own `loadRes` fails on an empty list."""
    coco = coco_class()
    numbered = [{"area": r["bbox"][2] * r["bbox"][3], "iscrowd": 0, **r, "id": i} for i, r in enumerate(rows, 1)]
    coco.dataset = {"images": data["images"], "categories": data["categories"], "annotations": numbered}
    coco.createIndex()
    return coco


def _figure(value: float) -> float | None:
    return None if value < 0 else float(value)


def _mean(values: np.ndarray) -> float | None:
    known = values[values > -1]
    return float(known.mean()) if known.size else None


def _pycocotools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise MissingPackageError("pycocotools", "eval", "COCO average precision") from None
    return COCO, COCOeval


# COCO evaluation that goes on after a kill, and evaluation of results that were saved before.
Row = dict[str, Any]
DetectBatches = Callable[[Sequence[Sequence[Path]]], Iterator[list[Detections]]]
_SCHEMA = 1
_FIELDS = ("image_id", "category_id", "bbox", "score")


class HasSpec(Protocol):
    """What a pool of workers tells of its model."""

    spec: ModelSpec


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
    session: Session | HasSpec,
    coco_json: Path | str,
    images_dir: Path | str,
    *,
    batch_size: int = 4,
    resume: Path | str | None = None,
    limit: int | None = None,
    model: str = "",
    decode: str = "cpu",
    detect_batches: DetectBatches | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """COCO average precision of a session, or of several devices, in batches.

    detect_batches: detects in lists of files, in order, instead of a `Detector` around the session: `DevicePool.detect_batches`,
    whose workers have chosen a decoder and bound the prompt already; only the spec of `session` is used then.

    resume: a JSON-lines file that gets every batch when it is done; if it is there, those batches are not
    run again. The composition of the batches stays the same, because the padding of an image may depend
    on its neighbours, so a resumed run gives the same figures. limit: the first so many images.
    model: what the file is bound to (see `identity`). decode: of `Detector`; the file is bound to it as well, because the
    pixels differ.

    A model that takes a prompt is asked for the names of the categories, or for what it is bound to already.

    Raises:
        ImageError: as `evaluate_coco`. OutputError: the state belongs to another model, data set or
            batch size, or cannot be written. SpecError: no class in common.
    """

    _pycocotools()  # before minutes of detection, not after them
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ImageError(f"batch and limit must be at least 1; got {batch_size} and {limit}")
    data = limited(read_annotations(Path(coco_json)), limit)
    paths = _image_files(data, Path(images_dir))
    if detect_batches is None:
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
    if detect_batches is None:
        found = map(Detector(session, threshold=0.0, batch_size=batch_size, decode=decode), missing)
    else:
        found = detect_batches(missing)
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
