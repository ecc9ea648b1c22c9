"""PyTorch -> ONNX: one call, one graph, checked before it is called done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models.contract import ExportConfig

if TYPE_CHECKING:
    from .onnx import export_onnx
    from .trace import ExportReport

__all__ = ["ExportConfig", "ExportReport", "export_onnx"]


def __getattr__(name: str) -> Any:
    if name in ("ExportReport", "export_onnx"):
        from . import onnx

        return getattr(onnx, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
