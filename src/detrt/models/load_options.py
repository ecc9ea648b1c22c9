"""How a checkpoint, or an ONNX file of another exporter, is read: what a caller states. Light, so that what runs bundles imports no loader."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from ..data.arguments import check_kind, check_path, refuse
from ..errors import SourceError

HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
ONNX_ONLY = ("layout", "mean", "std")  # fields of LoadOptions that no checkpoint takes
FLAGS = ("trust_remote_code", "allow_untested_transformers")  # fields of LoadOptions that are off or on
# Fields of LoadOptions that the provenance records; paths are absolute.
RECORDED = (
    "family",
    "labels",
    "labels_start",
    "tokenizer",
    "resize",
    "preprocess",
    "queries",
    "decoder_layers",
    "assume",
    "no_masks",
    *ONNX_ONLY,
)


def hub_name(text: str) -> str | None:
    """How a model is written that lacks its `hf:`: of the form org/name, and no path of this machine."""
    return f"hf:{text}" if HUB_ID.match(text) and not Path(text).exists() else None


def three_numbers(name: str) -> Callable[[str], tuple[float, ...]]:
    """A parser of three comma-separated numbers, of R, G and B, for the field `name`. It raises SourceError."""

    def parse(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(part) for part in text.split(","))
        except ValueError:
            values = ()
        if len(values) != 3:
            raise SourceError(f"`{name}` must be three comma-separated numbers, of R, G and B, such as 0.5,0.5,0.5; got {text!r}")
        return values

    return parse


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is read.

    Args:
        family: of ckpt:FILE, the family instead of the one that its keys tell; of the folder of a DEIMv2 with its own code,
            "deimv2-upstream" runs detrt's published DEIMv2 on its weights instead of that code.
        labels: file of class names, see `labels.read_labels`, instead of the checkpoint's names.
        labels_start: column of the head that the first name is for, of `labels` or of the file's own list, where the head has more
            columns than there are names.
        tokenizer: of a prompted model, a tokenizer.json, a vocab.txt or a folder with one, instead of the checkpoint's own.
        trust_remote_code: run code that comes with the model: Python files of a checkpoint, and native code of a package or an engine
            that was built elsewhere, see docs/guide/trust.md.
        allow_untested_transformers: load with a version of transformers that detrt was not tested with; an export is then always
            compared with PyTorch.
        resize: how images are resized, instead of what the folder's image processor says; see `preprocessor.parse_resize`.
        preprocess: "family-default" for the authors' preprocessing of the family instead of the folder's image processor.
        queries, decoder_layers: how many of them run, fewer than the model was trained with, see `detrt.models.reduce`; of ckpt:FILE,
            also more queries than published, where it was trained so and no tensor tells their number.
        assume: of ckpt:FILE, facts that no tensor tells, where they differ from what was published: "heads=4,activation=gelu", or a
            dictionary. Without it `info` lists what was assumed.
        no_masks: True for the boxes alone of a model with masks, without the time of its mask head.
        layout, mean, std: of an ONNX file of another exporter, see `detrt.models.foreign`; no checkpoint takes them.
        revision: branch, tag or commit of a Hugging Face repository.
    """

    family: str | None = field(
        default=None,
        metadata={
            "help": "Model family of ckpt:FILE, if it cannot be inferred from the keys; deimv2-upstream for a DEIMv2 folder.",
            "panel": "Checkpoint",
        },
    )
    labels: Path | None = field(
        default=None,
        metadata={"help": "Class names of a checkpoint: a text file with one per line, or JSON.", "panel": "Checkpoint"},
    )
    labels_start: int | None = field(
        default=None,
        metadata={
            "help": "Column of a checkpoint's head that the first class name is for, where it has more columns than names: 0 or 1.",
            "panel": "Checkpoint",
        },
    )
    tokenizer: Path | None = field(
        default=None,
        metadata={
            "help": "Tokenizer of a prompted checkpoint: tokenizer.json, vocab.txt, or a folder with one.",
            "panel": "Checkpoint",
        },
    )
    trust_remote_code: bool = field(
        default=False,
        metadata={"help": "Run the code that a model brings: Python files, compiled packages, plugins.", "panel": "Checkpoint"},
    )
    allow_untested_transformers: bool = field(
        default=False,
        metadata={"help": "Load with a transformers version that detrt was not tested with.", "panel": "Checkpoint"},
    )
    resize: str | None = field(
        default=None,
        metadata={
            "help": "Resize of a checkpoint's images, not its file's: 640x640, shortest:800,1333 or fit:480x480.",
            "panel": "Checkpoint",
        },
    )
    preprocess: str | None = field(
        default=None,
        metadata={"help": "family-default: the authors' preprocessing, not the checkpoint's file.", "panel": "Checkpoint"},
    )
    queries: int | None = field(
        default=None,
        metadata={
            "help": "Queries of a checkpoint that run: fewer are faster (RT-DETR, D-FINE, DEIMv2, RF-DETR).",
            "panel": "Checkpoint",
        },
    )
    decoder_layers: int | None = field(
        default=None,
        metadata={"help": "Decoder layers of a checkpoint that run, from the first.", "panel": "Checkpoint"},
    )
    assume: str | None = field(
        default=None,
        metadata={
            "help": "Facts of ckpt:FILE that no tensor tells and that are not as published, such as heads=4,activation=gelu; info lists them.",
            "panel": "Checkpoint",
        },
    )
    no_masks: bool | None = field(
        default=None,
        metadata={"help": "Boxes alone of a checkpoint with masks: a detector.", "panel": "Checkpoint", "flag": "no-masks"},
    )
    layout: str | None = field(
        default=None,
        metadata={
            "help": "Layout of an ONNX file of another exporter: transformers, rt-detr, rf-detr, ultralytics.",
            "panel": "Checkpoint",
        },
    )
    mean: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "Mean of R, G, B for such a file: 0.485,0.456,0.406.",
            "panel": "Checkpoint",
            "parse": three_numbers("mean"),
        },
    )
    std: tuple[float, ...] | None = field(
        default=None,
        metadata={
            "help": "Standard deviation of R, G, B for such a file: 0.229,0.224,0.225.",
            "panel": "Checkpoint",
            "parse": three_numbers("std"),
        },
    )
    revision: str | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "tokenizer"):
            value = getattr(self, name)
            check_path(value, name)
            object.__setattr__(self, name, None if value is None else Path(value))
        if self.assume is not None:
            from .checkpoints.assumed import stated_text

            object.__setattr__(self, "assume", stated_text(self.assume))
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = three_numbers(name)(value)
            elif value is not None and (isinstance(value, bytes) or not isinstance(value, Iterable)):
                raise refuse(name, "three numbers, of R, G and B, such as (0.5, 0.5, 0.5)", value)
            object.__setattr__(self, name, None if value is None else tuple(float(one) for one in value))

    def choices(self) -> dict[str, Any]:
        """What is stated instead of what a checkpoint says, by the name of the option."""
        stated = {name: value for name in RECORDED if (value := getattr(self, name)) is not None}
        return {name: value if isinstance(value, (tuple, int)) else str(value) for name, value in stated.items()}

    def typed(self) -> list[str]:
        """The choices as messages name them, e.g. "`queries=100`"."""
        found = []
        for name, value in self.choices().items():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            found.append(f"`{name}`" if value is True else f"`{name}={shown}`")
        return found

    def arguments(self) -> dict[str, Any]:
        """The choices and the flags, as keywords of `open_session`."""
        return {**self.choices(), **{name: getattr(self, name) for name in FLAGS}}

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON holds, for another process; `LoadOptions(**data)` reads them."""
        return {one.name: str(value) if isinstance(value := getattr(self, one.name), Path) else value for one in fields(self)}


class LoadChanges(TypedDict, total=False):
    """The fields of `LoadOptions`, for functions that take them as keywords."""

    family: str | None
    labels: Path | str | None
    labels_start: int | None
    tokenizer: Path | str | None
    trust_remote_code: bool
    allow_untested_transformers: bool
    resize: str | None
    preprocess: str | None
    queries: int | None
    decoder_layers: int | None
    assume: str | Mapping[str, object] | None
    no_masks: bool | None
    layout: str | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    revision: str | None


def changed(options: LoadOptions | None, changes: LoadChanges) -> LoadOptions:
    """Options, or the default ones, with some fields replaced."""
    check_kind(options, "load", LoadOptions)
    return replace(options or LoadOptions(), **changes)  # type: ignore[arg-type]  # __post_init__ makes paths of texts


# Keywords of other tools, and options of the command line -> ours.
_ELSEWHERE = {
    "conf": ("threshold",),
    "confidence": ("threshold",),
    "imgsz": ("size", "height"),
    "image_size": ("size", "height"),
    "size": ("height",),
    "format": ("targets",),
    "names": ("labels",),
    "class_names": ("labels",),
    "providers": ("device", "backend"),
    "provider": ("device", "backend"),
    "max_det": ("max_detections",),
    "batch": ("batch_size",),
    "target": ("targets",),
    "engines": ("targets",),
    "packages": ("targets",),
    "half": ("precision",),
    "int8": ("precision",),
    "weights": ("model",),
    "checkpoint": ("model",),
}


# What a detector is not told, because it was decided before.
_PRECISION = "the precision is chosen when a bundle is built: build(checkpoint, 'bundle', precision='fp16')"
_BUILT = dict.fromkeys(("half", "precision", "fp16", "int8", "dtype", "torch_dtype"), _PRECISION)


def _inside(function: Callable[..., Any], names: Sequence[str]) -> str:
    """The argument with a field of one of these names, as it is typed; "" where there is none."""
    for one in inspect.signature(function).parameters.values():
        if is_dataclass(one.default):
            found = next((name for name in names if name in {own.name for own in fields(one.default)}), None)
            if found is not None:
                return f"{one.name}={type(one.default).__name__}({found}=...)"
    return ""


def check_changes(function: Callable[..., Any], changes: LoadChanges) -> None:
    """Raise TypeError for a keyword that a function with `**changes: Unpack[LoadChanges]` does not take, with the closest that it takes."""
    own = [one.name for one in inspect.signature(function).parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    allowed = [*(name for name in own if name != "self"), *LoadChanges.__annotations__]
    for name in changes:
        if name not in allowed:
            close = [other for other in _ELSEWHERE.get(name, ()) if other in allowed]
            if not close and (inside := _inside(function, (name, *_ELSEWHERE.get(name, ())))):
                raise TypeError(f"{function.__qualname__} has no keyword {name!r}; use {inside}")
            if not close and name in _BUILT and "targets" not in allowed:
                raise TypeError(f"{function.__qualname__.removesuffix('.__init__')} has no keyword {name!r}; {_BUILT[name]}")
            close = close or difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it takes: {', '.join(allowed)}"
            raise TypeError(f"{function.__qualname__.removesuffix('.__init__')} has no keyword {name!r}; {hint}")
