"""One job of measure_inductor.py, in a process of its own.

It compiles and says "ready"; for each number of seconds that comes in it waits as long, times one round (the first time it checks what
it runs) and says "timed"; for None it says the rows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import json
import math
import os
import statistics
import tempfile
import time
import traceback
from pathlib import Path

from agreement import matched, relative, run_forced
from baselines import KINDS, before_import, transformers_job

# Runs with the clock in one round: as many as fit, within limits.
FEWEST, MOST, SECONDS = 6, 60, 0.4
WARMUP = 5
STREAMS_FROM = 8  # images: the batch size from which two streams are timed beside one
DEVICE = os.environ.get("MEASURED_DEVICE", "cuda")


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


def work(job: str, gpu: int, pipe, log: Path, prepared=None) -> None:
    """prepared: `prepare_job` of another checkout."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    import torch

    torch.set_grad_enabled(False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, model, size, precision, batch, *how = job.split("|")
    tensor_float(precision == "tf32")
    # As detrt's sessions do; for transformers, too, where it is not the default.
    torch.backends.cudnn.benchmark = True
    before_import(kind)
    with tempfile.TemporaryDirectory(prefix="measure-cache-") as cache:  # nothing that another job has compiled is reused
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        start = time.monotonic()
        moved = bytes_moved()
        our_kind = "ours" if kind == "base" else kind
        run, want, inputs, row = (prepared or prepare_job)(our_kind, model, size, precision, int(batch), how[0] if how else "")
        row |= {"kind": kind, "build_s": round(time.monotonic() - start, 1), "phases_s": phases(), **moved(), **host()}
        timings = [Timing(job, run, want, inputs, row)]
        if our_kind == "ours" and (precision, batch, DEVICE) == ("fp32", "1", "cuda"):
            timings.append(Timing(job.replace("|fp32|", "|tf32|"), run, want, inputs, row | {"precision": "tf32"}))
        pipe.send("ready")
        while (settle := pipe.recv()) is not None:
            time.sleep(settle)
            for timing in timings:
                tensor_float(timing.row["precision"] == "tf32")
                timing.round()
            pipe.send("timed")
        pipe.send([(timing.job, timing.finished()) for timing in timings])


def host() -> dict:
    import torch

    import detrt

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "checkout": str(Path(detrt.__file__).parents[2])}


def phases() -> dict[str, float]:
    """Seconds of the compiler's phases that took longest; some contain others."""
    from torch._dynamo import utils

    sums = {name: sum(times) for name, times in getattr(utils, "compilation_time_metrics", {}).items()}
    return {name: round(value, 1) for name, value in sorted(sums.items(), key=lambda item: -item[1])[:24] if value >= 0.3}


def bytes_moved():
    """Begin to count what compiled kernels read and write, as the compiler plans it; what is returned gives the megabytes."""
    from torch._inductor.graph import GraphLowering

    sizes, codegen = [], GraphLowering.codegen

    def counted(self):
        code = codegen(self)
        with contextlib.suppress(Exception):  # a figure that a version of PyTorch does not give is left out
            sizes.append(sum(node.get_read_write_buffers_sizes() for node in self.scheduler.nodes))
        return code

    GraphLowering.codegen = counted
    return lambda: {"moved_mb": round(sum(sizes) / 1e6, 1)} if sizes else {}


def prepare_job(kind, model, size, precision, batch, how):
    """(what runs, the outputs that it must have, its inputs, facts)."""
    from detrt.models.contract import ExportConfig, exported_spec
    from detrt.models.load import load_source

    if "-" in kind:
        return peer_job({"model": model, "precision": precision, "batch": batch}, *kind.split("-"), batch)
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


