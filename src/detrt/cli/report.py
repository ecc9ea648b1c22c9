"""`detrt report`: build, check, time and evaluate checkpoints on this machine, as one table."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import files
from ..backends.building import BuildPlan
from ..backends.shared import SharedOptions, builds, configs_of
from ..backends.targets import GRAPH, needs_gpu
from ..bench.config import BenchConfig
from ..data.arguments import INPUT_SIZE
from ..data.datasets import load_dataset
from ..data.images import expand_inputs
from ..errors import DetrtError, check_one_of
from ..models.contract import ExportConfig
from ..models.load_options import LoadOptions
from ..precision.config import PrecisionConfig
from ..spec import comma_separated, parse_numbers
from ..system import check_driver
from .options import Given, Json, Writes, command

REPORT_TARGETS = tuple(name for name, (_, build) in builds().items() if not build.from_checkpoint)

Models = Annotated[list[str], typer.Argument(help="Checkpoints: hf:org/name, folders, ckpt:FILE, embedded:shapes.")]
_COLUMNS = (
    "model", "precision", "batch", "size", "p50 ms", "p90 ms", "images/s", "build s", "MB", "activations MiB", "AP", "AP change",
    "check",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What a report measures.

    Attributes:
        target: one of REPORT_TARGETS.
        precisions: of the graph, the reference of AP first.
        batches: batch sizes; AP is measured with the first.
        size: (height, width) in pixels; None: the model's own.
        repeats: timed runs after ten that are not counted.
        keep: folder for the bundles, and for the rows that are done, which the next report of the same choices takes; None: both are
            deleted.

    Raises:
        DetrtError: a target or precision that is not known, or a data set without its other half.
    """

    target: str
    precisions: tuple[str, ...] = field(
        default=("fp32", "fp16"),
        metadata={
            "help": "Precisions, the reference of AP first; default: fp32,fp16.",
            "panel": "Precision",
            "parse": comma_separated,
        },
    )
    batches: tuple[int, ...] = field(
        default=(1, 8),
        metadata={
            "help": "Batch sizes; TensorRT gets an engine of each; default: 1,8.",
            "panel": "Size",
            "parse": partial(parse_numbers, flag="batches"),
        },
    )
    size: tuple[int, int] | None = field(default=None, metadata=INPUT_SIZE)
    repeats: int = field(default=50, metadata={"help": "Timed runs."})
    ground_truth: Path | None = field(default=None, metadata={"help": "Annotations, as detrt eval takes them."})
    images: Path | None = field(default=None, metadata={"help": "With --ground-truth: the folder of its images."})
    calibration: Path | None = field(
        default=None, metadata={"help": "Calibration images, for int8 and the ranges of fp16.", "panel": "Precision"}
    )
    prompt: str | None = field(
        default=None, metadata={"help": "Prompt of models that take one: 'a cat. a dog.'", "panel": "Prompt"}
    )
    keep: Path | None = field(
        default=None,
        metadata={
            "help": "Keep the bundles in this folder; the same command goes on with what it has done there.",
            "writes": "folder",
        },
    )

    def __post_init__(self) -> None:
        check_one_of("--target", self.target, REPORT_TARGETS, DetrtError)
        if not self.precisions:
            raise DetrtError("--precisions is empty; give one or more of fp32, fp16, bf16, int8, fp8")
        for name, values in (("--precisions", self.precisions), ("--batches", self.batches)):
            if len(set(values)) < len(values):
                raise DetrtError(f"{name} has one of {', '.join(map(str, values))} twice; give each once")
        for name in self.precisions:
            self.check(self.precision(name))
        row, _ = builds()[self.target]
        if needs_gpu(row.name):
            check_driver(
                f"a report of --target {self.target}, which runs what it builds,", DetrtError, "give --target openvino or onnx"
            )
        if self.calibration is not None:
            expand_inputs([str(self.calibration)])  # now, rather than as the error of some rows
        if self.ground_truth is not None:
            if self.images is None:
                load_dataset(self.ground_truth)
            else:
                from ..evaluation.coco import read_dataset

                read_dataset(self.ground_truth, self.images)
        self.bench(self.batches[0] if self.batches else 0, evaluated=True)

    def precision(self, name: str) -> PrecisionConfig:
        """How the graph gets a precision. Raises GraphError."""
        calibration = self.calibration if name in ("fp16", "int8", "fp8") else None
        return PrecisionConfig(precision=name, calibration=calibration, prompt=self.prompt if calibration else None)

    def check(self, precision: PrecisionConfig) -> None:
        """Raise DetrtError where the target does not have a precision, or images are missing for it."""
        plan = BuildPlan("", ExportConfig(), precision, LoadOptions(), from_graph=False)
        row, _ = builds()[self.target]
        row.built_by().check(configs_of(SharedOptions((self.target,))), plan)
        precision.check_images()

    def bench(self, batch: int, *, evaluated: bool) -> BenchConfig:
        """What is measured of one bundle."""
        data = {"ground_truth": self.ground_truth, "images": self.images} if evaluated else {}
        row, _ = builds()[self.target]
        return BenchConfig(
            batches=(batch,), size=self.size, repeats=self.repeats, warmup=10, scopes=("forward",),
            backends=(row.name,), providers=("cpu",) if row is GRAPH else (),
            prompt=self.prompt, **data,
        )  # fmt: skip


