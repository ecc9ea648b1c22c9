"""Parallel convolutions as one, and stacks of which one tensor is read; ONNX Runtime and PyTorch say what is right."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")

from onnx import TensorProto, helper, numpy_helper

from detrt.graph.branches import merge_convolutions, read_past_stacks
from detrt.graph.clean import drop_dead

ort = pytest.importorskip("onnxruntime")
RNG = np.random.default_rng(3)
INFO = helper.make_tensor_value_info


def model_of(nodes, constants, outputs, x=("n", 4, "h", "w")):
    tensors = [numpy_helper.from_array(np.asarray(value, order="C"), name) for name, value in constants.items()]
    graph = helper.make_graph(
        nodes, "g", [INFO("x", TensorProto.FLOAT, x)], [INFO(name, TensorProto.FLOAT, [None] * 4) for name in outputs], tensors
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model, x):
    onnx.checker.check_model(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})


def weight(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def conv(name, kernel, pads, bias=True, groups=1, **attributes):
    """(node, its constants): 4 channels to 4 of the input `x`."""
    constants = {f"{name}w": weight(4, 4 // groups, *kernel)} | ({f"{name}b": weight(4)} if bias else {})
    if groups != 1:
        attributes["group"] = groups
    return helper.make_node("Conv", ["x", *constants], [name], name=f"/{name}/Conv", pads=pads, **attributes), constants


def both(first, second, swapped=False):
    (a, of_a), (b, of_b) = first, second
    add = helper.make_node("Add", ["b", "a"] if swapped else ["a", "b"], ["y"])
    return model_of([a, b, add], of_a | of_b, ["y"])


ONE = ((1, 1), [0, 0, 0, 0])
THREE = ((3, 3), [1, 1, 1, 1])
MERGED = {
    "RepVGG": both(conv("a", *THREE), conv("b", *ONE)),
    "the small one first": both(conv("a", *ONE), conv("b", *THREE), swapped=True),
    "equal kernels": both(conv("a", *THREE), conv("b", *THREE)),
    "without a bias": both(conv("a", *THREE, bias=False), conv("b", *ONE, bias=False)),
    "one bias": both(conv("a", *THREE), conv("b", *ONE, bias=False)),
    "strides": both(conv("a", *THREE, strides=[2, 2]), conv("b", *ONE, strides=[2, 2])),
    "groups": both(conv("a", *THREE, groups=2), conv("b", *ONE, groups=2)),
    "depthwise": both(conv("a", *THREE, groups=4), conv("b", *ONE, groups=4)),
    "a row and a square": both(conv("a", (3, 3), [1, 1, 1, 1]), conv("b", (1, 3), [0, 1, 0, 1])),
    "no centre": both(conv("a", (3, 3), [2, 1, 0, 1]), conv("b", *ONE)),
    "dilations": both(conv("a", (3, 3), [2, 2, 2, 2], dilations=[2, 2]), conv("b", (1, 1), [0] * 4, dilations=[2, 2])),
    "defaults written out": both(conv("a", *THREE, strides=[1, 1], dilations=[1, 1]), conv("b", *ONE)),
    "5 and 3": both(conv("a", (5, 5), [2, 2, 2, 2]), conv("b", *THREE)),
}


@pytest.mark.parametrize("case", MERGED)
def test_parallel_convolutions_become_one(case):
    model, x = MERGED[case], weight(2, 4, 9, 7)
    before = run(model, x)[0]
    assert merge_convolutions(model) == 1
    drop_dead(model)
    assert [node.op_type for node in model.graph.node] == ["Conv"]
    np.testing.assert_allclose(run(model, x)[0], before, rtol=1e-5, atol=2e-5)


def _read_twice():
    (a, of_a), (b, of_b) = conv("a", *THREE), conv("b", *ONE)
    return model_of(
        [a, b, helper.make_node("Add", ["a", "b"], ["y"]), helper.make_node("Relu", ["b"], ["z"])], of_a | of_b, ["y", "z"]
    )


def _an_output():
    (a, of_a), (b, of_b) = conv("a", *THREE), conv("b", *ONE)
    return model_of([a, b, helper.make_node("Add", ["a", "b"], ["y"])], of_a | of_b, ["y", "b"])


def _of_other_inputs():
    (a, of_a), (b, of_b) = conv("a", *THREE), conv("b", *ONE)
    b.input[0] = "r"
    return model_of(
        [helper.make_node("Relu", ["x"], ["r"]), a, b, helper.make_node("Add", ["a", "b"], ["y"])], of_a | of_b, ["y"]
    )


def _computed_weights():
    (a, of_a), (b, of_b) = conv("a", *THREE), conv("b", *ONE)
    b.input[1] = "computed"
    nodes = [helper.make_node("Neg", ["bw"], ["computed"]), a, b, helper.make_node("Add", ["a", "b"], ["y"])]
    return model_of(nodes, of_a | of_b, ["y"])


def _to_itself():
    a, of_a = conv("a", *THREE)
    return model_of([a, helper.make_node("Add", ["a", "a"], ["y"])], of_a, ["y"])


APART = {
    "another reader": _read_twice(),
    "an output of the model": _an_output(),
    "different inputs": _of_other_inputs(),
    "computed weights": _computed_weights(),
    "one convolution twice": _to_itself(),
    "different dilations": both(conv("a", (3, 3), [2, 2, 2, 2], dilations=[2, 2]), conv("b", *THREE)),
    "different groups": both(conv("a", *THREE, groups=2), conv("b", *ONE)),
    "different strides of equal size": both(
        conv("a", *THREE, strides=[2, 2]), conv("b", (1, 1), [0, 0, 0, 0], strides=[2, 2], dilations=[3, 3])
    ),
}


@pytest.mark.parametrize("case", APART)
def test_other_convolutions_stay(case):
    model = APART[case]
    before, kept = run(model, x := weight(1, 4, 9, 7)), model.SerializeToString()
    assert merge_convolutions(model) == 0
    assert model.SerializeToString() == kept
    for got, want in zip(run(model, x), before, strict=True):
        np.testing.assert_array_equal(got, want)


def stack(index, output="y", axis=1, then=True, parts=3):
    """`parts` results of x, stacked, of which one is read."""
    heads = [helper.make_node("Mul", ["x", f"f{i}"], [f"h{i}"]) for i in range(parts)]
    wide = [helper.make_node("Unsqueeze", [f"h{i}", "axes"], [f"u{i}"]) for i in range(parts)]
    nodes = [
        *heads,
        *wide,
        helper.make_node("Concat", [f"u{i}" for i in range(parts)], ["s"], axis=axis),
        helper.make_node("Gather", ["s", "index"], [output], axis=axis),
        *([helper.make_node("Relu", [output], ["y"])] if then else []),
    ]
    constants = {f"f{i}": np.float32(i + 1.5) for i in range(parts)}
    return nodes, constants | {"axes": np.array([axis]), "index": np.array(index)}


@pytest.mark.parametrize("index", [-1, 0, 1, 2, -3])
@pytest.mark.parametrize("then", [True, False], ids=["inside", "an output"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_tensor_that_is_read_is_not_stacked(index, then, axis):
    model = model_of(*stack(index, "g" if then else "y", axis, then), ["y"])
    before = run(model, x := weight(2, 4, 3, 5))[0]
    assert read_past_stacks(model) == 1
    drop_dead(model)
    assert [node.op_type for node in model.graph.node] == ["Mul", *(["Relu"] if then else [])]
    np.testing.assert_array_equal(run(model, x)[0], before)


def test_two_readers_of_one_tensor():
    """As an output and inside, and of the same stack."""
    nodes, constants = stack(-1, "y", then=False)
    nodes += [helper.make_node("Gather", ["s", "index"], ["g"], axis=1), helper.make_node("Relu", ["g"], ["z"])]
    model = model_of(nodes, constants, ["y", "z"])
    before = run(model, x := weight(2, 4, 3, 5))
    assert read_past_stacks(model) == 2
    drop_dead(model)
    assert [node.op_type for node in model.graph.node] == ["Mul", "Relu"]
    for got, want in zip(run(model, x), before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_list_of_indices_and_another_axis_stay():
    nodes, constants = stack(-1, "g")
    several = model_of(nodes, constants | {"index": np.array([0, 1])}, ["y"])
    nodes, constants = stack(1, "g")
    nodes[-2].attribute[0].i = 3
    for model in (several, model_of(nodes, constants, ["y"])):
        before = run(model, x := weight(2, 4, 3, 5))[0]
        assert read_past_stacks(model) == 0
        np.testing.assert_array_equal(run(model, x)[0], before)
