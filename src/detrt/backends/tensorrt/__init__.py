"""ONNX -> TensorRT engine, and running it. Nothing heavy is imported until a name is used.

from detrt import EngineConfig, TensorRTSession, build_engine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import BuiltEngine, build_engine
    from .config import EngineConfig
    from .session import TensorRTSession

__all__ = ["BuiltEngine", "EngineConfig", "TensorRTSession", "build_engine"]

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
