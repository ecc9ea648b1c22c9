"""Files in local folders and object stores behind one interface. The only module that imports `fsspec`."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ... import files
from ...data.images import IMAGE_SUFFIXES, natural_key
from ...errors import DetrtError, ImageError, MissingPackageError, OutputError

_TRIES = 3
_PAUSE_SECONDS = 0.5


def is_address(name: str) -> bool:
    """Whether a name is an address such as s3://bucket/key, not a local path."""
    return re.match(r"[a-z][a-z0-9+.-]+://", name, re.IGNORECASE) is not None


def _open_system(name: str) -> tuple[Any, str]:
    """The file system of an address and the path in it. Raises MissingPackageError, DetrtError."""
    try:
        import fsspec
    except ImportError:
        raise MissingPackageError("fsspec", "ray", f"reading '{name}'") from None
    try:
        return fsspec.core.url_to_fs(name)
    except ImportError as error:
        scheme = name.partition("://")[0]
        raise DetrtError(
            f"'{name}': {error}; {scheme}:// needs a package of its own beside fsspec, e.g. pip install s3fs (s3), gcsfs (gs), adlfs (az)"
        ) from None
    except ValueError as error:
        raise DetrtError(f"'{name}': {error}; known are the protocols of fsspec, e.g. s3://, gs://, az://, file://") from None


def list_images(name: str) -> list[str]:
    """Addresses of the images of a file, folder or pattern, in natural order.

    Raises:
        ImageError: it does not exist, or has no images.
    """
    system, path = _open_system(name)
    try:
        if any(character in path for character in "*?["):
            found, what = [entry for entry in system.glob(path) if system.isfile(entry)], "pattern"
        elif system.isdir(path):
            found, what = system.find(path), "folder"
        elif system.exists(path):
            return [name]
        else:
            raise ImageError(f"there is nothing at '{name}'; check the address and the access rights")
    except (OSError, PermissionError) as error:
        raise ImageError(f"'{name}' cannot be listed: {error}") from None
    images = [entry for entry in found if PurePosixPath(entry).suffix.lower() in IMAGE_SUFFIXES]
    images = [entry for entry in images if not any(part.startswith(".") for part in _below(entry, path))]
    if not images:
        raise ImageError(f"the {what} '{name}' has no images; known suffixes: {' '.join(sorted(IMAGE_SUFFIXES))}")
    return [system.unstrip_protocol(entry) for entry in sorted(images, key=lambda entry: natural_key(PurePosixPath(entry)))]


def _below(entry: str, folder: str) -> tuple[str, ...]:
    text = entry.removeprefix(folder.rstrip("/"))
    return PurePosixPath(text.lstrip("/")).parts


def fetch(name: str) -> bytes:
    """The content of an address; retries transient failures.

    Raises:
        ImageError: it does not exist, no permission, or all retries failed.
    """
    for attempt in range(_TRIES):
        try:
            system, path = _open_system(name)
            return system.cat_file(path)
        except FileNotFoundError:
            raise ImageError(f"there is no file '{name}'; check the address") from None
        except PermissionError as error:
            raise ImageError(f"'{name}' cannot be read: no permission ({error})") from None
        except DetrtError:
            raise
        except Exception as error:  # exceptions of stores have no common base class
            if attempt == _TRIES - 1:
                raise ImageError(f"'{name}' cannot be fetched ({_TRIES} tries): {error!r}") from error
            time.sleep(_PAUSE_SECONDS * 4**attempt)
    raise AssertionError("unreachable")


class ResultFolder:
    """A folder for results: a local one, or an address. Writes are atomic."""

    def __init__(self, name: str | os.PathLike) -> None:
        self.name = os.fspath(name)
        if is_address(self.name) and not self.name.lower().startswith("file://"):
            self._system, path = _open_system(self.name)
            self.path = path.rstrip("/")
            self.local = None
        else:
            text = re.sub(r"(?i)^file://", "", self.name)
            self.local = Path(os.path.abspath(text))
            self._system, self.path = None, str(self.local)

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it does not exist. Raises OutputError."""
        with self._telling(name):
            try:
                return (self.local / name).read_bytes() if self.local else self._system.cat_file(f"{self.path}/{name}")
            except FileNotFoundError:
                return None
        raise AssertionError("unreachable")

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically. Raises OutputError."""
        if self.local:
            files.write_bytes(self.local / name, data)
            return
        with self._telling(name):  # objects in stores appear when they are complete
            self._system.pipe_file(f"{self.path}/{name}", data)

    def put(self, name: str, source: Path) -> None:
        """Move a finished local file here. Raises OutputError."""
        if self.local:
            target = self.local / name
            with files.naming(target), files.making_parents(target):
                files.move(source, target)
            return
        with self._telling(name):
            self._system.put_file(str(source), f"{self.path}/{name}")

    def names(self, folder: str) -> list[str]:
        """Names of the files in a subfolder, without hidden ones; none if it does not exist."""
        if self.local:
            here = self.local / folder
            found = [path.name for path in here.iterdir() if path.is_file()] if here.is_dir() else []
        else:
            with self._telling(folder):
                try:
                    found = [PurePosixPath(path).name for path in self._system.ls(f"{self.path}/{folder}", detail=False)]
                except FileNotFoundError:
                    found = []
        return sorted(name for name in found if not name.startswith("."))

    def remove_temporary(self, folder: str) -> None:
        """Remove unfinished files of killed workers; stores keep none."""
        if self.local and (self.local / folder).is_dir():
            for path in (self.local / folder).glob(".*.tmp"):
                files.remove(path)

    def check(self) -> None:
        """Check before the work that files can be written. Raises OutputError."""
        if self.local:
            if self.local.is_file():
                raise OutputError(f"`output='{self.name}'` is a file; give a folder")
            files.check_place(self.local / "run.json")

    @contextlib.contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except DetrtError:
            raise
        except OSError as error:
            raise files.output_error(f"{self.name}/{name}", error) from error
        except Exception as error:  # as in `fetch`
            raise OutputError(
                f"'{self.name}/{name}' cannot be read or written: {error!r}; check the address and access"
            ) from error
