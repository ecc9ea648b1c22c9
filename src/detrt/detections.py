"""Detections of one image, and box arithmetic on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import MissingPackageError

if TYPE_CHECKING:
    import supervision


def cxcywh_to_xyxy(boxes: NDArray) -> NDArray:
    """(..., 4) centre x, centre y, width, height -> x0, y0, x1, y1, any unit."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return np.concatenate([centre - half, centre + half], axis=-1)


def box_iou(a: NDArray, b: NDArray) -> NDArray:
    """Pairwise IoU of xyxy boxes: (n, 4), (m, 4) -> (n, m). Empty boxes have IoU 0."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    inter = np.prod(np.clip(high - low, 0, None), axis=-1)
    area_a = np.prod(np.clip(a[:, 2:] - a[:, :2], 0, None), axis=-1)
    area_b = np.prod(np.clip(b[:, 2:] - b[:, :2], 0, None), axis=-1)
    union = area_a[:, None] + area_b[None, :] - inter
    return np.divide(inter, union, out=np.zeros_like(inter), where=union > 0)


@dataclass(frozen=True, slots=True)
class Detections:
    """What was found in one image: parallel arrays, best score first.

    boxes_xyxy: (n, 4) float32, pixels of the original image, inside it.
    scores: (n,) float32 in 0..1. class_ids: (n,) int64. labels: n class names.
    image_size_hw: size of the original image in pixels.
    prompt, phrase_spans: of models that were given a prompt: its text, and for each detection the first and
        the end character of its phrase; "" and None of models with fixed classes or a list of names.
    """

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    labels: tuple[str, ...]
    image_size_hw: tuple[int, int]
    phrase_spans: tuple[tuple[int, int], ...] | None = None
    prompt: str = ""

    def __post_init__(self) -> None:
        boxes = np.asarray(self.boxes_xyxy, np.float32).reshape(-1, 4)
        scores = np.asarray(self.scores, np.float32).reshape(-1)
        ids = np.asarray(self.class_ids, np.int64).reshape(-1)
        if not len(boxes) == len(scores) == len(ids) == len(self.labels):
            raise ValueError(
                "boxes, scores, class_ids and labels must have the same length; "
                f"got {len(boxes)}, {len(scores)}, {len(ids)}, {len(self.labels)}"
            )
        if self.phrase_spans is not None and len(self.phrase_spans) != len(boxes):
            raise ValueError(f"phrase_spans must have the length {len(boxes)} of boxes; got {len(self.phrase_spans)}")
        object.__setattr__(self, "boxes_xyxy", boxes)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "class_ids", ids)

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, index: slice | Sequence[int] | NDArray) -> Detections:
        """Select by slice, boolean mask or indices."""
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.dtype != bool:
                index = index.astype(np.int64)
        picked = np.arange(len(self))[index]
        if picked.ndim != 1:
            raise TypeError("select detections with a slice, a mask or a list of indices; e.g. detections[3:4]")
        return Detections(
            self.boxes_xyxy[picked],
            self.scores[picked],
            self.class_ids[picked],
            tuple(self.labels[i] for i in picked),
            self.image_size_hw,
            None if self.phrase_spans is None else tuple(self.phrase_spans[i] for i in picked),
            self.prompt,
        )

    def to_list(self) -> list[dict[str, Any]]:
        """JSON form: label, class_id, score, box_xyxy [x0, y0, x1, y1] in pixels; with a prompt phrase_span as well."""
        rows: list[dict[str, Any]] = [
            {
                "label": label,
                "class_id": int(class_id),
                "score": round(float(score), 6),
                "box_xyxy": [round(float(v), 3) for v in box],
            }
            for label, class_id, score, box in zip(self.labels, self.class_ids, self.scores, self.boxes_xyxy, strict=True)
        ]
        for row, span in zip(rows, self.phrase_spans or (), strict=False):
            row["phrase_span"] = list(span)
        return rows

    def to_coco(self, image_id: int | str, category_ids: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
        """COCO results entries; bbox is [x, y, width, height] in pixels.

        category_ids: class id -> COCO category id; classes it does not name are left out.
        Without it the class id itself is the category id.
        """
        rows = []
        for class_id, score, box in zip(self.class_ids, self.scores, self.boxes_xyxy, strict=True):
            category = int(class_id) if category_ids is None else category_ids.get(int(class_id))
            if category is not None:
                x0, y0, x1, y1 = (float(v) for v in box)
                bbox = [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)]
                rows.append({"image_id": image_id, "category_id": category, "bbox": bbox, "score": round(float(score), 6)})
        return rows

    def to_supervision(self) -> supervision.Detections:
        """The same boxes as `supervision.Detections`; class names in data["class_name"]."""
        try:
            import supervision
        except ImportError:
            raise MissingPackageError("supervision", "supervision", "Detections.to_supervision") from None
        return supervision.Detections(
            xyxy=self.boxes_xyxy.copy(),
            confidence=self.scores.copy(),
            class_id=self.class_ids.astype(int),
            data={"class_name": np.array(self.labels, dtype=str)},
        )
