"""Which inputs show the difference, which graphs can be compared, and the search over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds
from ..backends.bound import detector_of, with_text
from ..backends.onnxruntime.session import OnnxSession
from ..data.preprocess import group_by_size, preprocess
from ..errors import DetrtError
from .batching import slot_feeds
from .divergence import Divergence, comparable, search
from .models import Side, reference_view, run_view, view_of

if TYPE_CHECKING:
    from ..graph.view import GraphView
    from .parity import VerifyReport

# With fewer tensors of a common name the two graphs come from different exporters.
_ENOUGH_NAMES = 0.3


def with_divergence(
    report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]], say: Callable[[str], None]
) -> VerifyReport:
    """The report with the place where the two graphs part, or a note why it is not known."""
    say("searching the first divergence")
    feeds = with_text(cand.session, failing_feeds(report, ref, cand, images))
    ref, cand = (replace(side, session=detector_of(side.session), owned=False) for side in (ref, cand))
    try:
        found, notes = _search(report, ref, cand, feeds, say)
    except DetrtError as error:
        found, notes = None, [f"the divergence search stopped: {error}"]
    if found is not None and found.first is None and report.facts:
        notes.append("the graphs agree; the difference is in the facts of the spec, named above")
    return replace(report, divergence=found, notes=(*report.notes, *notes))


def failing_feeds(report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]]) -> Feeds:
    """One batch that shows a failure: of a slot, else of a tensor, else of the first images."""
    spec = ref.session.spec
    for row in report.slots:
        if not row["passed"] and row["batch"] > 1:
            return slot_feeds(cand.session, images, row["batch"], (row["height"], row["width"]))
    for row in report.tensors:
        if not row["error"] <= report.gate.tensor and spec.input.dynamic:
            return preprocess(images[: row["batch"]], spec, size_hw=(row["height"], row["width"])).feeds
    group = group_by_size([image.shape[:2] for image in images], spec)[0]
    return preprocess([images[i] for i in group], spec).feeds


def _search(
    report: VerifyReport, ref: Side, cand: Side, feeds: Feeds, say: Callable[[str], None]
) -> tuple[Divergence | None, list[str]]:
    notes: list[str] = []
    if cand.source is not None:
        if ref.source is None:
            return None, ["no divergence search: it needs a graph, or two checkpoints; swap the two sides"]
        from .verify_modules import search_torch

        return search_torch(ref.session, cand.session, feeds), notes
    if cand.graph is None:
        return None, ["no divergence search: the graph that the engine was built from is not beside it"]
    spec = cand.session.spec
    view = run_view(cand)
    reference, against = reference_view(ref, cand, say)
    precision = report.precision
    share = len(comparable(view, reference)) / max(1, len(view.tensors()))
    if share < _ENOUGH_NAMES:
        if ref.source is None or not isinstance(cand.session, OnnxSession):
            return None, [f"no divergence search: only {share:.0%} of the tensors have a name that the reference has"]
        from .verify_modules import search_modules

        return search_modules(view, cand.session, ref.session, spec, feeds, precision=precision), notes
    found = search(view, reference, spec, feeds, precision=precision, against=against, original=view_of(cand.graph))
    if isinstance(cand.session, OnnxSession):
        return found, notes
    if found.first is not None and found.first.error > report.gate.tensor:
        return found, ["found in the graph that the engine was built from, so TensorRT is not the cause"]
    say("building probe engines")
    return _search_engine(report, cand, view, reference, feeds, against)


def _search_engine(
    report: VerifyReport, cand: Side, view: GraphView, reference: GraphView, feeds: Feeds, against: str
) -> tuple[Divergence, list[str]]:
    from .verify_engine import CAVEAT, engine_fetch

    session = cand.session
    fetch = engine_fetch(
        view,
        session.spec,
        feeds,
        session.facts,  # type: ignore[attr-defined]
        compute_capability=getattr(session, "compute_capability", None),
    )
    found = search(view, reference, session.spec, feeds, precision=report.precision, fetch=fetch, against=against)
    return found, ["the graph agrees with the reference, so the engine itself differs", CAVEAT]
