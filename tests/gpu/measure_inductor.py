"""Latency of compiled models on one NVIDIA GPU, with their outputs checked first. See docs/benchmarks-gpu.md.

    python tests/gpu/measure_inductor.py OUT.jsonl SECONDS JOB...
    python tests/gpu/measure_inductor.py OUT.jsonl 1500 @table

A JOB is kind|model|size|precision|batch[|how]: kind "ours"; "eager", "compile" or "patched" (see baselines.py); "captured" (eager run of
our graph); size HEIGHTxWIDTH or "-"; precision fp32, tf32, fp16 or bf16. @NAME is a list of LISTS.

First everything is compiled, a process a job and PARALLEL of them at once (default: one a core), for COMPILE_SHARE of the time at
most: ours into packages in the folder PACKAGES, the others in processes that stay. Then the GPU is timed, one job at a time and
nothing beside it: the compiled ones, ours opened again, the eager ones. Each row is written at once. Packages that are there
already are not compiled again. tables.py makes the document's tables of the rows.
"""

from __future__ import annotations

import json
import multiprocessing
import os
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
PLAIN = [name for name in SIZES if name not in ("dino", "co_dino-swin-l")]  # those that transformers has
SAMPLING = [name for name in PLAIN if name not in ("detr", "conditional_detr", "dab_detr", "table-transformer", "yolos")]
COMPILED = ("ours", "compile", "patched")
AT_ONCE = 16  # processes that wait for their turn on the GPU


def _jobs(kind: str, models: Any, precision: str, *batches: int) -> list[str]:
    return [f"{kind}|random:{name}|{SIZES[name]}|{precision}|{batch}" for batch in batches for name in models]


LISTS = {
    "families": _jobs("ours", SIZES, "fp16", 1),
    "library": [*_jobs("compile", PLAIN, "fp16", 1), *_jobs("patched", SAMPLING, "fp16", 1)],
    "batches": _jobs("ours", SIZES, "fp16", 4, 16),
    "types": [*_jobs("ours", SIZES, "bf16", 1), *_jobs("ours", SIZES, "fp32", 1), *_jobs("ours", SIZES, "tf32", 1)],
    "more": [*_jobs("ours", SIZES, "bf16", 4, 16), *_jobs("ours", SIZES, "fp32", 4, 16)],
    "eager": [*_jobs("eager", PLAIN, "fp16", 1), *_jobs("eager", PLAIN, "fp32", 1)],
    # As a rule batch 4 of the one model whose batch has a target.
    "targets": [
        *_jobs("compile", ["detr"], "fp16", 4),
        *_jobs("eager", ["detr"], "fp16", 4),
        *_jobs("eager", ["detr"], "fp32", 4),
    ],
}
LISTS["table"] = [job for name in ("library", "families", "targets", "batches", "types", "more", "eager") for job in LISTS[name]]


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    jobs = [job for given in sys.argv[3:] for job in (LISTS[given[1:]] if given.startswith("@") else [given])]
    os.environ.setdefault("PACKAGES", "/tmp/packages")
    Path(os.environ["PACKAGES"]).mkdir(exist_ok=True)
    # One core a process; asking for the GPU here must not open it, or the processes could not.
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHINDUCTOR_COMPILE_THREADS", "1"), ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")):
        os.environ.setdefault(name, value)
    return Runner(out, seconds, list(dict.fromkeys(jobs))).run()


