"""Comparison of tensors: outputs of two sessions on one batch, with the selections of the candidate forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Backend, Feeds, Outputs, Session, output_error
from ..backends.onnxruntime.session import OnnxSession
from ..backends.prompted import detector_of, with_text
from ..data.preprocess import SizeHW, group_by_size, preprocess
from ..data.reading_order import near_cuts
from ..errors import DetrtError, SessionError
from ..spec import CLASS_FEATURES, SELECTION, TEXT_FEATURES


class Choices(NamedTuple):
    """What a run chose: the indices of its top-k selections, and of a model that cuts coordinates to integers (PP-DocLayoutV2) those, in
    graph order; `cuts` is None for other models."""

    selections: Sequence[NDArray]
    cuts: Sequence[NDArray] | None


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
                actual, choices = with_choices(detector_of(cand), cand_feeds)
            except SessionError as error:
                yield {**where, "output": "all", "error": float("inf"), "text": str(error)}
                continue
            expected_outputs = run_forced(detector_of(ref), ref_feeds, choices)
            # Outputs of the text encoders, if both sides have one.
            expected_outputs |= {
                name: ref_feeds[name] for name in (TEXT_FEATURES, CLASS_FEATURES) if name in ref_feeds and name in cand_feeds
            }
            actual |= {name: cand_feeds[name] for name in (TEXT_FEATURES, CLASS_FEATURES) if name in cand_feeds}
            for name, expected in expected_outputs.items():
                if name in actual:
                    yield {**where, "output": name, "error": output_error(name, expected, actual[name]), "text": ""}


def can_force(ref: Session, cand: Session) -> bool:
    """Whether the selections of the candidate can be read, and forced in the reference."""
    sessions = [detector_of(s) for s in (ref, cand)]
    reference, candidate = (_is_torch(s) or (s.info.backend is Backend.ONNXRUNTIME and s.info.path is not None) for s in sessions)
    return reference and (candidate or _returned(sessions[1]) is not None) and not one_decodes_in_graph(ref, cand)


def one_decodes_in_graph(ref: Session, cand: Session) -> bool:
    """Whether only one of two prompted models decodes boxes in its graph, so that their outputs differ."""
    sessions = [detector_of(s).spec for s in (ref, cand)]
    return any(spec.text is not None for spec in sessions) and sessions[0].decode.in_graph != sessions[1].decode.in_graph


def with_choices(session: Session, feeds: Feeds) -> tuple[Outputs, Choices]:
    """Outputs of a session, and its choices."""
    if _is_torch(session):
        from ..models.hooks import recorded_cuts, recorded_topk

        with recorded_topk() as selections, recorded_cuts() as integers:
            outputs = session.run(feeds)
        found = [[tensor.cpu().numpy() for tensor in tensors] for tensors in (selections, integers)]
        return outputs, Choices(found[0], found[1] if session.spec.decode.reading_order == "votes" else None)
    if (returned := _returned(session)) is not None:
        outputs = session.run(feeds)
        return outputs, Choices([outputs.pop(name) for name in returned], None)
    from .. import graph
    from ..graph.clean import serialized
    from ..graph.emulate_low_precision import emulate, has_16_bit
    from ..graph.selections import cut_outputs, topk_outputs
    from ..graph.view import GraphView
    from .models import is_onnx_on_cpu

    assert session.info.path is not None  # checked by `can_force`
    model = graph.load(session.info.path)
    if is_onnx_on_cpu(session) and has_16_bit((view := GraphView(model)).types):
        model = emulate(model, view.types)
    names, cuts = topk_outputs(model), cut_outputs(model, session.spec)
    with OnnxSession(serialized(model, [*names, *(cuts or ())]), session.spec) as probe:
        outputs = probe.run(feeds)
    chosen = Choices([outputs.pop(name) for name in names], None if cuts is None else [outputs.pop(name) for name in cuts])
    return outputs, chosen


def run_forced(session: Session, feeds: Feeds, choices: Choices) -> Outputs:
    """Run a session with forced choices; of the integers, those that a number may be cut to by rounding alone.

    Raises:
        SessionError: it has another number of selections.
    """
    if _is_torch(session):
        from ..models.hooks import forced_choices

        try:
            with forced_choices(*choices):
                return session.run(feeds)
        except DetrtError as error:
            raise SessionError(str(error)) from error
    from ..graph.probe import probe
    from ..graph.selections import cut_outputs, topk_outputs
    from .models import view_of

    assert session.info.path is not None
    view = view_of(session.info.path)
    names, cuts = topk_outputs(view.model), cut_outputs(view.model, session.spec)
    for what, own, given in (
        ("top-k selections", names, choices.selections),
        ("cuts to integers", cuts or (), choices.cuts or ()),
    ):
        if len(own) != len(given):
            raise SessionError(f"the reference has {len(own)} {what}, the candidate {len(given)}")
    forced = dict(zip(names, choices.selections, strict=True))
    if cuts and choices.cuts:
        values = _probed(session, probe(view, [*cuts, *cuts.values()], forced)[0], feeds)
        for (name, number), given in zip(cuts.items(), choices.cuts, strict=True):
            forced[name] = np.where(near_cuts(values[number], given), given, values[name])
    return _probed(session, probe(view, [], forced)[0], feeds)


def _probed(session: Session, model: Any, feeds: Feeds) -> Outputs:
    from ..graph import to_bytes

    with OnnxSession(to_bytes(model), session.spec) as forced:
        return forced.run(feeds)


def _returned(session: Session) -> list[str] | None:
    """The selections among the outputs of an engine, in graph order. None: it does not return them, or cuts that it made beside them."""
    facts = session.info.facts
    if facts is None or not facts.options.get("return_selections") or session.spec.decode.reading_order == "votes":
        return None
    numbers = [int(info.name.removeprefix(SELECTION)) for info in session.outputs if info.name.startswith(SELECTION)]
    return [f"{SELECTION}{number}" for number in sorted(numbers)]


def _is_torch(session: Session) -> bool:
    return session.info.backend is Backend.TORCH
