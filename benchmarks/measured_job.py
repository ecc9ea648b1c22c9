"""One job of measure_inductor.py, in a process of its own: compile, check, say "ready", time when something comes in, say the rows."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import tempfile
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

    import detrt.backends.inductor.compile
    import detrt.backends.inductor.package
    import detrt.backends.inductor.passes
    import detrt.models.load  # noqa: F401

    torch.set_num_threads(1)
    assert not torch.cuda.is_initialized()


def count_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def work(job: str, gpu: int, pipe, log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    import torch

    torch.set_grad_enabled(False)
    kind, model, size, precision, batch, *how = job.split("|")
    tensor_float(precision == "tf32")
    # As detrt's sessions do; for transformers, too, where it is not the default.
    torch.backends.cudnn.benchmark = True
    before_import(kind)
    start = time.monotonic()
    run, want, inputs, row = prepare_job(kind, model, size, precision, int(batch), how[0] if how else "")
    row["build_s"] = round(time.monotonic() - start, 1)
    with alone():
        pipe.send("ready")
        time.sleep(pipe.recv())
        rows = [(job, row | measured(run, want, inputs, row, profiled=kind == "ours" and precision == "fp16"))]
        if job.startswith("ours|") and (precision, batch) == ("fp32", "1"):
            tensor_float(True)
            rows.append((job.replace("|fp32|", "|tf32|"), row | measured(run, want, inputs, row) | {"precision": "tf32"}))
        pipe.send(rows)


def prepare_job(kind, model, size, precision, batch, how):
    """(what runs, the outputs that it must have, its inputs, facts)."""
    from detrt.models.contract import ExportConfig, exported_spec
    from detrt.models.load import load_source

    source = load_source(model)
    given = source.spec.input
    height, width = (int(s) for s in size.split("x")) if size != "-" else given.size_hw
    step_of = given.multiple_of
    height, width = height // step_of * step_of, width // step_of * step_of
    config = ExportConfig(height=height, width=width, mask=False) if given.dynamic or given.mask else ExportConfig()
    spec = exported_spec(source, config)
    row = {"kind": kind, "model": model, "height": height, "width": width, "precision": precision, "batch": batch}
    tokens = 6
    if kind in KINDS:
        return transformers_job(source, spec, row, kind, precision, batch, tokens)
    try:
        return ours(source, spec, row, kind, precision, batch, how, tokens, "nobias" not in how)
    except Exception as error:
        traceback.print_exc()
        row["retried"] = " ".join(str(error).split())[-200:]
        return ours(source, spec, row, kind, precision, batch, how, tokens, False)


def tensor_float(on):
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def measured(run, want, inputs, row, profiled=False):
    try:
        return checked(run, want, inputs) | timed(lambda: run(*inputs), row.get("graph", True), profiled)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}


def checked(run, want, inputs):
    """Run once, which tunes kernels, searches for the fastest convolutions and takes gigabytes for a moment; then compare."""
    import torch

    row = {}
    run(*inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    got = [t.float() for t in run(*inputs)]
    torch.cuda.synchronize()
    if want is not None:
        row["errors"] = [relative(a, b) for a, b in zip(want, got, strict=True)]
        with contextlib.suppress(IndexError, RuntimeError):  # OmDet-Turbo's own outputs are no pairs of logits and boxes
            row["matched"] = matched(want, got)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    torch.cuda.synchronize()
    row["memory_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return row


def ours(source, spec, row, kind, precision, batch, how, tokens, biased):
    import torch

    from detrt.backends.inductor.compile import compile_artifact, options_for
    from detrt.backends.inductor.package import load_package
    from detrt.backends.inductor.passes import prepare, tune_for_gpu
    from detrt.backends.inductor.types import low_fraction, lower_types
    from detrt.spec import Precision

    names = 1 if spec.text is not None and spec.text.kind in ("phrases", "names") else None  # as many as transformers' job has
    captured = prepare(source, spec, (batch, batch), Precision.FP32, DEVICE, tokens, biased, names)
    del source
    with alone():
        want, first = run_forced(captured.graph, captured.inputs)
        torch.cuda.empty_cache()
    if precision not in ("fp32", "tf32"):
        lower_types(captured.graph, Precision(precision))
        row["share"] = low_fraction(captured.graph, Precision(precision))
        tune_for_gpu(captured, "nolin" not in how, "none" if "noconv" in how else "wide" if "wideconv" in how else "all")
        with alone():
            forced, _ = run_forced(captured.graph, captured.inputs, first.indices)
            row["forced_errors"] = [relative(a, b) for a, b in zip(want, forced, strict=True)]
            row["forced_matched"] = matched(want, forced)
            del forced
            torch.cuda.empty_cache()
    del first
    inputs = captured.inputs
    row["nodes"] = len(captured.graph.graph.nodes)
    if kind == "captured":
        return captured.graph, want, inputs, row
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        path = Path(folder, "model.pt2")
        run = compile_artifact(captured, path, options_for("cuda", how))
        row["inductor_s"] = round(time.monotonic() - start, 1)
        row["package_mb"] = round(path.stat().st_size / 1e6, 1)
        del run, captured
        gc.collect()
        start = time.monotonic()
        run = load_package(path, DEVICE)
        row["open_s"] = round(time.monotonic() - start, 1)
    return run, want, inputs, row


@contextlib.contextmanager
def alone():
    """One process at a time on a GPU, for what fills it or is timed."""
    with open(f"/tmp/measure-{os.environ['CUDA_VISIBLE_DEVICES']}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(step, graph, profiled=False):
    """Median and more of one model's runs; graph: replayed as a CUDA graph."""
    import torch

    replay = step
    if graph:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
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
