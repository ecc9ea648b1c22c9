"""The content of a served model: a digest that tells whether another worker would open the same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .. import files
from ..backends.base import BaseSession
from ..backends.open import kind_of
from ..bundle import Bundle, files_with


def stored_content(ref: str) -> str:
    """Digest of the files that a reference names now; "" of a checkpoint, see `opened_content`.

    Of a bundle it is that of `detrt.json`, with which every file is compared that is opened.

    Raises:
        DetrtError: there is no model, or a damaged one.
    """
    kind, path = kind_of(ref), Path(ref)
    if kind == "bundle":
        return Bundle.open(path).digest
    if kind == "checkpoint":
        return ""
    return _digest(*(f"{one.name} {files.sha256_of(one)}" for one in files_with(path)))


def opened_content(stored: str, session: BaseSession) -> str:
    """Digest of what a session holds. stored: of its files, as `stored_content` gives it."""
    return stored or _digest(session.spec.to_json(), session.checkpoint_sha256)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
