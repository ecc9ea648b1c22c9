"""`--precision auto`: rank the blocks of a model by their sensitivity to the low type, and keep the fewest in FP32.

A block is a module path, such as "decoder.layers.2". Every measurement is written to a resume file at once.
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
from ..graph.emulate_low_precision import emulate
from ..graph.msda_plugin import runnable
from ..graph.names import module_path
from ..graph.operators import GEMM
from ..spec import ModelSpec
from ..system import Progress
from .apply import Calibration, apply_precision
from .config import PrecisionConfig

MAX_BLOCKS = 40
_COMPARED_DETECTIONS = 10  # per image
_SCHEMA = 1
MISSED_DRIFT = 2.0  # drift of a detection without a match


@dataclass(slots=True)
class SearchResult:
    """Result of a search.

    kind, allowed: the budget. loss: of the result, in the unit of the budget. all_low: loss with every block in the low type.
    fp32_blocks: blocks that stay FP32, the most sensitive first. drifts: block -> drift with this block alone in the low type.
    """

    kind: str
    allowed: float
    all_low: float
    loss: float
    fp32_blocks: tuple[str, ...]
    drifts: Mapping[str, float] = field(default_factory=dict)
    runs: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "budget": [self.kind, self.allowed],
            "all_low": self.all_low,
            "result": self.loss,
            "kept": list(self.fp32_blocks),
            "drifts": dict(self.drifts),
            "runs": self.runs,
        }


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


class Search:
    """Finds the smallest set of blocks that must not be in the low type.

    Args:
        model: the FP32 graph.
        spec: of the graph.
        config: the caller's choices; the prompt of a model that takes one.
        images: calibration images.
        calibration: of the graph on these images.
        coco: annotation file and image folder, for a budget in AP.
        progress: called with a fraction and a text.
        prompted: of a model that takes a prompt, a session with its text encoder and tokenizer; not closed here.
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
            raise GraphError("`budget=ap=...` needs annotations: give a COCO file to `calibration`, or `budget=drift=0.01`")
        self.progress = progress or (lambda fraction, text: None)
        self.blocks = blocks_of(model)
        self.key = self._digest()
        self.measurements = self._load()
        self.runs = 0
        self._reference: list[Detections] | None = None
        self._reference_ap: float | None = None

    def run(self) -> SearchResult:
        """Raises:
        GateError: the budget is not met even with every block in FP32.
        """
        all_low = self._loss(())
        if all_low <= self.allowed:
            return SearchResult(self.kind, self.allowed, all_low, all_low, (), {}, self.runs)
        drifts = {}
        for number, block in enumerate(self.blocks):
            self.progress(number / len(self.blocks), f"block {block}")
            drifts[block] = self._measure("drift", tuple(b for b in self.blocks if b != block))
        ranked = sorted(self.blocks, key=lambda b: -drifts[b])
        low, high = 1, len(ranked)
        loss = self._loss(tuple(ranked))
        if loss > self.allowed:
            raise GateError(
                f"with every block in FP32, {self.kind} still changes by {loss:.4g} (allowed {self.allowed:g}); "
                f"choose a larger `budget`, or `precision=fp32`"
            )
        while low < high:  # the shortest prefix of the ranking that meets the budget
            middle = (low + high) // 2
            self.progress(None, f"{middle} of {len(ranked)} blocks in FP32")
            if self._loss(tuple(ranked[:middle])) <= self.allowed:
                high = middle
            else:
                low = middle + 1
        fp32_blocks = ranked[:low]
        for block in reversed(ranked[:low]):  # drop blocks of the prefix that are not needed
            fewer = tuple(b for b in fp32_blocks if b != block)
            self.progress(None, f"without {block}")
            if fewer and self._loss(fewer) <= self.allowed:
                fp32_blocks = list(fewer)
        loss = self._loss(tuple(fp32_blocks))
        return SearchResult(self.kind, self.allowed, all_low, loss, tuple(fp32_blocks), drifts, self.runs)

    def _loss(self, fp32_blocks: tuple[str, ...]) -> float:
        return self._measure(self.kind, fp32_blocks)

    def _measure(self, kind: str, fp32_blocks: tuple[str, ...]) -> float:
        """Drift, or loss of AP in points of 100, with these blocks in FP32."""
        name = f"{kind}:{','.join(sorted(fp32_blocks))}"
        if name not in self.measurements:
            session = OnnxSession(self._candidate(fp32_blocks), self.spec)
            try:
                self.measurements[name] = self._drift(session) if kind == "drift" else self._ap_loss(session)
            except SessionError:  # NaN in the outputs: no detections
                self.measurements[name] = MISSED_DRIFT if kind == "drift" else 100.0
            finally:
                session.close()
            self.runs += 1
            self._save()
        return self.measurements[name]

    def _candidate(self, fp32_blocks: tuple[str, ...]) -> bytes:
        low = self.config.without_search()
        config = replace(low, min_fraction=0.0, keep_fp32=(*low.keep_fp32, *fp32_blocks))
        typed, _ = apply_precision(self.model, self.spec, config, self.images, calibration=self.calibration)
        return runnable(emulate(typed)).SerializeToString()

    def _detect(self, session: OnnxSession) -> list[Detections]:
        bound = self._with_text_encoder(session)
        if bound.info.text is not None:
            bound = bound.bind(self.config.prompt or "")
        return list(Detector(bound, threshold=0.0, batch_size=1).stream(self.images))

    def _with_text_encoder(self, session: OnnxSession) -> Session:
        """The detector, with its text encoder if it takes a prompt."""
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

    def _ap_loss(self, session: OnnxSession) -> float:
        assert self.coco is not None
        if self._reference_ap is None:
            reference = OnnxSession(runnable(self.model).SerializeToString(), self.spec)
            try:
                self._reference_ap = evaluate_coco(self._with_text_encoder(reference), *self.coco).metrics["AP"] or 0.0
            finally:
                reference.close()
        ap = evaluate_coco(self._with_text_encoder(session), *self.coco).metrics["AP"] or 0.0
        return abs(self._reference_ap - ap) * 100.0

    def _digest(self) -> str:
        digest = hashlib.sha256(self.model.SerializeToString())
        choices = {k: v for k, v in self.config.to_dict().items() if k not in ("state", "budget", "min_fraction")}
        digest.update(json.dumps([choices, [str(i) if isinstance(i, (str, Path)) else "" for i in self.images]]).encode())
        return digest.hexdigest()

    def _load(self) -> dict[str, float]:
        path = self.config.state
        if path is None or not path.is_file():
            return {}
        try:
            data = files.read_json(path, "resume file", GraphError, advice="delete it, or give another `state`")
            if data["schema"] != _SCHEMA or data["key"] != self.key:
                return {}  # of another model, images or choices
            return {str(name): float(value) for name, value in data["measured"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise GraphError(f"the resume file '{path}' is damaged ({error!r}); delete it, or give another `state`") from None

    def _save(self) -> None:
        if self.config.state is not None:
            data = {"schema": _SCHEMA, "key": self.key, "measured": self.measurements}
            files.write_text(self.config.state, json.dumps(data, indent=1) + "\n")


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
    """An SVG of the drift of every block, with those in FP32 marked."""
    rows = sorted(result.drifts.items(), key=lambda item: -item[1])
    top = max((value for _, value in rows), default=0.0) or 1.0
    height = 60 + 18 * len(rows)
    title = f"drift of each block alone in the low type; in FP32: {len(result.fp32_blocks)} of {len(rows)}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="900" height="{height}" fill="white"/><text x="10" y="24" font-size="15">{title}</text>',
    ]
    for number, (block, value) in enumerate(rows):
        y = 44 + 18 * number
        colour = "#c0392b" if block in result.fp32_blocks else "#2c7fb8"
        parts.append(f'<text x="330" y="{y + 11}" text-anchor="end">{block or "(whole graph)"}</text>')
        parts.append(f'<rect x="340" y="{y}" width="{460 * value / top:.1f}" height="13" fill="{colour}"/>')
        parts.append(f'<text x="{346 + 460 * value / top:.1f}" y="{y + 11}">{value:.2g}</text>')
    return "\n".join([*parts, "</svg>\n"])
