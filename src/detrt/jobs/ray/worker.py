"""Detection in one shard of images, to one Parquet file. Runs in the workers; independent of the cluster."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ... import files
from ...backends.search import SessionOptions
from ...bundle import files_with
from ...data.images import load_image
from ...data.prefetch import Load, Prefetcher
from ...data.raw_image import LoadedImage
from ...detections import Detections
from ...detector import Detector, DetectorOptions
from ...errors import ImageError, SessionError
from ..run import ImageFailure, detect_inputs
from .inputs import ImageRef
from .parquet import result_row, results_to_bytes
from .storage import ResultFolder, fetch, is_address

PARTS = "detections"


def part_name(shard: int) -> str:
    return f"{PARTS}/part-{shard:06d}.parquet"


@dataclass(frozen=True, slots=True)
class Shard:
    """The images of one task. image_ids: one for each of `refs`."""

    number: int
    refs: tuple[ImageRef, ...]
    image_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Report of a finished shard. bad: images that were not read."""

    number: int
    images: int
    bad: int
    detections: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The files of a model by relative path, for machines that do not share a disk. name: of the model."""

    name: str
    digest: str
    contents: Mapping[str, bytes]

    def unpack(self) -> Path:
        """The model on this machine; unpacked by the first worker that needs it.

        Raises:
            SessionError: others may write where it is unpacked. OSError: it cannot be written.
        """
        parent = files.temporary_files() / f"detrt-models-{os.getuid()}"
        parent.mkdir(mode=0o700, exist_ok=True)
        facts = parent.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            raise SessionError(
                f"'{parent}' can be written by others, who could put another model there; remove it, or set TMPDIR"
            )
        folder = parent / self.digest[:32]
        if not folder.is_dir():
            with files.temporary_folder(parent, folder.name) as fresh:
                for name, content in self.contents.items():
                    path = fresh / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                with contextlib.suppress(OSError):  # another worker of this machine has unpacked it
                    files.move(fresh, folder)
        return folder / self.name if self.name else folder


@dataclass(frozen=True, slots=True)
class WorkerJob:
    """Configuration of the workers of a run: how a model is opened, and what is done with images."""

    model: str
    session: SessionOptions
    detector: DetectorOptions
    output: str
    metadata: Mapping[str, Any]
    decoders: int = 1


class ShardDetector:
    """Detects in shards and writes their files; opening it opens the model."""

    def __init__(self, job: WorkerJob, shipment: PackedModel | None = None) -> None:
        ref = job.model if shipment is None else str(shipment.unpack())
        self.job = job
        self.place = ResultFolder(job.output)
        self.detector = Detector.with_options(ref, replace(job.detector, resize_threads=job.decoders), job.session)
        self.detector.check_prompt()
        decoder = self.detector.decoder
        load = functools.partial(read_image, load=load_image if decoder is None else decoder.open)
        self._prefetcher = Prefetcher(job.decoders, decoder=decoder, load=load)

    def __call__(self, shard: Shard) -> ShardReport:
        """Detect in a shard and write its file. An image on which the model fails is recorded like one that cannot be read.

        Raises:
            SessionError: the model fails on every image. OutputError: the file cannot be written.
        """
        start = time.perf_counter()
        try:
            answers = list(self._answers(shard.refs))
        except SessionError as error:
            # One image can make its batch fail, e.g. by an overflow, and must not stop a run of millions.
            answers = [self._alone(ref) for ref in shard.refs]
            if all(isinstance(answer, str) for answer in answers):
                raise error from None
        triples = zip(shard.image_ids, shard.refs, answers, strict=True)
        rows = [result_row(image_id, ref.image, answer) for image_id, ref, answer in triples]
        metadata = {**self.job.metadata, "shard": shard.number}
        content = results_to_bytes(rows, metadata, self.detector.spec)
        self.place.write(part_name(shard.number), content)
        bad = sum(isinstance(answer, str) for answer in answers)
        detections = sum(len(row["detections"]) for row in rows)
        return ShardReport(shard.number, len(rows), bad, detections, time.perf_counter() - start)

    def _answers(self, refs: Sequence[ImageRef]) -> Iterator[Detections | str]:
        """Detections, or the error of reading the image, for each of `refs`."""
        images = (_ShardImage(ref.address) for ref in refs)
        ahead = 2 * self.detector.batch_size + self.job.decoders
        for item in detect_inputs(self.detector, images, prefetcher=self._prefetcher, ahead=ahead):
            yield str(item.error) if isinstance(item, ImageFailure) else item.record.detections

    def _alone(self, ref: ImageRef) -> Detections | str:
        try:
            return next(self._answers([ref]))
        except SessionError as error:
            return f"'{ref.image}': the model failed: {error}"

    def close(self) -> None:
        self._prefetcher.close()
        self.detector.close()


@dataclass(frozen=True, slots=True)
class _ShardImage:
    """An image of a shard as an input of `detect_inputs`. path: a local path, or an address."""

    path: str
    kind: str = "image"

    @property
    def name(self) -> str:
        return self.path


def read_image(address: str, load: Load = load_image) -> LoadedImage:
    """The image at a local path or an address, read by `load`. Raises ImageError."""
    if not is_address(address):
        return load(address)
    data = fetch(address)
    try:
        return load(data)
    except ImageError as error:
        raise ImageError(f"'{address}': {error}") from None


def pack(ref: str) -> PackedModel:
    """The files of a model on this machine."""
    path = Path(ref)
    if path.is_dir():
        paths = [one for one in sorted(path.rglob("*")) if one.is_file() and not one.name.startswith(".")]
        contents = {one.relative_to(path).as_posix(): one.read_bytes() for one in paths}
        return PackedModel("", _digest(contents), contents)
    contents = {one.relative_to(path.parent).as_posix(): one.read_bytes() for one in files_with(path)}
    return PackedModel(path.name, _digest(contents), contents)


def _digest(contents: Mapping[str, bytes]) -> str:
    whole = hashlib.sha256()
    for name, content in sorted(contents.items()):
        whole.update(f"{name}\0{len(content)}\0".encode() + hashlib.sha256(content).digest())
    return whole.hexdigest()
