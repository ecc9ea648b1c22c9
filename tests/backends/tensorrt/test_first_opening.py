"""An RTX engine is compared with its graph once for each GPU: ONNX Runtime stands in for the engine, on the fake runtime."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
from cli_support import Cli, check_refusal, write_images, write_onnx
from fake_tensorrt import FakeCuda, fake_engine_bytes, fake_trt

from detrt import build, bundle, files, open_session
from detrt.backends.engine_check import OTHER_SCENES, SCENES
from detrt.backends.onnxruntime import opening as onnx_opening
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt import TensorRTSession
from detrt.backends.tensorrt import opening as sessions
from detrt.bundle import Bundle, BundleFile, EngineFacts
from detrt.errors import GateError, MissingPackageError

VERSION = "1.7.1.116"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DETRT_RUNTIME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A bundle with an engine that gives the graph's scores plus `wrong.shift`; `wrong.runs` of the engine."""
    folder = build(write_onnx(tmp_path / "model.onnx"), tmp_path / "bundle").bundle.folder
    held = Bundle.open(folder)
    with OnnxSession(folder / "model.onnx", held.spec) as graph:
        inputs, outputs = graph.inputs, graph.outputs
    sizes = {point: [batch, 3, 8, 12] for point, batch in (("min", 1), ("opt", 2), ("max", 4))}
    profile = {"pixel_values": sizes}
    path = folder / "model.tensorrt-rtx.engine"
    path.write_bytes(fake_engine_bytes(inputs, outputs, profile))
    facts = EngineFacts("tensorrt-rtx", VERSION, (89,), "fp32", profile, "")
    bundle.write_sidecar(path, held.spec, facts)
    entry = BundleFile("engine", path.name, files.sha256_of(path), path.stat().st_size, facts)
    Bundle(folder, held.spec, held.provenance, (*held.files, entry)).save()

    class Wrong:
        shift, runs = 0.0, 0

    def opened(path, device, **options):
        graph = OnnxSession(folder / "model.onnx", held.spec)

        def run(feeds):
            Wrong.runs += 1
            found = graph.run(feeds)
            return {**found, "logits": found["logits"] + np.float32(Wrong.shift)}

        cuda = FakeCuda(89)
        return TensorRTSession(path, compare=options.get("compare"), trt=fake_trt("tensorrt-rtx", cuda, run, VERSION), cuda=cuda)

    monkeypatch.setattr(sessions, "open_engine", opened)
    return folder, Wrong


def test_a_right_engine_is_compared_once(engine, cache):
    folder, wrong = engine
    with open_session(folder) as session:
        assert session.info.name == "tensorrt-rtx" and "was compared with its graph at this first opening" in session.info.note
    runs = wrong.runs
    assert runs == OTHER_SCENES + SCENES // 2  # batch sizes 1, the least one, and 2
    (stored,) = cache.glob("*.json")
    rows = json.loads(stored.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 2] and all(row["compared"] for row in rows)
    assert rows[1]["compared"] > 3 * rows[0]["compared"]
    with open_session(folder) as session:
        assert session.info.note == "" and wrong.runs == runs
    # A verdict about another engine, or a damaged one, is none.
    for text in (json.dumps({**json.loads(stored.read_text()), "engine_sha256": "0"}), "{"):
        stored.write_text(text)
        with open_session(folder) as session:
            assert "at this first opening" in session.info.note


@pytest.mark.parametrize("change", [None, "engine_sha256", "gpu"], ids=str)
def test_what_build_compared_on_this_gpu_is_not_compared_again(engine, cache, change):
    folder, wrong = engine
    held = Bundle.open(folder)
    (entry,) = held.of_kind("engine")
    with open_session(folder) as session:
        told = {"engine_sha256": entry.sha256, "gpu": session.info.gpu_name}
    runs = wrong.runs
    (stored,) = cache.glob("*.json")
    stored.unlink()
    checks = {entry.path: told if change is None else {**told, change: "another"}}
    provenance = replace(held.provenance, options={**held.provenance.options, "engine_checks": checks})
    replace(held, provenance=provenance).save()
    with open_session(folder):
        assert (wrong.runs == runs) == (change is None)


def test_a_wrong_engine_is_refused_then_and_later(engine, cache, capsys, tmp_path):
    folder, wrong = engine
    wrong.shift = 0.5
    for _ in range(2):
        with pytest.raises(GateError, match=r"does not detect on this GPU .* `backend=onnxruntime`"):
            open_session(folder)
    assert wrong.runs == 2
    images = write_images(tmp_path / "in")
    result = Cli(capsys)("detect", folder, images, code=None)
    check_refusal(result, names="model.tensorrt-rtx.engine", advice="--backend onnxruntime", code=3)
    with open_session(folder, backend="onnxruntime") as session:
        assert session.info.name == "onnxruntime-cpu"


def test_random_weights_are_not_judged(engine, cache, monkeypatch):
    folder, wrong = engine
    wrong.shift = 0.5
    held = Bundle.open(folder)
    object.__setattr__(held.provenance, "source", "random:detr")
    held.save()
    with open_session(folder) as session:
        assert "at this first opening: " in session.info.note


def test_without_a_graph_or_a_cache_nothing_is_compared(engine, cache, monkeypatch):
    folder, wrong = engine

    def missing(*args, **options):
        raise MissingPackageError("onnxruntime", "run", "an ONNX file")

    with monkeypatch.context() as patch:
        patch.setattr(onnx_opening, "OnnxSession", missing)
        with open_session(folder) as session:
            assert "was not compared with its graph" in session.info.note and "onnxruntime" in session.info.note
    assert not list(cache.glob("*.json")) and not wrong.runs
    monkeypatch.setenv("DETRT_RUNTIME_CACHE", "off")
    with open_session(folder) as session:
        assert session.info.note == "" and not wrong.runs
