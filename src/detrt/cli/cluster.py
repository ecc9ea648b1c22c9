"""`detrt detect --cluster ray`: its options, and what is printed at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DetrtError, ImageError, number_of
from .options import Given

if TYPE_CHECKING:
    from ..backends.search import SessionOptions
    from ..detector import DetectorOptions

CLUSTERS = ("ray",)
_NEEDED = {"cluster": CLUSTERS}


def _cluster(text: str) -> str:
    if text not in CLUSTERS:
        raise DetrtError(f"--cluster must be {' or '.join(CLUSTERS)}; got {text!r}")
    return text


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How a run over many images is spread over a cluster; see `detrt.jobs.ray.job.ClusterConfig`.

    Raises:
        DetrtError: a cluster without an output folder.
    """

    cluster: str | None = field(
        default=None,
        metadata={"help": "Run on a cluster: ray (docs/guide/cluster.md).", "panel": "Cluster", "parse": _cluster},
    )
    output: str | None = field(
        default=None,
        metadata={
            "writes": "folder",
            "help": "Folder or address for Parquet and COCO results.",
            "panel": "Cluster",
            "needs": _NEEDED,
        },
    )
    ray_address: str | None = field(
        default=None,
        metadata={
            "help": "auto, HOST:6379 or ray://HOST:10001; default: this machine.",
            "panel": "Cluster",
            "needs": _NEEDED,
        },
    )
    actors: int | None = field(
        default=None, metadata={"help": "Number of workers; default: as many as fit.", "panel": "Cluster", "needs": _NEEDED}
    )
    gpus_per_actor: float | None = field(
        default=None,
        metadata={"help": "0 to 1, e.g. 0.5; default: 1 where there are GPUs.", "panel": "Cluster", "needs": _NEEDED},
    )
    cpus_per_actor: float | None = field(
        default=None,
        metadata={"help": "CPUs of a worker, which decode its images too (1).", "panel": "Cluster", "needs": _NEEDED},
    )
    shard: int | None = field(
        default=None,
        metadata={"help": "Images per task, and rows per result file (256).", "panel": "Cluster", "needs": _NEEDED},
    )
    retry_bad: bool = field(
        default=False, metadata={"help": "Try files with unreadable images again.", "panel": "Cluster", "needs": _NEEDED}
    )
    merge: bool = field(
        default=True,
        metadata={
            "help": "Write one coco.json of all results at the end.",
            "panel": "Cluster",
            "flag": "merge/no-merge",
            "needs": _NEEDED,
        },
    )

    def __post_init__(self) -> None:
        if self.cluster is not None and self.output is None:
            raise DetrtError(
                "--cluster ray needs --output DIR, where the results go; DIR may be an address such as s3://bucket/run1"
            )

    def arguments(self) -> dict[str, Any]:
        """Keywords of `ClusterConfig`."""
        found = {
            "workers": self.actors,
            "gpus": self.gpus_per_actor,
            "cpus": self.cpus_per_actor,
            "shard": self.shard,
            "address": self.ray_address,
        }
        return {name: value for name, value in found.items() if value is not None} | {
            "retry_bad": self.retry_bad,
            "merge": self.merge,
        }


def check_alone(*groups: Given[Any]) -> None:
    """Refuse the options that have no use on a cluster: all of `groups` but the backend and the ids of COCO images.

    Raises:
        DetrtError: one of them is given.
    """
    for group in groups:
        for flag, name in group.flags():
            if name not in ("backend", "coco_images"):
                raise DetrtError(
                    f"{flag} has no use with --cluster ray, which writes Parquet and COCO files to --output; leave it out"
                )


def detect_on_cluster(
    model: str,
    inputs: Sequence[str],
    options: ClusterOptions,
    *,
    session: SessionOptions,
    detector: DetectorOptions,
    coco_images: Path | None,
    quiet: bool,
) -> None:
    from rich.console import Console

    from ..data.coco import load_coco
    from ..jobs.ray.actors import RayRunner
    from ..jobs.ray.job import ClusterConfig, run_job
    from . import show

    truth = None if coco_images is None else load_coco(coco_images, annotations=False)
    assert options.output is not None
    output, given = options.output, ClusterConfig(**options.arguments())
    started = time.perf_counter()

    def text(done: int, total: int) -> str:
        return f"{done} of {number_of(total, 'image')}, {done / (time.perf_counter() - started):.1f} images/s"

    with show.progress() as step:
        result = run_job(
            model,
            inputs,
            output,
            config=given,
            session=session,
            detector=detector,
            truth=truth,
            runner=RayRunner,
            progress=None if quiet else lambda done, total: step("detect", done / total, text(done, total)),
        )
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    bad = f", {result.bad} could not be read" if result.bad else ""
    fresh = result.images - result.resumed
    rate = f", {fresh / result.seconds:.1f} images/s with starting and writing" if fresh else ""
    more = f", {number_of(result.processes, 'process')}" if result.processes > result.workers else ""
    merged = "coco.json, " if given.merge else ""
    rows = [
        ("images", f"{result.images}{resumed}{bad}"),
        ("detections", show.counted(result.labels)),
        ("time", f"{result.seconds:.1f} s{rate}"),
        ("workers", f"{result.workers}{more}"),
        ("written", f"{output}/detections/*.parquet, {merged}summary.json"),
    ]
    shown = [row for row in rows if row[0] != "workers" or result.workers]
    show.table("", ("", ""), shown, console=Console(stderr=True, quiet=quiet))
    if result.bad:
        example = f", e.g. {result.bad_examples[0]}" if result.bad_examples else ""
        raise ImageError(
            f"{result.bad} of {number_of(result.images, 'image')} could not be read{example}; the column 'error' has each of them, and "
            "--retry-bad tries again. All others were done"
        )
