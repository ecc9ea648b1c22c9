"""From a reference to a Source: a PyTorch module, its ModelSpec and where it came from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import Provenance
from ..errors import SourceError
from ..spec import ModelSpec
from .families import BY_MODEL_TYPE, BY_NAME, FAMILIES, Family

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family", "Source", "is_checkpoint_reference", "load_source"]

_EMBEDDED = Path(__file__).with_name("embedded")
EMBEDDED = {"embedded:shapes": _EMBEDDED / "shapes", "embedded:phrases": _EMBEDDED / "phrases"}
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass(frozen=True, slots=True)
class Source:
    """A loaded checkpoint: float32 module in eval mode on the CPU, its facts and its origin.

    notes: what was decided while loading, for a log.
    tokenizer: of a prompted model, a file of the `tokenizers` library (JSON); None for others.
    """

    module: nn.Module
    spec: ModelSpec
    family: Family
    provenance: Provenance
    notes: tuple[str, ...] = ()
    tokenizer: bytes | None = None


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
        from .checkpoint import load_checkpoint

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
