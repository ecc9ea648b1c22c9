"""TensorRT 8: the typed graph becomes an FP32 graph with marks, and the marks become layer constraints."""

from __future__ import annotations

import json
import subprocess
import sys
from enum import Enum
from types import SimpleNamespace

import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")

from engine_graphs import EDGE, detector

from detrt.backends.tensorrt import EngineConfig, worker
from detrt.backends.tensorrt import diagnose as explain
from detrt.backends.tensorrt.bindings import Messages
from detrt.backends.tensorrt.rewrite import Rewritten, rewrite
from detrt.backends.tensorrt.v8 import weak
from detrt.backends.tensorrt.v8.dialect import WEAK
from detrt.backends.tensorrt.v8.rewrite import FP32_MARK
from detrt.backends.tensorrt.versions import row_of
from detrt.errors import EngineError, GraphError
from detrt.graph.msda_plugin import set_plugin_version
from detrt.graph.opset import set_opset

OLD = row_of("tensorrt", "8.5.3")
DataType = Enum("DataType", ["FLOAT", "HALF", "INT32"])
LayerType = Enum("LayerType", ["ELEMENTWISE", "SHAPE", "RECURRENCE", "TOPK", "GATHER", "SOFTMAX", "PLUGIN_V2"])


class Layer:
    def __init__(self, name, kind, inputs, outputs):
        self.name, self.type = name, LayerType[kind]
        self._inputs = [SimpleNamespace(dtype=DataType[kind], name=f"before {name}") for kind in inputs]
        self._outputs = [SimpleNamespace(dtype=DataType[kind], name=f"after {name}") for kind in outputs]
        self.num_inputs, self.num_outputs = len(inputs), len(outputs)
        self.precision, self.types = None, {}

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]

    def set_output_type(self, index, dtype):
        self.types[index] = dtype


def network(*layers):
    return SimpleNamespace(num_layers=len(layers), get_layer=layers.__getitem__)


class BuilderConfig(SimpleNamespace):
    def set_flag(self, flag):
        self.flags.add(flag)

    def set_tactic_sources(self, sources):
        self.sources = sources

    def set_preview_feature(self, feature, wanted):
        self.features = {feature: wanted}


def trt():
    module = SimpleNamespace(
        DataType=DataType,
        BuilderFlag=SimpleNamespace(FP16="FP16", PREFER_PRECISION_CONSTRAINTS="PREFER"),
        TacticSource=SimpleNamespace(__members__={"CUBLAS": 0, "CUBLAS_LT": 1, "CUDNN": 2, "JIT_CONVOLUTIONS": 4}),
        ProfilingVerbosity=SimpleNamespace(DETAILED="detailed"),
        PreviewFeature=SimpleNamespace(FASTER_DYNAMIC_SHAPES_0805="faster shapes"),
    )
    return SimpleNamespace(module=module, version="8.5.3.1")


def test_only_marked_layers_that_compute_floats_are_kept_wide():
    layers = (
        Layer("/a/Sqrt@fp32", "ELEMENTWISE", ["FLOAT"], ["FLOAT"]),
        Layer("/a/Sqrt@fp32_1", "ELEMENTWISE", ["FLOAT"], ["FLOAT"]),  # a second layer of the same node
        Layer("/a/MatMul", "ELEMENTWISE", ["FLOAT"], ["FLOAT"]),
        Layer("/a/Shape@fp32", "SHAPE", ["FLOAT"], ["INT32"]),
        Layer("/a/CumSum@fp32", "RECURRENCE", ["FLOAT"], ["FLOAT"]),
        Layer("/a/TopK@fp32", "TOPK", ["FLOAT"], ["FLOAT", "INT32"]),
        Layer("/a/Gather@fp32", "GATHER", ["INT32", "INT32"], ["INT32"]),
        Layer("/a/Softmax@fp32", "SOFTMAX", ["FLOAT"], ["FLOAT"]),  # fused with the TopK
        Layer("/a/MSDeformAttn@fp32", "PLUGIN_V2", ["FLOAT", "INT32"], ["FLOAT"]),
        Layer("/b/MSDeformAttn", "PLUGIN_V2", ["FLOAT", "INT32"], ["FLOAT"]),
    )
    layers[5]._inputs = layers[7]._outputs
    assert weak.constrain(trt(), network(*layers)) == 3
    assert [place for place, layer in enumerate(layers) if layer.precision is DataType.FLOAT] == [0, 1]
    # A plugin has no format left under a precision.
    assert [place for place, layer in enumerate(layers) if layer.types == {0: DataType.FLOAT}] == [0, 1, 8]


