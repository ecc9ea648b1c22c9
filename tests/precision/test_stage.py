"""Every precision as a bundle: it runs, it builds for the GPUs that have the type, and it is what it says."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from engine_graphs import rtx
from PIL import Image
from precision_graphs import SPEC, images, pixel_model

from detrt import files, graph
from detrt.backends.building import BuildPlan
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.backends.tensorrt import EngineConfig, build_engine
from detrt.backends.tensorrt.building import EngineBuilder, check_capability, check_engine
from detrt.backends.tensorrt.kernels import WIDENING
from detrt.bundle import Bundle, EngineFacts
from detrt.errors import EngineError, GateError, GraphError, ImageError, OutputError
from detrt.evaluation.parity import verify
from detrt.export import ExportConfig, export_onnx
from detrt.graph.emulate_low_precision import emulate
from detrt.graph.unsigned import drop_result_pairs
from detrt.graph.view import GraphView, attribute, element_types, graph_precision
from detrt.models.load_options import LoadOptions
from detrt.pipeline import build
from detrt.precision import PrecisionConfig, quantize
from detrt.precision.apply import apply_precision, blank_feeds, calibrate
from detrt.precision.calibrate import find_images, threshold
from detrt.precision.proof import count_macs
from detrt.precision.quantize import (
    exclude_halves,
    fp8_bits,
    plan_quantization,
    round_to_precision,
    scale_axis,
    stages,
    weight_scales,
)
from detrt.precision.rules import Rules
from detrt.precision.search import Search, blocks_of, plot
from detrt.precision.stage import convert_file, export_converted
from detrt.spec import Precision

QUICK = ("rt_detr_v2",)  # of a forced comparison; the others take 20 to 90 s
FAMILIES = ("detr", "rt_detr_v2", "deformable_detr", "d_fine", "yolos", "rf_detr-seg")
# DETR's quick builds have the mask of padding; tests/graph/test_lower_msda.py builds deformable attention.
SLOW_BUILDS = [
    pytest.param(name, precision, marks=pytest.mark.slow)
    for name, precision in (
        ("deformable_detr", "fp16"),
        ("detr", "bf16"),
        ("rt_detr_v2", "fp16"),
        ("rt_detr_v2", "int8"),
        ("yolos", "fp16"),
        ("detr", "int8"),
        ("d_fine", "bf16"),
        ("rt_detr_v2", "fp8"),
        ("rf_detr-seg", "fp16"),
        ("rf_detr-seg", "int8"),
    )
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of three small images with blocks of colour."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(3)
    for index in range(3):
        blocks = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(blocks).resize((160, 128), Image.Resampling.BILINEAR).save(folder / f"{index}.png")
    return folder


def small(spec):
    """The spec with small images: the ranges of a tiny model need no large ones."""
    edges = {"shortest_edge": 128, "longest_edge": 160} if spec.input.resize == "shortest_edge" else {}
    return spec.with_input(height=128, width=160, **edges) if edges or spec.input.dynamic else spec


@pytest.fixture(scope="module")
def low_file(exported, photos, tmp_path_factory):
    """(family, precision) -> path of the typed graph and its report; each made once."""
    folder, made = tmp_path_factory.mktemp("low"), {}

    def make(name, precision):
        if (name, precision) not in made:
            path = exported(name).path
            fraction = 1.0 if precision == "int8" else None
            config = PrecisionConfig(precision, calibration=photos, min_fraction=0.0, quantize_fraction=fraction)
            images = [] if precision == "bf16" else sorted(photos.iterdir())
            with pytest.MonkeyPatch.context() as patch:
                # Tiny models have an eighth of the channels, and no stage of theirs is small.
                patch.setattr(quantize, "CHANNELS_TOGETHER", 4)
                patch.setattr(quantize, "MIN_STAGE", 0.0)
                model, report = apply_precision(graph.load(path), small(graph.read_spec(path)), config, images)
            graph.save(model, folder / f"{name}.{precision}.onnx")
            made[name, precision] = folder / f"{name}.{precision}.onnx", report
        return made[name, precision]

    return make


@rtx
@pytest.mark.parametrize(
    ("name", "precision"),
    [("detr", "fp16"), ("yolos", "int8"), ("detr", "fp8"), *SLOW_BUILDS],
)  # fmt: skip
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_builds_for_every_gpu_that_has_the_type(name, precision, every, low_file, tmp_path):
    """Quick: for the oldest and the newest, since an engine is built for each GPU anew. Slow: for all."""
    path, _ = low_file(name, precision)
    sms = {"fp8": (89, 120)}.get(precision, (80, 86, 89, 120) if every else (80, 120))
    built = build_engine(path, tmp_path / "m.engine", EngineConfig(sms=sms))
    assert built.facts.compute_capabilities == sms
    check_engine(built.facts, Precision(precision))
    assert not [text for text in built.warnings if "scales to fp32" in text]  # which nobody can act on
    with pytest.raises(GateError, match="fp32` was requested, but the engine also has"):
        check_engine(built.facts, Precision.FP32)


def test_an_engine_of_another_precision_is_refused():
    def facts(**types):
        return EngineFacts("tensorrt-rtx", "1", (89,), "", {}, "", layer_types=types)

    with pytest.raises(GateError, match="fp16` was requested, but the engine has no HALF layer"):
        check_engine(facts(FLOAT=9), Precision.FP16)
    with pytest.raises(GateError, match="also has BF16"):
        check_engine(facts(FLOAT=9, HALF=3, BF16=1), Precision.FP16)
    check_engine(facts(FLOAT=9), Precision.FP32)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n not in QUICK else n for n in FAMILIES])
def test_fp16_equals_pytorch_with_forced_selections(name, low_file, exported, tiny, photos, tmp_path):
    """Random weights amplify rounding, each model by its own factor. So the yardstick is the FP32 graph with
    nothing rounded but its weights: with FP16 arithmetic the error may be a few times that, not more."""
    path, _ = low_file(name, "fp16")
    images = sorted(photos.iterdir())[:2]
    model = graph.load(exported(name).path)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            value = onnx.numpy_helper.to_array(tensor)
            round_to_precision = np.clip(value, -65504, 65504).astype(np.float16).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(round_to_precision, tensor.name))
    graph.save(model, tmp_path / "weights.onnx")
    yardstick = verify(tiny(name), tmp_path / "weights.onnx", images)
    report = verify(tiny(name), path, images)
    assert report.tensors and 0 < report.worst_tensor < 5 * yardstick.worst_tensor


def test_detr_with_masks_quantises_the_layers_and_not_the_mask(low_file):
    """The write-ups fail here: a calibrator that meets the boolean Where of the attention mask gives up."""
    path, report = low_file("detr", "int8")
    model = graph.load(path)
    made = {output: n for n in model.graph.node for output in n.output}
    kinds = element_types(model)
    assert any(n.op_type == "Where" for n in model.graph.node)
    readers = [n for n in model.graph.node if any(i in made and made[i].op_type == "DequantizeLinear" for i in n.input)]
    layers = [n for n in readers if n.op_type != "Add"]
    assert {n.op_type for n in layers} <= {"Conv", "MatMul", "Gemm"} and len(layers) == report.quantized > 10
    assert all("/backbone/" in n.name for n in readers if n.op_type == "Add"), "more than shortcuts of convolutions"
    stored = {i for n in model.graph.node if n.op_type == "DequantizeLinear" for i in (n.input[0], n.input[2])}
    eight_bits = {t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8 and t.dims}
    assert eight_bits and eight_bits <= stored  # no quantised constant outside a DequantizeLinear
    scales = {n.input[1] for n in model.graph.node if n.op_type.endswith("Linear")}
    assert {kinds[s] for s in scales} == {onnx.TensorProto.FLOAT16}
    assert next(e.version for e in model.opset_import) == 19
    session = OnnxSession(path)
    height, width = session.spec.input.size_hw
    mask = np.ones((2, height, width), np.int64)
    mask[1, :, width // 2 :] = 0
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, height, width), dtype=np.uint8)
    outputs = session.run({"pixel_values": pixels, "pixel_mask": mask})
    assert all(np.isfinite(array).all() for array in outputs.values())


@pytest.mark.parametrize("name", ("detr", "rt_detr_v2", "deformable_detr"))
def test_heads_and_deformable_attention_are_not_quantised(name, low_file):
    _, report = low_file(name, "int8")
    reasons = dict(report.excluded)
    heads = [n for n in reasons if "bbox" in n or "class" in n or "score_head" in n or n.startswith("/layers.")]
    assert heads and all("output" in reasons[n] or "coordinates" in reasons[n] for n in heads)
    if name != "detr":
        text = " ".join(reasons.values())
        assert "samples from it" in text and "weights of deformable attention" in text
        offsets = [n for n in reasons if "sampling_offsets" in n]
        assert offsets and all("output, an order or a position" in reasons[n] for n in offsets)
        assert any("value_proj" in n for n in reasons)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "output_proj", "qkv")


@pytest.mark.parametrize("name", ("detr", "rt_detr_v2", "deformable_detr"))
def test_int8_for_tensorrt_leaves_attentions_whole(name, low_file, exported):
    """TensorRT 11 computes an INT8 output projection behind an FP16 attention wrongly; the names are those of transformers."""

    def projections(names):
        return [n for n in names if any(f"/{part}/" in n for part in PROJECTIONS)]

    model = graph.load(low_file(name, "int8")[0])
    made = {output: n for n in model.graph.node for output in n.output}
    quantised = {n.name for n in model.graph.node if any(i in made and made[i].op_type == "DequantizeLinear" for i in n.input)}
    assert quantised and not projections(quantised)
    view = GraphView.typed(graph.load(exported(name).path))
    rules = Rules(view, Precision.FP16)
    assert projections(plan_quantization(view, rules, Precision.INT8, fuses=False).activations)
    for precision in ("fp8", "int8"):
        config = PrecisionConfig(precision, calibration="x", qdq_placement="cpu" if precision == "int8" else None)
        assert not config.fuses


def test_what_is_added_to_an_int8_convolution_is_int8(low_file):
    """A ResNet's blocks: TensorRT adds the shortcut inside the kernel of the last convolution only where it is INT8."""
    path, report = low_file("rt_detr_v2", "int8")
    view = GraphView(graph.load(path))
    blocks = [n for n in view.nodes if n.op_type == "Add" and "/backbone/" in n.name and "/stages." in n.name]
    found = []
    for block in blocks:
        producers = [view.producer[name] for name in block.input]
        low = [view.producer[one.input[0]].op_type == "DequantizeLinear" for one in producers if one.op_type == "Conv"]
        if any(low):
            found.append(sorted(one.op_type for one in producers))
    assert len(found) >= 3 and all(kinds == ["Conv", "DequantizeLinear"] for kinds in found), found
    assert report.quantized


