"""`detrt detect --cluster ray`: what the options mean, and what is said at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.coco import load_coco
from ..errors import DetrtError, ImageError

CLUSTERS = ("ray",)


def check_options(cluster: str | None, output: str | None, alone: Mapping[str, object], with_it: Mapping[str, object]) -> None:
    """Refuse options that do nothing. alone: those without a use on a cluster; with_it: those with a use there only."""
    if cluster is None:
        given = [name for name, value in {"--output": output, **with_it}.items() if value]
        if given:
            raise DetrtError(f"{given[0]} does nothing without --cluster ray; give both, or leave it out")
        return
    if cluster not in CLUSTERS:
        raise DetrtError(f"--cluster must be {' or '.join(CLUSTERS)}; got {cluster!r}")
    if output is None:
        raise DetrtError("--cluster ray needs --output DIR, where the results go; DIR may be an address such as s3://bucket/run1")
    given = [name for name, value in alone.items() if value]
    if given:
        raise DetrtError(
            f"{given[0]} has no use with --cluster ray, which writes Parquet and COCO files to --output; leave it out"
        )


def detect_on_cluster(
    model: str,
    inputs: Sequence[str],
    output: str,
    *,
    config: Mapping[str, Any],
    session: Mapping[str, Any],
    detector: Mapping[str, Any],
    coco_images: Path | None,
    quiet: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..jobs.ray.actors import RayRunner
    from ..jobs.ray.job import ClusterConfig, run_job
    from . import show

    truth = None if coco_images is None else load_coco(coco_images, annotations=False)
    given = ClusterConfig(**config)
    started = time.perf_counter()

    def text(done: int, total: int) -> str:
        return f"{done} of {total} images, {done / (time.perf_counter() - started):.1f} images/s"

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
    table = Table(title=None, box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    resumed = f", {result.resumed} of them by an earlier run" if result.resumed else ""
    bad = f", {result.bad} could not be read" if result.bad else ""
    table.add_row("images", f"{result.images}{resumed}{bad}")
    most = sorted(result.labels.items(), key=lambda one: -one[1])[:8]
    found = ", ".join(f"{number} {label}" for label, number in most)
    table.add_row("detections", Text(f"{result.detections}" + (f": {found}" if found else "")))
    fresh = result.images - result.resumed
    rate = f", {fresh / result.seconds:.1f} images/s with starting and writing" if fresh else ""
    table.add_row("time", f"{result.seconds:.1f} s{rate}")
    if result.workers:
        more = f", {result.processes} processes" if result.processes > result.workers else ""
        table.add_row("workers", f"{result.workers}{more}")
    merged = "coco.json, " if given.merge else ""
    table.add_row("written", Text(f"{output}/detections/*.parquet, {merged}summary.json"))
    Console(stderr=True, quiet=quiet).print(table)
    if result.bad:
        example = f", e.g. {result.bad_examples[0]}" if result.bad_examples else ""
        raise ImageError(
            f"{result.bad} of {result.images} images could not be read{example}; the column 'error' has each of them, and "
            "--retry-bad tries again. All others were done"
        )