@pytest.mark.parametrize(
    ("low", "flags"),
    [(False, set()), (True, {"FP16", "PREFER"})],
)
def test_flags_say_what_the_typed_graph_holds(low, flags, tmp_path):
    config = BuilderConfig(flags=set())
    layers = network(Layer("/a/Sqrt@fp32", "ELEMENTWISE", ["FLOAT"], ["FLOAT"]))
    weak.configure(trt(), config, layers, Rewritten(tmp_path, low), symbolic=False)
    assert config.flags == flags and config.sources == 0b10011
    assert not hasattr(config, "features")


def test_symbolic_shapes_need_the_feature_without_which_they_are_wrong(tmp_path):
    config, old = BuilderConfig(flags=set()), trt()
    weak.configure(old, config, network(), Rewritten(tmp_path), symbolic=True)
    assert config.features == {"faster shapes": True}
    del old.module.PreviewFeature
    with pytest.raises(EngineError, match="no preview feature FASTER_DYNAMIC_SHAPES_0805.*one batch size and one image size"):
        weak.configure(old, config, network(), Rewritten(tmp_path), symbolic=True)


@pytest.mark.parametrize(
    ("error", "symbolic", "builds"),
    [
        ("Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[/Cast...]}.)", True, 2),
        ("Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[/Cast...]}.)", False, 1),
        ("Error Code 2: OutOfMemory", True, 1),
    ],
)
def test_without_a_kernel_the_feature_for_symbolic_shapes_is_dropped(tmp_path, error, symbolic, builds):
    messages, old, config = Messages(), trt(), BuilderConfig(flags=set())
    weak.configure(old, config, network(), Rewritten(tmp_path), symbolic)
    asked = []

    def build(network, config):
        asked.append(dict(getattr(config, "features", {})))
        if asked[-1] == {"faster shapes": False}:
            return b"engine"
        messages.add("ERROR", error)
        return None

    builder = SimpleNamespace(build_serialized_network=build)
    engine, warnings = weak.serialize(old, builder, network(), config, messages, symbolic=symbolic)
    assert len(asked) == builds
    assert (engine, len(warnings)) == ((b"engine", 1) if builds == 2 else (None, 0))
    assert not warnings or "may be wrong at shapes that were not compared" in warnings[0]


HANGS = """
import sys, time
from types import SimpleNamespace
from detrt.backends.tensorrt.v8 import weak
weak.SILENT_S = 0.5
trt = SimpleNamespace(heard_s=0.0, timed=False)

def build(network, config):
    for _ in range({messages}):
        trt.heard_s, trt.timed = time.monotonic(), {timed}
        time.sleep(0.2)
    time.sleep({silent})
    return b"engine"

print(weak.serialize(trt, SimpleNamespace(build_serialized_network=build), None, None, None, symbolic=False))
"""


@pytest.mark.parametrize(
    ("messages", "timed", "silent", "code"),
    [(5, False, 60, 75), (1, True, 1.5, 0)],
    ids=["hangs behind messages", "is silent while a kernel is timed"],
)
def test_a_builder_that_hangs_before_it_times_a_kernel_is_ended(messages, timed, silent, code):
    script = HANGS.format(messages=messages, timed=timed, silent=silent)
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("engine" in ended.stdout) is (code == 0)
    assert ("hangs" in explain.ended(code, "")) is (code == 75)


def test_a_parser_that_drops_names_is_found_out(tmp_path):
    layers = network(Layer("(Unnamed Layer* 1)", "ELEMENTWISE", ["FLOAT"], ["FLOAT"]))
    with pytest.raises(EngineError, match="kept no node name"):
        weak.configure(trt(), BuilderConfig(flags=set()), layers, Rewritten(tmp_path, True), symbolic=False)


