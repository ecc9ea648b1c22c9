"""INT8 of OpenVINO on a CPU: average precision, milliseconds, and the share of multiply-adds in integer kernels; a JSON line a model.

    python benchmarks/measure_int8_cpu.py BUNDLE GROUND_TRUTH.json IMAGES NAME=MODEL.xml... [NAME=MODEL.onnx...]

BUNDLE gives the spec. The models run in turn in one process. DETRT_AP=0 leaves the average precision out. The share is read from
the execution types of the compiled model at the usual size: "..._I8" is an integer kernel.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
from program import file, folder, make_parser, run

from detrt.backends.base import BaseSession, SessionInfo
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.openvino.runtime import core
from detrt.bench.measure import drawn_images
from detrt.bundle import Bundle
from detrt.data.preprocess import preprocess
from detrt.evaluation.coco import evaluate_coco

REPEATS = int(os.environ.get("DETRT_REPEATS", "15"))
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}


class AnyModel(BaseSession):
    """A model that detrt did not write, such as one of NNCF."""

    def __init__(self, path: Path, like: BaseSession) -> None:
        self.spec, self.model = like.spec, core().read_model(str(path))
        self.compiled = core().compile_model(self.model, "CPU", PROPERTIES)
        self.request = self.compiled.create_infer_request()
        self._info = SessionInfo(like.info.backend, path.name, "cpu", like.inputs, like.outputs)

    def run(self, feeds, force=None):
        found = self.request.infer(dict(feeds))
        return {info.name: np.array(found[info.name]) for info in self.outputs}

    def close(self) -> None:
        self.request = self.compiled = None


def integer_share(path: Path, feeds) -> dict:
    """Fraction of the multiply-adds of convolutions and products in integer kernels, and the number of kernels by kind."""
    model = core().read_model(str(path))
    model.reshape({name: list(array.shape) for name, array in feeds.items()})
    sources = {op.get_friendly_name(): op for op in model.get_ordered_ops()}
    whole = sum(multiply_adds(op) for op in sources.values())
    integer: set[str] = set()
    kernels: Counter[str] = Counter()
    for op in core().compile_model(model, "CPU", PROPERTIES).get_runtime_model().get_ordered_ops():
        info = {key: str(op.get_rt_info()[key].astype(str)) for key in ("layerType", "primitiveType", "originalLayersNames")}
        if info["layerType"] in ("Convolution", "FullyConnected", "MatMul"):
            key = f"{info['layerType']} {info['primitiveType']}"
            kernels[key] += 1
            if info["primitiveType"].endswith("I8"):
                integer |= {name for name in info["originalLayersNames"].split(",") if name in sources}
    return {"share": round(sum(multiply_adds(sources[name]) for name in integer) / whole, 4), "kernels": kernels}


def multiply_adds(op) -> int:
    kind, out = op.get_type_name(), list(op.get_output_shape(0)) if op.get_output_size() else []
    if kind == "MatMul":
        shape = list(op.get_input_shape(0))
        return math.prod(out) * shape[-2 if op.get_attributes().get("transpose_a") else -1]
    if kind in ("Convolution", "GroupConvolution"):
        weights = list(op.get_input_shape(1))
        return math.prod(out) * math.prod(weights[2 if kind == "GroupConvolution" else 1 :])
    return 0


def _model(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    return name, file(path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=folder, metavar="BUNDLE")
    parser.add_argument("truth", type=file, metavar="GROUND_TRUTH.json")
    parser.add_argument("images", type=folder, metavar="IMAGES")
    parser.add_argument("models", nargs="+", type=_model, metavar="NAME=MODEL")
    given = parser.parse_args()
    bundle = Bundle.open(given.bundle)
    plain = OnnxSession(given.bundle / "model.onnx", bundle.spec)
    feeds = preprocess(drawn_images(bundle.spec.input.size_hw, 1), bundle.spec).feeds
    sessions = {}
    for name, path in given.models:
        sessions[name] = OnnxSession(path, bundle.spec) if path.suffix == ".onnx" else AnyModel(path, plain)
    wall: dict[str, list[float]] = {n: [] for n in sessions}
    cpu: dict[str, list[float]] = {n: [] for n in sessions}
    load = os.getloadavg()[0]
    for _ in range(REPEATS + 1):
        for name, session in sessions.items():
            start, work = time.perf_counter(), time.process_time()
            session.run(feeds)
            wall[name].append((time.perf_counter() - start) * 1e3)
            cpu[name].append((time.process_time() - work) * 1e3)
    for name, path in given.models:
        row = {"model": name, "wall_ms": round(float(np.median(wall[name][1:])), 1)}
        row |= {
            "cpu_ms": round(float(np.median(cpu[name][1:])), 1),
            "min_ms": round(min(wall[name][1:]), 1),
            "load": round(load, 1),
        }
        if path.suffix == ".xml":
            row |= integer_share(path, feeds)
        if os.environ.get("DETRT_AP", "1") == "1":
            metrics = evaluate_coco(sessions[name], given.truth, given.images, batch_size=1).metrics
            row |= {name: round(value, 4) for name in ("AP", "AP50") if (value := metrics[name]) is not None}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    run(main)
