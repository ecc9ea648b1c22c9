"""Tracking of the results of a run: detections of the frames of one source get the ids of objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..data.track import Tracker
from .run import ImageFailure, ImageResult

__all__ = ["Tracker", "track_objects"]


def track_objects(found: Iterable[ImageResult | ImageFailure], tracker: Tracker) -> Iterator[ImageResult | ImageFailure]:
    """Results with track ids; those of image files stay as they are."""
    for item in found:
        if isinstance(item, ImageResult) and item.record.time_s is not None:
            tracked = tracker.update(item.input, item.record.detections, item.record.time_s)
            item = replace(item, record=replace(item.record, detections=tracked))
        yield item