@pytest.mark.parametrize("choice", [{"optimization_level": 0}, {"hardware_compatibility": "ampere_plus"}])
def test_what_came_with_8_6_is_refused(choice):
    old = SimpleNamespace(is_rtx=False, row=OLD, version="8.5.3.1")
    WEAK.check_config(old, EngineConfig(target="tensorrt"))
    with pytest.raises(EngineError, match=f"has no {next(iter(choice))}.*leave it out"):
        WEAK.check_config(old, EngineConfig(target="tensorrt", **choice))


def test_types_are_read_from_the_inspector():
    def layer(*formats):
        return {"Outputs": [{"Format/Datatype": text} for text in formats]}

    told = {"Layers": [layer("Row major linear FP16 format"), layer("Row major linear FP32", "Row major Int32 format"), "a name only"]}  # fmt: skip
    assert weak.count_types(json.dumps(told)) == {"HALF": 1, "FLOAT": 1, "INT32": 1}


def rewritten(path, tmp_path, row=OLD, **choices):
    folder = tmp_path / "dialect"
    folder.mkdir(exist_ok=True)
    return rewrite(path, row, EngineConfig(target="tensorrt", **choices), EDGE, folder)


def test_a_typed_file_is_rewritten_with_marks_and_its_own_inputs(tmp_path):
    half = detector(tmp_path / "half.onnx", kind=onnx.TensorProto.FLOAT16)
    source = rewritten(half, tmp_path)
    assert source.low
    model = onnx.load(source.path)
    assert {t.data_type for t in model.graph.initializer} == {onnx.TensorProto.FLOAT}
    assert {t["name"]: t["dtype"] for t in source.inputs}["pixel_mask"] == "int64"
    assert {t["name"]: t["shape"] for t in source.inputs}["pixel_values"] == ["batch", 3, "height", "width"]
    # All that computes is FP16 in this graph.
    assert not [node.name for node in model.graph.node if FP32_MARK in node.name]


def test_a_profile_of_one_shape_makes_a_graph_of_one_shape(tmp_path):
    source = rewritten(detector(tmp_path / "m.onnx"), tmp_path, batch=(2, 2, 2), height=(64, 64, 64), width=(96, 96, 96))
    sides = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx.load(source.path).graph.input]
    assert sides == [[2, 3, 64, 96], [2, 2], [2, 64, 96]]
    assert not source.low


def test_an_axis_of_one_length_is_fixed_beside_a_symbolic_one(tmp_path):
    source = rewritten(detector(tmp_path / "m.onnx"), tmp_path, batch=(1, 2, 4), height=(64, 64, 64), width=(96, 96, 96))
    sides = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx.load(source.path).graph.input]
    assert sides == [["batch", 3, 64, 96], ["batch", 2], ["batch", 64, 96]]
    # The sidecar names the axes of the ONNX file.
    assert {t["name"]: t["shape"] for t in source.inputs}["pixel_values"] == ["batch", 3, "height", "width"]


def test_newer_versions_parse_the_file_itself(tmp_path):
    path = detector(tmp_path / "m.onnx")
    for version in ("10.3.0", "10.13.0", "11.1.0"):
        assert rewritten(path, tmp_path, row_of("tensorrt", version)) == Rewritten(path)


def _opset(model):
    return next(entry.version for entry in model.opset_import if not entry.domain)


@pytest.mark.parametrize("version", ("10.3.0", "10.9.0", "10.11.0", "10.12.0"))
def test_a_bf16_graph_has_an_opset_that_the_version_reads(version, tmp_path):
    """BF16 graphs have opset 22; the parsers of TensorRT 10 before 10.12 are documented up to 20, and take BF16 there."""
    path = detector(tmp_path / "m.onnx", kind=onnx.TensorProto.BFLOAT16)
    model = onnx.load(path)
    set_opset(model, 22)
    onnx.save(model, path)
    row = row_of("tensorrt", version)
    model = onnx.load(rewritten(path, tmp_path, row).path)
    assert _opset(model) == min(22, row.opset)
    assert onnx.TensorProto.BFLOAT16 in {t.data_type for t in model.graph.initializer}


