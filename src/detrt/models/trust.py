"""Whether the code that a model brings may run: the Python files of a checkpoint, native code of packages and engines.

Three things consent: the caller (`trust_remote_code`), the environment variable DETRT_TRUST_REMOTE_CODE for a whole process and its
workers, and, of a file with native code, that this user built it on this machine, which is known by its digest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .. import files
from ..errors import EngineError, OutputError, SpecError

VARIABLE = "DETRT_TRUST_REMOTE_CODE"
STORE = "DETRT_TRUSTED"  # folder of the digests of what was built here; "off": none is kept
FLAG = "`trust_remote_code`"
_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_allowed: ContextVar[bool] = ContextVar("detrt_trust", default=False)


@contextlib.contextmanager
def allowing(consent: bool) -> Iterator[None]:
    """Let the code of models run that are opened in the block, where `consent` is given."""
    token = _allowed.set(_allowed.get() or consent)
    try:
        yield
    finally:
        _allowed.reset(token)


def is_allowed() -> bool:
    """Whether the caller or the environment consents. Raises SpecError for a value of the variable that is neither yes nor no."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if text not in (*_YES, *_NO):
        raise SpecError(f"{VARIABLE} must be 1 (code of models may run) or 0; got {text!r}")
    return _allowed.get() or text in _YES


def native_code(options: Mapping[str, Any]) -> str:
    """What native code an engine has the machine run, in words; "" for none. options: of `EngineFacts`."""
    if plugins := options.get("plugins"):
        return f"the plugin libraries {', '.join(map(str, plugins))}"
    return "TensorRT's own runtime code" if options.get("version_compatible") else ""


def remember(path: Path) -> None:
    """Keep the digest of a file that was built here, so that this user opens it without being asked."""
    folder = _store()
    if folder is not None:
        with contextlib.suppress(OutputError, OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files.write_text(folder / files.sha256_of(path), f"{path.absolute()}\n")


def is_built_here(path: Path) -> bool:
    """Whether this user built a file with this content on this machine."""
    folder = _store()
    # Not `Path.is_file`, which raises where the home folder is another user's.
    return folder is not None and os.path.isfile(folder / files.sha256_of(path))


def require(path: Path, what: str) -> None:
    """Raise EngineError for a file whose native code nobody consented to. what: that code in words; "" for none."""
    if what and not is_allowed() and not is_built_here(path):
        raise EngineError(
            f"'{path}' holds native code ({what}), and was not built by this user on this machine; where you trust whoever built it, add "
            f"{FLAG} or set {VARIABLE}=1"
        )


def _store() -> Path | None:
    chosen = os.environ.get(STORE, "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    folder = files.folder_of_user("XDG_DATA_HOME", "~/.local/share")
    return None if folder is None else folder / "trusted"
