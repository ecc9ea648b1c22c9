"""Where the time of a built model goes: GPU kernels, modules, kinds of operators, and the roofline.

The scope "kernel" is the time of the GPU's kernels as CUPTI records it, without copies from and to the host, launches and
Python.

For the roofline, work is counted in the graph at the measured size: multiply-adds of every matmul and convolution, and the
bytes of its operands and results, each moved once. Two ceilings are measured on the spot: a large matmul and a large copy. The
roofline is the time that the matmuls and convolutions alone would take at the nearer of both ceilings.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..backends.base import Feeds, Session
from ..errors import SessionError
from ..system import CPU

MSDA = "msda"  # part of the names of detrt's kernels of deformable attention
HOST_COPIES = ("Memcpy HtoD", "Memcpy DtoH")

# Runs whose records are held at once; eager models launch thousands of kernels per run.
MAX_RUNS = 100
Event = tuple[str, float, float]  # name, start and duration in microseconds


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Milliseconds of all kernels of each run, and of those of deformable attention.

    kernels, msda_calls: how many a run. msda_samples_ms: empty where no kernel of detrt's is among them.
    """

    samples_ms: tuple[float, ...]
    kernels: int
    msda_samples_ms: tuple[float, ...] = ()
    msda_calls: int = 0


def device_times(step: Callable[[], object], warmup: int, repeats: int) -> DeviceTimes:
    """Run `step`, which waits for the GPU, and add up what ran there.

    Raises:
        SessionError: no GPU, no PyTorch to read its records, or nothing that ran on one.
    """
    repeats = min(repeats, MAX_RUNS)
    return sum_by_run(device_events(step, warmup, repeats), repeats)


def device_events(step: Callable[[], object], warmup: int, repeats: int) -> list[Event]:
    """What ran on the GPU in `repeats` calls of `step`, which waits for it: kernels, copies, fills.

    Raises:
        SessionError: no GPU, or no PyTorch to read its records.
    """
    try:
        import torch
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        raise SessionError("the times of single kernels are read through PyTorch, which is not installed") from None
    if not torch.cuda.is_available():
        raise SessionError("there is no GPU here that PyTorch sees")
    for _ in range(max(warmup, 1)):
        step()
    torch.cuda.synchronize()
    with quiet(), profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in found.events()
        # Named ranges of Python show up among the records of the GPU as well.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what PyTorch's profiler writes to standard error itself; Python's own exceptions come through."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def sum_by_run(events: Sequence[Event], runs: int) -> DeviceTimes:
    """Records of `runs` equal runs, run by run; their mean as one sample where the records cannot be distinguished.

    Raises:
        SessionError: no kernel among them.
    """
    work = sorted((e for e in events if not e[0].startswith(HOST_COPIES)), key=lambda e: e[1])
    if not work:
        raise SessionError("no kernel of the GPU was recorded")
    msda = [e for e in work if MSDA in e[0].lower()]
    return DeviceTimes(_per_run(work, runs), round(len(work) / runs), _per_run(msda, runs), round(len(msda) / runs))


def _per_run(events: Sequence[Event], runs: int) -> tuple[float, ...]:
    if not events:
        return ()
    if len(events) % runs:
        return (sum(e[2] for e in events) / runs / 1e3,)
    each = len(events) // runs
    return tuple(sum(e[2] for e in events[start : start + each]) / 1e3 for start in range(0, len(events), each))


RUNS = 4
COMPILED = "compiled code"

# Part of a module path that names a part of a detector: "model.backbone", "model.encoder", "bbox_embed".
DEPTH = 2
CEILING_SIDE, CEILING_BYTES = 2048, 256 << 20


