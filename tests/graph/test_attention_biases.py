"""Biases of attentions out of the way of engines: equal outputs, and untouched where the sums would be others."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from onnx import TensorProto, helper, numpy_helper

from detrt import graph
from detrt.backends.compare import output_differences
from detrt.backends.onnxruntime.session import run_graph
from detrt.graph.attention_biases import move_attention_biases
from detrt.models.contract import trace_size
from detrt.models.example_inputs import example_feeds

BATCH, QUERIES, KEYS, HEADS, HEAD = 2, 5, 7, 3, 4
CHANNELS = HEADS * HEAD
# Attentions with biases between a softmax and its projections.
FAMILIES = {"yolos": 2, "detr": 6, "rt_detr_v2": 3, "rf_detr": 6, "lw_detr": 4}


def attention(*, mask=False, dtype=np.float32, left_out=(), opset=17, scale=1.0, **changes):
    """A cross-attention with biases as families export it. scale: of the biases. changes: node name -> (operator, attributes) in its place."""
    generator = np.random.default_rng(3)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    tensors = {name: generator.standard_normal((CHANNELS, CHANNELS)) / 3 for name in ("wq", "wk", "wv", "wo")}
    tensors |= {name: generator.standard_normal(CHANNELS) * scale for name in ("bq", "bk", "bv", "bo")}
    initializers = [numpy_helper.from_array(value.astype(dtype), name) for name, value in tensors.items()]
    initializers += [
        numpy_helper.from_array(np.array(0.5, dtype), "scale"),
        numpy_helper.from_array(np.array([0, -1, HEADS, HEAD]), "heads"),
        numpy_helper.from_array(np.array([0, -1, CHANNELS]), "channels"),
    ]
    nodes = []

    def add(name, operator, inputs, **attributes):
        operator, attributes = changes.get(name, (operator, attributes))
        nodes.append(helper.make_node(operator, inputs, [name], name=f"/{name}", **attributes))

    for letter, source, perm in (("q", "x", [0, 2, 1, 3]), ("k", "y", [0, 2, 3, 1]), ("v", "y", [0, 2, 1, 3])):
        add(f"{letter}_product", "MatMul", [source, f"w{letter}"])
        last = f"{letter}_product"
        if f"b{letter}" not in left_out:
            add(f"{letter}_sum", "Add", [f"b{letter}", last])
            last = f"{letter}_sum"
        add(f"{letter}_heads", "Reshape", [last, "heads"])
        add(letter, "Transpose", [f"{letter}_heads"], perm=perm)
    add("product", "MatMul", ["q", "k"])
    add("scaled", "Mul", ["product", "scale"])
    if mask:
        add("masked", "Add", ["scaled", "mask"])
    add("weights", "Softmax", ["masked" if mask else "scaled"], axis=-1)
    add("attended", "MatMul", ["weights", "v"])
    add("turned", "Transpose", ["attended"], perm=[0, 2, 1, 3])
    add("joined", "Reshape", ["turned", "channels"])
    add("out_product", "MatMul", ["joined", "wo"])
    add("out", "Add", ["out_product", "bo"])
    inputs = {"x": [BATCH, QUERIES, CHANNELS], "y": [BATCH, KEYS, CHANNELS]} | ({"mask": [BATCH, 1, 1, KEYS]} if mask else {})
    g = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("out", kind, [BATCH, QUERIES, CHANNELS])],
        initializers,
    )
    return helper.make_model(g, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def feeds_of(model):
    generator = np.random.default_rng(1)
    feeds = {}
    for value in model.graph.input:
        shape = [dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = generator.standard_normal(shape).astype(kind)
    if "mask" in feeds:
        feeds["mask"] = np.where(feeds["mask"] > 0, 0, -1e4).astype(feeds["mask"].dtype)
    return feeds


@pytest.mark.parametrize("choices", [{}, {"opset": 12}, {"mask": True}, {"left_out": ("bk",)}, {"left_out": ("bq",)}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float16, 4e-3)])
def test_an_attention_is_equal(choices, dtype, tolerance):
    model = attention(dtype=dtype, **choices)
    feeds = feeds_of(model)
    before = run_graph(model.SerializeToString(), feeds)["out"]
    assert move_attention_biases(model) == 1
    onnx.checker.check_model(model, full_check=True)
    after = run_graph(model.SerializeToString(), feeds)["out"]
    np.testing.assert_allclose(after.astype(float), before.astype(float), rtol=0, atol=tolerance * np.abs(before).max())
    sums = [node.name for node in model.graph.node if node.op_type == "Add" and "mask" not in node.input]
    assert len(sums) == 2 - ("bq" in choices.get("left_out", ())) and {
        tensor.name for tensor in model.graph.initializer
    }.isdisjoint({"bq", "bk", "bv", "bo"})


@pytest.mark.parametrize(
    "choices",
    [
        {"left_out": ("bv",)},  # nothing to move through the output projection
        {"weights": ("Softmax", {"axis": 2})},  # over queries: a key's bias counts
        {"weights": ("Softmax", {}), "opset": 12},  # over all but the batch
        {"dtype": np.float16, "scale": 2.5e4},  # the bias of the output would be infinite
        {"scaled": ("Pow", {})},
        {"turned": ("Transpose", {"perm": [0, 2, 3, 1]})},
        {"out": ("Mul", {})},
    ],
    ids=lambda choices: "-".join(choices),
)
def test_another_pattern_stays(choices):
    model = attention(**choices)
    assert all(np.isfinite(numpy_helper.to_array(tensor)).all() for tensor in model.graph.initializer)
    before = model.SerializeToString()
    assert move_attention_biases(model) == 0
    assert model.SerializeToString() == before


@pytest.mark.parametrize("name", ["v_sum", "v_heads", "v", "attended", "turned", "joined", "out_product"])
def test_a_tensor_that_others_read_keeps_its_values(name):
    """As an output of the graph, and read by another node."""
    model = attention()
    model.graph.output.append(helper.make_empty_tensor_value_info(name))
    assert move_attention_biases(model) == 0
    read = attention()
    read.graph.node.append(helper.make_node("Identity", [name], ["copy"]))
    read.graph.output.append(helper.make_empty_tensor_value_info("copy"))
    assert move_attention_biases(read) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_stay_at_any_size(name, exported):
    """With biases of some size: those of first weights are zero, and an addition of zero is left out."""
    report = exported(name)
    model = graph.load(report.path)
    generator = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name.endswith("bias") and "proj" in tensor.name and tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(generator.standard_normal(tensor.dims).astype(np.float32) / 5, tensor.name))
    moved = onnx.ModelProto()
    moved.CopyFrom(model)
    assert move_attention_biases(moved) >= FAMILIES[name]
    for batch in (1, 3):
        feeds = example_feeds(report.spec, batch, trace_size(report.spec), seed=batch)
        before, after = (run_graph(one.SerializeToString(), feeds) for one in (model, moved))
        assert max(output_differences(before, after, 1e-4).values()) <= 1e-4
