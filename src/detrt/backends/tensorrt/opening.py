"""What must be true before an engine is handed to TensorRT, and the reason when it is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...bundle import EngineFacts
from ...errors import EngineError
from . import diagnose as explain
from .bindings import Trt, version_tuple
from .config import RTX_SMS, TARGETS

_REBUILD = "build the engine again here: detrt build MODEL -o OUT"


def device_index(device: str | int) -> int:
    """ "cuda", "cuda:1" or 1 -> index of the GPU.

    Raises:
        EngineError: another device.
    """
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    kind, colon, number = str(device).partition(":")
    if kind != "cuda" or (colon and not number.isdecimal()):
        raise EngineError(f"TensorRT runs on an NVIDIA GPU: device must be cuda or cuda:N; got {device!r}")
    return int(number or 0)


def check_target(engine: Path, facts: EngineFacts) -> str:
    if facts.target not in TARGETS:
        raise EngineError(
            f"'{engine}' was built for the target {facts.target!r}; this detrt knows {', '.join(TARGETS)}; {_REBUILD}"
        )
    return facts.target


def check_version(engine: Path, facts: EngineFacts, trt: Trt) -> None:
    """An engine runs on the TensorRT that built it; a version compatible one on newer ones, too.

    Raises:
        EngineError: the versions do not suit each other.
    """
    if facts.tensorrt_version == trt.version:
        return
    compatible = bool(facts.options.get("version_compatible"))
    if compatible and version_tuple(trt.version) >= version_tuple(facts.tensorrt_version):
        return
    name = "TensorRT-RTX" if trt.is_rtx else "TensorRT"
    limit = " (or newer)" if compatible else ""
    raise EngineError(
        f"'{engine}' was built with {name} {facts.tensorrt_version} and runs only on it{limit}; installed: "
        f"{trt.version}. Install that version, or {_REBUILD}"
    )


def check_gpu(engine: Path, facts: EngineFacts, capability: int, gpu_name: str) -> None:
    """Raises EngineError where the engine was not built for this compute capability."""
    allowed = facts.compute_capabilities
    if capability in allowed:
        return
    if facts.options.get("hardware_compatibility") == "ampere_plus" and capability >= 80:
        return
    if facts.target != "tensorrt-rtx":
        todo = "Build the engine again on this GPU"
    elif capability in RTX_SMS:
        todo = f"Build the engine again for it with --sm {capability}"
    else:
        todo = "TensorRT-RTX does not know this GPU: build an engine on it with --target tensorrt"
    raise EngineError(
        f"'{engine}' was built for compute capability {', '.join(map(str, allowed)) or '(none)'}; this "
        f"GPU, {gpu_name}, has {capability}. {todo}, or run the ONNX file: --backend onnxruntime"
    )


def plugins_of(facts: EngineFacts) -> list[str]:
    """Plugin libraries that an engine needs: from the environment variable DETRT_PLUGINS (paths like those of PATH), else where
    they were when it was built."""
    given = [path for path in os.environ.get("DETRT_PLUGINS", "").split(os.pathsep) if path]
    return given or [str(path) for path in facts.options.get("plugins") or ()]


def deserialize(engine: Path, facts: EngineFacts, trt: Trt, runtime: Any) -> Any:
    """The ICudaEngine in a file whose digest was checked.

    Raises:
        EngineError: the file cannot be read, or TensorRT refused it.
    """
    if not trt.is_rtx:
        trt.load_plugins(plugins_of(facts))
    if facts.options.get("version_compatible"):
        # Such engines carry their own runtime code, which is loaded only when that is allowed.
        runtime.engine_host_code_allowed = True
    try:
        data = engine.read_bytes()
    except OSError as error:
        raise EngineError(f"'{engine}' cannot be read: {error.strerror}") from None
    with trt.capture() as messages:
        native = runtime.deserialize_cuda_engine(data)
    if native is None:
        raise EngineError(explain.open_failure(str(engine), messages.errors, trt.version))
    return native
