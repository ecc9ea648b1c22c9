"""`--precision auto`: rank the blocks of a model by their sensitivity to the low type, and leave out the fewest.

A block is a module path, such as "decoder.layers.2". Where engines are timed, the fastest that the budget allows is the result. Every
measurement is written to a resume file at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import files, graph
from ..backends.base import Session
from ..backends.building import MODEL, Trial
from ..backends.onnxruntime.session import OnnxSession
from ..backends.prompted import PromptedSession
from ..data.datasets import load_dataset
from ..data.images import ImageSource, load_image
from ..detections import Detections, box_iou
from ..detector import Detector
from ..errors import EngineError, GateError, GraphError, SessionError, number_of
from ..evaluation.coco import evaluate_coco
from ..graph.emulate_low_precision import emulate
from ..graph.msda_plugin import runnable
from ..graph.names import matches, module_path
from ..graph.operators import GEMM
from ..spec import ModelSpec
from ..system import Progress
from .apply import Calibration, apply_precision
from .config import PrecisionConfig

MAX_BLOCKS = 40
MAX_TIMED_BLOCKS = 10  # an engine of each is built and opened, in 5 to 40 s
_COMPARED_DETECTIONS = 10  # per image
_SCHEMA = 2
MISSED_DRIFT = 2.0  # drift of a detection without a match
WITHOUT_TIMES = "ONNX Runtime on the CPU, which tells no times"


@dataclass(frozen=True, slots=True)
class Measured:
    """One graph. loss: drift, or loss of AP in points of 100. ms, plain_ms: of a run of its engine and, in turns with it, of the plain one;
    None: not timed."""

    loss: float
    ms: float | None = None
    plain_ms: float | None = None

    @property
    def time(self) -> float:
        """Relative to the plain engine, since clocks change during a search; infinite where it was not timed."""
        return math.inf if self.ms is None or not self.plain_ms else self.ms / self.plain_ms


@dataclass(slots=True)
class SearchResult:
    """Result of a search.

    kind, allowed: the budget. all_low: with every block in the low type. result: of what was found.
    left_out: blocks that are not in the low type. paths: the modules in them. alone: block -> the graph with this block alone in the low type.
    images: how many the loss is measured on. runs: measurements of this call. where: what ran them. plain: the precision that the times are compared with.
    """

    kind: str
    allowed: float
    all_low: Measured
    result: Measured
    left_out: tuple[str, ...]
    paths: tuple[str, ...]
    alone: Mapping[str, Measured] = field(default_factory=dict)
    images: int = 0
    runs: int = 0
    where: str = WITHOUT_TIMES
    plain: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        text = f"{number_of(len(self.left_out), 'block')} left out, {loss_on(self.kind, self.images)}, searched with {self.where}"
        if self.result.ms is None:
            return text
        slower = ", which is no faster" if self.result.time >= 1 else ""
        return f"{text}: {self.result.ms:.3g} ms instead of {self.result.plain_ms:.3g} in {self.plain}{slower}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": [self.kind, self.allowed],
            "all_low": self.all_low.loss,
            "result": self.result.loss,
            "kept": list(self.paths),
            "drifts": {block: one.loss for block, one in self.alone.items()},
            "images": self.images,
            "runs": self.runs,
            "where": self.where,
            "ms": self.result.ms,
            "plain_ms": self.result.plain_ms,
            "times": {block: [one.ms, one.plain_ms] for block, one in self.alone.items() if one.ms is not None},
            "verdict": self.verdict,
        }


def loss_on(kind: str, images: int) -> str:
    """What is measured, and on how many images, for people."""
    return f"{'AP' if kind == 'ap' else kind} on {number_of(images, 'image')}"


def blocks_of(model: onnx.ModelProto) -> list[str]:
    """Module paths that divide the layers of a graph into at most `MAX_BLOCKS` blocks, as fine as possible; in graph order.

    A graph without module paths in its node names has one block, "".
    """
    paths = [module_path("/" + node.name.strip("/")) for node in model.graph.node if node.op_type in GEMM.onnx]
    best: list[str] = []
    for depth in range(1, 12):
        blocks = list(dict.fromkeys(".".join(_path_parts(path)[:depth]) for path in paths))
        if best and len(blocks) > MAX_BLOCKS:
            break
        best = blocks
    # A block that contains another one would include its layers.
    return [b for b in best if b and not any(o != b and o.startswith(b + ".") for o in best)] or best


def _path_parts(path: str) -> list[str]:
    """ "decoder.layers.0.fc1" -> ["decoder", "layers.0", "fc1"]: a number is joined to the name before it."""
    parts: list[str] = []
    for part in path.split("."):
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        elif part:
            parts.append(part)
    return parts


def joined(model: onnx.ModelProto, blocks: Sequence[str], most: int) -> dict[str, tuple[str, ...]]:
    """Neighbouring blocks joined into at most `most`, each of about as many layers: name -> module paths."""
    if len(blocks) <= most:
        return {block: (block,) for block in blocks}
    layers = [node.name for node in model.graph.node if node.op_type in GEMM.onnx]
    counts = [sum(matches(name, (block,)) for name in layers) for block in blocks]
    groups: dict[int, list[str]] = {}
    for number, block in enumerate(blocks):
        middle = sum(counts[:number]) + counts[number] / 2
        groups.setdefault(int(most * middle / sum(counts)), []).append(block)
    return {one[0] if len(one) == 1 else f"{one[0]} to {one[-1]}": tuple(one) for one in groups.values()}


class Search:
    """Finds the smallest set of blocks that must not be in the low type; with times, the one of the fastest engine.

    Args:
        model: the FP32 graph.
        spec: of the graph.
        config: the caller's choices; the prompt of a model that takes one.
        images: calibration images.
        calibration: of the graph on these images.
        coco: annotation file and image folder, for a budget in AP.
        progress: called with a fraction and a text.
        prompted: of a model that takes a prompt, a session with its text encoder and tokenizer; not closed here.
        trial: builds and times what is measured; None: ONNX Runtime runs it on the CPU, and there are no times.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        spec: ModelSpec,
        config: PrecisionConfig,
        images: Sequence[ImageSource],
        calibration: Calibration,
        coco: tuple[Path, Path] | None = None,
        progress: Progress | None = None,
        prompted: PromptedSession | None = None,
        trial: Trial | None = None,
    ) -> None:
        self.model, self.spec, self.config, self.prompted, self.trial = model, spec, config, prompted, trial
        self.images, self.calibration, self.coco = images, calibration, coco
        self.kind, self.allowed = config.budget or ("drift", 0.0)
        self.counts = {"drift": len(images)}
        if coco is not None:
            self.counts["ap"] = len(load_dataset(coco[0], annotations=False).first(config.ap_images).images)
        self.progress = progress or (lambda fraction, text: None)
        self.modules = joined(model, blocks_of(model), MAX_BLOCKS if trial is None else MAX_TIMED_BLOCKS)
        self.blocks = list(self.modules)
        self.where = WITHOUT_TIMES if trial is None else trial.where
        self.warnings: list[str] = []
        self.key = self._digest() if config.state is not None else ""
        self.measurements = self._load()
        self.runs = 0
        self._closing = contextlib.ExitStack()
        self._plain: Session | None = None
        self._graphs: dict[tuple[str, str], Measured] = {}
        self._reference: list[Detections] | None = None
        self._reference_ap: float | None = None

    def run(self) -> SearchResult:
        """Raises:
        GateError: the budget is not met even with no block in the low type, or no engine within it has one.
        EngineError: the plain engine cannot be built or opened.
        """
        with self._closing:
            return self._run()

    def _run(self) -> SearchResult:
        low, plain, alone = self.config.target, self.config.target.plain, {}
        tried: dict[tuple[str, ...], Measured] = {}

        def fits(left_out: Sequence[str], what: str) -> bool:
            tried[tuple(left_out)] = found = self._measure(self.kind, left_out, what)
            return found.loss <= self.allowed

        def done(left_out: Sequence[str]) -> SearchResult:
            all_low, result = tried[()], tried[tuple(left_out)]
            found = (self.counts[self.kind], self.runs, self.where, plain, tuple(self.warnings))
            return SearchResult(self.kind, self.allowed, all_low, result, tuple(left_out), self._paths(left_out), alone, *found)

        if fits((), f"every block in {low}") and self.trial is None:
            return done(())
        for block in self.blocks:
            alone[block] = self._measure("drift", [b for b in self.blocks if b != block], f"{block} in {low}")
        if not fits(self.blocks, f"no block in {low}"):
            raise GateError(
                f"with no block in {low}, {self.kind} still changes by {tried[tuple(self.blocks)].loss:.4g} (allowed {self.allowed:g}); "
                f"choose a larger `budget`, or `precision={plain}`"
            )
        gains = {block: tried[tuple(self.blocks)].time - one.time for block, one in alone.items()}
        ranked = sorted(
            self.blocks, key=lambda block: _price(alone[block].loss, gains[block] if self.trial else 1.0), reverse=True
        )
        fewest, most = 0 if tried[()].loss <= self.allowed else 1, len(ranked)
        while fewest < most:  # the shortest front of the ranking that meets the budget
            middle = (fewest + most) // 2
            if fits(ranked[:middle], f"{middle} of {number_of(len(ranked), 'block')} left out"):
                most = middle
            else:
                fewest = middle + 1
        left_out = ranked[:fewest]
        fits(left_out, "the shortest front")
        for block in reversed(ranked):  # what the front does not need, and what gains nothing, in and out
            if block in left_out:
                other = [b for b in left_out if b != block]
            elif self.trial is not None and gains[block] <= 0:
                other = [b for b in ranked if b in left_out or b == block]
            else:
                continue
            fit = (other or self.trial) and fits(other, f"without {block}" if block in left_out else f"{block} left out")
            if fit and (self.trial is None or tried[tuple(other)].time < tried[tuple(left_out)].time):
                left_out = other
        if self.trial is not None:
            left_out = list(min((one for one in tried if tried[one].loss <= self.allowed), key=lambda one: tried[one].time))
            if set(left_out) == set(self.blocks):
                raise GateError(
                    f"of the engines within {self.kind}={self.allowed:g}, none with a block in {low} is faster than the one without: "
                    f"{done(left_out).verdict}; choose `precision={plain}`, or a larger `budget`"
                )
        return done(left_out)

    def _measure(self, kind: str, left_out: Sequence[str], what: str) -> Measured:
        """The graph with these blocks left out of the low type. kind: of the loss. what: for the caller to show."""
        name = f"{kind}:{','.join(sorted(left_out))}"
        if name not in self.measurements:
            number, most = len(self.measurements) + 1, 3 + 2 * len(self.blocks) + math.ceil(math.log2(len(self.blocks)))
            self.progress(
                min(number / most, 1.0), f"measurement {number} of at most {most}: {what}, {loss_on(kind, self.counts[kind])}"
            )
            typed = self._typed(replace(self.config.without_search(), min_fraction=0.0), left_out)
            # Blocks without a layer that is quantized change nothing.
            same = kind, hashlib.sha256(typed.SerializeToString()).hexdigest()
            if same not in self._graphs:
                self._graphs[same] = self._run_graph(kind, typed, what)
                self.runs += 1
            self.measurements[name] = self._graphs[same]
            self._save()
        return self.measurements[name]

    def _run_graph(self, kind: str, typed: onnx.ModelProto, what: str) -> Measured:
        times: tuple[float, ...] = ()
        if self.trial is not None and self._plain is None:
            self._plain = self._closing.enter_context(contextlib.closing(self._open(self._typed(self.config.plain()))))
        try:
            with contextlib.closing(self._open(typed)) as session:
                if self.trial is not None and self._plain is not None:
                    times = self.trial.times(self._with_text_encoder(session), self._with_text_encoder(self._plain))
                return Measured(self._drift(session) if kind == "drift" else self._ap_loss(session), *times)
        except EngineError as error:
            self.warnings.append(f"the engine with {what} could not be built or opened, so it is not the result: {error}")
        except SessionError:  # NaN in the outputs: no detections
            pass
        return Measured(MISSED_DRIFT if kind == "drift" else 100.0)

    def _paths(self, blocks: Sequence[str]) -> tuple[str, ...]:
        return tuple(path for block in blocks for path in self.modules[block])

    def _typed(self, config: PrecisionConfig, left_out: Sequence[str] = ()) -> onnx.ModelProto:
        paths, calibration = self._paths(left_out), self.calibration
        return apply_precision(self.model, self.spec, config, self.images, calibration=calibration, left_out=paths)[0]

    def _open(self, typed: onnx.ModelProto) -> Session:
        if self.trial is None:
            return OnnxSession(runnable(emulate(typed)).SerializeToString(), self.spec)
        with files.scratch() as folder:
            path = folder / MODEL
            graph.save(graph.with_spec(typed, self.spec), path)
            return self.trial.open(path)

    def _detect(self, session: Session) -> list[Detections]:
        bound = self._with_text_encoder(session)
        if bound.info.text is not None:
            bound = bound.bind(self.config.prompt or "")
        return list(Detector(bound, threshold=0.0, batch_size=1).stream(self.images))

    def _with_text_encoder(self, session: Session) -> Session:
        """The detector, with its text encoder if it takes a prompt."""
        return session if self.prompted is None else self.prompted.with_sessions(session, self.prompted.text_encoder)

    def _drift(self, session: Session) -> float:
        if self._reference is None:
            reference = OnnxSession(runnable(self.model).SerializeToString(), self.spec)
            try:
                self._reference = self._detect(reference)
            finally:
                reference.close()
        pairs = zip(self._reference, self._detect(session), strict=True)
        return float(np.mean([drift(a, b) for a, b in pairs]))

    def _ap_loss(self, session: Session) -> float:
        if self._reference_ap is None:
            reference = OnnxSession(runnable(self.model).SerializeToString(), self.spec)
            try:
                found = self._ap(reference)
            finally:
                reference.close()
            if not found:  # nothing could lower it, so that every graph would be within the budget
                why = (
                    "every annotated object is a crowd or difficult"
                    if found is None
                    else "the FP32 graph finds none of the objects"
                )
                raise GraphError(
                    f"`budget=ap={self.allowed:g}` cannot be measured on '{self.coco[0]}': {why}; give annotated images that the model "
                    "was trained for to `calibration`, or `budget=drift=0.01`"
                )
            self._reference_ap = found
        return abs(self._reference_ap - (self._ap(session) or 0.0)) * 100.0

    def _ap(self, session: Session) -> float | None:
        assert self.coco is not None
        return evaluate_coco(self._with_text_encoder(session), *self.coco, limit=self.config.ap_images).metrics["AP"]

    def _digest(self) -> str:
        digest = hashlib.sha256(self.model.SerializeToString())
        choices = {k: v for k, v in self.config.to_dict().items() if k not in ("state", "budget", "min_fraction")}
        digest.update(json.dumps(choices).encode())
        for image in self.images:
            digest.update(load_image(image).tobytes())
        if self.coco is not None:
            digest.update(load_dataset(self.coco[0]).digest.encode())
        return digest.hexdigest()

    def _load(self) -> dict[str, Measured]:
        path = self.config.state
        if path is None or not path.is_file():
            return {}
        try:
            data = files.read_json(path, "resume file", GraphError, advice="give another `state`, or delete it")
            if not isinstance(data, dict) or not {"schema", "key", "measured"} <= data.keys():  # it would be replaced
                raise GraphError(f"'{path}' is no resume file of a search; give another `state`")
            if data["schema"] != _SCHEMA or data["key"] != self.key:
                self.warnings.append(
                    f"'{path}' had measurements of another model, other images or choices, and now has those of this search"
                )
                return {}
            if data["where"] != self.where:
                self.warnings.append(
                    f"the measurements in '{path}' are of {data['where']}; they are made again with {self.where}"
                )
                return {}
            return {str(name): Measured(**one) for name, one in data["measured"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphError(f"the resume file '{path}' is damaged ({error!r}); give another `state`, or delete it") from None

    def _save(self) -> None:
        if self.config.state is not None:
            measured = {name: asdict(one) for name, one in self.measurements.items()}
            data = {"schema": _SCHEMA, "key": self.key, "where": self.where, "measured": measured}
            files.write_text(self.config.state, json.dumps(data, indent=1) + "\n")


def _price(drift: float, gain: float) -> tuple[float, float]:
    """What a block in the low type costs for what it gains, to sort by; infinite where it gains nothing."""
    return (drift / gain if gain > 0 else math.inf, drift)


def drift(reference: Detections, candidate: Detections) -> float:
    """Change of the best detections of one image: mean of |score difference| + (1 - IoU); 2 for a missed one."""
    order = np.argsort(-reference.scores, kind="stable")[:_COMPARED_DETECTIONS]
    if not len(order):
        return 0.0
    total, matched = 0.0, set()
    overlaps = box_iou(reference.boxes_xyxy[order], candidate.boxes_xyxy) if len(candidate) else np.zeros((len(order), 0))
    for row, index in enumerate(order):
        costs = np.where(
            candidate.class_ids == reference.class_ids[index],
            np.abs(candidate.scores - reference.scores[index]) + 1.0 - overlaps[row],
            MISSED_DRIFT,
        )
        for column in matched:
            costs[column] = MISSED_DRIFT
        best = int(np.argmin(costs)) if len(costs) else -1
        if best >= 0 and costs[best] < MISSED_DRIFT:
            matched.add(best)
        total += float(costs[best]) if best >= 0 else MISSED_DRIFT
    return total / len(order)


def plot(result: SearchResult) -> str:
    """An SVG of the drift of every block, with those left out marked; with times, the milliseconds of its engine beside the plain one's."""
    rows = sorted(result.alone.items(), key=lambda item: -item[1].loss)
    top = max((one.loss for _, one in rows), default=0.0) or 1.0
    height = 60 + 18 * len(rows)
    title = f"drift of each block alone in the low type; left out: {len(result.left_out)} of {len(rows)}"
    if result.result.ms is not None:
        title += f"; {result.result.ms:.3g} ms instead of {result.result.plain_ms:.3g} in {result.plain}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="1000" height="{height}" fill="white"/><text x="10" y="24" font-size="15">{title}</text>',
    ]
    for number, (block, one) in enumerate(rows):
        y, width = 44 + 18 * number, 460 * one.loss / top
        colour = "#c0392b" if block in result.left_out else "#2c7fb8"
        text = f"{one.loss:.2g}" + (f", {one.ms:.4g} ms instead of {one.plain_ms:.4g}" if one.ms is not None else "")
        parts.append(f'<text x="330" y="{y + 11}" text-anchor="end">{block or "(whole graph)"}</text>')
        parts.append(f'<rect x="340" y="{y}" width="{width:.1f}" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{346 + width:.1f}" y="{y + 11}">{text}</text>')
    return "\n".join([*parts, "</svg>\n"])
