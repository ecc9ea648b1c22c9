"""From a checkpoint or an ONNX file to a bundle: one folder that every runtime can open."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .backends.inductor.build import PackageSource, build_packages, check_packages
from .backends.inductor.config import InductorConfig
from .backends.onnxruntime.session import OnnxSession, run_graph
from .backends.openvino.build import build_openvino
from .backends.openvino.build import check_installed as check_openvino
from .backends.openvino.config import OpenVinoConfig, model_name
from .backends.tensorrt import EngineConfig, build_engine
from .backends.tensorrt.build import check_model_file, runs_here
from .bundle import (
    MANIFEST,
    PROVENANCE_KEY,
    Bundle,
    BundleFile,
    EngineFacts,
    Provenance,
    finish_replacement,
    text_encoder_beside,
    writing_bundle,
)
from .class_names import name_notes
from .data.arguments import check_configs, check_model, check_path
from .data.preprocess import preprocess, preprocessing_words
from .data.scenes.scene import draw_images
from .errors import EngineError, ExportError, GateError, MissingPackageError, OutputError, SessionError, SpecError
from .models.contract import ExportConfig
from .models.families import Family
from .models.load import FLAGS, RECORDED, LoadChanges, LoadOptions, changed, check_changes, check_unchanged, takes_load_options
from .precision import PrecisionConfig
from .precision.capability import check_before, check_engine
from .spec import PIXEL_VALUES, ModelSpec, Precision
from .system import StageProgress, return_freed_memory

if TYPE_CHECKING:
    from typing_extensions import Unpack

MODEL, FUSED = "model.onnx", "model.onnxruntime.onnx"
# Fraction of the multiply-adds in INT8 kernels below which an engine hardly is an INT8 engine.
LEAST_INT8_KERNELS = 0.5
RANGES, SEARCH_PLOT, SEARCH_STATE = "ranges.json", "search.svg", "search.json"  # of the precision stage


@dataclass(frozen=True, slots=True)
class Stage:
    """One finished stage: name, seconds, bytes written, and a verdict as text."""

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

    @property
    def preprocessing(self) -> list[str]:
        """How images become the model's input, and what that was compared with."""
        compared = self.bundle.provenance.options.get("preprocessing", "")
        return [preprocessing_words(self.bundle.spec.input), *[compared] * bool(compared)]


