"""Hand-made graphs for the tests of precision: a pixel model with one FFN, and single rules."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from detrt.graph import with_spec
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

SPEC = ModelSpec("test", InputSpec("stretch", 16, 16), DecodeSpec("sigmoid", "topk", 16, 8, 16), {0: "a"})
node = helper.make_node


def model_of(nodes, constants, outputs=None, inputs=None, opset=17, spec=SPEC) -> onnx.ModelProto:
    """pixel_values (batch, 3, 16, 16) uint8 -> logits (batch, 16, 8) and pred_boxes (batch, 16, 4) by default."""
    info = helper.make_tensor_value_info
    inputs = inputs or [("pixel_values", TensorProto.UINT8, ["batch", 3, 16, 16])]
    outputs = outputs or [
        ("logits", TensorProto.FLOAT, ["batch", 16, 8]),
        ("pred_boxes", TensorProto.FLOAT, ["batch", 16, 4]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [info(*i) for i in inputs],
        [info(*o) for o in outputs],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return with_spec(model, spec) if spec else model


def pixel_model(ffn_scale: float = 1.0) -> onnx.ModelProto:
    """A patch convolution, an FFN whose inner values grow with `ffn_scale`, and two heads on 16 tokens."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))).astype(np.float32)

    nodes = [
        node("Cast", ["pixel_values"], ["raw"], name="/Cast", to=TensorProto.FLOAT),
        node("Mul", ["raw", "scale"], ["pixels"], name="/Mul"),
        node("Conv", ["pixels", "stem"], ["grid"], name="/backbone/stem/Conv", strides=[4, 4]),
        node("Relu", ["grid"], ["grid_relu"], name="/backbone/stem/Relu"),
        node("Conv", ["grid_relu", "body"], ["grid2"], name="/backbone/body/Conv"),
        node("Reshape", ["grid2", "rows"], ["flat"], name="/Reshape"),
        node("Transpose", ["flat"], ["tokens"], name="/Transpose", perm=[0, 2, 1]),
        node(
            "LayerNormalization",
            ["tokens", "gain", "offset"],
            ["normed"],
            name="/encoder/layers.0/norm/LayerNormalization",
        ),
        node("MatMul", ["normed", "w1"], ["inner"], name="/encoder/layers.0/fc1/MatMul"),
        node("Relu", ["inner"], ["active"], name="/encoder/layers.0/Relu"),
        node("MatMul", ["active", "w2"], ["outer"], name="/encoder/layers.0/fc2/MatMul"),
        node("Add", ["tokens", "outer"], ["memory"], name="/encoder/layers.0/Add"),
        node(
            "LayerNormalization",
            ["memory", "gain", "offset"],
            ["out"],
            name="/encoder/layers.0/norm2/LayerNormalization",
        ),
        node("MatMul", ["out", "wc"], ["logits"], name="/class_head/MatMul"),
        node("MatMul", ["out", "wb"], ["delta"], name="/box_head/MatMul"),
        node("Identity", ["half"], ["safe"], name="/Identity"),
        node("Add", ["delta", "safe"], ["moved"], name="/box_head/Add"),
        node("Sigmoid", ["moved"], ["pred_boxes"], name="/box_head/Sigmoid"),
    ]
    constants = {
        "scale": np.float32(1 / 255.0),
        "stem": weights(3, 4, 4, 32).transpose(3, 0, 1, 2).copy(),
        "body": weights(32, 1, 1, 32).transpose(3, 0, 1, 2).copy(),
        "rows": np.array([0, 32, -1], np.int64),
        "gain": np.ones(32, np.float32),
        "offset": np.zeros(32, np.float32),
        "w1": weights(32, 128) * np.float32(ffn_scale),
        "w2": weights(128, 32) / np.float32(ffn_scale),
        "wc": weights(32, 8),
        "wb": weights(32, 4),
        "half": np.full(4, 0.3, np.float32),
    }
    return model_of(nodes, constants)


def images(count: int = 3, seed: int = 7) -> list[np.ndarray]:
    """Small RGB images of noise, the same every time."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(count)]
