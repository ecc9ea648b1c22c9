"""Another opset of a graph, in place."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import GraphError
from .clean import drop_dead
from .nodes import DEFAULT_DOMAINS, drop_attribute
from .view import attribute


def set_opset(model: onnx.ModelProto, version: int) -> None:
    """Raise the default opset in place; rewrites only operators that occur in detector graphs.

    Raises:
        GraphError: an operator whose semantics change and that is not rewritten here.
    """
    entry = next(e for e in model.opset_import if e.domain in DEFAULT_DOMAINS)
    if entry.version >= version:
        return
    old = entry.version
    graph = model.graph
    for node in graph.node:
        if old < 18 <= version and node.op_type in _AXES_BECAME_INPUT:
            axes = attribute(node, "axes")
            if axes is not None:
                name = f"{node.output[0]}/axes"
                graph.initializer.append(numpy_helper.from_array(np.asarray(axes, np.int64), name))
                node.input.append(name)
                drop_attribute(node, "axes")
        if old < 18 <= version and node.op_type == "Split" and len(node.input) < 2:
            node.attribute.append(onnx.helper.make_attribute("num_outputs", len(node.output)))
        if old < 20 <= version and node.op_type == "GridSample":
            mode = {b"bilinear": "linear", b"bicubic": "cubic"}.get(attribute(node, "mode", b"bilinear"), "nearest")
            drop_attribute(node, "mode")
            node.attribute.append(onnx.helper.make_attribute("mode", mode))
        if old < 21 <= version and node.op_type == "GroupNormalization":
            raise GraphError(f"node '{node.name}' (GroupNormalization) has other semantics since opset 21; export again")
    entry.version = version
    # IR version of an opset; onnxruntime and TensorRT reject newer operators in older formats.
    model.ir_version = max(model.ir_version, {19: 9, 20: 9, 21: 10, 22: 10}.get(version, 8))


def lower_opset(model: onnx.ModelProto, version: int) -> None:
    """Lower the default opset in place, for parsers that read no newer one.

    Raises:
        GraphError: a node that the older opset cannot express.
    """
    entry = next(e for e in model.opset_import if e.domain in DEFAULT_DOMAINS)
    if entry.version <= version:
        return
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.domain not in DEFAULT_DOMAINS:
            continue
        if version < 18 and node.op_type in _AXES_BECAME_INPUT and len(node.input) > 1 and node.input[1] in constants:
            axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
            node.attribute.append(onnx.helper.make_attribute("axes", axes))
            del node.input[1:]
        if version < 18 and node.op_type == "Split" and len(node.input) < 2:
            drop_attribute(node, "num_outputs")
        if version < 20:
            _name_mode_as_before(node)
        _check_expressible(node, entry.version, version)
    entry.version = version
    drop_dead(model)


def name_modes_as_before(model: onnx.ModelProto) -> int:
    """Give the modes of GridSample their names before opset 20 ("bilinear", "bicubic"), in place; returns how many changed.

    For parsers that know the old names only and take any other for the nearest pixel, whatever the opset. The graph itself is then
    invalid ONNX from opset 20 on.
    """
    return sum(_name_mode_as_before(node) for node in model.graph.node if node.domain in DEFAULT_DOMAINS)


def _name_mode_as_before(node: onnx.NodeProto) -> bool:
    mode = attribute(node, "mode", b"linear")
    before = {b"linear": "bilinear", b"cubic": "bicubic"}
    if node.op_type != "GridSample" or mode not in before:
        return False
    drop_attribute(node, "mode")
    node.attribute.append(onnx.helper.make_attribute("mode", before[mode]))
    return True


def _check_expressible(node: onnx.NodeProto, new: int, old: int) -> None:
    """Drop attributes that an older opset lacks where they have their default value; refuse other values and more inputs."""
    refusal = f"node '{node.name}' ({node.op_type}) cannot be expressed in opset {old}; export the model with `opset={old}`"
    try:
        schema = onnx.defs.get_schema(node.op_type, old)
        newer = onnx.defs.get_schema(node.op_type, new)
    except onnx.defs.SchemaError:
        raise GraphError(refusal) from None
    if schema.deprecated or len(node.input) > schema.max_input or len(node.output) > schema.max_output:
        raise GraphError(refusal)
    for entry in list(node.attribute):
        if entry.name in schema.attributes:
            continue
        default = newer.attributes[entry.name].default_value if entry.name in newer.attributes else None
        if default is None or onnx.helper.get_attribute_value(default) != onnx.helper.get_attribute_value(entry):
            raise GraphError(refusal)
        drop_attribute(node, entry.name)


_AXES_BECAME_INPUT = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
    "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip
