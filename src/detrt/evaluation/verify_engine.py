"""Intermediate tensors of an engine: build it again with more outputs, on the GPU that runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ..backends.base import Feeds
from ..backends.tensorrt import EngineConfig, TensorRTSession, build_engine
from ..bundle import EngineFacts
from ..spec import PIXEL_VALUES, ModelSpec

if TYPE_CHECKING:
    from ..graph.view import GraphView

# What an engine with more outputs cannot show: TensorRT fuses across tensors that nobody asks for.
CAVEAT = "read from engines built again with more outputs; a fault that needs a fusion may not show in them"


def engine_fetch(
    view: GraphView,
    spec: ModelSpec,
    feeds: Feeds,
    facts: EngineFacts,
    *,
    compute_capability: int | None = None,
    build: Callable[..., Any] = build_engine,
    open_engine: Callable[[Path], Any] = TensorRTSession,
) -> Callable[[Sequence[str]], Mapping[str, NDArray]]:
    """A reader of intermediate tensors for `verify_divergence.search`; each call builds one engine.

    view: the graph that the engine was built from. build, open_engine: replace the library, for tests.

    Raises (when called):
        EngineError: TensorRT does not build it, or there is no GPU.
    """
    from .. import graph
    from ..graph.probe import probe

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
        model, shown = probe(view, names)
        with tempfile.TemporaryDirectory(prefix="detrt-probe-") as folder:
            onnx_path, engine_path = Path(folder) / "probe.onnx", Path(folder) / "probe.engine"
            graph.save(model, onnx_path)
            build(onnx_path, engine_path, config, spec)
            session = open_engine(engine_path)
            try:
                outputs = session.run(feeds)
            finally:
                session.close()
        return {name: outputs[output] for name, output in shown.items()}

    return fetch
