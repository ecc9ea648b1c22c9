"""Quadrilaterals, which boxes enclose, of documents that lie askew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..spec import QUADS
from .base import PublishedTask, SizeHW, Window

if TYPE_CHECKING:
    from ..spec import ModelSpec


class Quadrilaterals(PublishedTask):
    """Corners in pixels of the original image, not clipped to it, clockwise from the top left."""

    field = "quads"
    title = "quadrilaterals"
    key = "quad"
    published = "polygon_points"
    sides = (4, 2)
    after_graph = True
    coco = False

    def outputs(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        return {QUADS: (spec.decode.num_queries, *self.sides)} if spec.decode.quads else {}

    def decode(
        self, outputs: Mapping[str, NDArray], queries: NDArray[np.int64], size_hw: SizeHW, covered_hw: tuple[float, float] | None
    ) -> NDArray[np.float32]:
        return outputs[QUADS].astype(np.float32) * np.array(size_hw[::-1], np.float32)

    def to_json(self, values: Any) -> list[Any]:
        found: list[Any] = values.astype(np.float64).round(3).tolist()
        return found

    def of_windows(
        self, parts: Sequence[tuple[Window, Any]], kept: Sequence[int], members: Mapping[int, list[int]], size_hw: SizeHW
    ) -> NDArray[np.float32]:
        moved = [values + np.array(window[1::-1], np.float32) for window, values in parts]
        return np.concatenate(moved)[list(kept)]

    def difference(self, ours: Any, theirs: Any, tolerance_px: float) -> str:
        corner = np.abs(ours - theirs).max(initial=0)
        return "" if corner <= tolerance_px else f"corners of quadrilaterals by {corner:.2g} px (allowed {tolerance_px})"