def measure_parts(session: Session, onnx: Path | None, feeds: Feeds, threads: int | None, forward_ms: float) -> dict[str, Any]:
    """{"modules", "kinds": name -> fraction of the time, the largest first; "layers": name -> milliseconds, where the backend tells them;
    "roofline": see `roofline`, or None}.

    onnx: the graph of the session's model, None where there is none. forward_ms: median latency at these feeds.
    """
    on_gpu = session.info.device != CPU
    if session.info.runs_graph and not on_gpu and onnx is not None:
        modules, kinds = _by_onnxruntime(onnx, feeds, threads)
    else:
        modules, kinds = {}, _by_profiler(lambda: session.run(feeds), on_gpu)
    session.run(feeds)
    layers = session.layer_times(RUNS)
    if layers:
        from ..graph.names import module_path

        for name, took in layers.items():
            path = ".".join(module_path(name.split(" + ")[0]).split(".")[:DEPTH])
            modules[path or "fused nodes"] = modules.get(path or "fused nodes", 0.0) + took
        modules = _fractions(modules)
    return {
        "modules": modules,
        "kinds": kinds,
        "layers": layers,
        "roofline": None if onnx is None else roofline(onnx, feeds, forward_ms, on_gpu),
    }


def roofline(onnx: Path, feeds: Feeds, forward_ms: float, on_gpu: bool) -> dict[str, float]:
    """The work of one run against the ceilings of this machine.

    gflop, gbyte: of all matmuls and convolutions. gflops, gbytes_per_s: the ceilings. bound_ms: the least time at these
    ceilings. share: bound_ms over forward_ms.
    """
    low = _element_bytes(onnx) == 2
    gflops, bandwidth = ceilings(on_gpu, low)
    work = matmul_work(onnx, feeds)
    seconds = sum(max(flop / gflops / 1e9, size / bandwidth / 1e9) for flop, size in work.values())
    return {
        "gflop": round(sum(flop for flop, _ in work.values()) / 1e9, 3),
        "gbyte": round(sum(size for _, size in work.values()) / 1e9, 4),
        "gflops": round(gflops, 1),
        "gbytes_per_s": round(bandwidth, 1),
        "bound_ms": round(seconds * 1e3, 3),
        "share": round(seconds * 1e3 / forward_ms, 4),
    }


def matmul_work(onnx: Path, feeds: Feeds) -> dict[str, tuple[int, int]]:
    """Node -> (floating point operations, bytes of operands and results), for matmuls and convolutions."""
    from ..graph import io
    from ..precision.calibrate import run_shapes
    from ..precision.proof import count_macs

    model = io.load(onnx)
    shapes, width = run_shapes(model, feeds), _element_bytes(onnx)
    weights = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    nodes = {node.name: node for node in model.graph.node}
    work = {}
    for name, count in count_macs(model, feeds).items():
        inputs, outputs = shapes[name]
        given = [value for value in nodes[name].input if value]
        held = sum(weights.get(value, 0) for value in given)
        # Weights that ONNX Runtime has packed for itself are not among the shapes.
        packed = held if len(inputs) < len(given) else 0
        work[name] = (2 * count, width * (packed + sum(math.prod(shape) for shape in [*inputs, *outputs])))
    return work


def _element_bytes(onnx: Path) -> int:
    """2 where most weights are FP16 or BF16, else 4."""
    from ..graph import io
    from ..graph.view import type_name

    sizes: dict[str, int] = {}
    for tensor in io.load(onnx, weights=False).graph.initializer:
        kind = type_name(tensor.data_type)
        sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.dims)
    floats = {kind: size for kind, size in sizes.items() if kind in ("fp32", "fp16", "bf16")}
    return 4 if not floats or max(floats, key=floats.__getitem__) == "fp32" else 2


