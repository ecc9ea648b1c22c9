"""TensorRT engines as a part of `build`: what is refused before any work, the engines, and what is compared afterwards."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ...bundle import EngineFacts, text_encoder_beside
from ...errors import EngineError, ExportError, GateError, MissingPackageError, number_of
from ...models.families import Family
from ...spec import ModelSpec, Precision, triple_text
from ...system import compute_capabilities_here
from ..building import MODEL, Builder, BuildPlan, Trial, Work
from ..shared import SharedOptions
from .bindings import check_installed, is_installed, load_trt
from .build import BuiltEngine, build_engine, check_sms, runs_here
from .config import EngineConfig, others_of
from .kernels import write_kernels
from .versions import check_faults, faults_of


class EngineBuilder(Builder):
    """Builds engines, and that of the text encoder beside each."""

    def configs_for(self, asked: SharedOptions, make: Callable[..., EngineConfig]) -> list[EngineConfig]:
        """One for each target; where there are both, without the choices that are for the other one."""
        fields = {name: getattr(asked, name) for name in ("batch", "height", "width", "timeout_seconds")}
        several = len(asked.names) > 1
        usual = {name: {one.name: one.default for one in others_of(name)} if several else {} for name in asked.names}
        return [make(target=name, **fields, **usual[name]) for name in asked.names]

    def resolved(self, configs: Sequence[EngineConfig], plan: BuildPlan) -> Sequence[EngineConfig]:
        return [replace(config, tf32=True) for config in configs] if plan.precision.precision == Precision.TF32 else configs

    def has_tf32(self, configs: Sequence[EngineConfig]) -> bool:
        return True

    def check(self, configs: Sequence[EngineConfig], plan: BuildPlan) -> None:
        for config in configs:
            check_sms(config)
        _check_engines(configs, plan)
        _check_placement(plan.precision.qdq_placement)
        precision = Precision.TF32 if plan.precision.precision == Precision.TF32 else plan.precision.target
        if precision != Precision.FP32 or not plan.from_graph:  # a graph that is there may have another one
            check_capability(precision, configs)

    def missing(self, configs: Sequence[EngineConfig]) -> list[MissingPackageError]:
        found = []
        for target in dict.fromkeys(config.target for config in configs):
            try:
                check_installed(target)
            except MissingPackageError as error:
                found.append(error)
        return found

    def check_family(self, configs: Sequence[EngineConfig], family: Family) -> None:
        """Refuse a range of sizes for a family that takes one."""
        for engine in configs:
            for name in ("height", "width"):
                sides = getattr(engine, name)
                if sides is not None and sides[0] != sides[2] and not family.dynamic:
                    raise ExportError(
                        f"{family.title} takes one fixed {name}, because {family.fixed_reason}; "
                        f"got `{name}={triple_text(sides)}`; give one number, or leave it out"
                    )

    def compares(self, configs: Sequence[EngineConfig]) -> bool:
        # An engine is compared with its graph, so that --no-check says something about it.
        return any(map(runs_here, configs))

    def trial(self, configs: Sequence[EngineConfig], spec: ModelSpec) -> Trial | None:
        if len(configs) != 1 or not compute_capabilities_here() or not runs_here(configs[0]):
            return None
        from .trial import EngineTrial

        return EngineTrial(configs[0], spec)

    def build(self, configs: Sequence[EngineConfig], plan: BuildPlan, work: Work) -> None:
        built = [engine for config in configs for engine in self.build_engines(work, config, compare=plan.export.check)]
        for path in dict.fromkeys(config.layers for config in configs if config.layers is not None):
            write_kernels(path, {engine.path.name: engine.kernels for engine in built})

    def build_engines(self, work: Work, config: EngineConfig, *, compare: bool) -> list[BuiltEngine]:
        """The engine of the detector, and behind it the one of its text encoder, where it has one and it could be built.

        compare: run the detector beside its graph, where this machine can.

        Raises:
            ExportError: the graph's INT8 is placed for another runtime, or TF32 is asked for of a graph that is not FP32.
            EngineError: TensorRT, or the GPU, does not compute in the graph's precision.
            GateError: the engine has another precision than its graph, or detects something else.
        """
        _check_placement(work.recorded_precision.get("qdq_placement"))
        precision = work.graph_precision
        if precision is not None:
            if precision != Precision.FP32 and work.precision.precision == Precision.TF32:
                raise ExportError(
                    f"`precision=tf32` is for a graph in FP32, and this one is in {precision}; leave it out: `tf32` lets what is FP32 in the "
                    "graph use TF32. Or build from the checkpoint"
                )
            check_capability(precision, [config])
        engine = self._engine(work, MODEL, engine_name(config, precision or Precision.FP32), config, "engine")
        if precision is not None:
            check_engine(engine.facts, precision)
        text_engine = None
        if work.spec.text is not None and work.spec.text.encoder:
            text_engine = self._text_engine(work, work.spec.text.encoder, text_encoder_beside(engine.path).name, config)
        # An engine of TensorRT-RTX for other GPUs is compared when it is first opened.
        if compare and runs_here(config):
            text_path = None if text_engine is None else text_engine.path
            self._compare_engine(work, engine.path, text_path, config, precision or Precision.FP32)
            if precision is not None and (precision.quantized or work.precision.searches):
                self._require_gain(work, engine.path, text_path, config, precision)
        return [engine] if text_engine is None else [engine, text_engine]

    def _text_engine(self, work: Work, encoder: str, name: str, config: EngineConfig) -> BuiltEngine | None:
        """The engine of the text encoder. Without one ONNX Runtime runs it, once for a prompt, and the detector is as fast."""
        try:
            return self._engine(work, encoder, name, config, "text-engine")
        except EngineError as error:
            work.warnings.append(f"the text encoder stays with ONNX Runtime, because no engine of it could be built: {error}")
            return None

    def _compare_engine(
        self, work: Work, engine: Path, text_engine: Path | None, config: EngineConfig, precision: Precision
    ) -> None:
        from .compare import compare_engine

        start, name = time.perf_counter(), engine.name
        found = compare_engine(
            work.graphs / MODEL,
            engine,
            Precision.TF32 if config.tf32 and precision == Precision.FP32 else precision,
            text_engine=text_engine,
            progress=lambda fraction, text: work.say(f"check {name}", fraction, text),
        )
        work.done(f"check {config.label}", start, 0, found.verdict)
        entry = next(one for one in work.entries if one.path == name)
        row = {**found.to_dict(), "engine_sha256": entry.sha256}
        work.record("engine_checks", {**work.provenance.options.get("engine_checks", {}), name: row})
        if found.passed:
            return
        if work.provenance.has_random_weights and found.ran and not found.on_same_queries:
            work.warnings.append(
                f"the engine '{name}' and its ONNX graph differ: {found.verdict}. Not judged: random weights give nearly equal scores, which "
                "change places with any rounding"
                + ("" if config.return_selections else "; with `return_selections` both compute with the same queries")
            )
            return
        raise GateError(
            f"the engine '{name}' does not detect what its ONNX graph detects: {found.verdict}; this TensorRT compiles the graph "
            + ("wrongly" if precision in (Precision.FP32, Precision.TF32) else "wrongly, or rounds more than the model bears")
            + ". Try `msda=gather`, `keep_gathers`, another `precision` or another TensorRT version; `check=False` builds without the "
            "comparison, and 'detrt verify' with `ground_truth` judges by AP"
        )

    def _require_gain(
        self, work: Work, engine: Path, text_engine: Path | None, config: EngineConfig, precision: Precision
    ) -> None:
        """Refuse an engine that is not faster here than the plain one, or that loses AP: one in 8 bits, or the result of a search."""
        from .gain import AP_LOSS, measure_gain

        kind, allowed = work.precision.budget or ("", 0.0)

        start, name = time.perf_counter(), engine.name
        found = measure_gain(
            work.graphs / MODEL,
            engine,
            config,
            work.spec,
            plain_graph=work.plain,
            text_engine=text_engine,
            average_precision=work.average_precision,
            ap_loss=allowed / 100 if kind == "ap" else AP_LOSS,
            progress=lambda fraction, text: work.say(f"gain {name}", fraction, text),
        )
        work.done(f"gain {config.label}", start, 0, found.verdict)
        work.record("engine_gains", {**work.provenance.options.get("engine_gains", {}), name: found.to_dict()})
        if not found.passed:
            raise GateError(
                f"the engine '{name}' in {precision} is not worth having on this GPU: {found.verdict} in {precision.plain}; it must be "
                f"faster, and lose at most {found.ap_loss:g} AP. Choose `precision={precision.plain}`; `check=False` builds without this "
                "measurement and without the comparison"
            )

    def _engine(self, work: Work, graph: str, name: str, config: EngineConfig, kind: str) -> BuiltEngine:
        start = time.perf_counter()
        built = build_engine(
            work.graphs / graph,
            work.folder / name,
            config,
            work.spec,
            progress=lambda fraction, text: work.say(f"engine {name}", fraction, text),
        )
        work.warnings.extend(built.warnings)
        work.notes.extend(built.notes)
        work.add(name, kind, built.facts)
        title = kind.replace("-", " ")
        work.done(f"{title} {config.label}", start, built.size, engine_verdict(built.facts))
        return built


def engine_verdict(facts: EngineFacts) -> str:
    """An engine in a few words: layers, types, and the GPU memory of one context."""
    memory = f", {facts.activation_bytes / 2**20:.0f} MiB activations" if facts.activation_bytes else ""
    return f"{number_of(facts.layers, 'layer')}, {facts.precision}{memory}"


def engine_name(config: EngineConfig, precision: str = "fp32") -> str:
    """The precision is part of the name, except for FP32."""
    return f"model.{config.label}{'' if precision == 'fp32' else '.' + precision}.engine"


def check_capability(precision: Precision, engines: Sequence[EngineConfig]) -> None:
    """Raise for engines that cannot run a precision.

    Raises:
        EngineError: a compute capability, or a library, without the precision.
    """
    for config in engines:
        if config.target == "tensorrt-rtx" and precision == Precision.INT8:
            raise EngineError(
                "TensorRT-RTX has INT8 for the weights of matmuls only, by NVIDIA's documentation, and detrt's INT8 graphs quantize "
                "convolutions and activations: version 1.6 fails on them. Choose `precision=fp8` (compute capability 89 and newer) or "
                "fp16, or `targets=tensorrt`"
            )
        _check_types(precision, config)
        lacking = [sm for sm in config.sms if sm < precision.min_compute_capability]
        if lacking:
            capable = [str(sm) for sm in config.sms if sm not in lacking]
            alternatives = [name for name in (Precision.FP16, Precision.BF16) if min(config.sms) >= name.min_compute_capability]
            advice = f"`sms={','.join(capable)}`, or " if capable else ""
            raise EngineError(
                f"{precision} does not run on compute capability {', '.join(map(str, lacking))} "
                f"(it needs {precision.min_compute_capability} or newer); choose {advice}`precision={' or '.join(alternatives)}`"
            )


def _check_types(precision: Precision, config: EngineConfig) -> None:
    """Raises EngineError where the installed library has no such type, or detrt does not use it there."""
    if precision in (Precision.FP32, Precision.TF32) or not is_installed(config.target):
        return
    trt = load_trt(config.target)
    if precision not in trt.row.types:
        raise EngineError(
            f"detrt builds no {precision} engines with TensorRT {trt.version}; choose "
            f"{' or '.join(f'`precision={name}`' for name in (*trt.row.types, 'fp32'))}"
        )


def _check_placement(qdq_placement: str | None) -> None:
    """Raises ExportError where INT8 is placed for OpenVINO and ONNX Runtime, and an engine is wanted of it."""
    if qdq_placement == "cpu":
        raise ExportError(
            "INT8 with `qdq_placement=cpu`, the default where OpenVINO is the only target, quantizes projections of attentions, which "
            "TensorRT computes wrongly or slowly; build the graph for it with `qdq_placement=tensorrt`"
        )


def _check_engines(engines: Sequence[EngineConfig], plan: BuildPlan) -> None:
    """Refuse engines that cannot be built, before minutes of export."""
    names = [engine_name(config, plan.precision.target or Precision.FP32) for config in engines]
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise EngineError(f"two engines would have the name {', '.join(repeated)}; give each target and compute capability once")
    export = plan.export
    for config in engines:
        if export.plugin and config.target == "tensorrt-rtx":
            raise ExportError(
                f"`msda={export.msda}` makes plugin nodes, and TensorRT-RTX has no plugin layers; choose `targets=tensorrt`, or "
                "`msda=gather`"
            )
        if export.nms.startswith("graph") and is_installed(config.target):
            trt = load_trt(config.target)
            choices = {"sm": 0, "precisions": (), "family": "", "largest_batch": 1}
            check_faults(faults_of(trt.target, trt.version, layers={"NMS"}, **choices), trt.version)
        if export.msda == "plugin" and not config.plugins:
            raise ExportError("`msda=plugin` needs the plugin's library: `plugins=libdetrt_plugin.so` (docs/guide/plugin.md)")


def check_engine(facts: EngineFacts, target: Precision) -> None:
    """Compare the types of the layers of an engine with the precision of its graph.

    Raises:
        GateError: the engine lacks the low type (a silent upgrade), or has one that was not requested.
    """
    types = dict(facts.layer_types)
    if not types:
        return
    low = {kind.tensorrt for kind in Precision if kind.bits < 32}
    expected = low & {target.tensorrt, target.base.tensorrt}
    missing = [kind for kind in expected if not types.get(kind)]
    extra = [kind for kind in low - expected if types.get(kind)]
    if missing or extra:
        text = ", ".join(f"{kind} {count}" for kind, count in types.items())
        fault = f"has no {', '.join(sorted(missing))} layer" if missing else f"also has {', '.join(sorted(extra))} layers"
        raise GateError(
            f"`precision={target}` was requested, but the engine {fault} (layer outputs by type: {text}); "
            "build it again from the checkpoint with the intended `precision`"
        )


BUILDER = EngineBuilder()