@command
def report(
    models: Models,
    options: Given[ReportConfig],
    load: LoadOptions,
    target: Annotated[str, typer.Option(help=f"{', '.join(REPORT_TARGETS)}.")],
    coco: Annotated[
        Path | None, typer.Option(help="COCO's folder, with annotations/instances_val2017.json and val2017/, for AP.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the report to this file: a page where it ends in .html, else Markdown."),
        Writes("HTML or Markdown"),
    ] = None,
    json_file: Json = None,
) -> None:
    """Build, check, time and evaluate checkpoints on this machine: a table by precision and batch size.

    Exit code 3: an engine does not detect what its graph detects. 2: something could not be built or run; its row says why.
    """
    from . import show
    from .report_page import report_page
    from .run_report import FAILED, coco_val2017, run_report

    show.check_json(json_file)
    data: dict[str, Any] = {}
    if coco is not None:
        if {name for _, name in options.flags()} & {"ground_truth", "images"}:
            raise DetrtError("give --coco DIR, or --ground-truth FILE and --images DIR, not both")
        data["ground_truth"], data["images"] = coco_val2017(coco)
    config = options.make(target=target, **data)
    if output is not None:
        files.check_place(output)
    with show.progress() as step:
        found = run_report(models, config, load, step)
    errors = [row["error"] for row in found["rows"] if "error" in row and row["check"] != FAILED]
    if len(errors) == len(found["rows"]):
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise DetrtError(f"there is nothing to report, because nothing could be built or run: {errors[0]}{more}")
    rows = [_cells(row) for row in found["rows"]]
    shown = [index for index in range(len(_COLUMNS)) if any(row[index] for row in rows)]
    columns, filled = [_COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows]
    if output is not None:
        page = output.suffix.lower() in (".html", ".htm")
        text = report_page(found, _title(found), columns, filled) if page else _markdown(found, rows)
        files.write_text(output, text)
    if json_file:
        show.write_json(found, json_file)
    if json_file != "-":
        show.paragraph(_title(found))
        right = [column for column, index in enumerate(shown) if 2 <= index < len(_COLUMNS) - 1]
        # A reason is longer than a column is wide.
        cells = [
            ["failed" if "error" in row and cell == row["error"] else cell for cell in line]
            for row, line in zip(found["rows"], filled, strict=True)
        ]
        show.table("", columns, cells, right=right, keys=3)
        for row, (model, precision, batch, *_) in zip(found["rows"], rows, strict=True):
            if "error" in row:
                show.paragraph(f"{model} in {precision}, batch {batch}: {row['error']}")
    if any(row["check"] == FAILED for row in found["rows"]):
        raise typer.Exit(3)
    if any("error" in row for row in found["rows"]):
        raise typer.Exit(2)


def _title(found: dict[str, Any]) -> str:
    from . import show

    machine, settings = found["machine"], found["config"]
    gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
    chosen = {name: value for name in ("calibration", "prompt") if (value := settings[name]) is not None} | settings["load"]
    options = "".join(f", {name.replace('_', ' ')} {value}" for name, value in chosen.items())
    return (
        f"{show.machine_line(machine, gpus, ('tensorrt', 'openvino'))}; target {settings['target']}, forward passes with copies, "
        f"median of {settings['repeats']}{options}"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    from ..bench.plot import short

    def number(name: str, digits: int, scale: float = 1.0) -> str:
        return "" if row.get(name) is None else f"{row[name] * scale:.{digits}f}"

    change = row.get("AP change")
    return [
        short(row["model"]), row["precision"], str(row["batch"]), f"{row['height']}x{row['width']}" if "height" in row else "",
        number("p50_ms", 2), number("p90_ms", 2), number("images_per_s", 1), number("build_s", 1), number("bytes", 1, 1e-6),
        number("activation_bytes", 0, 2**-20), number("AP", 4), "" if change is None else f"{change:+.4f}",
        row.get("error") or row["check"],
    ]  # fmt: skip


def _markdown(found: dict[str, Any], rows: list[list[str]]) -> str:
    lines = ["# detrt report", "", _title(found), "", f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    lines += [f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"
