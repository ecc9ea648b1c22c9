"""Latency of compiled models on one NVIDIA GPU, with their outputs checked first. See docs/benchmarks-gpu.md.

    python tests/gpu/measure_inductor.py OUT.jsonl SECONDS JOB...

A JOB is kind|model|size|precision|batch[|how]: kind "ours"; "eager", "compile" or "patched" (see baselines.py); "captured" (eager run of
our graph); size HEIGHTxWIDTH or "-"; precision fp32, tf32, fp16 or bf16. First everything is compiled, several processes at once
(PARALLEL, COMPILE_SHARE of the time at most): ours into packages in the folder PACKAGES, the others in processes that stay. Then
the GPU is timed, one job at a time, each in a process of its own: the compiled ones, ours opened again, the eager ones. Each
row is written at once. Packages that are there already are not compiled again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

SIZES = {
    "detr": "800x1066", "conditional_detr": "800x1066", "dab_detr": "800x1066", "table-transformer": "800x1066",
    "deformable_detr": "800x1066", "dino": "800x1066", "grounding_dino": "800x1200", "co_dino-swin-l": "768x1152",
    "rt_detr": "640x640", "rt_detr_v2": "640x640", "d_fine": "640x640", "deimv2": "640x640", "lw_detr": "640x640",
    "rf_detr": "-", "omdet_turbo": "640x640", "yolos": "800x1056",
}  # fmt: skip
MAIN = ("detr", "rt_detr_v2", "d_fine", "deformable_detr", "grounding_dino", "co_dino-swin-l")
PLAIN = [name for name in SIZES if name not in ("dino", "co_dino-swin-l")]  # those that transformers has


def _jobs(kind, models, precision, batch=1, how=""):
    return [f"{kind}|random:{name}|{SIZES[name]}|{precision}|{batch}" + (f"|{how}" if how else "") for name in models]


DEFORMABLE = [
    "grounding_dino", "deformable_detr", "d_fine", "deimv2", "rt_detr_v2", "rt_detr", "omdet_turbo", "lw_detr", "rf_detr",
]  # fmt: skip
OTHERS = ["detr", "conditional_detr", "dab_detr", "table-transformer", "yolos"]
# Lists of jobs by name: give @families as a job. The order is that of compiling: what takes longest first.
LISTS = {
    "families": _jobs("ours", SIZES, "fp16"),
    "library": [*_jobs("compile", [*DEFORMABLE, *OTHERS], "fp16"), *_jobs("patched", DEFORMABLE, "fp16")],
    "batches": [*_jobs("ours", MAIN, "fp16", 4), *_jobs("ours", MAIN, "fp16", 16)],
    "types": [*_jobs("ours", MAIN, "bf16"), *_jobs("ours", MAIN, "fp32"), *_jobs("ours", MAIN, "tf32")],
    "late": _jobs(
        "ours", ["d_fine", "deimv2", "dino", "omdet_turbo", "conditional_detr", "dab_detr", "table-transformer", "yolos"], "fp16"
    ),
    "eager": [*_jobs("eager", [*DEFORMABLE, *OTHERS], "fp16"), *_jobs("eager", [*DEFORMABLE, *OTHERS], "fp32")],
}


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    jobs = [job for given in sys.argv[3:] for job in (LISTS[given[1:]] if given.startswith("@") else [given])]
    jobs = list(dict.fromkeys(jobs))
    os.environ.setdefault("PACKAGES", "/tmp/packages")
    Path(os.environ["PACKAGES"]).mkdir(exist_ok=True)
    return Runner(out, seconds, jobs).run()


class Runner:
    def __init__(self, out: Path, seconds: float, jobs: list[str]) -> None:
        self.out, self.jobs, self.started = out, jobs, time.monotonic()
        self.end = self.started + seconds
        self.compile_end = self.started + seconds * float(os.environ.get("COMPILE_SHARE", "0.65"))
        self.parallel = int(os.environ.get("PARALLEL", "6"))
        self.held: list[tuple[str, subprocess.Popen, Path]] = []
        self.built: dict[str, dict] = {}

    def run(self) -> int:
        kinds = {job: job.split("|")[0] for job in self.jobs}
        compiled = ("ours", "compile", "patched")
        # TF32 is a choice of the run, not of the package.
        left = self.compile([job for job in self.jobs if kinds[job] in compiled and "|tf32|" not in job])
        self.wait()
        for held in self.held:
            self.write(held[0], self.time(held))
        done = self.waves(kinds)
        extra = min(float(os.environ.get("EXTRA", "0")), self.end - time.monotonic() - 25)
        if left and extra > 30:  # some seconds more for what was not compiled
            self.held, self.compile_end, self.parallel = [], time.monotonic() + extra, os.cpu_count() or 1
            left = self.compile([job for job in left if kinds[job] == "ours"])
            self.waves(kinds, done)
        for job in left:
            self.write(job, {"error": "not compiled in time"})
        rest = [job for job in self.jobs if kinds[job] not in compiled]
        for at in range(0, len(rest), 6):
            self.wave(rest[at : at + 6])
        return 0

    def waves(self, kinds: dict[str, str], done: frozenset[str] = frozenset()) -> frozenset[str]:
        """Time our packages that are there, some at a time."""
        there = lambda job: self.built.get(job.replace("|tf32|", "|fp32|"), {}).get("built")  # noqa: E731
        ours = [job for job in self.jobs if kinds[job] == "ours" and there(job) and job not in done]
        for at in range(0, len(ours), 12):
            self.wave(ours[at : at + 12])
        return done | frozenset(ours)

    def wait(self) -> None:
        """Until the file GO is there, where that is set: a machine whose time is shared is timed when nobody else works."""
        go = os.environ.get("GO")
        if not go:
            return
        print("compiled", flush=True)
        while not Path(go).exists():
            time.sleep(0.2)
        self.started = time.monotonic()
        self.end = self.started + float(Path(go).read_text() or 100)
        os.sched_setaffinity(0, range(os.cpu_count() or 1))

    def start(self, job: str, mode: str) -> tuple[str, subprocess.Popen, Path]:
        log = Path(f"/tmp/measure-{os.getpid()}-{len(self.built)}-{time.monotonic():.3f}.log")
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("measured_job.py")), job, mode], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=open(log, "wb"), text=True,
        )  # fmt: skip
        os.set_blocking(process.stdout.fileno(), False)
        return job, process, log

    def compile(self, jobs: list[str]) -> list[str]:
        """Compile side by side until `compile_end`; what was not done by then."""
        waiting, running = list(jobs), []
        while waiting or running:
            while waiting and len(running) < self.parallel and roomy() and time.monotonic() < self.compile_end - 20:
                job = waiting.pop(0)
                running.append(self.start(job, "build" if job.startswith("ours") else "hold"))
            if time.monotonic() > self.compile_end:
                break
            for one in list(running):
                job, process, log = one
                ended = process.poll() is not None  # asked first, so that nothing is left unread
                line = process.stdout.readline()
                if line.startswith("{"):
                    self.built[job] = {"built": True, **json.loads(line)}
                elif line.startswith("ready"):
                    self.held.append(one)
                elif not ended or line:
                    continue
                elif job not in self.built:
                    self.write(job, {"error": f"exit {process.returncode}", "log": log.read_text()[-2500:]})
                    self.built[job] = {}
                running.remove(one)
            time.sleep(0.1)
        for _, process, _ in running:
            process.kill()
        return [job for job, _, _ in running] + waiting

    def wave(self, jobs: list[str]) -> None:
        if time.monotonic() > self.end - 12:
            return
        started = [self.start(job, "hold") for job in jobs]
        ready = []
        while len(ready) < len(started) and time.monotonic() < self.end - 4:
            for one in started:
                if one not in ready and (one[1].stdout.readline().startswith("ready") or one[1].poll() is not None):
                    ready.append(one)
            time.sleep(0.1)
        for one in started:
            row = self.time(one) if one in ready and time.monotonic() < self.end else {"error": "no time left"}
            one[1].kill()
            built = self.built.get(one[0], {})
            self.write(one[0], {k: v for k, v in built.items() if k.endswith("_s")} | row)

    def time(self, one: tuple[str, subprocess.Popen, Path]) -> dict:
        _job, process, log = one
        try:
            os.set_blocking(process.stdout.fileno(), True)
            process.stdin.write("go\n")
            process.stdin.flush()
            line = ""
            while not line.startswith("{"):
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError("died")
            return json.loads(line)
        except Exception as error:
            return {"error": str(error), "log": log.read_text()[-2500:]}
        finally:
            process.kill()

    def write(self, job: str, row: dict) -> None:
        row = {"job": job, **row}
        with open(self.out, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - self.started:5.0f} s {short(row)}", flush=True)


def roomy() -> bool:
    """Whether the host has memory for one more process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) > 25 * 2**20


def short(row):
    if "error" in row:
        return f"{row['job']}  ERROR {row['error'][:150]} {row.get('log', '')[-350:]}"
    keys = ("p50_ms", "min_ms", "compile_s", "inductor_s", "matched", "memory_mib", "nodes")
    return (
        f"{row['job']}  "
        + " ".join(f"{k}={row[k]}" for k in keys if k in row)
        + " "
        + " ".join(f"{e:.1e}" for e in row.get("errors", ()))
    )


if __name__ == "__main__":
    sys.exit(main())
