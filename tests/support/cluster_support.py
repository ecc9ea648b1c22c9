"""A cluster of one worker in this process, and images that can be distinguished."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as parquet

from detrt.backends.search import SessionOptions
from detrt.detector import DetectorOptions
from detrt.jobs.ray.job import ClusterConfig, run_job
from detrt.jobs.ray.worker import ShardDetector


class Here:
    """A cluster of one worker in this process. lose: numbers of shards whose worker dies. stop_after: shards, then a crash."""

    def __init__(self, lose=(), stop_after=None):
        self.lose, self.stop_after, self.ran, self.workers, self.processes = lose, stop_after, [], 1, {"here"}

    @contextmanager
    def __call__(self, job, shipment, config):
        self.detector = ShardDetector(replace(job, session=replace(job.session, device="cpu")), shipment)
        yield self

    def describe(self):
        return self.detector.detector.spec

    def run(self, shards):
        for shard in shards:
            if shard.number in self.lose:
                continue
            if len(self.ran) == self.stop_after:
                raise KeyboardInterrupt
            self.ran.append(shard.number)
            yield self.detector(shard)


def start(names, output="out", runner=None, **config):
    session, truth = SessionOptions(**config.pop("session", {})), config.pop("truth", None)
    options = DetectorOptions(**{"threshold": 0.1, "batch_size": 4, **config.pop("detector", {})})
    config.setdefault("shard", 8)
    return run_job(
        config.pop("model", "bundle"),
        [str(name) for name in names],
        str(output),
        config=ClusterConfig(**config),
        session=session,
        detector=options,
        truth=truth,
        runner=runner or Here(),
    )


def rows_of(folder):
    table = parquet.read_table(Path(folder) / "detections")
    return sorted(table.to_pylist(), key=lambda row: row["image_id"])
