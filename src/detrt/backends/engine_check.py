"""Run an engine beside the ONNX graph that it was built from, before anybody relies on it.

TensorRT versions exist that compile a graph wrongly without an error, so a build alone proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..data.matching import MISMATCHED_OF_SHAPE, Gate, few, gate_for, match, mismatched, within
from ..data.postprocess import decode
from ..data.preprocess import PreparedBatch, SizeHW, preprocess
from ..errors import PromptError, SessionError, number_of
from ..spec import PIXEL_VALUES, ModelSpec
from .base import Choices, Feeds, Outputs, Session
from .compare import can_follow, relative_error, selection_error
from .prompted import BoundSession, PromptedSession, detector_of

# What a model with a prompt is asked for; the drawn scenes hold such things.
PROMPT = "a circle. a square. a star."
# An engine takes prompts of any length in its profile, and may be wrong at some.
SHORT_PROMPT = "a circle."
# Images at the usual shape and at each other one, after the first batch of each as many as the time allows.
SCENES, OTHER_SCENES, SECONDS = 16, 4, 60.0


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One shape that was run on both sides.

    Attributes:
        batch, height, width: shape of `pixel_values`.
        prompt: what the model was asked for, where that is not `PROMPT`; else "".
        compared, missing, extra: detections of the graph, those that the engine lacks, those that only the engine has.
        beyond: matched detections whose box, score or mask is beyond its tolerance.
        box_px, score: largest differences of matched detections, boxes in pixels of the original image.
        mask_iou: lowest IoU of the masks of a matched detection; None of models without masks.
        error: largest difference of an output relative to its largest value; large where two queries change places.
        selection: by how much the scores of the queries that the engine selected are below the best ones, relative to the largest. The
            graph computed with these queries, too. None: the engine does not return its selections, or the graph cannot take them.
        text: why the engine did not run, or "".
    """

    batch: int
    height: int
    width: int
    compared: int = 0
    missing: int = 0
    extra: int = 0
    box_px: float = 0.0
    score: float = 0.0
    error: float = 0.0
    text: str = ""
    mask_iou: float | None = None
    prompt: str = ""
    beyond: int = 0
    selection: float | None = None

    @property
    def where(self) -> str:
        """The shape in words, with the length of the prompt."""
        asked = f", a prompt of {number_of(len(self.prompt.split()), 'word')}" if self.prompt else ""
        return f"batch {self.batch}, {self.height}x{self.width}{asked}"

    def passes(self, gate: Gate) -> bool:
        """Whether the differences are within the tolerances."""
        if self.text or (self.selection or 0.0) > gate.tensor:
            return False
        if self.error <= gate.tensor:
            return True
        return few(mismatched(self), self.compared, MISMATCHED_OF_SHAPE) if gate.mismatched else within(self, gate)

    def __add__(self, other: EngineRow) -> EngineRow:
        """Both rows of one shape, with other images."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in ("compared", "missing", "extra", "beyond")}
        worst = {name: max(getattr(self, name), getattr(other, name)) for name in ("box_px", "score", "error")}
        overlaps = [one.mask_iou for one in (self, other) if one.mask_iou is not None]
        scores = [one.selection for one in (self, other) if one.selection is not None]
        ends = {"mask_iou": min(overlaps, default=None), "selection": max(scores, default=None)}
        return replace(self, **sums, **worst, **ends, text=self.text or other.text)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """The comparison of one engine with its graph. rows: one for each shape. gpu_name: of the GPU that ran the engine."""

    rows: tuple[EngineRow, ...]
    gate: Gate
    gpu_name: str = ""

    @property
    def passed(self) -> bool:
        if not all(row.passes(self.gate) for row in self.rows):
            return False
        judged = [row for row in self.rows if row.error > self.gate.tensor]
        return not self.gate.mismatched or few(
            sum(map(mismatched, judged)), sum(row.compared for row in judged), self.gate.mismatched
        )

    @property
    def ran(self) -> bool:
        """Whether the engine gave outputs that can be read at every shape: no scores are near enough to excuse NaN."""
        return not any(row.text for row in self.rows)

    @property
    def on_same_queries(self) -> bool:
        """Whether nearly equal scores, which change places with any rounding, had no part in the comparison."""
        return all(row.selection is not None for row in self.rows)

    @property
    def verdict(self) -> str:
        """The worst differences in a few words, and the shape that is worst where others are right."""
        if failed := [row for row in self.rows if row.text]:
            return f"{failed[0].where}: {failed[0].text}"
        compared, missing = sum(row.compared for row in self.rows), sum(row.missing for row in self.rows)
        box, score = max(row.box_px for row in self.rows), max(row.score for row in self.rows)
        where = f", {beyond} of them beyond the tolerance" if (beyond := sum(row.beyond for row in self.rows)) else ""
        wrong = [row for row in self.rows if not row.passes(self.gate)]
        if 0 < len(wrong) < len(self.rows):
            worst = max(wrong, key=lambda row: mismatched(row) / max(row.compared, 1))
            found = f"{max(worst.compared - mismatched(worst), 0)} of {worst.compared}"
            where += f", at {worst.where}{',' if worst.prompt else ''} {found}"
        shapes = {(row.batch, row.height, row.width) for row in self.rows}
        prompts = {row.prompt for row in self.rows}
        count = number_of(len(shapes), "shape") + (f", {number_of(len(prompts), 'prompt')}" if len(prompts) > 1 else "")
        if self.on_same_queries:
            count += f"; on the queries of the engine, {max(row.error for row in self.rows):.1e} of the largest output"
            below = max(row.selection or 0.0 for row in self.rows)
            count += f", and their scores {below:.1e} of the largest below the best" if below > self.gate.tensor else ""
        return f"{compared - missing} of {number_of(compared, 'detection')} matched{where}, box {box:.2g} px, score {score:.1e}, {count}"

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, "ran": self.ran, "gpu": self.gpu_name, "rows": [asdict(row) for row in self.rows]}


def compare_sessions(
    reference: Session,
    candidate: Session,
    precision: str,
    *,
    shapes: Sequence[tuple[int, SizeHW]] | None = None,
    seconds: float = SECONDS,
    progress: Callable[[float, str], None] | None = None,
) -> EngineCheck:
    """Compare an opened engine with its opened graph on drawn scenes: up to `SCENES` at the usual shape, fewer at others.

    A model that takes a prompt looks for `PROMPT`, and at the first shape for a shorter and a longer prompt as well.

    Args:
        reference: the graph; of an engine that returns its selections, it computes with these.
        candidate: the engine.
        precision: of the graph; chooses the tolerances.
        shapes: (batch size, (height, width)) to run; None: `shapes_of` the engine.
        seconds: after so many no further scenes are run.
        progress: called with (fraction, text).
    """
    start = time.monotonic()
    gate = gate_for(precision)
    shapes = shapes_of(candidate) if shapes is None else shapes
    asked = [(PROMPT, shape) for shape in shapes]
    prompted = reference.info.text is not None
    if prompted:
        asked += [(prompt, shapes[0]) for prompt in dict.fromkeys((SHORT_PROMPT, _longest_prompt(reference)))]
    bound = {prompt: _bound(reference, candidate, prompt) for prompt, _ in asked} if prompted else {}
    usual = min(1, len(shapes) - 1)  # behind the least one, see `shapes_of`
    plan = [(index, 0) for index in range(len(asked))]
    for index, (_, (batch, _)) in enumerate(asked):
        plan += [(index, first) for first in range(batch, SCENES if index == usual else OTHER_SCENES, batch)]
    rows: list[EngineRow] = []
    for number, (index, first) in enumerate(plan):
        # In FP32 one wrong detection is enough.
        failed = any(row.text or not (gate.mismatched or row.passes(gate)) for row in rows)
        if first and (failed or time.monotonic() - start > seconds):
            break
        prompt, (batch, size_hw) = asked[index]
        if progress:
            progress(number / len(plan), f"batch {batch}, {size_hw[0]}x{size_hw[1]}")
        row = _compare(*bound.get(prompt, (reference, candidate)), batch, size_hw, gate, first)
        if first:
            rows[index] += row
        else:
            rows.append(row if prompt == PROMPT else replace(row, prompt=prompt))
    return EngineCheck(tuple(rows), gate, detector_of(candidate).info.gpu_name)


def _bound(reference: Session, candidate: Session, prompt: str) -> tuple[Session, Session]:
    """Both with a prompt. A graph that takes the engine's selections runs in the chunks of the engine."""
    engine = candidate.bind(prompt)
    if not can_follow(detector_of(reference), detector_of(candidate)):
        return reference.bind(prompt), engine
    assert isinstance(reference, PromptedSession) and isinstance(engine, BoundSession)
    return BoundSession(reference, engine.prompts), engine


