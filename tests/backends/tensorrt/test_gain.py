"""An engine in 8 bits is kept where it is faster than without quantization and keeps its AP. ONNX Runtime stands in for both engines."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from delayed import Clock, Delayed
from PIL import Image

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("onnxruntime")

from detrt.backends.building import Work
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt import building, gain
from detrt.backends.tensorrt.config import EngineConfig
from detrt.data.scenes.scene import draw_scene, write_dataset
from detrt.errors import GateError
from detrt.pipeline import _average_precision, _GraphWork
from detrt.precision.apply import apply_precision
from detrt.precision.config import PrecisionConfig
from detrt.spec import PIXEL_VALUES, Precision

SHAPE = (1, 3, 320, 320)


@pytest.fixture(scope="module")
def quantized(exported, tmp_path_factory):
    """(path, spec) of the trained model in INT8."""
    report = exported("embedded:shapes")
    config = PrecisionConfig("int8", calibration="drawn", qdq_placement="tensorrt")
    typed, _ = apply_precision(onnx.load(report.path), report.spec, config, [draw_scene(0).image])
    path = tmp_path_factory.mktemp("gain") / "model.onnx"
    onnx.save(typed, path)
    return path, report.spec


@pytest.fixture
def engines(monkeypatch):
    """Makes `measure_gain` open graphs as engines; `delays` are those of the engine and of the one without quantization, in seconds."""
    delays, built, choices, clock = {"engine": 0.1, "plain": 0.1}, [], [], Clock()

    def build_engine(path, output, config, spec, **_):
        built.append(onnx.load(path))
        output.write_bytes(path.read_bytes())

    def open_engine_beside(reference, path, text_engine=None, **given):
        choices.append(given)
        session = Delayed(path)
        session.clock, session.delay = clock, delays["plain" if path.name.startswith("plain") else "engine"]
        session._info = replace(session.info, profile={PIXEL_VALUES: (SHAPE,) * 3}, max_batch=1)
        return session

    monkeypatch.setattr(gain, "time", clock)
    monkeypatch.setattr(gain, "build_engine", build_engine)
    monkeypatch.setattr(gain, "open_engine_beside", open_engine_beside)
    monkeypatch.setattr(gain, "RUNS", 1)
    monkeypatch.setattr(gain, "WARM_UP", 0)
    monkeypatch.setattr(gain, "TURNS", 1)
    return SimpleNamespace(delays=delays, built=built, choices=choices)


def measured(quantized, tmp_path, **given):
    path, spec = quantized
    engine = tmp_path / "model.engine"
    engine.write_bytes(path.read_bytes())
    return gain.measure_gain(path, engine, EngineConfig(target="tensorrt"), spec, **given)


def test_the_other_engine_is_the_same_graph_without_its_quantization(quantized, engines, tmp_path):
    engines.delays["plain"] = 0.4
    found = measured(quantized, tmp_path)
    (graph,) = engines.built
    kinds = [node.op_type for node in graph.graph.node]
    assert "QuantizeLinear" not in kinds and "DequantizeLinear" not in kinds and "Conv" in kinds
    assert found.passed and found.ap is None and (found.plain_ms, found.ms) == pytest.approx((400, 100))
    assert (found.batch, found.height, found.width) == (1, 320, 320)
    # With all kernels compiled, and without a file of kernels of an engine that is removed.
    assert engines.choices == [{"eager_kernels": True}, {"eager_kernels": True, "keep_kernels": False}]


def test_the_other_engine_is_of_the_graph_in_16_bits_where_this_build_has_it(exported, quantized, engines, tmp_path):
    """Its weights are not rounded to eight bits, so that AP is compared with that of FP16."""
    report = exported("embedded:shapes")
    images, folder, plain = tmp_path / "images", tmp_path / "work", tmp_path / "plain"
    for made in (images, folder, plain):
        made.mkdir()
    Image.fromarray(draw_scene(0).image).save(images / "0.png")
    shutil.copy(report.path, folder / "model.onnx")
    work = _GraphWork(folder, PrecisionConfig("fp8", calibration=images, keep_fp32=("model.decoder",)), lambda *_: None, ())
    work.spec = report.spec
    work.convert_plain(plain)
    assert (folder / "model.onnx").read_bytes() == report.path.read_bytes()
    measured(quantized, tmp_path, plain_graph=work.plain)
    expected, _ = apply_precision(
        onnx.load(report.path),
        report.spec,
        PrecisionConfig("fp16", calibration=images, keep_fp32=("model.decoder",), min_fraction=0.0),
        sorted(images.iterdir()),
    )
    values = [[sorted(t.raw_data for t in one.graph.initializer)] for one in (engines.built[0], expected)]
    assert values[0] == values[1]


def test_without_quantization_an_fp8_graph_has_the_nodes_of_its_fp16_graph(exported, tmp_path):
    """The means that FP8 subtracts, and the padding before them, would make the other engine slower than one of FP16."""
    report = exported("embedded:shapes")
    images = [draw_scene(0).image]
    graphs = {}
    for precision in ("fp8", "fp16"):
        config = PrecisionConfig(precision, calibration="drawn")
        graphs[precision], _ = apply_precision(onnx.load(report.path), report.spec, config, images)
    assert any(node.name.endswith("/Centre") for node in graphs["fp8"].graph.node)
    onnx.save(graphs["fp8"], tmp_path / "fp8.onnx")
    plain = onnx.load(gain._without_quantization(tmp_path / "fp8.onnx", tmp_path))
    counts = [Counter(node.op_type for node in one.graph.node) for one in (plain, graphs["fp16"])]
    assert counts[0] == counts[1]
    pads = [sorted(str(node.attribute) for node in one.graph.node if node.op_type == "Conv") for one in (plain, graphs["fp16"])]
    assert pads[0] == pads[1]
    with OnnxSession(plain.SerializeToString(), report.spec) as session:
        session.run({PIXEL_VALUES: np.zeros(SHAPE, np.uint8)})


def test_what_is_slower_or_loses_ap_does_not_pass(quantized, engines, tmp_path):
    engines.delays["engine"] = 0.4
    assert not measured(quantized, tmp_path).passed
    engines.delays.update(engine=0.1, plain=0.4)
    values = iter(((0.5, 7), (0.5031, 7)))
    lost = measured(quantized, tmp_path, average_precision=lambda session: next(values))
    assert not lost.passed and "AP 0.5000 instead of 0.5031 on 7 images" in lost.verdict
    values = iter(((0.5, 7), (0.5029, 7)))
    assert measured(quantized, tmp_path, average_precision=lambda session: next(values)).passed


def test_build_refuses_it_with_both_figures(monkeypatch, tmp_path):
    """Exit code 3, and what to type next; both figures are in the provenance."""
    found = gain.Gain(1, 320, 320, 1.5, 1.2, 0.4, 0.41)
    monkeypatch.setattr(gain, "measure_gain", lambda *_, **__: found)
    work = Work(tmp_path, PrecisionConfig(), lambda *_: None, ())
    work.spec, recorded = SimpleNamespace(), {}
    monkeypatch.setattr(Work, "record", lambda self, name, facts: recorded.update({name: facts}))
    work.provenance = SimpleNamespace(options={})
    with pytest.raises(GateError, match=r"1\.5 ms instead of 1\.2 .* AP 0\.4000 instead of 0\.4100 .* `precision=fp16`"):
        building.BUILDER._require_gain(work, tmp_path / "model.fp8.engine", None, EngineConfig(target="tensorrt"), Precision.FP8)
    assert recorded["engine_gains"]["model.fp8.engine"]["plain_ms"] == 1.2
    assert work.stages[0].verdict == found.verdict


def test_ap_is_measured_where_calibration_has_annotations(quantized, tmp_path):
    """The scenes that the model was trained for give it a high AP; a folder of images, and a file without annotations, give none."""
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    write_dataset(tmp_path / "scenes", 4)
    truth = tmp_path / "scenes" / "annotations.json"
    with OnnxSession(quantized[0]) as session:
        for limit, images in ((None, 4), (3, 3)):
            average_precision = _average_precision(PrecisionConfig("fp16", calibration=truth, ap_images=limit), [])
            assert average_precision is not None and 0.5 < average_precision(session)[0] < 1
            assert average_precision(session)[1] == images
        document, warnings = json.loads(truth.read_text()), []
        for category in document["categories"]:
            category["name"] += " of another model"
        truth.write_text(json.dumps(document))
        average_precision = _average_precision(PrecisionConfig("fp16", calibration=truth), warnings)
        assert average_precision is not None and average_precision(session) is average_precision(session) is None
        (warning,) = warnings
        assert "AP of engines was not compared" in warning and "no class of the model" in warning
    truth.write_text(json.dumps(document | {"annotations": []}))
    for given in (truth, tmp_path / "scenes" / "images", None):
        assert _average_precision(PrecisionConfig("fp16", calibration=given), []) is None
