"""ONNX -> TensorRT engine, and running it. Nothing heavy is imported until a name is used.

from detrt import EngineConfig, TensorRTSession, build_engine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...system import Ability
from ..target import Build, Target
from .config import DEFAULT_RTX_SMS, RTX_SMS

if TYPE_CHECKING:
    from .build import BuiltEngine, build_engine
    from .config import EngineConfig
    from .session import TensorRTSession

_RTX, _CUDA = "tensorrt-rtx-cu13-bindings", "cuda-python"
_RUN_RTX = Ability("run TensorRT-RTX engines", (_RTX, _CUDA), on_gpu=True, compute_capabilities=RTX_SMS)
_TENSORRT = Ability("build and run TensorRT engines", ("tensorrt", _CUDA), on_gpu=True)
_SHARED = ("batch", "height", "width", "timeout_seconds")

TARGET = Target(
    name="tensorrt",
    kind="engine",
    words="a TensorRT engine",
    opener=f"{__name__}.opening:OPENER",
    builder=f"{__name__}.building:BUILDER",
    config=f"{__name__}.config:EngineConfig",
    suffixes=(".engine", ".plan", ".trt"),
    devices=("cuda",),
    title="TensorRT",
    builds=(Build("tensorrt-rtx", _RUN_RTX, takes=_SHARED), Build("tensorrt", _TENSORRT, takes=_SHARED)),
    abilities=(
        Ability(
            "build TensorRT-RTX engines",
            (_RTX,),
            works=f"for compute capability {', '.join(map(str, DEFAULT_RTX_SMS))} (75 not in FP32); no GPU needed",
        ),
        _RUN_RTX,
        _TENSORRT,
    ),
    sidecar=True,
    placement="tensorrt",
    gpu_names=("tensorrt",),
)

__all__ = ["TARGET", "BuiltEngine", "EngineConfig", "TensorRTSession", "build_engine"]

_HOME = {
    "BuiltEngine": "build",
    "EngineConfig": "config",
    "TensorRTSession": "session",
    "build_engine": "build",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
