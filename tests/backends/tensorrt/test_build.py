"""Real TensorRT-RTX builds of small graphs, on the CPU."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engine_graphs import EDGE, FIXED, TensorProto, detector, helper, left_over, one_node, rtx, save
from fake_tensorrt import FakeCuda

from detrt import ExportConfig, build, bundle
from detrt.backends.tensorrt import EngineConfig, TensorRTSession, build_engine
from detrt.errors import EngineError, GraphError, MissingPackageError, OutputError


@rtx
def test_one_engine_for_several_gpus(tmp_path):
    model = detector(tmp_path / "m.onnx")
    told = []
    built = build_engine(
        model,
        tmp_path / "o" / "m.engine",
        EngineConfig(sms=(86, 89, 120)),
        EDGE,
        progress=lambda *a: told.append(a),
    )
    assert built.facts.compute_capabilities == (86, 89, 120)
    assert built.facts.precision == "fp32" and built.facts.layer_types["FLOAT"] > 0
    assert built.facts.profile["pixel_values"]["max"] == [8, 3, 128, 128]
    assert built.facts.inputs[0] == {
        "name": "pixel_values",
        "dtype": "uint8",
        "shape": ["batch", 3, "height", "width"],
    }
    assert {row["name"]: row["dtype"] for row in built.facts.inputs}["target_sizes"] == "int64"
    assert built.facts.peak_memory_mib > 50 and built.facts.layers > 3 and built.facts.build_seconds > 0
    assert built.facts.options["tf32"] is False
    assert bundle.read_sidecar(built.path) == (EDGE, built.facts)
    assert left_over(tmp_path / "o") == ["m.engine", "m.engine.json"]
    assert told[-1][0] == 1.0 and all(0 <= fraction <= 1 for fraction, _ in told)
    # An engine for one of them is as large: several cost a few bytes.
    single = build_engine(model, tmp_path / "single.engine", EngineConfig(sms=(89,)), EDGE)
    assert abs(single.size - built.size) < 0.2 * built.size


@rtx
def test_opening_a_real_engine_without_a_gpu(tmp_path):
    from detrt.backends.tensorrt.cuda import Cuda

    if importlib.util.find_spec("cuda") is not None and Cuda().device_count():
        pytest.skip("this machine has a GPU")
    built = build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(sms=(89,)), EDGE)
    # A fake device, so that the library itself is asked and says what it lacks.
    with pytest.raises(EngineError, match=r"no CUDA device.*nvidia-smi"):
        TensorRTSession(built.path, cuda=FakeCuda(89))
    with pytest.raises(EngineError, match="built for compute capability 89"):
        TensorRTSession(built.path, cuda=FakeCuda(120))


@rtx
def test_the_caller_never_loads_tensorrt(tmp_path):
    model = detector(tmp_path / "m.onnx", mask=False, height=64, width=64)
    code = (
        "import sys, json; from pathlib import Path\n"
        "from detrt.backends.tensorrt import build_engine, EngineConfig; from detrt.spec import ModelSpec\n"
        f"build_engine({str(model)!r}, {str(tmp_path / 'm.engine')!r}, EngineConfig(), "
        f"ModelSpec.from_json({FIXED.to_json()!r}))\n"
        "print([m for m in ('tensorrt_rtx_bindings', 'torch', 'onnx', 'onnxruntime') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout == "[]\n" and done.stderr == ""


@rtx
def test_turing_needs_fp16(tmp_path):
    with pytest.raises(EngineError) as caught:
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig(sms=(75, 89)), EDGE)
    assert "Leave 75 out" in str(caught.value) and "module model.encoder.layers.0.self_attn" in str(caught.value)
    half = detector(tmp_path / "half.onnx", kind=TensorProto.FLOAT16)
    built = build_engine(half, tmp_path / "half.engine", EngineConfig(sms=(75, 89)), EDGE)
    assert built.facts.precision == "fp16+fp32" and built.facts.compute_capabilities == (75, 89)


@rtx
def test_a_position_embedding_of_a_symbolic_size_builds_for_turing(exported, tmp_path):
    """Its outer products were FP32 matmuls to the parser, in graphs of FP16 as well."""
    from detrt.precision import PrecisionConfig
    from detrt.precision.stage import convert_file

    report = exported("rt_detr_v2")
    assert report.spec.input.dynamic
    shutil.copy(report.path, tmp_path / "model.onnx")
    convert_file(tmp_path / "model.onnx", report.spec, PrecisionConfig("fp16", min_fraction=0.0))
    facts = build_engine(tmp_path / "model.onnx", tmp_path / "m.engine", EngineConfig(sms=(75, 89)), report.spec).facts
    assert facts.compute_capabilities == (75, 89) and facts.precision == "fp16+fp32"


@rtx
def test_nms_in_the_graph_is_refused_before_the_build(tmp_path):
    """TensorRT-RTX 1.7 has no kernel for it, and said so after minutes, with another advice."""
    with pytest.raises(EngineError, match="NMS in the graph has no kernel .* Use `nms=checkpoint`"):
        build(
            "no-such-checkpoint",
            tmp_path / "out",
            export=ExportConfig(decode="graph", nms="graph-hard"),
            targets=["tensorrt-rtx"],
        )
    node = helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["found"], "/NonMaxSuppression")
    inputs = [("boxes", TensorProto.FLOAT, [1, 8, 4]), ("scores", TensorProto.FLOAT, [1, 2, 8])]
    most = np.array([4], np.int64)
    save(tmp_path / "m.onnx", [node], inputs, [("found", TensorProto.INT64, [None, 3])], [("most", most)])
    with pytest.raises(EngineError, match="NMS in the graph has no kernel"):
        build_engine(tmp_path / "m.onnx", tmp_path / "m.engine", EngineConfig(sms=(89,)), FIXED)


@rtx
def test_options_reach_the_library(tmp_path):
    model = detector(tmp_path / "m.onnx")
    with pytest.raises(EngineError, match="`workspace_mib`"):
        build_engine(model, tmp_path / "m.engine", EngineConfig(workspace_mib=1), EDGE)
    config = EngineConfig(sms=(89,), tf32=True, optimization_level=0, batch=(2, 2, 2), height=(64, 64, 64))
    facts = build_engine(model, tmp_path / "m.engine", config, EDGE).facts
    assert facts.profile["pixel_values"] == {
        "min": [2, 3, 64, 32],
        "opt": [2, 3, 64, 96],
        "max": [2, 3, 64, 128],
    }
    assert facts.options["tf32"] is True and EngineConfig.from_dict(facts.options) == config


@rtx
def test_external_weights(tmp_path):
    model = detector(tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    build_engine(model, tmp_path / "m.engine", EngineConfig(), EDGE)
    (tmp_path / "m.data").unlink()
    before = (tmp_path / "m.engine").read_bytes()
    with pytest.raises(EngineError, match="separate data file"):
        build_engine(model, tmp_path / "m.engine", EngineConfig(), EDGE)
    assert (tmp_path / "m.engine").read_bytes() == before, "a failed build must leave the old engine"
    bundle.read_sidecar(tmp_path / "m.engine")


@rtx
@pytest.mark.parametrize(
    ("operator", "attributes", "parts"),
    [
        ("NoSuchOp", {"domain": "detrt"}, ["NoSuchOp", "plugin"]),
        ("Unique", {}, ["Unique", "/model/decoder/layers.0/Unique"]),
    ],
)
def test_parse_failure_names_the_node(tmp_path, operator, attributes, parts):
    with pytest.raises(EngineError) as caught:
        build_engine(
            one_node(tmp_path / "m.onnx", operator, **attributes),
            tmp_path / "m.engine",
            EngineConfig(),
            FIXED,
        )
    for part in ("cannot read 'm.onnx'", *parts):
        assert part in str(caught.value)
    assert left_over(tmp_path) == ["m.onnx"]


@rtx
def test_antialias_and_mixed_types(tmp_path):
    resize = save(
        tmp_path / "a.onnx",
        [
            helper.make_node(
                "Resize",
                ["pixel_values", "", "", "s"],
                ["logits"],
                name="/model/emb/Resize",
                mode="cubic",
                antialias=1,
            )
        ],
        [("pixel_values", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [("logits", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [("s", np.array([1, 3, 16, 16], np.int64))],
        opset=18,
    )
    with pytest.raises(EngineError, match="fixed input size"):
        build_engine(resize, tmp_path / "m.engine", EngineConfig(), FIXED)
    mixed = save(
        tmp_path / "b.onnx",
        [
            helper.make_node("Cast", ["pixel_values"], ["h"], name="/m/Cast", to=TensorProto.FLOAT16),
            helper.make_node("Add", ["pixel_values", "h"], ["logits"], name="/m/Add"),
        ],
        [("pixel_values", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [("logits", TensorProto.FLOAT, ["batch", 3, 8, 8])],
    )
    with pytest.raises(EngineError, match="strongly typed"):
        build_engine(mixed, tmp_path / "m.engine", EngineConfig(), FIXED)


@rtx
@pytest.mark.parametrize("keep", [0, 40, 5000])
def test_truncated_model(tmp_path, keep):
    model = detector(tmp_path / "m.onnx")
    model.write_bytes(model.read_bytes()[:keep])
    with pytest.raises(EngineError, match=r"empty|not a whole ONNX model|no network"):
        build_engine(model, tmp_path / "m.engine", EngineConfig(), EDGE)
    assert left_over(tmp_path) == ["m.onnx"]


def test_what_is_not_a_model(tmp_path):
    text = tmp_path / "m.onnx"
    for content, part in (
        (b"hello, this is text", "not an ONNX model"),
        (b"PK\x03\x04zip", "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    ):
        text.write_bytes(content)
        with pytest.raises(EngineError, match=part):
            build_engine(text, tmp_path / "m.engine", EngineConfig(), EDGE)
    with pytest.raises(EngineError, match="is a folder"):
        build_engine(tmp_path, tmp_path / "m.engine", EngineConfig(), EDGE)
    with pytest.raises(EngineError, match="no ONNX file"):
        build_engine(tmp_path / "none.onnx", tmp_path / "m.engine", EngineConfig(), EDGE)


@rtx
def test_a_graph_without_a_spec(tmp_path):
    with pytest.raises(GraphError):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig())


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="tensorrt is installed")
def test_missing_library(tmp_path):
    with pytest.raises(MissingPackageError, match=r"\.\[trt\]"):
        build_engine(detector(tmp_path / "m.onnx"), tmp_path / "m.engine", EngineConfig("tensorrt"), EDGE)


@rtx
def test_outputs_that_cannot_be_written(tmp_path):
    model = detector(tmp_path / "m.onnx")
    (tmp_path / "folder.engine").mkdir()
    for output in (model / "x.engine", tmp_path / "folder.engine", Path("/proc/nowhere/x.engine"), model):
        with pytest.raises(OutputError, match="cannot write"):
            build_engine(model, output, EngineConfig(), EDGE)
    assert left_over(tmp_path) == ["folder.engine", "m.onnx"]
