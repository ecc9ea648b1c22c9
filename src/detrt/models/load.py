"""From a reference to a Source: a PyTorch module, its ModelSpec and where it came from."""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from .. import files
from ..bundle import Provenance
from ..data.arguments import check_kind, check_model, check_path, refuse
from ..errors import SourceError
from . import trust
from .checks import check_channels, check_finite
from .families import BY_NAME, Family, first_example, formats
from .reduce import reduced, without_masks
from .source import Source, why_untested

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from typing_extensions import Unpack

__all__ = ["BY_NAME", "Family", "LoadOptions", "Source", "is_checkpoint_reference", "load_source"]
Function = TypeVar("Function", bound="Callable[..., Any]")
_EMBEDDED = Path(__file__).with_name("embedded")
EMBEDDED = {"embedded:shapes": _EMBEDDED / "shapes", "embedded:phrases": _EMBEDDED / "phrases"}
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
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
    return f"hf:{text}" if _HUB_ID.match(text) and not Path(text).exists() else None


def is_checkpoint_reference(ref: str) -> bool:
    """Whether `ref` names a checkpoint: a scheme, or a folder with a config.json."""
    return ref.startswith(("hf:", "embedded:", "ckpt:", "random:")) or (Path(ref) / "config.json").is_file()


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
        labels: file with one class name per line, or JSON {"0": "name", ...}, instead of the checkpoint's names.
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
    "imgsz": ("size",),
    "image_size": ("size",),
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


def check_changes(function: Callable[..., Any], changes: LoadChanges) -> None:
    """Raise TypeError for a keyword that a function with `**changes: Unpack[LoadChanges]` does not take, with the closest that it takes."""
    own = [one.name for one in inspect.signature(function).parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    allowed = [*(name for name in own if name != "self"), *LoadChanges.__annotations__]
    for name in changes:
        if name not in allowed:
            close = [other for other in _ELSEWHERE.get(name, ()) if other in allowed]
            close = close or difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}?" if close else f"it takes: {', '.join(allowed)}"
            raise TypeError(f"{function.__qualname__.removesuffix('.__init__')} has no keyword {name!r}; {hint}")


def load_source(ref: str, options: LoadOptions | None = None, **changes: Unpack[LoadChanges]) -> Source:
    """Load a checkpoint.

    Args:
        ref: "hf:org/name" or "hf:org/name@revision" (Hugging Face hub), a folder in transformers format (config.json and
            weights), "embedded:shapes" and "embedded:phrases" (the small detectors that ship with detrt; the second takes a
            prompt), "ckpt:FILE" (a checkpoint file of the authors), or "random:<family>" (full-size random weights, for
            measuring).
        options: how it is read.
        changes: fields of `LoadOptions` by name, e.g. `family="deim"`.

    Raises:
        SourceError: unknown reference or family, missing or damaged files, NaN weights, code that is
            not trusted. SpecError: labels that do not fit the head.
    """
    check_changes(load_source, changes)
    check_model(ref)
    ref = os.fspath(ref)
    options = changed(options, changes)
    for name in ONNX_ONLY:
        if getattr(options, name) is not None:
            raise SourceError(f"`{name}` is for ONNX files of other exporters, and '{ref}' is a checkpoint; leave it out")
    if ref.startswith(("random:", "ckpt:")):
        for name in ("resize", "preprocess"):
            if (value := getattr(options, name)) is not None:
                raise SourceError(
                    f"`{name}={value}` is for a folder in transformers format, with a file of its image processor; '{ref}' has the "
                    "authors' preprocessing; leave it out, or give `size` for another input size"
                )
    if options.assume is not None and not ref.startswith("ckpt:"):
        raise SourceError(
            f"`assume={options.assume}` is for a checkpoint file of the authors (ckpt:FILE), whose tensors do not tell everything; the "
            f"configuration of '{ref}' does; leave it out"
        )
    if not options.allow_untested_transformers and (why := why_untested()):
        raise SourceError(f"'{ref}' {why}")
    if ref.startswith("random:"):
        from .random import load_random

        source = load_random(ref, labels=options.labels, labels_start=options.labels_start, tokenizer=options.tokenizer)
    elif ref.startswith("ckpt:"):
        source = load_checkpoint(
            ref,
            family=options.family,
            labels=options.labels,
            labels_start=options.labels_start,
            tokenizer=options.tokenizer,
            assume=options.assume,
            queries=options.queries,
        )
    else:
        from .hub import load_folder

        folder, origin = _folder_of(ref, options)
        source = load_folder(
            folder,
            ref,
            trust_remote_code=options.trust_remote_code,
            labels=options.labels,
            labels_start=options.labels_start,
            family=options.family,
            tokenizer=options.tokenizer,
            resize=options.resize,
            preprocess=options.preprocess,
        )
        source = replace(source, provenance=replace(source.provenance, source=origin))
    if options.no_masks:
        source = without_masks(source)
    # A checkpoint file whose tensors do not tell the number of its queries has taken it.
    fewer = None if options.queries == source.spec.decode.num_queries else options.queries
    if fewer is not None or options.decoder_layers is not None:
        source = reduced(source, fewer, options.decoder_layers)
    chosen: dict[str, Any] = {"loading": list(source.notes)}
    for name in RECORDED:
        value = getattr(options, name)
        chosen[name] = str(value.absolute()) if isinstance(value, Path) else value
    recorded = {key: value for key, value in chosen.items() if value is not None and value is not False and value != []}
    return replace(source, provenance=replace(source.provenance, options=recorded))


