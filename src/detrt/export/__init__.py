"""PyTorch -> ONNX: one call, one graph, checked before it is called done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import missing_package
from ..models.contract import ExportConfig

if TYPE_CHECKING:
    from .onnx import export_onnx
    from .trace import ExportReport

__all__ = ["ExportConfig", "ExportReport", "export_onnx"]


def __getattr__(name: str) -> Any:
    if name in ("ExportReport", "export_onnx"):
        try:
            from . import onnx
        except ModuleNotFoundError as error:
            raise missing_package(error, "exporting a checkpoint") or error from None
        return getattr(onnx, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
