"""ONNX files: reading, writing, the embedded spec, passes and summaries."""

from __future__ import annotations

from .io import (
    GraphSummary,
    data_files,
    find_spec,
    load,
    read_metadata,
    read_spec,
    save,
    summarise,
    to_bytes,
    weight_bytes,
    with_metadata,
    with_spec,
)

__all__ = [
    "GraphSummary",
    "data_files",
    "find_spec",
    "load",
    "read_metadata",
    "read_spec",
    "save",
    "summarise",
    "to_bytes",
    "weight_bytes",
    "with_metadata",
    "with_spec",
]
