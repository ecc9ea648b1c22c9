"""`--precision auto`: rank the blocks of a model by what the low type does to its detections, and keep the fewest.

A block is a module path, such as "decoder.layers.2". Every measurement is written to a state file at once, so
that a search that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from .. import files
from ..backends.base import Session
from ..backends.onnxruntime.session import OnnxSession
from ..backends.prompted import PromptedSession
from ..data.images import ImageSource
from ..detections import Detections, box_iou
from ..detector import Detector
from ..errors import GateError, GraphError, SessionError
from ..evaluation.coco import evaluate_coco
from ..graph.emulate_low_precision import rounded
from ..graph.msda_plugin import runnable
from ..graph.names import module_path
from ..graph.operators import GEMM
from ..spec import ModelSpec
from ..system import Progress
from .apply import Calibration, apply_precision
from .config import PrecisionConfig

_MAX_BLOCKS = 40
_COMPARED = 10  # best detections of an image
_SCHEMA = 1
LOST = 2.0  # drift of a detection that is not there any more


@dataclass(slots=True)
class SearchResult:
    """drifts: block -> drift with this block alone in the low type. kept: blocks that stay out of it, the most
    sensitive first. figure: the budget's own figure of the result; start: with every block in the low type."""

    kind: str
    allowed: float
    start: float
    figure: float
    kept: tuple[str, ...]
    drifts: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": [self.kind, self.allowed],
            "all_low": self.start,
            "result": self.figure,
            "kept": list(self.kept),
            "drifts": dict(self.drifts),
            "runs": self.runs,
        }


def blocks_of(model: onnx.ModelProto, limit: int = _MAX_BLOCKS) -> list[str]:
    """Module paths that part the products of a graph, at most `limit`, as fine as that allows; in graph order.

    A graph without module paths in its node names is one block, "".
    """
    paths = [module_path("/" + node.name.strip("/")) for node in model.graph.node if node.op_type in GEMM.onnx]
    best: list[str] = []
    for depth in range(1, 12):
        cut = list(dict.fromkeys(".".join(_parts(path)[:depth]) for path in paths))
        if best and len(cut) > limit:
            break
        best = cut
    # A block that contains another one would move it too.
    return [b for b in best if b and not any(o != b and o.startswith(b + ".") for o in best)] or best


def _parts(path: str) -> list[str]:
    """ "decoder.layers.0.fc1" -> ["decoder", "layers.0", "fc1"]: a number belongs to the list that it counts."""
    parts: list[str] = []
    for part in path.split("."):
        if part.isdecimal() and parts:
            parts[-1] += f".{part}"
        elif part:
            parts.append(part)
    return parts


