"""First convolutions over blocks of pixels: few channels leave the tensor cores of a GPU without work."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .clean import drop_dead
from .nodes import replace_nodes
from .operators import kernel_over_blocks
from .view import attribute, inferred

_FEW = 4  # channels of an image, with opacity
# Side of the smallest kernel. TensorRT-RTX 1.6.1 on an H200, ms of the convolution as exported and over blocks: 7x7 of DETR 0.265, 0.133;
# 16x16 of LW-DETR 0.164, less than 0.029; 3x3 of D-FINE-L 0.037, 0.073.
_SMALLEST = 7


def convolve_blocks(model: onnx.ModelProto) -> int:
    """Let convolutions of few channels read blocks of as many pixels as their stride, in place; returns how many.

    A kernel of 7x7 over 3 channels with stride 2 becomes one of 4x4 over 12 with stride 1, one of 16x16 with stride 16, a ViT's patches,
    one of 1x1 over 768; the products are the same. Smaller kernels than 7x7 stay as they are. The image's size must be known, and be whole
    blocks.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes: dict[str, list[int]] = {}
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in model.graph.node:
        tensor = constants.get(node.input[1]) if node.op_type == "Conv" else None
        if tensor is None or len(tensor.dims) != 4 or tensor.dims[1] > _FEW or attribute(node, "group", 1) != 1:
            nodes.append(node)
            continue
        if not shapes:
            graph = inferred(model)
            shapes = {
                value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
                for value in (*graph.input, *graph.value_info)
            }
        written = _over_blocks(node, numpy_helper.to_array(tensor), shapes.get(node.input[0], ()))
        if written is None:
            nodes.append(node)
            continue
        (blocks, conv), kernel = written
        model.graph.initializer.append(numpy_helper.from_array(kernel, conv.input[1]))
        nodes += [blocks, conv]
        count += 1
    if count:
        replace_nodes(model, nodes)
        drop_dead(model)
    return count


def _over_blocks(node: onnx.NodeProto, weight: np.ndarray, shape: Any) -> tuple[list[onnx.NodeProto], np.ndarray] | None:
    """(what takes the place of a convolution, its weights), or None where it cannot read whole blocks."""
    out, channels, *kernel = weight.shape
    steps: Any = attribute(node, "strides", [1, 1])
    stride, sides = steps[0], shape[2:]
    plain = attribute(node, "auto_pad", b"NOTSET") in (b"NOTSET", b"") and set(attribute(node, "dilations", [1])) == {1}  # type: ignore[arg-type]
    if (
        not plain
        or stride < 2
        or min(kernel) < _SMALLEST
        or steps[1] != stride
        or len(sides) != 2
        or not all(sides)
        or any(side % stride for side in sides)
    ):
        return None
    own: Any = attribute(node, "pads", [0] * 4)
    pads, margins = ([], []), []
    for side, size, before, after in zip(sides, kernel, own[:2], own[2:], strict=True):
        first, last, margin = kernel_over_blocks(size, before, stride)
        outputs = (side + before + after - size) // stride + 1
        pads[0].append(-first)
        pads[1].append(outputs + last - side // stride)
        margins.append(margin)
    if min(pads[1]) < 0:  # blocks at the end that nothing reads
        return None
    whole = np.pad(weight, [(0, 0), (0, 0), *margins])
    rows, columns = (size // stride for size in whole.shape[2:])
    # The order of SpaceToDepth: row, column, channel.
    parts = whole.reshape(out, channels, rows, stride, columns, stride).transpose(0, 3, 5, 1, 2, 4)
    data, name = f"{node.output[0]}/blocks", f"{node.output[0]}/weight_over_blocks"
    blocks = helper.make_node("SpaceToDepth", node.input[:1], [data], f"{node.name}/SpaceToDepth", blocksize=stride)
    conv = helper.make_node(
        "Conv", [data, name, *node.input[2:]], node.output, node.name, kernel_shape=[rows, columns], pads=[*pads[0], *pads[1]]
    )
    return [blocks, conv], np.ascontiguousarray(parts.reshape(out, -1, rows, columns))
