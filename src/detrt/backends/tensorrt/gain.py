"""Whether an engine in lower precision is worth having: its time and AP beside those of the plain engine, on this GPU."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ... import files
from ...errors import number_of
from ...spec import PIXEL_VALUES, ModelSpec
from ..base import BaseSession, Feeds, Session
from ..building import ScoredImages
from ..engine_check import PROMPT, drawn_batch
from ..open import open_session
from ..prompted import detector_of
from .build import build_engine
from .compare import open_engine_beside
from .config import EngineConfig

# Runs of a turn, whose first ones warm up, and turns of each engine: in turns, so that a change of the clock meets both.
RUNS, WARM_UP, TURNS = 30, 10, 5
AP_LOSS = 0.003


@dataclass(frozen=True, slots=True)
class Gain:
    """An engine beside the plain one: in 16 bits beside one in 8, in FP32 beside one in 16.

    Attributes:
        batch, height, width: of the runs, the usual shape of the engine.
        ms, plain_ms: median milliseconds of a run, with the copies of its inputs and outputs.
        ap, plain_ap: AP (0..1) on the annotated calibration images; None without annotations. ap_images: how many there are.
        ap_loss: how much lower AP may be.
    """

    batch: int
    height: int
    width: int
    ms: float
    plain_ms: float
    ap: float | None = None
    plain_ap: float | None = None
    ap_loss: float = AP_LOSS
    ap_images: int = 0

    @property
    def passed(self) -> bool:
        """Whether it is faster, and its AP at most `ap_loss` lower."""
        kept = self.ap is None or self.plain_ap is None or self.plain_ap - self.ap <= self.ap_loss
        return self.ms < self.plain_ms and kept

    @property
    def verdict(self) -> str:
        text = f"{self.ms:.3g} ms instead of {self.plain_ms:.3g} at batch size {self.batch}, {self.height}x{self.width}"
        if self.ap is not None and self.plain_ap is not None:
            text += f"; AP {self.ap:.4f} instead of {self.plain_ap:.4f} on {number_of(self.ap_images, 'image')}"
        return text

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_gain(
    graph_path: Path,
    engine: Path,
    config: EngineConfig,
    spec: ModelSpec,
    *,
    plain_graph: Path | None = None,
    text_engine: Path | None = None,
    average_precision: Callable[[BaseSession], ScoredImages | None] | None = None,
    ap_loss: float = AP_LOSS,
    progress: Callable[[float, str], None] | None = None,
) -> Gain:
    """Build the plain engine, and run both in turns.

    Args:
        graph_path, engine: the graph in lower precision, and the engine that `config` made of it.
        plain_graph: the graph that would have been built instead; None, of a quantized graph: the same without its quantization, which takes
            the same time, but whose weights stay rounded.
        text_engine: as `compare_engine` takes it.
        average_precision: measures an opened engine; None: AP is not measured.
        ap_loss: how much lower AP may be.
        progress: called with (fraction, text).

    Raises:
        EngineError: the other engine cannot be built, or one of them not be opened. SessionError: one cannot run.
    """
    say = progress or (lambda fraction, text: None)
    with files.scratch() as folder, contextlib.ExitStack() as closing:
        say(0.0, "engine to compare with")
        plain_path = folder / "plain.engine"
        build_engine(plain_graph or _without_quantization(graph_path, folder), plain_path, config, spec)
        reference = None  # of a model that takes a prompt, for its tokenizer
        if spec.text is not None:
            reference = closing.enter_context(contextlib.closing(open_session(graph_path, emulate_low_precision=True)))
        opened = [
            closing.enter_context(contextlib.closing(open_engine_beside(reference, path, text_engine, **choices)))
            # Kernels as they are when all are compiled; those of the other engine are of no use later.
            for path, choices in ((engine, {"eager_kernels": True}), (plain_path, {"eager_kernels": True, "keep_kernels": False}))
        ]
        say(0.6, "time")
        found = replace(time_beside(*opened), ap_loss=ap_loss)
        if average_precision is None:
            return found
        say(0.8, "AP")
        low, plain = (average_precision(session) for session in opened)
        if low is None or plain is None:
            return found
        return replace(found, ap=low[0], plain_ap=plain[0], ap_images=low[1])


def time_beside(low: Session, plain: Session) -> Gain:
    """Run two opened engines in turns at the usual shape of the first; a model that takes a prompt is asked for `PROMPT`."""
    batch, _, height, width = detector_of(low).info.profile[PIXEL_VALUES][1]
    feeds = drawn_batch(low.spec, batch, (height, width)).feeds
    bound = [session.bind(PROMPT) for session in (low, plain)] if low.spec.text is not None else (low, plain)
    return Gain(batch, height, width, *_times(*bound, feeds))


def _without_quantization(graph_path: Path, folder: Path) -> Path:
    from ... import graph
    from ...graph.dequantize import remove_quantization, skip_centres

    model = graph.load(graph_path)
    remove_quantization(model)
    skip_centres(model)
    graph.save(model, folder / "plain.onnx")
    return folder / "plain.onnx"


def _times(low: Session, plain: Session, feeds: Feeds) -> tuple[float, float]:
    """Median milliseconds of a run of each."""
    samples: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(TURNS):
        for index, session in enumerate((low, plain)):
            for number in range(RUNS):
                start = time.perf_counter()
                session.run(feeds)
                if number >= WARM_UP:
                    samples[index].append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples[0]), statistics.median(samples[1])
