"""From a checkpoint or an ONNX file to a bundle: one folder that every runtime can open."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .backends import targets as rows
from .backends.building import MODEL, Builder, BuildPlan, ScoredImages, Stage, Trial, Work, entry_of
from .backends.shared import SharedOptions, builds, configs_of
from .backends.target import Target
from .backends.targets import GRAPH, graph_opener
from .bundle import (
    MANIFEST,
    PROVENANCE_KEY,
    Bundle,
    BundleFile,
    Provenance,
    finish_replacement,
    writing_bundle,
)
from .class_names import name_notes
from .data.arguments import check_kind, check_list, check_model, check_path
from .data.datasets import folder_of_images, is_dataset, load_dataset
from .data.preprocess import preprocessing_words
from .errors import EngineError, ExportError, ImageError, MissingPackageError, OutputError, PromptError, SpecError, number_of
from .evaluation.models import is_foreign
from .graph.operators import check_model_file
from .models.contract import ExportConfig
from .models.load_options import FLAGS, LoadChanges, LoadOptions, changed, check_changes, hub_name
from .precision import PrecisionConfig
from .precision.capability import check_before
from .precision.config import PLACEMENTS, RANGES, SEARCH_PLOT, SEARCH_STATE
from .spec import ModelSpec, Precision
from .system import StageProgress, return_freed_memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .backends.base import Session


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A finished bundle and the stages that led to it. notes: what was decided while the checkpoint was loaded."""

    bundle: Bundle
    stages: tuple[Stage, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def preprocessing(self) -> list[str]:
        """How images become the model's input, and what that was compared with."""
        compared = self.bundle.provenance.options.get("preprocessing", "")
        return [preprocessing_words(self.bundle.spec.input), *[compared] * bool(compared)]


def build(
    model: str | Path,
    output: Path | str | None = None,
    *,
    export: ExportConfig = ExportConfig(),  # noqa: B008 - frozen
    targets: Sequence[object] = (),
    precision: PrecisionConfig | str = PrecisionConfig(),  # noqa: B008 - frozen
    load: LoadOptions | None = None,
    progress: StageProgress | None = None,
    **changes: Unpack[LoadChanges],
) -> BuildReport:
    """Build a bundle in `output`, or add engines and packages to a bundle.

    A model that takes a prompt brings its text encoder and its tokenizer, and an engine of the encoder beside each engine; the
    encoder stays FP32. A bundle that is in `output` already is replaced when everything is done, and stays as it was if anything
    fails. Files in its folder that are not of the bundle stay; so do its engines and packages where the graph is the same.

    Args:
        model: a checkpoint reference (see `load_source`), an ONNX file, or a bundle.
        output: folder of the bundle; None, of a bundle: `model` itself, to which the engines and packages are added.
        export: how the checkpoint becomes an ONNX graph.
        targets: what is built of the graph, by name: "tensorrt-rtx", "tensorrt", "inductor", "openvino"; "auto":
            the fastest that this machine can build; "onnx": the graph also with ONNX Runtime's own attention, where that is faster. Or
            configs, for choices: `EngineConfig(...)`, `InductorConfig(...)`. Without any a bundle is its checked ONNX graph.
        precision: precision of the graph, by name, such as "fp16", or with choices; anything but FP32 and TF32 changes `model.onnx` itself, and adds `ranges.json` where
            images are given.
        load: how the checkpoint is read.
        progress: called with (stage, fraction from 0 to 1 or None where it is not known, text).
        changes: fields of `LoadOptions` by name, e.g. `labels="names.txt"`.

    Raises:
        SourceError, SpecError, ExportError, GraphError, EngineError, MissingPackageError, OutputError: as the stages.
        GateError: the exported graph does not equal PyTorch, or is not in the precision that was requested.
    """
    check_changes(build, changes)
    _check_types(model, output, targets)
    if isinstance(precision, str):
        precision = PrecisionConfig(precision)
    check_kind(export, "export", ExportConfig)
    check_kind(precision, "precision", PrecisionConfig)
    load, held = changed(load, changes), _bundle_at(Path(model))
    if output is None:
        if held is None:
            hub = hub_name(str(model))
            example = f"`build({hub}, output={Path(model).name})`" if hub else "`output=bundle`"
            raise OutputError(f"it is not said where the bundle goes; give a folder with `output`, such as {example}")
        output = model
    grows = held is not None and Path(output).is_dir() and os.path.samefile(model, output)
    if held is None and Path(model).is_file() and Path(output).is_dir() and os.path.samefile(Path(model).parent, output):
        _check_graph_stays(Path(output), precision)
    configs = _configs(targets, str(model))
    _check_written_outside(Path(output), [precision, *configs])
    plan, jobs, warnings = _planned(model, held, grows, configs, export, precision, load)
    with writing_bundle(output) as folder, contextlib.ExitStack() as closing:
        work = _GraphWork(folder, plan.precision, progress or (lambda stage, fraction, text: None), warnings)
        if held is not None and grows:
            work.extend(held)
        elif plan.from_graph:
            work.adopt(_graph_of(held) if held is not None else Path(model), load)
        else:
            work.export(str(model), export, load, jobs)
            return_freed_memory()  # of the checkpoint: engines and packages are built by processes beside this one
        if precision.target != Precision.FP32:
            if (
                (precision.target.quantized or precision.searches)
                and export.check
                and any(job.builder.compares(job.configs) for job in jobs)
            ):
                work.convert_plain(closing.enter_context(files.scratch()))
                work.average_precision = _average_precision(precision, work.warnings)
            makes = [job for job in jobs if job.makes] if precision.searches else []
            work.convert(makes[0].builder.trial(makes[0].configs, work.spec) if len(makes) == 1 else None)
        if not grows:
            work.add_files()
        for job in jobs:
            job.builder.prepare(job.configs, work)
        for job in jobs:
            job.builder.build(job.configs, plan, work)
        for job in jobs:
            job.builder.finish(job.configs, work)
        if (Path(output) / MANIFEST).is_file():
            work.keep(Path(output))
        work.save()
    return BuildReport(Bundle.open(output), tuple(work.stages), tuple(work.warnings), tuple(work.notes))


@dataclass(frozen=True, slots=True)
class _Job:
    """What is built for one backend. makes: whether that is more than the graph."""

    target: Target
    builder: Builder
    configs: Sequence[Any]

    @property
    def makes(self) -> bool:
        return self.target is not GRAPH


def _planned(
    model: str | Path,
    held: Bundle | None,
    grows: bool,
    configs: Sequence[Any],
    export: ExportConfig,
    precision: PrecisionConfig,
    load: LoadOptions,
) -> tuple[BuildPlan, list[_Job], list[str]]:
    """What is done, in order, and warnings: all that can be refused is refused here, before minutes of work.

    held: the bundle that is built from. grows: it is added to. configs: of all backends.
    """
    from_graph = held is not None or str(model).lower().endswith(".onnx")
    found = [(target, [one for one in configs if target.takes(one)]) for target in rows.TARGETS]
    jobs = [_Job(target, target.built_by(), own) for target, own in found if own]
    if unknown := [one for one in configs if not any(target.takes(one) for target in rows.TARGETS)]:
        raise EngineError(f"no backend builds from {unknown[0]!r}; give the config of one, such as EngineConfig()")
    if held is not None and grows:
        _check_graph_stays(held.folder, precision)
        _check_addition(held, adds=any(job.builder.adds(job.configs) for job in jobs))
    asked = precision
    if precision.target == Precision.INT8 and precision.qdq_placement is None:
        wanted = (job.target.placement for job in jobs if job.target.placement)
        precision = replace(precision, qdq_placement=next(wanted, PLACEMENTS[0]))
    source = str(model) if held is None else held.provenance.source
    plan = BuildPlan(source, export, precision, load, from_graph)
    jobs = [replace(job, configs=job.builder.resolved(job.configs, plan)) for job in jobs]
    for job in jobs:
        job.builder.check(job.configs, plan)
    _check_installed(jobs, checkpoint=not from_graph)
    makes = [job for job in jobs if job.makes]
    warnings = check_before(asked, alone=not makes, tf32=any(job.builder.has_tf32(job.configs) for job in jobs))
    if from_graph:
        if held is None:
            check_model_file(Path(model))
        foreign = held is None and is_foreign(model)
        chosen = replace(export, check=True) if any(job.builder.compares(job.configs) for job in jobs) else export
        again = any(build.from_checkpoint for job in makes for build in job.target.builds)
        refuse_export_choices(model, chosen, LoadOptions() if foreign else load, builds=bool(makes), checkpoint=again)
    return plan, jobs, warnings


def _check_installed(jobs: Sequence[_Job], *, checkpoint: bool) -> None:
    """Name all that is missing at once. Raises MissingPackageError."""
    missing = []
    if checkpoint and importlib.util.find_spec("torch") is None:
        missing.append(MissingPackageError("torch", "export", "a checkpoint"))
    for job in jobs:
        missing += job.builder.missing(job.configs)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        raise MissingPackageError(", ".join(m.package for m in missing), ",".join(m.extra for m in missing), "this build")


def _bundle_at(folder: Path) -> Bundle | None:
    """The bundle in a folder, after a replacement that was interrupted there; None where it is no bundle."""
    if not (folder / MANIFEST).is_file():
        return None
    finish_replacement(folder)
    return Bundle.open(folder)


def _check_written_outside(output: Path, configs: Iterable[Any]) -> None:
    """Refuse files that choices write into the folder of a bundle that is not there yet: the bundle becomes that folder at the end."""
    place = Path(os.path.realpath(output))
    if place.exists():  # files that are not of the bundle stay
        return
    for config in configs:
        for one in fields(config) if is_dataclass(config) else ():
            path = getattr(config, one.name)
            if "writes" in one.metadata and path is not None and Path(os.path.realpath(path)).is_relative_to(place):
                raise OutputError(
                    f"`{one.name}={path}` lies in the folder of the bundle, which is made when everything is done; give a path "
                    f"outside of '{output}'"
                )


def _check_graph_stays(folder: Path, precision: PrecisionConfig) -> None:
    """Raise ExportError for another precision of the graph of a bundle, which is built from and would be replaced."""
    if precision.target != Precision.FP32:
        raise ExportError(
            f"`precision={precision.precision}` changes the graph, and the engines of '{folder}' were built from the one "
            "it has; build another bundle with `output=FOLDER`"
        )


def _check_addition(bundle: Bundle, *, adds: bool) -> None:
    """Raise ExportError where nothing is added to a bundle."""
    if not adds:
        *others, graph = builds()
        raise ExportError(
            f"'{bundle.folder}' has its ONNX graph already, so `targets={graph}` adds nothing; choose "
            f"`targets={others[0]}`, {', '.join(others[1:-1])} or {others[-1]}, or another bundle with `output=FOLDER`"
        )


def _graph_of(bundle: Bundle) -> Path:
    """The ONNX file of a bundle. Raises SpecError where it has none, or not the one that was built."""
    found = bundle.of_kind("onnx")
    if not found:
        raise SpecError(f"the bundle '{bundle.folder}' has no ONNX file to build from; build it again from its checkpoint")
    return bundle.checked_path(found[0])


def _check_types(model: object, output: object, targets: object) -> None:
    check_model(model)
    check_path(output, "output")
    what = (
        "of names and configurations, such as ['tensorrt'] or [EngineConfig()]; without one, build makes the checked ONNX graph"
    )
    check_list(targets, "targets", what)


def _configs(targets: Iterable[object], model: str) -> list[object]:
    """The configs of the backends; a name stands for the usual ones."""
    given = list(targets)
    names = tuple(one for one in given if isinstance(one, str))
    asked = SharedOptions(names).resolved(checkpoint=not model.lower().endswith(".onnx")) if names else None
    return [*(configs_of(asked) if asked else ()), *(one for one in given if not isinstance(one, str))]


class _GraphWork(Work):
    """The stages that make the graph."""

    def extend(self, bundle: Bundle) -> None:
        """Take over what a bundle has; its graph stays where it is."""
        for entry in bundle.files:
            if entry.engine is None:
                bundle.checked_path(entry)
        self.graphs = bundle.folder
        self.spec, self.provenance, self.entries = bundle.spec, bundle.provenance, list(bundle.files)
        _graph_of(bundle)

    def adopt(self, path: Path, load: LoadOptions) -> None:
        """Copy an ONNX file and what belongs to it, or bring one of another exporter into detrt's contract."""
        start = time.perf_counter()
        check_model_file(path)
        if is_foreign(path):
            self._convert_foreign(path, load)
        else:
            self.spec, self.provenance = _adopt(path, self.folder)
            self.done("copy", start, path.stat().st_size, f"spec of {self.spec.family}")
        check_prompt(self.spec, self.precision)

    def _convert_foreign(self, path: Path, load: LoadOptions) -> None:
        from .export.foreign import export_foreign
        from .models.foreign import read_foreign

        self.say("adopt", None, str(path))
        foreign = read_foreign(path, load, graph_opener().run_graph)
        report, notes = export_foreign(foreign, self.folder / MODEL, say=lambda text: self.say("adopt", None, text))
        size = sum(file.stat().st_size for file in self.folder.iterdir())
        batches = " and ".join(str(batch) for batch in sorted({row["batch"] for row in report.errors}))
        verdict = f"layout {foreign.graph.layout.name}, equal to the original: {report.worst:.1e} relative, batch {batches}"
        self.stages.append(Stage("adopt", report.seconds, size, verdict))
        self.notes.extend((*foreign.notes, *notes, *name_notes(foreign.spec.labels)))
        origin = foreign.provenance()
        self.spec, self.provenance = foreign.spec, replace(origin, options={**origin.options, "loading": list(self.notes)})

    def keep(self, folder: Path) -> None:
        """Keep the files of the bundle that `folder` holds which belong to the same graph and were not built again."""
        try:
            old = Bundle.open(folder)
        except SpecError:  # damaged: nothing says what its files are
            return
        new = {entry.path: entry for entry in self.entries}
        same = _graph_digests(old.files) == _graph_digests(self.entries)
        for entry in old.files:
            if entry.path not in new and same and old.path_of(entry).is_file():
                self.entries.append(entry)
            elif entry.path not in new and entry.engine is not None:
                self.notes.append(f"{entry.path} was removed: it was built from the earlier graph")

    def export(self, ref: str, config: ExportConfig, load: LoadOptions, jobs: Sequence[_Job]) -> None:
        """Load the checkpoint, export it, and compare the graph with it."""
        from .export import export_onnx
        from .export.trace import options_of
        from .models.load import load_source

        start = time.perf_counter()
        self.say("load", None, ref)
        source = load_source(ref, load)
        check_prompt(source.spec, self.precision)  # before minutes of export
        for job in jobs:
            job.builder.check_family(job.configs, source.family)
        loaded = time.perf_counter()
        self.done("load", start, 0, f"{source.family.title}, {source.provenance.parameters / 1e6:.1f} M parameters")
        report = export_onnx(source, self.folder / MODEL, config, progress=lambda text: self.say("export", None, text))
        size = sum(path.stat().st_size for path in self.folder.iterdir())
        verdict = f"{number_of(report.summary.nodes, 'node')}, opset {report.summary.opset}"
        self.stages.append(Stage("export", report.seconds, size, verdict))
        if report.errors:
            cases = len({(row["batch"], row["height"], row["width"]) for row in report.errors})
            verdict = f"equal to PyTorch: {report.worst:.1e} relative, {number_of(cases, 'untraced shape')}"
            self.done("check", loaded + report.seconds, 0, verdict)
        options = {**source.provenance.options, "export": options_of(config), "preprocessing": report.processing.verdict}
        self.spec, self.provenance = report.spec, replace(source.provenance, options=options)
        self.notes.extend((*source.notes, *name_notes(source.spec.labels)))

    def convert(self, trial: Trial | None = None) -> None:
        """The precision stage; its options and its report go into the provenance. trial: times what a search tries."""
        from .precision.stage import convert_file, facts_of

        start = time.perf_counter()
        say = self.say
        path, precision = self.folder / MODEL, self.precision
        report = convert_file(path, self.spec, precision, lambda done, text: say("precision", done, text), self.folder, trial)
        size = sum(path.stat().st_size for path in self.folder.glob(MODEL + "*"))
        self.done(f"precision {report.precision}", start, size, report.verdict)
        self.warnings.extend(report.warnings)
        facts = facts_of(self.precision, report)
        self.record("precision", facts)

    def convert_plain(self, folder: Path) -> None:
        """Write the graph that one in lower precision is compared with into a folder, before `convert`."""
        from .precision.stage import convert_file

        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        config = self.precision.plain()
        stage = f"precision {config.precision}"
        convert_file(folder / MODEL, self.spec, config, lambda done, text: self.say(stage, done, text))
        self.plain = folder / MODEL

    def add_files(self) -> None:
        """Enter what the graph consists of."""
        self.entries += _model_entries(self.folder, self.spec)

    def save(self) -> None:
        """Write the manifest of the bundle."""
        seconds = {stage.name: round(stage.seconds, 3) for stage in self.stages}
        self.record("seconds", {**self.provenance.options.get("seconds", {}), **seconds})
        Bundle(self.folder, self.spec, self.provenance, tuple(self.entries)).save()


def _average_precision(precision: PrecisionConfig, warnings: list[str]) -> Callable[[Session], ScoredImages | None] | None:
    """What measures AP on the calibration images; None where they have no annotations, or pycocotools is not there.

    It gives None, and a warning, for annotations of another model's classes, or that do not belong to the images: calibration takes those.
    """
    calibration = precision.calibration
    if calibration is None or not (calibration.is_file() or is_dataset(calibration)):
        return None
    if importlib.util.find_spec("pycocotools") is None:
        return None
    try:
        folder = folder_of_images(load_dataset(calibration))
    except ImageError:  # images alone, which calibration takes
        return None
    from .evaluation.coco import evaluate_coco

    def average_precision(session: Session) -> ScoredImages | None:
        try:
            found = evaluate_coco(session, calibration, folder, limit=precision.ap_images)
            return found.metrics["AP"], found.images
        except (ImageError, PromptError, SpecError) as error:
            text = f"the AP of engines was not compared on the calibration images: {error}"
            if text not in warnings:
                warnings.append(text)
            return None

    return average_precision


def check_prompt(spec: ModelSpec, precision: PrecisionConfig) -> None:
    """Raise ExportError where calibration needs a prompt that is not given, or is given one that it cannot use."""
    if spec.text is None:
        if precision.prompt is not None:
            raise ExportError(
                f"`prompt={precision.prompt!r}` is for models that take one; this one has fixed classes; leave it out"
            )
        return
    if precision.calibration is not None and precision.prompt is None:
        raise ExportError(
            f"`calibration='{precision.calibration}'` runs the model, which needs to know what to look for; give "
            "`prompt='a cat. a dog.'` with it, naming things that are in the images"
        )


def refuse_export_choices(model: Path | str, export: ExportConfig, load: LoadOptions, *, builds: bool, checkpoint: bool) -> None:
    """A finished graph cannot be exported otherwise; leaving a choice out silently would hide that.

    builds: engines or packages are built, whose profile height and width choose. checkpoint: it is read again, for packages.
    """
    if load.labels is not None:
        raise SpecError(
            f"`labels='{load.labels}'` cannot be given with '{model}': the labels of an ONNX file are part of its spec; "
            "give them to detrt export"
        )
    if load.family is not None:
        raise SpecError(f"`family={load.family}` says how a checkpoint is read, and '{model}' is exported already; leave it out")
    if load.tokenizer is not None:
        raise SpecError(
            f"`tokenizer='{load.tokenizer}'` cannot be given with '{model}', which has its own beside it; leave it out"
        )
    for option in load.typed():
        raise SpecError(
            f"{option} cannot be given with '{model}': how it is read is part of its spec; leave it out, or give it to detrt export"
        )
    for name in FLAGS:
        if getattr(load, name) and not checkpoint:
            raise SpecError(f"`{name}` has no effect on '{model}', which is exported already; leave it out")
    if export.height is not None and not builds:
        raise ExportError(
            f"`size={export.height}x{export.width}` has no effect on '{model}', which is exported already, without an engine; "
            "leave it out, or choose an engine with `targets`"
        )
    usual = ExportConfig()
    for field in fields(ExportConfig):
        given = getattr(export, field.name)
        if field.name not in ("height", "width") and given != getattr(usual, field.name):
            raise ExportError(
                f"`{field.name}={given}` has no effect on '{model}', which is exported already; leave it out, or give it to "
                "detrt export or to detrt build with the checkpoint"
            )


def _adopt(path: Path, folder: Path) -> tuple[ModelSpec, Provenance]:
    """Copy an ONNX file and its external weights into the bundle."""
    from . import graph

    check_model_file(path)
    spec = graph.read_spec(path)
    for name in graph.data_files(path):
        shutil.copyfile(path.parent / name, folder / name)
    shutil.copyfile(path, folder / MODEL)
    for name in spec.text.parts.values() if spec.text is not None else ():
        if not (path.parent / name).is_file():
            raise SpecError(f"'{path}' needs '{name}' beside it, which is not there; export the checkpoint again")
        shutil.copyfile(path.parent / name, folder / name)
    return spec, _origin(path)


def _origin(path: Path) -> Provenance:
    """Where an ONNX file comes from: what its bundle or the file itself says, else the file."""
    from . import graph
    from .models.source import now, versions

    sha256 = files.sha256_of(path)
    with contextlib.suppress(SpecError):  # no bundle, or one of another version, from whose graph it is built again
        bundle = Bundle.open(path.parent)
        if any(entry.path == path.name and entry.sha256 == sha256 for entry in bundle.of_kind("onnx")):
            return bundle.provenance
    model = graph.load(path, weights=False)
    recorded = graph.read_metadata(model, PROVENANCE_KEY)
    if recorded:  # without a time, so that equal exports are equal files
        return replace(Provenance.from_json(recorded), created=now())
    elements = graph.summarise(model).weight_elements
    return Provenance(str(path.absolute()), sha256, elements, versions=versions(), created=now())


def _graph_digests(entries: Iterable[BundleFile]) -> dict[str, str]:
    """Path and digest of what the engines of a bundle are built from."""
    return {entry.path: entry.sha256 for entry in entries if entry.kind in ("onnx", "weights", "text")}


def _model_entries(folder: Path, spec: ModelSpec) -> list[BundleFile]:
    kinds = {MODEL: "onnx", RANGES: "ranges", SEARCH_PLOT: "plot", SEARCH_STATE: "search"}
    if spec.text is not None:
        kinds |= {name: kind for kind, name in spec.text.parts.items()}
    return [entry_of(folder, path.name, kinds.get(path.name, "weights")) for path in sorted(folder.iterdir())]


def report_to_dict(report: BuildReport) -> dict[str, Any]:
    """JSON form of a build."""
    return {
        "bundle": str(report.bundle.folder),
        "stages": [
            {"stage": s.name, "seconds": round(s.seconds, 3), "bytes": s.size, "verdict": s.verdict} for s in report.stages
        ],
        "files": [{"path": f.path, "kind": f.kind, "bytes": f.size} for f in report.bundle.files],
        "preprocessing": report.preprocessing,
        "warnings": list(report.warnings),
        "notes": list(report.notes),
    }
