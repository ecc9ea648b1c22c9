"""Shards on the actors of Ray Data. The only module that imports `ray`."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...backends.worker_process import Failed
from ...errors import MissingPackageError, SessionError, one_line
from ...spec import ModelSpec
from ...system import CPU, usable_cores
from .job import ClusterConfig
from .worker import PackedModel, Shard, ShardDetector, ShardReport, WorkerJob

_TASK_RETRIES = 3  # retries of a shard whose worker died; an image that always kills it must not block the run
_LOCAL_STORE_BYTES = 256 << 20  # for names, counts and the model


class _Actor:
    """A worker of Ray Data. Its results are rows of one column, "report": a ShardReport or an error."""

    def __init__(self, job: WorkerJob, shipment: Any) -> None:
        import ray

        self._detector, self._failure = None, None
        try:
            self._detector = ShardDetector(job, None if shipment is None else ray.get(shipment))
        except Exception as error:
            self._failure = Failed.of(error)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        return {"report": np.array([self._one(shard) for shard in batch["shard"]], object)}

    def _one(self, shard: Shard) -> dict[str, Any]:
        if self._detector is None:
            return {"failure": self._failure}
        try:
            return {"process": f"{os.uname().nodename}:{os.getpid()}", **asdict(self._detector(shard))}
        except Exception as error:
            return {"failure": Failed.of(error)}


class RayRunner:
    """Runs shards on Ray, on this machine or on a cluster; stops the Ray that it started.

    Raises:
        MissingPackageError: Ray is not installed. SessionError: no cluster at the address, or not enough resources for a worker.
    """

    def __init__(self, job: WorkerJob, shipment: PackedModel | None, config: ClusterConfig) -> None:
        try:
            import ray
            import ray.data
        except ImportError:
            raise MissingPackageError("ray", "ray", "`cluster=ray`") from None
        self._ray = ray
        self._config = config
        self._start()
        try:
            total = ray.cluster_resources()
            gpus = config.gpus if config.gpus is not None else float(total.get("GPU", 0) >= 1)
            self._resources = {"num_cpus": config.cpus, "num_gpus": gpus}
            self.workers = config.workers or _room(total, config.cpus, gpus)
            if not self.workers:
                raise SessionError(
                    f"the cluster has {total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs, too few for one worker of "
                    f"{config.cpus:g} CPUs and {gpus:g} GPUs; change `cpus_per_actor` or `gpus_per_actor`"
                )
            threads = max(1, int(config.cpus))
            # Ray shows a worker its own GPUs only, so its first is always cuda:0.
            session = replace(job.session, device="cuda:0" if gpus else CPU)
            if not gpus and session.threads is None:
                session = replace(session, threads=threads)
            self._job = replace(job, session=session, decoders=threads)
            self._shipment = None if shipment is None or config.address is None else ray.put(shipment)
        except BaseException:
            self.close()
            raise
        self.processes: set[str] = set()

    def _start(self) -> None:
        ray, address = self._ray, self._config.address
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
        self._ours = not ray.is_initialized()
        if not self._ours:
            return
        try:
            if address is None:
                ray.init(num_cpus=usable_cores(), include_dashboard=False, object_store_memory=_LOCAL_STORE_BYTES, **quiet)
            else:
                ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "Ray cannot start on this machine" if address is None else f"there is no Ray cluster at '{address}'"
            raise SessionError(f"{where}: {one_line(error, 300)}; see: ray status --address ADDRESS") from None

    def describe(self) -> ModelSpec:
        """The spec of the model, opened by a worker; raises errors of opening it."""
        job, shipment = self._job, self._shipment

        def look() -> ModelSpec | Failed:
            import ray

            try:
                opened = ShardDetector(job, None if shipment is None else ray.get(shipment))
            except Exception as error:
                return Failed.of(error)
            spec = opened.detector.spec
            opened.close()
            return spec

        answer = self._ray.get(self._ray.remote(max_retries=1, **self._resources)(look).remote())
        if isinstance(answer, Failed):
            raise answer.exception()
        return answer

    def run(self, shards: Sequence[Shard]) -> Iterator[ShardReport]:
        """Reports of finished shards, in order of completion. A shard whose workers died each time has none."""
        from ray.data import ActorPoolStrategy, DataContext

        if not shards:
            return
        ray = self._ray
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.max_errored_blocks = -1  # the other shards continue; missing ones are reported at the end
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        count = min(self.workers, len(shards))
        # One block per shard, so that a worker that dies affects no other shard.
        items = ray.data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
        with warnings.catch_warnings():
            # Deprecated in Ray 2.60, removed in 2.64; there is no other option to limit retries yet.
            warnings.simplefilter("ignore")
            reports = items.map_batches(
                _Actor,
                fn_constructor_kwargs={"job": self._job, "shipment": self._shipment},
                compute=ActorPoolStrategy(min_size=count, max_size=count, max_tasks_in_flight_per_actor=2),
                batch_size=1,
                batch_format="numpy",
                max_task_retries=_TASK_RETRIES,
                **self._resources,
            )
        for row in reports.iter_rows():
            report = row["report"]
            if report.get("failure"):
                raise report["failure"].exception()
            self.processes.add(report.pop("process"))
            yield ShardReport(**report)

    def close(self) -> None:
        """Disconnect from the cluster, or stop the Ray that was started here."""
        if self._ours:
            with contextlib.suppress(Exception):
                self._ray.shutdown()

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _room(total: dict[str, float], cpus: float, gpus: float) -> int:
    """Number of workers that fit into the resources of the cluster."""
    fits = [int(total.get("CPU", 0) / cpus + 1e-9)]
    if gpus:
        fits.append(int(total.get("GPU", 0) / gpus + 1e-9))
    return min(fits)
