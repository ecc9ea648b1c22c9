"""The graph that DeepStream's nvinfer takes: raw RGB as float32 in, boxes, scores, classes and masks as one tensor out.

The output has the form of DeepStream-Yolo's parser `NvDsInferParseYolo`: (batch, rows, 6) with x0, y0, x1, y1 in pixels of the
network's input, score and class. With masks it has that of DeepStream-Yolo-Seg's `NvDsInferParseYoloSeg`: behind the six numbers the
probabilities of a mask of a quarter of the network's height and width, which covers the box. Scaling and normalisation are in the graph,
so that nvinfer passes its pixels on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ..errors import GraphError
from ..spec import BOXES, LABELS, LOGITS, MASK_LOGITS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, SCORES, TARGET_SIZES, ModelSpec
from .clean import drop_dead
from .dialect import for_typed_parser
from .nodes import GraphBuilder, replace_nodes

INPUT, OUTPUT = "input", "output"
MASK_STRIDE = 4  # of the masks in pixels of the network's input, a constant of the parser


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


def mask_side(box: Letterbox) -> tuple[int, int]:
    """(height, width) of the masks, as the parser computes it."""
    height, width = box.network_hw
    return height // MASK_STRIDE, width // MASK_STRIDE


def for_deepstream(model: onnx.ModelProto, spec: ModelSpec, box: Letterbox, rows: int, *, masks: bool = False) -> onnx.ModelProto:
    """A copy of a detector's graph for nvinfer; the batch stays symbolic if it is. rows: of the output. masks: it has them, too.

    Raises:
        GraphError: a graph that is built for another size.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    (pixels,) = (value for value in graph.input if value.name == PIXEL_VALUES)
    before, after = GraphBuilder("deepstream"), GraphBuilder("deepstream/after")
    _before(before, copy, spec, box, pixels.type.tensor_type.elem_type)
    boxes, others, query = _after(after, spec, box, rows)
    columns = [boxes, *others, *([_masks(after, spec, box, rows, boxes, query)] if masks else [])]
    after.op("Concat", *columns, output=OUTPUT, axis=-1)
    tall, wide = mask_side(box) if masks else (0, 0)
    batch = pixels.type.tensor_type.shape.dim[0]
    for dim, side in zip(pixels.type.tensor_type.shape.dim[2:], box.tensor_hw, strict=True):
        if dim.HasField("dim_value") and dim.dim_value != side:
            raise GraphError(f"the graph takes another size than {box.tensor_hw[0]}x{box.tensor_hw[1]} (height x width)")
    size = batch.dim_param or batch.dim_value
    height, width = box.network_hw
    replace_nodes(copy, [*before.nodes, *graph.node, *after.nodes])
    graph.initializer.extend([*before.initializers, *after.initializers])
    del graph.input[:], graph.output[:]
    graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, [size, 3, height, width]))
    graph.output.append(helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, [size, rows, 6 + tall * wide]))
    del graph.value_info[:], copy.metadata_props[:]
    drop_dead(copy)  # outputs that are left out, with what leads to them alone
    onnx.checker.check_model(copy)
    for_typed_parser(copy)
    return copy


def _before(b: GraphBuilder, model: onnx.ModelProto, spec: ModelSpec, box: Letterbox, pixel_type: int) -> None:
    """From pixels 0..255 to what the detector takes. pixel_type: of its pixels."""
    given = spec.input
    batch = b.op("Gather", b.op("Shape", INPUT), b.ints(0))
    mask = ""
    if given.mask or (box.padded and not given.normalize_in_graph):
        sides = [np.arange(side) < inside for side, inside in zip(box.tensor_hw, box.content_hw, strict=True)]
        inside = b.op("Mul", b.const(sides[0][None, :, None], np.int64), b.const(sides[1][None, None], np.int64))
        size = b.op("Concat", batch, b.ints(*box.tensor_hw), axis=0)
        mask = b.op("Expand", inside, size, output=PIXEL_MASK if given.mask else None)
    pixels = INPUT if box.resize is None else _resized(b, box.resize)
    if not given.normalize_in_graph:
        scale = np.reshape(given.rescale / np.array(given.std), (1, 3, 1, 1))
        shift = np.reshape(-np.array(given.mean) / np.array(given.std), (1, 3, 1, 1))
        pixels = b.op("Add", b.op("Mul", pixels, b.const(scale, np.float32)), b.const(shift, np.float32))
        if box.padded:
            inside = b.op("Cast", b.op("Unsqueeze", mask, b.ints(1)), to=TensorProto.FLOAT)
            pixels = b.op("Mul", pixels, inside)
    # The detector's own first nodes cast uint8 to float, which they also do with float; TensorRT computes nothing in uint8.
    readers = {node.op_type for node in model.graph.node if PIXEL_VALUES in node.input}
    if pixel_type == TensorProto.FLOAT or readers == {"Cast"}:
        b.op("Identity", pixels, output=PIXEL_VALUES)
    else:
        b.op("Cast", pixels, output=PIXEL_VALUES, to=pixel_type)
    if spec.decode.in_graph:
        content = b.const([box.boxes_hw], np.int64)
        b.op("Expand", content, b.op("Concat", batch, b.ints(2), axis=0), output=TARGET_SIZES)


