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
from ..backends.inductor.config import InductorConfig
from ..backends.openvino.config import OpenVinoConfig
from ..backends.tensorrt.config import TARGETS, EngineConfig
from ..class_names import name_notes
from ..errors import DetrtError, EngineError, OutputError, SourceError, printable
from ..models.contract import ExportConfig
from ..models.load import LoadOptions
from ..precision.config import PrecisionConfig
from .options import FILE, TEXT, Given, SizeOptions, comma_separated, command

if TYPE_CHECKING:
    from ..bundle import Bundle
    from ..export.trace import ExportReport
    from ..pipeline import BuildReport

ONNX, INDUCTOR, OPENVINO, AUTO = "onnx", "inductor", "openvino", "auto"

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
Json = Annotated[str | None, typer.Option("--json", help="Report as JSON to this file; - is stdout."), TEXT]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What is built of a model, and for which devices.

    Raises:
        EngineError: an unknown target.
    """

    target: tuple[str, ...] = field(
        default=ONNX,  # type: ignore[assignment]  # as the command line has it
        metadata={
            "help": "onnx (the graph alone), tensorrt-rtx, tensorrt, inductor, openvino; comma-separated. auto: the fastest that this "
            "machine can build.",
            "parse": comma_separated,
        },
    )
    device: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Devices of --target inductor (cpu, cuda), and to try --target onnx on; comma-separated.",
            "parse": comma_separated,
            "needs": {"target": (INDUCTOR, ONNX)},
        },
    )

    def __post_init__(self) -> None:
        allowed = f"{', '.join(TARGETS)}, {INDUCTOR}, {OPENVINO}, {ONNX} (no engine) or {AUTO}"
        if not self.target:
            raise EngineError(f"--target must be {allowed}; got nothing")
        for name in self.target:
            if name == "onnxruntime":
                raise EngineError("--target onnxruntime is now --target onnx: the ONNX file alone, which ONNX Runtime runs")
            if name not in (*TARGETS, INDUCTOR, OPENVINO, ONNX, AUTO):
                raise EngineError(f"--target must be {allowed}, or a comma-separated list of them; got {name!r}")
        if AUTO in self.target and len(self.target) > 1:
            raise EngineError(f"--target {AUTO} chooses by itself; got {','.join(self.target)}; give one of the two")

    def resolved(self, model: str) -> TargetOptions:
        """The same, with what "auto" stands for on this machine; the ONNX graph alone where nothing faster can be built."""
        if self.target != (AUTO,):
            return self
        from ..backends.targets import fastest_build

        found = fastest_build(checkpoint=not model.lower().endswith(".onnx"))
        if found is None:
            return TargetOptions((ONNX,))
        return TargetOptions((found.name,), (found.device,) if found.device else ())

    @property
    def try_devices(self) -> tuple[str, ...]:
        """Devices that ONNX Runtime tries the finished graph on."""
        return self.device if ONNX in self.target else ()


@command
def build(
    model: Model,
    targets: TargetOptions,
    size: SizeOptions,
    export: Given[ExportConfig],
    precision: PrecisionConfig,
    engine: Given[EngineConfig],
    package: Given[InductorConfig],
    openvino: Given[OpenVinoConfig],
    load: LoadOptions,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of the bundle; default, if MODEL is a bundle: that bundle."),
        FILE,
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
    targets = targets.resolved(model)
    if targets.try_devices:  # before minutes of export
        from ..backends.onnxruntime.session import require_provider

        for device in targets.try_devices:
            require_provider(device)
    engines = _engines(targets, size, engine)
    packages = _packages(targets, size, engine, package)
    models = [openvino.make(timeout_seconds=engine.timeout_seconds)] if OPENVINO in targets.target else []
    with show.progress() as step:
        report = run(
            model,
            output,
            export=_export_config(size, export),
            engines=engines,
            packages=packages,
            openvino=models,
            fuse_attention=ONNX in targets.target,
            precision=precision,
            try_devices=targets.try_devices,
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


def _engines(targets: TargetOptions, size: SizeOptions, engine: Given[EngineConfig]) -> list[EngineConfig]:
    """One config for each TensorRT target."""
    height, width = size.ranges
    only = {"tensorrt-rtx": {"timing_cache": None, "plugins": ()}, "tensorrt": {"sms": ()}}
    names = [name for name in targets.target if name in TARGETS]
    if not names and INDUCTOR not in targets.target and height is not None and size.fixed is None:
        raise EngineError(
            f"--height {_joined(height)} is a range, which has no effect without an engine or package target; leave it out, or "
            "give one number"
        )
    return [engine.make(target=name, height=height, width=width, **only[name]) for name in names]


def _packages(
    targets: TargetOptions, size: SizeOptions, engine: Given[EngineConfig], package: Given[InductorConfig]
) -> list[InductorConfig]:
    """One config for each device and size, with --target inductor."""
    several = size.size if size.size is not None and len(size.size) > 1 else ()
    if several and (INDUCTOR not in targets.target or set(targets.target) & set(TARGETS)):
        raise EngineError(
            f"--size {','.join(f'{height}x{width}' for height, width in several)} names several sizes, which --target inductor "
            f"compiles a package for each; got --target {','.join(targets.target)}; give one size, or a range with --height and "
            "--width"
        )
    if INDUCTOR not in targets.target:
        return []
    sides = [((height,) * 3, (width,) * 3) for height, width in several] or [size.ranges]
    shared = {"batch": engine.batch, "timeout_seconds": engine.timeout_seconds}
    return [
        package.make(device=device, height=height, width=width, **shared)
        for device in targets.device or ("cpu",)
        for height, width in sides
    ]


def _joined(values: Iterable[Any]) -> str:
    return ",".join(map(str, values))


def _warn(notes: Iterable[str], warnings: Iterable[str]) -> None:
    from . import show

    show.notes(notes)
    for warning in warnings:
        print(f"warning: {printable(warning)}", file=sys.stderr)


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
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file, or a folder for model.onnx."), FILE],
    size: SizeOptions,
    export: Given[ExportConfig],
    precision: PrecisionConfig,
    load: LoadOptions,
    json_file: Json = None,
) -> None:
    """Export a checkpoint to one ONNX graph with its spec inside, checked against PyTorch.

    Given an ONNX file of another exporter, bring it into detrt's contract, checked against the file.
    """
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
    if path.is_file() and os.path.realpath(path) == os.path.realpath(model):
        raise OutputError(f"--output '{path}' is the file that is exported; give another output path")
    with show.progress() as step:
        step("load", None, model)
        write = partial(
            _export_foreign if model.lower().endswith(".onnx") else _export_checkpoint,
            model,
            config=config,
            precision=precision,
            load=load,
            say=lambda text: step("export", None, text),
        )
        done, typed = export_converted(write, path, precision, lambda fraction, text: step("precision", fraction, text))
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


def _export_checkpoint(
    model: str, path: Path, config: ExportConfig, precision: PrecisionConfig, load: LoadOptions, say: Say
) -> _Exported:
    from ..export import export_onnx
    from ..models.load import load_source
    from ..pipeline import check_prompt

    source = load_source(model, load)
    check_prompt(source.spec, precision)
    report = export_onnx(source, path, config, progress=say)
    return _Exported(
        report, source.family.title, source.provenance.parameters, "PyTorch", (*source.notes, *name_notes(report.spec.labels))
    )


def _export_foreign(
    model: str, path: Path, config: ExportConfig, precision: PrecisionConfig, load: LoadOptions, say: Say
) -> _Exported:
    from ..backends.onnxruntime.session import run_graph
    from ..backends.tensorrt.build import check_model_file
    from ..evaluation.models import is_foreign
    from ..export.foreign import export_foreign
    from ..models.foreign import read_foreign
    from ..pipeline import check_prompt, refuse_export_choices

    check_model_file(Path(model))
    if not is_foreign(model):
        raise SourceError(f"'{model}' is an ONNX file, exported already; build engines from it with: detrt build {model} -o OUT")
    refuse_export_choices(model, replace(config, check=True), LoadOptions(), builds=False, checkpoint=False)
    foreign = read_foreign(model, load, run_graph)
    check_prompt(foreign.spec, precision)
    report, notes = export_foreign(foreign, path, check=config.check, say=say)
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
    verdict = f"equal to {done.equal_to}: {report.worst:.1e} relative" if report.errors else "not checked"
    summary = report.summary
    print(f"{report.path}: {done.title}, {summary.nodes} nodes, opset {summary.opset}, {report.seconds:.1f} s; {verdict}")
    print(f"  preprocessing: {preprocessing_words(report.spec.input)}")
    if report.processing.verdict:
        print(f"  {report.processing.verdict}")
    if typed:
        print(f"  precision {typed.precision}: {typed.verdict}")
    for kind, tensors in (("in", summary.inputs), ("out", summary.outputs)):
        for name, (dtype, shape) in tensors.items():
            print(f"  {kind:3} {name}: {dtype} {' x '.join(map(str, shape))}")
