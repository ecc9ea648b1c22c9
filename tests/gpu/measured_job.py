"""One job of measure_inductor.py, in a process of its own.

build: compile to a package in the folder PACKAGES, say what was found, and end. Otherwise: get ready, say "ready", and time when
something comes in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import time
import traceback
from pathlib import Path

from agreement import matched, relative, run_forced
from baselines import KINDS, before_import, transformers_job

# Runs with the clock: as many as fit into a second, within limits.
FEWEST, MOST, SECONDS = 10, 40, 1.0
WARMUP = 5
DEVICE = "cuda"


def preload() -> None:
    """Import what every job needs, without opening the GPU."""
    import torch
    import transformers.models.auto  # noqa: F401

    import detrt.inductor.compile
    import detrt.inductor.package
    import detrt.inductor.program
    import detrt.sources  # noqa: F401

    torch.set_num_threads(1)
    assert not torch.cuda.is_initialized()


def work(job: str, build: bool, pipe, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
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
    step, row = prepare_job(kind, model, size, precision, int(batch), how[0] if how else "", build)
    row["build_s" if build else "open_s"] = round(time.monotonic() - start, 1)
    if build:
        pipe.send(row)
        return
    pipe.send("ready")
    pipe.recv()
    try:
        row |= timed(step, graph=row.get("graph", True), profiled=kind == "ours" and precision == "fp16")
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        traceback.print_exc()
    pipe.send(row)


def prepare_job(kind, model, size, precision, batch, how, build):
    import torch

    from detrt.export.config import ExportConfig
    from detrt.export.contract import exported_spec
    from detrt.sources import load_source

    folder = os.environ.get("PACKAGES") if kind == "ours" else None
    packaged = "fp32" if precision == "tf32" else precision
    kept = Path(folder or ".", f"{model}-{size}-{packaged}-{batch}-{how}.pt2".replace(":", "-").replace("/", "-"))
    if folder and kept.with_suffix(".io").exists():
        return (None, torch.load(kept.with_suffix(".io"))[0]) if build else reopened(kept, precision)
    source = load_source(model)
    given = source.spec.input
    height, width = (int(s) for s in size.split("x")) if size != "-" else given.size_hw
    step_of = given.multiple_of
    height, width = height // step_of * step_of, width // step_of * step_of
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
    if build:
        torch.save((row, inputs, want), kept.with_suffix(".io"))
        return None, row
    return checked(run, want, inputs, row)


def reopened(path, precision):
    """A package that an earlier process compiled."""
    import torch

    import detrt.kernels.epilogues  # noqa: F401 (registers ops)
    from detrt.inductor.package import load_package

    row, inputs, want = torch.load(path.with_suffix(".io"))
    run = load_package(path, "cuda")
    row["precision"] = precision
    if precision == "tf32":
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
    with alone():
        want, first = run_forced(captured.graph, captured.inputs)
        torch.cuda.empty_cache()
    if precision not in ("fp32", "tf32"):
        lower_types(captured.graph, precision)
        row["share"] = share_of_low(captured.graph, precision)
        tune_for_gpu(captured, "nolin" not in how, "none" if "noconv" in how else "wide" if "wideconv" in how else "all")
        with alone():
            forced, _ = run_forced(captured.graph, captured.inputs, first.indices)
        row["forced_errors"] = [relative(a, b) for a, b in zip(want, forced, strict=True)]
        row["forced_matched"] = matched(want, forced)
        torch.cuda.empty_cache()
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
    searched(run, inputs)
    return run, want, inputs


@contextlib.contextmanager
def alone():
    with open("/tmp/measure.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(step, graph, profiled=False):
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

    def once():
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        replay()
        b.record()
        b.synchronize()
        return a.elapsed_time(b)

    first = min(once() for _ in range(WARMUP))
    repeats = min(max(int(SECONDS * 1e3 / first), FEWEST), MOST)
    samples = sorted(once() for _ in range(repeats))
    row = {
        "p50_ms": samples[len(samples) // 2],
        "min_ms": samples[0],
        "p90_ms": samples[int(len(samples) * 0.9)],
        "repeats": repeats,
    }
    if graph and profiled:
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
