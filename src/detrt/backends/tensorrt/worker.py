"""The builder process: `python -m detrt.backends.tensorrt.worker FD`.

It builds one engine, so that a crash of the library ends this process and not the caller's. The request names every file by
its absolute path: {"onnx", "engine", "config", "spec"}.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import files
from ...errors import DetrtError, EngineError
from ...graph.operators import MSDA
from ...spec import PIXEL_VALUES, ModelSpec, Precision
from ...system import Progress, peak_memory_mib
from ..child_process import answer_parent
from . import diagnose as explain
from . import kernels
from .bindings import NUMPY_DTYPES, TF32_OVERRIDE, Messages, Trt, build_environment, load_trt
from .config import RTX_SMS, EngineConfig
from .profile import NetworkTensor, Profile, plan_profile
from .rewrite import SELECTIONS_RETURNED, Rewritten, rewrite
from .versions import check_faults, faults_of

# Scratch memory of one context beyond which smaller GPUs cannot open the engine.
LARGE_ACTIVATION = 4 << 30
# Warnings of the library that say nothing of the engine: every FP16 scale is a number of FP32.
_NOISE = re.compile(r"Int64 binding|Converting \w+ (activation|weight) scales to fp32")

# TensorRT type -> name in the sidecar. Whole numbers and booleans say nothing about precision.
_FLOATS = {
    "FLOAT": "fp32",
    "HALF": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "FP8": "fp8",
    "INT4": "int4",
    "FP4": "fp4",
}


def build(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Build the engine at request["engine"] and return its facts.

    Raises:
        DetrtError: the model, the choices or the machine do not allow it.
    """
    config = EngineConfig.from_dict(request["config"])
    spec = ModelSpec.from_dict(request["spec"])
    onnx = Path(request["onnx"])
    started_s = time.monotonic()
    progress(0.0, "loading TensorRT")
    environment = build_environment(config)
    os.environ.pop(TF32_OVERRIDE, None)
    os.environ.update(environment)
    trt = load_trt(config.target)
    dialect = trt.dialect
    dialect.check_config(trt, config)
    sms = _sms(trt, config)
    trt.load_plugins(config.plugins)
    with files.scratch() as folder, trt.capture() as messages:
        plugins = dialect.plugins(trt, config)
        source = rewrite(onnx, trt.row, config, spec, folder, plugins)
        builder = trt.create_builder()
        network = trt.create_network(builder)
        _parse(trt, network, source.path, messages)
        inputs, outputs = _tensors(network)
        detects = any(tensor.name == PIXEL_VALUES for tensor in inputs)
        notes = dialect.notes(source, MSDA in plugins and detects)
        if config.return_selections and detects and not source.changes.get(SELECTIONS_RETURNED):
            notes.append("`return_selections` has no effect: the model selects no queries by their scores")
        profile = plan_profile(inputs, config, spec)
        layer_types = _layer_types(network)
        _check_capability(sms, layer_types, source.low)
        warnings = _known_faults(trt, network, spec, profile, sms, layer_types, source.low)
        if trt.is_rtx and sms[0] not in RTX_SMS:
            warnings.append(
                f"NVIDIA does not list compute capability {sms[0]} among the GPUs of TensorRT-RTX: the engine runs where TensorRT-RTX "
                f"{trt.version} takes it, and what it detects there must be checked"
            )
        builder_config = _builder_config(trt, builder, config, profile, sms)
        symbolic = any(shapes["min"] != shapes["max"] for shapes in profile.values())
        dialect.configure(
            trt,
            builder_config,
            network,
            source,
            config,
            symbolic=symbolic,
            report=lambda fraction, phase: progress(0.05 + 0.95 * fraction, phase),
        )
        progress(0.05, "building")
        _refuse_logged_errors(trt, messages)
        cache_note = _load_timing_cache(trt, builder_config, config)
        host_memory, more = dialect.serialize(trt, builder, network, builder_config, messages, symbolic=symbolic)
        warnings += more
        if host_memory is None:
            raise EngineError(explain.build_failure(onnx.name, messages.errors, trt.version))
        _save_timing_cache(builder_config, config)
        size = int(host_memory.nbytes)
        Path(request["engine"]).write_bytes(memoryview(host_memory))
        layer_types = dialect.layer_types(trt, Path(request["engine"]), layer_types)
    warnings += explain.alike_once([text for text in messages.warnings if not _NOISE.search(text)])
    activation_bytes = explain.activation_bytes(messages.of("INFO"))
    if activation_bytes > LARGE_ACTIVATION:
        warnings.append(explain.large_activation(activation_bytes, profile))
    return {
        "runtime_version": trt.version,
        "environment": environment,
        "compute_capabilities": list(sms),
        "precision": precision_of(layer_types) if layer_types else _allowed(source),
        "layer_types": layer_types,
        "profile": profile,
        "layers": int(network.num_layers),
        "kernels": [asdict(one) for one in kernels.parse(trt.layers)],
        "inputs": [_described(tensor) for tensor in inputs] if source.inputs is None else list(source.inputs),
        "outputs": [_described(tensor) for tensor in outputs] if source.outputs is None else list(source.outputs),
        "build_seconds": round(time.monotonic() - started_s, 3),
        "peak_memory_mib": round(peak_memory_mib()),
        "activation_bytes": activation_bytes,
        "size": size,
        "warnings": cache_note + warnings,
        "notes": notes,
    }


