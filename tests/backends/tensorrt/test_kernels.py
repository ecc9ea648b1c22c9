"""The list of kernels that TensorRT-RTX prints, and how many a small model takes: the quality of a graph on a machine without a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from detrt.backends.tensorrt.kernels import ATTENTION, HEAD, WIDENING, Kernel, count, parse

LINE = "Name: {}, LayerType: {}, Inputs: [ {{ Name: a, Dimensions: [1,3], Datatype: {}, Format: x }}], Constants: [ {{ Name: c, Datatype: Int64 }}], Outputs: [ {{ Name: b, Datatype: {}, Format: y }}], TacticName: t, StreamId: 0, Metadata: "
MESSAGE = (
    HEAD
    + "\n"
    + "\n".join(
        LINE.format(*row)
        for row in (
            ("__myl_Cast", "kgen", "UInt8", "Half"),
            ("conv_1", "correlation", "Int8", "Float"),
            ("conv_2", "correlation", "FP8", "Half"),
            ("_gemm_mha_v2_myl0_3", "kgen", "Half", "Half"),
            ("__mye_signal", "signal", "Half", "Half"),
            ("__mye_wait", "wait", "Half", "Half"),
        )
    )
    + "\nBindings:\npixel_values\n"
)

# What D-FINE-S has otherwise than D-FINE-L.
D_FINE_S = {
    "backbone_config": {
        "model_type": "hgnet_v2",
        "out_features": ["stage2", "stage3", "stage4"],
        "hidden_sizes": [64, 256, 512, 1024],
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 64, 256, 512],
        "stage_mid_channels": [16, 32, 64, 128],
        "stage_out_channels": [64, 256, 512, 1024],
        "stage_num_blocks": [1, 1, 2, 1],
        "stage_numb_of_layers": [3, 3, 3, 3],
        "use_learnable_affine_block": True,
    },
    "encoder_in_channels": [256, 512, 1024],
    "decoder_layers": 3,
    "depth_mult": 0.34,
    "hidden_expansion": 0.5,
}


def test_a_list_is_read():
    kernels = parse(MESSAGE)
    assert kernels[0] == Kernel("__myl_Cast", "kgen", ("UInt8",), ("Half",))
    assert count(kernels) == {"all": 4, ATTENTION: 1, WIDENING: 1, "kgen": 2, "correlation": 2}
    assert count(parse("")) == count(parse("no list")) == {}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(an export, a precision) -> the engine of its graph for compute capability 8.9, batch size 1."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    from detrt.backends.tensorrt import EngineConfig, build_engine
    from detrt.data.scenes.scene import draw_scene
    from detrt.graph import io
    from detrt.precision import PrecisionConfig
    from detrt.precision.apply import apply_precision

    def of(report, precision):
        path = tmp_path_factory.mktemp("kernels") / "model.onnx"
        images = [draw_scene(seed).image for seed in range(2)] if precision == "fp8" else []
        config = PrecisionConfig(precision, min_fraction=0.0, calibration="drawn" if images else None)
        typed, _ = apply_precision(io.load(report.path), report.spec, config, images)
        io.save(io.with_spec(typed, report.spec), path)
        height, width = report.spec.input.size_hw
        engine = EngineConfig(sms=(89,), batch=(1, 1, 1), height=(height,) * 3, width=(width,) * 3)
        return build_engine(path, path.with_suffix(".engine"), engine)

    return of


# Measured with TensorRT-RTX 1.7.1.116, and three in a hundred more for other versions: a lost fusion costs more. Heads of tiny models are
# too small for fused attention.
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("rt_detr_v2", 149),
        pytest.param("d_fine", 205, marks=pytest.mark.slow),
        ("detr", 89),
        ("yolos", 41),
        pytest.param("deformable_detr", 152, marks=pytest.mark.slow),
    ],
)
def test_a_graph_takes_no_more_kernels(name, most, compiled, exported):
    found = compiled(exported(name), "fp16").facts.kernels
    assert 0 < found["all"] <= most, found


def test_a_range_of_sizes_takes_no_more_memory_than_its_largest(tmp_path):
    """What pads a map to whole windows: TensorRT-RTX took the range of sizes as the largest padding, at every padding again: 1143 MiB instead of 44."""
    torch = pytest.importorskip("torch", reason="needs the 'export' extra")
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    from onnx_models import CLASSES, QUERIES, make_spec

    from detrt.backends.tensorrt import EngineConfig, build_engine
    from detrt.graph import io
    from detrt.models.layers.swin import Swin

    class Detector(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = Swin(16, (2, 2, 1), (2, 2, 4), 4, (2,), ratio=2)

        def forward(self, pixels):
            tokens = self.backbone(pixels.float())[0].flatten(2).transpose(1, 2)[:, :QUERIES]
            return tokens[..., :CLASSES], tokens[..., :4].sigmoid()

    path = tmp_path / "model.onnx"
    axes = {"pixel_values": {0: "batch", 2: "height", 3: "width"}, "logits": {0: "batch"}, "pred_boxes": {0: "batch"}}
    torch.onnx.export(
        Detector().eval(),
        (torch.zeros(1, 3, 90, 110, dtype=torch.uint8),),
        path,
        dynamo=False,
        opset_version=17,
        input_names=["pixel_values"],
        output_names=["logits", "pred_boxes"],
        dynamic_axes=axes,
    )
    io.save(io.with_spec(io.load(path), make_spec(dynamic=True)), path)
    memory = []
    for sides in ((640, 640, 1024), (1024, 1024, 1024)):
        config = EngineConfig(sms=(89,), batch=(1, 1, 1), height=sides, width=sides)
        memory.append(build_engine(path, tmp_path / f"{sides[0]}.engine", config).facts.activation_bytes)
    assert 0 < memory[0] <= 1.3 * memory[1], memory


@pytest.fixture
def full_size(request, tmp_path):
    """(name of a model, its size) -> its export of that size without a padding mask."""
    from detrt.export import ExportConfig, export_onnx
    from detrt.models.load import load_source
    from detrt.models.load_options import LoadOptions
    from detrt.models.random import build_model, random_models

    def of(name, size):
        if name == "d_fine-s":
            family, model = dict(random_models())["d_fine"]
            module = build_model(family, dataclasses.replace(model, full=D_FINE_S), tiny=False)
            source = dataclasses.replace(load_source("random:d_fine"), module=module)
        elif name == "deimv2-atto":
            folder = request.getfixturevalue("real_data") / "checkpoints/deimv2-atto-coco"
            source = load_source(str(folder), LoadOptions(family="deimv2-upstream"))
        else:
            source = load_source(f"random:{name}")
        choices = ExportConfig(height=size[0], width=size[1], mask=False, check=False)
        return export_onnx(source, tmp_path / "model.onnx", choices)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "size", "most", "attentions", "activations_mib"),
    [
        ("rt_detr_v2", "fp16", (640, 640), 253, 7, 42.2),
        ("d_fine", "fp16", (640, 640), 352, 7, 33.6),
        ("d_fine-s", "fp16", (640, 640), 217, 4, 36.4),
        ("deimv2-atto", "fp32", (320, 320), 158, 0, 14.4),
        ("rf_detr", "fp16", (560, 560), 201, 14, 20.9),
        ("detr", "fp16", (800, 1066), 207, 18, 67.8),
        ("deformable_detr", "fp16", (800, 1066), 311, 6, 89.6),
    ],
)
def test_a_full_size_graph_takes_no_more(name, precision, size, most, attentions, activations_mib, compiled, full_size):
    """Kernels, fused attentions and memory."""
    facts = compiled(full_size(name, size), precision).facts
    assert 0 < facts.kernels["all"] <= 1.03 * most and facts.kernels[ATTENTION] == attentions, facts.kernels
    assert 0 < facts.activation_bytes <= 1.03 * activations_mib * 2**20


@pytest.mark.slow
def test_a_file_for_other_programs_takes_no_more(full_size):
    """What `export --for-tensorrt` writes of Deformable DETR, in FP16 and compiled as it is: 697 MB of activations without."""
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    from detrt.backends.tensorrt.diagnose import activation_bytes
    from detrt.graph import io
    from detrt.graph.dialect import for_typed_parser
    from detrt.precision import PrecisionConfig
    from detrt.precision.apply import apply_precision

    report = full_size("deformable_detr", (800, 1066))
    typed, _ = apply_precision(io.load(report.path), report.spec, PrecisionConfig("fp16", min_fraction=0.0), [])
    assert for_typed_parser(typed)["MatMul"] == 12
    logged = []

    class Log(trt.ILogger):
        def log(self, severity, message):
            logged.append(message)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert trt.OnnxParser(network, log).parse(typed.SerializeToString())
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    for number in range(network.num_inputs):
        shape = [max(1, side) for side in network.get_input(number).shape]
        profile.set_shape(network.get_input(number).name, shape, shape, shape)
    config.add_optimization_profile(profile)
    assert builder.build_serialized_network(network, config) is not None
    (layers,) = (text for text in logged if text.startswith(HEAD))
    assert 0 < count(parse(layers))["all"] <= 1.03 * 313 and 0 < activation_bytes(logged) <= 110e6


def test_products_in_fp8_write_fp16(compiled, exported):
    """A MatMul with one scale is one kernel that writes FP16. Convolutions with scales of channels write FP32, as docs/results/tensorrt-rtx-graphs.md says."""
    kernels = [kernel for kernel in compiled(exported("yolos"), "fp8").kernels if "FP8" in kernel.reads]
    assert len(kernels) == 8 and {(kernel.kind, kernel.writes) for kernel in kernels} == {("gemm", ("Half",))}, kernels
