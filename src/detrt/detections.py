"""Detections of one image, their masks, and the arithmetic of boxes and masks on NumPy arrays."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from .errors import MissingPackageError

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


def _equal(a: object, b: object) -> bool:
    """Whether two values are the same, arrays in all of their elements, also inside of tuples and of the classes below."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Masks:
    """The masks of the objects of one image, run-length encoded: a few kilobytes each, where pixels of a photograph take millions.

    counts: of each mask the lengths of its runs, of zeros and of ones in turn, zeros first, column by column, as in COCO.
    size_hw: of the image in pixels.
    """

    counts: tuple[NDArray[np.int64], ...]
    size_hw: tuple[int, int]

    def __len__(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        height, width = self.size_hw
        return f"<Masks: {len(self)} of {height}x{width} pixels>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks):
            return NotImplemented
        return self.size_hw == other.size_hw and _equal(self.counts, other.counts)

    @property
    def areas(self) -> NDArray[np.int64]:
        """(n,) pixels of each mask."""
        return np.array([counts[1::2].sum() for counts in self.counts], np.int64)

    def take(self, indices: Sequence[int] | NDArray) -> Masks:
        """The masks at these indices, in this order."""
        return Masks(tuple(self.counts[i] for i in indices), self.size_hw)

    @classmethod
    def from_array(cls, pixels: NDArray) -> Masks:
        """Masks of an array (n, height, width), zero outside the objects."""
        size = (int(pixels.shape[1]), int(pixels.shape[2]))
        counts = []
        for mask in pixels:
            column_by_column = np.concatenate([[False], mask.T.reshape(-1) != 0])
            ends = np.flatnonzero(column_by_column[1:] != column_by_column[:-1])
            counts.append(np.diff(np.concatenate([[0], ends, [mask.size]])).astype(np.int64))
        return cls(tuple(counts), size)

    @classmethod
    def from_coco(cls, rows: Sequence[Mapping[str, Any]], size_hw: tuple[int, int]) -> Masks:
        """Masks of an image from their compressed form, see `to_coco`."""
        return cls(tuple(_expanded(row["counts"]) for row in rows), size_hw)

    def to_array(self) -> NDArray[np.bool_]:
        """(n, height, width) pixels of all masks; n * height * width bytes."""
        height, width = self.size_hw
        pixels = np.zeros((len(self), width, height), bool)
        for mask, counts in zip(pixels, self.counts, strict=True):
            mask.reshape(-1)[:] = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        return pixels.transpose(0, 2, 1)

    def to_coco(self) -> list[dict[str, Any]]:
        """The compressed form of COCO, as pycocotools reads it: {"size": [height, width], "counts": "..."}."""
        return [{"size": list(self.size_hw), "counts": text} for text in _compressed(self.counts)]


def _compressed(masks: Sequence[NDArray[np.int64]]) -> list[str]:
    """Run lengths as texts, after `rleToString` of pycocotools: differences to the run but one before, six bits a letter.

    All masks in one pass: a hundred small ones would take ten times as long one by one.
    """
    if not masks:
        return []
    rest = np.concatenate(masks)
    stops = np.cumsum([len(counts) for counts in masks])
    index = np.arange(len(rest)) - np.repeat(stops - [len(counts) for counts in masks], [len(counts) for counts in masks])
    rest[2:] -= np.where(index[2:] > 2, rest[:-2], 0)
    letters = []
    open_ = np.ones(len(rest), bool)
    while open_.any():
        low, rest = rest & 31, rest >> 5
        more = np.where(low & 16, rest != -1, rest != 0)
        letters.append(np.where(open_, low + 48 + 32 * more, 0).astype(np.uint8))
        open_ &= more
    table = np.stack(letters, 1)
    text = table[table > 0].tobytes().decode("ascii")
    ends = np.cumsum((table > 0).sum(1))[stops - 1].tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _expanded(text: str) -> NDArray[np.int64]:
    """Run lengths from their text; the reverse of `_compressed`."""
    letters = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    ends = np.flatnonzero(letters & 32 == 0) + 1
    starts = np.concatenate([[0], ends[:-1]])
    shifts = 5 * (np.arange(len(letters)) - np.repeat(starts, ends - starts))
    counts = np.add.reduceat((letters & 31) << shifts, starts)
    counts -= np.where(letters[ends - 1] & 16, 32 << shifts[ends - 1], 0)
    for first in (1, 2):
        counts[first::2] = np.cumsum(counts[first::2])
    return counts


def mask_iou(a: Masks, b: Masks) -> NDArray[np.float64]:
    """Pairwise IoU of masks of one image size: n and m masks -> (n, m). Two empty masks have IoU 1."""
    if a.size_hw != b.size_hw:
        raise ValueError(f"masks of images of different sizes have no IoU; got {a.size_hw} and {b.size_hw}")
    inter = np.zeros((len(a), len(b)))
    ends = [np.concatenate([[0], np.cumsum(counts)]) for counts in b.counts]
    # How many pixels of a mask of b lie before a position: linear between the ends of its runs.
    before = [np.concatenate([[0], np.cumsum(np.where(np.arange(len(c)) % 2, c, 0))]) for c in b.counts]
    for row, counts in zip(inter, a.counts, strict=True):
        edges = np.cumsum(counts)
        starts, stops = edges[0 : len(edges) // 2 * 2 : 2], edges[1::2]
        for j, (position, pixels) in enumerate(zip(ends, before, strict=True)):
            row[j] = (np.interp(stops, position, pixels) - np.interp(starts, position, pixels)).sum()
    union = a.areas[:, None] + b.areas[None] - inter
    return np.divide(inter, union, out=np.ones_like(inter), where=union > 0)


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


# What other libraries call it -> what to type here.
_ELSEWHERE = {
    **dict.fromkeys(("xyxy", "boxes", "bbox"), "boxes_xyxy"),
    **dict.fromkeys(("confidence", "conf", "confidences"), "scores"),
    **dict.fromkeys(("class_id", "cls"), "class_ids"),
    **dict.fromkeys(("tracker_id", "track_id", "id"), "track_ids"),
    **dict.fromkeys(("class_name", "names", "class_names"), "labels"),
    **dict.fromkeys(("orig_shape", "resolution_wh"), "image_size_hw"),
    **dict.fromkeys(("orig_img", "orig_image"), "image"),
    **dict.fromkeys(("to_df", "pandas", "to_pandas"), "to_dataframe()"),
    **dict.fromkeys(("tojson", "to_json", "summary", "predictions", "json"), "to_list()"),
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
        if self.masks is not None and (len(self.masks), self.masks.size_hw) != (len(boxes), tuple(self.image_size_hw)):
            raise ValueError(
                f"masks must be {len(boxes)} of {tuple(self.image_size_hw)}; got {len(self.masks)} of {self.masks.size_hw}"
            )
        for name, sides in (("track_ids", ()), ("reading_order", ()), ("quads", (4, 2))):
            value = getattr(self, name)
            if value is not None and np.shape(value) != (len(boxes), *sides):
                raise ValueError(f"{name} must have the shape {(len(boxes), *sides)}; got {np.shape(value)}")
        object.__setattr__(self, "boxes_xyxy", boxes)
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "class_ids", ids)

    def __len__(self) -> int:
        return len(self.scores)

    def __eq__(self, other: object) -> bool:
        """Whether everything is the same, to the last bit."""
        if not isinstance(other, Detections):
            return NotImplemented
        return all(_equal(getattr(self, one.name), getattr(other, one.name)) for one in fields(Detections))

    def __getattr__(self, name: str) -> Any:
        hint = f"; use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

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
        columns: dict[str, list[Any]] = {}
        if self.masks is not None:
            columns["segmentation"] = self.masks.to_coco()
        if self.reading_order is not None:
            columns["reading_order"] = self.reading_order.tolist()
        if self.quads is not None:
            columns["quad"] = self.quads.astype(np.float64).round(3).tolist()
        return columns

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
        for name, values in (("track_id", self.track_ids), ("reading_order", self.reading_order)):
            if values is not None:
                columns[name] = values
        return pandas.DataFrame(columns)

    def to_coco(self, image_id: int | str = 1, category_ids: Mapping[int, int] | None = None) -> list[dict[str, Any]]:
        """COCO results entries; bbox is [x, y, width, height] in pixels, segmentation a compressed mask where there is one. The key
        reading_order is not COCO's; its readers leave it out. Quadrilaterals have no key.

        category_ids: class id -> COCO category id; classes it does not name are left out.
        Without it the class id itself is the category id.
        """
        rows = []
        columns = {name: values for name, values in self.extra_columns().items() if name != "quad"}
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
        document = {name: value for name in ("reading_order", "quads") if (value := getattr(self, name)) is not None}
        return supervision.Detections(
            xyxy=self.boxes_xyxy.copy(),
            mask=None if self.masks is None else self.masks.to_array(),
            confidence=self.scores.copy(),
            class_id=self.class_ids.astype(int),
            tracker_id=None if self.track_ids is None else self.track_ids.astype(int),
            data={"class_name": np.array(self.labels, dtype=str), **document},
        )
