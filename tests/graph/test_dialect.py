"""The graph in the dialect of older parsers: equal in ONNX Runtime, and free of what those parsers refuse."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper
from random_rows import MODELS, OWN_MODELS, TEXT_MODELS
from tiny_exports import SHARED, marked

from detrt.backends.onnxruntime.session import optimize_basic, run_graph
from detrt.backends.tensorrt.v8 import OldVersion
from detrt.backends.tensorrt.v8.write_out import (
    LAYER_NORM,
    fix_axes,
    move_integers,
    scale_before_matmul,
    use_layer_norm_plugin,
    widen,
    write_out,
)
from detrt.backends.tensorrt.versions import VERSIONS, row_of
from detrt.errors import GraphError
from detrt.graph.clean import with_outputs
from detrt.graph.dialect import cumsum_to_matmul, for_typed_parser
from detrt.graph.lower_msda import sum_by_reduction
from detrt.graph.opset import lower_opset, set_opset
from detrt.graph.selections import topk_outputs
from detrt.graph.view import element_types
from detrt.models.contract import trace_size
from detrt.models.example_inputs import example_feeds

OLD = row_of("tensorrt", "8.5.3")
# Operators that every parser of the table reads, as far as graphs of detrt hold them. From the parser of TensorRT 8.5
# (onnx/onnx-tensorrt, branch 8.5-GA); those of 8.6 to 11 read these as well.
READ = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "ArgMax",
        "AveragePool",
        "Cast",
        "Ceil",
        "Clip",
        "Concat",
        "ConstantOfShape",
        "Conv",
        "ConvTranspose",
        "Cos",
        "CumSum",
        "DequantizeLinear",
        "Div",
        "Einsum",
        "Equal",
        "Erf",
        "Exp",
        "Expand",
        "Flatten",
        "Floor",
        "Gather",
        "GatherElements",
        "GatherND",
        "Gemm",
        "GlobalAveragePool",
        "Greater",
        "GreaterOrEqual",
        "GridSample",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "MatMul",
        "Max",
        "MaxPool",
        "Min",
        "Mul",
        "Neg",
        "NonMaxSuppression",
        "Not",
        "OneHot",
        "Or",
        "PRelu",
        "Pad",
        "Pow",
        "QuantizeLinear",
        "Range",
        "Reciprocal",
        "ReduceL2",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "Relu",
        "Reshape",
        "Resize",
        "Round",
        "ScatterElements",
        "ScatterND",
        "Shape",
        "Sigmoid",
        "Sign",
        "Sin",
        "Slice",
        "Softmax",
        "Softplus",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Tanh",
        "Tile",
        "TopK",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
        "Xor",
    ]
)
TINY = sorted({*MODELS, *OWN_MODELS, *TEXT_MODELS})


def run(model, feeds, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})


def dialect(model, row=OLD):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if isinstance(row, OldVersion):
        sum_by_reduction(copy)
        move_integers(copy)
        cumsum_to_matmul(copy)
        write_out(copy, row.lacks)
        lower_opset(copy, row.opset)
    else:
        for_typed_parser(copy, opset=row.opset, cumsum=True, grid_sample_linear=True, scatter_reduction=row.scatter_reduction)
    return copy


def refused(model, row) -> list[str]:
    """What a version's parser would refuse in a graph, by its row of the table."""
    found = []
    old = isinstance(row, OldVersion)
    opset = next(e.version for e in model.opset_import if e.domain in ("", "ai.onnx"))
    if opset > row.opset:
        found.append(f"opset {opset}")
    for node in model.graph.node:
        names = {entry.name for entry in node.attribute}
        if (old and node.op_type in row.lacks) or node.op_type not in READ | {
            "InstanceNormalization",
            "LayerNormalization",
            "Mod",
        }:
            found.append(node.op_type)
        if node.op_type == "Shape" and old and names & {"start", "end"}:
            found.append("Shape with start or end")
        if node.op_type == "ScatterND" and not row.scatter_reduction and "reduction" in names:
            found.append("ScatterND with reduction")
    if old:
        found += moved_booleans(model)
    return found


