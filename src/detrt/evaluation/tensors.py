"""Comparison of tensors: outputs of two sessions on one batch, with the selections of the candidate forced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from ..backends.base import Session
from ..backends.compare import can_follow, difference, forced_differences
from ..backends.prompted import detector_of, with_text
from ..data.preprocess import SizeHW, group_by_size, preprocess
from ..errors import SessionError
from ..text.tensors import CLASS_FEATURES, TEXT_FEATURES


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
                actual, choices = detector_of(cand).selections(cand_feeds)
            except SessionError as error:
                yield {**where, "output": "all", "error": float("inf"), "text": str(error)}
                continue
            found = forced_differences(detector_of(ref), actual, choices, ref_feeds)
            # Outputs of the text encoders, if both sides have one.
            both = [name for name in (TEXT_FEATURES, CLASS_FEATURES) if name in ref_feeds and name in cand_feeds]
            found += [(name, *difference(ref_feeds[name], cand_feeds[name], name)) for name in both]
            for name, error, text in found:
                # A text fails the comparison, which other integers in a few places need not.
                yield {**where, "output": name, "error": error, "text": text if math.isinf(error) else ""}


def can_force(ref: Session, cand: Session) -> bool:
    """Whether the selections of the candidate can be read, and forced in the reference."""
    return can_follow(detector_of(ref), detector_of(cand)) and not one_decodes_in_graph(ref, cand)


def one_decodes_in_graph(ref: Session, cand: Session) -> bool:
    """Whether only one of two prompted models decodes boxes in its graph, so that their outputs differ."""
    sessions = [detector_of(s).spec for s in (ref, cand)]
    return any(spec.text is not None for spec in sessions) and sessions[0].decode.in_graph != sessions[1].decode.in_graph