@takes_load_options
def build(
    model: str | Path,
    output: Path | str | None = None,
    *,
    export: ExportConfig = ExportConfig(),  # noqa: B008 - frozen
    engines: Sequence[EngineConfig] = (),
    packages: Sequence[InductorConfig] = (),
    openvino: Sequence[OpenVinoConfig] = (),
    fuse_attention: bool = False,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
    try_devices: Sequence[str] = (),
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
        engines: one engine file for each. Without engines, packages and OpenVINO models a bundle is its checked ONNX graph.
        packages: one package compiled by PyTorch for each.
        fuse_attention: also write an FP32 graph, or INT8 beside FP32, with ONNX Runtime's own attention, which runs faster on a CPU; `model.onnx` stays
            as it is.
        openvino: at most one: the OpenVINO model of the graph, and of its text encoder.
        precision: precision of the graph; anything but FP32 and TF32 changes `model.onnx` itself, and adds `ranges.json` where
            images are given.
        try_devices: devices ("cuda", "cpu") on which ONNX Runtime runs the finished graph once.
        load: how the checkpoint is read.
        progress: called with (stage, fraction from 0 to 1 or None where it is not known, text).
        changes: fields of `LoadOptions` by name, e.g. `labels="names.txt"`.

    Raises:
        SourceError, SpecError, ExportError, GraphError, EngineError, MissingPackageError, OutputError: as the stages.
        GateError: the exported graph does not equal PyTorch, or is not in the precision that was requested.
    """
    check_changes(build, changes)
    _check_types(model, output, engines, packages, openvino)
    load, held = changed(load, changes), _bundle_at(Path(model))
    engines = [replace(config, tf32=True) if precision.precision == "tf32" else config for config in engines]
    if output is None:
        if held is None:
            raise OutputError("it is not said where the bundle goes; give a folder with -o, such as -o bundle")
        output = model
    grows = held is not None and Path(output).is_dir() and os.path.samefile(model, output)
    if held is not None and grows:
        _check_addition(held, precision, adds=bool(engines or packages or openvino or try_devices))
    is_onnx = held is not None or str(model).lower().endswith(".onnx")
    _check_engines(engines, export, precision)
    if precision.target == Precision.INT8 and precision.qdq_placement is None:
        precision = replace(precision, qdq_placement="cpu" if openvino and not engines else "tensorrt")
    if engines:
        _check_placement(precision.qdq_placement)
    if not is_onnx:
        _check_accept_slower(engines, precision.target)
    _check_installed(engines, checkpoint=not is_onnx)
    source = str(model) if held is None else held.provenance.source
    if packages:
        check_packages(packages, source, export, precision.precision)
    _check_openvino(openvino, export)
    warnings = check_before(precision, engines, alone=not (engines or packages or openvino))
    if is_onnx:
        foreign = held is None and is_foreign(Path(model))
        reading = LoadOptions() if foreign else load
        # An engine is compared with its graph, so that --no-check says something about it.
        compared = any(config.target == "tensorrt" for config in engines)
        chosen = replace(export, check=True) if compared else export
        refuse_export_choices(model, chosen, reading, builds=bool(engines or packages or openvino), checkpoint=bool(packages))
    with writing_bundle(output) as folder:
        work = _Builder(folder, precision, progress or (lambda stage, fraction, text: None), warnings)
        if held is not None and grows:
            work.extend(held)
        elif is_onnx:
            work.adopt(_graph_of(held) if held is not None else Path(model), load)
        else:
            work.export(str(model), export, engines, load)
            return_freed_memory()  # of the checkpoint: engines and packages are built by processes beside this one
        if precision.target != Precision.FP32:
            work.convert()
        if not grows:
            work.add_files()
        for config in engines:
            work.build_engine(config, compare=export.check)
        if packages:
            work.build_packages(source, packages, load)
        if fuse_attention:
            work.fuse_attention()
        for choices in openvino:
            work.build_openvino(choices)
        for device in try_devices:
            work.try_device(device)
        if (Path(output) / MANIFEST).is_file():
            work.keep(Path(output))
        work.save()
    return BuildReport(Bundle.open(output), tuple(work.stages), tuple(work.warnings), tuple(work.notes))


def _bundle_at(folder: Path) -> Bundle | None:
    """The bundle in a folder, after a replacement that was interrupted there; None where it is no bundle."""
    if not (folder / MANIFEST).is_file():
        return None
    finish_replacement(folder)
    return Bundle.open(folder)


def _check_addition(bundle: Bundle, precision: PrecisionConfig, *, adds: bool) -> None:
    """Refuse what cannot be added to a bundle.

    Raises:
        ExportError: another precision of its graph, or nothing to add.
    """
    if precision.target != Precision.FP32:
        raise ExportError(
            f"--precision {precision.precision} changes the graph, and the engines of '{bundle.folder}' were built from the one "
            "it has; build another bundle with -o FOLDER"
        )
    if not adds:
        raise ExportError(
            f"'{bundle.folder}' has its ONNX graph already, so --target onnx adds nothing; choose --target tensorrt-rtx, "
            "tensorrt, inductor or openvino, or another bundle with -o FOLDER"
        )


def _graph_of(bundle: Bundle) -> Path:
    """The ONNX file of a bundle. Raises SpecError where it has none, or not the one that was built."""
    found = bundle.of_kind("onnx")
    if not found:
        raise SpecError(f"the bundle '{bundle.folder}' has no ONNX file to build from; build it again from its checkpoint")
    return bundle.checked_path(found[0])


def _check_placement(qdq_placement: str | None) -> None:
    """Raises ExportError where INT8 is placed for OpenVINO and ONNX Runtime, and an engine is wanted of it."""
    if qdq_placement == "cpu":
        raise ExportError(
            "INT8 with --qdq-placement cpu, the default where OpenVINO is the only target, quantizes projections of attentions, which "
            "TensorRT computes wrongly or slowly; build the graph for it with --qdq-placement tensorrt"
        )


def _check_accept_slower(engines: Sequence[EngineConfig], precision: Precision | None) -> None:
    """Raises EngineError where --accept-slower has no effect, because the graph is not INT8."""
    if precision != Precision.INT8 and any(config.accept_slower for config in engines):
        raise EngineError(
            f"--accept-slower has no effect: it concerns INT8 engines, and this graph is {precision or 'of unknown precision'}; leave it "
            "out, or build with --precision int8"
        )


def _check_types(model: object, output: object, engines: object, packages: object, openvino: object) -> None:
    check_model(model)
    check_path(output, "output")
    check_configs(engines, "engines", EngineConfig)
    check_configs(packages, "packages", InductorConfig)
    check_configs(openvino, "openvino", OpenVinoConfig)


def _check_engines(engines: Sequence[EngineConfig], export: ExportConfig, precision: PrecisionConfig) -> None:
    """Refuse engines that cannot be built, before minutes of export."""
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


def _check_installed(engines: Sequence[EngineConfig], *, checkpoint: bool) -> None:
    """Name all that is missing at once. Raises MissingPackageError."""
    from .backends.tensorrt.bindings import check_installed

    missing = []
    if checkpoint and importlib.util.find_spec("torch") is None:
        missing.append(MissingPackageError("torch", "export", "a checkpoint"))
    for target in dict.fromkeys(config.target for config in engines):
        try:
            check_installed(target)
        except MissingPackageError as error:
            missing.append(error)
    if len(missing) == 1:
        raise missing[0]
    if missing:
        raise MissingPackageError(", ".join(m.package for m in missing), ",".join(m.extra for m in missing), "this build")


def _check_openvino(models: Sequence[OpenVinoConfig], export: ExportConfig) -> None:
    """Refuse an OpenVINO model that cannot be built, before minutes of export."""
    if len(models) > 1:
        raise EngineError("a bundle has one OpenVINO model, which takes every size; give one config")
    if models and export.plugin:
        raise ExportError(f"--msda {export.msda} makes plugin nodes, which only TensorRT runs; choose --msda gather for OpenVINO")
    if models:
        check_openvino()


class _Builder:
    """The stages of one build, in a folder that is not the bundle yet.

    Attributes:
        stages: the finished stages.
        warnings: of all stages. notes: what was decided on the way.
        entries: the files of the bundle.
        spec, provenance: of the graph, set by `extend`, `adopt` or `export`.
    """

    spec: ModelSpec
    provenance: Provenance

    def __init__(self, folder: Path, precision: PrecisionConfig, say: StageProgress, warnings: Iterable[str]) -> None:
        self._folder = self._graphs = folder
        self._precision = precision
        self._say = say
        self.stages: list[Stage] = []
        self.warnings = list(warnings)
        self.notes: list[str] = []
        self.entries: list[BundleFile] = []

    @property
    def _graph_precision(self) -> Precision | None:
        """Precision of the graph; None where nothing says it."""
        if self._precision.target != Precision.FP32:
            return self._precision.target
        if recorded := self._recorded_precision:
            return Precision(recorded["precision"])
        return Precision.FP32 if "export" in self.provenance.options else None

    @property
    def _recorded_precision(self) -> Mapping[str, Any]:
        """Choices and outcome of the precision stage that wrote the graph; empty where nothing says them."""
        recorded = self.provenance.options.get("precision")
        return recorded if isinstance(recorded, Mapping) else {}

    def extend(self, bundle: Bundle) -> None:
        """Take over what a bundle has; its graph stays where it is."""
        for entry in bundle.files:
            if entry.engine is None:
                bundle.checked_path(entry)
        self._graphs = bundle.folder
        self.spec, self.provenance, self.entries = bundle.spec, bundle.provenance, list(bundle.files)
        _graph_of(bundle)

    def adopt(self, path: Path, load: LoadOptions) -> None:
        """Copy an ONNX file and what belongs to it, or bring one of another exporter into detrt's contract."""
        start = time.perf_counter()
        if is_foreign(path):
            self._convert_foreign(path, load)
        else:
            self.spec, self.provenance = _adopt(path, self._folder)
            self._done("copy", start, path.stat().st_size, f"spec of {self.spec.family}")
        check_prompt(self.spec, self._precision)

    def _convert_foreign(self, path: Path, load: LoadOptions) -> None:
        from .export.foreign import export_foreign
        from .models.foreign import read_foreign

        self._say("adopt", None, str(path))
        foreign = read_foreign(path, load, run_graph)
        report, notes = export_foreign(foreign, self._folder / MODEL, say=lambda text: self._say("adopt", None, text))
        size = sum(file.stat().st_size for file in self._folder.iterdir())
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

    def export(self, ref: str, config: ExportConfig, engines: Sequence[EngineConfig], load: LoadOptions) -> None:
        """Load the checkpoint, export it, and compare the graph with it."""
        from .export import export_onnx
        from .export.trace import options_of
        from .models.load import load_source

        start = time.perf_counter()
        self._say("load", None, ref)
        source = load_source(ref, load)
        check_prompt(source.spec, self._precision)  # before minutes of export
        _check_sizes(source.family, engines)
        loaded = time.perf_counter()
        self._done("load", start, 0, f"{source.family.title}, {source.provenance.parameters / 1e6:.1f} M parameters")
        report = export_onnx(source, self._folder / MODEL, config, progress=lambda text: self._say("export", None, text))
        size = sum(path.stat().st_size for path in self._folder.iterdir())
        verdict = f"{report.summary.nodes} nodes, opset {report.summary.opset}"
        self.stages.append(Stage("export", report.seconds, size, verdict))
        if report.errors:
            cases = len({(row["batch"], row["height"], row["width"]) for row in report.errors})
            verdict = f"equal to PyTorch: {report.worst:.1e} relative, {cases} untraced shapes"
            self._done("check", loaded + report.seconds, 0, verdict)
        options = {**source.provenance.options, "export": options_of(config), "preprocessing": report.processing.verdict}
        self.spec, self.provenance = report.spec, replace(source.provenance, options=options)
        self.notes.extend((*source.notes, *name_notes(source.spec.labels)))

    def convert(self) -> None:
        """The precision stage; its options and its report go into the provenance."""
        from .precision.stage import convert_file, facts_of

        start = time.perf_counter()
        say = self._say
        report = convert_file(
            self._folder / MODEL, self.spec, self._precision, lambda done, text: say("precision", done, text), self._folder
        )
        size = sum(path.stat().st_size for path in self._folder.glob(MODEL + "*"))
        self._done(f"precision {report.precision}", start, size, report.verdict)
        self.warnings.extend(report.warnings)
        facts = facts_of(self._precision, report)
        self._record("precision", facts)

    def add_files(self) -> None:
        """Enter what the graph consists of."""
        self.entries += _model_entries(self._folder, self.spec)

    def build_engine(self, config: EngineConfig, *, compare: bool) -> None:
        """The engine of the detector, and the one of its text encoder. compare: run it beside its graph, where this machine can.

        Raises:
            ExportError: the graph's INT8 is placed for another runtime.
            EngineError: a choice that has no effect on this graph.
            GateError: the engine has another precision than its graph, detects something else, or is INT8 and not faster than FP16.
        """
        _check_placement(self._recorded_precision.get("qdq_placement"))
        precision = self._graph_precision
        _check_accept_slower([config], precision)
        name = engine_name(config, precision or Precision.FP32)
        facts = self._engine(MODEL, name, config, "engine")
        if precision is not None:
            check_engine(facts, precision)
        if precision == Precision.INT8 and facts.multiply_adds:
            self._count_int8_kernels(name, facts)
        if self.spec.text is not None and self.spec.text.encoder:
            self._build_text_engine(self.spec.text.encoder, text_encoder_beside(Path(name)).name, config)
        # An engine of TensorRT-RTX for other GPUs is compared when it is first opened.
        if compare and runs_here(config):
            self._compare_engine(name, config, precision or Precision.FP32)
            if precision == Precision.INT8 and not config.accept_slower:
                self._compare_speed(name, config)

    def _build_text_engine(self, encoder: str, name: str, config: EngineConfig) -> None:
        """The engine of the text encoder. Without one ONNX Runtime runs it, once for a prompt, and the detector is as fast."""
        try:
            self._engine(encoder, name, config, "text-engine")
        except EngineError as error:
            self.warnings.append(f"the text encoder stays with ONNX Runtime, because no engine of it could be built: {error}")

    def _compare_engine(self, name: str, config: EngineConfig, precision: Precision) -> None:
        from .backends.tensorrt.compare import compare_engine

        start = time.perf_counter()
        found = compare_engine(
            self._graphs / MODEL,
            self._folder / name,
            Precision.TF32 if config.tf32 and precision == Precision.FP32 else precision,
            text_engine=text_engine if (text_engine := text_encoder_beside(self._folder / name)).is_file() else None,
            progress=lambda fraction, text: self._say(f"check {name}", fraction, text),
        )
        self._done(f"check {config.label}", start, 0, found.verdict)
        row = {**found.to_dict(), "engine_sha256": files.sha256_of(self._folder / name)}
        self._record("engine_checks", {**self.provenance.options.get("engine_checks", {}), name: row})
        if found.passed:
            return
        if self.provenance.has_random_weights and found.ran and not found.on_same_queries:
            self.warnings.append(
                f"the engine '{name}' and its ONNX graph differ: {found.verdict}. Not judged: random weights give nearly equal scores, which "
                "change places with any rounding"
                + ("" if config.return_selections else "; with --return-selections both compute with the same queries")
            )
            return
        raise GateError(
            f"the engine '{name}' does not detect what its ONNX graph detects: {found.verdict}; this TensorRT compiles the graph "
            + ("wrongly" if precision in (Precision.FP32, Precision.TF32) else "wrongly, or rounds more than the model bears")
            + ". Try --msda gather, --keep-gathers, another --precision or another TensorRT version; --no-check builds without the "
            "comparison, and 'detrt verify' with --ground-truth judges by AP"
        )

    def _count_int8_kernels(self, name: str, facts: EngineFacts) -> None:
        """How much of the graph runs in INT8 kernels, which TensorRT decides: it may undo quantization layer by layer."""
        from . import graph
        from .graph.msda_plugin import runnable
        from .precision.apply import blank_feeds
        from .precision.proof import count_macs

        batch, _, height, width = facts.profile[PIXEL_VALUES]["opt"]
        spec = replace(self.spec, input=replace(self.spec.input, height=height, width=width))
        total = batch * sum(count_macs(runnable(graph.load(self._graphs / MODEL)), blank_feeds(spec)).values())
        fraction = facts.multiply_adds.get(Precision.INT8.tensorrt, 0) / total
        self._record("int8_kernels", {**self.provenance.options.get("int8_kernels", {}), name: round(fraction, 4)})
        text = f"{fraction:.0%} of the multiply-adds of '{name}' run in INT8 kernels, by TensorRT's engine inspector"
        if fraction < LEAST_INT8_KERNELS:
            self.warnings.append(f"{text}; the rest gains nothing from INT8: compare with --precision fp16")
        else:
            self.notes.append(text)

    def _compare_speed(self, name: str, config: EngineConfig) -> None:
        """Time an INT8 engine beside one of the same graph without its quantization."""
        from . import graph
        from .backends.tensorrt.speed import median_times
        from .graph.dequantize import remove_quantization

        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / MODEL
            model = graph.load(self._graphs / MODEL)
            remove_quantization(model)
            graph.save(model, path)
            other = build_engine(
                path,
                path.with_suffix(".engine"),
                config,
                self.spec,
                progress=lambda fraction, text: self._say("FP16 engine to compare with", fraction, text),
            )
            int8_ms, fp16_ms = median_times([self._folder / name, other.path])
        batch = other.facts.profile[PIXEL_VALUES]["opt"][0]
        verdict = f"INT8 {int8_ms:.3g} ms, FP16 {fp16_ms:.3g} ms at batch {batch}: {fp16_ms / int8_ms:.2f} times as fast"
        self._done(f"speed {config.label}", start, 0, verdict)
        speeds = {
            **self.provenance.options.get("engine_speeds", {}),
            name: {"batch": batch, "int8_ms": int8_ms, "fp16_ms": fp16_ms},
        }
        self._record("engine_speeds", speeds)
        if int8_ms >= fp16_ms:
            raise GateError(
                f"the INT8 engine '{name}' is not faster than FP16 on this GPU: {verdict}; build with --precision fp16, or keep INT8 with "
                "--accept-slower"
            )

    def _engine(self, graph: str, name: str, config: EngineConfig, kind: str) -> EngineFacts:
        start = time.perf_counter()
        built = build_engine(
            self._graphs / graph,
            self._folder / name,
            config,
            self.spec,
            progress=lambda fraction, text: self._say(f"engine {name}", fraction, text),
        )
        self.warnings.extend(built.warnings)
        self.notes.extend(built.notes)
        self._add(_entry(self._folder, name, kind, built.facts))
        title = kind.replace("-", " ")
        self._done(f"{title} {config.label}", start, built.size, engine_verdict(built.facts))
        return built.facts

    def build_packages(self, checkpoint: str, packages: Sequence[InductorConfig], load: LoadOptions) -> None:
        """The checkpoint compiled by PyTorch."""
        loading = {**load.to_dict(), **{key: value for key, value in self.provenance.options.items() if key in RECORDED}}
        if self._graphs != self._folder:
            check_unchanged(checkpoint, self.provenance.checkpoint_sha256)
        precision = str(self._graph_precision or Precision.FP32)
        if self._precision.precision == Precision.TF32:
            precision = str(Precision.TF32)
        sha256 = files.sha256_of(self._graphs / MODEL)
        source = PackageSource(checkpoint, loading, self._folder, self.spec, precision, sha256)
        for one in build_packages(source, packages, self._say):
            self.stages.append(Stage(one.name, one.seconds, one.built.size, one.verdict))
            self._add(_entry(self._folder, one.built.path.name, "inductor", one.built.facts))

    def _add(self, entry: BundleFile) -> None:
        """Enter a file; one of the same name gives way."""
        self.entries = [*(other for other in self.entries if other.path != entry.path), entry]

    def build_openvino(self, config: OpenVinoConfig) -> None:
        """The OpenVINO model of the detector, and the one of its text encoder."""
        text = self.spec.text
        parts = [(MODEL, "model", self._graph_precision or Precision.FP32, "openvino")]
        if text is not None and text.encoder:
            parts.append((text.encoder, "text", Precision.FP32, "text-openvino"))  # the encoder stays FP32
        for graph, part, precision, kind in parts:
            start, title = time.perf_counter(), kind.replace("-", " ")
            built = build_openvino(
                self._graphs / graph,
                self._folder / model_name(precision, part),
                config,
                self.spec,
                judged=not self.provenance.has_random_weights,
                timed=part == "model",
                fused=next((self._graphs / entry.path for entry in self.entries if entry.kind == "onnx-fused"), None),
                progress=lambda fraction, message, title=title: self._say(title, fraction, message),  # type: ignore[misc]
            )
            self._add(_entry(self._folder, built.path.name, kind, built.facts))
            self._add(_entry(self._folder, built.weights.name, "openvino-weights"))
            self._done(title, start, built.size, built.verdict)

    def fuse_attention(self) -> None:
        """The graph with ONNX Runtime's own attention, where it has some in FP32 and gives the same."""
        precision = self._graph_precision
        if precision not in (Precision.FP32, Precision.INT8) or self.spec.text is not None or self._graphs != self._folder:
            return
        from . import graph
        from .backends.onnxruntime.fused import fused_difference
        from .graph.fuse_attention import fuse_attention, save_beside
        from .graph.split_resize import split_resize

        start = time.perf_counter()
        self._say("attention", None, "fusing")
        model = graph.load(self._graphs / MODEL)
        count = fuse_attention(model)
        if not count + split_resize(model):
            return
        save_beside(model, self._folder / FUSED, self._folder / MODEL)
        try:
            error = fused_difference(self._folder / MODEL, self._folder / FUSED, self.spec, quantized=precision == Precision.INT8)
        except SessionError as failure:
            self.warnings.append(f"ONNX Runtime's own attention cannot run here, so {MODEL} runs as it is: {failure}")
            error = math.inf
        if error > Precision.FP32.output_tolerance:
            files.remove(self._folder / FUSED)
            if math.isfinite(error):
                self.warnings.append(f"ONNX Runtime's own attention gives something else ({error:.1e}), so {MODEL} runs as it is")
            return
        self._add(_entry(self._folder, FUSED, "onnx-fused"))
        size = (self._folder / FUSED).stat().st_size
        self._done("attention", start, size, f"{count} fused for ONNX Runtime, {error:.1e} from {MODEL}")

    def try_device(self, device: str) -> None:
        """Run the finished graph once with ONNX Runtime."""
        self._say("onnxruntime", None, f"trying {device}")
        self.stages.append(_try_device(self._graphs / MODEL, self.spec, device))

    def save(self) -> None:
        """Write the manifest of the bundle."""
        seconds = {stage.name: round(stage.seconds, 3) for stage in self.stages}
        self._record("seconds", {**self.provenance.options.get("seconds", {}), **seconds})
        Bundle(self._folder, self.spec, self.provenance, tuple(self.entries)).save()

    def _record(self, name: str, facts: Mapping[str, Any]) -> None:
        """Put the facts of a stage into the provenance, in place of earlier ones."""
        self.provenance = replace(self.provenance, options={**self.provenance.options, name: facts})

    def _done(self, name: str, start: float, size: int, verdict: str) -> None:
        self.stages.append(Stage(name, time.perf_counter() - start, size, verdict))


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
            "'a cat. a dog.' with it, naming things that are in the images"
        )


