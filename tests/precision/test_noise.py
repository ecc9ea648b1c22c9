"""Noise and offset of quantised layers: the right numbers, the right layers left out, the right biases changed."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")

from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from precision_graphs import SPEC, images, model_of, node, pixel_model

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.graph.emulate_low_precision import emulate
from detrt.graph.view import GraphView
from detrt.precision import PrecisionConfig
from detrt.precision import noise as noise_module
from detrt.precision.apply import apply_precision, calibrate
from detrt.precision.calibrate import run_tensors
from detrt.precision.noise import NOISY_REASON, LayerNoise, correct_biases, exclude_noisy, measure
from detrt.precision.quantize import QuantPlan, activation_scale, insert_qdq, plan_quantization, round_to_precision, weight_scales
from detrt.precision.rules import Rules
from detrt.spec import Precision

FC1, FC2, BODY = "/encoder/layers.0/fc1/MatMul", "/encoder/layers.0/fc2/MatMul", "/backbone/body/Conv"


def values_of(model, tensor):
    """A tensor of a graph on all images."""
    found = []
    run_tensors(model, SPEC, images(), [tensor], lambda _, array: found.append(np.array(array)))
    return np.concatenate(found)


@pytest.mark.parametrize("block", (noise_module.BLOCK, 20))
@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
def test_noise_and_offset_are_those_of_the_formula(low, block, monkeypatch):
    monkeypatch.setattr(noise_module, "BLOCK", block)
    model = pixel_model()
    plan = QuantPlan({FC1: "normed"})
    found = measure(model, SPEC, images(), plan, {"normed": 2.5}, low)[FC1]
    weight = next(numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "w1")
    x = values_of(model, "normed").reshape(-1, 32).astype(np.float16).astype(np.float64)  # as the graph has them
    scale = float(activation_scale(2.5, low))
    if low == Precision.INT8:
        columns = weight_scales(weight, 1, low).astype(np.float64)
        rounded = round_to_precision(weight / columns, low) * columns
    else:
        assert found.weight is not None
        rounded = found.weight[0].T.astype(np.float64)
    error = round_to_precision(x / scale, low) * scale @ rounded - x @ weight
    np.testing.assert_allclose(found.offset, error.mean(0), atol=1e-5)
    assert found.noise == pytest.approx(error.var(0).sum() / (x @ weight).var(0).sum(), rel=1e-3)


@pytest.mark.parametrize("value", (0.0, 0.1, -1e30))
def test_the_spread_of_blocks_is_that_of_all_values(value):
    rng = np.random.default_rng(4)
    values = (rng.normal(size=(1000, 5)) * [1e-3, 1, 1e3, 1, 1] + [1e3, 0, 0, 0, -7]).astype(np.float32)
    values[:, 3] = value  # constant: no variance at all, also not of rounding
    spread = noise_module._Spread()
    for start in range(0, 1000, 64):
        spread.add(values[start : start + 64])
        spread.add(values[:0])
    np.testing.assert_allclose(spread.mean, values.mean(0, dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(spread.squares / spread.count, values.var(0, dtype=np.float64), rtol=1e-9)
    assert spread.squares[3] == 0


def fed(monkeypatch, arrays):
    """`measure` of FC1 on the arrays instead of images."""

    def run(model, spec, images, names, visit, *_):
        for one in images:
            visit("normed", one)

    monkeypatch.setattr(noise_module, "run_tensors", run)
    return lambda low: measure(pixel_model(), SPEC, arrays, QuantPlan({FC1: "normed"}), {"normed": 2.5}, low).get(FC1)


def test_int8_keeps_no_sample(monkeypatch):
    peaks = []
    for count in (5, 50):
        arrays = [np.random.default_rng(i).normal(size=(1, noise_module.SAMPLES, 32)).astype(np.float32) for i in range(count)]
        found = fed(monkeypatch, arrays)
        tracemalloc.start()
        found(Precision.INT8)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
def test_layers_without_a_sample_have_no_noise_and_nan_does_not_spread(low, monkeypatch):
    empty, row = np.zeros((1, 0, 32), np.float32), np.ones((1, 3, 32), np.float32)
    row[0, 1] = np.arange(32)
    bad = row.copy()
    bad[0, 2, 5], bad[0, 2, 6] = np.nan, np.inf
    assert fed(monkeypatch, [empty, empty])(low) is None
    for arrays in ([row, empty], [bad, row]):
        found = fed(monkeypatch, arrays)(low)
        assert np.isfinite(found.noise) and np.isfinite(found.offset).all()


def masked_model(masked: int):
    """A linear layer whose input is zero at the first of 64 positions of an image, and a LayerNorm that reads its result: bias there."""
    rng = np.random.default_rng(5)
    nodes = [
        node("Cast", ["pixel_values"], ["raw"], name="/Cast", to=TensorProto.FLOAT),
        node("Conv", ["raw", "stem"], ["grid"], name="/stem/Conv", strides=[2, 2]),
        node("Reshape", ["grid", "rows"], ["flat"], name="/Reshape"),
        node("Transpose", ["flat"], ["tokens"], name="/Transpose", perm=[0, 2, 1]),
        node("Mul", ["tokens", "valid"], ["memory"], name="/Mask"),
        node("MatMul", ["memory", "w"], ["product"], name="/enc_output/MatMul"),
        node("Add", ["product", "b"], ["made"], name="/enc_output/Add"),
        node("LayerNormalization", ["made", "gain", "shift"], ["normed"], name="/enc_output/Norm"),
        node("MatMul", ["normed", "w2"], ["inner"], name="/head/MatMul"),
        node("Relu", ["inner"], ["active"], name="/head/Relu"),
        node("MatMul", ["active", "wc"], ["logits"], name="/class_head/MatMul"),
        node("MatMul", ["active", "wb"], ["pred_boxes"], name="/box_head/MatMul"),
    ]
    constants = {
        "stem": (rng.normal(size=(32, 3, 2, 2)) / 100 + 0.002).astype(np.float32),
        "rows": np.array([0, 32, -1], np.int64),
        "valid": (np.arange(64) >= masked).astype(np.float32).reshape(1, 64, 1),
        "w": rng.normal(size=(32, 32)).astype(np.float32),
        "b": rng.normal(0, 0.05, 32).astype(np.float32),
        "gain": np.ones(32, np.float32),
        "shift": np.zeros(32, np.float32),
        "w2": rng.normal(size=(32, 32)).astype(np.float32),
        "wc": rng.normal(size=(32, 8)).astype(np.float32),
        "wb": rng.normal(size=(32, 4)).astype(np.float32),
    }
    outputs = [("logits", TensorProto.FLOAT, ["batch", 64, 8]), ("pred_boxes", TensorProto.FLOAT, ["batch", 64, 4])]
    return model_of(nodes, constants, outputs=outputs), constants["b"].astype(np.float64)


@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
@pytest.mark.parametrize("masked", (1, 12))
def test_masked_positions_keep_the_result_of_the_bias_alone(masked, low):
    """Corrected for the mean error, the bias would be another vector there, and the LayerNorm would give it the same length."""
    model, bias = masked_model(masked)
    config = PrecisionConfig(
        low, calibration="x", min_fraction=0.0, quantize_fraction=1.0, qdq_placement="cpu" if low == Precision.INT8 else None
    )
    typed, report = apply_precision(model, SPEC, config, images())
    assert "/enc_output/MatMul" not in report.excluded
    exact, found = (values_of(one, "normed") for one in (model, emulate(typed)))
    want = (bias - bias.mean()) / np.sqrt(bias.var() + 1e-5)
    for position in range(masked):
        np.testing.assert_allclose(found[:, position], np.tile(want, (len(images()), 1)), atol=5e-3)  # the bias is FP16
    assert np.sqrt(((found - exact)[:, masked:] ** 2).mean()) < 0.06


@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
def test_a_few_positions_of_zeros_are_no_mask(low, monkeypatch):
    arrays = [np.random.default_rng(i).normal(2, 1, size=(1, 192, 32)).astype(np.float32) for i in range(4)]
    arrays[0][0, :3] = 0
    assert fed(monkeypatch, arrays)(low).offset.any()
    arrays[0][0, :4] = 0
    assert not fed(monkeypatch, arrays)(low).offset.any()


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((1, 1), {}),
        ((3, 3), {"pads": [1, 1, 1, 1]}),
        ((3, 2), {"pads": [0, 1, 2, 1], "strides": [2, 3]}),
        ((2, 3), {"dilations": [2, 3], "pads": [3, 3, 3, 3], "strides": [1, 2]}),
    ],
)
def test_sampled_positions_give_the_convolution(kernel, attributes):
    rng = np.random.default_rng(2)
    weight = rng.normal(size=(8, 3, *kernel)).astype(np.float32)
    conv = node("Conv", ["pixels", "w"], ["grid"], name="/c/Conv", **attributes)
    model = model_of(
        [node("Cast", ["pixel_values"], ["pixels"], name="/Cast", to=TensorProto.FLOAT), conv],
        {"w": weight},
        outputs=[("grid", TensorProto.FLOAT, ["n", "c", "h", "w"])],
        spec=None,
    )
    layer = noise_module._layer(noise_module.GraphView.typed(model), model.graph.node[1])
    pixels = np.stack([p.transpose(2, 0, 1) for p in images()]).astype(np.float32)
    got = noise_module._sample(layer, pixels, 10**6, rng).astype(np.float32) @ layer.weight.T
    want = ReferenceEvaluator(model).run(None, {"pixel_values": pixels.astype(np.uint8)})[0]  # (images, 8, h, w)
    np.testing.assert_allclose(got, want.transpose(0, 2, 3, 1).reshape(-1, 8), rtol=1e-4, atol=1e-2)


def test_a_convolution_over_one_axis_and_a_scaled_product_stay_out():
    nodes = [
        node("Cast", ["pixel_values"], ["pixels"], name="/Cast", to=TensorProto.FLOAT),
        node("Reshape", ["pixels", "lines"], ["line"], name="/Reshape"),
        node("Conv", ["line", "along"], ["wide"], name="/along/Conv"),
        node("Reshape", ["wide", "rows"], ["row"], name="/Rows"),
        node("Gemm", ["row", "w"], ["made"], name="/scaled/Gemm", alpha=0.5),
        node("Gemm", ["made", "w"], ["same"], name="/plain/Gemm"),
        node("LayerNormalization", ["same", "ones"], ["logits"], name="/Norm"),
        node("Identity", ["same"], ["pred_boxes"], name="/Identity"),
    ]
    weights = {
        "lines": np.array([-1, 16, 48], np.int64),
        "rows": np.array([-1, 16], np.int64),
        "along": np.ones((16, 16, 1), np.float32),
        "w": np.eye(16, dtype=np.float32),
        "ones": np.ones(16, np.float32),
    }
    model = model_of(nodes, weights, outputs=[(n, TensorProto.FLOAT, ["rows", 16]) for n in ("logits", "pred_boxes")], spec=None)
    view = GraphView.typed(model)
    plan = plan_quantization(view, Rules(view, Precision.FP16), Precision.INT8, fuses=False)
    assert {"/along/Conv", "/scaled/Gemm"} <= set(plan.excluded)
    assert "height and width" in plan.excluded["/along/Conv"] and "scaled" in plan.excluded["/scaled/Gemm"]


def test_the_noisiest_layers_for_their_work_stay_out():
    names = "abcd"
    plan = QuantPlan(dict.fromkeys(names, "x"))
    counts = {"a": 40, "b": 20, "c": 20, "d": 10, "not quantised": 10}
    noise = {n: LayerNoise(v, np.zeros(1)) for n, v in zip(names, (0.04, 0.2, 0.002, 0.004), strict=True)}
    alone = [[name] for name in names]
    exclude_noisy(plan, noise, counts, 0.69, alone)
    assert set(plan.activations) == {"a", "c", "d"} and plan.excluded == {"b": NOISY_REASON}
    plan = QuantPlan(dict.fromkeys(names, "x"))
    exclude_noisy(plan, noise, counts, 0.65, alone)  # a is the next, but that would be too much; so is c
    assert set(plan.activations) == {"a", "c", "d"}
    whole = QuantPlan(dict.fromkeys(names, "x"))
    exclude_noisy(whole, noise, counts, 1.0, alone)
    assert set(whole.activations) == set(names)


def test_a_stage_stays_out_as_a_whole():
    names = "abcd"
    counts = {"a": 40, "b": 20, "c": 20, "d": 10, "not quantised": 10}
    noise = {n: LayerNoise(v, np.zeros(1)) for n, v in zip(names, (0.04, 0.2, 0.002, 9.0), strict=True)}
    plan = QuantPlan(dict.fromkeys(names, "x"))
    exclude_noisy(plan, noise, counts, 0.4, [["a"], ["b", "c", "d"]])
    assert set(plan.activations) == {"a"} and set(plan.excluded.values()) == {NOISY_REASON}
    plan = QuantPlan(dict.fromkeys(names, "x"))
    del noise["c"]  # a layer that was not measured
    exclude_noisy(plan, noise, counts, 0.4, [["a"], ["b", "c", "d"]])
    assert set(plan.activations) == {"b", "c", "d"}


@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
def test_the_mean_error_of_a_channel_is_gone(low):
    config = PrecisionConfig(low, calibration="x", min_fraction=0.0, quantize_fraction=1.0)
    model = pixel_model()
    known = calibrate(model, SPEC, config, images())
    assert {BODY, FC1, FC2} <= set(known.noise)
    want = values_of(model, "grid2")

    def mean_error(calibration):
        typed, _ = apply_precision(model, SPEC, config, images(), calibration=calibration)
        found = values_of(emulate(typed), "grid2") - want
        return np.abs(found.mean((0, 2, 3))).mean()

    corrected = mean_error(known)
    known.noise = {name: LayerNoise(one.noise, one.offset * 0) for name, one in known.noise.items()}
    # What is left comes from the FP16 stem in front of it.
    assert corrected < 0.3 * mean_error(known)


def test_a_bias_that_others_read_is_copied_and_products_without_one_stay():
    weight = np.eye(8, dtype=np.float32)
    nodes = [
        node("Cast", ["pixel_values"], ["x"], name="/Cast", to=TensorProto.FLOAT),
        node("MatMul", ["x", "w"], ["a"], name="/a/MatMul"),
        node("Add", ["bias", "a"], ["b"], name="/a/Add"),
        node("MatMul", ["b", "w"], ["c"], name="/c/MatMul"),
        node("Mul", ["c", "bias"], ["logits"], name="/Mul"),
        node("Identity", ["b"], ["pred_boxes"], name="/Identity"),
    ]
    outputs = [(n, TensorProto.FLOAT, ["batch", 3, 8, 8]) for n in ("logits", "pred_boxes")]
    model = model_of(
        nodes,
        {"w": weight, "bias": np.arange(8, dtype=np.float32)},
        outputs=outputs,
        inputs=[("pixel_values", TensorProto.UINT8, ["batch", 3, 8, 8])],
        spec=None,
    )
    plan = QuantPlan({"/a/MatMul": "x", "/c/MatMul": "b"})
    noise = {n: LayerNoise(0.1, np.full(8, 0.5, np.float32)) for n in plan.activations}
    assert correct_biases(model, plan, noise) == 1
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_allclose(values["bias"], np.arange(8))
    add, mul = model.graph.node[2], model.graph.node[4]
    assert list(mul.input) == ["c", "bias"]
    np.testing.assert_allclose(values[add.input[0]], np.arange(8) - 0.5)
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("low", (Precision.INT8, Precision.FP8))
@pytest.mark.parametrize("size", (1e-9, 6e-6, 6e-5))
def test_corrections_below_the_normal_numbers_of_fp16_leave_the_plan_as_it_is(low, size):
    """Layers without a bias get one of numbers that FP16 rounds to zero or to a subnormal one."""
    config = PrecisionConfig(low, calibration="x", min_fraction=0.0, quantize_fraction=1.0)
    model = pixel_model()
    known = calibrate(model, SPEC, config, images())
    known.noise = {name: LayerNoise(one.noise, np.full_like(one.offset, -size)) for name, one in known.noise.items()}
    typed, report = apply_precision(model, SPEC, config, images(), calibration=known)
    assert any("/corrected_bias" in t.name for t in typed.graph.initializer)
    assert report.quantized and "constant" not in " ".join(report.fp32_reasons.values())
    assert np.isfinite(values_of(emulate(typed), "grid2")).all()


def test_quantised_graphs_run_with_corrected_biases():
    config = PrecisionConfig("int8", calibration="x", quantize_fraction=1.0)
    typed, report = apply_precision(pixel_model(), SPEC, config, images())
    assert report.fractions.of("int8") >= 0.7
    assert sum("/corrected_bias" in t.name for t in typed.graph.initializer) >= 1
    feeds = {"pixel_values": np.stack([p.transpose(2, 0, 1) for p in images()])}
    outputs = OnnxSession(typed.SerializeToString(), SPEC).run(feeds)
    assert all(np.isfinite(array).all() for array in outputs.values())


def test_fp8_subtracts_the_mean_of_a_channel_where_it_helps():
    rng = np.random.default_rng(3)
    nodes = [
        node("Cast", ["pixel_values"], ["x"], name="/Cast", to=TensorProto.FLOAT),
        node("Conv", ["x", "spread"], ["wide"], name="/stem/Conv"),
        node("Relu", ["wide"], ["far"], name="/Relu"),
        node("Conv", ["far", "w", "b"], ["made"], name="/body/Conv", pads=[1, 1, 1, 1]),
        node("LayerNormalization", ["made", "ones"], ["logits"], name="/Norm", axis=-3),
        node("Identity", ["made"], ["pred_boxes"], name="/Identity"),
    ]
    weights = {
        "spread": rng.uniform(0.0, 0.01, (16, 3, 1, 1)).astype(np.float32),
        "w": rng.normal(0, 0.1, (16, 16, 3, 3)).astype(np.float32),
        "b": np.zeros(16, np.float32),
        "ones": np.ones((16, 1, 1), np.float32),
    }
    sides = ["batch", 16, "height", "width"]
    model = model_of(nodes, weights, outputs=[(n, TensorProto.FLOAT, sides) for n in ("logits", "pred_boxes")])
    plan = QuantPlan({"/body/Conv": "far"})
    far = values_of(model, "far")
    mean, thresholds = far.mean((0, 2, 3)), {"far": float(far.max())}
    plain = measure(model, SPEC, images(), plan, thresholds, Precision.FP8)["/body/Conv"]
    found = measure(model, SPEC, images(), plan, thresholds, Precision.FP8, means={"far": mean})["/body/Conv"]
    assert plain.centre is None and found.noise < 0.8 * plain.noise
    np.testing.assert_allclose(found.centre, mean, rtol=1e-3)

    want = values_of(model, "made")
    errors = []
    for one in (plain, found):
        low = onnx.ModelProto.FromString(model.SerializeToString())
        correct_biases(low, plan, {"/body/Conv": one})
        centres = {} if one.centre is None else {"/body/Conv": one.centre}
        insert_qdq(low, plan, thresholds, Precision.FP8, centres, weights={"/body/Conv": one.weight})
        errors.append(np.abs(values_of(emulate(low), "made") - want))
    assert errors[1].mean() < 0.9 * errors[0].mean()
    # What is outside of the image is zero before the subtraction, so the border is as exact as the rest.
    assert errors[1][:, :, 0].mean() < 2 * errors[1].mean()


def test_fp8_weights_are_rounded_for_the_inputs_of_their_layer():
    """Less is lost than with each weight at its nearest value, and the graph has these weights, in the layout of each layer."""
    config = PrecisionConfig("fp8", calibration="x", min_fraction=0.0, quantize_fraction=1.0)
    model = pixel_model()
    known = calibrate(model, SPEC, config, images(40))
    want = {name: values_of(model, name) for name in ("grid2", "outer")}

    def errors(calibration):
        typed, _ = apply_precision(model, SPEC, config, images(), calibration=calibration)
        emulated = emulate(typed)
        return typed, {name: float((values_of(emulated, name) - exact).var()) for name, exact in want.items()}

    typed, together = errors(known)
    stored = {tensor.name: numpy_helper.to_array(tensor).astype(np.float32) for tensor in typed.graph.initializer}
    made = {n.name: stored[n.input[0]].T * stored[n.input[1]] for n in typed.graph.node if n.name.endswith("/Weight")}
    np.testing.assert_allclose(made[f"{BODY}/Weight"].reshape(32, 32).T, known.noise[BODY].weight[0], rtol=1e-6)
    np.testing.assert_allclose(made[f"{FC1}/Weight"], known.noise[FC1].weight[0], rtol=1e-6)
    known.noise = {name: LayerNoise(one.noise, one.offset, one.centre, None) for name, one in known.noise.items()}
    nearest = errors(known)[1]
    assert all(together[name] < 0.95 * nearest[name] for name in want), (together, nearest)