@dataclass(frozen=True)
class Held:
    """A job in a process of its own."""

    job: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    log: Path

    def heard(self) -> dict | str | None:
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
        self.out, self.jobs, self.started = out, jobs, time.monotonic()
        self.end = self.started + seconds
        self.compile_end = self.started + seconds * float(os.environ.get("COMPILE_SHARE", "0.7"))
        self.parallel = int(os.environ.get("PARALLEL", "0")) or os.cpu_count() or 1
        self.built: dict[str, dict] = {}
        self.count = 0

    def run(self) -> int:
        kinds = {job: job.split("|")[0] for job in self.jobs}
        # TF32 is a choice of the run, not of the package.
        left, held = self.compile([job for job in self.jobs if kinds[job] in COMPILED and "|tf32|" not in job])
        print(f"{time.monotonic() - self.started:5.0f} s compiled; {len(left)} not in time", flush=True)
        for one in held:
            self.write(one.job, self.time(one))
        there = lambda job: self.built.get(job.replace("|tf32|", "|fp32|"))  # noqa: E731
        rest = [job for job in self.jobs if kinds[job] not in COMPILED]
        ours = [job for job in self.jobs if kinds[job] == "ours" and there(job)]
        for jobs in (ours, rest):
            for at in range(0, len(jobs), AT_ONCE):
                self.wave(jobs[at : at + AT_ONCE])
        for job in left:
            self.write(job, {"error": "not compiled in time"})
        return 0

    def start(self, job: str, build: bool) -> Held:
        self.count += 1
        log = Path(f"/tmp/measure-{os.getpid()}-{self.count}.log")
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self.work, args=(job, build, theirs, log), daemon=True)
        process.start()
        theirs.close()
        return Held(job, process, ours, log)

    def compile(self, jobs: list[str]) -> tuple[list[str], list[Held]]:
        """Compile side by side until `compile_end`: what was not done by then, and the processes that stay."""
        waiting, running, held = list(jobs), [], []
        while (waiting or running) and time.monotonic() < self.compile_end:
            while waiting and len(running) < self.parallel and roomy() and time.monotonic() < self.compile_end - 20:
                job = waiting.pop(0)
                running.append(self.start(job, job.startswith("ours")))
            for one in list(running):
                said = one.heard()
                if said is None:
                    continue
                running.remove(one)
                if said == "ready":
                    held.append(one)
                    print(f"{time.monotonic() - self.started:5.0f} s ready {one.job}", flush=True)
                elif isinstance(said, dict):
                    self.built[one.job] = said
                    print(f"{time.monotonic() - self.started:5.0f} s built {one.job}", flush=True)
                else:
                    self.write(one.job, one.failed())
            time.sleep(0.05)
        for one in running:
            one.process.kill()
        return [one.job for one in running] + waiting, held

    def wave(self, jobs: list[str]) -> None:
        """Get some jobs ready side by side, then time one after the other."""
        if time.monotonic() > self.end - 12:
            for job in jobs:
                self.write(job, {"error": "no time left"})
            return
        started = [self.start(job, False) for job in jobs]
        waiting, ready = list(started), []
        while waiting and time.monotonic() < self.end - 4:
            for one in list(waiting):
                if said := one.heard():
                    waiting.remove(one)
                    ready += [one] * (said == "ready")
            time.sleep(0.05)
        for one in started:
            if one in ready:
                row = self.time(one) if time.monotonic() < self.end else {"error": "no time left"}
            else:
                row = one.failed()
            one.process.kill()
            built = self.built.get(one.job, {})
            self.write(one.job, {k: v for k, v in built.items() if k.endswith(("_s", "_mb")) or k.startswith("forced")} | row)

    def time(self, one: Held) -> dict:
        try:
            one.pipe.send("go")
            if not one.pipe.poll(60):
                raise TimeoutError("no answer in a minute")
            return one.pipe.recv()
        except (EOFError, OSError, TimeoutError) as error:
            return {**one.failed(), "error": f"{type(error).__name__} {error}"}
        finally:
            one.process.kill()

    def write(self, job: str, row: dict) -> None:
        row = {"job": job, **row}
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self.started:5.0f} s {short(row)}", flush=True)


def roomy() -> bool:
    """Whether the host has memory for one more process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) > 25 * 2**20


def short(row: dict) -> str:
    if "error" in row:
        return f"{row['job']}  ERROR {row['error'][:150]} {row.get('log', '')[-350:]}"
    keys = ("p50_ms", "min_ms", "repeats", "build_s", "inductor_s", "open_s", "matched", "forced_matched", "memory_mib", "nodes")
    figures = " ".join(f"{k}={row[k]}" for k in keys if k in row)
    return f"{row['job']}  {figures} " + " ".join(f"{e:.1e}" for e in row.get("errors", ()))


if __name__ == "__main__":
    sys.exit(main())