class Search:
    """Finds the smallest set of blocks that must not be in the low type.

    model, spec: the FP32 graph. coco: annotation file and image folder, for a budget in AP. state: JSON file.
    prompted: of a model that takes a prompt, a session that brings its text encoder and tokenizer; what the pictures are asked
    for is the prompt of `config`. It stays open.
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
    ) -> None:
        self.model, self.spec, self.config, self.prompted = model, spec, config, prompted
        self.images, self.calibration, self.coco = images, calibration, coco
        self.kind, self.allowed = config.budget or ("drift", 0.0)
        if self.kind == "ap" and coco is None:
            raise GraphError("--budget ap=... needs the truth: give a COCO file to --calibration, or --budget drift=0.01")
        self.say = progress or (lambda fraction, text: None)
        self.blocks = blocks_of(model)
        self.key = self._digest()
        self.known = self._load()
        self.runs = 0
        self._reference: list[Detections] | None = None
        self._reference_ap: float | None = None

    def run(self) -> SearchResult:
        """Raises:
        GateError: even with every block kept the budget is not met.
        """
        start = self._figure(())
        if start <= self.allowed:
            return SearchResult(self.kind, self.allowed, start, start, (), {}, self.runs)
        drifts = {}
        for number, block in enumerate(self.blocks):
            self.say(number / len(self.blocks), f"block {block}")
            drifts[block] = self._measure("drift", tuple(b for b in self.blocks if b != block))
        ranked = sorted(self.blocks, key=lambda b: -drifts[b])
        low, high = 1, len(ranked)
        figure = self._figure(tuple(ranked))
        if figure > self.allowed:
            raise GateError(
                f"with every block kept, {self.kind} still changes by {figure:.4g} (allowed {self.allowed:g}); "
                f"choose a larger --budget, or --precision fp32"
            )
        while low < high:  # the shortest front of the ranking that is enough
            middle = (low + high) // 2
            self.say(None, f"keeping {middle} of {len(ranked)} blocks")
            if self._figure(tuple(ranked[:middle])) <= self.allowed:
                high = middle
            else:
                low = middle + 1
        kept = ranked[:low]
        for block in reversed(ranked[:low]):  # a block of the front that is not needed after all
            fewer = tuple(b for b in kept if b != block)
            self.say(None, f"without {block}")
            if fewer and self._figure(fewer) <= self.allowed:
                kept = list(fewer)
        figure = self._figure(tuple(kept))
        return SearchResult(self.kind, self.allowed, start, figure, tuple(kept), drifts, self.runs)

    def _figure(self, kept: tuple[str, ...]) -> float:
        return self._measure(self.kind, kept)

    def _measure(self, kind: str, kept: tuple[str, ...]) -> float:
        """Drift, or AP lost in points of 100, with these blocks out of the low type."""
        name = f"{kind}:{','.join(sorted(kept))}"
        if name not in self.known:
            session = OnnxSession(self._candidate(kept), self.spec)
            try:
                self.known[name] = self._drift(session) if kind == "drift" else self._lost_ap(session)
            except SessionError:  # NaN in the outputs: nothing is found at all
                self.known[name] = LOST if kind == "drift" else 100.0
            finally:
                session.close()
            self.runs += 1
            self._save()
        return self.known[name]

    def _candidate(self, kept: tuple[str, ...]) -> bytes:
        config = replace(
            self.config,
            precision=self.config.low,
            budget=None,
            min_share=0.0,
            keep_fp32=(*self.config.keep_fp32, *kept),
        )
        typed, _ = apply_precision(self.model, self.spec, config, self.images, known=self.calibration)
        return runnable(rounded(typed)).SerializeToString()

    def _detect(self, session: OnnxSession) -> list[Detections]:
        bound = self._asked(session)
        if bound.info.text is not None:
            bound = bound.bind(self.config.prompt or "")
        return list(Detector(bound, threshold=0.0, batch_size=1).stream(self.images))

    def _asked(self, session: OnnxSession) -> Session:
        """The detector with the text part that belongs to it."""
        return session if self.prompted is None else self.prompted.with_sessions(session, self.prompted.text_encoder)

    def _drift(self, session: OnnxSession) -> float:
        if self._reference is None:
            reference = OnnxSession(runnable(self.model).SerializeToString(), self.spec)
            try:
                self._reference = self._detect(reference)
            finally:
                reference.close()
        pairs = zip(self._reference, self._detect(session), strict=True)
        return float(np.mean([drift(a, b) for a, b in pairs]))

    def _lost_ap(self, session: OnnxSession) -> float:
        assert self.coco is not None
        if self._reference_ap is None:
            reference = OnnxSession(runnable(self.model).SerializeToString(), self.spec)
            try:
                self._reference_ap = evaluate_coco(self._asked(reference), *self.coco).metrics["AP"] or 0.0
            finally:
                reference.close()
        ap = evaluate_coco(self._asked(session), *self.coco).metrics["AP"] or 0.0
        return abs(self._reference_ap - ap) * 100.0

    def _digest(self) -> str:
        digest = hashlib.sha256(self.model.SerializeToString())
        choices = {k: v for k, v in self.config.to_dict().items() if k not in ("state", "budget", "min_share")}
        digest.update(json.dumps([choices, [str(i) if isinstance(i, (str, Path)) else "" for i in self.images]]).encode())
        return digest.hexdigest()

    def _load(self) -> dict[str, float]:
        path = self.config.state
        if path is None or not path.is_file():
            return {}
        try:
            data = json.loads(path.read_text("utf-8"))
            if data["schema"] != _SCHEMA or data["key"] != self.key:
                return {}  # another model, other images or choices: measured anew
            return {str(name): float(value) for name, value in data["measured"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphError(f"the state file '{path}' is damaged ({error!r}); delete it, or give another --state") from None

    def _save(self) -> None:
        if self.config.state is not None:
            data = {"schema": _SCHEMA, "key": self.key, "measured": self.known}
            files.write_text(self.config.state, json.dumps(data, indent=1) + "\n")


def drift(reference: Detections, candidate: Detections) -> float:
    """How far the best detections of one image moved: mean of |score difference| + (1 - IoU); 2 for a lost one."""
    order = np.argsort(-reference.scores, kind="stable")[:_COMPARED]
    if not len(order):
        return 0.0
    total, used = 0.0, set()
    overlaps = box_iou(reference.boxes_xyxy[order], candidate.boxes_xyxy) if len(candidate) else np.zeros((len(order), 0))
    for row, index in enumerate(order):
        costs = np.where(
            candidate.class_ids == reference.class_ids[index],
            np.abs(candidate.scores - reference.scores[index]) + 1.0 - overlaps[row],
            2.0,
        )
        for column in used:
            costs[column] = 2.0
        best = int(np.argmin(costs)) if len(costs) else -1
        if best >= 0 and costs[best] < 2.0:
            used.add(best)
        total += float(costs[best]) if best >= 0 else 2.0
    return total / len(order)


def plot(result: SearchResult) -> str:
    """An SVG of the drift of every block, kept ones marked."""
    rows = sorted(result.drifts.items(), key=lambda item: -item[1])
    top = max((value for _, value in rows), default=0.0) or 1.0
    height = 60 + 18 * len(rows)
    title = f"drift of each block alone in the low type; kept out: {len(result.kept)} of {len(rows)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="900" height="{height}" fill="white"/><text x="10" y="24" font-size="15">{title}</text>',
    ]
    for number, (block, value) in enumerate(rows):
        y = 44 + 18 * number
        colour = "#c0392b" if block in result.kept else "#2c7fb8"
        parts.append(f'<text x="330" y="{y + 11}" text-anchor="end">{block or "(whole graph)"}</text>')
        parts.append(f'<rect x="340" y="{y}" width="{460 * value / top:.1f}" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{346 + 460 * value / top:.1f}" y="{y + 11}">{value:.2g}</text>')
    return "\n".join([*parts, "</svg>\n"])
