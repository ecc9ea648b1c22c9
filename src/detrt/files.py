"""Atomic writes of files, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from .errors import OutputError

_FOLDER = "cannot write '{}': a folder has that name; give another output path"


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[Path]:
    """Give a temporary name beside `path`; rename it to `path` if the block succeeds, else remove it. A device or a pipe is given itself.

    Raises:
        OutputError: the folder cannot be written, or the disk is full.
    """
    path = Path(path)
    if not path.name:  # "." and "/", which have no name to put another beside
        raise OutputError(_FOLDER.format(path))
    if _is_stream(path):
        with naming(path):
            yield path
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with naming(path), making_parents(path):
        try:
            yield temporary
            if path.is_dir():
                raise OutputError(_FOLDER.format(path))
            os.replace(temporary, path)
        finally:
            remove(temporary)


def _is_stream(path: Path) -> bool:
    """Whether a file renamed to `path` would replace what programs share: /dev/null, a named pipe, /dev/stdout, >(jq)."""
    links = (os.path.realpath(path.parent) + "/", os.readlink(path) if path.is_symlink() else "")
    return path.exists() and not path.is_dir() and (not path.is_file() or any(link.startswith("/proc/") for link in links))


@contextlib.contextmanager
def naming(path: Path | str | os.PathLike) -> Iterator[None]:
    """Name `path` in the errors of the operating system.

    Raises:
        OutputError: in place of any OSError but a BrokenPipeError.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of stdout, or of `path`, has gone, which is not an error
        raise
    except OSError as error:
        raise output_error(path, error) from error


@contextlib.contextmanager
def making_parents(path: Path) -> Iterator[None]:
    """Make the folders above `path`; those that were made here go again if the block fails.

    Raises:
        OSError: a folder cannot be made.
    """
    made = [folder for folder in path.parents if not folder.exists()]  # the innermost first
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):  # not empty: something else was put there meanwhile
                folder.rmdir()
        raise


def remove(path: Path) -> None:
    """Remove a file or a folder where there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def output_error(path: Path | str | os.PathLike, error: OSError) -> OutputError:
    """Turn an operating system error into one that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(f"cannot write '{path}': the disk is full; free space or give another output path")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(f"cannot write '{path}': no permission; give an output path that you may write")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return OutputError(f"cannot write '{path}': a part of the path is a file, not a folder")
    return OutputError(f"cannot write '{path}': {error.strerror or error}; give another output path")


def check_place(path: Path | str) -> None:
    """Find out before minutes of work whether a file can be written at `path`; leaves nothing there.

    Raises:
        OutputError: as `writing` would.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise OutputError(_FOLDER.format(path))
        if _is_stream(path):
            return
        folder = path.absolute().parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        probe = folder / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise output_error(path, error) from error


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write a whole file atomically."""
    with writing(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: Path | str, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))
