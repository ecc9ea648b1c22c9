"""`detrt eval`: COCO average precision of a model, or of results that were saved before."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import files
from ..data.arguments import IMAGE_DECODER, check_image_decoder
from ..errors import DetrtError, number_of, printable
from ..models.load_options import LoadOptions
from .options import JSON, OVERLAP, TILE, Given, GivenTuning, Json, RunOptions, command

if TYPE_CHECKING:
    from ..backends.search import SessionOptions
    from ..evaluation.coco import EvalReport


@dataclass(frozen=True, slots=True)
class EvalOptions:
    """How a model is evaluated.

    Raises:
        DetrtError: an unknown decoder.
    """

    images: Path | None = field(default=None, metadata={"help": "Folder of the annotated images; YOLO and VOC have their own."})
    batch: int = field(default=4, metadata={"help": "Batch size.", "panel": "Size", "min": 1})
    tile: tuple[int, int] | None = field(default=None, metadata=TILE)
    overlap: float | None = field(default=None, metadata=OVERLAP)
    resume: Path | None = field(
        default=None,
        metadata={
            "help": "Resume file, updated after every batch; --against MODEL has its own, FILE.against.jsonl.",
            "writes": "JSON lines",
        },
    )
    image_decoder: str = field(default="cpu", metadata=IMAGE_DECODER)

    def __post_init__(self) -> None:
        from ..data.tiles import make_tiling

        make_tiling(self.tile, self.overlap)
        check_image_decoder(self.image_decoder)


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """What helps to choose a threshold or a model.

    Raises:
        DetrtError: a number out of range, or both.
    """

    thresholds: Path | None = field(
        default=None,
        metadata={"help": "Write the threshold of best F1 of each class, for detect --class-thresholds FILE.", "writes": "JSON"},
    )
    at_precision: float | None = field(
        default=None, metadata={"help": "Thresholds of best recall with this precision instead.", "needs": {"thresholds": ()}}
    )
    at_recall: float | None = field(
        default=None, metadata={"help": "Thresholds of best precision with this recall instead.", "needs": {"thresholds": ()}}
    )
    against: str | None = field(
        default=None,
        metadata={"help": "Another model, or its results (--save): is the difference more than chance, and on which images?"},
    )
    report: Path | None = field(
        default=None, metadata={"help": "Write curves, confusions and the comparison as an HTML page.", "writes": "HTML"}
    )
    plot: Path | None = field(
        default=None, metadata={"help": "Write the same as a figure, FILE.svg or FILE.png.", "writes": "figure"}
    )

    def __post_init__(self) -> None:
        for name, value in (("--at-precision", self.at_precision), ("--at-recall", self.at_recall)):
            if value is not None and not 0 < value <= 1:
                raise DetrtError(f"{name} must be above 0 and at most 1; got {value}")
        if self.at_precision is not None and self.at_recall is not None:
            raise DetrtError("--at-precision and --at-recall choose one threshold each; give one of them")
        for path in (self.thresholds, self.report):
            if path is not None:
                files.check_place(path)
        if self.plot is not None:
            from ..data.figure import check_figure

            check_figure(self.plot)

    @property
    def saved(self) -> Path | None:
        """The saved results of another model; None of a model, or where there is no other."""
        path = None if self.against is None else Path(self.against)
        return path if path is not None and path.suffix.lower() in (".json", ".jsonl") else None

    def write(self, report: EvalReport, name: str, other: EvalReport | None) -> str:
        """Write what was asked for. Returns a line that says how another model differs, or ""."""
        from ..evaluation.curves import compare, write_thresholds

        if self.thresholds is not None:
            write_thresholds(report.curves, self.thresholds, precision=self.at_precision, recall=self.at_recall)
        against, said = None, ""
        if self.against is not None and other is not None:
            assert report.dataset is not None
            if report.metrics["AP"] is None:
                said = f"no AP to compare with {self.against}: every annotated object is a crowd or difficult"
            else:
                found = compare(other.evaluation, report.evaluation, report.dataset)
                against = self.against, other, found
                said = (
                    f"AP {found.difference:+.4f} against {self.against}; 95 % interval {found.low:+.4f} to {found.high:+.4f} "
                    f"({found.samples} draws of images)"
                )
        if self.report is not None:
            from ..evaluation.eval_page import write_eval_page

            write_eval_page(report, self.report, model=name, against=against)
        if self.plot is not None:
            from ..evaluation.eval_plot import write_eval_plot

            write_eval_plot(report, self.plot, model=name, against=against)
        return said


@command
def evaluate(
    model: Annotated[str | None, typer.Argument(help="Bundle, .onnx, .engine or checkpoint; leave out with --results.")] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="Annotations: a COCO file, a YOLO data.yaml, a Pascal VOC folder.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="Evaluate these saved results instead of running a model.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.")] = None,
    iou_type: Annotated[
        str | None, typer.Option(help="bbox, or segm for masks; default: masks if model and annotations have them.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the detections as a COCO results file."), JSON] = None,
    json_file: Json = None,
    *,
    options: Given[EvalOptions],
    choice: ChoiceOptions,
    run: Given[RunOptions],
    tuning: GivenTuning,
    load: Given[LoadOptions],
) -> None:
    """COCO average precision: all twelve metrics and one for each class."""
    from ..backends.open import load_options_for
    from ..backends.search import SessionOptions
    from ..evaluation.coco import NUMBERED, SEGM, metric_text, read_rows, report_rows
    from ..evaluation.results import write_results
    from . import show

    show.check_json(json_file)
    if save is not None:
        files.check_place(save)
    if ground_truth is None:
        raise DetrtError(
            "detrt eval needs annotations; give --ground-truth FILE (COCO JSON, YOLO data.yaml or a Pascal VOC folder)"
        )
    beside = choice.against if choice.saved is None else None  # another model to run
    if beside is not None and results is not None:
        raise DetrtError(f"--results runs no model, and '{beside}' is one; give saved results of it: --against FILE.json")
    # What is wrong in it is said before minutes of detection.
    saved = None if choice.saved is None else read_rows(choice.saved, ground_truth, limit)
    if results is not None:
        given = ["MODEL"] * (model is not None) + [
            flag for group in (options, run, *tuning.values(), load) for flag, _ in group.flags()
        ]
        if given:
            raise DetrtError(f"--results evaluates what was saved, without a model; leave out {' and '.join(given)}")
        report, name = report_rows(results, *read_rows(results, ground_truth, limit), iou_type), str(results)
    else:
        if model is None:
            raise DetrtError("give MODEL and --images DIR, or --results FILE to evaluate saved results")
        refs = [ref for ref in (model, beside) if ref is not None]
        openings = [SessionOptions(tuning=tuning.arguments(), load=one) for one in load_options_for(refs, load.make())]
        report, name = _run(model, ground_truth, options.make(), run.make(), openings[0], limit, iou_type), model
    if save is not None:
        write_results(report.rows, save)
    other = None
    if saved is not None:
        other = report_rows(choice.saved, *saved, report.iou_type)
    elif beside is not None:
        same = options.make()
        if same.resume is not None:
            same = replace(same, resume=same.resume.with_name(f"{same.resume.stem}.against{same.resume.suffix}"))
        other = _run(beside, ground_truth, same, run.make(), openings[1], limit, report.iou_type)
    if (results is not None or saved is not None) and report.dataset is not None and report.dataset.numbered:
        show.notes([f"'{ground_truth}' has no ids of images, and {NUMBERED}; of other results the AP is wrong"])
    said = choice.write(report, name, other)
    data = {"model": name, **report.to_dict()}
    if json_file:
        show.write_json(data, json_file)
    if json_file == "-":
        return
    resumed = f", {report.resumed} resumed" if report.resumed else ""
    figures = [(key, metric_text(value)) for key, value in report.metrics.items()]
    what = ", IoU of masks" if report.iou_type == SEGM else ""
    title = f"{name}: {number_of(report.images, 'image')}{resumed}, {number_of(report.detections, 'detection')}{what}"
    show.table(title, ("", "value"), figures, right=(1,))
    classes = sorted(((k, v) for k, v in report.per_class.items() if v is not None), key=lambda row: -row[1])
    show.table("AP by class", ("class", "AP"), [(printable(key), metric_text(value)) for key, value in classes], right=(1,))
    if said:
        print(said)
    if report.without_class:
        print(f"annotated, but not found by this model: {', '.join(report.without_class)}")


def _run(
    model: str,
    ground_truth: Path,
    options: EvalOptions,
    run: RunOptions,
    opening: SessionOptions,
    limit: int | None,
    iou_type: str | None,
) -> EvalReport:
    """Evaluate a model: in this process, or with several devices in one for each."""
    from ..data.datasets import load_dataset
    from ..detector import DetectorOptions
    from ..evaluation.coco import evaluate_coco, identity
    from ..jobs.pool import DevicePool
    from . import show
    from .detect import open_model

    more: dict[str, Any] = {}
    if len(run.device) > 1:
        detector = DetectorOptions(
            threshold=0.0,
            batch_size=options.batch,
            image_decoder=options.image_decoder,
            tile=options.tile,
            overlap=options.overlap,
        )
        opening = replace(opening, backend=run.backend)
        categories = load_dataset(ground_truth).categories
        session: Any = DevicePool(model, run.device, session=opening, detector=detector, categories=categories)
        more = {"detect_batches": session.detect_batches}
    else:
        session = open_model(model, run, opening)
    with contextlib.closing(session), show.progress() as step:
        return evaluate_coco(
            session,
            ground_truth,
            options.images,
            batch_size=options.batch,
            image_decoder=options.image_decoder,
            tile=options.tile,
            overlap=options.overlap,
            resume=options.resume,
            limit=limit,
            iou_type=iou_type,
            model=identity(model, session),
            progress=lambda count, total: step("eval", count / total, f"{count} of {number_of(total, 'image')}"),
            **more,
        )