def test_the_layers_of_an_mlp_are_quantised_together(exported):
    """An INT8 matmul with a GELU before an FP16 layer gives NaN in TensorRT 10.16 and 11.3."""
    view = GraphView.typed(graph.load(exported("yolos").path))
    plan = plan_quantization(view, Rules(view, Precision.FP16), Precision.INT8, fuses=True)
    firsts = [n for n in plan.activations if "/intermediate/dense/" in n]
    seconds = {n: n.replace("/intermediate/dense/", "/output/dense/") for n in firsts}
    exclude_halves(view, Rules(view, Precision.FP16), plan)
    assert firsts and {*firsts, *seconds.values()} == set(plan.activations)
    rules = Rules(view, Precision.FP16, ("vit.encoder.layer.0.output",))
    kept = plan_quantization(view, rules, Precision.INT8, fuses=True)
    exclude_halves(view, rules, kept)
    assert set(plan.activations) - set(kept.activations) == {firsts[0], seconds[firsts[0]]}
    assert "MLP" in kept.excluded[firsts[0]]


def test_int8_for_tensorrt_takes_whole_stages(exported, monkeypatch):
    """Between INT8 and FP16 TensorRT converts whole tensors: no layer inside a stage of a backbone stays in 16 bits, nor are there islands."""
    path = exported("rt_detr_v2").path
    view = GraphView.typed(graph.load(path))
    counts = count_macs(graph.load(path), blank_feeds(graph.read_spec(path)))

    def groups(together, least):
        monkeypatch.setattr(quantize, "CHANNELS_TOGETHER", together)
        monkeypatch.setattr(quantize, "MIN_STAGE", least)
        plan = plan_quantization(view, Rules(view, Precision.FP16), Precision.INT8, fuses=True)
        return stages(view, plan, counts), plan

    every, plan = groups(4, 0.0)
    assert sorted(name for group in every for name in group) == sorted(plan.activations)
    strided = {node.name for node in view.nodes if node.op_type == "Conv" and max(attribute(node, "strides", [1])) > 1}
    for stage in range(4):
        members = [n for n in plan.activations if f"/backbone/model/encoder/stages.{stage}/" in n]
        ends = [n for n in members if "/layer.2/" in n or "/layer.1/" in n]  # what follows the convolution with a stride
        found = {number for number, group in enumerate(every) for name in ends if name in group}
        assert ends and len(found) == 1, (stage, found)
    first = next(n for n in strided if "/stages.1/" in n and n in plan.activations)
    zeroth = next(group for group in every if any("/stages.0/" in name for name in group))
    assert first not in zeroth, "a convolution with a stride begins another stage"

    assert "on its own" in plan.excluded["/model/enc_output/enc_output.0/MatMul"], (
        "a matmul joined the convolutions in front of it"
    )

    fewer, plan = groups(4, 0.02)
    work = sum(counts.values())
    assert fewer and all(sum(counts[name] for name in group) >= 0.02 * work for group in fewer)
    assert "less than 2% of the work" in " ".join(plan.excluded.values())
    none, plan = groups(1024, 0.0)
    assert not none and not plan.activations and "no multiple of 1024" in " ".join(plan.excluded.values())


