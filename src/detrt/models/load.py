"""From a reference to a Source: a PyTorch module, its ModelSpec and where it came from."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..bundle import Provenance
from ..errors import SourceError
from ..spec import ModelSpec
from .families import BY_MODEL_TYPE, BY_NAME, FAMILIES, Family
from .source import Source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from ..spec import ModelSpec
    from .checkpoints.dino import LoadReport as DinoReport
    from .checkpoints.key_map import LoadReport
    from .checkpoints.state_file import StateFile
    from .families import Family

__all__ = ["BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family", "Source", "is_checkpoint_reference", "load_source"]
_EMBEDDED = Path(__file__).with_name("embedded")
EMBEDDED = {"embedded:shapes": _EMBEDDED / "shapes", "embedded:phrases": _EMBEDDED / "phrases"}
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


def is_checkpoint_reference(ref: str) -> bool:
    """Whether `ref` names a checkpoint: a scheme, or a folder with a config.json."""
    return ref.startswith(("hf:", "embedded:", "ckpt:", "random:")) or (Path(ref) / "config.json").is_file()


def load_source(
    ref: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    labels: Path | str | None = None,
    family: str | None = None,
    tokenizer: Path | str | None = None,
) -> Source:
    """Load a checkpoint.

    ref: "hf:org/name" or "hf:org/name@revision" (Hugging Face hub), a folder in transformers format
    (config.json and weights), "embedded:shapes" and "embedded:phrases" (the small detectors that ship with detrt;
    the second takes a prompt), or "random:<family>" (full-size random weights, for measuring).
    labels: a file with one class name a line, or JSON {"0": "name", ...}, instead of the checkpoint's.
    family: for ckpt:FILE, the family instead of the one that its keys tell; for a folder of a DEIMv2 with
    its own code, "deimv2-upstream" runs detrt's published DEIMv2 on its weights instead of that code.
    tokenizer: of a prompted model, a tokenizer.json, a vocab.txt or a folder with one, instead of the
    checkpoint's own.

    Raises:
        SourceError: unknown reference or family, missing or damaged files, NaN weights, code that is
            not trusted. SpecError: labels that do not fit the head.
    """
    from .hub import download, load_folder

    if ref.startswith("random:"):
        from .random import load_random

        return load_random(ref, labels=labels, tokenizer=tokenizer)
    if ref.startswith("embedded:"):
        if ref not in EMBEDDED:
            raise SourceError(f"there is no embedded model {ref!r}; allowed: {', '.join(EMBEDDED)}")
        folder = EMBEDDED[ref]
    elif ref.startswith("hf:"):
        name, _, tag = ref[3:].partition("@")
        if not _HUB_ID.match(name):
            raise SourceError(f"{ref!r} is not a hub reference; write hf:<organisation>/<model>, e.g. hf:{FAMILIES[0].example}")
        folder = download(name, revision or tag or None, trust_remote_code=trust_remote_code)
    elif ref.startswith("ckpt:"):
        return load_checkpoint(ref, family=family, labels=labels, tokenizer=tokenizer)
    else:
        folder = Path(ref).expanduser()
        if not folder.is_dir():
            if folder.is_file():
                raise SourceError(
                    f"{ref!r} is a file; give the folder that holds config.json and the weights, or ckpt:{ref} for a "
                    "checkpoint file as its authors publish it"
                )
            hint = f"write 'hf:{ref}' for the Hugging Face hub" if _HUB_ID.match(ref) else "give hf:<organisation>/<model>"
            raise SourceError(f"{ref!r} is not a folder; {hint}, a transformers checkpoint folder, or embedded:shapes")
    return load_folder(folder, ref, trust_remote_code=trust_remote_code, labels=labels, family=family, tokenizer=tokenizer)


# `ckpt:FILE`: the authors' own checkpoint files as a Source.
OTHERS = {"dino", "co_dino"}  # read by `original_dino`

# Relatives with keys like those of a family that is read: (start of a key that tells, what it is).
_RELATIVES = (
    ("detr.transformer.", "a facebookresearch DETR for panoptic segmentation; detrt reads the detectors"),
    (
        "transformer.decoder.layers.0.sa_qcontent_proj.",
        "a Conditional DETR or DAB-DETR under its authors' names; detrt reads them in transformers' format, e.g. "
        "hf:microsoft/conditional-detr-resnet-50",
    ),
)


def family_names() -> list[str]:
    """What `--family` takes for a checkpoint file."""
    from .checkpoints import FORMATS

    return [*FORMATS, *sorted(OTHERS)]


def formats_of(family: str) -> list[str]:
    """Whose checkpoint files of a family are read; empty for families without."""
    from .checkpoints import FORMATS

    dino = {
        "dino": ["IDEA-Research DINO", "mmdetection DINO"],
        "co_dino": ["Sense-X Co-DETR", "mmdetection CO-DETR"],
    }
    return dino.get(family) or [title for _, name, title in FORMATS.values() if name == family]


def load_checkpoint(
    ref: str,
    *,
    family: str | None = None,
    labels: Path | str | None = None,
    tokenizer: Path | str | None = None,
) -> Source:
    """Load `ckpt:FILE`. family: one of `family_names()` instead of the one that the keys tell.

    Raises:
        SourceError: see `state_files.read_state`; an unknown or wrong family; keys that do not fit; a number
            of classes that no label set has; a prompted model without `tokenizer`. SpecError: labels that do not fit the head.
    """
    from .checkpoints.state_file import read_state
    from .hub import _transformers, refuse_text_choices
    from .source import _check_finite

    _transformers()
    path = Path(ref.removeprefix("ckpt:")).expanduser()
    if family is not None and family not in family_names():
        raise SourceError(f"there is no family {family!r} for checkpoint files; --family takes: {', '.join(family_names())}")
    file = read_state(path, ref)
    for start, what in _RELATIVES:
        if any(key.startswith(start) for key in file.tensors):
            raise SourceError(f"'{ref}' is {what}")
    variant = family or _recognise(file.tensors, ref)
    if variant in OTHERS:
        refuse_text_choices(BY_NAME[variant], None, tokenizer)
        module, spec, row, report = _load_dino(file, variant, labels, path)
        line = "; ".join([file.weights, *report.lines(), *file.notes])
    else:
        from .checkpoints import FORMATS, load
        from .text import read_tokenizer

        if family is not None and _told(file.tensors) in OTHERS:
            raise SourceError(f"'{ref}' has the keys of a DINO and not of {family}: it is another family; leave --family out")
        # Before seconds of building a model, not after them.
        row = BY_NAME[FORMATS[variant][1]]
        refuse_text_choices(row, labels, tokenizer)
        words = read_tokenizer(tokenizer, None, ref) if row.text else None
        module, row, report = load(file.tensors, variant, file.args, ref)
        report.weights = file.weights
        report.notes += file.notes
        if words is not None:
            return _prompted(module, row, words, report, ref, path)
        spec = _spec(module, row, labels, file.labels, report, ref)
        line = report.line()
    _check_finite(module, ref)
    provenance = _provenance(module, ref, path)
    return Source(module, replace(spec, name=path.stem), row, provenance, notes=(f"{path.name}: {line}",))


def _provenance(module: nn.Module, ref: str, path: Path) -> Provenance:
    from .source import versions

    return Provenance(
        source=ref,
        checkpoint_sha256=files.sha256_of(path),
        parameters=sum(p.numel() for p in module.parameters()),
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _prompted(module: nn.Module, family: Family, words: bytes, report: LoadReport, ref: str, path: Path) -> Source:
    """The Source of a model that takes a prompt; its tokenizer is not in the file."""
    from .preprocessor import read_input_spec
    from .source import _check_finite
    from .text import text_spec, with_boolean_masks

    _check_finite(module, ref)
    with_boolean_masks(module)
    entry = read_input_spec(None, family, module.config)
    spec = replace(text_spec(family, module, entry, words, ref), name=path.stem)
    notes = (f"{path.name}: {report.line()}",)
    return Source(module, spec, family, _provenance(module, ref, path), notes=notes, tokenizer=words)


def _told(state: Mapping[str, Tensor]) -> str | None:
    """The variant that the keys tell."""
    from .checkpoints import dino as original_dino
    from .checkpoints import recognise

    found = recognise(state)
    if found is None and (layout := original_dino.recognise(state)) is not None:
        return "co_dino" if layout == "co_dino" else "dino"
    return found


def _recognise(state: Mapping[str, Tensor], ref: str) -> str:
    found = _told(state)
    if found is None:
        raise SourceError(
            f"'{ref}' has keys of no model that detrt knows (e.g. {', '.join(list(state)[:3])}); it knows: "
            f"{', '.join(family_names())}. If it is one of them, name it with --family"
        )
    if found == "d_fine":
        raise SourceError(
            f"'{ref}' is D-FINE or DEIM on D-FINE: the keys are the same, and the two compute different functions "
            "(ReLU or SiLU). Say which with --family d_fine or --family deim"
        )
    return found


def _load_dino(
    file: StateFile, family: str, labels: Path | str | None, path: Path
) -> tuple[nn.Module, ModelSpec, Family, DinoReport]:
    from .checkpoints import dino as original_dino

    layout = original_dino.recognise(file.tensors)
    if layout is None or (layout == "co_dino") != (family == "co_dino"):
        raise SourceError(
            f"'{path}' is not a {BY_NAME[family].title} checkpoint by its keys: it is another family; leave --family out"
        )
    return original_dino.load(dict(file.tensors), variant=layout, labels=labels, stored=file.labels, name=path.stem)


def _spec(module: Any, family: Family, labels: Path | str | None, stored: Any, report: Any, ref: str) -> ModelSpec:
    from .labels import choose
    from .preprocessor import read_input_spec
    from .source import make_spec

    names, note = choose(int(module.config.num_labels), file=labels, stored=stored, ref=ref)
    report.notes.append(note)
    # There is no preprocessor file beside an original checkpoint: the authors' choices are in the family's row.
    entry = read_input_spec(None, family, module.config)
    return replace(make_spec(family, module.config, entry), labels=names)
