"""ModelSpec: every fact about a model that a runtime needs, read from the checkpoint once.

Python, C++ and the server read the same JSON. A Spec never holds a choice of the caller.
Sizes are (height, width) in pixels.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import files
from .class_names import class_ids, class_thresholds
from .errors import SpecError, check_one_of, check_range, is_finite, number_of

if TYPE_CHECKING:
    from .text.kinds import PromptKind

SCHEMA = 1
LARGEST_SIDE = 16384  # pixels of an input
LARGEST_BATCH = 4096

Triple = tuple[int, int, int]  # min, opt and max of an axis

# Tensor names, the same in every graph, engine and runtime.
PIXEL_VALUES = "pixel_values"  # (batch, 3, height, width)
PIXEL_MASK = "pixel_mask"  # (batch, height, width), 1 = image, 0 = padding
TARGET_SIZES = "target_sizes"  # (batch, 2) int64, (height, width) of the original image
LOGITS = "logits"  # (batch, queries, classes)
PRED_BOXES = "pred_boxes"  # (batch, queries, 4) cxcywh, relative to the unpadded image; see `InputSpec.box_size`
BOXES = "boxes"  # (batch, max_detections, 4) xyxy, pixels of the original image
SCORES = "scores"  # (batch, max_detections) descending
LABELS = "labels"  # (batch, max_detections) int64
NUM_DETECTIONS = "num_detections"  # (batch,) int64
MASK_LOGITS = "mask_logits"  # (batch, queries or max_detections, mask height, mask width), above 0 = object
# Where each phrase of a prompt has queries of its own, logits are (batch, phrases, queries), and boxes and masks have the axis of phrases
# as well. The text tensors are in `text.tensors`.
ORDER_LOGITS = "order_logits"  # (batch, queries, queries), [j, i] = -[i, j]; above 0 at [i, j] = i is read before j
SUCCESSOR_LOGITS = "successor_logits"  # (batch, queries, queries), above 0 at [i, j] = j is read next after i; 0 at [i, i]
QUADS = "quads"  # (batch, queries, 4, 2) x, y of the corners, relative to the image, clockwise from the top left
SELECTION = "selection."  # and a number in graph order: indices of a top-k selection, (batch, k) int64; only on request
BEST_SCORES, GIVEN_SCORES = "/best", "/given"  # behind it, of a graph that takes selections: the best scores, and those selected

RESIZE_MODES = ("stretch", "shortest_edge", "fit", "max_size", "square")
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # PIL numbers 0..5
DTYPES = ("uint8", "float32")
ACTIVATIONS = ("sigmoid", "softmax")
SELECTIONS = ("topk", "query")
SUPPRESSIONS = ("none", "nms", "soft_nms")
READING_ORDERS = ("none", "votes", "successors")
TRANSFORMERS, AUTHORS, OWN = ORIGINS = ("transformers", "authors", "own")
DETECTION, INSTANCE_SEGMENTATION = TASKS = ("detection", "instance-segmentation")
# Fields that came after the first files of this schema, and what they are in these.
_LATER_FIELDS = (
    ("input", "max_height", None),
    ("input", "max_width", None),
    ("input", "pad", False),
    ("input", "antialias", True),
    ("input", "rounded", False),
    ("decode", "reading_order", "none"),
    ("decode", "quads", False),
)
# JSON key of `TextSpec.encoder`: the name of the field in the first files of this schema.
_ENCODER_KEY = "tower"


_CLASS_ID = re.compile("-?[0-9]{1,9}")  # int takes more: " 1", "+1", "1_0", 1.5
_NOT_ONE_LINE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message)


def _whole(field: str, value: object, low: int, high: int) -> None:
    check_range(field, value, low, high, SpecError, integer=True)


def _flag(field: str, value: object) -> None:
    _check(isinstance(value, bool), f"{field} must be true or false; got {value!r}")


@dataclass(frozen=True, slots=True)
class InputSpec:
    """How an image becomes `pixel_values`.

    resize: "stretch" to exactly (height, width); "shortest_edge" keeps the aspect ratio so that the
    short side is `shortest_edge` and the long side at most `longest_edge`, and pads a batch right and
    bottom; "fit" keeps the aspect ratio inside (height, width) and pads right and bottom; "max_size" keeps
    it inside (`max_height`, `max_width`), sides rounded down, and pads a batch as "shortest_edge" does; "square" stretches the image with
    a black square around it, at whose top left it lies, to (height, width), see `detrt.data.square`.
    pad: every batch is padded right and bottom to exactly (height, width), whatever its images are.
    antialias: False for "square", which blurs; of "stretch", False takes the two ("bilinear") or four ("bicubic") nearest pixels of each axis, in float32, also where the image
    becomes smaller; True filters, as Pillow does.
    rounded: pixels are integers all the same, as Pillow's are, rounded after each axis ("bicubic" without antialias only).
    dynamic: height and width of the graph are symbolic; (height, width) is then the usual size.
    multiple_of: both sides of the tensor must be multiples of it.
    normalize_in_graph: the graph divides, subtracts the mean and divides by std itself and is fed raw
    RGB pixels 0..255; otherwise the caller feeds (pixels * rescale - mean) / std as float32.
    """

    resize: str
    height: int
    width: int
    shortest_edge: int | None = None
    longest_edge: int | None = None
    resample: str = "bilinear"
    rescale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    dtype: str = "uint8"
    mask: bool = False
    dynamic: bool = False
    multiple_of: int = 1
    normalize_in_graph: bool = True
    max_height: int | None = None
    max_width: int | None = None
    pad: bool = False
    antialias: bool = True
    rounded: bool = False

    def __post_init__(self) -> None:
        check_one_of("input.resize", self.resize, RESIZE_MODES, SpecError)
        check_one_of("input.resample", self.resample, RESAMPLES, SpecError)
        check_one_of("input.dtype", self.dtype, DTYPES, SpecError)
        for name in ("height", "width", "multiple_of"):
            _whole(f"input.{name}", getattr(self, name), 1, LARGEST_SIDE)
        for name in ("height", "width"):
            _check(
                getattr(self, name) % self.multiple_of == 0,
                f"input.{name} must be a multiple of {self.multiple_of}; got {getattr(self, name)}",
            )
        for name in ("mask", "dynamic", "normalize_in_graph", "pad", "antialias", "rounded"):
            _flag(f"input.{name}", getattr(self, name))
        for name in ("shortest_edge", "longest_edge", "max_height", "max_width"):
            if getattr(self, name) is not None:
                _whole(f"input.{name}", getattr(self, name), 1, LARGEST_SIDE)
        if self.resize == "shortest_edge":
            _whole("input.shortest_edge", self.shortest_edge, 1, LARGEST_SIDE)
            if self.longest_edge is not None:
                _whole("input.longest_edge", self.longest_edge, self.shortest_edge or 1, LARGEST_SIDE)
        if self.resize == "max_size":
            for name, side in (("max_height", self.height), ("max_width", self.width)):
                _whole(f"input.{name}", getattr(self, name), 1, side if self.pad else LARGEST_SIDE)
        _check(
            self.dynamic or self.pad or self.resize not in ("shortest_edge", "max_size"),
            f"input.resize {self.resize!r} needs a graph with symbolic height and width, or padding to one size",
        )
        _check(
            not self.pad or self.resize not in ("stretch", "square"),
            f"input.pad is for resize modes that keep the aspect ratio inside the tensor; got {self.resize!r}",
        )
        for name in ("mean", "std"):
            given = getattr(self, name)
            ok = isinstance(given, (list, tuple)) and len(given) == 3 and all(map(is_finite, given))
            _check(ok, f"input.{name} must be 3 finite numbers; got {given!r}")
            object.__setattr__(self, name, tuple(float(v) for v in given))
        _check(all(s > 0 for s in self.std), f"input.std must be positive; got {self.std}")
        _check(
            is_finite(self.rescale) and self.rescale > 0,
            f"input.rescale must be a positive number; got {self.rescale!r}",
        )
        _check(
            self.normalize_in_graph or self.dtype == "float32",
            "input.dtype must be float32 when normalisation is not in the graph",
        )

        resamples = {"stretch": ("bilinear", "bicubic"), "square": ("bilinear",)}.get(self.resize, ())
        _check(self.resize != "square" or not self.antialias, "input.resize 'square' needs antialias false: it blurs by itself")
        _check(
            self.antialias or (self.resample in resamples and self.dtype == "float32"),
            "input.antialias false needs resize 'stretch' or 'square', resample 'bilinear' (of 'stretch' also 'bicubic'), and dtype 'float32'; got "
            f"{self.resize!r}, {self.resample!r} and {self.dtype!r}",
        )
        _check(
            not self.rounded or (not self.antialias and self.resample == "bicubic"),
            "input.rounded is for input.antialias false and resample 'bicubic'; Pillow's pixels are integers anyway",
        )

    @property
    def size_hw(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def one_size(self) -> bool:
        """Whether preprocessing gives every batch the size (height, width)."""
        return self.pad or self.resize in ("stretch", "fit", "square")

    def box_size(self, original_hw: tuple[int, int]) -> tuple[int, int]:
        """(height, width) in pixels of the original image of what boxes of 0 to 1 are relative to: the image, or the square around it."""
        return (max(original_hw),) * 2 if self.resize == "square" else original_hw

    def fixed(self, size_hw: tuple[int, int], *, stretch: bool = False) -> InputSpec:
        """The preprocessing of a graph of one size, (height, width).

        A padding mask, or padding that the checkpoint asks for, keeps the aspect ratio exact inside it; without them, or
        with `stretch`, the image is stretched to it.
        """
        if self.resize == "square":
            return replace(self, height=size_hw[0], width=size_hw[1], dynamic=False)
        keeps_aspect = not stretch and self.resize != "stretch" and (self.mask or self.pad or self.resize == "fit")
        if keeps_aspect and self.pad and size_hw == self.size_hw:
            return replace(self, dynamic=False)
        changes: dict[str, Any] = dict.fromkeys(("shortest_edge", "longest_edge", "max_height", "max_width"))
        resize = "fit" if keeps_aspect else "stretch"
        return replace(self, resize=resize, height=size_hw[0], width=size_hw[1], dynamic=False, pad=False, **changes)


@dataclass(frozen=True, slots=True)
class DecodeSpec:
    """How `logits` and `pred_boxes` become detections.

    activation "softmax": the last logit column is "no object" and is dropped after the softmax.
    select "query": every query gives its best class; "topk": the best (query, class) pairs of all.
    in_graph: the graph already returns `boxes`, `scores`, `labels`, `num_detections`.
    nms: what happens to overlapping boxes of one class among the `num_queries` best candidates, before
    `max_detections` are kept: "none"; "nms" drops a box whose IoU with a better one is above `nms_iou`;
    "soft_nms" multiplies its score by 1 - IoU and drops it below `nms_min_score` (arXiv:1704.04503,
    equation 3). nms_in_graph: the graph of `in_graph` has done it ("nms" only).
    score_threshold: with in_graph, `num_detections` counts the scores at or above it.
    mask_stride: pixels of the input, along one side, that a value of `mask_logits` stands for; 0: no masks. The maps cover the input;
    with a padding mask the image is a part of it, at the top left; see `detrt.tasks.masks`.
    reading_order: in which order detections are returned: "none" by score; "votes" and "successors" by the outputs of a
    document model, see `detrt.tasks.reading_order`. quads: boxes enclose quadrilaterals, which the graph returns as well.
    """

    activation: str
    select: str
    num_queries: int
    num_classes: int
    max_detections: int
    in_graph: bool = False
    nms: str = "none"
    nms_iou: float = 0.8
    nms_min_score: float = 0.001
    nms_in_graph: bool = False
    score_threshold: float = 0.0
    mask_stride: float = 0
    reading_order: str = "none"
    quads: bool = False

    def __post_init__(self) -> None:
        check_one_of("decode.activation", self.activation, ACTIVATIONS, SpecError)
        check_one_of("decode.select", self.select, SELECTIONS, SpecError)
        _flag("decode.in_graph", self.in_graph)
        _whole("decode.num_queries", self.num_queries, 1, 100_000)
        _whole("decode.num_classes", self.num_classes, 1, 100_000)
        limit = self.num_queries * (self.num_classes if self.select == "topk" else 1)
        _whole("decode.max_detections", self.max_detections, 1, limit)
        check_one_of("decode.nms", self.nms, SUPPRESSIONS, SpecError)
        _flag("decode.nms_in_graph", self.nms_in_graph)
        _check(
            not self.nms_in_graph or (self.in_graph and self.nms == "nms"),
            "decode.nms_in_graph needs decode.in_graph and decode.nms 'nms'; no graph has soft-NMS",
        )
        _check(
            self.in_graph or self.score_threshold == 0,
            f"decode.score_threshold {self.score_threshold!r} needs decode.in_graph: a runtime has its own threshold",
        )
        check_range("decode.mask_stride", self.mask_stride, 0, 64, SpecError)
        check_one_of("decode.reading_order", self.reading_order, READING_ORDERS, SpecError)
        _flag("decode.quads", self.quads)
        _check(
            not (self.in_graph and (self.reading_order != "none" or self.quads)),
            "decode.in_graph is for models without reading order and quadrilaterals: no graph sorts by them",
        )
        for name in ("nms_iou", "nms_min_score", "score_threshold"):
            check_range(f"decode.{name}", getattr(self, name), 0, 1, SpecError)


@dataclass(frozen=True, slots=True)
class TextSpec:
    """How a prompt becomes the text inputs of a model.

    kind: name of a kind of prompt, see `text.kinds`. separators: of a prompt with a logit for each token, the token ids that end a
    phrase or frame the prompt.
    query_encoder: ONNX file beside the model that turns an image into the feature of a class; "" where there is none.
    tokenizer: file of the `tokenizers` library beside the model. encoder: ONNX file of the text encoder beside
    the model (key "tower" in JSON); "" where the graph takes the token ids itself. pad_id: token that fills up a batch.
    max_tokens: longest prompt, with its framing tokens. features: width of the text features.
    """

    kind: str
    max_tokens: int
    features: int
    pad_id: int = 0
    separators: tuple[int, ...] = ()
    tokenizer: str = "tokenizer.json"
    encoder: str = "text.onnx"
    query_encoder: str = ""

    def __post_init__(self) -> None:
        from .text.kinds import KINDS

        check_one_of("text.kind", self.kind, tuple(KINDS), SpecError)
        _whole("text.max_tokens", self.max_tokens, 1, 100_000)
        _whole("text.features", self.features, 1, 100_000)
        _whole("text.pad_id", self.pad_id, 0, 10_000_000)
        ok = isinstance(self.separators, (list, tuple)) and all(type(i) is int and i >= 0 for i in self.separators)
        _check(ok, f"text.separators must be token ids; got {self.separators!r}")
        object.__setattr__(self, "separators", tuple(self.separators))
        for name, value in (("tokenizer", self.tokenizer), (_ENCODER_KEY, self.encoder), ("query_encoder", self.query_encoder)):
            plain = isinstance(value, str) and "/" not in value and "\\" not in value and value not in (".", "..")
            _check(plain, f"text.{name} must be the name of a file beside the model; got {value!r}")
        _check(bool(self.tokenizer), "text.tokenizer must not be empty")
        images = [name for name, kind in KINDS.items() if kind.takes_images]
        _check(
            not self.query_encoder or self.prompt_kind.takes_images,
            f"text.query_encoder is for kind {', '.join(map(repr, images))}; got kind {self.kind!r}",
        )

    @property
    def prompt_kind(self) -> PromptKind:
        """What such a prompt is; see `text.kinds`."""
        from .text.kinds import KINDS

        return KINDS[self.kind]

    @property
    def parts(self) -> dict[str, str]:
        """Kind of file -> name, of the files beside the model."""
        names = {"text": self.encoder, "tokenizer": self.tokenizer, "query": self.query_encoder}
        return {kind: name for kind, name in names.items() if name}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything a runtime must know about one model. See `to_json` for the file form.

    text: None for a model of fixed classes; `labels` is empty where there is a text part.
    task: "detection" or "instance-segmentation", boxes with masks.
    origin: whose numbers the model gives where implementations differ: "transformers", the "authors" of its checkpoint file, or its
    "own", of a graph by another exporter and of code in the checkpoint's folder.
    """

    family: str
    input: InputSpec
    decode: DecodeSpec
    labels: Mapping[int, str]
    name: str = ""
    text: TextSpec | None = None
    task: str = DETECTION
    origin: str = TRANSFORMERS

    def __post_init__(self) -> None:
        check_one_of("task", self.task, TASKS, SpecError)
        check_one_of("origin", self.origin, ORIGINS, SpecError)
        _check(
            self.has_masks == (self.decode.mask_stride > 0),
            f"task {self.task!r} does not fit decode.mask_stride {self.decode.mask_stride}: masks have a stride, and boxes alone none",
        )
        _check(
            not self.has_masks or not self.input.mask or not self.input.dynamic,
            "masks are for models without padding mask, or with images padded to one size",
        )
        _check(
            self.text is None or self.has_masks <= self.text.prompt_kind.own_queries,
            "masks are for fixed classes, and for prompts whose phrases have queries of their own",
        )
        for name in ("family", "name"):
            value = getattr(self, name)
            _check(isinstance(value, str), f"{name} must be text; got {value!r}")
        _check(bool(self.family), "family must not be empty")
        labels: dict[int, str] = {}
        for key, value in dict(self.labels).items():
            _check(_CLASS_ID.fullmatch(str(key)) is not None, f"labels: class ids must be integers; got {key!r}")
            class_id = int(key)
            _check(class_id not in labels, f"labels: class {class_id} is there twice, the second time as {key!r}; give it once")
            _check(
                0 <= class_id < self.decode.num_classes,
                f"labels: class id {class_id} ({value!r}) does not fit a head with "
                f"{number_of(self.decode.num_classes, 'class')} (ids 0..{self.decode.num_classes - 1}); "
                "give labels that belong to this checkpoint",
            )
            _check(isinstance(value, str), f"labels: the name of class {class_id} must be text; got {value!r}")
            # Lists of names, of DeepStream and Triton, have a line for each; others cannot be written as UTF-8.
            _check(
                not _NOT_ONE_LINE.search(value), f"labels: the name of class {class_id} must be one line of text; got {value!r}"
            )
            labels[class_id] = value
        object.__setattr__(self, "labels", dict(sorted(labels.items())))

    @property
    def has_masks(self) -> bool:
        """Whether a detection has a mask."""
        return self.task == INSTANCE_SEGMENTATION

    def label(self, class_id: int) -> str:
        """Name of a class, or its number as text where the checkpoint names none."""
        class_id = int(class_id)
        return self.labels[class_id] if class_id in self.labels else str(class_id)

    def class_ids(self, wanted: Iterable[str | int]) -> list[int]:
        """Class ids of names and ids (`detrt.class_names`), each once.

        Raises:
            SpecError: none is wanted, or one that this model does not have; the message lists close ones.
        """
        return class_ids(self.labels, self.decode.num_classes, wanted)

    def class_thresholds(self, wanted: Iterable[tuple[str | int, float]]) -> dict[int, float]:
        """Class id -> threshold, from (name or id, threshold).

        Raises:
            SpecError: as `class_ids`, a class that is named twice, or a number that is no score.
        """
        return class_thresholds(self.labels, self.decode.num_classes, wanted)

    def with_input(self, **changes: Any) -> ModelSpec:
        return replace(self, input=replace(self.input, **changes))

    def with_decode(self, **changes: Any) -> ModelSpec:
        return replace(self, decode=replace(self.decode, **changes))

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["labels"] = {str(k): v for k, v in self.labels.items()}
        data["input"]["mean"], data["input"]["std"] = list(self.input.mean), list(self.input.std)
        for part, name, usual in _LATER_FIELDS:
            if data[part][name] == usual:  # so that earlier versions open what does not need them
                del data[part][name]
        if not self.has_masks:
            del data["task"], data["decode"]["mask_stride"]
        if self.origin == TRANSFORMERS:
            del data["origin"]
        if self.text is None:
            del data["text"]
        else:
            data["text"]["separators"] = list(self.text.separators)
            data["text"][_ENCODER_KEY] = data["text"].pop("encoder")
            if not self.text.query_encoder:
                del data["text"]["query_encoder"]
        return {"schema": SCHEMA, **data}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_dict(cls, data: object) -> ModelSpec:
        """Read the JSON form.

        Raises:
            SpecError: unknown or missing fields, wrong types or values, or a newer schema.
        """
        data = _fields_of("spec", data, {"schema", *(f.name for f in fields(cls))})
        schema = data.pop("schema", None)
        _check(
            schema == SCHEMA,
            f"spec has schema {schema!r}; this version of detrt reads {SCHEMA}. Update detrt or export again",
        )
        for key in ("family", "input", "decode", "labels"):
            _check(key in data, f"spec has no field {key!r}")
        _check(isinstance(data["labels"], Mapping), "spec.labels must be an object of class id to name")
        parts: dict[str, Any] = {}
        kinds: dict[str, Any] = {"input": InputSpec, "decode": DecodeSpec}
        if data.get("text") is not None:
            kinds["text"] = TextSpec
        for key, kind in kinds.items():
            names = {_ENCODER_KEY if (key, f.name) == ("text", "encoder") else f.name: f.name for f in fields(kind)}
            values = {names[name]: value for name, value in _fields_of(f"spec.{key}", data.pop(key), set(names)).items()}
            try:
                parts[key] = kind(**values)
            except TypeError as error:
                raise SpecError(f"spec.{key} is not complete: {error}") from None
        return cls(**data, **parts)

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelSpec:
        try:
            data = files.parse_json(text)
        except ValueError as error:
            raise SpecError(f"the spec is not JSON: {error}") from None
        return cls.from_dict(data)


