"""PyTorch, ONNX Runtime and OpenVINO on a CPU, FP32 and INT8, for all families: the table of docs/results/cpu.md.

    python benchmarks/measure_cpu.py prepare FOLDER [NAME=CHECKPOINT...]    export; at any time
    python benchmarks/measure_cpu.py measure FOLDER [NAME...]               measure; on an idle machine
    python benchmarks/measure_cpu.py table FOLDER                           print the table of what is measured

Without names: each family at its full size with random weights. `prepare` builds FOLDER/NAME/fp32 and FOLDER/NAME/int8, calibrated on a
drawn scene; both steps leave out what is there, so that they can be interrupted and run again. `measure` runs each family in a process of
its own and adds a line to FOLDER/rows.jsonl; a model whose INT8 bundle came later is measured again. Its backends run in turn, after one run that is not counted, on one image of the usual size: PyTorch as
`from_pretrained` gives the checkpoint (with its fused attention), on a ready tensor. Medians of the wall clock and of the processor time
of all threads in milliseconds. "detect" is the backend that `detrt detect` picks of
the FP32 bundle: the one with the least time, as in a build.
DETRT_THREADS: threads; default: all cores. DETRT_SECONDS: of runs for each backend (10). DETRT_COLUMNS: what is measured, comma-separated
(all; without INT8 `prepare` leaves FOLDER/NAME/int8 out); lines of the same model are merged, so that models whose runs take seconds can be measured in several calls.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from program import make_parser, run, stop

from detrt.backends.open import open_session
from detrt.bench.measure import drawn_images
from detrt.bench.reference import library_calls
from detrt.bundle import Bundle
from detrt.data.preprocess import preprocess
from detrt.errors import MissingPackageError
from detrt.models.families import BY_NAME
from detrt.models.load import load_source
from detrt.system import usable_cores

THREADS = int(os.environ.get("DETRT_THREADS", usable_cores()))
SECONDS = float(os.environ.get("DETRT_SECONDS", "10"))
FEWEST, MOST = 3, 15  # counted runs
PROMPT = "a cat. a remote control."
COLUMNS = ("torch", "onnxruntime", "openvino", "onnxruntime_int8", "openvino_int8")
WANTED = os.environ.get("DETRT_COLUMNS", ",".join(COLUMNS)).split(",")
# Random weights have no precision to lose, so that every layer is quantized that the rules allow.
INT8 = ("--precision", "int8", "--calibration-images", "1", "--quantize-fraction", "1", "--min-fraction", "0")


def prepare(folder: Path, models: dict[str, str]) -> int:
    """Build the bundles of each model that are not there; without columns of INT8 those of FP32. Returns the exit code."""
    failed = 0
    scenes = folder / "scenes"
    scenes.mkdir(parents=True, exist_ok=True)
    Image.fromarray(drawn_images((640, 640), 1)[0]).save(scenes / "0.png")
    for number, (name, checkpoint) in enumerate(models.items(), 1):
        fp32, int8 = folder / name / "fp32", folder / name / "int8"
        export = ("--no-check", *(("--trust-remote-code",) if Path(checkpoint).exists() else ()))
        calibration: tuple[str, ...] = ("--calibration", str(scenes), *INT8)
        if (family := BY_NAME.get(name)) is not None and family.text:
            calibration += ("--prompt", PROMPT)
        for output, source, options in ((fp32, checkpoint, export), (int8, str(fp32), calibration)):
            if (output / "detrt.json").is_file() or (output is int8 and not any(column.endswith("_int8") for column in WANTED)):
                continue
            say(f"{number} of {len(models)}: {name}, {output.name}")
            command = (sys.executable, "-m", "detrt", "build", source, "-o", str(output), "--target", "onnx,openvino", *options)
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                say(f"  failed ({done.returncode}): {done.stderr.strip().splitlines()[-1:]}")
                failed = 2
                break
    return failed


def measure(folder: Path, names: list[str]) -> int:
    """Measure what has no row yet, each model in a process of its own. Returns the exit code."""
    failed = 0
    there = {
        one["name"]
        for one in rows_of(folder)
        if all(
            column in one or (column.endswith("_int8") and not (folder / one["name"] / "int8/detrt.json").is_file())
            for column in WANTED
        )
    }
    wanted = names or sorted(path.parents[1].name for path in folder.glob("*/fp32/detrt.json"))
    todo = [name for name in wanted if name not in there]
    for number, name in enumerate(todo, 1):
        started = time.monotonic()
        say(f"{number} of {len(todo)}: {name}")
        done = subprocess.run((sys.executable, __file__, "row", str(folder), name), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            say(f"  failed ({done.returncode})")
            failed = 2
            continue
        with (folder / "rows.jsonl").open("a") as file:
            file.write(done.stdout.splitlines()[-1] + "\n")
        say(f"  {time.monotonic() - started:.0f} s")
    return failed


def row(folder: Path, name: str) -> dict:
    """Times of all backends of one model."""
    fp32, int8 = folder / name / "fp32", folder / name / "int8"
    spec = Bundle.open(fp32).spec
    size = spec.input.size_hw
    images = drawn_images(size, 1)
    feeds = preprocess(images, spec).feeds
    calls: dict[str, Callable[[], object]] = {}
    try:
        if "torch" in WANTED:
            calls["torch"] = torch_call(fp32, feeds["pixel_values"].shape[2:], images)
    except MissingPackageError as error:  # OmDet-Turbo's processor needs torchvision
        say(f"  without PyTorch: {error}")
    load = [round(os.getloadavg()[0], 1)]
    result: dict[str, object] = {
        "name": name,
        "shape": list(feeds["pixel_values"].shape),
        "threads": THREADS,
        "load": load,
    }
    sessions = []
    for suffix, bundle in (("", fp32), ("_int8", int8)):
        for backend in ("onnxruntime", "openvino"):
            if backend + suffix not in WANTED or not (bundle / "detrt.json").is_file():
                continue
            session = open_session(bundle, backend=backend, threads=THREADS)
            sessions.append(session)
            calls[backend + suffix] = partial((session if session.info.text is None else session.bind(PROMPT)).run, feeds)
    wall, work = times_of(calls)
    for call in calls:
        result[call] = {"wall_ms": middle(wall[call]), "cpu_ms": middle(work[call]), "runs": len(wall[call])}
    if {"onnxruntime", "openvino"} <= wall.keys():
        result["detect"] = min(("openvino", "onnxruntime"), key=lambda backend: min(wall[backend]))
    for session in sessions:
        session.close()
    load.append(round(os.getloadavg()[0], 1))
    return result


def torch_call(bundle: Path, size: tuple[int, int], images: list[np.ndarray]) -> Callable[[], object]:
    """The checkpoint in PyTorch: in transformers, or as detrt's own module where transformers has none."""
    torch.set_num_threads(THREADS)
    reference = Bundle.open(bundle).provenance.source
    source = load_source(reference, trust_remote_code=Path(reference).exists())
    if not source.family.model_type:
        session = open_session(reference, device="cpu")
        torch.set_num_threads(THREADS)
        return partial(session.run, preprocess(images, session.spec).feeds)
    prompt = PROMPT if source.spec.text is not None else None
    (calls,) = library_calls(source, threads=THREADS, prompt=prompt)(size, images).values()
    return calls["forward"]


