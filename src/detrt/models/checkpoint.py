"""`ckpt:FILE`: the authors' own checkpoint files as a Source."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..bundle import Provenance
from ..errors import SourceError
from .families import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from ..spec import ModelSpec
    from .checkpoints.dino import LoadReport as DinoReport
    from .checkpoints.key_map import LoadReport
    from .checkpoints.state_file import StateFile
    from .families import Family
    from .load import Source

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
    from .hub import _check_finite, _transformers, refuse_text_choices
    from .load import Source

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
        from .tokenizer import read_tokenizer

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
    from .hub import versions

    return Provenance(
        source=ref,
        checkpoint_sha256=files.sha256_of(path),
        parameters=sum(p.numel() for p in module.parameters()),
        versions=versions(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _prompted(module: nn.Module, family: Family, words: bytes, report: LoadReport, ref: str, path: Path) -> Source:
    """The Source of a model that takes a prompt; its tokenizer is not in the file."""
    from .hub import _check_finite
    from .load import Source
    from .preprocessor import read_input_spec
    from .text import text_spec, with_boolean_masks

    _check_finite(module, ref)
    with_boolean_masks(module)
    entry = read_input_spec(Path("/nonexistent"), family, module.config)
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
    from .hub import make_spec
    from .labels import choose
    from .preprocessor import read_input_spec

    names, note = choose(int(module.config.num_labels), file=labels, stored=stored, ref=ref)
    report.notes.append(note)
    # There is no preprocessor file beside an original checkpoint: the authors' choices are in the family's row.
    entry = read_input_spec(Path("/nonexistent"), family, module.config)
    return replace(make_spec(family, module.config, entry), labels=names)