def precision_of(layer_types: dict[str, int]) -> str:
    """Precision of the layers: "fp32" when every floating layer output is FP32; else all kinds, the most frequent
    first, such as "fp16+fp32"."""
    counts = {name: layer_types[kind] for kind, name in _FLOATS.items() if layer_types.get(kind)}
    return "+".join(sorted(counts, key=lambda name: -counts[name])) or "none"


def _allowed(source: Rewritten) -> str:
    """Types that the builder may choose, where the inspector names none: an engine of symbolic shapes of TensorRT 8.5."""
    return "fp16+fp32" if source.low else "fp32"


def _parse(trt: Trt, network: Any, onnx: Path, messages: Messages) -> None:
    parser = trt.module.OnnxParser(network, trt.logger)
    parsed = parser.parse_from_file(str(onnx))
    if parsed and network.num_outputs > 0:
        return
    faults = []
    named = trt.dialect.names_nodes
    for index in range(parser.num_errors):
        parser_error = parser.get_error(index)
        faults.append(
            explain.ParserFault(
                node=parser_error.node_name() if named else f"number {parser_error.node()} in graph order",
                operator=parser_error.node_operator() if named else "",
                description=parser_error.desc(),
                code=str(parser_error.code()).rpartition(".")[2],
                file=parser_error.file(),
            )
        )
    # Text and empty files are "parsed" into a network of nothing.
    logged = messages.errors or ["Failed to parse the ONNX model: it holds no network"]
    raise EngineError(explain.parse_failure(onnx.name, faults, logged, trt.version))


def _tensors(network: Any) -> tuple[list[NetworkTensor], list[NetworkTensor]]:
    def read(native: Any) -> NetworkTensor:
        shape = tuple(int(length) for length in native.shape)
        names = tuple(native.get_dimension_name(axis) or "" for axis in range(len(shape)))
        return NetworkTensor(native.name, native.dtype.name, shape, names)

    inputs = [read(network.get_input(index)) for index in range(network.num_inputs)]
    return inputs, [read(network.get_output(index)) for index in range(network.num_outputs)]


def _described(tensor: NetworkTensor) -> dict[str, Any]:
    shape = [name or -1 if length < 0 else length for length, name in zip(tensor.shape, tensor.dimensions, strict=True)]
    return {
        "name": tensor.name,
        "dtype": NUMPY_DTYPES.get(tensor.dtype, tensor.dtype.lower()),
        "shape": shape,
    }


def _builder_config(trt: Trt, builder: Any, config: EngineConfig, profile: Profile, sms: tuple[int, ...]) -> Any:
    module = trt.module
    builder_config = builder.create_builder_config()
    optimization_profile = builder.create_optimization_profile()
    for name, shapes in profile.items():
        optimization_profile.set_shape(name, shapes["min"], shapes["opt"], shapes["max"])
    builder_config.add_optimization_profile(optimization_profile)
    if trt.is_rtx:
        trt.set_compute_capabilities(builder_config, sms)
        builder_config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for `kernels`
    elif config.hardware_compatibility != "none":
        trt.set_hardware_compatibility(builder_config, config.hardware_compatibility)
    if config.workspace_mib is not None:
        builder_config.set_memory_pool_limit(module.MemoryPoolType.WORKSPACE, config.workspace_mib << 20)
    # TF32 is on by default in both libraries, and orthogonal to strong typing.
    if config.tf32:
        builder_config.set_flag(module.BuilderFlag.TF32)
    else:
        builder_config.clear_flag(module.BuilderFlag.TF32)
    if config.version_compatible:
        builder_config.set_flag(module.BuilderFlag.VERSION_COMPATIBLE)
    return builder_config


