"""Latency of compiled models on one NVIDIA GPU, with their outputs checked first. See docs/benchmarks-gpu.md.

    python tests/gpu/measure_inductor.py OUT.jsonl SECONDS JOB...

A JOB is kind|model|size|precision|batch[|how]: kind "ours"; "eager", "compile" or "patched" (see baselines.py); "captured" (eager run of
our graph); size HEIGHTxWIDTH or "-". With PACKAGES=FOLDER in the environment, "ours" opens the package that an earlier run
with BUILD=1, which times nothing, left there. Every job compiles in a process of its own, several at once; when all are ready, or
time is short, they are timed one at a time, in their order, and each row is written at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

from baselines import KINDS, before_import, transformers_job

REPEATS, WARMUP = 40, 5
DEVICE = "cuda"
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
    "deformable_detr",
    "rt_detr",
    "rt_detr_v2",
    "d_fine",
    "deimv2",
    "lw_detr",
    "rf_detr",
    "grounding_dino",
    "omdet_turbo",
]
_COMPILED = ["detr", "rt_detr_v2", "d_fine", "deformable_detr", "grounding_dino", "rt_detr", "deimv2", "lw_detr", "rf_detr"]
# Lists of jobs by name: give @families as a job.
LISTS = {
    "families": _jobs("ours", SIZES, "fp16"),
    "compared": [
        *_jobs("compile", _COMPILED, "fp16"),
        *_jobs("ours", MAIN[:4], "fp16", 4),
        *_jobs("eager", ["detr", *DEFORMABLE], "fp16"),
        *_jobs("eager", ["detr", *DEFORMABLE], "fp32"),
    ],
    "others": [
        *_jobs("ours", MAIN, "bf16"),
        *_jobs("ours", MAIN, "fp32"),
        *_jobs("ours", MAIN[4:], "fp16", 4),
        *_jobs("ours", MAIN, "fp16", 16),
    ],
}


def main() -> int:
    out, seconds = Path(sys.argv[1]), float(sys.argv[2])
    jobs = [job for given in sys.argv[3:] for job in (LISTS[given[1:]] if given.startswith("@") else [given])]
    parallel = int(os.environ.get("PARALLEL", "6"))
    started = time.monotonic()
    waiting = list(enumerate(jobs))
    running: dict[int, tuple[str, subprocess.Popen, Path]] = {}
    ready: dict[int, bool] = {}
    rows: dict[int, dict] = {}
    # Processes that are ready stay, because a compiled model lives in its process.
    while waiting or any(i not in ready for i in running):
        compiling = [i for i in running if i not in ready]
        while waiting and len(compiling) < parallel and time.monotonic() - started < seconds * 0.7:
            index, job = waiting.pop(0)
            log = Path(f"/tmp/measure-{os.getpid()}-{index}.log")
            process = subprocess.Popen(
                [sys.executable, __file__, "worker", job], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=open(log, "wb"), text=True, env={**os.environ, "OMP_NUM_THREADS": "2"},
            )  # fmt: skip
            os.set_blocking(process.stdout.fileno(), False)
            running[index] = (job, process, log)
            compiling.append(index)
        for index in compiling:
            line = running[index][1].stdout.readline()
            if line.startswith("{"):
                rows[index] = json.loads(line)
            if line.startswith("ready") or running[index][1].poll() is not None:
                ready[index] = line.startswith("ready")
        if time.monotonic() - started > seconds * 0.86:
            break
        time.sleep(0.2)
    for index in running:
        if index not in ready:
            running[index][1].kill()
    with open(out, "a") as file:
        for index, (job, process, log) in running.items():
            row = {"job": job, "error": "not compiled in time"}
            if ready.get(index) and time.monotonic() - started < seconds:
                try:
                    os.set_blocking(process.stdout.fileno(), True)
                    process.stdin.write("go\n")
                    process.stdin.flush()
                    line = ""
                    while not line.startswith("{"):
                        line = process.stdout.readline()
                        if not line:
                            raise RuntimeError("died")
                    row = {"job": job, **json.loads(line)}
                except Exception as error:
                    row = {"job": job, "error": str(error), "log": log.read_text()[-1500:]}
            elif os.environ.get("BUILD") and process.poll() == 0:
                row = {"job": job, "built": True, **rows.get(index, {})}
            elif index in ready and not ready[index]:
                row = {"job": job, "error": f"exit {process.returncode}", "log": log.read_text()[-3000:]}
            process.kill()
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(short(row), flush=True)
        for _index, job in waiting:
            file.write(json.dumps({"job": job, "error": "not started"}) + "\n")
    return 0


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


def worker(job: str) -> int:
    faulthandler.enable()
    import torch

    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    kind, model, size, precision, batch, *how = job.split("|")
    before_import(kind)
    if precision == "tf32" and kind in KINDS:
        tensor_float()
    start = time.monotonic()
    step, row = prepare_job(kind, model, size, precision, int(batch), how[0] if how else "")
    row["compile_s"] = round(time.monotonic() - start, 1)
    if os.environ.get("BUILD"):
        print(json.dumps(row), flush=True)
        return 0
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        row |= timed(step, graph=row.get("graph", True))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        traceback.print_exc()
    print(json.dumps(row), flush=True)
    return 0


def prepare_job(kind, model, size, precision, batch, how):
    import torch

    from detrt.export.config import ExportConfig
    from detrt.export.contract import exported_spec
    from detrt.sources import load_source

    source = load_source(model)
    given = source.spec.input
    height, width = (int(s) for s in size.split("x")) if size != "-" else given.size_hw
    step_of = given.multiple_of
    height, width = height // step_of * step_of, width // step_of * step_of
    folder = os.environ.get("PACKAGES") if kind == "ours" else None
    kept = Path(folder or ".", f"{model}-{size}-{precision}-{batch}-{how}.pt2".replace(":", "-").replace("/", "-"))
    if folder and kept.exists() and not os.environ.get("BUILD"):
        return reopened(kept)
    config = ExportConfig(height=height, width=width, mask=False) if given.dynamic else ExportConfig(mask=not given.mask or False)
    spec = exported_spec(source, config)
    row = {"kind": kind, "model": model, "height": height, "width": width, "precision": precision, "batch": batch}
    tokens = 6
    if kind in KINDS:
        return transformers_job(source, spec, row, kind, precision, batch, tokens)
    try:
        run, want, inputs = ours(
            source, spec, row, kind, precision, batch, how, tokens, "nobias" not in how, kept if folder else None
        )
    except Exception as error:
        traceback.print_exc()
        row["retried"] = " ".join(str(error).split())[-200:]
        run, want, inputs = ours(source, spec, row, kind, precision, batch, how, tokens, False, kept if folder else None)
    if os.environ.get("BUILD"):
        torch.save((row, inputs, want), kept.with_suffix(".io"))
        return None, row
    return checked(run, want, inputs, row)


def reopened(path):
    """A package that an earlier process compiled."""
    import torch

    import detrt.kernels.epilogues  # noqa: F401 (registers ops)
    from detrt.inductor.package import load_package

    row, inputs, want = torch.load(path.with_suffix(".io"))
    run = load_package(path, "cuda")
    if row["precision"] == "tf32":
        tensor_float()
    searched(run, inputs)
    return checked(run, want, inputs, row)


def tensor_float():
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def searched(run, inputs):
    """First run; the search for the fastest convolutions takes gigabytes of work memory for a moment."""
    import torch

    with alone():
        torch.backends.cudnn.benchmark = True
        run(*inputs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def checked(run, want, inputs, row):
    import torch

    got = [t.float() for t in run(*inputs)]
    torch.cuda.synchronize()
    row["errors"] = [relative(a, b) for a, b in zip(want, got, strict=True)]
    row["matched"] = matched(want, got)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    torch.cuda.synchronize()
    row["memory_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return (lambda: run(*inputs)), row


def ours(source, spec, row, kind, precision, batch, how, tokens, biased, path):
    import torch

    from detrt.inductor.compile import compile_artifact, options_for
    from detrt.inductor.program import prepare, tune_for_gpu
    from detrt.inductor.types16 import lower_types, share_of_low

    torch.backends.cudnn.benchmark = False
    captured = prepare(source, spec, (batch, batch), "fp32", DEVICE, tokens, biased)
    want = [t.float() for t in captured.graph(*captured.inputs)]
    torch.cuda.empty_cache()
    if precision not in ("fp32", "tf32"):
        lower_types(captured.graph, precision)
        row["share"] = share_of_low(captured.graph, precision)
        tune_for_gpu(captured, "nolin" not in how, "none" if "noconv" in how else "wide" if "wideconv" in how else "all")
    inputs = captured.inputs
    row["nodes"] = len(captured.graph.graph.nodes)
    if kind == "captured":
        return captured.graph, want, inputs
    if precision == "tf32":
        tensor_float()
    start = time.monotonic()
    run = compile_artifact(captured, path, options_for("cuda", how))
    row["inductor_s"] = round(time.monotonic() - start, 1)
    if path is not None:
        row["package_mb"] = round(path.stat().st_size / 1e6, 1)
    if not os.environ.get("BUILD"):
        searched(run, inputs)
    return run, want, inputs


def relative(a, b):
    """Norm of the difference over the norm: top-k orders of random weights make single queries differ wholly."""
    good = a.isfinite() & (a.abs() < 1e4)
    return float(((a - b)[good].norm() / a[good].norm()).item())


@contextlib.contextmanager
def alone():
    with open("/tmp/measure.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def matched(want, got):
    """Share of the 100 best queries of each image that have a twin: corners within 1 % of the image, score within 0.02."""
    import torch

    shares = []
    for logits, boxes, other_logits, other_boxes in zip(want[0], want[1], got[0], got[1], strict=True):
        scores, found = logits.sigmoid().amax(-1), other_logits.sigmoid().amax(-1)
        best = scores.topk(min(100, len(scores))).indices
        near = torch.cdist(boxes[best], other_boxes, p=float("inf")) < 0.01
        alike = (scores[best][:, None] - found[None]).abs() < 0.02
        shares.append(float((near & alike).any(1).float().mean()))
    return round(sum(shares) / len(shares), 4)


def timed(step, graph):
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    replay = step
    if graph:
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph):
            kept = step()  # noqa: F841
        replay = cuda_graph.replay
    for _ in range(WARMUP):
        replay()
    torch.cuda.synchronize()
    samples = []
    for _ in range(REPEATS):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        replay()
        b.record()
        b.synchronize()
        samples.append(a.elapsed_time(b))
    samples.sort()
    row = {"p50_ms": samples[len(samples) // 2], "min_ms": samples[0], "p90_ms": samples[int(len(samples) * 0.9)]}
    if graph and os.environ.get("PROFILE"):
        row["kernels"] = profile(replay)
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


def profile(replay):
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:70]
    return [[e.key[:90], e.count // 3, round(e.self_device_time_total / 3, 1)] for e in rows]


if __name__ == "__main__":
    sys.exit(worker(sys.argv[2]) if sys.argv[1] == "worker" else main())
