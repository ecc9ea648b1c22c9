"""Multi-scale deformable attention: the op, and its lowerings to standard ONNX operators."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from detrt.backends.onnxruntime.session import optimize_basic
from detrt.backends.tensorrt import EngineConfig, build_engine
from detrt.errors import GraphError
from detrt.graph.lower_msda import BY_LEVEL, lower_msda
from detrt.graph.raise_msda import gather_by_level, raise_msda, sample_grids
from detrt.models.ops.msda import ms_deform_attn
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, int], ...]
    points: tuple[int, ...]
    batch: int = 2
    heads: int = 2
    dim: int = 8
    queries: int = 5
    discrete: bool = False
    spread: float = 1.0  # locations run from 0.5 - spread / 2 to 0.5 + spread / 2


CASES = {
    "three levels": Case(((8, 6), (4, 3), (2, 2)), (4, 4, 4)),
    "one level": Case(((5, 7),), (3,)),
    "one cell": Case(((1, 1), (3, 1)), (2, 2)),
    "uneven points": Case(((6, 9), (3, 5), (2, 3)), (3, 6, 1)),
    "odd head dim": Case(((4, 4), (2, 2)), (2, 2), heads=3, dim=5),
    "one head": Case(((4, 5), (2, 3)), (4, 4), heads=1, dim=7),
    "batch 1": Case(((4, 4), (2, 2)), (4, 4), batch=1),
    "batch 3": Case(((4, 4), (2, 2)), (4, 4), batch=3, queries=1),
    "outside": Case(((6, 4), (3, 2)), (4, 4), spread=2.6),
    "far outside": Case(((6, 4), (3, 2)), (4, 4), spread=2000.0),
    "discrete": Case(((6, 9), (3, 5)), (4, 4), discrete=True),
    "discrete outside": Case(((6, 9), (3, 5)), (4, 2), discrete=True, spread=2.6),
}


def inputs_of(case: Case, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = sum(h * w for h, w in case.shapes)
    total = sum(case.points)
    locations = 0.5 + case.spread * (rng.random((case.batch, case.queries, case.heads, total, 2)) - 0.5)
    weights = rng.random((case.batch, case.queries, case.heads, total))
    return {
        "value": rng.normal(size=(case.batch, tokens, case.heads, case.dim)).astype(np.float32),
        "shapes": np.array(case.shapes, np.int64),
        "locations": locations.astype(np.float32),
        "weights": (weights / weights.sum(-1, keepdims=True)).astype(np.float32),
    }


def by_hand(value, shapes, locations, weights, points, discrete) -> np.ndarray:
    """Equation 3 of arXiv:2010.04159 with loops in float64: no grid_sample, no gather."""
    value, locations, weights = (a.astype(np.float64) for a in (value, locations, weights))
    batch, queries, heads = locations.shape[:3]
    out = np.zeros((batch, queries, heads, value.shape[-1]))
    level_of = [level for level, count in enumerate(points) for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum([h * w for h, w in shapes])])
    for n, q, m in itertools.product(range(batch), range(queries), range(heads)):
        for k, level in enumerate(level_of):
            height, width = shapes[level]
            x, y = locations[n, q, m, k] * (width, height)
            sample = np.zeros(value.shape[-1])
            if discrete:
                column = min(max(int(x + 0.5), 0), width - 1)
                row = min(max(int(y + 0.5), 0), height - 1)
                sample = value[n, starts[level] + row * width + column, m]
            else:
                x, y = x - 0.5, y - 0.5  # cell centres are at half numbers
                for row, column in itertools.product((np.floor(y), np.floor(y) + 1), (np.floor(x), np.floor(x) + 1)):
                    if 0 <= row < height and 0 <= column < width:
                        share = (1 - abs(y - row)) * (1 - abs(x - column))
                        sample = sample + share * value[n, starts[level] + int(row) * width + int(column), m]
            out[n, q, m] += weights[n, q, m, k] * sample
    return out.reshape(batch, queries, -1)


def expected_of(case: Case, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return by_hand(*feeds.values(), case.points, case.discrete)


def graph_of(case: Case, *, constant: bool, opset: int = 17, name: str = "/layer/attn", value_axes=None) -> onnx.ModelProto:
    """One MSDeformAttn node with symbolic batch, tokens and queries."""
    points = sum(case.points)
    inputs = [
        helper.make_tensor_value_info("value", TensorProto.FLOAT, value_axes or ["batch", "tokens", case.heads, case.dim]),
        helper.make_tensor_value_info("locations", TensorProto.FLOAT, ["batch", "queries", case.heads, points, 2]),
        helper.make_tensor_value_info("weights", TensorProto.FLOAT, ["batch", "queries", case.heads, points]),
    ]
    sizes = np.array(case.shapes, np.int64)
    initial = [numpy_helper.from_array(sizes, "shapes")] if constant else []
    if not constant:
        inputs.insert(1, helper.make_tensor_value_info("shapes", TensorProto.INT64, [len(sizes), 2]))
    node = helper.make_node(
        "MSDeformAttn",
        ["value", "shapes", "locations", "weights"],
        ["out"],
        name=name,
        domain="detrt",
        heads=case.heads,
        head_dim=case.dim,
        points_per_level=list(case.points),
        discrete=int(case.discrete),
    )
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", "queries", case.heads * case.dim])
    graph = helper.make_graph([node], "test", inputs, [output], initial)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("detrt", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def run_graph(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return session.run(["out"], {k: v for k, v in feeds.items() if k in names})[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_op_is_the_equation(case):
    feeds = inputs_of(case)
    got = ms_deform_attn(*map(torch.from_numpy, feeds.values()), list(case.points), case.discrete)
    assert got.dtype == torch.float32 and got.is_contiguous()
    np.testing.assert_allclose(got.numpy(), expected_of(case, feeds), atol=TOLERANCE)


def test_op_keeps_float64():
    case = CASES["three levels"]
    feeds = inputs_of(case)
    tensors = [torch.from_numpy(a).double() if a.dtype == np.float32 else torch.from_numpy(a) for a in feeds.values()]
    got = ms_deform_attn(*tensors, list(case.points))
    np.testing.assert_allclose(got.numpy(), expected_of(case, feeds), atol=1e-12)


def test_fake_tensor_has_the_shape_of_the_real_one():
    from torch._subclasses import FakeTensorMode

    case = CASES["odd head dim"]
    real = [torch.from_numpy(a) for a in inputs_of(case).values()]
    expected = ms_deform_attn(*real, list(case.points))
    with FakeTensorMode() as mode:
        got = ms_deform_attn(*(mode.from_tensor(t) for t in real), list(case.points))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    meta = ms_deform_attn(*(t.to("meta") for t in real), list(case.points))
    assert (meta.shape, meta.device.type) == (expected.shape, "meta")


def test_torch_export_keeps_the_op_whole():
    case = CASES["uneven points"]

    class Layer(torch.nn.Module):
        def forward(self, value, shapes, locations, weights):
            return ms_deform_attn(value * 2, shapes, locations, weights, list(case.points)) + 1

    feeds = inputs_of(case)
    tensors = tuple(map(torch.from_numpy, feeds.values()))
    batch = torch.export.Dim("batch")
    axes = ({0: batch}, {}, {0: batch}, {0: batch})
    program = torch.export.export(Layer(), tensors, dynamic_shapes=axes)
    calls = [node for node in program.graph.nodes if "ms_deform_attn" in str(node.target)]
    assert len(calls) == 1
    other = inputs_of(Case(case.shapes, case.points, batch=3), seed=1)
    got = program.module()(*map(torch.from_numpy, other.values()))
    wanted = Layer()(*map(torch.from_numpy, other.values()))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("how", ("gather", "gridsample", BY_LEVEL))
@pytest.mark.parametrize("constant", (True, False), ids=("constant sizes", "dynamic sizes"))
@pytest.mark.parametrize("opset", (17, 20))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_lowering_is_the_equation(case, opset, constant, how):
    model = graph_of(case, constant=constant, opset=opset)
    assert lower_msda(model, how) == 1
    assert {node.domain for node in model.graph.node} == {""}
    assert [entry.domain for entry in model.opset_import] == [""]
    assert all(node.name.startswith("/layer/attn/") for node in model.graph.node)
    feeds = inputs_of(case)
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(case, feeds), atol=TOLERANCE)


@pytest.mark.parametrize("how", ("gather", "gridsample", BY_LEVEL))
def test_dynamic_sizes_are_not_baked(how):
    """One graph, other level sizes, batch and queries than it was made for."""
    model = graph_of(CASES["three levels"], constant=False)
    lower_msda(model, how)
    other = Case(((3, 11), (7, 2), (1, 5)), (4, 4, 4), batch=4, queries=9)
    feeds = inputs_of(other, seed=2)
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(other, feeds), atol=TOLERANCE)


@pytest.mark.parametrize("how", ("gather", "gridsample", BY_LEVEL))
@pytest.mark.parametrize("name", ("", "/same"))
def test_two_nodes_of_one_name_do_not_mix_their_constants(name, how):
    """Different level sizes and heads under equal node names, as hand-made graphs have them."""
    first, second = CASES["odd head dim"], CASES["uneven points"]
    model, other = graph_of(first, constant=True, name=name), graph_of(second, constant=True, name=name)
    rename = {n: f"second_{n}" for n in ("value", "shapes", "locations", "weights", "out")}
    for entry in (*other.graph.input, *other.graph.output, *other.graph.initializer):
        entry.name = rename[entry.name]
    node = other.graph.node[0]
    node.input[:] = [rename[n] for n in node.input]
    node.output[:] = [rename[n] for n in node.output]
    for field in ("node", "input", "output", "initializer"):
        getattr(model.graph, field).extend(getattr(other.graph, field))
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            axis.ClearField("dim_param")
    assert lower_msda(model, how) == 2
    feeds = {**inputs_of(first), **{f"second_{k}": v for k, v in inputs_of(second).items()}}
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(first, inputs_of(first)), atol=TOLERANCE)


def test_level_sizes_may_be_a_constant_node():
    case = CASES["three levels"]
    model = graph_of(case, constant=True)
    constant = helper.make_node("Constant", [], ["shapes"], value=model.graph.initializer[0])
    scalar = helper.make_node("Constant", [], ["unused"], value_float=1.0)
    model.graph.node.insert(0, constant)
    model.graph.node.insert(0, scalar)
    del model.graph.initializer[:]
    lower_msda(model, "gather")
    feeds = inputs_of(case)
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(case, feeds), atol=TOLERANCE)


def test_unknown_lowering_is_named():
    with pytest.raises(GraphError, match="gather.*got 'plugins'"):
        lower_msda(graph_of(CASES["one level"], constant=True), "plugins")


def test_other_number_of_level_sizes_is_named():
    model = graph_of(CASES["three levels"], constant=True)
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([[2, 2]]), "shapes"))
    with pytest.raises(GraphError, match="'/layer/attn' has 3 levels of points but 1 level size"):
        lower_msda(model, "gather")


rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed (the 'rtx' extra)"
)


def build_lowered(case, how, folder, config):
    """The engine of one lowered node with a symbolic batch. The spec only serves the profile."""
    tokens = sum(h * w for h, w in case.shapes)
    model = graph_of(case, constant=True, value_axes=["batch", tokens, case.heads, case.dim])
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == "queries":
                axis.dim_value = case.queries
    lower_msda(model, how)
    path = folder / f"{how}.onnx"
    onnx.save(model, path)
    spec = ModelSpec("test", InputSpec("stretch", 8, 8), DecodeSpec("sigmoid", "topk", 1, 1, 1), {0: "a"})
    return build_engine(path, folder / f"{how}.engine", config, spec)


@rtx
@pytest.mark.parametrize("how", ("gather", "gridsample", BY_LEVEL))
@pytest.mark.parametrize("name", ("uneven points", "discrete"))
def test_tensorrt_rtx_builds_the_lowering(name, how, tmp_path):
    built = build_lowered(CASES[name], how, tmp_path, EngineConfig(batch=(1, 1, 2), optimization_level=0))
    assert built.size > 0 and built.path.is_file()


@rtx
def test_gathers_need_a_third_more_memory_than_gridsample_at_most(tmp_path):
    """Samples that a MatMul sums are all written to memory: 60 times as much here."""
    case = Case(((40, 56), (20, 28), (10, 14)), (4, 4, 4), heads=8, dim=32, queries=1200)
    config = EngineConfig(batch=(1, 1, 4), sms=(89,))
    gather, gridsample = (build_lowered(case, how, tmp_path, config).facts.activation_bytes for how in ("gather", "gridsample"))
    assert gather <= gridsample * 4 / 3 and gridsample > 0


@pytest.mark.parametrize("constant", [False, True], ids=["symbolic", "constant"])
@pytest.mark.parametrize("folded", [False, True], ids=["as written", "folded"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gathers_become_a_node_again(case, constant, folded):
    """What a runtime with a plugin gets: one node with the same attributes, which computes the same."""
    model = graph_of(case, constant=constant)
    lower_msda(model, "gather")
    if folded:
        model = onnx.load_from_string(optimize_basic(model.SerializeToString()))
    before = model.SerializeToString()
    count = raise_msda(model)
    if case.discrete or case.heads == 1:
        # The optimiser drops the addition of the one head's zero; what is not recognised stays as it is.
        assert (count, model.SerializeToString() == before) in ((0, True), (1, False)) and not (case.discrete and count)
        return
    assert count == 1
    (node,) = (node for node in model.graph.node if node.op_type == "MSDeformAttn")
    found = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    assert found == {"heads": case.heads, "head_dim": case.dim, "points_per_level": list(case.points), "discrete": 0}
    assert not [node for node in model.graph.node if node.op_type in ("Floor", "Min", "Equal")], "the gathers are still there"
    feeds = inputs_of(case, seed=5)
    lower_msda(model, "gridsample")
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(case, feeds), atol=TOLERANCE)


@pytest.mark.parametrize(("dim", "expected"), [(8, 1), (16, 1), (17, 0), (32, 0)])
def test_narrow_heads_are_sampled_by_grids_on_a_cpu(dim, expected):
    case = Case(((8, 6), (4, 3)), (4, 2), dim=dim)
    model = graph_of(case, constant=False)
    lower_msda(model, "gather")
    before = model.SerializeToString()
    assert sample_grids(model) == expected
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("GridSample") == 2 * expected and (model.SerializeToString() == before) == (not expected)
    feeds = inputs_of(case, seed=6)
    np.testing.assert_allclose(run_graph(model, feeds), expected_of(case, feeds), atol=TOLERANCE)


def test_changed_arithmetic_is_no_deformable_attention():
    model = graph_of(CASES["three levels"], constant=True)
    lower_msda(model, "gather")
    (node, *_) = (node for node in model.graph.node if node.op_type == "Mul" and "weights" in node.input)
    node.input[list(node.input).index("weights")] = "other"
    model.graph.input.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["batch", "queries", 2, 12]))
    assert raise_msda(model) == 0


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("keeps", [True, False], ids=["mask keeps", "mask drops"])
@pytest.mark.parametrize("name", ["uneven points", "three levels", "batch 1"])
def test_gathers_by_level_have_the_mask_in_the_projection(name, keeps, kind):
    """What TensorRT-RTX gets of an encoder: values are projected and masked in one product, in the types that the graph had."""
    case = CASES[name]
    model = graph_of(case, constant=True)
    lower_msda(model, "gather")
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    rng = np.random.default_rng(3)
    channels = case.heads * case.dim
    weight, bias = rng.normal(size=(6, channels)).astype(dtype) / 4, rng.normal(size=channels).astype(dtype)
    sides = ["projected", "zero"] if keeps else ["zero", "projected"]
    graph = model.graph
    before = [
        helper.make_node("MatMul", ["tokens", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["projected"]),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Where", ["column", *sides], ["masked"], "mask"),
        helper.make_node("Reshape", ["masked", "heads"], ["value" if kind == TensorProto.FLOAT else "low"]),
        *([] if kind == TensorProto.FLOAT else [helper.make_node("Cast", ["low"], ["value"], to=TensorProto.FLOAT)]),
    ]
    nodes = [*before, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), key)
        for key, value in {
            "weight": weight, "bias": bias, "last": np.array([-1]), "zero": np.zeros((), dtype),
            "heads": np.array([0, 0, case.heads, case.dim]),
        }.items()
    )  # fmt: skip
    del graph.input[0]
    graph.input.extend(
        [
            helper.make_tensor_value_info("tokens", kind, ["batch", "tokens", 6]),
            helper.make_tensor_value_info("mask", TensorProto.BOOL, ["batch", "tokens"]),
        ]
    )
    feeds = inputs_of(case)
    tokens = rng.normal(size=(*feeds["value"].shape[:2], 6)).astype(dtype)
    mask = rng.random(tokens.shape[:2]) < 0.7
    values = (tokens.astype(np.float64) @ weight.astype(np.float64) + bias) * (mask if keeps else ~mask)[..., None]
    feeds["value"] = values.reshape(feeds["value"].shape).astype(np.float32)
    expected = expected_of(case, feeds)
    feeds |= {"tokens": tokens, "mask": mask}
    assert gather_by_level(model) == 1
    assert not [node for node in graph.node if node.op_type == "Where"] or kind != TensorProto.FLOAT
    np.testing.assert_allclose(run_graph(model, feeds), expected, atol=TOLERANCE if kind == TensorProto.FLOAT else 2e-2)
