"""Convolutions over blocks of pixels have the outputs of those over pixels, in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from detrt.backends.onnxruntime.session import run_graph
from detrt.backends.tensorrt.config import EngineConfig
from detrt.backends.tensorrt.rewrite import rewrite
from detrt.backends.tensorrt.versions import row_of
from detrt.graph.blocks import convolve_blocks
from detrt.models.contract import trace_size
from detrt.models.example_inputs import example_feeds


def convolution(size, kernel, stride, pads, *, channels=3, group=1, bias=True, kind=np.float32):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, channels // group, *kernel)).astype(kind)
    constants = [numpy_helper.from_array(weight, "weight")]
    if bias:
        constants.append(numpy_helper.from_array(rng.standard_normal(8).astype(kind), "bias"))
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    node = helper.make_node(
        "Conv", ["image", *(tensor.name for tensor in constants)], ["y"], "stem/Conv", strides=stride, pads=pads, group=group
    )
    relu = helper.make_node("Relu", ["y"], ["z"])
    image = helper.make_tensor_value_info("image", element, [2, channels, *size])
    graph = helper.make_graph(
        [node, relu], "g", [image], [helper.make_tensor_value_info("z", element, [2, 8, "rows", "columns"])], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


def outputs(model, size):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (entry,) = session.get_inputs()
    kind = np.float16 if "float16" in entry.type else np.float32
    return session.run(None, {"image": np.random.default_rng(1).standard_normal((2, entry.shape[1], *size)).astype(kind)})[0]


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "pads", "over_blocks"),
    [
        ((40, 66), (7, 7), 2, [3, 3, 3, 3], (4, 4)),  # ResNet
        ((28, 42), (14, 14), 14, [0, 0, 0, 0], (1, 1)),  # DINOv2
        ((32, 48), (16, 16), 16, [0, 0, 0, 0], (1, 1)),  # ViT
        ((32, 48), (7, 7), 4, [3, 3, 3, 3], (2, 2)),  # overlapping patches
        ((40, 66), (7, 9), 2, [3, 4, 2, 4], (4, 5)),  # other padding on every side
    ],
)
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_blocks_keep_the_outputs(size, kernel, stride, pads, over_blocks, kind):
    model = convolution(size, kernel, [stride, stride], pads, kind=kind)
    before = outputs(model, size)
    assert convolve_blocks(model) == 1
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["SpaceToDepth", "Conv", "Relu"]
    assert tuple(model.graph.initializer[-1].dims) == (8, 3 * stride**2, *over_blocks)
    assert "weight" not in {tensor.name for tensor in model.graph.initializer}
    after = outputs(model, size)
    assert after.shape == before.shape
    limit = 1e-5 if kind is np.float32 else 5e-3
    np.testing.assert_allclose(after, before, rtol=limit, atol=limit * np.abs(before).max())


@pytest.mark.parametrize(
    "model",
    [
        convolution((41, 66), (7, 7), [2, 2], [3, 3, 3, 3]),  # half a block at the end
        convolution(("height", "width"), (7, 7), [2, 2], [3, 3, 3, 3]),
        convolution((40, 66), (7, 7), [2, 2], [3, 3, 3, 3], channels=8),
        convolution((40, 66), (3, 3), [2, 2], [1, 1, 1, 1]),  # ResNet-D, HGNetV2: slower over blocks
        convolution((40, 66), (7, 7), [1, 1], [3, 3, 3, 3]),
        convolution((40, 66), (7, 7), [2, 1], [3, 3, 3, 3]),
        convolution((40, 66), (7, 7), [2, 2], [3, 3, 3, 3], channels=4, group=4),
    ],
    ids=["odd", "symbolic", "channels", "small kernel", "stride 1", "strides", "groups"],
)
def test_other_convolutions_stay(model):
    before = model.SerializeToString()
    assert convolve_blocks(model) == 0
    assert model.SerializeToString() == before


def test_graphs_without_names_of_nodes(tmp_path, exported):
    """As other tools write them: what stands in place of two nodes has two names, and values of two names."""
    report = exported("rt_detr_v2")
    model = onnx.load(report.path)
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "rewritten"
    folder.mkdir()
    config = EngineConfig(target="tensorrt-rtx", batch=(1, 1, 1))
    written = rewrite(tmp_path / "model.onnx", row_of("tensorrt-rtx", "1.6.1"), config, report.spec, folder)
    assert written.changes["MatMul"] > 1
    feeds = example_feeds(report.spec, 2, trace_size(report.spec))
    plain = run_graph(report.path.read_bytes(), feeds)
    for name, value in run_graph(written.path.read_bytes(), feeds).items():
        np.testing.assert_allclose(value, plain[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("target", "version", "blocks"), [("tensorrt-rtx", "1.6.1", True), ("tensorrt", "10.12", False)])
def test_only_versions_with_slow_kernels_get_blocks(target, version, blocks, tmp_path, exported):
    config = EngineConfig(target=target, batch=(1, 1, 1))
    model = convolution((40, 66), (7, 7), [2, 2], [3, 3, 3, 3])
    onnx.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "rewritten"
    folder.mkdir()
    written = rewrite(tmp_path / "model.onnx", row_of(target, version), config, exported("detr").spec, folder)
    assert ("SpaceToDepth" in {node.op_type for node in onnx.load(written.path).graph.node}) == blocks
