"""Ranges of tensors from summaries that the graph computes itself, beside those of the whole tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from detrt import graph
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.data.scenes.scene import draw_scene
from detrt.graph.operators import FILL_LIMIT
from detrt.graph.view import GraphView
from detrt.precision.calibrate import TensorRange, image_feeds, run_tensors, scan
from detrt.precision.summaries import Summary, serialized_with_summaries

IMAGES = [draw_scene(0).image, draw_scene(1, size_hw=(64, 200)).image]


@pytest.mark.slow
def test_ranges_are_those_of_the_whole_tensors(exported):
    report = exported("rt_detr_v2")
    model = graph.load(report.path)
    found = scan(model, report.spec, IMAGES)
    view = GraphView(model)
    names = [name for name in view.tensors() if name in found and found[name].node == view.producer[name].name]
    assert len(names) > 400
    names = [name for index, name in enumerate(names) if found[name].fills or index % 8 == 0]
    whole: dict[str, list[np.ndarray]] = {}
    run_tensors(model, report.spec, IMAGES, names, lambda name, array: whole.setdefault(name, []).append(array.reshape(-1)))
    for name in names:
        values = np.concatenate(whole[name])
        kept = values[np.abs(values) < FILL_LIMIT]
        one, largest = found[name], float(np.abs(kept).max(initial=0.0))
        assert (one.values, one.fills) == (kept.size, values.size - kept.size), name
        # Other outputs, other fusions: the last bits differ.
        assert one.absmax == pytest.approx(largest, rel=1e-4, abs=1e-5), name
        assert one.minimum == pytest.approx(float(kept.min(initial=0.0)), rel=1e-4, abs=1e-5 + 1e-4 * largest), name
        read = TensorRange("")
        for array in whole[name]:
            read.add(array)
        assert np.abs(np.subtract(one.exponents, read.exponents)).sum() <= 0.01 * sum(read.exponents) + 2, name
    assert any(found[name].fills for name in names)  # anchors at the border


def test_an_image_is_one_run_whatever_the_size_of_its_tensors(exported, monkeypatch):
    """EoMT-L at 640x640 has 22 GiB of tensors, and ran 22 times for each image."""
    report, runs = exported("rt_detr_v2"), []
    run = OnnxSession.run
    monkeypatch.setattr(OnnxSession, "run", lambda self, feeds: runs.append(1) or run(self, feeds))
    monkeypatch.setattr("detrt.precision.calibrate.MAX_CHUNK_BYTES", 1 << 10)
    model = graph.load(report.path)
    layers = [name for name in GraphView(model).tensors() if name.endswith("Conv_output_0")]
    assert len(scan(model, report.spec, IMAGES, wanted=layers)) >= len(layers) > 10
    assert len(runs) == len(IMAGES)


def test_a_summary_says_what_numpy_says(exported):
    report = exported("rt_detr_v2")
    model = graph.load(report.path)
    before = model.SerializeToString(deterministic=True)
    names = [name for name in GraphView.typed(model).tensors() if name.endswith("Conv_output_0")][:3]
    feeds = next(image_feeds(IMAGES, report.spec))
    with OnnxSession(serialized_with_summaries(model, names), report.spec, in_order=True) as session:
        outputs = session.run(feeds)
    assert model.SerializeToString(deterministic=True) == before
    arrays = {}
    run_tensors(model, report.spec, IMAGES[:1], names, arrays.__setitem__)
    for name in names:
        one, values = Summary.of(name, outputs), arrays[name].reshape(-1)
        assert one.ordinary and one.count == values.size
        np.testing.assert_allclose([one.largest, one.smallest], [values.max(), values.min()], rtol=1e-4)
        np.testing.assert_allclose(one.sample, values[:: max(1, values.size >> 15)], rtol=1e-3, atol=1e-4)
    assert not Summary(np.inf, 0.0, 1, values).ordinary and not Summary(0.0, -np.inf, 1, values).ordinary
    assert not Summary(np.nan, np.nan, 1, values).ordinary


LAYERS = """
import sys
import numpy as np
from onnx import helper
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.precision.summaries import serialized_with_summaries
from detrt.system import peak_memory_mib
sys.path.insert(0, sys.argv[1])
from precision_graphs import SPEC, model_of

names = [f"layer{index}" for index in range(101)]
nodes = [
    helper.make_node("Cast", ["pixel_values"], ["pixels"], to=1),
    helper.make_node("Reshape", ["pixels", "row"], ["flat"]),
    helper.make_node("Expand", ["flat", "large"], [names[0]]),
    *(helper.make_node("Cos" if i % 2 else "Sin", [names[i]], [names[i + 1]]) for i in range(100)),
    helper.make_node("ReduceMax", [names[100]], ["last"], keepdims=0),
    helper.make_node("Expand", ["last", "of_logits"], ["logits"]),
    helper.make_node("Expand", ["last", "of_boxes"], ["pred_boxes"]),
]
constants = {"row": [1, 768], "large": [2731, 768], "of_logits": [1, 16, 8], "of_boxes": [1, 16, 4]}
content = serialized_with_summaries(model_of(nodes, {name: np.array(value) for name, value in constants.items()}), names)
with OnnxSession(content, SPEC, in_order=sys.argv[2] == "in order") as session:
    before = peak_memory_mib()
    session.run({"pixel_values": np.ones((1, 3, 16, 16), np.uint8)})
print(peak_memory_mib() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no peak memory of a process is read there")
def test_tensors_are_freed_once_they_are_summarised():
    """A hundred tensors of 8 MiB: in ONNX Runtime's own order the summaries are computed last, and all are kept until then."""
    support = str(Path(__file__).parents[1] / "support")

    def grown(order):
        done = subprocess.run([sys.executable, "-c", LAYERS, support, order], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert grown("in order") < 200 < 600 < grown("as ONNX Runtime likes")
