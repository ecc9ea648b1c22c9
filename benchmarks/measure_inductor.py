"""Speed of compiled models and their peers, checked first, in one call on one host. See docs/results/benchmarks-gpu.md.

    python benchmarks/measure_inductor.py OUT.jsonl --models detr,rt_detr_v2 --batches 1,16 --kinds ours,compile --baseline CHECKOUT
    python benchmarks/measure_inductor.py OUT.jsonl --list table --seconds 1500
    python benchmarks/measure_inductor.py OUT.jsonl --models rt_detr_v2 --alone      # what a compilation takes by phase

Each row is one job, kind|model|size|precision|batch[|how]. Kinds:

    ours          the package of this checkout
    base          the package of another checkout (--baseline)
    captured      eager run of our graph
    eager, compile, patched                   transformers' model, see baselines.py
    rtx-EXPORTER, ort-EXPORTER                TensorRT-RTX and ONNX Runtime CUDA on the graph of `detrt`, `authors` or `transformers`,
                                              from the folder of `compare_exporters.py export` (--graphs)

Every job is a process. They compile beside each other with one thread each; --alone: one at a time with all cores. Jobs that differ
in their kind alone are a group: when all have compiled, every other process is stopped (SIGSTOP) and the group is tuned, checked and
timed in turns, ROUNDS times each, so that a change of the clock meets all of them. Each row is written at once, and at the end the
tables of tables.py are printed. Ours in FP32 at batch 1 give a row for TF32 as well, from the same package.

On a CPU (--device cpu; kinds ours and base, FP32) the same measures packages for the CPU, compiled one after another.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from program import at_least, make_parser, require_gpu, run

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
KINDS = ("ours", "base", "captured", "eager", "compile", "patched")  # the last three: those of baselines.py, which imports torch
PEERS, EXPORTERS = ("rtx", "ort"), ("detrt", "authors", "transformers")
SETTLE_S = 0.3  # what stopped processes had given the GPU is done by then
LONGEST_S = 90
ROUNDS = 4
LAST_S = 45  # before the end, what is ready is timed without the rest of its group
PER_GPU = 12  # 6 GB each


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


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("out", type=Path, help="rows are appended to it, one JSON object a line")
    parser.add_argument("jobs", nargs="*", help="jobs by name, beside those of the options")
    parser.add_argument("--list", action="append", default=[], choices=LISTS, help="a list of jobs")
    parser.add_argument("--models", type=_split, default=[], help=f"some of {', '.join({**SIZES, **RECENT})}")
    parser.add_argument("--kinds", type=_split, default=["ours"])
    parser.add_argument("--precision", type=_split, default=["fp16"])
    parser.add_argument("--batches", type=_split, default=["1"])
    parser.add_argument("--baseline", type=Path, help="another checkout of detrt; adds the kind base to each of ours")
    parser.add_argument("--graphs", type=Path, help="folder of compare_exporters.py, for the kinds rtx-... and ort-...")
    parser.add_argument("--seconds", type=at_least(1.0), default=1500, help="what is not ready by then gets a row that says so")
    parser.add_argument(
        "--parallel", type=at_least(0), default=0, help=f"processes; default: one a core, and at most {PER_GPU} ready ones a GPU"
    )
    parser.add_argument("--alone", action="store_true", help="one process at a time, with all cores")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    sizes = SIZES | RECENT
    unknown = [name for name in given.models if name not in sizes and ":" not in name]
    if unknown:
        parser.error(f"--models has {', '.join(unknown)}; known are {', '.join(sizes)}, and any reference such as random:NAME")
    if given.baseline and not (given.baseline / "src" / "detrt").is_dir():
        parser.error(f"--baseline: '{given.baseline}' has no src/detrt")
    jobs = [*given.jobs, *(job for name in given.list for job in LISTS[name])]
    for model in given.models:  # jobs of a group stand beside each other
        reference = model if ":" in model else f"random:{model}"
        for precision in given.precision:
            for batch in given.batches:
                jobs += [f"{kind}|{reference}|{sizes.get(model, '-')}|{precision}|{batch}" for kind in given.kinds]
    if given.baseline:
        jobs = [one for job in jobs for one in ([job, f"base{job[4:]}"] if job.startswith("ours|") else [job])]
    for job in jobs:
        if why := _refused(job, given):
            parser.error(f"{job}: {why}")
    given.jobs = list(dict.fromkeys(jobs))
    return given


def _refused(job: str, given: argparse.Namespace) -> str:
    """Why a job cannot run here, so that none fails when others have compiled for minutes; "" where it can."""
    kind, *rest = job.split("|")
    peer, _, graph = kind.partition("-")
    if kind not in KINDS and not (peer in PEERS and graph in EXPORTERS):
        known = (*KINDS, *(f"{peer}-{graph}" for peer in PEERS for graph in EXPORTERS))
        return f"there is no kind {kind}; there are {', '.join(known)}"
    if len(rest) not in (4, 5) or not rest[3].isdecimal():
        return "a job is kind|model|size|precision|batch"
    if kind == "base" and not given.baseline:
        return "the kind base needs --baseline"
    if graph and not given.graphs:
        return f"the kind {kind} needs --graphs"
    if given.device == "cpu" and (kind not in ("ours", "base") or rest[2] != "fp32"):
        return "on a CPU there are the kinds ours and base, with --precision fp32"
    return ""


def _split(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    given = parse()
    # One core a process, but packages for a CPU are compiled for the threads that run them; asking for the GPU here must not open it, or the processes could not.
    threads = str(os.cpu_count()) if given.alone or given.device == "cpu" else "1"
    for name, value in (
        ("OMP_NUM_THREADS", threads),
        ("TORCHINDUCTOR_COMPILE_THREADS", threads),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
    ):
        os.environ.setdefault(name, value)
    os.environ["MEASURED_DEVICE"] = given.device
    if given.device == "cuda":
        require_gpu()
    if given.graphs:
        os.environ["MEASURED_GRAPHS"] = str(given.graphs.resolve())
    print(f"{len(given.jobs)} jobs in groups of {len({_group(job) for job in given.jobs})}", flush=True)
    Runner(given).run()
    import tables

    print(tables.shown(tables.Rows(given.out.read_text().splitlines())))
    return 0


def _group(job: str) -> str:
    """Jobs of one group differ in their kind alone."""
    return job.partition("|")[2]


def other_checkout(source: str, *arguments: Any) -> None:
    """A job of the kind base, in a process that has not imported detrt: the package is made by another checkout, and timed by this one."""
    import importlib.util

    sys.path[:0] = [f"{source}/src", f"{source}/benchmarks"]
    import measured_job as theirs

    import detrt

    if not Path(detrt.__file__).is_relative_to(source):
        raise SystemExit(f"detrt is {detrt.__file__} and not that of {source}")
    place = importlib.util.spec_from_file_location("this_measured_job", Path(__file__).with_name("measured_job.py"))
    assert place and place.loader
    ours = importlib.util.module_from_spec(place)
    place.loader.exec_module(ours)
    theirs.DEVICE = ours.DEVICE
    ours.work(*arguments, prepared=theirs.prepare_job if ours.DEVICE == "cuda" else None)


@dataclass(eq=False)
class Running:
    """A job in a process of its own."""

    job: str
    gpu: int
    process: BaseProcess
    pipe: Connection
    log: Path
    ready: bool = False

    def heard(self, seconds: float = 0) -> Any:
        """What it said, or "ended", or None: nothing yet."""
        ended = not self.process.is_alive()  # asked first, so that nothing is left unread
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except EOFError:
            return "ended"
        return "ended" if ended else None

    def failed(self, why: str = "") -> list[tuple[str, dict]]:
        error = why or f"exit {self.process.exitcode}"
        return [(self.job, {"error": error, "log": self.log.read_text(errors="replace")[-2500:]})]


class Runner:
    def __init__(self, given: argparse.Namespace) -> None:
        import measured_job

        self.work = measured_job.work
        measured_job.preload()  # once, and not in every process
        self.given, self.waiting, self.count = given, list(given.jobs), 0
        self.gpus = max(measured_job.count_gpus(), 1)
        self.running: list[Running] = []
        self.started = time.monotonic()
        self.end = self.started + given.seconds
        self.parallel = given.parallel or (1 if given.alone or given.device == "cpu" else os.cpu_count() or 1)
        self.most = max(PER_GPU * self.gpus, self.parallel + 1)

    def run(self) -> None:
        while (self.waiting or self.running) and time.monotonic() < self.end - 3:
            while self.waiting and self.room() and time.monotonic() < self.end - LAST_S:
                self.start(self.waiting.pop(0))
            for one in list(self.running):
                said = one.heard()
                if said == "ready":
                    one.ready = True
                elif said is not None:
                    self.finish(one, said if isinstance(said, list) else one.failed())
            for group in dict.fromkeys(_group(one.job) for one in self.running if one.ready):
                members = [one for one in self.running if _group(one.job) == group]
                complete = all(one.ready for one in members) and not any(_group(job) == group for job in self.waiting)
                if complete or time.monotonic() > self.end - LAST_S:
                    self.time([one for one in members if one.ready])
            time.sleep(0.02)
        for one in self.running:
            one.process.kill()
        for job in [one.job for one in self.running] + self.waiting:
            self.write(job, {"error": "no time left"})

    def room(self) -> bool:
        compiling = sum(not one.ready for one in self.running)
        return compiling < self.parallel and len(self.running) < self.most

    def time(self, members: list[Running]) -> None:
        """Check and time a group in turns while all others stand still."""
        others = [one for one in self.running if one not in members]
        for other in others:
            self.signal(other, signal.SIGSTOP)
        alive = list(members)
        for command in [*["time"] * ROUNDS, "end"]:
            for one in list(alive):
                one.pipe.send(SETTLE_S if command == "time" else None)
                said = one.heard(LONGEST_S)
                if said != "timed":
                    alive.remove(one)
                    self.finish(
                        one, said if isinstance(said, list) else one.failed("" if said else f"no answer in {LONGEST_S} s")
                    )
        for other in others:
            self.signal(other, signal.SIGCONT)

    def finish(self, one: Running, rows: list[tuple[str, dict]]) -> None:
        self.running.remove(one)
        one.process.kill()
        for job, row in rows:
            self.write(job, row)

    def start(self, job: str) -> None:
        self.count += 1
        log = Path(f"/tmp/measure-{os.getpid()}-{self.count}.log")
        twins = [one.gpu for one in self.running if _group(one.job) == _group(job)]
        gpu = twins[0] if twins else min(range(self.gpus), key=lambda gpu: sum(one.gpu == gpu for one in self.running))
        base = job.startswith("base|")
        ours, theirs = multiprocessing.Pipe()
        arguments = (job, gpu, theirs, log)
        if base:
            place = str(self.given.baseline.resolve())
            process: BaseProcess = multiprocessing.get_context("spawn").Process(target=other_checkout, args=(place, *arguments))
        else:
            process = multiprocessing.get_context("fork").Process(target=self.work, args=arguments)
        process.start()
        theirs.close()
        self.running.append(Running(job, gpu, process, ours, log))

    def signal(self, one: Running, number: int) -> None:
        if one.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process.pid, number)

    def write(self, job: str, row: dict) -> None:
        row = {"job": job, **row}
        with open(self.given.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self.started:5.0f} s {short(row)}", flush=True)


def short(row: dict) -> str:
    if "error" in row:
        return f"{row['job']}  ERROR {row['error'][:150]} {row.get('log', '')[-350:]}"
    keys = (
        "p50_ms",
        "quartiles_ms",
        "repeats",
        "build_s",
        "inductor_s",
        "open_s",
        "matched",
        "forced_matched",
        "memory_mib",
        "nodes",
    )
    figures = " ".join(f"{k}={row[k]}" for k in keys if k in row)
    return f"{row['job']}  {figures} " + " ".join(f"{e:.1e}" for e in row.get("errors", ()))


if __name__ == "__main__":
    run(main)
