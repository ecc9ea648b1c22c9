"""ONNX -> engine, in a child process that may crash, be killed or run too long without harm."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from ... import bundle, files
from ...bundle import EngineFacts
from ...errors import EngineError, OutputError
from ...graph.operators import MSDA, check_model_file, plugin_operators
from ...models import trust
from ...spec import ModelSpec
from ...system import Progress, compute_capabilities_here
from ..child_process import run_child
from ..worker_process import module_command
from . import diagnose
from .bindings import check_installed
from .config import RTX_SMS, EngineConfig
from .kernels import Kernel, count

WORKER_COMMAND: tuple[str, ...] = module_command("detrt.backends.tensorrt.worker")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A written engine.

    size in bytes; warnings: what TensorRT remarked, often nothing; notes: how the graph was changed for it; kernels: of an engine of
    TensorRT-RTX, in the builder's order.
    """

    path: Path
    sidecar: Path
    facts: EngineFacts
    size: int
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kernels: tuple[Kernel, ...] = ()


def build_engine(
    model_onnx: Path | str,
    output: Path | str,
    config: EngineConfig | None = None,
    spec: ModelSpec | None = None,
    *,
    progress: Progress | None = None,
) -> BuiltEngine:
    """Build `output` and its sidecar `<output>.json` from an ONNX file.

    Both are written whole or not at all; an existing engine stays as it was when the build fails.

    Args:
        model_onnx: the graph; weights in a separate data file must lie beside it.
        config: the choices; None: EngineConfig().
        spec: facts of the model; None: read from the graph.
        progress: called as progress(fraction, text) from this thread.

    Raises:
        EngineError: the file is not a model, the choices do not fit it, TensorRT refused it, crashed,
            ran out of memory or took too long.
        GraphError: no spec was given and the graph has none.
        OutputError: the output cannot be written.
        MissingPackageError: the target's library is not installed.
    """
    config = config or EngineConfig()
    model_onnx, output = Path(model_onnx), Path(output)
    check_model_file(model_onnx)
    check_installed(config.target)
    if spec is None:
        from ...graph import read_spec

        spec = read_spec(model_onnx)
    if held := plugin_operators(model_onnx):
        _check_plugin_nodes(held, model_onnx, config)
    if output.is_dir():
        raise OutputError(f"cannot write '{output}': a folder has that name; give a file, such as model.engine")
    if output.resolve() == model_onnx.resolve():
        raise OutputError(f"cannot write '{output}': it is the ONNX file that is read; give another output path")
    sha256 = files.sha256_of(model_onnx)
    # A folder of its own, whose name nobody uses again: a builder that outlives this process writes nothing into the next one's file.
    with files.naming(output), files.making_parents(output), files.temporary_folder(output.parent, output.name) as folder:
        engine = folder / output.name
        answer = run_child(
            WORKER_COMMAND,
            {
                "onnx": str(model_onnx.resolve()),
                "engine": str(engine.resolve()),
                "config": {**config.to_dict(), "timing_cache": _absolute(config.timing_cache)},
                "spec": spec.to_dict(),
            },
            what="builder",
            timeout_seconds=config.timeout_seconds,
            quicker="a lower `optimization_level` or a smaller profile",
            progress=progress,
            died=diagnose.ended,
        )
        if not engine.is_file() or engine.stat().st_size != answer["size"]:
            raise EngineError(f"the engine for '{output}' was not written whole; free disk space and build it again")
        files.move(engine, output)
    kernels = tuple(Kernel(one["name"], one["kind"], tuple(one["reads"]), tuple(one["writes"])) for one in answer["kernels"])
    facts = EngineFacts(
        target=config.target,
        runtime_version=answer["runtime_version"],
        compute_capabilities=tuple(answer["compute_capabilities"]),
        precision=answer["precision"],
        profile=answer["profile"],
        onnx_sha256=sha256,
        layers=answer["layers"],
        build_seconds=answer["build_seconds"],
        options=config.to_dict(),
        inputs=tuple(answer["inputs"]),
        outputs=tuple(answer["outputs"]),
        layer_types=answer["layer_types"],
        kernels=count(kernels),
        peak_memory_mib=answer["peak_memory_mib"],
        activation_bytes=answer.get("activation_bytes", 0),
        environment=answer["environment"],
    )
    try:
        sidecar = bundle.write_sidecar(output, spec, facts)
    except BaseException:
        # An engine without a sidecar cannot be opened, so it must not stay behind.
        output.unlink(missing_ok=True)
        raise
    if trust.native_code(facts.options):
        trust.remember(output)
    if progress:
        progress(1.0, "done")
    return BuiltEngine(output, sidecar, facts, answer["size"], tuple(answer["warnings"]), tuple(answer["notes"]), kernels)


def check_sms(config: EngineConfig) -> None:
    """Raise EngineError, before any work, for a GPU that TensorRT-RTX builds for on such a GPU only, where this machine has none."""
    if config.target != "tensorrt-rtx" or config.sms[0] in RTX_SMS or config.sms[0] in compute_capabilities_here():
        return
    raise EngineError(
        f"TensorRT-RTX builds for compute capability {config.sms[0]} on a machine with such a GPU only, and nvidia-smi shows none here. "
        f"Type for example `sms=86,89`; it lists {', '.join(map(str, RTX_SMS))}"
    )


def runs_here(config: EngineConfig) -> bool:
    """Whether an engine of these choices is for the first GPU of this machine, and what runs it is installed."""
    if config.target == "tensorrt":
        return True  # it is built by that GPU
    here = compute_capabilities_here()[:1]
    return set(here) <= set(config.sms) and bool(here) and importlib.util.find_spec("cuda") is not None


def _check_plugin_nodes(held: list[str], model_onnx: Path, config: EngineConfig) -> None:
    """Refuse a graph whose plugin nodes `held` the choices do not bring, before a build.

    Raises:
        EngineError: plugin nodes for TensorRT-RTX, or detrt's own without a library.
    """
    if config.target == "tensorrt-rtx":
        raise EngineError(
            f"'{model_onnx}' holds plugin nodes ({', '.join(held)}), and TensorRT-RTX has no plugin layers; export with "
            "`msda=gather`, or choose `targets=tensorrt`"
        )
    if MSDA in held and not config.plugins:
        raise EngineError(
            f"'{model_onnx}' holds plugin nodes ({held[0]}); give their library with `plugins=libdetrt_plugin.so` (docs/guide/plugin.md "
            "says how to build it), or export with `msda=gather`"
        )


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
