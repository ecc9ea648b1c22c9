"""Comparison of tensors: outputs of two sessions on one batch, with the selections of the candidate forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Backend, Feeds, Outputs, Session, relative_error
from ..backends.onnxruntime.session import OnnxSession
from ..backends.prompted import detector_of, with_text
from ..data.preprocess import SizeHW, group_by_size, preprocess
from ..errors import DetrtError, SessionError
from ..spec import BOXES, CLASS_FEATURES, PRED_BOXES, TEXT_FEATURES


def forced_rows(
    ref: Session, cand: Session, images: Sequence[NDArray], sizes: Sequence[SizeHW | None] = (None,)
) -> Iterator[dict[str, Any]]:
    """Rows of batch, height, width, output, error (relative), text; nothing if selections cannot be read.

    Both sides get the feeds of the reference's preprocessing, so that only the graphs are compared.
    """
    if not can_force(ref, cand):
        return
    for size_hw in sizes:
        shapes = [image.shape[:2] for image in images]
        for group in group_by_size(shapes, ref.spec, size_hw=size_hw):
            feeds = preprocess([images[i] for i in group], ref.spec, size_hw=size_hw).feeds
            ref_feeds, cand_feeds = with_text(ref, feeds), with_text(cand, feeds)
            batch, _, height, width = feeds["pixel_values"].shape
            where = {"batch": batch, "height": height, "width": width}
            try:
                actual, selections = with_selections(detector_of(cand), cand_feeds)
            except SessionError as error:
                yield {**where, "output": "all", "error": float("inf"), "text": str(error)}
                continue
            expected_outputs = run_forced(detector_of(ref), ref_feeds, selections)
            # Outputs of the text encoders, if both sides have one.
            expected_outputs |= {
                name: ref_feeds[name] for name in (TEXT_FEATURES, CLASS_FEATURES) if name in ref_feeds and name in cand_feeds
            }
            actual |= {name: cand_feeds[name] for name in (TEXT_FEATURES, CLASS_FEATURES) if name in cand_feeds}
            for name, expected in expected_outputs.items():
                if name in actual:
                    yield {**where, "output": name, "error": _error(name, expected, actual[name]), "text": ""}


def can_force(ref: Session, cand: Session) -> bool:
    """Whether the selections of the candidate can be read, and forced in the reference."""
    sessions = [detector_of(s) for s in (ref, cand)]
    readable = all(_is_torch(s) or (s.info.backend is Backend.ONNXRUNTIME and s.info.path is not None) for s in sessions)
    return readable and not one_decodes_in_graph(ref, cand)


def one_decodes_in_graph(ref: Session, cand: Session) -> bool:
    """Whether only one of two prompted models decodes boxes in its graph, so that their outputs differ."""
    sessions = [detector_of(s).spec for s in (ref, cand)]
    return any(spec.text is not None for spec in sessions) and sessions[0].decode.in_graph != sessions[1].decode.in_graph


def with_selections(session: Session, feeds: Feeds) -> tuple[Outputs, list[NDArray]]:
    """Outputs of a session, and the indices of its top-k selections in graph order."""
    if _is_torch(session):
        from ..models.hooks import recorded_topk

        with recorded_topk() as selections:
            outputs = session.run(feeds)
        return outputs, [indices.cpu().numpy() for indices in selections]
    from .. import graph
    from ..graph.clean import serialized, topk_outputs
    from ..graph.emulate_low_precision import emulate, has_16_bit
    from ..graph.view import GraphView
    from .models import is_onnx_on_cpu

    assert session.info.path is not None  # checked by `can_force`
    model = graph.load(session.info.path)
    if is_onnx_on_cpu(session) and has_16_bit((view := GraphView(model)).types):
        model = emulate(model, view.types)
    names = topk_outputs(model)
    with OnnxSession(serialized(model, names), session.spec) as probe:
        outputs = probe.run(feeds)
    return outputs, [outputs.pop(name) for name in names]


def run_forced(session: Session, feeds: Feeds, selections: Sequence[NDArray]) -> Outputs:
    """Run a session with forced selections.

    Raises:
        SessionError: it has another number of selections.
    """
    if _is_torch(session):
        from ..models.hooks import forced_topk

        try:
            with forced_topk(selections):
                return session.run(feeds)
        except DetrtError as error:
            raise SessionError(str(error)) from error
    from ..graph import to_bytes
    from ..graph.clean import topk_outputs
    from ..graph.probe import probe
    from .models import view_of

    assert session.info.path is not None
    view = view_of(session.info.path)
    names = topk_outputs(view.model)
    if len(names) != len(selections):
        raise SessionError(f"the reference has {len(names)} top-k selections, the candidate {len(selections)}")
    model, _ = probe(view, [], dict(zip(names, selections, strict=True)))
    with OnnxSession(to_bytes(model), session.spec) as forced:
        outputs = forced.run(feeds)
    return outputs


def _error(name: str, expected: NDArray, actual: NDArray) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    if name in (PRED_BOXES, BOXES) and not np.isfinite(actual).all():
        return float("inf")
    return relative_error(expected, actual)


def _is_torch(session: Session) -> bool:
    return session.info.backend is Backend.TORCH
