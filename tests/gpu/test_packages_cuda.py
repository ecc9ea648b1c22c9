"""GPU packages for a range of batches and several sizes, and what bench reads of them: `pytest -m gpu tests/gpu/test_packages_cuda.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detrt.backends.open import open_session
from detrt.bench.config import BenchConfig
from detrt.bench.run import bench
from detrt.data.scenes.scene import draw_scene
from detrt.detector import Detector

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def built(folder: Path, *choices: str, model: str = "embedded:shapes") -> str:
    from detrt.cli import main

    command = ["build", model, "-o", str(folder), "--target", "inductor", "--device", "cuda", "--no-check"]
    assert main([*command, *choices]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def ranged(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory.mktemp("range") / "bundle", "--size", "320", "--batch", "1,1,4")


def test_every_batch_of_the_range_gives_the_same(ranged: str) -> None:
    images = [draw_scene(seed).image for seed in range(900_000_100, 900_000_112)]
    with open_session(ranged, backend="inductor") as session, open_session(ranged, backend="onnxruntime") as exact:
        want = Detector(exact, threshold=0.3)(images)
        for batch in (1, 3, 4):
            for got, right in zip(Detector(session, threshold=0.3, batch_size=batch)(images), want, strict=True):
                assert got.labels == right.labels
                assert np.abs(got.boxes_xyxy - right.boxes_xyxy).max(initial=0) < 0.5
                assert np.abs(got.scores - right.scores).max(initial=0) < 1e-3


def test_bench_separates_the_work_of_the_gpu(ranged: str) -> None:
    report = bench([ranged], BenchConfig(batches=(1, 4), repeats=5, warmup=2, backends=("inductor",), parts=True))
    rows = {(row["scope"], row["batch"]): row for row in report["rows"]}
    assert set(rows) == {(scope, batch) for scope in ("kernel", "forward", "end_to_end") for batch in (1, 4)}
    for batch in (1, 4):
        kernel = rows["kernel", batch]
        assert 0.05 < kernel["p50_ms"] < rows["forward", batch]["p50_ms"] < rows["end_to_end", batch]["p50_ms"]
        assert kernel["msda_calls"] == 3 and 0 < kernel["msda_share"] < 0.5 and kernel["kernels"] > 50
    assert "deformable attention" in report["parts"][0]["kinds"]


def test_a_session_that_nobody_closes_ends_well(ranged: str) -> None:
    code = (
        "import sys; from detrt.detector import Detector; from detrt.data.scenes.scene import draw_scene; from detrt.backends.open import open_session; "
        "d = Detector(open_session(sys.argv[1], backend=sys.argv[2], device=sys.argv[3])); "
        "print([len(d([draw_scene(1).image])) for _ in range(5)])"
    )
    ways: list[tuple[str, Any]] = [("inductor", "cuda")]
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        ways.append(("onnxruntime", "cuda"))
    for backend, provider in ways:
        done = subprocess.run([sys.executable, "-c", code, ranged, backend, provider], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-800:]
        assert len(set(json.loads(done.stdout.splitlines()[-1]))) == 1


# A LayerNorm with inputs of two types, and a number on the CPU that a CUDA graph cannot read: neither shows on a CPU.
@pytest.mark.parametrize("model", ["random:rf_detr-seg/tiny", "random:pp_doclayout_v2/tiny"])
def test_a_package_in_16_bits_is_recorded_as_a_cuda_graph(tmp_path: Path, model: str) -> None:
    folder = built(tmp_path / "bundle", "--precision", "fp16", model=model)
    images = [draw_scene(seed).image for seed in range(900_000_400, 900_000_405)]
    with open_session(folder, backend="inductor") as session:
        detector = Detector(session, threshold=0.0)
        first, again = detector(images), detector(images)
    assert all(map(len, first))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.boxes_xyxy, other.boxes_xyxy) and np.array_equal(one.scores, other.scores)
