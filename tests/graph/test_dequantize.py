"""A quantized graph without its quantization is the graph that was quantized."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="needs the 'export' extra")
from precision_graphs import SPEC, pixel_model

from detrt.backends.onnxruntime.session import OnnxSession
from detrt.graph.dequantize import remove_quantization
from detrt.graph.emulate_low_precision import emulate
from detrt.precision import PrecisionConfig
from detrt.precision.apply import apply_precision


def test_what_remains_is_fp16_and_computes_the_same():
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (16, 16, 3), dtype=np.uint8) for _ in range(4)]
    config = PrecisionConfig("int8", calibration="x", min_fraction=0.0)
    model, report = apply_precision(pixel_model(), SPEC, config, images)
    pairs = sum(node.op_type == "QuantizeLinear" for node in model.graph.node)
    weights = sum(node.op_type == "DequantizeLinear" for node in model.graph.node) - pairs
    assert pairs and weights and report.precision == "int8"
    assert remove_quantization(model) == pairs + weights
    onnx.checker.check_model(model, full_check=True)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert not kinds["QuantizeLinear"] and not kinds["DequantizeLinear"]
    types = Counter(tensor.data_type for tensor in model.graph.initializer)
    assert not types[onnx.TensorProto.INT8] and types[onnx.TensorProto.FLOAT16] >= weights
    feeds = {"pixel_values": np.stack([image.transpose(2, 0, 1) for image in images])}
    want = OnnxSession(pixel_model().SerializeToString(), SPEC).run(feeds)
    got = OnnxSession(emulate(model).SerializeToString(), SPEC).run(feeds)
    for name, array in want.items():  # the weights keep the error of eight bits
        assert np.abs(got[name] - array).max() < 0.03 * np.abs(array).max()
    assert remove_quantization(model) == 0