def times_of(calls: dict[str, Callable[[], object]]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Wall clock and processor time of each call, in milliseconds; slow calls run less often."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    work: dict[str, list[float]] = {name: [] for name in calls}
    wanted: dict[str, int] = {}
    for call in calls.values():  # the first run compiles and allocates
        call()
    for number in range(MOST):
        for name, call in calls.items():
            if number and number >= wanted[name]:
                continue
            time.sleep(0.02)  # the threads of the one before wait actively for a moment
            start, before = time.perf_counter(), time.process_time()
            call()
            wall[name].append((time.perf_counter() - start) * 1e3)
            work[name].append((time.process_time() - before) * 1e3)
            if not number:  # the first counted run tells how many fit
                wanted[name] = min(MOST, max(FEWEST, round(SECONDS * 1e3 / wall[name][0])))
    return wall, work


def table(folder: Path) -> str:
    """Milliseconds of the wall clock, and what they are relative to PyTorch and to FP32."""
    heads = ["model", "size", "PyTorch", "ONNX Runtime", "OpenVINO", "ONNX Runtime INT8", "OpenVINO INT8", "`detect` picks"]
    heads += ["PyTorch / `detect`", "FP32 / INT8, ONNX Runtime", "FP32 / INT8, OpenVINO"]
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    gains = []
    for found in sorted(rows_of(folder), key=lambda one: one["name"]):
        ms = {column: found[column]["wall_ms"] for column in COLUMNS if column in found}
        gain = ms["torch"] / ms[found["detect"]] if "torch" in ms else None
        cells = [found["name"], "x".join(map(str, found["shape"][2:]))]
        cells += [f"{ms[column]:.1f}" if column in ms else "" for column in COLUMNS]
        cells += [found["detect"], "" if gain is None else f"{gain:.2f}"]
        gains += [] if gain is None else [gain]
        for backend in ("onnxruntime", "openvino"):
            low = ms.get(backend + "_int8")
            cells.append("" if low is None else f"{ms[backend] / low:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    if gains:
        lines.append(f"\nPyTorch / `detect`: median {statistics.median(gains):.2f}, least {min(gains):.2f}")
    return "\n".join(lines)


def rows_of(folder: Path) -> list[dict]:
    path = folder / "rows.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    rows: dict[str, dict] = {}
    for one in found:  # the newest of each column
        rows[one["name"]] = rows.get(one["name"], {}) | one
    return list(rows.values())


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 1)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("step", choices=("prepare", "measure", "row", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a family, or in the step prepare NAME=CHECKPOINT")
    given = parser.parse_args()
    step, folder, names = given.step, given.folder, given.names
    if step == "prepare":
        named = dict(one.split("=", 1) if "=" in one else (one, f"random:{one}") for one in names)
        return prepare(folder, named or {name: f"random:{name}" for name in all_families()})
    if step == "table":
        if not rows_of(folder):
            stop(f"'{folder}' has no rows.jsonl with rows; measure first")
        print(table(folder))
        return 0
    missing = [name for name in names or ["*"] if not any(folder.glob(f"{name}/fp32/detrt.json"))]
    if missing or (step == "row" and len(names) != 1):
        stop(
            f"'{folder}' has no bundle {', '.join(missing)}/fp32; prepare it first" if missing else "the step row is for one NAME"
        )
    if step == "measure":
        return measure(folder, names)
    print(json.dumps(row(folder, names[0])))
    return 0


def all_families() -> list[str]:
    """Every family, those without a prompt first; Co-DINO with the backbone of DINO."""
    return sorted(
        ("co_dino-r50" if name == "co_dino" else name for name in BY_NAME),
        key=lambda name: bool(BY_NAME.get(name) and BY_NAME[name].text),
    )


if __name__ == "__main__":
    run(main)