def moved_booleans(model) -> list[str]:
    kinds = element_types(model)
    moves = {
        "Concat",
        "Reshape",
        "Flatten",
        "Transpose",
        "Slice",
        "Gather",
        "Unsqueeze",
        "Squeeze",
        "Expand",
        "Tile",
        "Split",
        "Pad",
    }
    return [
        f"{n.op_type} of booleans" for n in model.graph.node if n.op_type in moves and kinds.get(n.output[0]) == TensorProto.BOOL
    ]


@pytest.mark.parametrize("family", marked(TINY))
def test_every_family_has_a_dialect_for_every_version(family, exported):
    report = exported(family, **SHARED.get(family, {}))
    for path in sorted(report.path.parent.glob("*.onnx")):
        model = onnx.load(path)
        # Versions that lack the same have the same dialect.
        written = {}
        for row in VERSIONS:
            key = (type(row), getattr(row, "lacks", ()), row.scatter_reduction, row.opset)
            written[row] = written.get(key) or written.setdefault(key, dialect(model, row))
        rows = {row.since: refused(written[row], row) for row in VERSIONS}
        assert not any(rows.values()), (path.name, rows)


# One of each kind of graph: masks of padding, a plain and a windowed transformer, deformable attention with one and two stages.
EQUAL = ("detr", "yolos", "rf_detr-seg", "deformable_detr", "rt_detr_v2", "d_fine", "dino", "pp_doclayout_v3", "eomt_dinov3")