def ceilings(on_gpu: bool, low: bool) -> tuple[float, float]:
    """(10**9 operations a second, 10**9 bytes per second): a large matmul, and a large copy (read and written)."""
    if on_gpu:
        return _gpu_ceilings(low)
    a = np.random.default_rng(0).random((CEILING_SIDE, CEILING_SIDE), np.float32)
    data, target = np.ones(CEILING_BYTES // 4, np.float32), np.empty(CEILING_BYTES // 4, np.float32)
    return (
        2 * CEILING_SIDE**3 / _seconds(lambda: a @ a) / 1e9,
        2 * CEILING_BYTES / _seconds(lambda: np.copyto(target, data)) / 1e9,
    )


def _gpu_ceilings(low: bool) -> tuple[float, float]:
    import torch

    side = 4 * CEILING_SIDE
    a = torch.ones(side, side, device="cuda", dtype=torch.float16 if low else torch.float32)
    data = torch.ones(CEILING_BYTES, device="cuda", dtype=torch.float32)

    def finished(step: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in range(10):
                step()
            torch.cuda.synchronize()

        return run

    matmul, copy = _seconds(finished(lambda: a @ a)) / 10, _seconds(finished(data.clone)) / 10
    return 2 * side**3 / matmul / 1e9, 8 * CEILING_BYTES / copy / 1e9


def _seconds(step: Callable[[], object]) -> float:
    """Best of a few: a ceiling is what the machine can do."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return min(found)


def _by_onnxruntime(onnx: Path, feeds: Feeds, threads: int | None) -> tuple[dict[str, float], dict[str, float]]:
    from ..backends.onnxruntime.session import profiled_run
    from ..graph.names import module_path

    with files.scratch() as folder:
        file = profiled_run(onnx, feeds, folder, optimise=True, runs=RUNS, threads=threads)
        events = json.loads(file.read_text("utf-8"))
    nodes: dict[str, list[tuple[float, str]]] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            nodes.setdefault(name.removesuffix("_kernel_time"), []).append((event["dur"], event["args"].get("op_name", "")))
    modules: dict[str, float] = {}
    kinds: dict[str, float] = {}
    for name, samples in nodes.items():
        # The median of the runs: the first one allocates.
        took = statistics.median(duration for duration, _ in samples)
        path = ".".join(module_path(name).split(".")[:DEPTH])
        # What the optimiser made has a name of its own.
        modules[path or "other operators"] = modules.get(path or "other operators", 0.0) + took
        kinds[samples[0][1]] = kinds.get(samples[0][1], 0.0) + took
    return _fractions(modules), _fractions(kinds)


def _by_profiler(step: Callable[[], object], on_gpu: bool) -> dict[str, float]:
    """Kind of kernel or operator -> fraction of the time, of anything that runs inside PyTorch or on the GPU."""

    events: list[tuple[str, float]]
    if on_gpu:
        try:
            events = [(name, took) for name, _, took in device_events(step, 1, RUNS)]
        except SessionError:
            return {}
    else:
        try:
            from torch.profiler import ProfilerActivity, profile
        except ImportError:
            return {}
        step()
        with quiet(), profile(activities=[ProfilerActivity.CPU]) as found:
            start = time.perf_counter()
            for _ in range(RUNS):
                step()
            whole = (time.perf_counter() - start) * 1e6
        events = [(event.key, float(event.self_cpu_time_total)) for event in found.key_averages()]
        # Compiled code does not call PyTorch's operators, so that it has no names.
        events.append((COMPILED, max(0.0, whole - sum(took for _, took in events))))
    sums: dict[str, float] = {}
    for name, took in events:
        if took > 0:
            kind = name if name == COMPILED else kind_of_kernel(name)
            sums[kind] = sums.get(kind, 0.0) + took
    return _fractions(sums)


# Part of the name of a GPU kernel -> its kind; the first that fits.
_KINDS = (
    ("msda", "deformable attention"),
    ("windows_kernel", "attention"),
    ("sdpa", "attention"),
    ("flash", "attention"),
    ("fmha", "attention"),
    ("conv", "convolutions"),
    ("fprop", "convolutions"),
    ("nvjet", "matmul"),
    ("gemm", "matmul"),
    ("cutlass", "matmul"),
    ("splitK", "matmul"),
    ("triton_", "fused elementwise, norms"),
    ("topk", "top-k"),
    ("rank_kernel", "top-k"),
    ("sort", "top-k"),
    ("mem", "copies"),
)


def kind_of_kernel(name: str) -> str:
    """What a GPU kernel does, by its name; names of PyTorch's operators stay."""
    if name.startswith("triton_") and "conv" in name:
        return "fused elementwise, norms"  # such as triton_poi_fused_convolution_relu: what follows a convolution
    lower = name.lower()
    return next((kind for part, kind in _KINDS if part.lower() in lower), name.split("<")[0][:40])


def _fractions(sums: Mapping[str, float]) -> dict[str, float]:
    total = sum(sums.values()) or 1.0
    return {name: round(took / total, 4) for name, took in sorted(sums.items(), key=lambda item: -item[1])}
