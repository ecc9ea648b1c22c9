"""detrt: take every DETR from PyTorch to TensorRT, and verify that it matches PyTorch.

Names are loaded on first use, so that `import detrt` needs neither torch nor a GPU.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends.open import open_session
    from .backends.tensorrt import EngineConfig, TensorRTSession, build_engine
    from .bundle import Bundle
    from .data.matching import Gate
    from .detections import Detections
    from .detector import Detector
    from .errors import DetrtError
    from .evaluation.parity import verify
    from .evaluation.report import VerifyReport
    from .export import ExportConfig, export_onnx
    from .models.load import load_source
    from .pipeline import build
    from .spec import DecodeSpec, InputSpec, ModelSpec
    from .text.prompts import ImageQueries

# Libraries that send reports of their use unless they are told not to: set before any of them is imported, inherited by every process
# that is started. A value that the environment has is its owner's choice. OpenVINO has no such variable: backends/openvino/runtime.py.
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "RAY_USAGE_STATS_ENABLED": "0"}
for _name, _value in NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)

_HOMES = {
    "Bundle": "bundle",
    "DecodeSpec": "spec",
    "Detections": "detections",
    "Detector": "detector",
    "DetrtError": "errors",
    "EngineConfig": "backends.tensorrt",
    "ExportConfig": "export",
    "Gate": "data.matching",
    "ImageQueries": "text.prompts",
    "InputSpec": "spec",
    "ModelSpec": "spec",
    "TensorRTSession": "backends.tensorrt",
    "VerifyReport": "evaluation.report",
    "build": "pipeline",
    "build_engine": "backends.tensorrt",
    "export_onnx": "export",
    "load_source": "models.load",
    "open_session": "backends.open",
    "verify": "evaluation.parity",
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
    "ImageQueries",
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

_OPEN = "type: from detrt import Detector; detector = Detector('bundle')"
# First lines of other libraries -> what to type here.
_ELSEWHERE = {
    **dict.fromkeys(("YOLO", "RTDETR", "get_model", "load_model", "LibreYOLO", "AutoModelForObjectDetection"), _OPEN),
    **dict.fromkeys(("load", "Model", "RTDETRv2", "DETR", "DFINE"), _OPEN),
    **dict.fromkeys(("detect", "predict", "infer"), f"{_OPEN}; found = detector('street.jpg')"),
    **dict.fromkeys(("convert", "compile"), "type: from detrt import build; build(checkpoint, 'bundle')"),
    **dict.fromkeys(("RFDETRBase", "RFDETRNano", "RFDETRSmall", "RFDETRMedium", "RFDETRLarge", "RFDETRSegPreview"), _OPEN),
    "InferencePipeline": f"{_OPEN}; for found in detector.stream('rtsp://camera'): ...",
    "InferenceSlicer": "detections become supervision's by found.to_supervision()",
    "ByteTrack": "type: detector.stream('video.mp4', track=True)",
    "evaluate": "type: from detrt.evaluation.coco import evaluate_coco, or in a shell: detrt eval",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from .system import package_version

        return package_version()
    if name in _HOMES:
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _ELSEWHERE:  # an AttributeError would lose its text in `from detrt import ...`
        raise ImportError(f"detrt has no {name}; {_ELSEWHERE[name]}")
    raise AttributeError(f"module 'detrt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
