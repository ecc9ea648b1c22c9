"""The graph that DeepStream's nvinfer takes: raw RGB as float32 in, boxes, scores and classes as one tensor out.

The output has the form of DeepStream-Yolo's parser `NvDsInferParseYolo`: (batch, rows, 6) with x0, y0, x1, y1 in pixels of the
network's input, score and class. Scaling and normalisation are in the graph, so that nvinfer passes its pixels on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ..errors import GraphError
from ..spec import BOXES, LABELS, LOGITS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, SCORES, TARGET_SIZES, ModelSpec
from .clean import drop_dead
from .nodes import NodeWriter

INPUT, OUTPUT = "input", "output"


@dataclass(frozen=True, slots=True)
class FrameResize:
    """A resize in the graph: rows (h, H) times the image times columns (w, W) transposed, float32; padding has weights of 0.

    rows_first: the order of the two. rounded: each result is rounded to 8 bits, as Pillow does.
    """

    rows: NDArray[np.float32]
    columns: NDArray[np.float32]
    rows_first: bool
    rounded: bool


@dataclass(frozen=True, slots=True)
class Letterbox:
    """How a frame becomes the pixels of the detector. Sizes are (height, width).

    network_hw: of the input that nvinfer fills. content_hw: the part of the detector's pixels, from the top left, that the frame covers;
    the rest is padding. tensor_hw: of the detector's pixels. resize: from the one to the other; None: nvinfer has resized.
    """

    network_hw: tuple[int, int]
    content_hw: tuple[int, int]
    tensor_hw: tuple[int, int]
    resize: FrameResize | None = field(default=None, repr=False)

    @property
    def padded(self) -> bool:
        return self.tensor_hw != self.content_hw

    @property
    def boxes_hw(self) -> tuple[int, int]:
        """The size of a frame in pixels of the network's input, which boxes are given in."""
        return self.content_hw if self.resize is None else self.network_hw


