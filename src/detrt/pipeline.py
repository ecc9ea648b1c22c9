"""From a checkpoint or an ONNX file to a bundle: one folder that every runtime can open."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from . import files
from .backends.inductor.build import build_packages, check_packages
from .backends.inductor.config import InductorConfig
from .backends.onnxruntime.session import OnnxSession
from .backends.tensorrt import EngineConfig, build_engine
from .backends.tensorrt.build import check_model_file
from .bundle import MANIFEST, Bundle, BundleFile, EngineFacts, Provenance
from .data.preprocess import preprocess
from .data.scenes.scene import draw_scene
from .errors import EngineError, ExportError, OutputError, SourceError, SpecError
from .models.contract import ExportConfig
from .precision import PrecisionConfig
from .precision.capability import check_before, check_engine
from .spec import ModelSpec

MODEL = "model.onnx"
RANGES, SEARCH_PLOT, SEARCH_STATE = "ranges.json", "search.svg", "search.json"  # of the precision stage

# progress(stage, fraction 0..1 or None where it is not known, what is being done)
Progress = Callable[[str, float | None, str], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """One finished stage: name, seconds, bytes written, and a verdict in words."""

    name: str
    seconds: float
    size: int
    verdict: str


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A finished bundle and the stages that led to it. notes: what was decided while the checkpoint was loaded."""

    bundle: Bundle
    stages: tuple[Stage, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def build(
    model: str | Path,
    output: Path | str,
    *,
    export: ExportConfig = ExportConfig(),  # noqa: B008 - frozen
    engines: Sequence[EngineConfig] = (EngineConfig(),),
    packages: Sequence[InductorConfig] = (),
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
    provider: str | None = None,
    trust_remote_code: bool = False,
    labels: Path | str | None = None,
    family: str | None = None,
    tokenizer: Path | str | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Build a bundle in `output`.

    model: a checkpoint reference (see `load_source`) or an ONNX file with its spec. engines: one
    engine file for each; empty for a bundle with the ONNX file alone. packages: the checkpoint compiled by PyTorch, a
    file for each. precision: the types of the graph; anything but fp32 turns `model.onnx` itself, and adds `ranges.json`
    where images were given. provider: of ONNX Runtime ("cuda"), with which the finished graph is tried. tokenizer: see
    `load_source`. A model that takes a prompt brings its text tower and its tokenizer, and an engine of the
    tower beside each engine; the tower stays FP32. An existing bundle in `output` is replaced when everything is done, and stays as it was if anything fails.

    Raises:
        SourceError, SpecError, ExportError, GraphError, EngineError, MissingPackageError, OutputError;
        GateError: the exported graph does not equal PyTorch, or is not in the precision that was asked for.
    """
    from .backends.tensorrt.bindings import check_installed

    engines = [replace(config, tf32=True) if precision.precision == "tf32" else config for config in engines]
    names = [engine_name(config, precision.target) for config in engines]
    if len(set(names)) != len(names):
        raise EngineError(f"two engines would have the name {names}; give each target and compute capability once")
    for config in engines:
        if export.plugin and config.target == "tensorrt-rtx":
            raise ExportError(
                f"--msda {export.msda} makes plugin nodes, and TensorRT-RTX has no plugin layers; choose --target tensorrt, or "
                "--msda gather"
            )
        if export.msda == "plugin" and not config.plugins:
            raise ExportError("--msda plugin needs the plugin's library: --plugin libdetrt_plugin.so (docs/guide/plugin.md)")
        check_installed(config.target)  # before minutes of export, not after them
    check_packages(packages, str(model), export, precision.precision)
    warnings = check_before(precision, engines)
    say = progress or (lambda stage, fraction, text: None)
    stages: list[Stage] = []
    is_onnx = str(model).lower().endswith(".onnx")
    if is_onnx:
        _refuse_export_choices(model, export, labels, family, tokenizer)
    elif (Path(model) / MANIFEST).is_file():
        raise SourceError(f"'{model}' is a bundle already; to build other engines from its graph, give '{Path(model) / MODEL}'")
    with _new_folder(Path(output)) as folder:
        if is_onnx:
            spec, provenance = _adopt(Path(model), folder, stages)
            check_prompt(spec, precision)
        else:
            spec, provenance = _export(
                str(model), folder, export, engines, precision, trust_remote_code, (labels, family, tokenizer), stages, say
            )
        if precision.precision != "fp32":
            provenance = _convert(folder, spec, provenance, precision, stages, warnings, say)
        entries = _model_entries(folder, spec)
        for config, name in zip(engines, names, strict=True):
            start = time.perf_counter()
            built = build_engine(
                folder / MODEL,
                folder / name,
                config,
                spec,
                progress=lambda fraction, text, name=name: say(f"engine {name}", fraction, text),
            )
            warnings.extend(built.warnings)
            if precision.precision != "fp32" or not is_onnx:  # an ONNX file may come typed already
                check_engine(built.facts, precision)
            entries.append(_entry(folder, name, "engine", built.facts))
            verdict = f"{built.facts.layers} layers, {built.facts.precision}"
            stages.append(Stage(f"engine {config.label}", time.perf_counter() - start, built.size, verdict))
            if spec.text is not None and spec.text.tower:
                entries.append(_tower_engine(folder, name, spec, spec.text.tower, config, stages, warnings, say))
        if packages:
            loading = {"trust_remote_code": trust_remote_code, "labels": labels, "family": family, "tokenizer": tokenizer}
            for one in build_packages(str(model), folder, MODEL, packages, spec, precision.precision, loading, say):
                stages.append(Stage(one.name, one.seconds, one.built.size, one.verdict))
                entries.append(_entry(folder, one.built.path.name, "inductor", one.built.facts))
        if provider is not None:
            say("onnxruntime", None, f"trying the provider {provider}")
            stages.append(Stage(*try_provider(folder / MODEL, spec, provider)))
        seconds = {stage.name: round(stage.seconds, 3) for stage in stages}
        provenance = replace(provenance, options={**provenance.options, "seconds": seconds})
        Bundle(folder, spec, provenance, tuple(entries)).save()
    notes = tuple(provenance.options.get("loading", ()))
    return BuildReport(Bundle.open(output), tuple(stages), tuple(warnings), notes)


def check_prompt(spec: ModelSpec, precision: PrecisionConfig) -> None:
    """Raise ExportError where calibration needs a prompt that is not given, or is given one that it cannot use."""
    if spec.text is None:
        if precision.prompt is not None:
            raise ExportError(
                f"--prompt {precision.prompt!r} is for models that take one; this one has fixed classes; leave it out"
            )
        return
    if precision.calibration is not None and precision.prompt is None:
        raise ExportError(
            f"--calibration '{precision.calibration}' runs the model, which needs to know what to look for; give --prompt "
            "'a cat. a dog.' with it, naming things that are in the pictures"
        )


def _tower_engine(
    folder: Path,
    engine: str,
    spec: ModelSpec,
    tower: str,
    config: EngineConfig,
    stages: list[Stage],
    warnings: list[str],
    say: Progress,
) -> BundleFile:
    """The engine of the text tower that belongs to the detector's `engine`."""
    name, start = tower_engine_name(engine), time.perf_counter()
    built = build_engine(
        folder / tower,
        folder / name,
        config,
        spec,
        progress=lambda fraction, text: say(f"engine {name}", fraction, text),
    )
    warnings.extend(built.warnings)
    verdict = f"{built.facts.layers} layers, {built.facts.precision}"
    stages.append(Stage(f"text engine {config.label}", time.perf_counter() - start, built.size, verdict))
    return _entry(folder, name, "text-engine", built.facts)


def tower_engine_name(engine: str) -> str:
    """The file of the text tower's engine: `text.` for `model.` of the detector's."""
    return "text." + engine.removeprefix("model.")


def engine_name(config: EngineConfig, precision: str = "fp32") -> str:
    """The precision is part of the name, except for FP32."""
    return f"model.{config.label}{'' if precision == 'fp32' else '.' + precision}.engine"


def _convert(
    folder: Path,
    spec: ModelSpec,
    provenance: Provenance,
    config: PrecisionConfig,
    stages: list[Stage],
    warnings: list[str],
    say: Progress,
) -> Provenance:
    """The precision stage; its choices and its report go into the provenance."""
    from .precision.stage import convert_file

    start = time.perf_counter()
    report = convert_file(folder / MODEL, spec, config, lambda done, text: say("precision", done, text), folder)
    size = sum(path.stat().st_size for path in folder.glob(MODEL + "*"))
    stages.append(Stage(f"precision {report.precision}", time.perf_counter() - start, size, report.verdict))
    warnings.extend(report.warnings)
    return replace(provenance, options={**provenance.options, "precision": {**config.to_dict(), **report.to_dict()}})


def _export(
    ref: str,
    folder: Path,
    config: ExportConfig,
    engines: Sequence[EngineConfig],
    precision: PrecisionConfig,
    trust_remote_code: bool,
    names: tuple[Path | str | None, str | None, Path | str | None],
    stages: list[Stage],
    say: Progress,
) -> tuple[ModelSpec, Provenance]:
    """names: the file of class names, the family and the tokenizer that the caller gave."""
    from .export import export_onnx
    from .export.trace import options_of
    from .models.load import load_source

    start = time.perf_counter()
    say("load", None, ref)
    labels, family, tokenizer = names
    source = load_source(ref, trust_remote_code=trust_remote_code, labels=labels, family=family, tokenizer=tokenizer)
    check_prompt(source.spec, precision)  # before minutes of export
    for engine in engines:
        for name in ("height", "width"):
            sides = getattr(engine, name)
            if sides is not None and sides[0] != sides[2] and not source.family.dynamic:
                raise ExportError(
                    f"{source.family.title} takes one fixed {name}, because {source.family.fixed_reason}; "
                    f"got --{name} {','.join(map(str, sides))}; give one number, or leave it out"
                )
    loaded = time.perf_counter()
    parameters = f"{source.family.title}, {source.provenance.parameters / 1e6:.1f} M parameters"
    stages.append(Stage("load", loaded - start, 0, parameters))
    report = export_onnx(source, folder / MODEL, config, progress=lambda text: say("export", None, text))
    size = sum(path.stat().st_size for path in folder.iterdir())
    stages.append(Stage("export", report.seconds, size, f"{report.summary.nodes} nodes, opset {report.summary.opset}"))
    if report.errors:
        seconds = time.perf_counter() - loaded - report.seconds
        cases = len({(row["batch"], row["height"], row["width"]) for row in report.errors})
        verdict = f"equal to PyTorch: {report.worst:.1e} relative, {cases} untraced shapes"
        stages.append(Stage("check", seconds, 0, verdict))
    told: dict[str, Any] = {"family": family, "loading": list(source.notes)}
    told |= {key: str(path) for key, path in (("labels", labels), ("tokenizer", tokenizer)) if path is not None}
    options = {"export": options_of(config), **{key: value for key, value in told.items() if value}}
    return report.spec, replace(source.provenance, options=options)


def _refuse_export_choices(
    model: Path | str,
    export: ExportConfig,
    labels: Path | str | None,
    family: str | None,
    tokenizer: Path | str | None,
) -> None:
    """A finished graph cannot be exported otherwise; leaving a choice out silently would hide that.

    Height and width are not refused: they also choose the engine's profile.
    """
    if labels is not None:
        raise SpecError(
            f"--labels '{labels}' cannot be given with '{model}': the labels of an ONNX file are part of its spec; "
            "give them to detrt export"
        )
    if family is not None:
        raise SpecError(f"--family {family} says how a checkpoint is read, and '{model}' is exported already; leave it out")
    if tokenizer is not None:
        raise SpecError(f"--tokenizer '{tokenizer}' cannot be given with '{model}', which has its own beside it; leave it out")
    usual = ExportConfig()
    for field in fields(ExportConfig):
        given = getattr(export, field.name)
        if field.name not in ("height", "width") and given != getattr(usual, field.name):
            option = field.name.replace("_", "-")
            name = f"--no-{option}" if given is False else f"--{option} {given}"
            raise ExportError(
                f"{name} has no effect on '{model}', which is exported already; leave it out, or give it to "
                "detrt export or to detrt build with the checkpoint"
            )


def _adopt(path: Path, folder: Path, stages: list[Stage]) -> tuple[ModelSpec, Provenance]:
    """Copy an ONNX file and its external weights into the bundle."""
    from . import graph
    from .models.source import versions

    start = time.perf_counter()
    check_model_file(path)
    spec = graph.read_spec(path)
    for name in graph.data_files(path):
        shutil.copyfile(path.parent / name, folder / name)
    shutil.copyfile(path, folder / MODEL)
    for name in (spec.text.tower, spec.text.tokenizer) if spec.text is not None else ():
        if name and not (path.parent / name).is_file():
            raise SpecError(f"'{path}' needs '{name}' beside it, which is not there; export the checkpoint again")
        if name:
            shutil.copyfile(path.parent / name, folder / name)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    provenance = Provenance(path.name, files.sha256_of(path), versions=versions(), created=created)
    stages.append(Stage("copy", time.perf_counter() - start, path.stat().st_size, f"spec of {spec.family}"))
    return spec, provenance


def _model_entries(folder: Path, spec: ModelSpec) -> list[BundleFile]:
    kinds = {MODEL: "onnx", RANGES: "ranges", SEARCH_PLOT: "plot", SEARCH_STATE: "search"}
    if spec.text is not None:
        kinds |= {spec.text.tower: "text", spec.text.tokenizer: "tokenizer"}
    return [_entry(folder, path.name, kinds.get(path.name, "weights")) for path in sorted(folder.iterdir())]


def _entry(folder: Path, name: str, kind: str, facts: EngineFacts | None = None) -> BundleFile:
    path = folder / name
    return BundleFile(kind, name, files.sha256_of(path), path.stat().st_size, facts)


@contextlib.contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A temporary folder beside `output` that takes its place if the block succeeds."""
    if output.exists() and not output.is_dir():
        raise OutputError(f"cannot write the bundle '{output}': it is a file; give a folder with -o")
    # The place behind a link, so that the folder is replaced and not the link to it.
    place = Path(os.path.realpath(output))
    if Path.cwd().is_relative_to(place):
        raise OutputError(
            f"cannot write the bundle '{output}': a bundle replaces its folder, and this one holds the working folder; "
            "give a folder of its own with -o, such as -o bundle"
        )
    if place.is_dir() and any(place.iterdir()) and not (place / MANIFEST).is_file():
        raise OutputError(f"cannot write the bundle '{output}': the folder holds other files; give a new or empty folder with -o")
    temporary = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with files.making_parents(place):
            try:
                temporary.mkdir()
                yield temporary
                _replace(place, temporary)
            finally:
                files.remove(temporary)
    except OSError as error:
        raise files.output_error(output, error) from error
    except OutputError as error:
        # The caller knows the place that was given, not the temporary folder beside it.
        raise OutputError(str(error).replace(str(temporary), str(output))) from error


def _replace(place: Path, temporary: Path) -> None:
    if not place.exists():
        os.replace(temporary, place)
        return
    old = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        os.replace(place, old)
        os.replace(temporary, place)
    except BaseException:
        # Also for Ctrl-C between the two: the previous bundle goes back to its place.
        if old.exists() and not place.exists():
            os.replace(old, place)
        raise
    shutil.rmtree(old, ignore_errors=True)


def report_to_dict(report: BuildReport) -> dict[str, Any]:
    """JSON form of a build."""
    return {
        "bundle": str(report.bundle.folder),
        "stages": [
            {"stage": s.name, "seconds": round(s.seconds, 3), "bytes": s.size, "verdict": s.verdict} for s in report.stages
        ],
        "files": [{"path": f.path, "kind": f.kind, "bytes": f.size} for f in report.bundle.files],
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }


# `detrt build --target onnxruntime --provider cuda`: the finished graph run once with a provider of ONNX Runtime.
def try_provider(path: Path, spec: ModelSpec, provider: str) -> tuple[str, float, int, str]:
    """(back end, seconds, 0 bytes written, verdict): opened and, for a model of fixed classes, run on a drawn scene.

    Raises:
        SessionError: it cannot run there.
    """
    start = time.perf_counter()
    with OnnxSession(path, spec, provider=provider) as session:
        verdict = "opened"
        if spec.text is None:
            session.run(preprocess([draw_scene(0, size_hw=spec.input.size_hw).image], spec).feeds)
            verdict = "runs as a CUDA graph" if provider.startswith("cuda") else "runs"
        return session.info.name, time.perf_counter() - start, 0, session.info.note or verdict