def engine_verdict(facts: EngineFacts) -> str:
    """An engine in a few words: layers, types, and the GPU memory of one context."""
    memory = f", {facts.activation_bytes / 2**20:.0f} MiB activations" if facts.activation_bytes else ""
    return f"{facts.layers} layers, {facts.precision}{memory}"


def engine_name(config: EngineConfig, precision: str = "fp32") -> str:
    """The precision is part of the name, except for FP32."""
    return f"model.{config.label}{'' if precision == 'fp32' else '.' + precision}.engine"


def _check_sizes(family: Family, engines: Sequence[EngineConfig]) -> None:
    """Refuse a range of sizes for a family that takes one."""
    for engine in engines:
        for name in ("height", "width"):
            sides = getattr(engine, name)
            if sides is not None and sides[0] != sides[2] and not family.dynamic:
                raise ExportError(
                    f"{family.title} takes one fixed {name}, because {family.fixed_reason}; "
                    f"got --{name} {','.join(map(str, sides))}; give one number, or leave it out"
                )


def refuse_export_choices(model: Path | str, export: ExportConfig, load: LoadOptions, *, builds: bool, checkpoint: bool) -> None:
    """A finished graph cannot be exported otherwise; leaving a choice out silently would hide that.

    builds: engines or packages are built, whose profile height and width choose. checkpoint: it is read again, for packages.
    """
    if load.labels is not None:
        raise SpecError(
            f"--labels '{load.labels}' cannot be given with '{model}': the labels of an ONNX file are part of its spec; "
            "give them to detrt export"
        )
    if load.family is not None:
        raise SpecError(f"--family {load.family} says how a checkpoint is read, and '{model}' is exported already; leave it out")
    if load.tokenizer is not None:
        raise SpecError(
            f"--tokenizer '{load.tokenizer}' cannot be given with '{model}', which has its own beside it; leave it out"
        )
    for option in load.typed():
        raise SpecError(
            f"{option} cannot be given with '{model}': how it is read is part of its spec; leave it out, or give it to detrt export"
        )
    for name in FLAGS:
        if getattr(load, name) and not checkpoint:
            raise SpecError(f"--{name.replace('_', '-')} has no effect on '{model}', which is exported already; leave it out")
    if export.height is not None and not builds:
        raise ExportError(
            f"--size {export.height}x{export.width} has no effect on '{model}', which is exported already, without an engine; "
            "leave it out, or choose an engine with --target"
        )
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