def _longest_prompt(session: Session) -> str:
    """The longest of a few prompts that the model takes: a small tokenizer needs more tokens for the same words."""
    from ..data.scenes.phrases import COLOR_PHRASES

    for count in (20, 12, 8, 5):
        prompt = " ".join(f"{phrase.text('a')}." for phrase in COLOR_PHRASES[:: len(COLOR_PHRASES) // count][:count])
        try:
            session.bind(prompt)
        except PromptError:
            continue
        return prompt
    return SHORT_PROMPT


def shapes_of(session: Session) -> list[tuple[int, SizeHW]]:
    """(batch size, (height, width)) to run: least, usual and largest batch at the usual size, then the other sizes."""
    low, usual, high = ((shape[0], (shape[2], shape[3])) for shape in session.info.profile[PIXEL_VALUES])
    shapes = [(low[0], usual[1]), usual, (high[0], usual[1]), (low[0], low[1]), (low[0], high[1])]
    return list(dict.fromkeys(shapes))


def drawn_batch(spec: ModelSpec, batch: int, size_hw: SizeHW, first: int = 0) -> PreparedBatch:
    """A batch of drawn scenes of a size, from number `first` on."""
    # Not with the module, which every opening of a bundle loads: Pillow's drawing takes a megabyte.
    from ..data.scenes.scene import draw_images

    return preprocess(draw_images(batch, size_hw, first), spec, size_hw=size_hw if spec.input.dynamic else None)


def _compare(reference: Session, candidate: Session, batch: int, size_hw: SizeHW, gate: Gate, first: int = 0) -> EngineRow:
    """One batch of scenes, from number `first` on."""
    where = (batch, *size_hw)
    given = drawn_batch(candidate.spec, batch, size_hw, first)
    follow = can_follow(detector_of(reference), detector_of(candidate))
    try:
        told = _run(
            candidate, given.feeds, lambda model, feeds, chunk: model.selections(feeds) if follow else (model.run(feeds), None)
        )
        got = _merged(candidate, [outputs for outputs, _ in told], batch)
        after = decode(got, candidate.spec, given.original_sizes_hw, threshold=0.0)  # NaN is refused here
        # Of an engine that selected what does not exist, the graph fails.
        wanted = _run_in_parts(reference, given.feeds, batch, [choices for _, choices in told if choices])
        want = _merged(reference, wanted, batch)
        before = decode(want, candidate.spec, given.original_sizes_hw, threshold=0.0)
    except SessionError as error:
        return EngineRow(*where, text=str(error))
    found = [match(a, b, gate) for a, b in zip(before, after, strict=True)]
    return EngineRow(
        *where,
        compared=sum(one.compared for one in found),
        missing=sum(one.missing for one in found),
        extra=sum(one.extra for one in found),
        box_px=max(one.box_px for one in found),
        score=max(one.score for one in found),
        mask_iou=min((one.mask_iou for one in found if one.mask_iou is not None), default=None),
        beyond=sum(one.beyond for one in found),
        error=max(relative_error(want[name], got[name], name) for name in want if name in got),
        selection=max(selection_error(run, batch) for run in wanted) if follow else None,
    )


Runner = Callable[[Session, Feeds, int], Any]


def _run(session: Session, feeds: Feeds, run: Runner) -> list[Any]:
    """What `run` gives of the graph itself: for a prompt in chunks, one entry for each. run: of the session, all feeds and the number of the
    chunk."""
    texts: Sequence[Feeds] = session.texts(len(feeds[PIXEL_VALUES])) if isinstance(session, BoundSession) else [{}]
    return [run(detector_of(session), {**feeds, **text}, number) for number, text in enumerate(texts)]


def _merged(session: Session, runs: Sequence[Outputs], batch: int) -> Outputs:
    return session.merge(runs, batch) if isinstance(session, BoundSession) else runs[0]


def _run_in_parts(session: Session, feeds: Feeds, batch: int, choices: Sequence[Choices]) -> list[Outputs]:
    """Outputs, one image after the other where the graph can, which needs less memory than a large batch. choices: of each chunk; empty: the
    graph's own."""

    def run(rows: slice) -> list[Outputs]:
        def forced(model: Session, given: Feeds, chunk: int) -> Outputs:
            return model.run(given, Choices([array[rows] for array in choices[chunk].selections]) if choices else None)

        return _run(session, {name: array[rows] for name, array in feeds.items()}, forced)

    if session.info.fixed_batch not in (None, 1):
        return run(slice(batch))
    parts = [run(slice(i, i + 1)) for i in range(batch)]
    return [{name: np.concatenate([part[name] for part in chunk]) for name in chunk[0]} for chunk in zip(*parts, strict=True)]