def _folder_of(ref: str, options: LoadOptions) -> tuple[Path, str]:
    """The folder of a checkpoint, and its reference that holds anywhere: an absolute path, or a hub id with its revision.

    Raises:
        SourceError: there is none, or it cannot be downloaded.
    """
    from .hub import download

    if ref.startswith("embedded:"):
        if ref not in EMBEDDED:
            raise SourceError(f"there is no embedded model {ref!r}; allowed: {', '.join(EMBEDDED)}")
        return EMBEDDED[ref], ref
    if ref.startswith("hf:"):
        name, _, tag = ref[3:].partition("@")
        if not _HUB_ID.match(name):
            raise SourceError(f"{ref!r} is not a hub reference; write hf:<organisation>/<model>, e.g. hf:{first_example()}")
        trusted = options.trust_remote_code or trust.is_allowed()
        folder = download(name, options.revision or tag or None, trust_remote_code=trusted)
        # The cache keeps a revision in snapshots/<commit>.
        revision = folder.name if folder.parent.name == "snapshots" else options.revision or tag
        return folder, f"hf:{name}@{revision}" if revision else f"hf:{name}"
    folder = Path(ref).expanduser()
    if not folder.is_dir():
        if folder.is_file() and (folder.parent / "config.json").is_file():
            raise SourceError(f"{ref!r} is a file of a checkpoint in transformers format; give its folder: {folder.parent}")
        if folder.is_file():
            raise SourceError(
                f"{ref!r} is a file; give the folder that holds config.json and the weights, or ckpt:{ref} for a "
                "checkpoint file as its authors publish it"
            )
        if hub := hub_name(ref):
            raise SourceError(f"there is no folder {ref!r}; check the path, or write '{hub}' for the Hugging Face hub")
        raise SourceError(
            f"there is no folder {ref!r}; check the path, or give hf:<organisation>/<model>, ckpt:FILE for a checkpoint file as its "
            "authors publish it, or embedded:shapes"
        )
    return folder, str(folder.absolute())


def check_unchanged(ref: str, sha256: str) -> None:
    """Compare the weights of a checkpoint with the digest in a provenance; "" is of one without files.

    Raises:
        SourceError: the checkpoint is not on this machine, or its weights are others.
    """
    from .hub import weights_digest

    if not sha256:
        return
    if ref.startswith("ckpt:"):
        path = Path(ref.removeprefix("ckpt:"))
        if not path.is_file():
            raise SourceError(f"the checkpoint '{ref}' is not on this machine; build the bundle again from where it is now")
        found = files.sha256_of(path)
    else:
        found = weights_digest(_folder_of(ref, LoadOptions())[0])
    if found != sha256:
        raise SourceError(
            f"the weights of '{ref}' are not those that the bundle was made from (their SHA-256 differs); build another bundle "
            "from them with `output=FOLDER`"
        )


