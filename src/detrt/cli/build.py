"""`detrt build` and `detrt export`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import files
from ..backends.shared import AUTO, SharedOptions, builds, configs_of, names_taking
from ..class_names import name_notes
from ..errors import DetrtError, OutputError, SourceError, number_of, printable
from ..models.contract import ExportConfig
from ..models.load_options import LoadOptions
from ..precision.config import PrecisionConfig
from ..spec import Precision, Triple, comma_separated, parse_triple
from .options import FOLDER, GRAPH, Given, GivenBackends, Json, SizeOptions, command
from .spellings import spelled

if TYPE_CHECKING:
    from ..bundle import Bundle
    from ..export.trace import ExportReport, Form
    from ..pipeline import BuildReport

*_OTHERS, ONNX = builds()  # the graph alone is the last

Model = Annotated[
    str,
    typer.Argument(
        help="hf:org/name, a transformers folder, ckpt:FILE, embedded:shapes, random:FAMILY, an .onnx file, or a bundle."
    ),
]
Exportable = Annotated[
    str,
    typer.Argument(
        help="hf:org/name, a transformers folder, ckpt:FILE, embedded:shapes, random:FAMILY, or another exporter's .onnx file."
    ),
]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What is built of a model, for which devices, and what several backends take."""

    target: tuple[str, ...] = field(
        default=ONNX,  # type: ignore[assignment]  # as the command line has it
        metadata={
            "help": f"{ONNX} (the graph alone), {', '.join(_OTHERS)}; comma-separated. {AUTO}: the fastest that this machine can build.",
            "parse": comma_separated,
        },
    )
    device: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": f"Devices to build for, or to try the graph on: cpu, cuda; comma-separated; for {' and '.join(names_taking('devices'))}.",
            "parse": comma_separated,
            "needs": {"target": names_taking("devices")},
        },
    )
    batch: Triple | None = field(
        default=None,
        metadata={
            "help": "Batch size: one, or MIN,OPT,MAX; default 1,1,8.",
            "panel": "Size",
            "parse": parse_triple,
            "needs": {"target": names_taking("batch")},
        },
    )
    timeout_seconds: float | None = field(
        default=None,
        metadata={
            "help": "Longest time of one engine or package build, seconds.",
            "panel": "Engine",
            "flag": "timeout",
            "needs": {"target": names_taking("timeout_seconds")},
        },
    )

    def shared(self, size: SizeOptions, model: str) -> SharedOptions:
        """The same with the sizes, and with what "auto" stands for on this machine. Raises EngineError."""
        height, width = size.ranges
        asked = SharedOptions(self.target, self.device, self.batch, height, width, size.several, self.timeout_seconds)
        return asked.resolved(checkpoint=not model.lower().endswith(".onnx"))


@command
def build(
    model: Model,
    targets: TargetOptions,
    size: SizeOptions,
    export: Given[ExportConfig],
    precision: PrecisionConfig,
    backends: GivenBackends,
    load: LoadOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the bundle; default, if MODEL is a bundle: that bundle."),
        FOLDER,
    ] = None,
    json_file: Json = None,
) -> None:
    """Build a bundle: checkpoint -> ONNX, checked against PyTorch -> what the target runs.

    Given an ONNX file with its spec (from detrt export), only the rest is built. Given a bundle, it is added to it.
    """
    from ..pipeline import build as run
    from ..pipeline import report_to_dict
    from . import show

    show.check_json(json_file)
    asked = targets.shared(size, model)
    configs = configs_of(asked, {name: given.make for name, given in backends.items()})
    with show.progress() as step:
        report = run(
            model,
            output,
            export=_export_config(size, export),
            targets=configs,
            precision=precision,
            load=load,
            progress=step,
        )
    _warn(report.notes, report.warnings)
    if json_file:
        show.write_json(report_to_dict(report), json_file)
    if json_file != "-":
        _show_build(report, report.bundle.folder)
        _show_faster(report.bundle)


def _export_config(size: SizeOptions, export: Given[ExportConfig]) -> ExportConfig:
    """A size that is one number is fixed in the graph; a range leaves both sides symbolic."""
    height, width = size.fixed or (None, None)
    return export.make(height=height, width=width)


def _warn(notes: Iterable[str], warnings: Iterable[str]) -> None:
    from . import show

    show.notes(notes)
    for warning in warnings:
        print(f"warning: {printable(spelled(warning))}", file=sys.stderr)


def _show_build(report: BuildReport, output: Path) -> None:
    from . import show

    rows = [(s.name, f"{s.seconds:.1f} s", show.human_size(s.size), s.verdict) for s in report.stages]
    at = int(bool(rows) and rows[0][0] == "load")
    rows[at:at] = [("preprocessing" * (not line), "", "", text) for line, text in enumerate(report.preprocessing)]
    show.table(f"{output}", ("stage", "time", "size", "verdict"), rows, right=(1, 2))
    prompt = " --prompt 'a cat. a dog.'" if report.bundle.spec.text is not None else ""
    print(f"detect with: detrt detect {output} IMAGE{prompt}")


def _show_faster(bundle: Bundle) -> None:
    """The last line: what makes a bundle of its graph alone faster on this machine."""
    from ..backends.targets import faster_than

    found = faster_than(bundle)
    if found is None:
        return
    build, hint = found
    device = f" --device {build.device}" if build.device else ""
    line = f"detrt build {shlex.quote(str(bundle.folder))} --target {build.name}{device}"
    print(f"faster on this machine: {line}" if not hint else f"faster on this machine: {line}\n  first, {hint}")


