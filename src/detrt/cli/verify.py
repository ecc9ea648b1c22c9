"""`detrt verify`: does a candidate detect the same things as a reference?"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import files
from ..errors import DetrtError, number_of
from ..models.load_options import LoadOptions
from ..spec import parse_numbers
from .options import HTML, Json, PromptOptions, RunOptions, command

if TYPE_CHECKING:
    from ..evaluation.report import VerifyReport


@dataclass(frozen=True, slots=True)
class GateOptions:
    """Tolerances that replace those of the candidate's precision."""

    threshold: float | None = field(default=None, metadata={"help": "Compare detections with at least this score (0.3)."})
    box_px: float | None = field(default=None, metadata={"help": "Largest allowed difference of a box side, pixels."})
    score: float | None = field(default=None, metadata={"help": "Largest allowed difference of a score."})
    tensor: float | None = field(default=None, metadata={"help": "Largest allowed relative difference of an output."})
    ap: float | None = field(default=None, metadata={"help": "Largest allowed loss of AP (0..1).", "needs": {"ground_truth": ()}})
    mask_iou: float | None = field(default=None, metadata={"help": "Lowest allowed IoU of the two masks of a pair."})
    unmatched: float | None = field(default=None, metadata={"help": "Largest allowed fraction of unmatched detections."})
    mismatched: float | None = field(
        default=None,
        metadata={
            "help": "Largest allowed fraction of detections beyond a tolerance or unmatched; 0: none, and each output is judged."
        },
    )

    def changes(self) -> dict[str, float]:
        """The tolerances that are given."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@command
def verify(
    candidate: Annotated[str, typer.Argument(help="Bundle, .onnx, .engine or checkpoint to check.")],
    images: Annotated[list[str], typer.Option(help="Images or folders; repeat for several.")],
    gates: GateOptions,
    run: RunOptions,
    prompt: PromptOptions,
    load: LoadOptions,
    against: Annotated[
        str | None, typer.Option(help="The reference; default: the checkpoint that the bundle was made from.")
    ] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="Annotations, as detrt eval takes them: compare the AP as well.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="Gate of fp32, tf32, fp16, bf16, int8 or fp8; default: the candidate's own precision.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first so many images.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.", rich_help_panel="Size")] = 2,
    batches: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes to check for batch invariance, e.g. 1,4,8; default: the profile's.", rich_help_panel="Size"
        ),
    ] = None,
    divergence: Annotated[
        str, typer.Option(help="Locate the first diverging node: auto (on failure), always or never.")
    ] = "auto",
    report: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page."), HTML] = None,
    report_images: Annotated[
        int | None, typer.Option("--report-images", min=0, max=50, help="Images in the report, the worst first (6).")
    ] = None,
    json_file: Json = None,
) -> None:
    """Compare two models on real images: tensors, batch invariance, detections, AP. Exit code 3 if they differ."""
    from ..data.images import expand_inputs
    from ..data.matching import Gate, gate_for
    from ..evaluation import parity
    from . import show

    show.check_json(json_file)
    if report is not None:
        files.check_place(report)
    if report_images is not None and report is None:
        raise DetrtError(f"--report-images {report_images} has no effect without --report FILE; add that, or leave it out")
    changes = gates.changes()
    gate: Gate | None = None if precision is None else replace(gate_for(precision), **changes)
    paths: list[Path] = [found.path for found in expand_inputs(images)][:limit]
    opening = {"backend": run.backend, "device": run.one_device()}
    show.notes(prompt.notes())
    with show.progress() as step:
        done = parity.verify(
            against,
            candidate,
            paths,
            gate=gate,
            gate_changes=changes,
            batch_size=batch,
            ground_truth=ground_truth,
            batches=None if batches is None else list(parse_numbers(batches, "batches")),
            divergence=divergence,
            report_images=(6 if report_images is None else report_images) if report is not None else 0,
            load=load,
            prompt=prompt.read(),
            task=prompt.task,
            opening=opening,
            progress=lambda count, total: step("verify", count / total, f"{count} of {number_of(total, 'image')}"),
            say=lambda text: step(text, None, ""),
        )
    if json_file:
        show.write_json(done.to_dict(), json_file)
    if report is not None:
        from ..evaluation.html import write_report

        reference, checked = done.sources
        write_report(done, report, candidate=checked, reference=reference)
    if json_file != "-":
        _show(done)
    parity.require(done)


def _show(done: VerifyReport) -> None:
    from . import show

    title = f"{done.candidate} ({done.precision}) against {done.reference}, {number_of(len(done.images), 'image')}"
    lines = [(f.name, f.measured, f.allowed + ("" if f.decides else f" ({done.decider})")) for f in done.checks]
    show.table(title, ("", "measured", "allowed"), lines, right=(1, 2))
    for note in done.notes:
        show.paragraph(f"note: {note}")
    if done.divergence is not None:
        show.paragraph(done.divergence.sentence())
    for failure in done.failures:
        show.paragraph(f"failed: {failure}")
    print(f"verdict: {done.verdict}")