@pytest.mark.parametrize("family", marked(sorted(set(TINY) - set(TEXT_MODELS)), EQUAL))
def test_outputs_stay_equal(family, exported):
    report = exported(family, **SHARED.get(family, {}))
    model = onnx.load(report.path)
    feeds = example_feeds(report.spec, 2, trace_size(report.spec), seed=5)
    selections = topk_outputs(model)
    model = with_outputs(model, selections)
    want = run(model, feeds)
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fix_axes(fixed, {name: array.shape for name, array in feeds.items()}, optimize_basic)
    fixed = dialect(fixed)  # after it: the optimiser writes default attributes out
    assert all(d.dim_value for v in fixed.graph.input for d in v.type.tensor_type.shape.dim)
    outputs = len(want) - len(selections)
    chosen = dict(zip(selections, want[outputs:], strict=True))
    # FP32 noise of the graph itself: what ONNX Runtime's own optimizations change (3e-4 in DEIMv2's logits, else 1e-6).
    plain = run(model, feeds, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    same = all(np.array_equal(a, b) for a, b in zip(plain[outputs:], want[outputs:], strict=True))
    noise = [np.abs(a - b).max() if same else 0 for a, b in zip(plain[:outputs], want[:outputs], strict=True)]
    for written in (dialect(model), fixed):
        got = run(with_selections(written, chosen), feeds | {f"{name}/forced": array for name, array in chosen.items()})
        for a, b, largest in zip(got[:outputs], want[:outputs], noise, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 + 4 * largest)
    assert not refused(fixed, OLD)
    assert not cumsum_to_matmul(fixed)


def with_selections(model, chosen):
    """A copy whose graph reads the indices of its TopK nodes from inputs, because nearly equal scores may change places."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        for position, name in enumerate(node.input):
            if name in chosen:
                node.input[position] = f"{name}/forced"
    for name, array in chosen.items():
        copy.graph.input.append(helper.make_tensor_value_info(f"{name}/forced", TensorProto.INT64, array.shape))
    return copy


def one(node, inputs, output, opset=17, constants=()):
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [info(name, kind, shape) for name, kind, shape in inputs],
        [info(*output)],
        [numpy_helper.from_array(array, name) for name, array in constants],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


RNG = np.random.default_rng(3)
FLOATS = RNG.normal(size=(2, 6, 5)).astype(np.float32) * 3
CASES = {
    "LayerNormalization": (
        helper.make_node("LayerNormalization", ["x", "s", "b"], ["y"], axis=-2, epsilon=1e-3), FLOATS, TensorProto.FLOAT, 17,
        [("s", RNG.normal(size=(6, 5)).astype(np.float32)), ("b", RNG.normal(size=(6, 5)).astype(np.float32))],
    ),
    "GroupNormalization 21": (
        helper.make_node("GroupNormalization", ["x", "s", "b"], ["y"], num_groups=3), FLOATS, TensorProto.FLOAT, 21,
        [("s", RNG.normal(size=6).astype(np.float32)), ("b", RNG.normal(size=6).astype(np.float32))],
    ),
    "InstanceNormalization": (  # the parser's own is a plugin over cuDNN, which need not be there
        helper.make_node("InstanceNormalization", ["x", "s", "b"], ["y"], epsilon=1e-3), RNG.normal(size=(2, 6, 5, 3)).astype(np.float32),
        TensorProto.FLOAT, 17, [("s", RNG.normal(size=6).astype(np.float32)), ("b", RNG.normal(size=6).astype(np.float32))],
    ),
    "Mod": (helper.make_node("Mod", ["x", "m"], ["y"]), np.arange(-9, 9), TensorProto.INT64, 17, [("m", np.array(4))]),
    "Mod of a negative": (helper.make_node("Mod", ["x", "m"], ["y"]), np.arange(-9, 9), TensorProto.INT64, 17, [("m", np.array(-4))]),
    "Mish": (helper.make_node("Mish", ["x"], ["y"]), FLOATS, TensorProto.FLOAT, 18, []),
    "Gelu": (helper.make_node("Gelu", ["x"], ["y"]), FLOATS, TensorProto.FLOAT, 20, []),
    "Gelu by tanh": (helper.make_node("Gelu", ["x"], ["y"], approximate="tanh"), FLOATS, TensorProto.FLOAT, 20, []),
    "IsInf": (helper.make_node("IsInf", ["x"], ["y"]), np.array([1, np.inf, -np.inf, 0], np.float32), TensorProto.BOOL, 17, []),
    "ArgMax": (
        helper.make_node("ArgMax", ["x"], ["y"], axis=1, keepdims=0), RNG.integers(0, 40000, (3, 9)), TensorProto.INT64, 17, [],
    ),
    "CumSum": (helper.make_node("CumSum", ["x", "a"], ["y"]), FLOATS, TensorProto.FLOAT, 17, [("a", np.array(-1))]),
    "CumSum of rows": (helper.make_node("CumSum", ["x", "a"], ["y"]), FLOATS, TensorProto.FLOAT, 17, [("a", np.array([1]))]),
    "CumSum from the end": (
        helper.make_node("CumSum", ["x", "a"], ["y"], reverse=1, exclusive=1), FLOATS, TensorProto.FLOAT, 17, [("a", np.array(1))],
    ),
    "Shape": (helper.make_node("Shape", ["x"], ["y"], start=-2), FLOATS, TensorProto.INT64, 17, []),
    "Shape to an end": (helper.make_node("Shape", ["x"], ["y"], start=1, end=-1), FLOATS, TensorProto.INT64, 17, []),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_operator_written_out_equals_itself(case):
    node, x, kind, opset, constants = CASES[case]
    model = one(node, [("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)], ("y", kind, None), opset, constants)
    written = dialect(model)
    assert node.op_type in ("ArgMax", "Shape") or node.op_type not in Counter(n.op_type for n in written.graph.node)
    assert len(written.graph.node) > 1 or node.op_type == "CumSum"
    np.testing.assert_allclose(run(written, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "kind"),
    [((2, "rows", 5), 1, TensorProto.FLOAT), ((2, 6, 5), 0, TensorProto.FLOAT), ((2, 6, 5), 1, TensorProto.INT32)],
    ids=["unknown length", "outer axis", "integers, as PP-DocLayoutV2 has"],
)
def test_a_running_sum_that_has_no_product_stays(shape, axis, kind):
    node = helper.make_node("CumSum", ["x", "a"], ["y"])
    model = one(node, [("x", kind, shape)], ("y", kind, None), 17, [("a", np.array(axis))])
    assert not cumsum_to_matmul(model) and [n.op_type for n in dialect(model).graph.node] == ["CumSum"]


@pytest.mark.parametrize("exclusive", (0, 1))
@pytest.mark.parametrize("reverse", (0, 1))
@pytest.mark.parametrize("axis", (-1, -2, 2))
def test_a_running_sum_of_unknown_length_is_a_product_with_a_computed_triangle(axis, reverse, exclusive):
    node = helper.make_node("CumSum", ["x", "a"], ["y"], name="/CumSum", reverse=reverse, exclusive=exclusive)
    model = one(
        node, [("x", TensorProto.FLOAT, (2, "rows", "columns"))], ("y", TensorProto.FLOAT, None), 17, [("a", np.array(axis))]
    )
    written = onnx.ModelProto.FromString(model.SerializeToString())
    assert cumsum_to_matmul(written, symbolic=True) == 1
    assert "CumSum" not in {n.op_type for n in written.graph.node}
    for shape in ((2, 3, 5), (2, 7, 4)):
        x = RNG.normal(size=shape).astype(np.float32)
        np.testing.assert_allclose(run(written, {"x": x})[0], run(model, {"x": x})[0], rtol=1e-5, atol=1e-5)


# (weights, their axes, rows of the table that are gathered, what reads the products) of matmuls that are not all sums of samples.
PRODUCTS = {
    "is an output": ((2, 3, 4, 5), (2, 3, 4, 5), "output"),
    "of samples alone": ((2, 3, 4, 5), (2, 3, 4, 5), "sum"),
    "of samples and others": ((2, 3, 4, 5), (2, 3, 4, 5), "two sums"),
    "with fewer axes": ((2, 3, 4), (2, 3, 1), "sum"),
    "with more axes": ((2, 3, 4, 5, 6), (2, 3, 4, 1, 6), "sum"),
    "of a vector": ((2, 3, 4, 5), (), "sum"),
}


@pytest.mark.parametrize("opset", (12, 17))
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmuls_of_gathered_rows_keep_their_result(name, opset):
    """Graphs of others may have such matmuls that are no deformable attention, and sums of it that are read elsewhere as well."""
    shape, rows, readers = PRODUCTS[name]
    width = 5 if name == "of a vector" else 6
    constants = [("table", RNG.normal(size=(11, width)).astype(np.float32)), ("three", np.array([3]))]
    nodes = []
    for term, points in (("a", shape[-1]), ("b", 7 if readers == "two sums" else shape[-1])):
        index = np.asarray(RNG.integers(0, 11, (*rows[:-1], points) if rows and rows[-1] > 1 else rows))
        constants.append((f"rows_{term}", index))
        axes = ["three"] if opset >= 13 else []
        nodes += [
            helper.make_node("Unsqueeze", [f"w_{term}", *axes], [f"u_{term}"], f"/U_{term}", **({} if axes else {"axes": [3]})),
            helper.make_node("Gather", ["table", f"rows_{term}"], [f"g_{term}"], f"/G_{term}"),
            helper.make_node("MatMul", [f"u_{term}", f"g_{term}"], [term], f"/M_{term}"),
        ]
    nodes += [helper.make_node("Add", ["a", "b"], ["sum"], "/Add"), helper.make_node("Neg", ["sum"], ["y"], "/Neg")]
    feeds = {"w_a": RNG.normal(size=shape).astype(np.float32), "w_b": RNG.normal(size=shape).astype(np.float32)}
    if readers == "two sums":
        feeds["w_b"] = RNG.normal(size=(*shape[:-1], 7)).astype(np.float32)
    outputs = ["y", *(["a"] if readers == "output" else [])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, value.shape) for key, value in feeds.items()],
        [helper.make_tensor_value_info(key, TensorProto.FLOAT, None) for key in outputs],
        [numpy_helper.from_array(value, key) for key, value in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    written = onnx.ModelProto.FromString(model.SerializeToString())
    for_typed_parser(written)
    for want, got in zip(run(model, feeds), run(written, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_running_sum_of_unknown_length_stays_in_old_graphs():
    """Before opset 13 Unsqueeze has its axes in an attribute."""
    node = helper.make_node("CumSum", ["x", "a"], ["y"])
    model = one(node, [("x", TensorProto.FLOAT, (2, "rows"))], ("y", TensorProto.FLOAT, None), 11, [("a", np.array(1))])
    assert not for_typed_parser(model)
    run(model, {"x": np.ones((2, 3), np.float32)})


def test_a_sigmoid_is_written_out_where_it_is_asked_for():
    node = helper.make_node("Sigmoid", ["x"], ["y"])
    model = one(node, [("x", TensorProto.FLOAT, (7,))], ("y", TensorProto.FLOAT, None))
    values = np.array([-3e38, -200, -1, 0, 1, 200, 3e38], np.float32)
    (want,) = run(model, {"x": values})
    assert not write_out(model, ())
    (done,) = write_out(model, (), also={"y"})
    assert done.operator == "Sigmoid" and "y" in done.parts and "Exp" in Counter(n.op_type for n in model.graph.node)
    np.testing.assert_allclose(run(model, {"x": values})[0], want, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("width", "axis", "inputs", "fp32", "replaced"),
    [
        (33, -1, 3, (), 1),
        (32, -1, 3, (), 0),  # the plugin's kernel for narrow rows is wrong
        (33, -2, 3, (), 0),
        (33, -1, 2, (), 0),
        (33, -1, 3, ("y",), 0),
    ],
)
def test_layer_norm_becomes_the_plugin_where_that_computes_the_same(width, axis, inputs, fp32, replaced):
    node = helper.make_node("LayerNormalization", ["x", "s", "b"][:inputs], ["y"], "norm", axis=axis, epsilon=1e-3)
    constants = [("s", np.ones(width, np.float32)), ("b", np.zeros(width, np.float32))]
    model = one(node, [("x", TensorProto.FLOAT, (2, 5, width))], ("y", TensorProto.FLOAT, None), 17, constants)
    assert use_layer_norm_plugin(model, fp32) == replaced
    (got,) = model.graph.node
    assert got.op_type == (LAYER_NORM if replaced else "LayerNormalization") and list(got.input) == list(node.input)
    if replaced:
        # The fields that NVIDIA's creator reads, in its types.
        fields = {a.name: helper.get_attribute_value(a) for a in got.attribute}
        assert fields == {"epsilon": pytest.approx(1e-3), "axis": -1, "plugin_version": b"1", "plugin_namespace": b""}
        assert got.domain in {entry.domain for entry in model.opset_import}


def test_booleans_are_moved_as_integers():
    """As Deformable DETR's masks: compared, concatenated along a symbolic axis, gathered, reshaped and compared again."""
    nodes = [
        helper.make_node("Greater", ["x", "limit"], ["mask"], "compare"),
        helper.make_node("Not", ["mask"], ["other"], "not"),
        helper.make_node("Concat", ["mask", "other", "known"], ["both"], "concat", axis=1),
        helper.make_node("Gather", ["both", "index"], ["some"], "gather", axis=1),
        helper.make_node("Unsqueeze", ["some", "axis"], ["deep"], "unsqueeze"),
        helper.make_node("Squeeze", ["deep", "axis"], ["flat"], "squeeze"),
        helper.make_node("Xor", ["flat", "mask"], ["chosen"], "xor"),
        helper.make_node("Cast", ["chosen"], ["y"], "cast", to=TensorProto.FLOAT),
    ]
    constants = [
        numpy_helper.from_array(np.float32(0.0), "limit"),
        numpy_helper.from_array(np.array([[True], [False]]), "known"),
        numpy_helper.from_array(np.array([5, 3, 6]), "index"),
        numpy_helper.from_array(np.array([1]), "axis"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, "n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, "n"])
    graph = helper.make_graph(nodes, "masks", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)}
    want = run(model, feeds)
    assert len(moved_booleans(model)) == 4
    assert move_integers(model) == 4
    assert not moved_booleans(model)
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(run(model, feeds)[0], want[0])


def test_quantized_graphs_are_refused():
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy")
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "one"], ["small"]),
        helper.make_node("DequantizeLinear", ["small", "one"], ["y"]),
    ]
    scale = numpy_helper.from_array(np.float32(0.05), "one")
    with pytest.raises(GraphError, match="INT8.*`precision=fp16`"):
        widen(helper.make_model(helper.make_graph(nodes, "quantized", [x], [y], [scale])))


