"""PyTorch, ONNX Runtime and OpenVINO on a CPU, in turn in one process; prints one JSON line a bundle.

    python benchmarks/measure_cpu.py REPEATS THREADS BUNDLE...

A bundle of `detrt build CHECKPOINT --target onnx,openvino`; its checkpoint is run by PyTorch, as transformers has it. The back ends
run in turn, so that other work on the machine falls on all of them alike: medians of the wall clock and of the processor time of
all threads, milliseconds, after one run that is not counted, and the load average before and after.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from detrt.backends.open import open_session
from detrt.backends.torch import TorchSession
from detrt.bench.measure import drawn_images
from detrt.bundle import Bundle
from detrt.data.preprocess import preprocess
from detrt.models.load import load_source


def measure(folder: str, repeats: int, threads: int) -> dict:
    bundle = Bundle.open(Path(folder))
    spec, reference = bundle.spec, bundle.provenance.source
    sessions = {"onnxruntime": open_session(folder, backend="onnxruntime", threads=threads)}
    if bundle.of_kind("openvino"):
        sessions["openvino"] = open_session(folder, backend="openvino", threads=threads)
    if os.environ.get("DETRT_TORCH", "1") == "1":
        trust = Path(reference).exists()
        sessions["torch"] = TorchSession(load_source(reference, trust_remote_code=trust), spec=spec)
    feeds = preprocess(drawn_images(spec.input.size_hw, 1), spec).feeds
    wall, cpu = {name: [] for name in sessions}, {name: [] for name in sessions}
    load = [os.getloadavg()[0]]
    for _ in range(repeats + 1):
        for name, session in sessions.items():
            start, work = time.perf_counter(), time.process_time()
            session.run(feeds)
            wall[name].append((time.perf_counter() - start) * 1e3)
            cpu[name].append((time.process_time() - work) * 1e3)
    load.append(os.getloadavg()[0])
    row = {"bundle": Path(folder).name, "source": reference, "shape": list(feeds["pixel_values"].shape), "threads": threads}
    row |= {"repeats": repeats, "load": [round(x, 1) for x in load]}
    for name in sessions:
        row[name] = {kind: round(float(np.median(times[name][1:])), 1) for kind, times in (("wall_ms", wall), ("cpu_ms", cpu))}
        row[name]["min_ms"] = round(min(wall[name][1:]), 1)
    for session in sessions.values():
        session.close()
    return row


def main(arguments: list[str]) -> None:
    repeats, threads = int(arguments[0]), int(arguments[1])
    torch.set_num_threads(threads)
    for folder in arguments[2:]:
        print(json.dumps(measure(folder, repeats, threads)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
