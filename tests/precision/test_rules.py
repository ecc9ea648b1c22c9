"""Types of a graph: rules, casts, fills and sizes, on graphs made by hand and on tiny models."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")

from onnx import TensorProto, helper, numpy_helper
from precision_graphs import SPEC, images, model_of, node, pixel_model

from detrt import graph
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.errors import GateError, GraphError
from detrt.graph.emulate_low_precision import emulate
from detrt.graph.lower_msda import lower_msda
from detrt.graph.opset import set_opset
from detrt.graph.view import GraphView, element_types
from detrt.precision import PrecisionConfig, parse_budget
from detrt.precision.apply import apply_precision
from detrt.precision.cast import bf16_bits, retype
from detrt.precision.proof import check_fraction, count_macs, mac_fractions
from detrt.precision.rules import Rules

F16, F32, BF16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16
FAMILIES = ("detr", "rt_detr_v2", "deformable_detr", "d_fine", "yolos")


def typed(model, precision="fp16", **choices):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    done = retype(copy, Rules(GraphView.typed(copy), precision, **choices), precision)
    onnx.checker.check_model(copy, full_check=True)
    return copy, done


def kinds_by_node(model):
    kinds = element_types(model)
    return {n.name: kinds[n.output[0]] for n in model.graph.node}


def test_layers_are_low_and_coordinates_are_not():
    model, done = typed(pixel_model())
    kinds = kinds_by_node(model)
    low = ("/backbone/stem/Conv", "/encoder/layers.0/fc1/MatMul", "/class_head/MatMul", "/box_head/MatMul")
    assert {kinds[name] for name in low} == {F16}
    assert kinds["/encoder/layers.0/norm/LayerNormalization"] == F16
    # Raw pixels are scaled, and boxes are refined, in FP32.
    assert {kinds[name] for name in ("/Mul", "/box_head/Add", "/box_head/Sigmoid")} == {F32}
    assert {t.name: t.data_type for t in model.graph.initializer}["half"] == F32
    outputs = {o.name: o.type.tensor_type.elem_type for o in model.graph.output}
    assert outputs == {"logits": F32, "pred_boxes": F32}
    assert done.casts == 3  # pixels down, class scores up, box offsets up


@pytest.mark.parametrize("kind", ("Conv", "ConvTranspose"))
def test_a_bias_of_small_numbers_keeps_no_layer_in_fp32(kind):
    nodes = [
        node("Cast", ["pixel_values"], ["x"], name="/Cast", to=F32),
        node(kind, ["x", "w", "b"], ["logits"], name="/layer"),
        node("Identity", ["logits"], ["pred_boxes"], name="/Identity"),
    ]
    weights = {"w": np.ones((3, 3, 1, 1), np.float32), "b": np.full(3, 1e-6, np.float32)}
    outputs = [(n, F32, ["batch", 3, 8, 8]) for n in ("logits", "pred_boxes")]
    model = model_of(nodes, weights, outputs=outputs, inputs=[("pixel_values", TensorProto.UINT8, ["batch", 3, 8, 8])], spec=None)
    reasons = typed(model)[1].fp32_reasons
    assert "constant" not in reasons.get("/layer", "")
    weights["w"] *= 1e-6  # a product of such numbers would be gone
    model = model_of(nodes, weights, outputs=outputs, inputs=[("pixel_values", TensorProto.UINT8, ["batch", 3, 8, 8])], spec=None)
    assert "constant" in typed(model)[1].fp32_reasons["/layer"]


def test_bf16_leaves_transposed_convolutions_in_fp32():
    """TensorRT's compiler has none in BF16."""
    nodes = [
        node("Cast", ["pixel_values"], ["x"], name="/Cast", to=F32),
        node("Conv", ["x", "w"], ["small"], name="/body/Conv"),
        node("ConvTranspose", ["small", "v"], ["wide"], name="/up/ConvTranspose", strides=[2, 2]),
        node("Conv", ["wide", "w"], ["logits"], name="/head/Conv"),
        node("Identity", ["logits"], ["pred_boxes"], name="/Identity"),
    ]
    weights = {"w": np.ones((3, 3, 1, 1), np.float32), "v": np.ones((3, 3, 2, 2), np.float32)}
    outputs = [(n, F32, ["batch", 3, 16, 16]) for n in ("logits", "pred_boxes")]
    model = model_of(nodes, weights, outputs=outputs, inputs=[("pixel_values", TensorProto.UINT8, ["batch", 3, 8, 8])], spec=None)
    for precision, expected in (("bf16", F32), ("fp16", F16)):
        copy, _ = typed(model, precision)
        kinds = kinds_by_node(copy)
        assert kinds["/up/ConvTranspose"] == expected and kinds["/body/Conv"] in (F16, BF16)


