"""What `build` does with the graph for ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphConfig:
    """fuse_attention: also write a graph with ONNX Runtime's own attention. try_devices: run the finished graph once on each."""

    fuse_attention: bool = False
    try_devices: tuple[str, ...] = ()