@pytest.mark.parametrize("family", ["rt_detr_v2", "deformable_detr"])
def test_an_opset_is_raised_and_lowered_again(family, exported):
    model = onnx.load(exported(family).path)
    raised = onnx.ModelProto()
    raised.CopyFrom(model)
    set_opset(raised, 19)
    lower_opset(raised, 17)
    onnx.checker.check_model(raised)
    assert [n.op_type for n in raised.graph.node] == [n.op_type for n in model.graph.node]
    assert [sorted(a.name for a in n.attribute) for n in raised.graph.node] == [
        sorted(a.name for a in n.attribute) for n in model.graph.node
    ]


def test_what_an_older_opset_cannot_express_is_refused():
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph([helper.make_node("Gelu", ["x"], ["y"], "g")], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    with pytest.raises(GraphError, match=r"'g' \(Gelu\) cannot be expressed in opset 17"):
        lower_opset(model, 17)


def test_the_default_reduction_goes_and_another_stays():
    for reduction, left in (("none", 0), ("add", 1)):
        node = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], reduction=reduction)
        inputs = [("x", TensorProto.FLOAT, [4]), ("i", TensorProto.INT64, [1, 1]), ("u", TensorProto.FLOAT, [1])]
        written = dialect(one(node, inputs, ("y", TensorProto.FLOAT, [4])))
        assert len(written.graph.node[0].attribute) == left