def is_foreign(path: Path) -> bool:
    """Whether nothing in or beside an ONNX file is a spec of detrt's."""
    from . import graph

    check_model_file(path)
    return graph.find_spec(path) is None


def _adopt(path: Path, folder: Path) -> tuple[ModelSpec, Provenance]:
    """Copy an ONNX file and its external weights into the bundle."""
    from . import graph

    check_model_file(path)
    spec = graph.read_spec(path)
    for name in graph.data_files(path):
        shutil.copyfile(path.parent / name, folder / name)
    shutil.copyfile(path, folder / MODEL)
    for name in (spec.text.encoder, spec.text.tokenizer, spec.text.query_encoder) if spec.text is not None else ():
        if name and not (path.parent / name).is_file():
            raise SpecError(f"'{path}' needs '{name}' beside it, which is not there; export the checkpoint again")
        if name:
            shutil.copyfile(path.parent / name, folder / name)
    return spec, _origin(path)


def _origin(path: Path) -> Provenance:
    """Where an ONNX file comes from: what its bundle or the file itself says, else the file."""
    from . import graph
    from .models.source import versions

    sha256 = files.sha256_of(path)
    if (path.parent / MANIFEST).is_file():
        bundle = Bundle.open(path.parent)
        if any(entry.path == path.name and entry.sha256 == sha256 for entry in bundle.of_kind("onnx")):
            return bundle.provenance
    model = graph.load(path, weights=False)
    recorded = graph.read_metadata(model, PROVENANCE_KEY)
    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if recorded:  # without a time, so that equal exports are equal files
        return replace(Provenance.from_json(recorded), created=created)
    elements = graph.summarise(model).weight_elements
    return Provenance(str(path.absolute()), sha256, elements, versions=versions(), created=created)


