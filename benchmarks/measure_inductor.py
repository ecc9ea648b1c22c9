"""Latency of compiled models on NVIDIA GPUs, with their outputs checked first. See docs/results/benchmarks-gpu.md.

    python benchmarks/measure_inductor.py OUT.jsonl SECONDS JOB...
    python benchmarks/measure_inductor.py OUT.jsonl 1500 @table

A JOB is kind|model|size|precision|batch[|how]: kind "ours"; "eager", "compile" or "patched" (see baselines.py); "captured" (eager run of
our graph); size HEIGHTxWIDTH or "-"; precision fp32, tf32, fp16 or bf16. @NAME is a list of LISTS. Ours in FP32 at batch 1 give a row
for TF32 as well, from the same package.

Every job is a process with one thread, PARALLEL of them at once (default: one a core, and at most 15 a GPU; each takes 4 to 6 GB of the
host and of the GPU), spread over the GPUs of the host. When one has compiled its model, the others on its GPU are stopped (SIGSTOP), and for the models of transformers, whose time
is Python's in part, all others of the host; then it is tuned, checked and timed, and the others continue. Each row is written
at once. tables.py makes the document's tables of the rows.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# What takes longest to compile first, so that no core waits at the end.
SIZES = {
    "co_dino-swin-l": "768x1152", "grounding_dino": "800x1200", "omdet_turbo": "640x640", "deimv2": "640x640",
    "d_fine": "640x640", "deformable_detr": "800x1066", "dino": "800x1066", "dab_detr": "800x1066", "rt_detr_v2": "640x640",
    "rt_detr": "640x640", "rf_detr": "-", "lw_detr": "640x640", "detr": "800x1066", "conditional_detr": "800x1066",
    "table-transformer": "800x1066", "yolos": "800x1056",
}  # fmt: skip
MAIN = ("co_dino-swin-l", "grounding_dino", "d_fine", "deformable_detr", "rt_detr_v2", "detr")
PLAIN = [name for name in SIZES if name not in ("dino", "co_dino-swin-l")]  # those that transformers has
SAMPLING = [name for name in PLAIN if name not in ("detr", "conditional_detr", "dab_detr", "table-transformer", "yolos")]
# Models with masks and the families of 2026.
RECENT = {
    "ecseg": "640x640", "ecdet": "640x640", "d_fine-seg": "640x640", "rf_detr-seg": "-", "rf_detr-large": "-", "rf_detr-xlarge": "-",
    "rf_detr-2xlarge": "-", "mm_grounding_dino": "800x1200", "sam3": "-", "owlvit": "-", "owlv2": "-",
    "eomt": "-", "eomt_dinov3": "-", "pp_doclayout_v2": "800x800", "pp_doclayout_v3": "800x800", "pp_doclayout_v4": "800x800",
}  # fmt: skip
SETTLE_S = 0.3  # what stopped processes had given the GPU is done by then
LONGEST_S = 90
PER_GPU = 15  # 24 filled the 141 GB of an H200


def _jobs(kind: str, models: Any, precision: str, *batches: int) -> list[str]:
    sizes = SIZES | RECENT
    return [f"{kind}|random:{name}|{sizes[name]}|{precision}|{batch}" for batch in batches for name in models]


LISTS = {
    "families": _jobs("ours", SIZES, "fp16", 1),
    "library": [*_jobs("compile", PLAIN, "fp16", 1), *_jobs("patched", SAMPLING, "fp16", 1)],
    "batches": _jobs("ours", SIZES, "fp16", 4, 16),
    "types": [*_jobs("ours", SIZES, "bf16", 1), *_jobs("ours", SIZES, "fp32", 1)],
    "more": [*_jobs("ours", MAIN, "bf16", 4, 16), *_jobs("ours", MAIN, "fp32", 4, 16)],
    "most": [*_jobs("ours", SIZES, "bf16", 4, 16), *_jobs("ours", SIZES, "fp32", 4, 16)],
    "eager": [*_jobs("eager", PLAIN, "fp16", 1), *_jobs("eager", PLAIN, "fp32", 1)],
    # The one model that has a target at another batch.
    "targets": [
        *_jobs("compile", ["detr"], "fp16", 4),
        *_jobs("eager", ["detr"], "fp16", 4),
        *_jobs("eager", ["detr"], "fp32", 4),
    ],
    "recent": [
        *(job for batch in (1, 8) for kind in ("compile", "ours") for job in _jobs(kind, RECENT, "fp16", batch)),
        *_jobs("eager", RECENT, "fp16", 1, 8),
    ],
}
# What takes longest first, and what is least missed where time runs out last.
LISTS["table"] = [
    job for name in ("library", "batches", "families", "targets", "types", "eager", "more", "most") for job in LISTS[name]
]


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    jobs = [job for given in sys.argv[3:] for job in (LISTS[given[1:]] if given.startswith("@") else [given])]
    # One core a process; asking for the GPU here must not open it, or the processes could not.
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")):
        os.environ.setdefault(name, value)
    return Runner(out, seconds, list(dict.fromkeys(jobs))).run()


@dataclass(frozen=True)
class Running:
    """A job in a process of its own."""

    job: str
    gpu: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    log: Path

    @property
    def library(self) -> bool:
        return not self.job.startswith(("ours", "captured"))

    def heard(self) -> Any:
        """What it said, or "ended", or None: nothing yet."""
        ended = not self.process.is_alive()  # asked first, so that nothing is left unread
        try:
            if self.pipe.poll():
                return self.pipe.recv()
        except EOFError:
            return "ended"
        return "ended" if ended else None

    def failed(self) -> dict:
        return {"error": f"exit {self.process.exitcode}", "log": self.log.read_text(errors="replace")[-2500:]}


class Runner:
    def __init__(self, out: Path, seconds: float, jobs: list[str]) -> None:
        import measured_job

        self.work = measured_job.work
        measured_job.preload()  # once, and not in every process
        self.gpus = int(os.environ.get("GPUS", "0")) or measured_job.count_gpus()
        self.out, self.waiting, self.count = out, list(jobs), 0
        self.running: list[Running] = []
        self.ready: list[Running] = []
        self.timed: dict[Running, float] = {}  # and when they must have answered
        self.started = time.monotonic()
        self.end = self.started + seconds
        self.parallel = int(os.environ.get("PARALLEL", "0")) or min(os.cpu_count() or 1, PER_GPU * max(self.gpus, 1))

    def run(self) -> int:
        while (self.waiting or self.running) and time.monotonic() < self.end - 3:
            while self.waiting and len(self.running) < self.parallel and time.monotonic() < self.end - 30 and self.free_gpus():
                self.start(self.waiting.pop(0))
            for one in list(self.running):
                said = one.heard()
                if said == "ready":
                    self.ready.append(one)
                elif said is not None:
                    self.finish(one, said if isinstance(said, list) else [(one.job, one.failed())])
                elif one in self.timed and time.monotonic() > self.timed[one]:
                    self.finish(one, [(one.job, one.failed() | {"error": "no answer in a minute"})])
            for one in sorted(self.ready, key=lambda one: not one.library):
                if not any(self.excludes(one, other) for other in self.timed):
                    self.ready.remove(one)
                    self.let(one)
                elif one.library:
                    break  # others would keep the GPUs from being all free
            time.sleep(0.02)
        for one in self.running:
            one.process.kill()
        for job in [one.job for one in self.running] + self.waiting:
            self.write(job, {"error": "no time left"})
        return 0

    def free_gpus(self) -> list[int]:
        """GPUs on which nothing is timed."""
        if any(one.library for one in self.timed):
            return []
        return [gpu for gpu in range(self.gpus) if gpu not in {one.gpu for one in self.timed}]

    def excludes(self, one: Running, other: Running) -> bool:
        """Whether one must stand still while the other is timed."""
        return one.gpu == other.gpu or one.library or other.library

    def let(self, one: Running) -> None:
        """Stop the others and let one check and time its model."""
        for other in self.running:
            if other is not one and self.excludes(one, other):
                self.signal(other, signal.SIGSTOP)
        self.timed[one] = time.monotonic() + LONGEST_S
        one.pipe.send(SETTLE_S)

    def finish(self, one: Running, rows: list[tuple[str, dict]]) -> None:
        self.running.remove(one)
        one.process.kill()
        if self.timed.pop(one, None):
            for other in self.running:
                if not any(self.excludes(other, t) for t in self.timed):
                    self.signal(other, signal.SIGCONT)
        elif one in self.ready:
            self.ready.remove(one)
        for job, row in rows:
            self.write(job, row)

    def start(self, job: str) -> None:
        self.count += 1
        log = Path(f"/tmp/measure-{os.getpid()}-{self.count}.log")
        gpu = min(self.free_gpus(), key=lambda gpu: sum(one.gpu == gpu for one in self.running))
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self.work, args=(job, gpu, theirs, log), daemon=True)
        process.start()
        theirs.close()
        self.running.append(Running(job, gpu, process, ours, log))

    def signal(self, one: Running, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.process.pid, number)

    def write(self, job: str, row: dict) -> None:
        row = {"job": job, **row}
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self.started:5.0f} s {short(row)}", flush=True)


def short(row: dict) -> str:
    if "error" in row:
        return f"{row['job']}  ERROR {row['error'][:150]} {row.get('log', '')[-350:]}"
    keys = ("p50_ms", "min_ms", "repeats", "build_s", "inductor_s", "open_s", "matched", "forced_matched", "memory_mib", "nodes")
    figures = " ".join(f"{k}={row[k]}" for k in keys if k in row)
    return f"{row['job']}  {figures} " + " ".join(f"{e:.1e}" for e in row.get("errors", ()))


if __name__ == "__main__":
    sys.exit(main())
