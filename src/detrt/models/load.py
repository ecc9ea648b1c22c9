"""From a reference to a Source: a PyTorch module, its ModelSpec and where it came from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..data.arguments import check_model
from ..errors import SourceError
from ..spec import AUTHORS
from . import trust
from .checks import check_channels, check_finite
from .families import BY_NAME, first_example, formats
from .load_options import HUB_ID, ONNX_ONLY, RECORDED, LoadChanges, LoadOptions, changed, check_changes, hub_name
from .reduce import reduced, without_masks
from .source import Source, why_untested

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from typing_extensions import Unpack

_EMBEDDED = Path(__file__).with_name("embedded")
EMBEDDED = {"embedded:shapes": _EMBEDDED / "shapes", "embedded:phrases": _EMBEDDED / "phrases"}


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

        source = load_random(ref, options)
    elif ref.startswith("ckpt:"):
        source = load_checkpoint(ref, options)
    else:
        from .hub import load_folder

        folder, origin = _folder_of(ref, options)
        source = load_folder(folder, ref, options)
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
        if not HUB_ID.match(name):
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


def load_checkpoint(ref: str, options: LoadOptions) -> Source:
    """Load `ckpt:FILE`, a checkpoint file as its authors publish it.

    Raises:
        SourceError: see `state_file.read_state`; an unknown or wrong family; keys that do not fit; a number
            of classes that no label set has; a prompted model without `tokenizer`. SpecError: labels that do not fit the head.
    """
    from .checkpoints.assumed import parse_assumed
    from .checkpoints.loader import load, names_start, spec_of, tells
    from .checkpoints.state_file import read_state
    from .hub import refuse_text_choices, require_transformers
    from .preprocessor import read_input_spec
    from .source import provenance_of, why_unsupported
    from .text import read_tokenizer, text_spec

    require_transformers()
    path, family = Path(ref.removeprefix("ckpt:")).expanduser(), options.family
    if family is not None and family not in formats():
        raise SourceError(f"there is no family {family!r} for checkpoint files; `family` takes: {', '.join(formats())}")
    file = read_state(path, ref, tells)
    variant = family or _recognise(file.tensors, ref)
    known, _ = formats()[variant]
    if why := why_unsupported(known):
        raise SourceError(f"'{ref}' {why}")
    # Before seconds of building a model, not after them.
    refuse_text_choices(known, options)
    words = read_tokenizer(options.tokenizer, None, ref) if known.text else None
    stated = parse_assumed(options.assume) if options.assume is not None else {}
    module, row, report = load(file.tensors, variant, file.args, ref, stated=stated, queries=options.queries)
    check_channels(module, ref)
    report.weights = file.weights
    report.notes += file.notes
    if words is None:
        told = options.labels_start is not None or options.labels is not None
        first = options.labels_start if told else names_start(variant, file)
        spec = spec_of(module, row, report, labels=options.labels, stored=file.labels, first=first, ref=ref)
    else:
        row.made(module)
        spec = text_spec(row, module, read_input_spec(None, row, module.config), words, ref)
    check_finite(module, ref)
    provenance = provenance_of(module, f"ckpt:{path.absolute()}", files.sha256_of(path))
    notes = (f"{path.name}: {report.line()}",)
    return Source(module, replace(spec, name=path.stem, origin=AUTHORS), row, provenance, notes=notes, tokenizer=words)


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
            f"{', '.join(family_names())}. If it is one of them, name it with `family`; if transformers saved it, give the folder "
            "with its config.json"
        )
    if also := formats()[found][1].also:
        raise SourceError(f"'{ref}' is {also}")
    return found
