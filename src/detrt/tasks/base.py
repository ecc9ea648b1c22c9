"""What a task is to the rest of detrt: what a detection has beside its box, score and class, a row each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..spec import ModelSpec

SizeHW = tuple[int, int]
Window = tuple[int, int, int, int]  # y0, x0, y1, x1 in pixels of an image


class Task(ABC):
    """A task beside detection. Here values are an array with a row for each detection.

    Attributes:
        field: of `Detections`, None in those of models without it. title: in words.
        key: of one value in JSON.
        dtype, sides: of the values; sides: behind the axis of detections.
        sorts: detections are returned by its values, and have their place in the image of all; there are none of a tile.
        pairwise: its outputs are of pairs of queries.
        after_graph: it is computed after the graph, also where that decodes.
        coco: COCO results have its key. table: tables of a row for each detection have it.
        nvinfer: DeepStream has a parser for it.
    """

    field: ClassVar[str]
    title: ClassVar[str]
    key: ClassVar[str]
    dtype: ClassVar[str] = "float32"
    sides: ClassVar[tuple[int, ...]] = ()
    sorts: ClassVar[bool] = False
    pairwise: ClassVar[bool] = False
    after_graph: ClassVar[bool] = False
    coco: ClassVar[bool] = True
    table: ClassVar[bool] = False
    nvinfer: ClassVar[bool] = False

    @abstractmethod
    def outputs(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """Outputs of the graph -> sides of each behind the batch, without those of `map_sides`; none of a model without the task."""

    def map_sides(self, spec: ModelSpec, size_hw: Sequence[int | str]) -> tuple[int | str, ...]:
        """Last sides of its outputs that follow from those of the input."""
        return ()

    @abstractmethod
    def decode(
        self, outputs: Mapping[str, NDArray], queries: NDArray[np.int64], size_hw: SizeHW, covered_hw: tuple[float, float] | None
    ) -> Any:
        """Values of the detections of one image.

        outputs: their rows, or where `pairwise` holds those of all queries. queries: of each detection. covered_hw: the part of a map
        that the image covers, in values; None for all.
        """

    def check(self, values: Any, count: int, size_hw: SizeHW) -> None:
        """Raise ValueError for other values than those of `count` detections of an image of that size."""
        if np.shape(values) != (count, *self.sides):
            raise ValueError(f"{self.field} must have the shape {(count, *self.sides)}; got {np.shape(values)}")

    def to_json(self, values: Any) -> list[Any]:
        found: list[Any] = values.tolist()
        return found

    def from_json(self, values: Sequence[Any], size_hw: SizeHW) -> Any:
        return np.array(values, self.dtype)

    def to_rows(self, values: Any) -> Any:
        """Values as rows of a tensor: of `dtype` and `sides`, or texts in bytes of one whose `dtype` is "bytes"."""
        return values

    def arrow(self, pa: Any) -> Any:
        """Type of one value in a Parquet file. pa: the package pyarrow."""
        found = pa.type_for_alias(self.dtype)
        for side in reversed(self.sides):
            found = pa.list_(found, side)
        return found

    def to_supervision(self, values: Any) -> dict[str, Any]:
        """Arguments of `supervision.Detections`."""
        return {"data": {self.field: values}}

    @abstractmethod
    def of_windows(
        self, parts: Sequence[tuple[Window, Any]], kept: Sequence[int], members: Mapping[int, list[int]], size_hw: SizeHW
    ) -> Any:
        """Values of the detections of an image from those of its windows, in pixels of the image; None: a window has none.

        parts: (window, its values). kept: numbers of detections, counted over all windows. members: kept number -> those that are parts
        of the same object, itself among them.
        """

    def draw(self, pixels: NDArray[np.uint8], values: Any, colours: Sequence[tuple[int, int, int]]) -> NDArray[np.uint8]:
        """The pixels of an image with what lies below the boxes. colours: of each detection."""
        return pixels


class AreaTask(Task):
    """A task whose values cover pixels, so that two are compared by their overlap."""

    @abstractmethod
    def overlap(self, ours: Any, i: int, theirs: Any, j: int) -> float:
        """IoU of value i of one side and value j of another."""


class PublishedTask(Task):
    """A task whose values transformers' post-processing returns, under `published`."""

    published: ClassVar[str]

    @abstractmethod
    def difference(self, ours: Any, theirs: Any, tolerance_px: float) -> str:
        """What differs between values of the same detections, as text; "" for nothing."""
