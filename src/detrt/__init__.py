"""detrt: take every DETR to TensorRT, and prove that it arrived.

Names are loaded on first use, so that `import detrt` needs neither torch nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle import Bundle
    from .compare import Gate
    from .detections import Detections
    from .detector import Detector
    from .engine import EngineConfig, TensorRTSession, build_engine
    from .errors import DetrtError
    from .export import ExportConfig, export_onnx
    from .parity import VerifyReport, verify
    from .pipeline import build
    from .sessions import open_session
    from .sources import load_source
    from .spec import DecodeSpec, InputSpec, ModelSpec

_HOMES = {
    "Bundle": "bundle",
    "DecodeSpec": "spec",
    "Detections": "detections",
    "Detector": "detector",
    "DetrtError": "errors",
    "EngineConfig": "engine",
    "ExportConfig": "export",
    "Gate": "compare",
    "InputSpec": "spec",
    "ModelSpec": "spec",
    "TensorRTSession": "engine",
    "VerifyReport": "parity",
    "build": "pipeline",
    "build_engine": "engine",
    "export_onnx": "export",
    "load_source": "sources",
    "open_session": "sessions",
    "verify": "parity",
}

__all__ = [
    "Bundle",
    "DecodeSpec",
    "Detections",
    "Detector",
    "DetrtError",
    "EngineConfig",
    "ExportConfig",
    "Gate",
    "InputSpec",
    "ModelSpec",
    "TensorRTSession",
    "VerifyReport",
    "__version__",
    "build",
    "build_engine",
    "export_onnx",
    "load_source",
    "open_session",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("detrt")
        except PackageNotFoundError:  # run from its source tree
            return "0+unknown"
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)

        globals()[name] = value
        return value
    raise AttributeError(f"module 'detrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
