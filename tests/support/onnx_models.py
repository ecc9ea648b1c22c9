"""Small ONNX detectors made with onnx.helper: no weights, outputs that are easy to compute by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from detrt.spec import DETECTION, INSTANCE_SEGMENTATION, DecodeSpec, InputSpec, ModelSpec

QUERIES, CLASSES = 4, 3


def make_spec(*, masks: bool = False, **changes) -> ModelSpec:
    given = {"resize": "stretch", "height": 8, "width": 12, **changes}
    decode = DecodeSpec("sigmoid", "topk", QUERIES, CLASSES, QUERIES * CLASSES, mask_stride=2 if masks else 0)
    task = INSTANCE_SEGMENTATION if masks else DETECTION
    return ModelSpec("test", InputSpec(**given), decode, {0: "red", 1: "green", 2: "blue"}, task=task)


def make_model(spec: ModelSpec | None, *, batch: int | str = "batch", node: str = "", domain: str = "") -> bytes:
    """logits of class c = mean of colour channel c / 51 - 2.5, for every query; boxes are constant, and so are masks of any shape.

    spec: goes into the metadata; None leaves it out. node, domain: an extra node on the logits.
    """
    size = ["height", "width"] if spec is None or spec.input.dynamic else list(spec.input.size_hw)
    dtype = spec.input.dtype if spec else "uint8"
    tensor = TensorProto.UINT8 if dtype == "uint8" else TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info("pixel_values", tensor, [batch, 3, *size])]
    if spec is not None and spec.input.mask:
        inputs.append(helper.make_tensor_value_info("pixel_mask", TensorProto.INT64, [batch, *size]))
    boxes = np.zeros((1, QUERIES, 4), np.float32)
    boxes[0] = [[0.5, 0.5, 1, 1], [0.25, 0.5, 0.5, 1], [0.5, 0.25, 1, 0.5], [0.9, 0.9, 0.4, 0.4]]
    constants = {
        "axes": np.array([2, 3], np.int64),
        "step": np.array(51, np.float32),
        "shift": np.array(2.5, np.float32),
        "spread": np.array([0, -1, -2, -3], np.float32)[None, :, None],
        "boxes": boxes,
        "one": np.array([1], np.int64),
        "tail": np.array([QUERIES, 4], np.int64),
        "zero": np.array([0], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["pixel_values"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["pixels", "axes"], ["mean"], keepdims=0),
        helper.make_node("Div", ["mean", "step"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "shift"], ["centred"]),
        helper.make_node("Unsqueeze", ["centred", "one"], ["row"]),
        helper.make_node("Add", ["row", "spread"], ["raw" if node else "logits"]),
        helper.make_node("Shape", ["pixel_values"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "tail"], ["box_shape"], axis=0),
        helper.make_node("Expand", ["boxes", "box_shape"], ["pred_boxes"]),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, QUERIES, CLASSES]),
        helper.make_tensor_value_info("pred_boxes", TensorProto.FLOAT, [batch, QUERIES, 4]),
    ]
    if spec is not None and spec.has_masks:
        map_hw = [side // spec.decode.mask_stride for side in spec.input.size_hw]
        constants["maps"] = np.random.default_rng(0).normal(size=(1, QUERIES, *map_hw)).astype(np.float32)
        constants["map_tail"] = np.array([QUERIES, *map_hw], np.int64)
        nodes += [
            helper.make_node("Concat", ["n", "map_tail"], ["map_shape"], axis=0),
            helper.make_node("Expand", ["maps", "map_shape"], ["mask_logits"]),
        ]
        outputs.append(helper.make_tensor_value_info("mask_logits", TensorProto.FLOAT, [batch, QUERIES, *map_hw]))
    if node:
        nodes.insert(6, helper.make_node(node, ["raw"], ["logits"], domain=domain))
    initial = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, initial)
    opsets = [helper.make_opsetid("", 18)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    if spec is not None:
        helper.set_model_props(model, {"detrt.spec": spec.to_json()})
    onnx.checker.check_model(model) if not domain else None
    return model.SerializeToString()


def ranked_model(spec: ModelSpec, scores: Sequence[float], step: float = 1.0) -> bytes:
    """`make_model` whose queries are ordered by constant scores, with `step` more on the logits of each rank: a swap makes them others."""
    model = onnx.load_from_string(make_model(spec))
    next(node for node in model.graph.node if "logits" in node.output).output[0] = "proposals"
    ranks = step * np.arange(QUERIES, dtype=np.float32)[:, None]
    constants = {"k": np.array([QUERIES]), "scores": np.array([scores], np.float32), "ranks": ranks, "last": np.array([-1])}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    model.graph.node.extend(
        [
            helper.make_node("Concat", ["n", "k"], ["score_shape"], axis=0),
            helper.make_node("Expand", ["scores", "score_shape"], ["all_scores"]),
            helper.make_node("TopK", ["all_scores", "k"], ["best", "chosen"], axis=1),
            helper.make_node("Unsqueeze", ["chosen", "last"], ["places"]),
            helper.make_node("GatherND", ["proposals", "places"], ["picked"], batch_dims=1),
            helper.make_node("Add", ["picked", "ranks"], ["logits"]),
        ]
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()


def endless_model(spec: ModelSpec) -> bytes:
    """`make_model` that repeats its last step a million million times for each level of the brightest pixel: it ends for black images only."""
    model = onnx.load_from_string(make_model(spec))
    next(node for node in model.graph.node if "logits" in node.output).output[0] = "found"
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Identity", ["held"], ["kept"])],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("held", TensorProto.FLOAT, None)],
        [value("on", TensorProto.BOOL, []), value("kept", TensorProto.FLOAT, None)],
    )
    constants = {"many": np.array(10**12), "yes": np.array(True)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["pixels"], ["brightest"], keepdims=0),
            helper.make_node("Cast", ["brightest"], ["level"], to=TensorProto.INT64),
            helper.make_node("Mul", ["level", "many"], ["times"]),
            helper.make_node("Loop", ["times", "yes", "found"], ["logits"], body=body),
        ]
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()