def test_what_cannot_be_written_out_is_refused():
    with pytest.raises(GraphError, match="Unique"):
        write_out(one(helper.make_node("Abs", ["x"], ["y"]), [("x", 1, [1])], ("y", 1, [1])), {"Unique"})
    node = helper.make_node("Mod", ["x", "m"], ["y"], fmod=1)
    with pytest.raises(GraphError, match="fmod"):
        dialect(one(node, [("x", 1, [2])], ("y", 1, [2]), constants=[("m", np.float32([2]))]))


def test_types_come_out_of_a_typed_graph_and_are_remembered(exported):
    """The nodes that the rules keep in FP32, and no others, are constraints of a builder that chooses types itself."""
    from detrt.graph.view import GraphView
    from detrt.precision.cast import retype
    from detrt.precision.rules import Rules
    from detrt.spec import Precision

    report = exported("rt_detr_v2")
    model = onnx.load(report.path)
    typing = retype(model, Rules(GraphView.typed(model), Precision.FP16), Precision.FP16)
    feeds = example_feeds(report.spec, 1, trace_size(report.spec), seed=2)
    want = run(model, feeds)
    nodes = {node.name for node in model.graph.node}
    done = widen(model)
    onnx.checker.check_model(model)
    assert done.low
    wide = {node.name for node in model.graph.node if done.fp32.intersection(node.output)}
    assert set(typing.fp32_reasons) & {n.name for n in model.graph.node} <= wide and not wide & typing.low
    assert wide <= nodes
    assert TensorProto.FLOAT16 not in {t.data_type for t in model.graph.initializer}
    assert not any(a.name == "to" and a.i == TensorProto.FLOAT16 for n in model.graph.node for a in n.attribute)
    assert [o.shape for o in run(model, feeds)] == [o.shape for o in want]