def test_bf16_needs_opset_22_and_rounds_to_even():
    model, _ = typed(pixel_model(), "bf16")
    assert model.opset_import[0].version == 22
    assert kinds_by_node(model)["/backbone/stem/Conv"] == BF16
    exact = np.array([1.0, 1.00390625, 1.01171875, -3.4e38, np.inf], np.float32)
    back = (bf16_bits(exact).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(back[:3], np.array([1.0, 1.0, 1.015625], np.float32))
    assert np.isinf(back[4])


def test_a_mask_of_finfo_min_stays_finite():
    lowest = np.float32(np.finfo(np.float32).min)
    nodes = [
        node("Cast", ["pixel_mask"], ["keep"], name="/Cast", to=TensorProto.BOOL),
        node("Where", ["keep", "zero", "lowest"], ["bias"], name="/mask/Where"),
        node("Cast", ["x"], ["xf"], name="/x/Cast", to=F32),
        node("Transpose", ["xf"], ["xt"], name="/attn/Transpose", perm=[0, 2, 1]),
        node("MatMul", ["xf", "xt"], ["scores"], name="/attn/MatMul"),
        node("Add", ["scores", "bias"], ["masked"], name="/attn/Add"),
        node("Softmax", ["masked"], ["weights"], name="/attn/Softmax", axis=-1),
        node("MatMul", ["weights", "xf"], ["y"], name="/attn/MatMul_1"),
    ]
    inputs = [("pixel_mask", TensorProto.INT64, [1, 1, 6]), ("x", TensorProto.UINT8, [1, 6, 8])]
    constants = {"zero": np.float32(0), "lowest": lowest}
    model = model_of(nodes, constants, [("y", F32, [1, 6, 8])], inputs, spec=None)
    for precision in ("fp16", "bf16"):
        low, done = typed(model, precision)
        assert done.fills == 1
        fills = [numpy_helper.to_array(t) for t in low.graph.initializer if t.data_type == F16]
        assert all(np.isfinite(a.astype(np.float32)).all() for a in fills)
        rng = np.random.default_rng(0)
        # Every key masked: a row of -inf would be NaN.
        feeds = {
            "pixel_mask": np.zeros((1, 1, 6), np.int64),
            "x": rng.integers(0, 3, (1, 6, 8), dtype=np.uint8),
        }
        session = onnxruntime.InferenceSession(emulate(low).SerializeToString(), providers=["CPUExecutionProvider"])
        assert np.isfinite(session.run(None, feeds)[0]).all()


def test_an_output_that_is_also_read_in_fp32_has_one_cast():
    """The masks of EoMT: an output of the last block, and compared with zero, which is done in FP32."""
    nodes = [
        node("Cast", ["pixel_values"], ["p"], name="/Cast", to=F32),
        node("Reshape", ["p", "rows"], ["tokens"], name="/Reshape"),
        node("MatMul", ["tokens", "w"], ["masks"], name="/mask/MatMul"),
        node("Greater", ["masks", "zero"], ["inside"], name="/Greater"),
        node("Cast", ["inside"], ["weights"], name="/Cast_1", to=F32),
        node("MatMul", ["weights", "v"], ["pred_boxes"], name="/box/MatMul"),
        node("MatMul", ["masks", "v"], ["logits"], name="/class/MatMul"),
    ]
    constants = {"rows": np.array([0, 16, 48], np.int64), "w": np.ones((48, 8), np.float32) / 1e4,
                 "v": np.ones((8, 4), np.float32), "zero": np.float32(0)}  # fmt: skip
    outputs = [("masks", F32, [1, 16, 8]), ("pred_boxes", F32, [1, 16, 4]), ("logits", F32, [1, 16, 4])]
    low, _ = typed(model_of(nodes, constants, outputs))
    casts = [n for n in low.graph.node if n.op_type == "Cast" and n.input[0] == "masks/fp16"]
    assert [list(n.output) for n in casts] == [["masks"]]
    readers = {n.name: list(n.input) for n in low.graph.node}
    assert readers["/Greater"][0] == "masks" and readers["/class/MatMul"][0] == "masks/fp16"
    names = [n.name for n in low.graph.node]
    assert len(names) == len(set(names))
    onnxruntime.InferenceSession(low.SerializeToString(), providers=["CPUExecutionProvider"])


def test_infinite_anchors_survive_in_fp32():
    nodes = [
        node("Cast", ["pixel_values"], ["p"], name="/Cast", to=F32),
        node("Reshape", ["p", "rows"], ["tokens"], name="/Reshape"),
        node("MatMul", ["tokens", "w"], ["delta"], name="/box/MatMul"),
        node("Add", ["delta", "anchors"], ["moved"], name="/box/Add"),
        node("Sigmoid", ["moved"], ["pred_boxes"], name="/box/Sigmoid"),
        node("MatMul", ["tokens", "c"], ["logits"], name="/class/MatMul"),
    ]
    anchors = np.zeros((16, 4), np.float32)
    anchors[3] = np.inf
    anchors[5] = np.finfo(np.float32).max
    constants = {"rows": np.array([0, 16, 48], np.int64), "w": np.ones((48, 4), np.float32) / 1e4,
                 "c": np.ones((48, 8), np.float32) / 1e4, "anchors": anchors}  # fmt: skip
    low, done = typed(model_of(nodes, constants))
    kept = {t.name: numpy_helper.to_array(t) for t in low.graph.initializer}["anchors"]
    np.testing.assert_array_equal(kept, anchors)
    assert done.fills == 0 and kinds_by_node(low)["/box/Add"] == F32
    boxes = OnnxSession(low.SerializeToString(), SPEC).run({"pixel_values": np.zeros((1, 3, 16, 16), np.uint8)})["pred_boxes"]
    assert boxes[0, 3].tolist() == boxes[0, 5].tolist() == [1.0] * 4


@pytest.mark.parametrize("precision", ("fp16", "bf16"))
@pytest.mark.parametrize("name", FAMILIES)
def test_no_cast_is_wasted(name, precision, exported):
    model = graph.load(exported(name).path)
    low, done = typed(model, precision)
    made = {output: n for n in low.graph.node for output in n.output}
    floats = {F16, BF16, F32}
    kinds = element_types(low)
    casts = [n for n in low.graph.node if n.op_type == "Cast"]
    calls = Counter((n.input[0], n.attribute[0].i) for n in casts)
    assert [key for key, count in calls.items() if count > 1] == []
    for cast in casts:
        source, target = kinds[cast.input[0]], cast.attribute[0].i
        assert source != target, cast.name
        before = made.get(cast.input[0])
        if source in floats and target in floats:  # no chain of two float casts
            assert before is None or before.op_type != "Cast" or kinds[before.input[0]] not in floats, cast.name
    largest = max(low.graph.initializer, key=lambda t: len(t.raw_data))
    assert largest.data_type == (F16 if precision == "fp16" else BF16)
    assert {n.op_type for n in low.graph.node if n.name in done.fp32_reasons}.isdisjoint({"Conv"})


def test_positions_orders_and_box_arithmetic_stay_fp32(exported):
    low, _ = typed(graph.load(exported("rt_detr_v2").path))
    kinds = element_types(low)
    for n in low.graph.node:
        if n.op_type in ("Floor", "TopK", "Log", "Sin", "Cos", "ReduceMean", "Pow"):
            assert kinds[n.input[0]] in (F32, TensorProto.DOUBLE), n.name
        if n.op_type == "Cast" and n.attribute[0].i == TensorProto.INT64:
            assert kinds[n.input[0]] not in (F16, BF16), n.name
        if n.op_type in ("Conv", "Softmax"):
            assert kinds[n.output[0]] == F16, n.name


@pytest.mark.parametrize("precision", ("fp16", "bf16"))
@pytest.mark.parametrize("name", ("rt_detr_v2", "deformable_detr"))
def test_comparisons_are_computed_in_fp32(name, precision, exported):
    low, _ = typed(graph.load(exported(name).path), precision)
    kinds = element_types(low)
    compared = [n for n in low.graph.node if n.op_type in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")]
    assert compared
    assert [n.name for n in compared if {kinds[i] for i in n.input} & {F16, BF16}] == []


def test_a_sample_at_the_border_of_a_wide_level_is_exact_in_bf16():
    """BF16 holds integers to 256: with operands in BF16, a corner outside a wider level counted as inside it."""
    side = 480
    attributes = {"heads": 1, "head_dim": 4, "points_per_level": [1], "discrete": 0}
    inputs = ["value", "shapes", "locations", "weights"]
    attention = node("MSDeformAttn", inputs, ["y"], name="/attn", domain="detrt", **attributes)
    sides = {"value": [1, side, 1, 4], "locations": [1, 1, 1, 1, 2], "weights": [1, 1, 1, 1], "y": [1, 1, 4]}
    value, locations, weights, y = (helper.make_tensor_value_info(name, F32, sides[name]) for name in sides)
    shapes = numpy_helper.from_array(np.array([[1, side]], np.int64), "shapes")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("detrt", 1)]
    sampled = helper.make_model(
        helper.make_graph([attention], "g", [value, locations, weights], [y], [shapes]), opset_imports=opsets, ir_version=8
    )
    lower_msda(sampled, "gather")
    low, _ = typed(sampled, "bf16")
    feeds = {
        "value": np.full((1, side, 1, 4), 8.0, np.float32),
        "locations": np.array([(side + 0.25) / side, 0.5], np.float32).reshape(1, 1, 1, 1, 2),  # 0.75 of it lies outside
        "weights": np.ones((1, 1, 1, 1), np.float32),
    }
    session = onnxruntime.InferenceSession(emulate(low).SerializeToString(), providers=["CPUExecutionProvider"])
    got = session.run(["y"], feeds)[0]
    np.testing.assert_allclose(got, np.full((1, 1, 4), 2.0), atol=0.05)


def test_what_the_caller_keeps_is_kept_and_spelling_mistakes_are_named(tmp_path):
    low, done = typed(pixel_model(), patterns=("encoder.layers.0",))
    kinds = kinds_by_node(low)
    assert kinds["/encoder/layers.0/fc1/MatMul"] == F32 and kinds["/backbone/body/Conv"] == F16
    assert done.fp32_reasons["/encoder/layers.0/fc1/MatMul"] == "matches `keep_fp32`"
    from detrt.precision.stage import convert_file

    graph.save(pixel_model(), tmp_path / "m.onnx")
    with pytest.raises(GraphError, match=r"`keep_fp32=decoder` matches no layer.*backbone"):
        convert_file(tmp_path / "m.onnx", SPEC, PrecisionConfig("fp16", keep_fp32=("decoder",)))


def test_half_of_the_file(exported):
    path = exported("detr").path
    model = graph.load(path)
    low, report = apply_precision(model, graph.read_spec(path), PrecisionConfig("fp16"))
    assert low.ByteSize() < 0.56 * model.ByteSize()  # nodes and their names do not shrink
    weights, halves = (sum(len(t.raw_data) for t in m.graph.initializer) for m in (model, low))
    assert halves < 0.51 * weights
    assert report.fractions.of("fp16") >= 0.98 and any("overflow" in w for w in report.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("opset", (18, 19, 22))
def test_raising_the_opset_changes_nothing(opset, exported):
    report = exported("d_fine", msda="gridsample")
    model = graph.load(report.path)
    from detrt.precision.apply import blank_feeds

    want = OnnxSession(model.SerializeToString()).run(blank_feeds(report.spec))
    set_opset(model, opset)
    onnx.checker.check_model(model, full_check=True)
    got = OnnxSession(model.SerializeToString()).run(blank_feeds(report.spec))
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5)


def test_an_overflow_is_found_by_the_scan_and_only_by_it():
    model = pixel_model(ffn_scale=4e4)
    exact = OnnxSession(model.SerializeToString(), SPEC)
    feeds = {"pixel_values": np.stack([p.transpose(2, 0, 1) for p in images()])}
    want = exact.run(feeds)
    blind, report = apply_precision(model, SPEC, PrecisionConfig("fp16", min_fraction=0.0))
    got = OnnxSession(emulate(blind).SerializeToString(), SPEC).run(feeds)
    assert not np.isfinite(got["logits"]).all()
    seen, report = apply_precision(model, SPEC, PrecisionConfig("fp16", min_fraction=0.0), images())
    for name in ("fc1/MatMul", "Relu", "fc2/MatMul"):
        assert report.fp32_reasons[f"/encoder/layers.0/{name}"].startswith("overflow: values up to"), name
    assert "/backbone/body/Conv" not in report.fp32_reasons
    got = OnnxSession(emulate(seen).SerializeToString(), SPEC).run(feeds)
    for name, array in want.items():
        assert np.abs(got[name] - array).max() < 2e-2 * np.abs(array).max()
    rows = {name: row.to_dict() for name, row in report.ranges.items()}
    assert rows["inner"]["absmax"] > 65504 and rows["inner"]["node"] == "/encoder/layers.0/fc1/MatMul"
    assert rows["tokens"]["p50"] <= rows["tokens"]["p99.9"] <= rows["tokens"]["absmax"] < 100


def test_operations_are_counted_by_type():
    model = pixel_model()
    counts = count_macs(model, {"pixel_values": np.zeros((2, 3, 16, 16), np.uint8)})
    assert counts["/backbone/stem/Conv"] == 2 * 16 * 32 * 3 * 4 * 4
    assert counts["/encoder/layers.0/fc1/MatMul"] == 2 * 16 * 32 * 128
    low, _ = typed(model, patterns=("backbone",))
    share = mac_fractions(low, counts)
    stem = counts["/backbone/stem/Conv"] + counts["/backbone/body/Conv"]
    assert share.of("fp32") == pytest.approx(stem / sum(counts.values()))
    with pytest.raises(GateError, match=r"only .* in fp16 \(90% required\).*/backbone/stem/Conv \(fp32\)"):
        check_fraction(share, PrecisionConfig("fp16"))
    check_fraction(share, PrecisionConfig("fp16", min_fraction=0.2))
    with pytest.raises(GateError, match="fp32` was requested, but the graph also computes in .*fp16"):
        check_fraction(share, PrecisionConfig("fp32"))
    with pytest.raises(GraphError, match="already has 16-bit tensors"):
        apply_precision(low, SPEC, PrecisionConfig("fp16"))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"precision": "half"}, "`precision` must be one of fp32, tf32"),
        ({"precision": "auto", "calibration": "x"}, "needs `budget`"),
        ({"precision": "fp16", "budget": ("ap", 1.0)}, "belongs to `precision=auto`"),
        (
            {"precision": "auto", "calibration": "x", "budget": ("mAP", 1.0)},
            "kind of `budget` must be one of ap, drift",
        ),
        ({"precision": "fp16", "min_fraction": 2.0}, "`min_fraction` must be a number from 0 to 1"),
        ({"precision": "int8", "calibration": "x", "method": "kl"}, "`method` must be one of"),
        ({"precision": "fp8", "calibration": "x", "method": "entropy"}, "which FP8 does not have; choose `method=mse`"),
        (
            {"precision": "auto", "low": "fp8", "budget": ("drift", 0.1), "calibration": "x", "method": "entropy"},
            "which FP8 does not have",
        ),
    ],
)
def test_choices_are_refused_at_once(choices, message):
    with pytest.raises(GraphError, match=message):
        PrecisionConfig(**choices)


@pytest.mark.parametrize(
    ("precision", "message"), [("int8", "needs images"), ("fp8", "needs images"), ("auto", "needs `calibration"), ("fp16", "")]
)
def test_images_are_asked_for_where_they_are_needed(precision, message):
    """By who knows what is built: `test_what_a_target_lacks_is_said_before_images_are_asked_for`."""
    config = PrecisionConfig(precision, budget=("drift", 0.1) if precision == "auto" else None)
    with pytest.raises(GraphError, match=message) if message else contextlib.nullcontext():
        config.check_images()
    replace(config, calibration="x").check_images()


def test_budget_text():
    assert parse_budget("ap=0.1") == ("ap", 0.1)
    with pytest.raises(GraphError, match="ap=POINTS"):
        parse_budget("0.1")
