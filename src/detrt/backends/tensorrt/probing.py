"""Intermediate tensors of an engine, read from engines that are built again with extra outputs, on the GPU that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ... import files
from ...bundle import EngineFacts
from ...graph.view import GraphView
from ...spec import PIXEL_VALUES, ModelSpec
from ..base import Feeds
from .build import build_engine
from .config import EngineConfig


def engine_fetch(
    view: GraphView,
    spec: ModelSpec,
    feeds: Feeds,
    facts: EngineFacts,
    *,
    compute_capability: int | None = None,
    open_engine: Callable[[Path], Any],
    build: Callable[..., Any] = build_engine,
) -> Callable[[Sequence[str]], Mapping[str, NDArray]]:
    """A reader of intermediate tensors of an engine, for `divergence.search`; each call builds one engine.

    view: the graph of the engine. build: replaced in tests.

    Raises (when called):
        EngineError: the build fails, or there is no GPU.
    """
    from ... import graph
    from ...graph.probe import probe

    batch, _, height, width = feeds[PIXEL_VALUES].shape
    config = EngineConfig(
        target=facts.target,
        sms=(compute_capability,) if compute_capability and facts.target == "tensorrt-rtx" else (),
        batch=(batch,) * 3,
        height=(height,) * 3 if spec.input.dynamic else None,
        width=(width,) * 3 if spec.input.dynamic else None,
        tf32=bool(facts.options.get("tf32")),
    )

    def fetch(names: Sequence[str]) -> dict[str, NDArray]:
        model, output_names = probe(view, names)
        with files.scratch() as folder:
            onnx_path, engine_path = folder / "probe.onnx", folder / "probe.engine"
            graph.save(model, onnx_path)
            build(onnx_path, engine_path, config, spec)
            session = open_engine(engine_path)
            try:
                outputs = session.run(feeds)
            finally:
                session.close()
        return {name: outputs[output] for name, output in output_names.items()}

    return fetch