def test_brain_floats_have_no_wide_form():
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BFLOAT16)
    with pytest.raises(GraphError, match="BF16"):
        widen(one(node, [("x", TensorProto.FLOAT, [2])], ("y", TensorProto.BFLOAT16, [2])))


@pytest.mark.parametrize(
    ("scale", "moved"), [("Mul", 1), ("Div", 1), ("swapped Mul", 1), ("swapped Div", 0), ("weights", 0), ("two readers", 0)]
)
def test_products_that_overflow_fp16_are_scaled_before(scale, moved):
    """TensorRT 8.5 stores a product in FP16 that was constrained to FP32: scores of 157 000 in front of their scale in DEIMv2-Femto."""
    operator = scale.split()[-1] if scale.split()[-1] in ("Mul", "Div") else "Mul"
    factor, keys = np.float32(0.25 if operator == "Mul" else 4.0), ("keys" if scale != "weights" else "w")
    inputs = ["product", "factor"] if "swapped" not in scale else ["factor", "product"]
    nodes = [
        helper.make_node("MatMul", ["queries", keys], ["product"], "attention"),
        helper.make_node(operator, inputs, ["scores"], "scale"),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
    ]
    outputs = {"weights": [2, 3, 3]} | ({"product": [2, 3, 3]} if scale == "two readers" else {})
    tensors = {"queries": [2, 3, 4]} | ({"keys": [2, 4, 3]} if keys == "keys" else {})
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in side.items()]
        for side in (tensors, outputs)
    ]
    generator = np.random.default_rng(0)
    constants = [numpy_helper.from_array(factor, "factor"), numpy_helper.from_array(generator.random((4, 3), np.float32), "w")]
    graph = helper.make_graph(nodes, "attention", *values, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in tensors.items()}
    expected = run_graph(model.SerializeToString(), feeds)
    assert scale_before_matmul(model, set()) == 0
    assert scale_before_matmul(model, {"product"}) == moved
    onnx.checker.check_model(model)
    order = [node.op_type for node in model.graph.node]
    assert order == ([operator, "MatMul", "Softmax"] if moved else ["MatMul", operator, "Softmax"])
    for name, array in run_graph(model.SerializeToString(), feeds).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_positions_on_the_border_are_outside_in_graphs_of_others(dtype):
    centres = ((np.arange(50) + 0.5) / 50).astype(dtype)
    nodes = [
        helper.make_node("Greater", ["x", "low"], ["above"], name="above"),
        helper.make_node("Less", ["x", "high"], ["below"], name="below"),
        helper.make_node("And", ["above", "below"], ["inside"]),
        helper.make_node("Greater", ["x", "half"], ["right"], name="right"),
    ]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    constants = {"low": 0.01, "high": 1 - 0.01, "half": 0.5}
    g = helper.make_graph(
        nodes,
        "border",
        [helper.make_tensor_value_info("x", kind, [50])],
        [helper.make_tensor_value_info(name, TensorProto.BOOL, [50]) for name in ("inside", "right")],
        [numpy_helper.from_array(np.array(value, dtype), name) for name, value in constants.items()],
    )
    model = helper.make_model(g, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plain = run_graph(model.SerializeToString(), {"x": centres})
    changes = for_typed_parser(model)
    assert changes["border"] == 2
    onnx.checker.check_model(model, full_check=True)
    if dtype == np.float32:  # which alone tells the border from beside it
        nearly = np.nextafter(centres, dtype(0.5))  # as a runtime may divide
        for x in (centres, nearly):
            got = run_graph(model.SerializeToString(), {"x": x})
            np.testing.assert_array_equal(got["inside"], plain["inside"])
            assert not got["inside"][[0, -1]].any() and got["inside"][1:-1].all()
    np.testing.assert_array_equal(run_graph(model.SerializeToString(), {"x": centres})["right"], plain["right"])