def _resized(b: GraphBuilder, resize: FrameResize) -> str:
    """From the input to pixels of the detector's size."""
    pixels = INPUT
    for rows in (resize.rows_first, not resize.rows_first):
        if rows:
            pixels = b.op("MatMul", b.const(resize.rows, np.float32), pixels)
        else:
            pixels = b.op("MatMul", pixels, b.const(resize.columns.T, np.float32))
        if resize.rounded:
            floor = b.op("Floor", b.op("Add", pixels, b.const(0.5, np.float32)))
            pixels = b.op("Clip", floor, b.const(0.0, np.float32), b.const(255.0, np.float32))
    return pixels


def _after(b: GraphBuilder, spec: ModelSpec, box: Letterbox, rows: int) -> tuple[str, list[str], str]:
    """Boxes (batch, rows, 4), best score first, scores and classes (batch, rows, 1), and the number of each row's query (batch, rows), "" if
    the detector's outputs are rows already."""
    last = b.ints(-1)
    if spec.decode.in_graph:
        scores = b.op("Unsqueeze", SCORES, last)
        labels = b.op("Unsqueeze", b.op("Cast", LABELS, to=TensorProto.FLOAT), last)
        return BOXES, [scores, labels], ""
    rule = spec.decode
    if rule.activation == "softmax":
        scores = b.op("Softmax", LOGITS, axis=-1)
        scores = b.op("Gather", scores, b.ints(*range(rule.num_classes)), axis=2)
    else:
        scores = b.op("Sigmoid", LOGITS)
    labels = ""
    if rule.select == "query":
        best_class = b.op("ArgMax", scores, axis=2, keepdims=1)
        scores = b.op("GatherElements", scores, best_class, axis=2)
        labels = b.reshape(best_class, 0, -1)
    scores, flat = b.op("TopK", b.reshape(scores, 0, -1), b.ints(rows), outputs=2, axis=1)
    classes = b.const(rule.num_classes, np.int64)
    query = flat if labels else b.op("Div", flat, classes)
    ids = b.op("GatherElements", labels, flat, axis=1) if labels else b.op("Sub", flat, b.op("Mul", query, classes))
    index = b.op("Unsqueeze", query, last)
    columns = [b.op("Gather", PRED_BOXES, b.ints(i), axis=2) for i in range(4)]
    height, width = box.boxes_hw
    half = b.const(0.5, np.float32)
    corners = []
    for sign in ("Sub", "Add"):
        for centre, side, pixels in ((columns[0], columns[2], width), (columns[1], columns[3], height)):
            edge = b.op(sign, centre, b.op("Mul", side, half))
            limit = b.const(float(pixels), np.float32)
            # The parser clips to the network's input, which is larger than the frame where there is padding.
            inside = b.op("Clip", b.op("Mul", edge, limit), b.const(0.0, np.float32), limit)
            corners.append(b.op("GatherElements", inside, index, axis=1))
    others = [b.op("Unsqueeze", value, last) for value in (scores, b.op("Cast", ids, to=TensorProto.FLOAT))]
    return b.op("Concat", *corners, axis=-1), others, query


def _masks(b: GraphBuilder, spec: ModelSpec, box: Letterbox, rows: int, boxes: str, query: str) -> str:
    """Probabilities (batch, rows, pixels of a mask): the logits between the values of each box's map, by the rule of `tasks.masks`.

    Two matmuls for each box, whose weights are 0 but for the two nearest values, so that every TensorRT can run them.
    """
    stride = spec.decode.mask_stride
    sides = [int(side / stride) for side in box.tensor_hw]
    maps = MASK_LOGITS
    if query:
        queries = b.const(spec.decode.num_queries, np.int64)
        images = b.op("Squeeze", b.op("Slice", b.op("Shape", query), b.ints(0), b.ints(1)), b.ints(0))
        first = b.op("Mul", b.op("Range", b.const(0, np.int64), images, b.const(1, np.int64)), queries)
        index = b.op("Add", query, b.op("Unsqueeze", first, b.ints(1)))
        maps = b.op("Gather", b.reshape(maps, -1, *sides), index, axis=0)  # of whole maps
    one, zero = b.const(1.0, np.float32), b.const(0.0, np.float32)
    weights = []
    for axis, side, pixels, content, frame in zip((1, 0), sides, mask_side(box), box.content_hw, box.boxes_hw, strict=True):
        low, high = (b.op("Gather", boxes, b.ints(corner), axis=2) for corner in (axis, axis + 2))  # (batch, rows, 1)
        steps = b.const((np.arange(pixels) + 0.5) / pixels, np.float32)
        position = b.op("Add", low, b.op("Mul", b.op("Sub", high, low), steps))  # in pixels of the network's input
        position = b.op("Mul", position, b.const(content / stride / frame, np.float32))
        position = b.op("Sub", position, b.const(0.5, np.float32))
        position = b.op("Clip", position, zero, b.const(float(side - 1), np.float32))
        values = np.arange(side, dtype=np.float32)
        of_map = b.const(values if axis else values[:, None], np.float32)
        position = b.op("Unsqueeze", position, b.ints(-1 if axis else -2))
        distance = b.op("Abs", b.op("Sub", position, of_map))
        weights.append(b.op("Max", b.op("Sub", one, distance), zero))  # rows: (batch, rows, mask, map), columns: (.., map, mask)
    found = b.op("Sigmoid", b.op("MatMul", b.op("MatMul", weights[0], maps), weights[1]))
    tall, wide = mask_side(box)
    return b.reshape(found, 0, rows, tall * wide)