def read_spec_file(path: str | os.PathLike) -> ModelSpec:
    """A ModelSpec from a JSON file: the spec itself, or an object with the field "spec".

    Raises:
        SpecError: the file is missing or damaged; the message names it.
    """
    path = Path(path)
    data: Any = files.read_json(path, "spec file")
    if isinstance(data, dict) and "spec" in data:
        data = data["spec"]
    try:
        return ModelSpec.from_dict(data)
    except SpecError as error:
        raise SpecError(f"the spec file '{path}' is not usable: {error}") from None


def spec_beside(model: Path) -> Path | None:
    """`FILE.onnx.json` where it is a whole spec; None where there is none, or one of another exporter's file."""
    path = model.with_name(model.name + ".json")
    if not path.is_file():
        return None
    try:
        data = files.read_json(path, "spec file")
    except SpecError:
        return path  # its reader says what is wrong
    return path if not isinstance(data, dict) or {"schema", "spec", "input", "decode"} & set(data) else None


def _fields_of(where: str, data: object, allowed: set[str]) -> dict[str, Any]:
    _check(isinstance(data, Mapping), f"{where} must be a JSON object; got {type(data).__name__}")
    assert isinstance(data, Mapping)
    unknown = sorted(set(data) - allowed)
    _check(not unknown, f"{where} has unknown fields {unknown}; allowed: {sorted(allowed)}")
    return dict(data)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, NumPy dtype name and shape of an input or output; a symbolic axis is its name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


