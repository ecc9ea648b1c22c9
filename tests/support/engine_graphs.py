"""Small graphs and specs for the tests of the engine builder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from engine_specs import EDGE, FIXED  # noqa: F401 - for the tests that import them with the graphs

onnx = pytest.importorskip("onnx", reason="needs detrt[export]: the tests write small ONNX files")
from onnx import TensorProto, helper, numpy_helper

rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="needs detrt[rtx]: builds real engines"
)


def save(path: Path, nodes, inputs, outputs, initialisers=(), opset=17, **options) -> Path:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [info(*i) for i in inputs],
        [info(*o) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in initialisers],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("detrt", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), str(path), **options)
    return path


def detector(path: Path, batch="batch", height="height", width="width", kind=TensorProto.FLOAT, mask=True, **options) -> Path:
    """uint8 pixels, an int64 mask and int64 target sizes in; a convolution, a matmul, an int64 output."""
    rng = np.random.default_rng(0)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    nodes = [
        helper.make_node("Cast", ["pixel_values"], ["x"], name="/model/Cast", to=kind),
        helper.make_node("Conv", ["x", "w1"], ["c"], name="/model/backbone/Conv", strides=[16, 16]),
        helper.make_node("ReduceMean", ["c"], ["r"], name="/model/ReduceMean", axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["r", "w2"], ["m"], name="/model/encoder/layers.0/self_attn/MatMul"),
        helper.make_node("Cast", ["m"], ["logits"], name="/model/Cast_1", to=TensorProto.FLOAT),
        helper.make_node("Add", ["target_sizes", "target_sizes"], ["labels"], name="/post/Add"),
    ]
    inputs = [
        ("pixel_values", TensorProto.UINT8, [batch, 3, height, width]),
        ("target_sizes", TensorProto.INT64, [batch, 2]),
    ]
    outputs = [("logits", TensorProto.FLOAT, [batch, 5]), ("labels", TensorProto.INT64, [batch, 2])]
    if mask:
        inputs.append(("pixel_mask", TensorProto.INT64, [batch, height, width]))
        nodes.append(helper.make_node("ReduceMax", ["pixel_mask"], ["top"], name="/post/ReduceMax", axes=[1, 2], keepdims=0))
        outputs.append(("top", TensorProto.INT64, [batch]))
    weights = [
        ("w1", rng.normal(size=(64, 3, 16, 16)).astype(dtype)),
        ("w2", rng.normal(size=(64, 5)).astype(dtype)),
    ]
    return save(path, nodes, inputs, outputs, weights, **options)


def one_node(path: Path, operator: str, shape=("batch", 3, 8, 8), out=("batch", 3, 8, 8), **attributes) -> Path:
    name = attributes.pop("name", f"/model/decoder/layers.0/{operator}")
    node = helper.make_node(operator, ["pixel_values"], ["logits"], name=name, **attributes)
    return save(
        path,
        [node],
        [("pixel_values", TensorProto.FLOAT, shape)],
        [("logits", TensorProto.FLOAT, out)],
        opset=18,
    )


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*"))
