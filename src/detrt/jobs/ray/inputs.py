"""The list of images of a run, from names, folders, patterns, manifests and addresses."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ... import files
from ...data.images import expand_inputs
from ...errors import ImageError
from .parquet import read_columns
from .storage import fetch, is_address, list_images

MANIFEST_SUFFIXES = (".parquet", ".csv", ".jsonl", ".txt")
# Columns or fields that name an image; the first present one is used.
COLUMNS = ("uri", "image", "path", "file_name", "url")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image. image: name for people and records; address: path or URL that workers read.

    image_id: of a manifest, else None.
    """

    image: str
    address: str
    image_id: int | None = None


def image_refs(names: Sequence[str]) -> list[ImageRef]:
    """Files, folders, patterns, addresses and manifests -> images, each address once, in the order given.

    Manifests are .parquet, .csv and .jsonl files with a column of COLUMNS (and image_id), and .txt files with
    one name per line; relative names are relative to the manifest.

    Raises:
        ImageError: a name that does not exist, no images, a video, a damaged manifest, or an id that two images have.
    """
    if not names:
        raise ImageError("no inputs: give folders, patterns, addresses such as s3://bucket/folder/, or manifests")
    found: dict[str, ImageRef] = {}
    for name in names:
        for ref in _refs(name):
            found.setdefault(ref.address, ref)
    refs = list(found.values())
    known = [ref.image_id for ref in refs if ref.image_id is not None]
    if known and len(known) < len(refs):
        raise ImageError("some images have an image_id in their manifest and others do not; give all or none of them ids")
    if len(set(known)) < len(known):
        seen: set[int] = set()
        twice = next(number for number in known if number in seen or seen.add(number))  # type: ignore[func-returns-value]
        raise ImageError(f"two images have the image_id {twice}; every image needs an id of its own")
    return refs


def digest(refs: Sequence[ImageRef]) -> str:
    """Digest of a list of images."""
    whole = hashlib.sha256()
    for ref in refs:
        whole.update(json.dumps([ref.image, ref.address, ref.image_id]).encode() + b"\n")
    return whole.hexdigest()


def _refs(name: str) -> Iterator[ImageRef]:
    if Path(name).suffix.lower() in MANIFEST_SUFFIXES:
        yield from _of_manifest(name)
    elif is_address(name):
        yield from (ImageRef(address, address) for address in list_images(name))
    else:
        for source in expand_inputs([name]):
            if source.kind == "video":
                raise ImageError(
                    f"'{source.path}' is a video; `cluster` takes images. Use detrt detect without `cluster` for videos"
                )
            yield ImageRef(str(source.path), os.path.abspath(source.path))


def _of_manifest(name: str) -> Iterator[ImageRef]:
    if is_address(name):
        data, folder = fetch(name), name.rpartition("/")[0]
    else:
        path = Path(name)
        if not path.is_file():
            raise ImageError(f"there is no manifest '{name}'; check the path")
        data, folder = path.read_bytes(), os.path.abspath(path.parent)
    empty = True
    for number, (image, image_id) in enumerate(_entries(name, data), 1):
        empty = False
        if not isinstance(image, str) or not image.strip():
            raise ImageError(f"the manifest '{name}', entry {number}: the name of the image is {image!r}")
        if image_id is not None:
            try:
                image_id = int(image_id)
            except (TypeError, ValueError):
                raise ImageError(
                    f"the manifest '{name}', entry {number}: image_id must be an integer; got {image_id!r}"
                ) from None
        absolute = is_address(image) or os.path.isabs(image)
        yield ImageRef(image, image if absolute else f"{folder}/{image}", image_id)
    if empty:
        raise ImageError(f"the manifest '{name}' names no images")


def _entries(name: str, data: bytes) -> Iterator[tuple[object, object]]:
    suffix = Path(name).suffix.lower()
    if suffix == ".parquet":
        yield from read_columns(data, name, COLUMNS, "image_id")
        return
    try:
        text = files.decode_text(data)
    except UnicodeError as error:
        raise ImageError(f"the manifest '{name}' is not UTF-8 text: {error}") from None
    if suffix == ".txt":
        yield from ((line, None) for line in files.lines_of(text) if line and not line.startswith("#"))
        return
    rows = _csv(text) if suffix == ".csv" else _json_lines(name, text)
    for row in rows:
        column = next((one for one in COLUMNS if one in row), None)
        if column is None:
            raise ImageError(
                f"the manifest '{name}' has the fields {sorted(row)}; one of {', '.join(COLUMNS)} must name the images"
            )
        yield row[column], row.get("image_id")


def _csv(text: str) -> Iterator[dict[str, object]]:
    for row in csv.DictReader(io.StringIO(text)):
        yield {str(key): value for key, value in row.items()}


def _json_lines(name: str, text: str) -> Iterator[dict[str, object]]:
    for number, line in enumerate(files.lines_of(text), 1):
        if not line:
            continue
        try:
            row = files.parse_json(line)
        except ValueError as error:
            raise ImageError(f"the manifest '{name}', line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ImageError(f"the manifest '{name}', line {number} must be a JSON object; got {type(row).__name__}")
        yield row
