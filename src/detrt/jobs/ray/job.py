"""A run over many images: its identity, resuming it, and its results in one COCO file."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

from ... import files
from ...backends.search import SessionOptions
from ...data.coco import CocoDataset
from ...detector import DetectorOptions
from ...errors import OutputError, SessionError, SpecError, number_of, one_line
from ...spec import ModelSpec
from ...system import CountProgress
from .inputs import ImageRef, digest, image_refs
from .parquet import detections_of, list_to_bytes, part_facts, read_results
from .storage import ResultFolder
from .worker import PARTS, PackedModel, Shard, ShardReport, WorkerJob, pack, part_name

RUN, INPUTS, COCO, SUMMARY = "run.json", "inputs.parquet", "coco.json", "summary.json"
_SCHEMA = 1
_PASSES = 3


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a run is distributed. workers: None for as many as fit into the cluster.

    gpus: per worker, may be a fraction such as 0.5; None: 1 if the cluster has GPUs, else 0.
    cpus: per worker, also for decoding. shard: images per task, and rows per file.
    address: of a Ray cluster ("auto", "host:6379", "ray://host:10001"); None starts Ray on this machine.
    retry_bad: run shards again that have unreadable images. merge: write coco.json from all files at the end.
    """

    workers: int | None = None
    gpus: float | None = None
    cpus: float = 1.0
    shard: int = 256
    address: str | None = None
    retry_bad: bool = False
    merge: bool = True

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise SpecError(f"`actors` must be at least 1; got {self.workers}")
        if not 1 <= self.shard <= 1_000_000:
            raise SpecError(f"`shard` must be from 1 to 1000000 images; got {self.shard}")
        if not 0 < self.cpus <= 1024:
            raise SpecError(f"`cpus_per_actor` must be above 0 and at most 1024; got {self.cpus}")
        gpus = self.gpus
        if gpus is not None and not (0 <= gpus <= 1 or gpus == 1.0):
            raise SpecError(f"`gpus_per_actor` must be from 0 to 1, e.g. 0.5 for two workers a GPU; got {gpus}")


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Contents of the output folder.

    resumed: images with rows of an earlier run. seconds: of this run. workers: in parallel. processes: that finished a shard, more
    than workers if some died.
    """

    images: int
    bad: int
    detections: int
    labels: Mapping[str, int]
    resumed: int
    seconds: float
    workers: int = 0
    processes: int = 0
    bad_examples: tuple[str, ...] = ()


class Runner(Protocol):
    """Runs shards on a cluster; implemented by `actors.RayRunner`."""

    workers: int
    processes: set[str]

    def describe(self) -> ModelSpec: ...

    def run(self, shards: Sequence[Shard]) -> Iterator[ShardReport]: ...

    def __enter__(self) -> Runner: ...

    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """The identity of a run: the fields that must match for it to be resumed."""

    model: str
    options: Mapping[str, Any]
    inputs: str
    images: int
    shard: int
    detrt_cluster: int = field(default=_SCHEMA)


def run_job(
    model: str,
    names: Sequence[str],
    output: str,
    *,
    config: ClusterConfig,
    session: SessionOptions = SessionOptions(),  # noqa: B008 - frozen
    detector: DetectorOptions = DetectorOptions(),  # noqa: B008 - frozen
    truth: CocoDataset | None = None,
    runner: Callable[[WorkerJob, PackedModel | None, ClusterConfig], Runner],
    progress: CountProgress | None = None,
) -> ClusterResult:
    """Detect in all images and write OUTPUT/detections/*.parquet, summary.json and, with `merge`, coco.json.

    names: see `image_refs`. session, detector: how the model is opened, and what is done with images. truth: for image and
    category ids. progress: called with (images done, all). Started again with the same arguments, it resumes where
    the last one ended.

    Raises:
        ImageError, OutputError: inputs or output. OutputError also: the folder has another run.
        SessionError: images that kill every worker; the others are done.
        DetrtError: errors of opening and running the model.
    """
    start = time.perf_counter()
    refs = image_refs(names)
    folder = ResultFolder(output)
    folder.check()
    shards = make_shards(refs, config.shard, truth)
    local = Path(model).exists()
    shipment = pack(model) if local else None
    options = {**session.given(), **_chosen(detector)} | ({} if truth is None else {"coco_images": str(truth.path)})
    run = Run(shipment.digest if shipment else model, _plain(options), digest(refs), len(refs), config.shard)
    known = _read_spec(folder, run)
    done = _finished_shards(folder, shards, config.retry_bad) if known is not None else set()
    missing = [shard for shard in shards if shard.number not in done]
    resumed = sum(len(shard.refs) for shard in shards if shard.number in done)
    workers = processes = 0
    if known is None or missing:
        job = WorkerJob(
            model,
            session,
            detector,
            folder.name if folder.local is None else str(folder.local),
            {"model": run.model},
        )
        with runner(job, shipment, config) as active:
            if known is None:
                known = active.describe()
                folder.write(INPUTS, list_to_bytes(_listed(shards)))
                folder.write(RUN, _json({**asdict(run), "spec": known.to_dict()}))
            count = resumed
            if progress:
                progress(count, len(refs))
            for _ in range(_PASSES):
                # While a lost machine is unreachable, its shards use up their retries; they are submitted to new workers again.
                for report in active.run([shard for shard in missing if shard.number not in done]):
                    done.add(report.number)
                    count += report.images
                    if progress:
                        progress(count, len(refs))
        workers, processes = active.workers, len(active.processes)
        folder.remove_temporary(PARTS)
    lost = [shard for shard in shards if shard.number not in done]
    if lost:
        names_of = ", ".join(ref.image for ref in lost[0].refs[:3])
        raise SessionError(
            f"{sum(len(shard.refs) for shard in lost)} of {number_of(len(refs), 'image')} are not done: their workers died each time, e.g. of "
            f"{names_of} ...; more memory for a worker (`cpus_per_actor`, `batch=1`) may help. All others are done; the same "
            "command goes on from there"
        )
    if config.merge:
        rows, bad, labels, examples = _collect(folder, shards, None if truth is None else truth.category_ids(known))
    else:
        (rows, bad), labels, examples = _count_rows(folder, shards), {}, []
    result = ClusterResult(
        len(refs), bad, rows, dict(labels), resumed, time.perf_counter() - start, workers, processes, tuple(examples)
    )
    folder.write(SUMMARY, _json(asdict(result)))
    return result


def make_shards(refs: Sequence[ImageRef], size: int, truth: CocoDataset | None = None) -> list[Shard]:
    """Shards of `size` images in order. Image ids: of `truth` by file name, of the manifest, or 1, 2, ...

    Raises:
        OutputError: an image that is not in `truth`, or two images with one id.
    """
    if truth is not None:
        ids = [truth.image_id(ref.image) for ref in refs]
        twice = [number for number, count in Counter(ids).items() if count > 1]
        if twice:
            raise OutputError(
                f"'{truth.path}' gives {number_of(len(twice), 'id')} to several images, e.g. {twice[0]}; leave out the doubles"
            )
    else:
        ids = [index if ref.image_id is None else ref.image_id for index, ref in enumerate(refs, 1)]
    firsts = range(0, len(refs), size)
    return [Shard(i, tuple(refs[a : a + size]), tuple(ids[a : a + size])) for i, a in enumerate(firsts)]


def _read_spec(folder: ResultFolder, run: Run) -> ModelSpec | None:
    """The spec of the run in the folder; None: there is none yet. Raises OutputError for another run."""
    raw = folder.read(RUN)
    if raw is None:
        if folder.names(PARTS):
            raise OutputError(f"'{folder.name}' has results of an unknown run ({RUN} is missing); give another `output`")
        return None
    try:
        data = files.parse_json(raw)
        spec = ModelSpec.from_dict(data.pop("spec"))
    except (ValueError, KeyError, AttributeError, SpecError) as error:
        raise OutputError(f"'{folder.name}/{RUN}' is damaged ({error!r}); give another `output`") from None
    wanted = json.loads(_json(asdict(run)))
    other = [key for key in wanted if data.get(key) != wanted[key]]
    if other:
        shown = "; ".join(f"{key} {one_line(repr(data.get(key)), 60)}, now {one_line(repr(wanted[key]), 60)}" for key in other)
        raise OutputError(f"'{folder.name}' holds another run ({shown}); give another `output`, or delete it")
    return spec


def _finished_shards(folder: ResultFolder, shards: Sequence[Shard], retry_bad: bool) -> set[int]:
    """Numbers of the shards with a complete file; retry_bad: and without unreadable images."""
    there, done = set(folder.names(PARTS)), set()
    for shard in shards:
        name = part_name(shard.number)
        if name.rpartition("/")[2] not in there:
            continue
        facts = part_facts(folder.read(name) or b"")
        if facts is None or facts.image_ids != shard.image_ids or (retry_bad and facts.bad):
            continue
        done.add(shard.number)
    return done


def _collect(
    folder: ResultFolder, shards: Sequence[Shard], categories: Mapping[int, int] | None
) -> tuple[int, int, Counter[str], list[str]]:
    """Write coco.json from all files, and check that every image has one row.

    Returns: detections, images that were not read, detections of each label, some of the errors.
    """
    detections, bad, labels, examples = 0, 0, Counter[str](), []
    # In a local folder on the same disk, for an atomic move.
    with files.scratch() if folder.local is None else files.temporary_folder(folder.local, COCO) as scratch:
        path = scratch / COCO
        with open(path, "w", encoding="utf-8") as file:
            mark = "["
            for shard in shards:
                rows = read_results(_read_part(folder, shard), f"{folder.name}/{part_name(shard.number)}")
                if tuple(row["image_id"] for row in rows) != shard.image_ids:
                    raise _changed_error(folder, shard)
                for row in rows:
                    if row["error"] is not None:
                        bad += 1
                        examples += [row["error"]] * (len(examples) < 3)
                        continue
                    found = detections_of(row)
                    detections += len(found)
                    labels.update(found.labels)
                    for entry in found.to_coco(row["image_id"], categories):
                        file.write(f"{mark}{json.dumps(entry)}")
                        mark = ",\n"
            file.write("[]\n" if mark == "[" else "]\n")
        folder.put(COCO, path)
    return detections, bad, labels, examples


def _count_rows(folder: ResultFolder, shards: Sequence[Shard]) -> tuple[int, int]:
    """Check that every image has one row; (detections, images that were not read)."""
    detections = bad = 0
    for shard in shards:
        facts = part_facts(_read_part(folder, shard))
        if facts is None or facts.image_ids != shard.image_ids:
            raise _changed_error(folder, shard)
        detections += facts.detections
        bad += facts.bad
    return detections, bad


def _read_part(folder: ResultFolder, shard: Shard) -> bytes:
    data = folder.read(part_name(shard.number))
    if data is None:
        raise OutputError(
            f"'{folder.name}' lacks {part_name(shard.number)}, which a worker has written; on a cluster `output` must be an "
            "address such as s3://bucket/run1, or a folder that all machines share"
        )
    return data


def _changed_error(folder: ResultFolder, shard: Shard) -> OutputError:
    return OutputError(f"'{folder.name}/{part_name(shard.number)}' was changed by something else; delete it and run again")


def _listed(shards: Iterable[Shard]) -> Iterator[tuple[int, str, str]]:
    for shard in shards:
        yield from ((number, ref.image, ref.address) for ref, number in zip(shard.refs, shard.image_ids, strict=True))


def _chosen(detector: DetectorOptions) -> dict[str, Any]:
    """What a run is bound to: each choice, and these three also where they are the default, which may change."""
    values = {one.name: (getattr(detector, one.name), one.default) for one in fields(detector)}
    bound = ("threshold", "phrases", "text_threshold")
    return {name: value for name, (value, usual) in values.items() if name in bound or value != usual}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(options, default=str, sort_keys=True))


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