def text_inputs(spec: ModelSpec) -> list[str]:
    """Names of the text inputs of a detector, in the order of its graph; none for one of fixed classes."""
    return [] if spec.text is None else spec.text.prompt_kind.inputs(spec)


def parse_size(text: str, flag: str = "size") -> tuple[int, int]:
    """ "480x640" -> (480, 640), (height, width) in pixels; "640" -> (640, 640). Raises SpecError."""
    match = re.fullmatch(r"(\d{1,9})(?:x(\d{1,9}))?", text.strip().lower())
    if not match or not all(1 <= int(side) <= LARGEST_SIDE for side in match.groups() if side):
        raise SpecError(
            f"`{flag}` must be one number such as 640, or HEIGHTxWIDTH such as 480x640, from 1 to {LARGEST_SIDE} pixels; got {text!r}"
        )
    return int(match[1]), int(match[2] or match[1])


def parse_triple(text: str, flag: str = "batch") -> Triple:
    """ "1,4,8" -> (1, 4, 8), the min, opt and max of an axis; "4" -> (4, 4, 4). flag: the field that has it.

    Raises:
        SpecError: not one or three integers.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, 3) or not all(part.isdecimal() for part in parts):
        raise SpecError(f"`{flag}` must be MIN,OPT,MAX such as 1,4,8, or one number such as 4; got {text!r}")
    numbers = [int(part) for part in parts]
    return (numbers[0], numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])


def triple_text(triple: Sequence[int]) -> str:
    """What `parse_triple` reads as these numbers."""
    return ",".join(map(str, triple if len(set(triple)) > 1 else triple[:1]))


def comma_separated(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list that are not empty."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Comma-separated integers above 0: "4,8" -> (4, 8). Raises SpecError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SpecError(f"`{flag}` must be comma-separated integers above 0, such as 1,4,8; got {text!r}")
    return tuple(int(part) for part in parts)


class Precision(str, Enum):
    """What a model computes in. JSON, file names and the command line spell it as its value.

    bits: of a stored value. dtype: its name in NumPy and PyTorch. tensorrt: its name in TensorRT. max_value: largest
    finite value, and of integers the largest in use. min_normal: smallest value that keeps all its digits.
    min_compute_capability: oldest GPU with tensor cores for it, e.g. 89 (FP32: oldest with matmuls in TensorRT-RTX).
    min_fraction: of MatMul and Conv MACs; a graph with less in this precision counts as a downgrade.
    layer_tolerance: error of one layer beyond which two graphs diverge, relative to the layer's values.
    output_tolerance: the same of the outputs of a whole graph, package or OpenVINO model. In FP32 kernels of two libraries differ by
        rounding only, which grows with depth: the worst family measured (docs/results/benchmarks.md) stays below a third of it.

    What detections may differ by is in `data.matching.GATES`.
    """

    bits: int
    dtype: str
    tensorrt: str
    max_value: float
    min_normal: float
    min_compute_capability: int
    min_fraction: float
    layer_tolerance: float
    output_tolerance: float

    FP32 = ("fp32", 32, "float32", "FLOAT", 3.4028235e38, 2.0**-126, 80, 0.0, 1e-4, 1e-3)
    TF32 = ("tf32", 32, "float32", "FLOAT", 3.4028235e38, 2.0**-126, 80, 0.0, 2e-2, 5e-2)
    FP16 = ("fp16", 16, "float16", "HALF", 65504.0, 2.0**-14, 75, 0.9, 2e-2, 2e-2)
    BF16 = ("bf16", 16, "bfloat16", "BF16", 3.3895e38, 2.0**-126, 80, 0.9, 1e-1, 2e-2)
    INT8 = ("int8", 8, "int8", "INT8", 127.0, 1.0, 75, 0.5, 3e-1, 3e-1)
    FP8 = ("fp8", 8, "float8_e4m3fn", "FP8", 448.0, 2.0**-6, 89, 0.5, 3e-1, 3e-1)

    def __new__(cls, value: str, *facts: Any) -> Precision:
        member = str.__new__(cls, value)
        member._value_ = value
        (
            member.bits, member.dtype, member.tensorrt, member.max_value, member.min_normal, member.min_compute_capability,
            member.min_fraction, member.layer_tolerance, member.output_tolerance,
        ) = facts  # fmt: skip
        return member

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # Enum's own stub has no name for its argument

    @property
    def quantized(self) -> bool:
        """Whether tensors are stored in 8 bits, between Q/DQ pairs."""
        return self.bits == 8

    @property
    def base(self) -> Precision:
        """The precision of what is not quantized: FP16 beside INT8 and FP8, else itself."""
        return Precision.FP16 if self.quantized else self

    @property
    def plain(self) -> Precision:
        """What an engine in this precision has to be faster than: one in FP16 beside 8 bits, in FP32 beside 16."""
        return Precision.FP16 if self.quantized else Precision.FP32
