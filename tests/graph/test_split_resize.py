"""Interpolated position embeddings as two matmuls, against ONNX Runtime's own Resize."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from onnx import TensorProto, helper, numpy_helper

from detrt import graph
from detrt.backends.onnxruntime.session import OnnxSession, run_graph
from detrt.graph.split_resize import split_resize


def resized(*, mode="cubic", constant=True, given=True, **attributes):
    """A graph that resizes a (1, 3, 5, 7) table to `size`."""
    table = np.random.default_rng(0).normal(size=(1, 3, 5, 7)).astype(np.float32)
    wanted = "size" if given else "fixed"
    node = helper.make_node("Resize", ["table", "", "", wanted], ["y"], name="/resize", mode=mode, **attributes)
    inputs = [helper.make_tensor_value_info("size", TensorProto.INT64, [4])]
    initial = [numpy_helper.from_array(np.array([1, 3, 9, 9]), "fixed")]
    if constant:
        initial.append(numpy_helper.from_array(table, "table"))
    else:
        inputs.append(helper.make_tensor_value_info("table", TensorProto.FLOAT, [1, 3, 5, 7]))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(helper.make_graph([node], "g", inputs, [output], initial), opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(
    "attributes", [{"cubic_coeff_a": -0.75}, {"antialias": 1}, {"coordinate_transformation_mode": "align_corners"}], ids=str
)
@pytest.mark.parametrize("size", [(11, 13), (3, 20), (5, 7)], ids=str)
def test_two_products_are_the_resize(attributes, size):
    plain, split = resized(**attributes), resized(**attributes)
    assert split_resize(split) == 1 and sum(node.op_type == "MatMul" for node in split.graph.node) == 2
    feeds = {"size": np.array([1, 3, *size])}
    want, got = (run_graph(model.SerializeToString(), feeds)["y"] for model in (plain, split))
    assert got.shape == (1, 3, *size)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("other", [{"mode": "linear"}, {"constant": False}, {"given": False}], ids=str)
def test_others_stay(other):
    assert split_resize(resized(**other)) == 0


@pytest.mark.parametrize("name", ["lw_detr", "yolos"])
def test_models_have_one(name, exported, tmp_path):
    report = exported(name)
    model = graph.load(report.path)
    assert split_resize(model) == 1
    graph.save(model, tmp_path / "split.onnx")
    side = report.spec.input.height // 2 // 64 * 64 or 64
    feeds = {"pixel_values": np.random.default_rng(0).integers(0, 256, (2, 3, side, side * 2), np.uint8)}
    with OnnxSession(report.path) as plain, OnnxSession(tmp_path / "split.onnx") as split:
        want, got = plain.run(feeds), split.run(feeds)
    for output, array in want.items():
        np.testing.assert_allclose(got[output], array, atol=1e-4 * np.abs(array).max())