def _known_faults(
    trt: Trt,
    network: Any,
    spec: ModelSpec,
    profile: Profile,
    sms: tuple[int, ...],
    layer_types: dict[str, int],
    low: bool,
) -> list[str]:
    """Warnings about results of this version that are known to be wrong. low: see `Rewritten`.

    Raises:
        EngineError: a fault that makes the engine useless.
    """
    precisions = {_FLOATS[kind] for kind in layer_types if kind in _FLOATS}
    precisions |= {"fp16"} if low else set()
    layers = {network.get_layer(index).type.name for index in range(network.num_layers)}
    largest = max((shapes["max"][0] for shapes in profile.values() if shapes["max"]), default=1)
    found = [
        fault
        for sm in sms
        for fault in faults_of(
            trt.target,
            trt.version,
            sm=sm,
            precisions=precisions,
            layers=layers,
            family=spec.family,
            largest_batch=largest,
        )
    ]
    return check_faults(list(dict.fromkeys(found)), trt.version)


def _check_capability(sms: tuple[int, ...], layer_types: dict[str, int], low: bool = False) -> None:
    """Raises EngineError where the GPU does not compute in a type of the graph, before minutes of building.

    low: see `Rewritten`.
    """
    kinds = [kind for kind in Precision if kind.tensorrt in layer_types and kind.bits < 32]
    kinds += [Precision.FP16] if low else []
    for kind in dict.fromkeys(kinds):
        if lacking := [sm for sm in sms if sm < kind.min_compute_capability]:
            raise EngineError(
                f"the graph computes in {kind}, which compute capability {', '.join(map(str, lacking))} does not have (it needs "
                f"{kind.min_compute_capability} or newer); build the bundle with `precision=fp16` or fp32"
            )


def _refuse_logged_errors(trt: Trt, messages: Messages) -> None:
    """A setter with a wrong value only logs an error, and the build goes on without it."""
    if messages.errors:
        raise EngineError(f"TensorRT {trt.version} refused a build option: " + "; ".join(messages.errors[:5]))


def _load_timing_cache(trt: Trt, builder_config: Any, config: EngineConfig) -> list[str]:
    """Use the timing cache, or start another one. Returns a warning where the file could not be used."""
    if config.timing_cache is None:
        return []
    try:
        data = config.timing_cache.read_bytes() if config.timing_cache.is_file() else b""
    except OSError as error:
        raise EngineError(
            f"the timing cache '{config.timing_cache}' cannot be read ({error.strerror}); give another file"
        ) from None
    # TensorRT 8.5 logs errors for caches that it wrote itself, and 10 takes foreign ones for empty ones.
    with trt.capture() as messages:
        timing_cache = builder_config.create_timing_cache(data)
        used = timing_cache is not None and builder_config.set_timing_cache(timing_cache, False)
    if used and not messages.errors:
        return []
    builder_config.set_timing_cache(builder_config.create_timing_cache(b""), False)
    reason = messages.errors[0] if messages.errors else "it belongs to another GPU or TensorRT version"
    return [f"the timing cache '{config.timing_cache}' could not be used, and was started anew: {reason}"]


def _save_timing_cache(builder_config: Any, config: EngineConfig) -> None:
    if config.timing_cache is not None:
        timing_cache = builder_config.get_timing_cache()
        files.write_bytes(config.timing_cache, bytes(timing_cache.serialize()))


def _layer_types(network: Any) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for position in range(layer.num_outputs):
            # Not `layer.get_output_type`, which TensorRT 10 answers with FLOAT for every layer of a strongly typed network.
            counts[layer.get_output(position).dtype.name] += 1
    return dict(counts.most_common())


def _sms(trt: Trt, config: EngineConfig) -> tuple[int, ...]:
    """Compute capabilities that the engine is for. Raises EngineError: one that TensorRT-RTX builds for on such a GPU only."""
    if not trt.is_rtx:
        return _sms_of_this_gpu()
    if config.sms[0] not in RTX_SMS:
        try:
            here = _sms_of_this_gpu()
        except DetrtError:  # whose next step is for those who run engines
            here, reason = (), "none can be used here"
        else:
            reason = f"this one has {here[0]}"
        if here != config.sms:
            raise EngineError(
                f"TensorRT-RTX builds for compute capability {config.sms[0]} on such a GPU only: {reason}. Build there, or choose of "
                f"{', '.join(map(str, RTX_SMS))}"
            )
    return config.sms


def _sms_of_this_gpu() -> tuple[int, ...]:
    from .cuda import Cuda

    cuda = Cuda()
    cuda.check_device(0)
    return (cuda.compute_capability(0),)


def main(arguments: list[str]) -> int:
    answer_parent(int(arguments[0]), build)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
