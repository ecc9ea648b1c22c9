"""PyTorch, ONNX Runtime and OpenVINO on a CPU, in turn in one process; prints one JSON line a bundle.

    python benchmarks/measure_cpu.py REPEATS THREADS BUNDLE...

A bundle of `detrt build CHECKPOINT --target onnx,openvino`; its checkpoint is run by PyTorch, as `from_pretrained` gives it (with its
fused attention), on a ready tensor. "onnxruntime_plain" is `model.onnx` without the fused attention. The backends run in turn, so that other work on the machine falls on all of them alike: medians of the wall clock and of the processor time of
all threads, milliseconds, after one run that is not counted, and the load average before and after.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.open import open_session
from detrt.bench.measure import drawn_images
from detrt.bench.reference import library_calls
from detrt.bundle import Bundle
from detrt.data.preprocess import preprocess
from detrt.models.load import load_source


def measure(folder: str, repeats: int, threads: int) -> dict:
    bundle = Bundle.open(Path(folder))
    spec, reference = bundle.spec, bundle.provenance.source
    feeds = preprocess(drawn_images(spec.input.size_hw, 1), spec).feeds
    calls = {"onnxruntime_plain": OnnxSession(bundle.folder / "model.onnx", threads=threads)}
    if bundle.of_kind("onnx-fused"):
        calls["onnxruntime"] = open_session(folder, backend="onnxruntime", threads=threads)
    calls["openvino"] = open_session(folder, backend="openvino", threads=threads)
    calls = {name: partial(session.run, feeds) for name, session in calls.items()}
    source = load_source(reference, trust_remote_code=Path(reference).exists())
    library = library_calls(source, threads=threads)(feeds["pixel_values"].shape[2:], drawn_images(spec.input.size_hw, 1))
    calls["torch"] = library["transformers-cpu"]["forward"]
    wall, cpu = {name: [] for name in calls}, {name: [] for name in calls}
    load = [os.getloadavg()[0]]
    for _ in range(repeats + 1):
        for name, call in calls.items():
            start, work = time.perf_counter(), time.process_time()
            call()
            wall[name].append((time.perf_counter() - start) * 1e3)
            cpu[name].append((time.process_time() - work) * 1e3)
    load.append(os.getloadavg()[0])
    row = {"bundle": Path(folder).name, "source": reference, "shape": list(feeds["pixel_values"].shape), "threads": threads}
    row |= {"repeats": repeats, "load": [round(x, 1) for x in load]}
    for name in calls:
        row[name] = {kind: round(float(np.median(times[name][1:])), 1) for kind, times in (("wall_ms", wall), ("cpu_ms", cpu))}
        row[name]["min_ms"] = round(min(wall[name][1:]), 1)
    return row


def main(arguments: list[str]) -> None:
    repeats, threads = int(arguments[0]), int(arguments[1])
    torch.set_num_threads(threads)
    for folder in arguments[2:]:
        print(json.dumps(measure(folder, repeats, threads)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