def checked(run, want, inputs):
    """Run once, which tunes kernels, searches for the fastest convolutions and takes gigabytes for a moment; then compare."""
    import torch

    row = {}
    run(*inputs)
    synchronize()
    torch.cuda.empty_cache()
    got = [t.float() for t in run(*inputs)]
    synchronize()
    if want is not None:
        row["errors"] = [relative(a, b) for a, b in zip(want, got, strict=True)]
        with contextlib.suppress(IndexError, RuntimeError):  # OmDet-Turbo's own outputs are no pairs of logits and boxes
            row["matched"] = matched(want, got)
    if DEVICE == "cpu":
        return row
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*inputs)
    torch.cuda.synchronize()
    row["memory_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
    return row


def synchronize():
    import torch

    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ours(source, spec, row, kind, precision, batch, how, tokens, biased):
    import torch

    from detrt.backends.inductor.compile import compile_package
    from detrt.backends.inductor.package import load_package
    from detrt.backends.inductor.passes import prepare, tune_for_gpu
    from detrt.backends.inductor.types import low_fraction, lower_types
    from detrt.spec import Precision

    names = 1 if spec.text is not None and spec.text.kind in ("phrases", "names") else None  # as many as transformers' job has
    start = time.monotonic()
    captured = prepare(source, spec, (batch, batch), Precision.FP32, DEVICE, tokens, biased, names)
    row["capture_s"] = round(time.monotonic() - start, 1)
    del source
    with alone():
        want, first = run_forced(captured.graph, captured.inputs)
        row["gflop"], row["weights_mb"] = arithmetic(captured)
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
        compile_package(captured, path, "max" if "max" in how else "", "artifact" if DEVICE == "cuda" else "aoti")
        row["inductor_s"] = round(time.monotonic() - start, 1)
        row["package_mb"] = round(path.stat().st_size / 1e6, 1)
        del captured
        gc.collect()
        start = time.monotonic()
        run = load_package(path, DEVICE)
        row["open_s"] = round(time.monotonic() - start, 1)
    return run, want, inputs, row


def arithmetic(captured):
    """(10^9 multiplications and additions of a run in matmuls, convolutions and attention; MB of weights in FP32)."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import detrt.backends.inductor.kernels  # noqa: F401 (registers the operators)

    def matrix(data, weight, *_, out_shape, **__):
        return 2 * math.prod(out_shape) * math.prod(weight[1:])

    def windows(qkv, *_, **__):
        return 4 * qkv[0] * qkv[1] ** 2 * qkv[2] // 3

    ops = torch.ops.detrt
    formulas = {ops.conv_relu: matrix, ops.linear_relu: matrix, ops.window_attention: windows}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        captured.graph(*captured.inputs)
    tensors = {id(t): t for t in (*captured.graph.parameters(), *captured.graph.buffers())}.values()
    return round(counter.get_total_flops() / 1e9, 1), round(sum(t.numel() * t.element_size() for t in tensors) / 1e6, 1)


def peer_job(row, runtime, exporter, batch):
    """TensorRT-RTX or ONNX Runtime CUDA on a graph of compare_exporters.py."""
    import compare_exporters as exporters

    names = [name for name, model in exporters.MODELS.items() if f"random:{model.random}" == row["model"]]
    if not names:
        raise ValueError(f"{row['model']} is no model of compare_exporters.py")
    folder = Path(os.environ.get("MEASURED_GRAPHS", "graphs"), names[0])
    activation, size = json.loads((folder / "facts.json").read_text())["activation"], exporters.MODELS[names[0]].size
    row |= {"height": size[0], "width": size[1]}
    if runtime == "rtx":
        exporters.build_one(folder, exporter, batch)
        engine = folder / f"{exporter}-b{batch}.engine"
        row |= json.loads(engine.with_suffix(".facts.json").read_text())
        step, found = exporters.open_engine(engine, folder / "reference.npz", size)
    else:
        graph = folder / "detrt" / "model.onnx" if exporter == "detrt" else folder / f"{exporter}.fp16.onnx"
        step, found = exporters.open_on_cuda(graph, folder / "reference.npz", size, batch)
        row["graph"] = False
    row["finds"] = exporters.finds(found(), folder / "reference.npz", size, activation)
    return step, None, (), row


@contextlib.contextmanager
def alone():
    """One process at a time on a GPU, for what fills it or is timed."""
    with open(f"/tmp/measure-{os.environ['CUDA_VISIBLE_DEVICES']}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Timing:
    """What is timed of one job, in rounds."""

    def __init__(self, job, run, want, inputs, row):
        self.job, self.row, self.samples, self.rounds = job, row, [], []
        self._step, self._want, self._inputs, self._replay = lambda: run(*inputs), want, inputs, None
        self._run = run

    def round(self):
        """Time one round; the first one checks before. What fails is said by `finished`."""
        if "error" in self.row:
            return
        try:
            if self._replay is None:
                if "finds" not in self.row:
                    self.row |= checked(self._run, self._want, self._inputs)
                self._replay = recorded(self._step) if self._on_graph else self._step
            clock = gpu_ms if DEVICE == "cuda" else wall_ms
            first = min(clock(self._replay) for _ in range(WARMUP))
            samples = [clock(self._replay) for _ in range(min(max(int(SECONDS * 1e3 / first), FEWEST), MOST))]
            self.samples += samples
            self.rounds.append(statistics.median(samples))
        except Exception as error:
            traceback.print_exc()
            self.row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"

    @property
    def _on_graph(self):
        return DEVICE == "cuda" and self.row.get("graph", True)

    def finished(self):
        if "error" in self.row:
            return self.row
        samples = sorted(self.samples)
        low, middle, high = statistics.quantiles(samples, n=4)
        row = self.row | {
            "p50_ms": middle,
            "quartiles_ms": [round(low, 4), round(high, 4)],
            "min_ms": samples[0],
            "p90_ms": samples[int(len(samples) * 0.9)],
            "rounds_ms": [round(ms, 4) for ms in self.rounds],
            "repeats": len(samples),
        }
        if self._on_graph:
            with contextlib.suppress(Exception):  # what is not measured leaves its figure out
                row["kernels"] = profile(self._replay)
            if row["batch"] >= STREAMS_FROM:
                with contextlib.suppress(Exception):
                    row["two_streams_ms"] = two_streams_ms(self._step)
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


def recorded(step):
    """A replay of `step` as a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        kept = step()

    def replay(kept=kept):
        cuda_graph.replay()

    return replay


def gpu_ms(replay):
    import torch

    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    replay()
    b.record()
    b.synchronize()
    return a.elapsed_time(b)


def wall_ms(replay):
    start = time.perf_counter()
    replay()
    return (time.perf_counter() - start) * 1e3


def two_streams_ms(step, runs=12):
    """Milliseconds of a run where two graphs run beside each other on two streams."""
    import torch

    pairs = [(torch.cuda.Stream(), recorded(step)) for _ in range(2)]
    for count in (2, runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            for stream, replay in pairs:
                with torch.cuda.stream(stream):
                    replay()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / runs / 2


def profile(replay):
    """[kernel, launches, microseconds] of a run."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            replay()
        torch.cuda.synchronize()
    rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)
    return [[e.key[:90], round(e.count / 3), round(e.self_device_time_total / 3, 1)] for e in rows if e.self_device_time_total]