@pytest.mark.parametrize(
    ("target", "version", "mode"),
    [
        ("tensorrt", "10.3.0", b"bilinear"),
        ("tensorrt", "10.13.0", b"bilinear"),
        ("tensorrt", "11.1.0", b"bilinear"),
        ("tensorrt-rtx", "1.5.0.114", b"bilinear"),
        ("tensorrt-rtx", "1.6.1.120", b"bilinear"),
        ("tensorrt-rtx", "1.7.1.116", b"linear"),
    ],
)
def test_grid_sample_keeps_its_old_name_where_the_parser_knows_no_other(target, version, mode, tmp_path):
    path = tmp_path / "m.onnx"
    detector(path, opset=20)
    model = onnx.load(path)
    model.graph.node.append(onnx.helper.make_node("GridSample", ["x", "g"], ["sampled"], name="/GridSample", mode="linear"))
    model.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", [1, 1, 2, 2]), ("g", [1, 2, 2, 2]))
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("sampled", onnx.TensorProto.FLOAT, [1, 1, 2, 2]))
    onnx.save(model, path)
    model = onnx.load(rewritten(path, tmp_path, row_of(target, version)).path)
    (sample,) = (node for node in model.graph.node if node.op_type == "GridSample")
    assert next(entry.s for entry in sample.attribute if entry.name == "mode") == mode


def test_what_8_5_does_not_have_is_refused(tmp_path):
    assert (
        next(e.version for e in onnx.load(rewritten(detector(tmp_path / "n.onnx", opset=19), tmp_path).path).opset_import) == 17
    )
    with pytest.raises(GraphError, match="BF16"):
        rewritten(detector(tmp_path / "b.onnx", kind=onnx.TensorProto.BFLOAT16, opset=17), tmp_path)


@pytest.mark.parametrize(("version", "plugin"), [("8.5.3", b"1"), ("10.3.0", b"1"), ("10.13.0", b"2")])
def test_nvidia_plugin_has_the_version_that_the_library_ships(tmp_path, version, plugin):
    model = onnx.load(detector(tmp_path / "m.onnx"))
    node = onnx.helper.make_node("MultiscaleDeformableAttnPlugin_TRT", ["a"], ["b"], "p", plugin_version="2", plugin_namespace="")
    model.graph.node.append(node)
    assert set_plugin_version(model, row_of("tensorrt", version).msda_plugin) == (plugin == b"1")
    assert next(a.s for a in model.graph.node[-1].attribute if a.name == "plugin_version") == plugin


def test_a_gpu_without_the_type_of_the_graph_is_refused_before_the_build():
    with pytest.raises(EngineError, match=r"bf16, which compute capability 75 does not have .*80"):
        worker._check_capability((75,), {"BF16": 4, "FLOAT": 2})
    with pytest.raises(EngineError, match="fp8"):
        worker._check_capability((86,), {"FP8": 4})
    worker._check_capability((90,), {"FP8": 4, "HALF": 3})
    worker._check_capability((75,), {"FLOAT": 3}, low=True)


def test_a_plugin_that_was_told_fp32_and_runs_in_fp16_is_found():
    def layer(name, kind, form):
        tensor = {"Name": "x", "Dimensions": [1, 4], "Format/Datatype": form}
        return {"Name": name, "LayerType": kind, "Inputs": [tensor], "Outputs": [tensor]}

    layers = [
        layer("/a/MSDeformAttn@fp32", "PluginV2", "Row major linear FP32"),
        layer("/b/MSDeformAttn@fp32", "PluginV2", "Row major linear FP16 format"),
        layer("/c/MSDeformAttn", "PluginV2", "Row major linear FP16 format"),  # detrt's own, which keeps its locations in FP32
        layer("/d/Sqrt@fp32", "PointWiseV2", "Row major linear FP16 format"),
    ]
    assert weak.plugins_in_fp16(json.dumps({"Layers": layers})) == ["/b/MSDeformAttn@fp32"]
    assert weak.plugins_in_fp16(json.dumps({"Layers": ["/a/MSDeformAttn@fp32"]})) == []  # symbolic shapes: names alone