def _graph_digests(entries: Iterable[BundleFile]) -> dict[str, str]:
    """Path and digest of what the engines of a bundle are built from."""
    return {entry.path: entry.sha256 for entry in entries if entry.kind in ("onnx", "weights", "text")}


def _model_entries(folder: Path, spec: ModelSpec) -> list[BundleFile]:
    kinds = {MODEL: "onnx", RANGES: "ranges", SEARCH_PLOT: "plot", SEARCH_STATE: "search"}
    if spec.text is not None:
        kinds |= {spec.text.encoder: "text", spec.text.tokenizer: "tokenizer", spec.text.query_encoder: "query"}
    return [_entry(folder, path.name, kinds.get(path.name, "weights")) for path in sorted(folder.iterdir())]


def _entry(folder: Path, name: str, kind: str, facts: EngineFacts | None = None) -> BundleFile:
    path = folder / name
    return BundleFile(kind, name, files.sha256_of(path), path.stat().st_size, facts)


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


def _try_device(path: Path, spec: ModelSpec, device: str) -> Stage:
    """Open a graph with ONNX Runtime and, for a model of fixed classes, run it on a drawn scene.

    Raises:
        SessionError: it cannot run there.
    """
    start = time.perf_counter()
    with OnnxSession(path, spec, provider=device) as session:
        verdict = "opened"
        if spec.text is None:
            session.run(preprocess(draw_images(1, spec.input.size_hw), spec).feeds)
            verdict = "runs as a CUDA graph" if device.startswith("cuda") else "runs"
        return Stage(session.info.name, time.perf_counter() - start, 0, session.info.note or verdict)