def family_names() -> list[str]:
    """What `--family` takes for a checkpoint file."""
    return list(formats())


def formats_of(family: str) -> list[str]:
    """Whose checkpoint files of a family are read; empty for families without."""
    return [title for one in BY_NAME[family].formats for title in one.titles]


def load_checkpoint(
    ref: str,
    *,
    family: str | None = None,
    labels: Path | str | None = None,
    labels_start: int | None = None,
    tokenizer: Path | str | None = None,
    assume: str | None = None,
    queries: int | None = None,
) -> Source:
    """Load `ckpt:FILE`, a checkpoint file as its authors publish it.

    Args:
        family: one of `family_names()` instead of the one that the keys tell.
        labels_start, assume, queries: see `LoadOptions`.

    Raises:
        SourceError: see `state_file.read_state`; an unknown or wrong family; keys that do not fit; a number
            of classes that no label set has; a prompted model without `tokenizer`. SpecError: labels that do not fit the head.
    """
    from .checkpoints.assumed import parse_assumed
    from .checkpoints.loader import load, names_start, spec_of, tells
    from .checkpoints.state_file import read_state
    from .hub import refuse_text_choices, require_transformers
    from .preprocessor import read_input_spec
    from .source import versions, why_unsupported
    from .text import read_tokenizer, text_spec, with_boolean_masks

    require_transformers()
    path = Path(ref.removeprefix("ckpt:")).expanduser()
    if family is not None and family not in formats():
        raise SourceError(f"there is no family {family!r} for checkpoint files; `family` takes: {', '.join(formats())}")
    file = read_state(path, ref, tells)
    variant = family or _recognise(file.tensors, ref)
    known, _ = formats()[variant]
    if why := why_unsupported(known):
        raise SourceError(f"'{ref}' {why}")
    # Before seconds of building a model, not after them.
    refuse_text_choices(known, labels, tokenizer, labels_start)
    words = read_tokenizer(tokenizer, None, ref) if known.text else None
    stated = parse_assumed(assume) if assume is not None else {}
    module, row, report = load(file.tensors, variant, file.args, ref, stated=stated, queries=queries)
    check_channels(module, ref)
    report.weights = file.weights
    report.notes += file.notes
    if words is None:
        first = names_start(variant, file) if labels_start is None and labels is None else labels_start
        spec = spec_of(module, row, report, labels=labels, stored=file.labels, first=first, ref=ref)
    else:
        with_boolean_masks(module)
        spec = text_spec(row, module, read_input_spec(None, row, module.config), words, ref)
    check_finite(module, ref)
    provenance = Provenance(
        source=f"ckpt:{path.absolute()}",
        checkpoint_sha256=files.sha256_of(path),
        parameters=sum(p.numel() for p in module.parameters()),
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    notes = (f"{path.name}: {report.line()}",)
    return Source(module, replace(spec, name=path.stem), row, provenance, notes=notes, tokenizer=words)


def _recognise(state: Mapping[str, Tensor], ref: str) -> str:
    """The variant that the keys tell."""
    from .checkpoints.loader import recognise, refuse_relatives

    refuse_relatives(state, ref)
    found = recognise(state)
    if found is None:
        folder = Path(ref.removeprefix("ckpt:")).parent
        if (folder / "config.json").is_file():
            raise SourceError(f"'{ref}' is a file of a checkpoint in transformers format; give its folder: {folder}")
        raise SourceError(
            f"'{ref}' has keys of no model that detrt knows (e.g. {', '.join(list(state)[:3])}); it knows: "
            f"{', '.join(family_names())}. If it is one of them, name it with `family`"
        )
    if also := formats()[found][1].also:
        raise SourceError(f"'{ref}' is {also}")
    return found