@command
def export(
    model: Exportable,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file, or a folder for model.onnx."), GRAPH],
    size: SizeOptions,
    export: Given[ExportConfig],
    precision: PrecisionConfig,
    load: LoadOptions,
    for_tensorrt: Annotated[
        bool,
        typer.Option("--for-tensorrt", help="Write what trtexec and other programs compile best; `build` does so by itself."),
    ] = False,
    json_file: Json = None,
) -> None:
    """Export a checkpoint to one ONNX graph with its spec inside, checked against PyTorch.

    Given an ONNX file of another exporter, bring it into detrt's contract, checked against the file.
    """
    from ..bundle import check_outside
    from ..graph.dialect import for_typed_parser
    from ..precision.capability import check_before
    from ..precision.stage import export_converted
    from . import show

    show.check_json(json_file)
    if size.fixed is None and (size.size or size.height is not None):
        raise DetrtError("an ONNX graph has one size or a symbolic one: give one number, or leave --height and --width out")
    config = _export_config(size, export)
    warnings = check_before(precision)
    path = output if output.suffix == ".onnx" else output / "model.onnx"
    files.check_place(path)
    check_outside(path)
    if path.is_file() and os.path.realpath(path) == os.path.realpath(model):
        raise OutputError(f"--output '{path}' is the file that is exported; give another output path")
    form = for_typed_parser if for_tensorrt else None
    with show.progress() as step:
        step("load", None, model)
        job = _ExportJob(model, config, precision, load, lambda text: step("export", None, text), form)
        done, typed = export_converted(
            partial(_export_foreign if model.lower().endswith(".onnx") else _export_checkpoint, job),
            path,
            precision,
            lambda fraction, text: step("precision", fraction, text),
            form=form,
            check=config.check,
        )
    warnings.extend(typed.warnings if typed else ())
    _warn(done.notes, warnings)
    if json_file:
        show.write_json(_export_facts(done, typed), json_file)
    if json_file != "-":
        _show_export(done, typed)


@dataclass(frozen=True, slots=True)
class _Exported:
    """A finished export. title: of the model. equal_to: what the graph was compared with. parameters: number of weights."""

    report: ExportReport
    title: str
    parameters: int
    equal_to: str
    notes: tuple[str, ...]


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _ExportJob:
    """What is exported, and how. form: changes the graph in place, see `export_converted`."""

    model: str
    config: ExportConfig
    precision: PrecisionConfig
    load: LoadOptions
    say: Say
    form: Form | None

    @property
    def converted(self) -> bool:
        """Whether the graph is converted to another precision after the export, and gets its form then."""
        return self.precision.target != Precision.FP32


def _export_checkpoint(job: _ExportJob, path: Path) -> _Exported:
    from ..export import export_onnx
    from ..models.load import load_source
    from ..pipeline import check_prompt

    source = load_source(job.model, job.load)
    check_prompt(source.spec, job.precision)
    report = export_onnx(source, path, job.config, progress=job.say, form=job.form, converted=job.converted)
    return _Exported(
        report, source.family.title, source.provenance.parameters, "PyTorch", (*source.notes, *name_notes(report.spec.labels))
    )


def _export_foreign(job: _ExportJob, path: Path) -> _Exported:
    from ..backends.targets import graph_opener
    from ..evaluation.models import is_foreign
    from ..export.foreign import export_foreign
    from ..graph.operators import check_model_file
    from ..models.foreign import read_foreign
    from ..pipeline import check_prompt, refuse_export_choices

    model = job.model
    check_model_file(Path(model))
    if not is_foreign(model):
        raise SourceError(f"'{model}' is an ONNX file, exported already; build engines from it with: detrt build {model} -o OUT")
    refuse_export_choices(model, replace(job.config, check=True), LoadOptions(), builds=False, checkpoint=False)
    foreign = read_foreign(model, job.load, graph_opener().run_graph)
    check_prompt(foreign.spec, job.precision)
    form = None if job.converted else job.form
    report, notes = export_foreign(foreign, path, check=job.config.check, say=job.say, form=form)
    title = f"layout {foreign.graph.layout.name}"
    return _Exported(
        report, title, foreign.provenance().parameters, "the original", (*foreign.notes, *notes, *name_notes(report.spec.labels))
    )


def _export_facts(done: _Exported, typed: Any) -> dict[str, Any]:
    from ..data.preprocess import preprocessing_words

    report = done.report
    return {
        "path": str(report.path),
        "seconds": round(report.seconds, 3),
        "family": report.spec.family,
        "parameters": done.parameters,
        "graph": report.summary.to_dict(),
        "checks": list(report.errors),
        "preprocessing": {"input": preprocessing_words(report.spec.input), **asdict(report.processing)},
        "notes": list(done.notes),
        "precision": typed.to_dict() if typed else None,
    }


def _show_export(done: _Exported, typed: Any) -> None:
    from ..data.preprocess import preprocessing_words

    report = done.report
    before = " (before conversion)" if typed else ""
    verdict = f"equal to {done.equal_to}{before}: {report.worst:.1e} relative" if report.errors else "not checked"
    summary = report.summary
    print(
        f"{report.path}: {done.title}, {number_of(summary.nodes, 'node')}, opset {summary.opset}, {report.seconds:.1f} s; {verdict}"
    )
    print(f"  preprocessing: {preprocessing_words(report.spec.input)}")
    if report.processing.verdict:
        print(f"  {report.processing.verdict}")
    if typed:
        print(f"  precision {typed.precision}: {typed.verdict}")
    for kind, tensors in (("in", summary.inputs), ("out", summary.outputs)):
        for name, (dtype, shape) in tensors.items():
            print(f"  {kind:3} {name}: {dtype} {' x '.join(map(str, shape))}")
