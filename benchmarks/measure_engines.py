"""Many TensorRT engines: built side by side, then timed one at a time.

    python benchmarks/measure_engines.py strip BUNDLES SMALL
    python benchmarks/measure_engines.py restore SMALL
    python benchmarks/measure_engines.py build BUNDLES ENGINES JOB... --slots 16 --seconds 1300
    python benchmarks/measure_engines.py time ENGINES OUT.jsonl [NAME...]

strip leaves large weights out, so that bundles of random models are small enough to carry to another machine; restore draws them
again with the mean and deviation of each tensor. Bundles of trained models are copied whole (`--whole NAME`).

build copies a bundle for each JOB, NAME=BUNDLE,OPTION,OPTION, and adds an engine to it: with --target,tensorrt-rtx,--sm,current among
the options one of TensorRT-RTX, else one of TensorRT by `quick_build.py`. Builds are spread over the GPUs of the host, and those
that run after SECONDS are stopped. The log of each is NAME.log. Start NVIDIA's Multi-Process Service (`nvidia-cuda-mps-control -d`)
first.

time opens each engine alone, on the GPU of CUDA_VISIBLE_DEVICES: milliseconds of its kernels and of a call with its copies (25th,
50th and 75th percentile), seconds to the first answer, facts of the build, and the layers that take longest. TensorRT-RTX compiles
kernels when an engine is opened for the first time; DETRT_RUNTIME_CACHE=off makes every opening such a one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from program import at_least, folder, make_parser, run, stop

from detrt.bench.measure import time_call
from detrt.bundle import MANIFEST
from detrt.files import sha256_of

QUICK_BUILD = Path(__file__).with_name("quick_build.py")
WEIGHTS = "weights.json"  # in a stripped bundle: file -> tensor -> (mean, deviation)
LEFT_OUT = (np.float32, np.float16, np.int8)
FEWEST = 4096  # values of a tensor that is worth leaving out
DIFFERENT = 64  # values that a sample of it must hold, or it is a table rather than weights
RUNS, CALLS = 60, 40


def strip(bundles: Path, small: Path, whole: list[str]) -> None:
    """Copy every bundle in `bundles` without its large weights."""
    import onnx
    from onnx import helper, numpy_helper

    for bundle in sorted(path for path in bundles.iterdir() if (path / MANIFEST).is_file()):
        target = small / bundle.name
        if bundle.name in whole:
            shutil.copytree(bundle, target)
            continue
        target.mkdir(parents=True)
        left_out: dict[str, dict[str, tuple[float, float]]] = {}
        for path in bundle.iterdir():
            if path.suffix != ".onnx":
                shutil.copy(path, target)
                continue
            model = onnx.load(path)
            found = left_out.setdefault(path.name, {})
            for tensor in model.graph.initializer:
                if helper.tensor_dtype_to_np_dtype(tensor.data_type) not in LEFT_OUT or np.prod(tensor.dims) < FEWEST:
                    continue
                values = numpy_helper.to_array(tensor).astype(np.float32).reshape(-1)
                if not np.isfinite(values).all() or len(np.unique(values[:: max(1, len(values) // 5000)])) < DIFFERENT:
                    continue
                found[tensor.name] = float(values.mean()), float(values.std())
                for field in ("raw_data", "float_data", "int32_data"):
                    tensor.ClearField(field)
            (target / path.name).write_bytes(model.SerializeToString())
        (target / WEIGHTS).write_text(json.dumps(left_out))
        print(bundle.name, sum(path.stat().st_size for path in target.iterdir()) // 1000, "kB", flush=True)


def restore(small: Path) -> None:
    """Give stripped bundles weights again, in place."""
    stripped = sorted(path.parent for path in small.glob(f"*/{WEIGHTS}"))
    with ProcessPoolExecutor() as pool:
        for name in pool.map(_restored, stripped):
            print(name, flush=True)


def _restored(bundle: Path) -> str:
    import onnx
    from onnx import helper

    manifest = json.loads((bundle / MANIFEST).read_text())
    for name, tensors in json.loads((bundle / WEIGHTS).read_text()).items():
        path = bundle / name
        model = onnx.load(path)
        for tensor in model.graph.initializer:
            if tensor.name in tensors:
                mean, deviation = tensors[tensor.name]
                generator = np.random.default_rng(int(hashlib.sha256(tensor.name.encode()).hexdigest()[:8], 16))
                values = generator.standard_normal(tuple(tensor.dims), np.float32) * np.float32(deviation) + np.float32(mean)
                kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
                tensor.raw_data = (np.clip(np.rint(values), -127, 127) if kind == np.int8 else values).astype(kind).tobytes()
        path.write_bytes(model.SerializeToString())
        for entry in manifest["files"]:
            if entry["path"] == name:
                entry |= {"sha256": sha256_of(path), "size": path.stat().st_size}
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    (bundle / WEIGHTS).unlink()
    return bundle.name


def build(bundles: Path, engines: Path, jobs: list[str], slots: int, seconds: float, gpus: int) -> None:
    """Build an engine for each job, `slots` at a time."""
    engines.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    waiting = list(enumerate(jobs))
    running: dict[str, subprocess.Popen[bytes]] = {}

    def say(text: str) -> None:
        print(f"{time.monotonic() - start:6.0f} s  {text}", flush=True)

    while (waiting or running) and time.monotonic() - start < seconds:
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                say(f"{name} ended with {process.returncode}")
        while waiting and len(running) < slots:
            number, job = waiting.pop(0)
            name, _, rest = job.partition("=")
            bundle, *options = rest.split(",")
            # Links: a build replaces the files that it changes.
            shutil.copytree(bundles / bundle, engines / name, copy_function=os.link)
            with open(engines / f"{name}.log", "w") as log:
                command = ["-m", "detrt"] if "--target" in options else [QUICK_BUILD]
                target = [] if "--target" in options else ["--target", "tensorrt"]
                running[name] = subprocess.Popen(
                    [sys.executable, *command, "build", engines / name, *target, *options],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"CUDA_VISIBLE_DEVICES": str(number % gpus)},
                    start_new_session=True,
                )
        time.sleep(0.5)
    for name, process in running.items():
        say(f"{name} stopped")
        os.killpg(process.pid, signal.SIGKILL)
    for _, job in waiting:
        say(f"{job.partition('=')[0]} not started")


def measure(engine: Path) -> dict[str, Any]:
    """Times and facts of one engine at the usual shapes of its profile."""
    from detrt.backends.tensorrt import TensorRTSession

    start = time.monotonic()
    with TensorRTSession(engine) as session:
        facts = session.info.facts
        usual = {name: shapes[1] for name, shapes in session.info.profile.items()}
        generator = np.random.default_rng(0)
        feeds = {
            info.name: (
                generator.standard_normal(usual[info.name]).astype(info.dtype)
                if np.dtype(info.dtype).kind == "f"
                else np.ones(usual[info.name], info.dtype)
            )
            for info in session.inputs
        }
        session.run(feeds)
        first_answer_s = time.monotonic() - start
        for _ in range(4):
            session.run(feeds)
        kernels = session.forward_times(RUNS)
        calls = time_call(lambda: session.run(feeds), 0, CALLS)
        layers = session.layer_times(5)
        assert facts is not None
        return {
            "shapes": {name: list(shape) for name, shape in usual.items()},
            "kernels_ms": _quartiles(kernels),
            "call_ms": _quartiles(calls),
            "first_answer_s": round(first_answer_s, 2),
            "no CUDA graph": session.graph_note,
            "precision": facts.precision,
            "layer_types": dict(facts.layer_types),
            "engine_MB": round(engine.stat().st_size / 1e6, 1),
            "activations_MiB": round(facts.activation_bytes / 2**20),
            "build_s": round(facts.build_seconds),
            "layers": len(layers),
            "layers_ms": round(sum(layers.values()), 3),
            "longest": [[name, round(ms, 3)] for name, ms in sorted(layers.items(), key=lambda layer: -layer[1])[:8]],
        }


def _quartiles(samples: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(samples, n=4)]


READ = {"strip": ("bundles",), "restore": ("small",), "build": ("bundles",), "time": ("engines",)}  # folders that are there


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, places in {
        "strip": ("bundles", "small"),
        "restore": ("small",),
        "build": ("bundles", "engines"),
        "time": ("engines", "out"),
    }.items():
        command = commands.add_parser(name)
        for place in places:
            command.add_argument(place, type=folder if place in READ[name] else Path)
        if name == "strip":
            command.add_argument("--whole", nargs="*", default=[])
        elif name == "build":
            command.add_argument("jobs", nargs="+")
            command.add_argument("--slots", type=at_least(1), default=8)
            command.add_argument("--seconds", type=at_least(1.0), default=3600)
            command.add_argument("--gpus", type=at_least(1), default=1)
        elif name == "time":
            command.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.command == "strip":
        strip(given.bundles, given.small, given.whole)
    elif given.command == "restore":
        restore(given.small)
    elif given.command == "build":
        build(given.bundles, given.engines, given.jobs, given.slots, given.seconds, given.gpus)
    else:
        names = given.names or sorted({path.parent.name for path in given.engines.glob("*/model*.engine")})
        if not any((given.engines / name).glob("model*.engine") for name in names):
            stop(f"'{given.engines}' has no engine of {' '.join(given.names) or 'any name'}; build some first")
        for name in names:
            for engine in sorted((given.engines / name).glob("model*.engine")):
                try:
                    row = measure(engine)
                except Exception as error:  # the others are measured all the same
                    row = {"error": f"{type(error).__name__}: {error}"}
                line = json.dumps({"name": name, **row})
                print(line, flush=True)
                with open(given.out, "a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    run(main)
