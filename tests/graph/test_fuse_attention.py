"""Attention fused for ONNX Runtime: how many, equal outputs at other sizes, weights read from the file beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("onnx", reason="needs the 'export' extra")
from detrt import graph
from detrt.backends.compare import output_differences
from detrt.backends.onnxruntime.session import OnnxSession, run_graph
from detrt.backends.open import open_session
from detrt.bundle import Bundle
from detrt.graph.fuse_attention import fuse_attention, save_beside
from detrt.pipeline import build
from detrt.precision import PrecisionConfig

# Self-attention without a mask; YOLOS has it in the backbone alone, DETR with a mask in the encoder.
FAMILIES = {"yolos": "backbone", "lw_detr": "backbone", "rt_detr_v2": "encoder", "detr": "decoder"}


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_outputs_at_other_sizes(name, exported, tmp_path):
    report = exported(name)
    plain = tmp_path / "model.onnx"
    plain.write_bytes(report.path.read_bytes())
    model = graph.load(plain)
    before = sum(node.op_type == "Softmax" for node in model.graph.node)
    count = fuse_attention(model)
    assert 1 <= count <= before and sum(node.op_type == "Softmax" for node in model.graph.node) == before - count
    save_beside(model, tmp_path / "fused.onnx", plain)
    assert (tmp_path / "fused.onnx").stat().st_size < plain.stat().st_size
    side = max(64, report.spec.input.height // 2 // 64 * 64)
    with OnnxSession(plain) as reference, OnnxSession(plain, fused=tmp_path / "fused.onnx") as fused:
        for batch, height, width in ((1, side, side), (3, side, side * 2)):
            feeds = {"pixel_values": np.random.default_rng(0).integers(0, 256, (batch, 3, height, width), np.uint8)}
            if report.spec.input.mask:
                feeds["pixel_mask"] = np.ones((batch, height, width), np.int64)
            assert max(output_differences(reference.run(feeds), fused.run(feeds), 1e-4).values()) <= 1e-4


def test_bundle_runs_it_on_the_cpu_and_keeps_the_plain_graph(exported, tmp_path):
    path = exported("lw_detr").path
    out = tmp_path / "bundle"
    build(path, out, targets=["onnx"])
    bundle = Bundle.open(out)
    (entry,) = bundle.of_kind("onnx-fused")
    assert entry.path == "model.onnxruntime.onnx"
    plain = {node.op_type for node in graph.load(out / "model.onnx").graph.node}
    assert "MultiHeadAttention" not in plain
    with open_session(out) as session:
        assert session.info.name == "onnxruntime-cpu" and session.info.path == out / "model.onnx"
    (out / entry.path).write_bytes(b"")
    with pytest.raises(Exception, match=r"model\.onnxruntime\.onnx"):
        open_session(out)
    manifest = json.loads((out / "detrt.json").read_text())
    assert [row["kind"] for row in manifest["files"]] == ["onnx", "onnx-fused"]


@pytest.mark.slow
def test_int8_beside_fp32_has_it_too(exported, tmp_path, monkeypatch):
    from detrt.data.scenes.scene import draw_images
    from detrt.graph import fuse_attention as module

    (tmp_path / "scenes").mkdir()
    Image.fromarray(draw_images(1, (64, 64))[0]).save(tmp_path / "scenes/0.png")
    precision = PrecisionConfig("int8", calibration=tmp_path / "scenes", qdq_placement="cpu", min_fraction=0.0)

    def operators(out):
        build(exported("lw_detr").path, tmp_path / out, targets=["onnx"], precision=precision)
        fused = Bundle.open(tmp_path / out).of_kind("onnx-fused")
        return {node.op_type for entry in fused for node in graph.load(tmp_path / out / entry.path).graph.node}

    assert {"MultiHeadAttention", "QuantizeLinear"} <= operators("bundle")

    def wrong(model):
        count = fuse_attention(model)
        for node in model.graph.node:
            for attribute in node.attribute:
                attribute.f *= 1.5 if node.op_type == "MultiHeadAttention" and attribute.name == "scale" else 1
        return count

    monkeypatch.setattr(module, "fuse_attention", wrong)
    assert not operators("wrong")


def test_scores_that_tie_within_rounding_do_not_drop_it(tmp_path):
    """LW-DETR gives each rank of its proposals an embedding of its own: one swap, and two queries are others."""
    from onnx_models import make_spec, ranked_model

    from detrt.backends.onnxruntime.fused import fused_difference

    spec = make_spec()

    def write(path, scores, step=1.0):
        path.write_bytes(ranked_model(spec, scores, step))

    tied, rounded = (0.5, 0.5, 0.25, 0.125), (0.5, np.nextafter(np.float32(0.5), np.float32(1)), 0.25, 0.125)
    write(tmp_path / "plain.onnx", tied)
    write(tmp_path / "fused.onnx", rounded)
    plain, fused = OnnxSession(tmp_path / "plain.onnx"), OnnxSession(tmp_path / "plain.onnx", fused=tmp_path / "fused.onnx")
    feeds = {"pixel_values": np.full((1, 3, 8, 12), 100, np.uint8)}
    assert max(output_differences(plain.run(feeds), fused.run(feeds), 1e-3).values()) > 0.1, "the swap is not seen"
    assert fused_difference(tmp_path / "plain.onnx", tmp_path / "fused.onnx", spec) < 1e-6
    write(tmp_path / "fused.onnx", rounded, step=1.5)
    assert fused_difference(tmp_path / "plain.onnx", tmp_path / "fused.onnx", spec) > 0.1, "what differs beside the selection"


def test_another_pattern_stays():
    import onnx
    from onnx_models import make_model, make_spec

    model = onnx.load_from_string(make_model(make_spec()))
    assert fuse_attention(model) == 0 and not any(opset.domain == "com.microsoft" for opset in model.opset_import)


@pytest.mark.parametrize(("windows", "fused"), [(1, 1), (2, 0)])
def test_attention_within_windows_stays(windows, fused):
    """The same nodes, but for the Reshapes, which cut tokens into windows as well as channels into heads."""
    from onnx import TensorProto, helper, numpy_helper

    heads = np.array([2 * windows, 8 // windows, 2, 4])
    nodes = []
    for side, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            helper.make_node("Reshape", [side, "heads"], [f"{side}_split"], f"/{side}/Reshape"),
            helper.make_node("Transpose", [f"{side}_split"], [f"{side}_heads"], f"/{side}/Transpose", perm=order),
        ]
    nodes += [
        helper.make_node("MatMul", ["q_heads", "k_heads"], ["scores"], "/scores"),
        helper.make_node("Softmax", ["scores"], ["shares"], "/shares", axis=-1),
        helper.make_node("MatMul", ["shares", "v_heads"], ["attended"], "/attended"),
        helper.make_node("Transpose", ["attended"], ["tokens"], "/tokens", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["tokens", "joined"], ["y"], "/joined"),
    ]
    info = helper.make_tensor_value_info
    inner = helper.make_graph(
        nodes,
        "attention",
        [info(side, TensorProto.FLOAT, (2, 8, 8)) for side in "qkv"],
        [info("y", TensorProto.FLOAT, (2, 8, 8))],
        [numpy_helper.from_array(heads, "heads"), numpy_helper.from_array(np.array([2, 8, 8]), "joined")],
    )
    model = helper.make_model(inner, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {side: np.random.default_rng(1).standard_normal((2, 8, 8)).astype(np.float32) for side in "qkv"}
    want = run_graph(model.SerializeToString(), feeds)
    assert fuse_attention(model) == fused
    np.testing.assert_allclose(run_graph(model.SerializeToString(), feeds)["y"], want["y"], atol=1e-5)
