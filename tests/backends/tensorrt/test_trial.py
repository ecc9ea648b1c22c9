"""`build` with `precision=auto` for the GPU that is there: TensorRT-RTX builds what is tried, ONNX Runtime stands in for the engines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("onnxruntime")

from delayed import Clock, Delayed
from engine_graphs import rtx
from PIL import Image
from precision_graphs import SPEC, images, pixel_model

from detrt import graph
from detrt.backends.tensorrt import building, gain, trial
from detrt.backends.tensorrt.build import build_engine
from detrt.backends.tensorrt.config import EngineConfig
from detrt.errors import GateError
from detrt.graph.emulate_low_precision import emulate
from detrt.pipeline import build
from detrt.precision import PrecisionConfig, search
from detrt.spec import PIXEL_VALUES


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU of compute capability 8.9, on which a layer with weights of a type takes the seconds of `delays`."""
    graphs, delays, choices, clock = {}, {onnx.TensorProto.FLOAT16: 0.001, onnx.TensorProto.FLOAT: 0.01}, [], Clock()

    def built(path, output, config, spec, **given):
        done = build_engine(path, output, config, spec, **given)
        graphs[str(output)] = graph.load(path)
        return done

    def opened(path, **given):
        model = graphs[str(path)]
        session = Delayed(emulate(model).SerializeToString(), SPEC)
        session.clock = clock
        session.delay = sum(delays[one.data_type] for one in model.graph.initializer if len(one.dims) > 1)
        session._info = replace(session.info, profile={PIXEL_VALUES: ((1, 3, 16, 16),) * 3}, max_batch=1)
        choices.append(given)
        return session

    monkeypatch.setattr(building, "compute_capabilities_here", lambda: (89,))
    monkeypatch.setattr(building, "runs_here", lambda config: 89 in config.sms)
    monkeypatch.setattr(building.EngineBuilder, "_compare_engine", lambda *_: None)
    for module in (building, gain, trial):
        monkeypatch.setattr(module, "build_engine", built)
    monkeypatch.setattr(trial, "open_engine", opened)
    monkeypatch.setattr(gain, "open_engine_beside", lambda reference, path, text=None, **given: opened(path, **given))
    monkeypatch.setattr(trial, "gpu_here", lambda: "GPU of 2026")
    monkeypatch.setattr(gain, "time", clock)
    for name, value in (("RUNS", 2), ("WARM_UP", 1), ("TURNS", 2)):
        monkeypatch.setattr(gain, name, value)
    monkeypatch.setattr(search, "MAX_TIMED_BLOCKS", 2)
    graph.save(pixel_model(), tmp_path / "model.onnx")
    (tmp_path / "images").mkdir()
    for number, image in enumerate(images()[:2]):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    return delays, choices, tmp_path


def searched(folder, name, *targets):
    types = PrecisionConfig("auto", calibration=folder / "images", budget=("drift", 0.5), min_fraction=0.0)
    return build(folder / "model.onnx", folder / name, targets=targets, precision=types)


ENGINE = EngineConfig(sms=(89,), batch=(1, 1, 1))


@rtx
def test_build_searches_on_engines_of_the_gpu_that_is_there(machine):
    _, choices, folder = machine
    report = searched(folder, "a", ENGINE)
    found = report.bundle.provenance.options["precision"]["search"]
    assert found["kept"] == [] and found["ms"] < found["plain_ms"] and found["runs"] == len(found["times"]) + 2 == 4
    assert found["where"].startswith("tensorrt-rtx 1.") and "GPU of 2026, sms=[89], batch=[1, 1, 1]" in found["where"]
    assert all(one == {"eager_kernels": True, "keep_kernels": False} for one in choices[: found["runs"] + 1])
    (stage,) = [one for one in report.stages if one.name == "precision fp16"]
    assert stage.verdict.endswith(found["verdict"]) and "ms instead of" in stage.verdict
    rows = json.loads((folder / "a" / "search.json").read_text())["measured"]
    assert all(row["ms"] and row["plain_ms"] for row in rows.values())
    # The engine that stays passed the rule of 8 bits: faster than the plain one.
    (kept,) = report.bundle.provenance.options["engine_gains"].values()
    assert kept["ms"] < kept["plain_ms"]


@rtx
def test_no_engine_is_kept_that_is_slower_than_fp32(machine):
    delays, _, folder = machine
    delays.update({onnx.TensorProto.FLOAT16: 0.01, onnx.TensorProto.FLOAT: 0.001})
    with pytest.raises(GateError, match="`precision=fp32`"):
        searched(folder, "a", ENGINE)
    assert not (folder / "a").exists()


@pytest.mark.parametrize(
    "targets", [(), (ENGINE, replace(ENGINE, sms=(80,))), (replace(ENGINE, sms=(80,)),)], ids=["none", "two", "other"]
)
def test_elsewhere_onnx_runtime_searches_and_the_build_says_so(machine, monkeypatch, targets):
    _, choices, folder = machine
    monkeypatch.setattr(building.EngineBuilder, "build", lambda *_: None)
    report = searched(folder, "a", *targets)
    (stage,) = [one for one in report.stages if one.name == "precision fp16"]
    assert stage.verdict.endswith("searched with ONNX Runtime on the CPU, which tells no times") and not choices
