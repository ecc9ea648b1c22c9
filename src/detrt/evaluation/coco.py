"""COCO average precision of a model or of saved results, with pycocotools."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import files
from ..backends.base import Session
from ..bundle import MANIFEST, Bundle
from ..data.coco import CocoDataset, Entry, check_masks, is_segmentation
from ..data.datasets import load_dataset, size_of
from ..data.preprocess import SizeHW
from ..data.tiles import make_tiling
from ..detections import Detections
from ..detector import Detector
from ..errors import ImageError, MissingPackageError, SessionError, check_one_of, number_of
from ..spec import ModelSpec
from ..system import CountProgress
from .curves import ClassCurve, Confusion, best_thresholds, confusion_of, curves_of
from .results import ResumeFile, Row, read_results

# The twelve metrics in the order of pycocotools' `COCOeval.stats`.
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

NUMBERED = (
    "results of annotations without ids of images are made with detrt eval `save`, or detrt detect `coco_images=ANNOTATIONS`"
)
IOU_TYPES = BBOX, SEGM = "bbox", "segm"  # pycocotools' names
DetectBatches = Callable[[Sequence[Sequence[Path]]], Iterator[list[Detections]]]


def metric_text(value: float | None) -> str:
    """A metric in tables and figures."""
    return "-" if value is None else f"{value:.3f}"


class HasSpec(Protocol):
    """Anything that knows the spec of its model, such as a pool of workers."""

    spec: ModelSpec


@dataclass(frozen=True)
class EvalReport:
    """Result of an evaluation.

    Attributes:
        metrics: METRICS -> 0 to 1; None where no object of that size is annotated.
        per_class: category name -> AP; None where none is annotated.
        images, detections: how many.
        without_class: annotated categories that the model has no class for; they count as never found.
        seconds: time of the detection alone; of saved results that of the metrics.
        resumed: images whose results were read from the resume file.
        rows: the COCO results entries of the metrics.
        iou_type: "bbox", or "segm" for the IoU of masks.
        evaluation, dataset: the COCOeval behind the metrics, and what it compares with. names: of the categories by id; those of the
            model, where it has them. paths: of the images by id; none of saved results.
    """

    metrics: Mapping[str, float | None]
    per_class: Mapping[str, float | None]
    images: int
    detections: int
    without_class: tuple[str, ...]
    seconds: float
    resumed: int = 0
    rows: Sequence[Row] = field(default=(), repr=False, compare=False)
    iou_type: str = BBOX
    evaluation: Any = field(default=None, repr=False, compare=False)
    dataset: CocoDataset | None = field(default=None, repr=False, compare=False)
    names: Mapping[Any, str] = field(default_factory=dict, repr=False, compare=False)
    paths: Mapping[Any, Path] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def curves(self) -> dict[str, ClassCurve]:
        """Class name -> precision and recall by score, see `detrt.evaluation.curves`."""
        return curves_of(self.evaluation, self.names)

    @cached_property
    def best(self) -> dict[str, float]:
        """Class name -> threshold of best F1."""
        return best_thresholds(self.curves)

    @cached_property
    def confusion(self) -> Confusion | None:
        """Which classes are taken for which at the thresholds of best F1; None of a report without its data set."""
        return None if self.dataset is None else confusion_of(self.dataset, self.rows, self.best, names=self.names)

    def to_dict(self) -> dict[str, Any]:
        """The twelve metrics by name, then `per_class`, `images`, `detections`, ...; without the rows."""
        left_out = ("rows", "evaluation", "dataset", "names", "paths")
        data = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}
        return {**data.pop("metrics"), **data}


def evaluate_coco(
    session: Session | HasSpec,
    coco_json: Path | str,
    images_dir: Path | str | None = None,
    *,
    batch_size: int = 4,
    size: SizeHW | int | None = None,
    resume: Path | str | None = None,
    limit: int | None = None,
    model: str = "",
    image_decoder: str = "cpu",
    tile: SizeHW | int | None = None,
    overlap: float | None = None,
    detect_batches: DetectBatches | None = None,
    progress: CountProgress | None = None,
    iou_type: str | None = None,
) -> EvalReport:
    """COCO average precision of a model on a data set in COCO's format.

    Every detection counts (threshold 0, the model's own number of boxes). Classes belong to categories by name, whatever their
    numbers. A model that takes a prompt and is bound to none gets the names of the categories.

    Args:
        session: the model; it stays open. With `detect_batches` only its spec is used.
        coco_json: the annotations, in COCO's form or another one of `load_dataset`.
        images_dir: folder of the images; None: where the data set has them.
        batch_size: images that run together. A resumed run has the same batches, because the padding of an image may depend on
            its neighbours.
        size: (height, width) of the model's input; None: the model's own.
        resume: a JSON-lines file that gets every batch when it is done; batches that it holds already are not run again.
        limit: evaluate the first so many images.
        model: what the resume file is bound to; see `identity`.
        image_decoder: as `Detector` takes it; the resume file is bound to it as well, because the pixels differ.
        tile, overlap: as `Detector` takes them; the resume file is bound to them.
        detect_batches: detects in lists of files, in order, instead of a `Detector` around the session, such as
            `DevicePool.detect_batches`, whose workers have chosen a decoder and bound the prompt.
        progress: called with (done, all) images.
        iou_type: "bbox" or "segm"; None: masks, if both the model and the annotations have them.

    Raises:
        MissingPackageError: pycocotools is not installed.
        SessionError: masks of a model without.
        ImageError: the annotation file is missing or damaged, images are not in `images_dir` or have another size than it says, or a bad
            batch size or limit.
        SpecError: no class of the model has the name of a category.
        OutputError: the resume file belongs to another model, data set or batch size, or cannot be written.
    """
    if batch_size < 1 or (limit is not None and limit < 1):
        raise ImageError(f"batch and limit must be at least 1; got {batch_size} and {limit}")
    dataset, paths = read_dataset(coco_json, images_dir, limit)
    if detect_batches is None:
        session = bind_categories(session, dataset.categories)  # type: ignore[arg-type]  # without it a session
    iou_type = chosen_iou_type(iou_type, session.spec.has_masks, "this model has boxes alone", dataset)
    categories = dataset.category_ids(session.spec)
    ids = [image["id"] for image in dataset.images]
    batches = [range(first, min(first + batch_size, len(ids))) for first in range(0, len(ids), batch_size)]
    detector = None
    if detect_batches is None:
        options: dict[str, Any] = {"size": size, "image_decoder": image_decoder, "tile": tile, "overlap": overlap}
        detector = Detector(session, threshold=0.0, batch_size=batch_size, **options)  # type: ignore[arg-type]
    by_image: dict[Any, list[Row]] = {}
    with contextlib.ExitStack() as stack:
        state = None
        if resume is not None:
            about: dict[str, Any] = {"model": model, "ground_truth": dataset.digest, "batch": batch_size}
            about |= {"limit": limit, "decode": image_decoder, "tile": str(make_tiling(tile, overlap) or "")}
            state = stack.enter_context(ResumeFile(Path(resume), about))
        done = {} if state is None else state.done
        missing = [[paths[i] for i in batch] for batch in batches if not all(ids[i] in done for i in batch)]
        detected = map(detector, missing) if detector is not None else detect_batches(missing)  # type: ignore[misc]
        resumed, start = 0, time.perf_counter()
        for batch in ([ids[i] for i in indices] for indices in batches):
            if all(image in done for image in batch):
                by_image |= {image: done[image] for image in batch}
                resumed += len(batch)
            else:
                found = dict(zip(batch, next(detected), strict=True))
                for image, one in found.items():
                    dataset.check_size(image, one.image_size_hw)
                new = {image: one.to_coco(image, categories) for image, one in found.items()}
                by_image |= new
                if state is not None:
                    state.append(new)
            if progress:
                progress(len(by_image), len(ids))
        seconds = time.perf_counter() - start
    rows = [row for image in ids for row in by_image[image]]
    names = dataset.names | {category: session.spec.label(class_id) for class_id, category in categories.items()}
    found = _report(dataset, rows, iou_type, without_class(dataset, categories.values()))
    return replace(found, seconds=seconds, resumed=resumed, names=names, paths=dict(zip(ids, paths, strict=True)))


def _report(dataset: CocoDataset, rows: Sequence[Row], iou_type: str, unknown: tuple[str, ...]) -> EvalReport:
    """The report of results. unknown: categories without a class."""
    start = time.perf_counter()
    evaluation = evaluated(dataset, rows, iou_type)
    metrics, per_class = _metrics(dataset, evaluation)
    seconds = time.perf_counter() - start
    more: dict[str, Any] = {"evaluation": evaluation, "dataset": dataset, "names": dataset.names}
    return EvalReport(metrics, per_class, len(dataset.images), len(rows), unknown, seconds, rows=rows, iou_type=iou_type, **more)


def evaluate_results(
    results: Path | str, coco_json: Path | str, *, limit: int | None = None, iou_type: str | None = None
) -> EvalReport:
    """COCO average precision of saved results: a COCO results file, or a resume file of `evaluate_coco`.

    Raises:
        MissingPackageError: pycocotools is not installed.
        ImageError: a file that is missing, damaged or of another form; entries of unknown images, or without masks for "segm".
    """
    return report_rows(results, *read_rows(results, coco_json, limit), iou_type)


def report_rows(results: Path | str, dataset: CocoDataset, rows: Sequence[Row], iou_type: str | None = None) -> EvalReport:
    """As `evaluate_results`, of what `read_rows` gave of the file `results`."""
    masked = bool(rows) and all("segmentation" in row for row in rows)
    iou_type = chosen_iou_type(iou_type, masked, f"'{results}' has entries without segmentation", dataset)
    if iou_type == SEGM:
        sizes = {image["id"]: (image["height"], image["width"]) for image in dataset.images}
        for index, row in enumerate(rows):
            if not is_segmentation(row["segmentation"], sizes[row["image_id"]]):
                raise ImageError(f"the results file '{results}': entry {index} has a segmentation that is no mask of its image")
    return _report(dataset, rows, iou_type, without_class(dataset, {row["category_id"] for row in rows}))


def read_rows(results: Path | str, coco_json: Path | str, limit: int | None = None) -> tuple[CocoDataset, list[Row]]:
    """(data set, saved results of its images); limit: of the first so many.

    Raises:
        ImageError: a file that is missing, damaged or of another form; entries of unknown images or categories.
    """
    dataset = load_dataset(coco_json).first(limit)
    rows = read_results(Path(results))
    known = {image["id"] for image in dataset.images}
    if limit is not None:
        rows = [row for row in rows if row["image_id"] in known]
    unknown = sorted({str(row["image_id"]) for row in rows if row["image_id"] not in known})
    if unknown:
        raise ImageError(
            f"'{results}' has results of {number_of(len(unknown), 'image')} that '{coco_json}' does not name, e.g. "
            f"{', '.join(unknown[:3])}; give the annotations that the results were made for"
        )
    others = sorted(map(str, {row["category_id"] for row in rows} - {category["id"] for category in dataset.categories}))
    if others:  # pycocotools leaves them out, and 0, 1, ... beside 1, 2, ... would be an AP of 0
        raise ImageError(
            f"'{results}' has results of categories that '{coco_json}' does not name: id {', '.join(others[:5])}; their ids must be "
            "those of the annotations: detrt detect writes them with `coco_images=ANNOTATIONS`, detrt eval with `save`"
        )
    if dataset.numbered:
        _require_inside(results, dataset, rows)
    return dataset, rows


def _require_inside(results: Path | str, dataset: CocoDataset, rows: Sequence[Row]) -> None:
    """Raise ImageError for a box outside of its image: the ids of images are those of another data set, and AP would be near 0.

    Only detrt knows the ids of a data set without, and it writes boxes inside their images.
    """
    sizes = {image["id"]: (image["width"], image["height"]) for image in dataset.images}
    for index, row in enumerate(rows):
        (x, y, width, height), (right, bottom) = row["bbox"], sizes[row["image_id"]]
        if x < -1 or y < -1 or x + width > right + 1 or y + height > bottom + 1:
            raise ImageError(
                f"'{results}': entry {index} has the box {row['bbox']} outside of image {row['image_id']} of '{dataset.path}', which has "
                f"{right}x{bottom} pixels, so its ids are those of other annotations; {NUMBERED}"
            )


def has_masks(dataset: CocoDataset) -> bool:
    """Whether every annotation has a mask; tools for boxes write an empty list."""
    return all(entry.get("segmentation") for entry in dataset.annotations)


def chosen_iou_type(wanted: str | None, masked: bool, why_not: str, dataset: CocoDataset) -> str:
    """What is evaluated. wanted: by the caller. masked: whether the detections have masks; why_not: where they have none.

    Raises:
        SessionError: "segm" of detections without masks. ImageError: "segm" with annotations that have none, or damaged ones.
    """
    if wanted is not None:
        check_one_of("`iou_type`", wanted, IOU_TYPES, SessionError)
    if wanted == SEGM and not masked:
        raise SessionError(f"`iou_type=segm` compares masks, and {why_not}; leave it out, or give bbox")
    chosen = wanted or (SEGM if masked and has_masks(dataset) else BBOX)
    if chosen == SEGM:
        check_masks(dataset)
    return chosen


def read_dataset(
    coco_json: str | os.PathLike, images_dir: str | os.PathLike | None, limit: int | None = None
) -> tuple[CocoDataset, list[Path]]:
    """(data set, its image files). Everything that may be missing is checked here, before minutes of detection.

    Raises:
        MissingPackageError, ImageError: as `evaluate_coco`.
    """
    _pycocotools()
    dataset = load_dataset(coco_json).first(limit)
    folder = images_dir if images_dir is not None else dataset.folder
    if folder is None:
        raise ImageError(f"'{os.fspath(coco_json)}' does not say where its images lie; give `images=DIR`")
    paths = dataset.files(folder)
    for image, path in zip(dataset.images, paths, strict=True):
        if None not in (image.get("height"), image.get("width")):
            dataset.check_size(image["id"], size_of(path))
    return dataset, paths


def bind_categories(session: Session, categories: Iterable[Entry]) -> Session:
    """The session; a prompted one that is not bound yet is bound to the names of the categories, as a list.

    All pairs of a box and a name count, as in the published evaluation of Grounding DINO on COCO.
    """
    if session.info.text is None:
        return session
    return session.bind([str(category["name"]).replace("_", " ") for category in categories], every_class=True)


def score_rows(
    dataset: CocoDataset, rows: Sequence[Row], iou_type: str = BBOX
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """(METRICS, category name -> AP) of COCO results entries. iou_type: "segm" needs masks in both, see `check_masks`.

    Raises:
        MissingPackageError: pycocotools is not installed.
    """
    return _metrics(dataset, evaluated(dataset, rows, iou_type))


def evaluated(dataset: CocoDataset, rows: Sequence[Row], iou_type: str = BBOX) -> Any:
    """The COCOeval of COCO results entries, evaluated and accumulated; as `score_rows`."""
    coco_class, eval_class = _pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress and its table
        truth = _index(coco_class, dataset, dataset.annotations)
        results = [{"area": _area(truth, row, iou_type), "iscrowd": 0, **row} for row in rows]
        found = _index(coco_class, dataset, results)
        evaluation = eval_class(truth, found, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def _metrics(dataset: CocoDataset, evaluation: Any) -> tuple[dict[str, float | None], dict[str, float | None]]:
    # precision: (IoU thresholds, recalls, categories, areas, largest counts)
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    values = {key: _mean(precision[:, :, k]) for k, key in enumerate(evaluation.params.catIds)}
    names = dataset.names
    per_class: dict[str, float | None] = {}
    for key, value in values.items():  # a category without annotations may have the name of another one
        per_class[names[key]] = per_class.get(names[key]) if value is None else value
    return {name: None if value < 0 else float(value) for name, value in zip(METRICS, evaluation.stats, strict=True)}, per_class


def _area(truth: Any, row: Row, iou_type: str) -> float:
    if iou_type == BBOX:
        return row["bbox"][2] * row["bbox"][3]
    from pycocotools import mask

    return float(mask.area(truth.annToRLE(row)))  # which takes polygons, and run lengths as lists


def without_class(dataset: CocoDataset, matched: Collection[Any]) -> tuple[str, ...]:
    """Names of the annotated categories whose id is not in `matched`."""
    names = dataset.names
    used = {annotation["category_id"] for annotation in dataset.annotations}
    return tuple(names[key] for key in sorted(used - set(matched)))


def identity(ref: str, session: Session) -> str:
    """What a resume file is bound to: the digest of the model's file, or its name where it has none."""
    path = session.info.path
    if path is not None and path.is_file():
        return files.sha256_of(path)
    if (Path(ref) / MANIFEST).is_file():
        return Bundle.open(ref).provenance.checkpoint_sha256
    return f"{session.info.name} {ref}"


def _index(coco_class: Any, dataset: CocoDataset, entries: Sequence[Entry]) -> Any:
    """A pycocotools data set in memory; its own `loadRes` fails on an empty list."""
    coco = coco_class()
    numbered = [{**entry, "id": i} for i, entry in enumerate(entries, 1)]
    coco.dataset = {"images": dataset.images, "categories": dataset.categories, "annotations": numbered}
    coco.createIndex()
    return coco


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