def for_deepstream(model: onnx.ModelProto, spec: ModelSpec, box: Letterbox, rows: int) -> onnx.ModelProto:
    """A copy of a detector's graph for nvinfer; the batch stays symbolic if it is. rows: of the output.

    Raises:
        GraphError: a graph that is built for another size.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    (pixels,) = (value for value in graph.input if value.name == PIXEL_VALUES)
    nodes = _DetectorNodes(copy, "deepstream")
    before, after = nodes.before(spec, box, pixels.type.tensor_type.elem_type), nodes.after(spec, box, rows)
    batch = pixels.type.tensor_type.shape.dim[0]
    for dim, side in zip(pixels.type.tensor_type.shape.dim[2:], box.tensor_hw, strict=True):
        if dim.HasField("dim_value") and dim.dim_value != side:
            raise GraphError(f"the graph takes another size than {box.tensor_hw[0]}x{box.tensor_hw[1]} (height x width)")
    size = batch.dim_param or batch.dim_value
    height, width = box.network_hw
    every = [*before, *graph.node, *after]
    del graph.node[:], graph.input[:], graph.output[:]
    graph.node.extend(every)
    graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, [size, 3, height, width]))
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [size, rows, 6]))
    del graph.value_info[:], copy.metadata_props[:]
    drop_dead(copy)  # a mask head
    onnx.checker.check_model(copy)
    return copy


class _DetectorNodes(NodeWriter):
    """Nodes in front of a detector and behind it."""

    def before(self, spec: ModelSpec, box: Letterbox, pixel_type: int) -> list[onnx.NodeProto]:
        """From pixels 0..255 to what the detector takes. pixel_type: of its pixels."""
        given = spec.input
        shape = self.node("Shape", [INPUT])
        batch = self.node("Gather", [shape.output[0], self.constant([0], np.int64)])
        nodes = [shape, batch]
        mask = ""
        if given.mask or (box.padded and not given.normalize_in_graph):
            sides = [np.arange(side) < inside for side, inside in zip(box.tensor_hw, box.content_hw, strict=True)]
            inside = self.node(
                "Mul", [self.constant(sides[0][None, :, None], np.int64), self.constant(sides[1][None, None], np.int64)]
            )
            size = self.node("Concat", [batch.output[0], self.constant(box.tensor_hw, np.int64)], axis=0)
            expand = self.node("Expand", [inside.output[0], size.output[0]], PIXEL_MASK if given.mask else "")
            nodes += [inside, size, expand]
            mask = expand.output[0]
        last = INPUT
        if box.resize is not None:
            nodes += self.resized(box.resize)
            last = nodes[-1].output[0]
        if not given.normalize_in_graph:
            scale = np.reshape(given.rescale / np.array(given.std), (1, 3, 1, 1))
            shift = np.reshape(-np.array(given.mean) / np.array(given.std), (1, 3, 1, 1))
            nodes.append(self.node("Mul", [last, self.constant(scale, np.float32)]))
            nodes.append(self.node("Add", [nodes[-1].output[0], self.constant(shift, np.float32)]))
            last = nodes[-1].output[0]
            if box.padded:
                axis = self.node("Unsqueeze", [mask, self.constant([1], np.int64)])
                inside = self.node("Cast", [axis.output[0]], to=TensorProto.FLOAT)
                nodes += [axis, inside, self.node("Mul", [last, inside.output[0]])]
                last = nodes[-1].output[0]
        # The detector's own first nodes cast uint8 to float, which they also do with float; TensorRT computes nothing in uint8.
        readers = {node.op_type for node in self.model.graph.node if PIXEL_VALUES in node.input}
        if pixel_type == TensorProto.FLOAT or readers == {"Cast"}:
            nodes.append(self.node("Identity", [last], PIXEL_VALUES))
        else:
            nodes.append(self.node("Cast", [last], PIXEL_VALUES, to=pixel_type))
        if spec.decode.in_graph:
            size = self.node("Concat", [batch.output[0], self.constant([2], np.int64)], axis=0)
            content = self.constant([box.boxes_hw], np.int64)
            nodes += [size, self.node("Expand", [content, size.output[0]], TARGET_SIZES)]
        return nodes

    def resized(self, resize: FrameResize) -> list[onnx.NodeProto]:
        """From the input to pixels of the detector's size."""
        nodes: list[onnx.NodeProto] = []
        last = INPUT
        for rows in (resize.rows_first, not resize.rows_first):
            if rows:
                nodes.append(self.node("MatMul", [self.constant(resize.rows, np.float32), last]))
            else:
                nodes.append(self.node("MatMul", [last, self.constant(resize.columns.T, np.float32)]))
            if resize.rounded:
                half = self.node("Add", [nodes[-1].output[0], self.constant(0.5, np.float32)])
                floor = self.node("Floor", [half.output[0]])
                limits = [self.constant(value, np.float32) for value in (0.0, 255.0)]
                nodes += [half, floor, self.node("Clip", [floor.output[0], *limits])]
            last = nodes[-1].output[0]
        return nodes

    def after(self, spec: ModelSpec, box: Letterbox, rows: int) -> list[onnx.NodeProto]:
        """From the detector's outputs to rows of six numbers, best score first."""
        last = self.constant([-1], np.int64)
        if spec.decode.in_graph:
            scores = self.node("Unsqueeze", [SCORES, last])
            labels = self.node("Cast", [LABELS], to=TensorProto.FLOAT)
            wide = self.node("Unsqueeze", [labels.output[0], last])
            return [scores, labels, wide, self.node("Concat", [BOXES, scores.output[0], wide.output[0]], OUTPUT, axis=-1)]
        rule = spec.decode
        nodes: list[onnx.NodeProto] = []

        def then(op: str, *inputs: str, **attributes: object) -> str:
            nodes.append(self.node(op, inputs, **attributes))
            return str(nodes[-1].output[0])

        if rule.activation == "softmax":
            scores = then("Softmax", LOGITS, axis=-1)
            scores = then("Gather", scores, self.constant(np.arange(rule.num_classes), np.int64), axis=2)
        else:
            scores = then("Sigmoid", LOGITS)
        labels, line = "", self.constant([0, -1], np.int64)
        if rule.select == "query":
            best_class = then("ArgMax", scores, axis=2, keepdims=1)
            scores = then("GatherElements", scores, best_class, axis=2)
            labels = then("Reshape", best_class, line)
        scores = then("Reshape", scores, line)
        best = self.node("TopK", [scores, self.constant([rows], np.int64)], axis=1)
        best.output.append(f"{best.name}_output_1")
        nodes.append(best)
        flat = str(best.output[1])
        classes = self.constant(rule.num_classes, np.int64)
        query = flat if labels else then("Div", flat, classes)
        ids = then("GatherElements", labels, flat, axis=1) if labels else then("Sub", flat, then("Mul", query, classes))
        index = then("Unsqueeze", query, last)
        columns = [then("Gather", PRED_BOXES, self.constant([i], np.int64), axis=2) for i in range(4)]
        height, width = box.boxes_hw
        half = self.constant(0.5, np.float32)
        corners = []
        for sign in ("Sub", "Add"):
            for centre, side, pixels in ((columns[0], columns[2], width), (columns[1], columns[3], height)):
                edge = then(sign, centre, then("Mul", side, half))
                scaled = then("Mul", edge, self.constant(float(pixels), np.float32))
                # The parser clips to the network's input, which is larger than the frame where there is padding.
                inside = then("Clip", scaled, self.constant(0.0, np.float32), self.constant(float(pixels), np.float32))
                corners.append(then("GatherElements", inside, index, axis=1))
        wide = [then("Unsqueeze", best.output[0], last), then("Unsqueeze", then("Cast", ids, to=TensorProto.FLOAT), last)]
        nodes.append(self.node("Concat", [*corners, *wide], OUTPUT, axis=-1))
        return nodes
