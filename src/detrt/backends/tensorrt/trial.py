"""Engines of the graphs that a search of precisions tries, on the GPU of this machine."""

from __future__ import annotations

from pathlib import Path

from ... import files
from ...spec import ModelSpec
from ..base import Session
from ..building import Trial
from .bindings import load_trt
from .build import build_engine
from .config import EngineConfig
from .cuda import Cuda
from .gain import time_beside
from .opening import open_engine

# What does not change an engine, or is said otherwise.
_UNSAID = ("target", "timing_cache", "timeout_seconds")


class EngineTrial(Trial):
    """config: of every engine. spec: of the model."""

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self.config, self.spec = config, spec
        usual = EngineConfig(config.target).to_dict()
        chosen = {name: value for name, value in config.to_dict().items() if value != usual[name] and name not in _UNSAID}
        words = [f"{config.target} {load_trt(config.target).version} on {gpu_here()}", *(f"{n}={v}" for n, v in chosen.items())]
        self.where = ", ".join(words)

    def open(self, graph: Path) -> Session:
        with files.scratch() as folder:
            engine = folder / "trial.engine"
            build_engine(graph, engine, self.config, self.spec)
            # As in `measure_gain`: all kernels compiled, and no file of them for an engine that is not opened again.
            return open_engine(engine, eager_kernels=True, keep_kernels=False)

    def times(self, session: Session, plain: Session) -> tuple[float, float]:
        found = time_beside(session, plain)
        return found.ms, found.plain_ms


def gpu_here() -> str:
    """Name of the GPU that runs the engines. Raises EngineError: none."""
    cuda = Cuda()
    cuda.check_device(0)
    return cuda.device_name(0)