@pytest.mark.parametrize("precision", ("int8", "fp8"))
def test_quantised_values_are_those_of_the_formula(precision):
    config = PrecisionConfig(precision, calibration="x", min_fraction=0.0)
    model, report = apply_precision(pixel_model(), SPEC, config, images())
    assert report.fractions.of(precision) > 0.7
    assert set(report.excluded) >= {"/backbone/stem/Conv", "/class_head/MatMul", "/box_head/MatMul"}
    feeds = {"pixel_values": np.stack([p.transpose(2, 0, 1) for p in images()])}
    want = OnnxSession(pixel_model().SerializeToString(), SPEC).run(feeds)
    got = OnnxSession(emulate(model).SerializeToString(), SPEC).run(feeds)
    for name, array in want.items():
        assert np.abs(got[name] - array).max() < 0.15 * np.abs(array).max()


def test_int8_for_a_cpu_has_integer_kernels_in_onnx_runtime(tmp_path):
    """Beside FP32, unsigned, and with a pair around the result of a convolution, which OpenVINO's graph leaves out."""
    import onnxruntime

    config = PrecisionConfig("int8", calibration="x", min_fraction=0.0, qdq_placement="cpu", quantize_fraction=1.0)
    model, report = apply_precision(pixel_model(), SPEC, config, images())
    assert report.fractions.of("int8") > 0.7 and graph_precision(GraphView.typed(model)) == "int8"
    assert onnx.TensorProto.FLOAT16 not in GraphView.typed(model).types.values()
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    zeros = {n.input[0]: constants[n.input[2]] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    assert {zero.dtype for zero in zeros.values()} == {np.dtype(np.uint8)}
    assert (zeros["grid_relu"], zeros["normed"]) == (0, 128), "no value behind a ReLU is negative"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kernels = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert "QLinearConv" in kernels and "Conv" in kernels, "the first convolution has 3 channels and stays FP32"
    feeds = {"pixel_values": np.stack([p.transpose(2, 0, 1) for p in images()])}
    want = OnnxSession(pixel_model().SerializeToString(), SPEC).run(feeds)
    for removed in (1, 0):
        got = OnnxSession(graph.with_spec(model, SPEC).SerializeToString(), SPEC).run(feeds)
        for name, array in want.items():
            assert np.abs(got[name] - array).max() < 0.15 * np.abs(array).max()
        assert drop_result_pairs(model) == removed
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == len(zeros) - 1


def test_fp8_bits_are_those_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.concatenate([np.linspace(-448, 448, 4001), np.logspace(-6, 2, 999), [0.0, -0.0]]).astype(np.float32)
    np.testing.assert_array_equal(fp8_bits(values), values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def test_scales_are_one_a_channel_and_clip_nothing():
    weight = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    scales = weight_scales(weight, 1, Precision.INT8)
    assert scales.shape == (16,) and scales.dtype == np.float16
    assert (np.abs(weight) / scales.astype(np.float64) <= 127).all()


@pytest.mark.parametrize("axis", (0, None))
def test_fp8_weights_get_the_scale_that_rounds_them_best(axis):
    weight = np.random.default_rng(5).normal(size=(32, 64)).astype(np.float32)
    weight[0] /= 256 if axis is None else 8  # a small channel is rounded as well as the others, with one scale too
    others = (0, 1) if axis is None else 1
    least = np.abs(weight).max(others, keepdims=True) / 448

    def rounded(scale):
        return round_to_precision(weight / scale, Precision.FP8) * scale

    def error(scale):
        return ((rounded(scale) - weight) ** 2).sum(others)

    found = weight_scales(weight, axis, Precision.FP8)
    assert found.shape == (() if axis is None else (32,)) and found.dtype == np.float16
    scale = found.astype(np.float32).reshape(-1, 1)
    assert (least <= scale).all() and (scale < 2.01 * least).all()  # nothing is clipped
    candidates = np.stack([error(least * 2 ** (step / 8)) for step in range(8)])
    assert error(scale).sum() <= 1.02 * candidates.min(0).sum()
    assert error(scale).sum() < 0.97 * candidates[0].sum()
    assert np.linalg.norm(rounded(scale)[0] - weight[0]) < 0.04 * np.linalg.norm(weight[0])


def test_convolutions_alone_have_fp8_scales_of_channels():
    """With scales of channels TensorRT-RTX overflows in matmuls, and with one scale it is wrong in convolutions."""
    layers = [
        onnx.helper.make_node("Conv", ["x", "w"], ["y"]),
        onnx.helper.make_node("MatMul", ["x", "w"], ["y"]),
        onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ]
    assert [scale_axis(layer, Precision.FP8) for layer in layers] == [0, None, None]
    assert [scale_axis(layer, Precision.INT8) for layer in layers] == [0, 1, 0]


@rtx
def test_tensorrt_rtx_scales_fp8_products_in_fp32(tmp_path):
    """With scales of channels it writes the sums of the FP8 values, up to 448 * 448 * inputs, in FP16, and scales them afterwards."""
    config = PrecisionConfig("fp8", calibration="x", quantize_fraction=1.0, min_fraction=0.0)
    model, report = apply_precision(pixel_model(), SPEC, config, images())
    graph.save(graph.with_spec(model, SPEC), tmp_path / "m.onnx")
    engine = tmp_path / "m.engine"
    built = build_engine(tmp_path / "m.onnx", engine, EngineConfig(sms=(89,)))
    assert report.quantized == 3 and built.facts.kernels[WIDENING] == 1  # a convolution; two matmuls
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    scaled = {node.output[0]: constants[node.input[1]] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    products = [
        np.float32(scaled[node.input[0]]) * np.float32(scaled[node.input[1]])
        for node in model.graph.node
        if node.op_type == "MatMul" and set(node.input) <= set(scaled)
    ]
    assert products and all(one.tobytes() in engine.read_bytes() for one in products)


@pytest.mark.parametrize("method", ("entropy", "percentile", "mse", "minmax"))
def test_calibration_is_deterministic_and_clips_outliers(method):
    config = PrecisionConfig("int8", calibration="x", method=method, percentile=99.0)
    first, second = (calibrate(pixel_model(), SPEC, config, images()).thresholds for _ in range(2))
    assert first and first == second
    rng = np.random.default_rng(0)
    counts = np.bincount((np.abs(rng.normal(size=200_000)) / 50 * 2048).astype(int), minlength=2048)
    counts[-1] += 1  # 200 000 values around 1, and one of 50
    top = threshold(counts, 50.0, method, Precision.INT8, 99.9)
    assert top == 50.0 if method == "minmax" else 1.0 < top < (40.0 if method == "mse" else 10.0)


def test_int8_for_a_cpu_reads_what_it_quantizes_alone(exported, monkeypatch):
    """A large model has ten times as many values, and each gigabyte of them is one more run of the whole graph."""
    from detrt.precision import apply

    report, counts = exported("rt_detr_v2"), []
    scan = apply.scan

    def counted(*arguments):
        found = scan(*arguments)
        counts.append(len({id(one) for one in found.values()}))
        return found

    monkeypatch.setattr(apply, "scan", counted)
    config = PrecisionConfig("int8", calibration="x", min_fraction=0.0, qdq_placement="cpu")
    found = calibrate(graph.load(report.path), report.spec, config, images())
    monkeypatch.setattr(apply, "scan", lambda *arguments: counted(*arguments[:5], None))
    whole = calibrate(graph.load(report.path), report.spec, config, images())
    # Other outputs, other fusions: the last bits differ.
    assert found.thresholds == pytest.approx(whole.thresholds, rel=1e-5) and found.positive == whole.positive
    assert len(found.thresholds) > 20
    assert set(found.ranges) >= {name for name in found.thresholds if name in whole.ranges}
    assert counts[0] * 3 < counts[1]


def test_gpus_without_the_type_are_refused():
    rtx_default, ada = EngineConfig(), EngineConfig(sms=(89, 120))
    with pytest.raises(EngineError, match=r"fp8 does not run on compute capability 80, 86.*`sms=89,120,121`"):
        check_capability(Precision.FP8, [rtx_default])
    with pytest.raises(EngineError, match=r"bf16 does not run on compute capability 75.*`precision=fp16`$"):
        check_capability(Precision.BF16, [EngineConfig(sms=(75,))])
    with pytest.raises(EngineError, match=r"fp32 does not run on compute capability 75.*`sms=86`, or `precision=fp16`$"):
        EngineBuilder().check(
            [EngineConfig(sms=(75, 86))], BuildPlan("x", ExportConfig(), PrecisionConfig(), LoadOptions(), False)
        )
    check_capability(Precision.FP8, [ada])
    check_capability(Precision.FP16, [rtx_default])
    with pytest.raises(EngineError, match=r"weights of matmuls only.* `precision=fp8` .* or fp16, or `targets=tensorrt`$"):
        check_capability(Precision.INT8, [ada])


def test_calibration_images_are_found(tmp_path, photos):
    names, coco = find_images(photos, 2)
    assert [p.name for p in names] == ["0.png", "1.png"] and coco is None
    (tmp_path / "annotations").mkdir()
    (tmp_path / "val2017").symlink_to(photos)
    file = tmp_path / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps({"images": [{"id": 1, "file_name": "2.png"}], "annotations": [], "categories": []}))
    names, coco = find_images(file, 9)
    assert names == [tmp_path / "val2017" / "2.png"] and coco == file
    for name in ("/data/upload/1/2.png", "val2017\\2.png"):  # as tools write it
        file.write_text(json.dumps({"images": [{"id": 1, "file_name": name}], "categories": [{"id": 1, "name": "cat"}]}))
        for form in (file, tmp_path):
            names, coco = find_images(form, 9)
            assert names == [tmp_path / "val2017" / "2.png"] and coco == form
    (tmp_path / "data.yaml").write_text("val: val2017\nnames: [cat]\n")
    for form in (tmp_path, tmp_path / "data.yaml"):
        names, coco = find_images(form, 9)
        assert [p.name for p in names] == ["0.png", "1.png", "2.png"][: len(names)] and len(names) >= 2 and coco == form
    (tmp_path / "empty").mkdir()
    for place, message in (
        (tmp_path / "no", "no calibration folder"),
        (tmp_path / "empty", "has no images"),
        (photos / "0.png", "is one image; give the folder that it is in, `calibration="),
    ):
        with pytest.raises(ImageError, match=message):
            find_images(place, 9)
    file.write_text("{")
    with pytest.raises(ImageError, match="COCO file .* cannot be read as JSON"):
        find_images(file, 9)


def test_a_bundle_records_its_precision(exported, photos, tmp_path):
    config = PrecisionConfig("fp16", calibration=photos)
    made = exported("yolos").path
    exact = graph.load(made)
    graph.save(graph.with_spec(exact, small(graph.read_spec(made))), tmp_path / "small.onnx")
    build(tmp_path / "small.onnx", tmp_path / "b", precision=config)
    bundle = Bundle.open(tmp_path / "b")
    assert {f.kind: f.path for f in bundle.files} == {"onnx": "model.onnx", "ranges": "ranges.json"}
    record = bundle.provenance.options["precision"]
    assert record["precision"] == "fp16" and record["share"]["shares"]["fp16"] >= 0.98
    ranges = json.loads(bundle.checked_path(bundle.of_kind("ranges")[0]).read_text())
    assert ranges["images"] == 3 and all(row["absmax"] >= 0 for row in ranges["tensors"].values())
    with pytest.raises(GateError, match=r"of the MatMul and Conv operations are in fp16"):
        build(tmp_path / "small.onnx", tmp_path / "c", precision=replace(config, keep_fp32=("vit.encoder",)))
    assert not (tmp_path / "c").exists()


@dataclass(frozen=True)
class Export:
    report: object


def test_a_failed_precision_leaves_the_files_as_they_were(tmp_path, tiny):
    """Not an FP32 graph under the name of the one that was requested."""
    path = tmp_path / "out" / "m.onnx"
    path.parent.mkdir()
    path.write_bytes(b"what was there")

    def full(target):
        raise files.output_error(target, OSError(errno.ENOSPC, "full"))

    with pytest.raises(OutputError, match=f"'{path}': the disk is full"):
        export_converted(full, path, PrecisionConfig("fp16"), lambda *_: None)

    def export(target):
        return Export(export_onnx(tiny("yolos"), target, ExportConfig(height=64, width=96, check=False)))

    fp16 = PrecisionConfig("fp16", min_fraction=0.0, keep_fp32=("no.such.layer",))
    with pytest.raises(GraphError, match=r"no\.such\.layer"):
        export_converted(export, path, fp16, lambda *_: None)
    assert path.read_bytes() == b"what was there" and [file.name for file in path.parent.iterdir()] == ["m.onnx"]
    exported, converted = export_converted(export, path, PrecisionConfig("fp16", min_fraction=0.0), lambda *_: None)
    assert exported.report.path == path and converted is not None and converted.precision == "fp16"
    assert graph_precision(GraphView.typed(graph.load(path))) == "fp16"
    assert [file.name for file in path.parent.iterdir()] == ["m.onnx"]


def test_overflow_is_looked_for_without_images_of_the_callers(tmp_path):
    path = tmp_path / "model.onnx"
    graph.save(pixel_model(ffn_scale=3e4), path)
    report = convert_file(path, SPEC, PrecisionConfig("fp16", min_fraction=0.0))
    assert "overflow" in report.fp32_reasons["/encoder/layers.0/fc1/MatMul"] and report.images == 2
    assert any("drawn scenes only" in warning for warning in report.warnings)
    with OnnxSession(path) as session:
        assert np.isfinite(session.run({"pixel_values": np.full((1, 3, 16, 16), 200, np.uint8)})["logits"]).all()


def test_the_search_keeps_the_block_that_overflows_and_goes_on_after_a_stop(tmp_path):
    model = pixel_model(ffn_scale=4e4)
    assert blocks_of(model) == ["backbone.stem", "backbone.body", "encoder.layers.0.fc1", "encoder.layers.0.fc2",
                                "class_head", "box_head"]  # fmt: skip
    state = tmp_path / "state.json"
    config = PrecisionConfig("auto", calibration="x", budget=("drift", 0.02), state=state)
    low = config.without_search()
    blind = replace(calibrate(model, SPEC, low, images()), fp16_failures={})  # the scan would have kept it already
    result = Search(model, SPEC, config, images(), blind).run()
    assert result.all_low.loss > 0.02 >= result.result.loss
    assert result.left_out and all(b.startswith("encoder.layers.0") for b in result.left_out) and result.runs > 6
    assert "no times" in result.verdict and result.result.ms is None
    again = Search(model, SPEC, config, images(), blind).run()
    assert again.runs == 0 and again.left_out == result.left_out and not again.warnings
    other = Search(model, SPEC, replace(config, keep_fp32=("backbone.stem",)), images(), blind)
    assert "measurements of another model, other images or choices" in other.warnings[0] and not other.measurements
    assert plot(result).startswith("<svg") and "encoder.layers.0.fc1" in plot(result)
    for text, words in (
        ("{", "resume file .* cannot be read as JSON"),
        ('{"schema": 1, "spec": {}}', "is no resume file of a search; give another `state`"),  # a manifest, which was replaced
        ("[]", "is no resume file of a search"),
    ):
        state.write_text(text)
        with pytest.raises(GraphError, match=words):
            Search(model, SPEC, config, images(), blind)
    with pytest.raises(GateError, match="with no block in fp16, drift still changes .* `precision=fp32`"):
        Search(model, SPEC, replace(config, budget=("drift", 0.0), state=None), images(), blind).run()


def test_a_search_in_int8_runs():
    """`--precision auto --low int8` ended with the refusal of `--low` beside another precision."""
    model = pixel_model()
    config = PrecisionConfig("auto", low="int8", calibration="x", budget=("drift", 100.0), min_fraction=0.0)
    low = config.without_search()
    assert (low.precision, low.low, low.budget, low.calibration) == ("int8", "fp16", None, config.calibration)
    result = Search(model, SPEC, config, images(), calibrate(model, SPEC, low, images())).run()
    assert result.left_out == () and result.runs == 1


def test_typed_graphs_are_not_typed_again(low_file):
    path, _ = low_file("yolos", "fp16")
    assert GraphView(graph.load(path)).types
    with pytest.raises(GraphError, match="already has 16-bit tensors"):
        apply_precision(graph.load(path), graph.read_spec(path), PrecisionConfig("bf16"))
