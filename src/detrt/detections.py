"""Detections of one image, their masks, and the arithmetic of boxes and masks on NumPy arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from .errors import MissingPackageError, no_attribute
from .tasks import TASKS, Task
from .tasks.masks import Masks, equal
from .tasks.masks import mask_iou as mask_iou  # documented as a name of this module

if TYPE_CHECKING:
    import pandas
    import supervision
    from typing_extensions import Self


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


@dataclass(frozen=True, slots=True, eq=False)
class Detection:
    """One object of an image.

    box: (4,) float32 x0, y0, x1, y1 in pixels of the original image. score: 0 to 1. class_id, label: number and name of its class.
    track_id: of a tracked frame, None where it has none yet.
    """

    box: NDArray[np.float32]
    score: float
    class_id: int
    label: str
    track_id: int | None = None
    masks: Masks | None = None

    @property
    def mask(self) -> NDArray[np.bool_] | None:
        """(height, width) pixels of the object; None of models that give boxes alone."""
        return None if self.masks is None else self.masks.to_array()[0]

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, f"use {_OF_ONE[name]}" if name in _OF_ONE else "")


# What other libraries call it -> what to type here: of one object, and of all.
_OF_ONE = {
    **dict.fromkeys(("box_xyxy", "boxes_xyxy", "xyxy", "bbox", "xywh"), "box, which is x0, y0, x1, y1"),
    **dict.fromkeys(("confidence", "conf", "scores"), "score"),
    **dict.fromkeys(("class_name", "name", "labels", "category"), "label"),
    **dict.fromkeys(("cls", "class_ids", "category_id"), "class_id"),
    **dict.fromkeys(("tracker_id", "id", "track_ids"), "track_id"),
    **dict.fromkeys(("xy",), "mask"),
    **dict.fromkeys(("area",), "mask.sum()"),
}
_ELSEWHERE = {
    **dict.fromkeys(("xyxy", "boxes", "bbox"), "boxes_xyxy"),
    **dict.fromkeys(("confidence", "conf", "confidences"), "scores"),
    **dict.fromkeys(("class_id", "cls"), "class_ids"),
    **dict.fromkeys(("tracker_id", "track_id", "id"), "track_ids"),
    **dict.fromkeys(("class_name", "names", "class_names"), "labels"),
    **dict.fromkeys(("orig_shape", "resolution_wh"), "image_size_hw"),
    **dict.fromkeys(("orig_img", "orig_image"), "image"),
    **dict.fromkeys(("to_df", "pandas", "to_pandas"), "to_dataframe()"),
    **dict.fromkeys(("tojson", "to_json", "to_dict", "summary", "predictions", "json"), "to_list()"),
    **dict.fromkeys(("to_csv", "to_parquet"), "to_dataframe(), which pandas writes"),
    **dict.fromkeys(("xywh", "boxes_xywh"), "to_coco(), whose bbox is x, y, width, height"),
    **dict.fromkeys(("xywhn", "xyxyn"), "boxes_xyxy and image_size_hw"),
    **dict.fromkeys(("filter", "data"), "an index: found[found.scores > 0.5]"),
    **dict.fromkeys(("is_empty",), "len(found) == 0"),
    **dict.fromkeys(("speed",), "detrt bench, in a shell"),
    **dict.fromkeys(("to_voc", "to_pascal_voc"), "to_coco() or to_yolo()"),
    **dict.fromkeys(("to_polygons", "polygons", "segments"), "masks.to_array()"),
    **dict.fromkeys(("save_txt", "to_txt"), "to_yolo()"),
    **dict.fromkeys(("save_crop", "crops"), "crop()"),
    **dict.fromkeys(("show", "render", "annotate"), "plot().show()"),
    **dict.fromkeys(("mask", "xy"), "masks.to_array()"),
    **dict.fromkeys(("area",), "masks.areas"),
    **dict.fromkeys(("cpu", "numpy", "cuda", "detach"), "boxes_xyxy and scores, which are NumPy arrays"),
    **dict.fromkeys(("with_nms", "nms"), "the detections as they are: detectors of the DETR family need no NMS"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """What was found in one image: parallel arrays, best score first, or in reading order where the model tells it.

    Iterating gives a `Detection` for each object.

    boxes_xyxy: (n, 4) float32, pixels of the original image, inside it.
    scores: (n,) float32 in 0..1. class_ids: (n,) int64. labels: n class names.
    image_size_hw: size of the original image in pixels.
    prompt, phrase_spans: of models that were given a prompt: its text, and for each detection the first and
        the end character of its phrase; "" and None of models with fixed classes or a list of names.
    masks: of instance segmentation, a mask for each detection; None of models that give boxes alone.
    track_ids: (n,) int64, of tracked frames: the id of the object, -1 where it has none yet; None of other images.
    reading_order: (n,) int64, of document models: ranks, lower ones are read first; they may have gaps, and one element of the page
        that has two labels has one rank. None of other models.
    quads: (n, 4, 2) float32, of models that find quadrilaterals: x, y of the corners in pixels, clockwise from the top left, which
        may lie outside the image; boxes enclose them. None of other models.
    """

    boxes_xyxy: NDArray[np.float32]
    scores: NDArray[np.float32]
    class_ids: NDArray[np.int64]
    labels: tuple[str, ...]
    image_size_hw: tuple[int, int]
    phrase_spans: tuple[tuple[int, int], ...] | None = None
    prompt: str = ""
    masks: Masks | None = None
    track_ids: NDArray[np.int64] | None = None
    reading_order: NDArray[np.int64] | None = None
    quads: NDArray[np.float32] | None = None

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
        for task, values in self._tasks():
            task.check(values, len(boxes), self.image_size_hw)
        if self.track_ids is not None and np.shape(self.track_ids) != (len(boxes),):
            raise ValueError(f"track_ids must have the shape {(len(boxes),)}; got {np.shape(self.track_ids)}")
        object.__setattr__(self, "boxes_xyxy", boxes)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "class_ids", ids)

    def _tasks(self) -> list[tuple[Task, Any]]:
        """What there is beside boxes, with its values."""
        return [(task, values) for task in TASKS if (values := getattr(self, task.field)) is not None]

    def __len__(self) -> int:
        return len(self.scores)

    def __eq__(self, other: object) -> bool:
        """Whether everything is the same, to the last bit."""
        if not isinstance(other, Detections):
            return NotImplemented
        return all(equal(getattr(self, one.name), getattr(other, one.name)) for one in fields(Detections))

    def __getattr__(self, name: str) -> Any:
        raise no_attribute(self, name, f"use {_ELSEWHERE[name]}" if name in _ELSEWHERE else "")

    def __iter__(self) -> Iterator[Detection]:
        return map(self._one, range(len(self)))

    def _one(self, index: int) -> Detection:
        track = -1 if self.track_ids is None else int(self.track_ids[index])
        return Detection(
            self.boxes_xyxy[index],
            float(self.scores[index]),
            int(self.class_ids[index]),
            self.labels[index],
            None if track < 0 else track,
            None if self.masks is None else self.masks.take([index]),
        )

    @overload
    def __getitem__(self, index: int) -> Detection: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | Sequence[bool] | NDArray) -> Self: ...

    def __getitem__(self, index: int | slice | Sequence[int] | Sequence[bool] | NDArray) -> Detection | Self:
        """The object at an integer; those of a slice, a boolean mask or a list of indices.

        Raises:
            TypeError: anything else. IndexError: what is not there.
        """
        if not isinstance(index, (slice, bool, np.bool_)) and hasattr(index, "__index__") and not np.ndim(index):
            number = operator.index(index)
            if not -len(self) <= number < len(self):
                raise IndexError(f"there is no detection {number}; there are {len(self)}, from 0")
            return self._one(number % len(self))
        if not isinstance(index, slice):
            index = np.asarray(index)
            if index.ndim != 1 or (index.size and index.dtype.kind not in "bui"):
                raise TypeError(
                    "select detections with an integer, a slice, a mask or a list of indices, e.g. detections[detections.scores > 0.5]; "
                    "by class: detections[[label == 'person' for label in detections.labels]]; "
                    f"got {type(index[()]).__name__ if index.ndim == 0 else f'{index.dtype} {index.shape}'}"
                )
            if index.dtype != bool:
                index = index.astype(np.int64)
        picked = np.arange(len(self))[index]
        changes: dict[str, Any] = {}
        for one in fields(Detections):
            value = getattr(self, one.name)
            if isinstance(value, Masks):
                changes[one.name] = value.take(picked)
            elif isinstance(value, np.ndarray):
                changes[one.name] = value[picked]
            elif one.name in ("labels", "phrase_spans") and value is not None:
                changes[one.name] = tuple(value[i] for i in picked)
        return replace(self, **changes)

    def extra_columns(self) -> dict[str, list[Any]]:
        """What there is beside boxes, scores and classes, in JSON form: a value for each detection, by its key in `to_list`."""
        return {task.key: task.to_json(values) for task, values in self._tasks()}

    def to_list(self) -> list[dict[str, Any]]:
        """JSON form: label, class_id, score, box_xyxy [x0, y0, x1, y1] in pixels; with a prompt phrase_span, with a mask segmentation,
        see `Masks.to_coco`, of a document reading_order and quad [[x, y], ...], and of a tracked frame track_id, null where there is
        none yet."""
        # What `round` gives for each number, in a quarter of its time: a product with 1000 or 1e6 is exact in float64.
        scores = self.scores.astype(np.float64).round(6).tolist()
        boxes = self.boxes_xyxy.astype(np.float64).round(3).tolist()
        rows: list[dict[str, Any]] = [
            {"label": label, "class_id": class_id, "score": score, "box_xyxy": box}
            for label, class_id, score, box in zip(self.labels, self.class_ids.tolist(), scores, boxes, strict=True)
        ]
        for row, span in zip(rows, self.phrase_spans or (), strict=False):
            row["phrase_span"] = list(span)
        for name, values in self.extra_columns().items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        for row, track in zip(rows, () if self.track_ids is None else self.track_ids.tolist(), strict=False):
            row["track_id"] = None if track < 0 else track
        return rows

    def to_yolo(self, *, scores: bool = False) -> str:
        """The text of a YOLO label file: a line for each object, `class_id x y width height`, centre and size as fractions of the image.

        scores: add the score behind them.
        """
        height, width = self.image_size_hw
        low, high = self.boxes_xyxy[:, :2].astype(np.float64), self.boxes_xyxy[:, 2:].astype(np.float64)
        boxes = np.hstack([(low + high) / 2, high - low]) / (width, height, width, height)
        lines = []
        for class_id, box, score in zip(self.class_ids.tolist(), boxes.tolist(), self.scores.tolist(), strict=True):
            numbers = [*box, score] if scores else box
            lines.append(" ".join([str(class_id), *(f"{number:.6f}" for number in numbers)]) + "\n")
        return "".join(lines)

    def to_dataframe(self) -> pandas.DataFrame:
        """A row for each object: label, class_id, score, x0, y0, x1, y1 in pixels; track_id and reading_order where there are some.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingPackageError("pandas", "pandas", "Detections.to_dataframe") from None
        columns: dict[str, Any] = {"label": list(self.labels), "class_id": self.class_ids, "score": self.scores}
        columns |= dict(zip(("x0", "y0", "x1", "y1"), self.boxes_xyxy.T, strict=True))
        if self.track_ids is not None:
            columns["track_id"] = self.track_ids
        columns |= {task.key: values for task, values in self._tasks() if task.table}
        return pandas.DataFrame(columns)

    def to_coco(self, image_id: int | str = 1, category_ids: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
        """COCO results entries; bbox is [x, y, width, height] in pixels, segmentation a compressed mask where there is one. The key
        reading_order is not COCO's; its readers leave it out. Quadrilaterals have no key.

        category_ids: class id -> COCO category id; classes it does not name are left out.
        Without it the class id itself is the category id.
        """
        rows = []
        columns = {task.key: task.to_json(values) for task, values in self._tasks() if task.coco}
        extras = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)] or [{}] * len(self)
        numbers = self.class_ids.tolist(), self.scores.tolist(), self.boxes_xyxy.tolist()
        for class_id, score, (x0, y0, x1, y1), extra in zip(*numbers, extras, strict=True):
            category = class_id if category_ids is None else category_ids.get(class_id)
            if category is not None:
                bbox = [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)]
                row = {"image_id": image_id, "category_id": category, "bbox": bbox, "score": round(score, 6)}
                rows.append(row | extra)
        return rows

    def to_supervision(self) -> supervision.Detections:
        """The same boxes, masks and track ids as `supervision.Detections`; class names in data["class_name"], and of a document
        data["reading_order"] and data["quads"]."""
        try:
            import supervision
        except ImportError:
            raise MissingPackageError("supervision", "supervision", "Detections.to_supervision") from None
        more: dict[str, Any] = {"data": {"class_name": np.array(self.labels, dtype=str)}}
        for task, values in self._tasks():
            for name, value in task.to_supervision(values).items():
                more[name] = {**more[name], **value} if name in more else value
        return supervision.Detections(
            xyxy=self.boxes_xyxy.copy(),
            confidence=self.scores.copy(),
            class_id=self.class_ids.astype(int),
            tracker_id=None if self.track_ids is None else self.track_ids.astype(int),
            **more,
        )
