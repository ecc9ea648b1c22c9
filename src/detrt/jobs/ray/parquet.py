"""Parquet files: lists of images, and results with one row per image. The only module that imports `pyarrow`."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...detections import Detections
from ...errors import ImageError, MissingPackageError, OutputError
from ...spec import ModelSpec
from ...tasks import TASKS, tasks_of

METADATA_KEY, DIGEST_KEY = b"detrt", b"detrt.sha256"


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingPackageError("pyarrow", "ray", "Parquet files") from None
    return pyarrow, pyarrow.parquet


def _schema(pa: Any, spec: ModelSpec | None) -> Any:
    """One row per image. error: null if the image was read; width, height: null if it was not. spec: tells what detections have."""
    fields = [("label", pa.string()), ("class_id", pa.int64()), ("score", pa.float32()), ("box_xyxy", pa.list_(pa.float32(), 4))]
    fields += [(task.key, task.arrow(pa)) for task in (() if spec is None else tasks_of(spec))]
    found = pa.struct(fields)
    columns = [("image_id", pa.int64()), ("image", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
    return pa.schema([*columns, ("error", pa.string()), ("detections", pa.list_(found))])


def result_row(image_id: int, image: str, found: Detections | str) -> dict[str, Any]:
    """A row of the results. found: the detections, or the error of reading the image."""
    if isinstance(found, str):
        return {"image_id": image_id, "image": image, "width": None, "height": None, "error": found, "detections": []}
    height, width = found.image_size_hw
    # Not rounded, so that files written from these rows equal those of `detrt detect`.
    parts = zip(found.labels, found.class_ids.tolist(), found.scores.tolist(), found.boxes_xyxy.tolist(), strict=True)
    rows = [dict(zip(("label", "class_id", "score", "box_xyxy"), one, strict=True)) for one in parts]
    for name, values in found.extra_columns().items():
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=True)]
    return {"image_id": image_id, "image": image, "width": width, "height": height, "error": None, "detections": rows}


def results_to_bytes(rows: list[dict[str, Any]], metadata: Mapping[str, Any], spec: ModelSpec | None = None) -> bytes:
    """A Parquet file of results; metadata: of the run, stored as JSON under the key "detrt". spec: of the model; None: boxes alone."""
    pa, parquet = _pyarrow()
    schema = _schema(pa, spec).with_metadata({METADATA_KEY: json.dumps(dict(metadata), sort_keys=True).encode()})
    table = pa.Table.from_pylist(rows, schema=schema)
    table = table.replace_schema_metadata({**schema.metadata, DIGEST_KEY: _digest(table)})
    target = io.BytesIO()
    parquet.write_table(table, target, compression="zstd", write_page_checksum=True)
    return target.getvalue()


def _digest(table: Any) -> bytes:
    """Hex digest of the rows and the run's metadata: page checksums cover neither headers of pages nor the footer."""
    whole = hashlib.sha256(table.schema.metadata[METADATA_KEY])
    whole.update(repr(table.schema.names).encode() + json.dumps(table.to_pylist()).encode())
    return whole.hexdigest().encode()


def read_results(data: bytes, name: str) -> list[dict[str, Any]]:
    """Rows of a file of results. Raises OutputError if it is damaged."""
    pa, parquet = _pyarrow()
    try:
        return parquet.read_table(io.BytesIO(data), page_checksum_verification=True).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise OutputError(f"'{name}' is damaged ({error}); delete it and run the same command again") from None


@dataclass(frozen=True, slots=True)
class PartFacts:
    """Summary of a file of results. bad: images that were not read."""

    image_ids: tuple[int, ...]
    bad: int
    detections: int


def part_facts(data: bytes) -> PartFacts | None:
    """Summary of a file of results; None if it is damaged, in any value, or of another form."""
    pa, parquet = _pyarrow()
    try:
        table = parquet.ParquetFile(io.BytesIO(data), page_checksum_verification=True).read()
        if table.schema.metadata[DIGEST_KEY] != _digest(table):
            return None
        detections = sum(len(chunk.flatten()) for chunk in table.column("detections").chunks)
        ids = tuple(table.column("image_id").to_pylist())
        return PartFacts(ids, len(table) - table.column("error").null_count, detections)
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, MemoryError):
        return None


def detections_of(row: Mapping[str, Any]) -> Detections:
    """The detections of a row of results."""
    found = row["detections"]
    size = row["height"] or 0, row["width"] or 0
    first = found[0] if found else {}
    there = [task for task in TASKS if first.get(task.key) is not None]
    return Detections(
        np.array([one["box_xyxy"] for one in found], np.float32).reshape(-1, 4),
        np.array([one["score"] for one in found], np.float32),
        np.array([one["class_id"] for one in found], np.int64),
        tuple(one["label"] for one in found),
        size,
        **{task.field: task.from_json([one[task.key] for one in found], size) for task in there},
    )


def list_to_bytes(rows: Iterable[tuple[int, str, str]]) -> bytes:
    """A Parquet file of (image id, image, address)."""
    pa, parquet = _pyarrow()
    ids, images, addresses = [], [], []
    for image_id, image, address in rows:
        ids.append(image_id)
        images.append(image)
        addresses.append(address)
    target = io.BytesIO()
    parquet.write_table(pa.table({"image_id": pa.array(ids, pa.int64()), "image": images, "address": addresses}), target)
    return target.getvalue()


def read_columns(data: bytes, name: str, columns: tuple[str, ...], optional: str) -> Iterator[tuple[str, Any]]:
    """(value of the first present one of `columns`, value of `optional` or None) for every row of a Parquet file.

    Raises:
        ImageError: damaged, or it has none of the columns.
    """
    pa, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
        names = file.schema_arrow.names
        column = next((one for one in columns if one in names), None)
        if column is None:
            raise ImageError(f"the manifest '{name}' has the columns {names}; one of {', '.join(columns)} must name the images")
        table = file.read([column] + [optional] * (optional in names))
    except (pa.ArrowException, OSError) as error:
        raise ImageError(f"the manifest '{name}' cannot be read as Parquet: {error}") from None
    ids = table.column(optional).to_pylist() if optional in names else [None] * len(table)
    yield from zip(table.column(column).to_pylist(), ids, strict=True)
