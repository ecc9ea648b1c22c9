"""Ids of objects across the frames of one source. The only module that imports `trackers`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from ..detections import Detections
from ..errors import MissingPackageError

_BUFFER = 30  # at the nominal 30 frames per second of `trackers`: one second


class Tracker:
    """ByteTrack of the package `trackers`, one for each source; times are those of the frames, so that gaps do no harm.

    A track that is not found for a second ends.

    Args:
        start_score: lowest score that starts a track, 0 to 1; lower ones only continue one.

    Raises:
        MissingPackageError: trackers is not installed.
    """

    def __init__(self, start_score: float = 0.0) -> None:
        try:
            from trackers.core.bytetrack.tracker import ByteTrackTracker
        except ImportError:
            raise MissingPackageError("trackers", "track", "tracking") from None
        self._new = lambda: ByteTrackTracker(
            track_activation_threshold=start_score, high_conf_det_threshold=start_score, lost_track_buffer=_BUFFER
        )
        self._trackers: dict[Hashable, Any] = {}

    def update(self, source: Hashable, detections: Detections, time_s: float) -> Detections:
        """Detections of the next frame of a source, in the same order, with track ids. time_s: of the frame, in seconds."""
        tracker = self._trackers.get(source)
        if tracker is None:
            tracker = self._trackers[source] = self._new()
        given = replace(detections, masks=None, track_ids=None).to_supervision()
        given.data["index"] = np.arange(len(detections))
        found = tracker.update(given, timestamp=time_s)
        ids = np.full(len(detections), -1, np.int64)
        if len(found):
            ids[found.data["index"].astype(np.int64)] = found.tracker_id
        return replace(detections, track_ids=ids)
