"""INT8 on a CPU without VNNI: what the system says of the CPU, and the note of the session."""

from __future__ import annotations

import io

import numpy as np
import pytest

from detrt import system


@pytest.mark.parametrize(
    ("flags", "saturates"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", True),
        ("flags\t\t: fpu sse2 avx2 avx_vnni", False),
        ("flags\t\t: sse2 avx512f avx512_vnni", False),
        ("Features\t: fp asimd asimddp", False),  # aarch64
    ],
)
def test_the_flags_of_a_processor(monkeypatch, flags, saturates):
    monkeypatch.setattr("builtins.open", lambda *a, **k: io.StringIO(f"processor : 0\n{flags}\n"))
    assert system.saturates_int8() is saturates


@pytest.mark.parametrize(("saturates", "quantized", "noted"), [(True, True, True), (True, False, False), (False, True, False)])
def test_onnx_runtime_says_so_when_it_opens_an_int8_graph(monkeypatch, saturates, quantized, noted):
    from onnx import TensorProto, helper

    from detrt.backends.onnxruntime import session
    from detrt.spec import ModelSpec

    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(session, "saturates_int8", lambda: saturates)
    monkeypatch.setattr(session, "check_spec", lambda *a: None)
    made = [
        helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ]
    nodes = made if quantized else [helper.make_node("Mul", ["x", "scale"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    scale = helper.make_tensor("scale", TensorProto.FLOAT, [], [0.5])
    model = helper.make_model(
        helper.make_graph(nodes, "test", [x], [y], [scale]), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    with session.OnnxSession(model.SerializeToString(), object.__new__(ModelSpec)) as opened:
        assert (system.SATURATES in opened.info.notes) is noted


def test_an_integer_convolution_is_exact_where_the_processor_is_said_to_be(tmp_path):
    """Weights of 127 and activations of 255: OpenVINO itself shows whether the sums are clipped."""
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    if not system.processor_name() or not open("/proc/cpuinfo").read().count("\nflags"):
        pytest.skip("not Linux on x86")
    constants = {
        "scale": np.array(1, np.float32),
        "zero": np.array(0, np.uint8),
        "weights": np.full((8, 8, 3, 3), 127, np.int8),
        "weight_scale": np.ones(8, np.float32),
        "weight_zero": np.zeros(8, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["weights", "weight_scale", "weight_zero"], ["w"], axis=0),
        helper.make_node("Conv", ["rounded", "w"], ["y"]),
    ]
    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8, None, None])  # noqa: E731
    tensors = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "test", [value("x")], [value("y")], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), tmp_path / "model.onnx")
    compiled = openvino.Core().compile_model(str(tmp_path / "model.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    got = compiled({"x": np.full((1, 8, 12, 12), 255, np.float32)})[0]
    exact = np.allclose(got, 8 * 9 * 127 * 255, rtol=1e-4)
    assert exact is not system.saturates_int8()
