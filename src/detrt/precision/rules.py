"""What must stay in FP32, and why: rules over the graph, the same for every family.

The words used below: *coordinates* are tensors that end in positions, indices or rankings; *movement* is an
operator that only moves values, so that it takes the type of what it moves.
"""

from __future__ import annotations

import numpy as np
import onnx

from ..graph.names import matches
from ..graph.operators import (
    BARRIER,
    COMPARE,
    DECIDE,
    DECIDING_INPUT,
    ELEMENTWISE,
    FILL_LIMIT,
    GEMM,
    MOVEMENT,
    PLUGIN_NODES,
    WIDE,
)  # fmt: skip
from ..graph.view import BF16, FLOAT, HALF, GraphView, attribute
from ..spec import Precision


class Rules:
    """keep: node index -> why it stays FP32. free: nodes that take the type of what they move.

    precision: FP16 or BF16. patterns: of names that the caller keeps. extra: node name -> reason, from calibration.
    """

    def __init__(
        self,
        view: GraphView,
        precision: Precision,
        patterns: tuple[str, ...] = (),
        extra: dict[str, str] | None = None,
    ) -> None:
        self.view, self.precision = view, Precision(precision)
        self.keep: dict[int, str] = {}
        self.coordinates: set[int] = set()
        self._walk_back()
        self._walk_forward()
        for index, node in enumerate(view.nodes):
            reason = (extra or {}).get(node.name) or self._reason(node)
            if matches(node.name, patterns):
                reason = "asked for"
            if reason and self._touches_floats(node):
                self.keep.setdefault(index, reason)
        self.free = {i for i, n in enumerate(view.nodes) if self._moves(n) and i not in self.keep}

    def _touches_floats(self, node: onnx.NodeProto) -> bool:
        return any(self.view.is_float(name) for name in (*node.input, *node.output) if name)

    def _moves(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Resize":
            return attribute(node, "mode", b"nearest") == b"nearest"
        if node.op_type in ("Cast", "ConstantOfShape"):
            return not self.view.float_inputs(node)
        return node.op_type in MOVEMENT

    def _reason(self, node: onnx.NodeProto) -> str:
        view = self.view
        if node.op_type in WIDE.onnx:
            return f"{node.op_type} needs the range or the digits of FP32"
        if node.op_type == "TopK":
            return "order of scores"
        if node.op_type in COMPARE.onnx:
            return "comparison of exact values"
        if node.op_type == "Cast" and view.float_inputs(node):
            return "type of the original graph"
        if node.op_type == "Div" and view.float_inputs(node) and node.input[1] not in view.constants:
            return "division by a computed value"
        if node.op_type == "Resize" and attribute(node, "mode", b"nearest") == b"cubic":
            return "cubic interpolation of positions"
        if node.op_type == "GridSample":
            return "GridSample takes values and FP32 coordinates in one type"
        if node.op_type == "MultiscaleDeformableAttnPlugin_TRT":
            return "NVIDIA's plugin takes values and coordinates in one type"
        if self._constant_is_lost(node):
            return f"a constant that {self.precision} cannot hold"
        if self.precision == Precision.BF16 and not _takes_bf16(node, 22):
            return f"ONNX has no BF16 {node.op_type}"
        return ""

    def _constant_is_lost(self, node: onnx.NodeProto) -> bool:
        """A small constant (an epsilon), or one so large that it is neither a value nor a fill."""
        for position, name in enumerate(node.input):
            if name not in self.view.constants or not self.view.is_float(name) or position in fixed_inputs(node):
                continue
            values = np.abs(self.view.array(name)).reshape(-1)
            values = values[np.isfinite(values) & (values > 0)]
            if not values.size:
                continue
            largest = float(values.max())
            if largest < self.precision.min_normal or (self.precision.max_value < largest < FILL_LIMIT):
                return True
        return False

    def _walk_back(self) -> None:
        """From outputs, indices, orders and angles back to the products that their values come from."""
        view = self.view
        todo = [name for name in view.outputs if view.is_float(name)]
        for node in view.nodes:
            if node.op_type in DECIDE.onnx:
                todo += [n for p, n in enumerate(node.input) if n and DECIDING_INPUT.get(node.op_type, p) == p]
            elif node.op_type == "Cast" and attribute(node, "to") not in (FLOAT, HALF, BF16):
                todo += list(node.input)
        seen: set[str] = set()
        while todo:
            name = todo.pop()
            if name in seen or not view.is_float(name) or name not in view.index:
                continue
            seen.add(name)
            index = view.index[name]
            node = view.nodes[index]
            if node.op_type in BARRIER.onnx or (node.op_type in GEMM.onnx and not is_dot(view, node)) or is_bias(view, node):
                continue
            if not self._moves(node):
                self.keep[index] = "coordinates or scores: " + _DECIDED
                self.coordinates.add(index)
            todo += [n for p, n in enumerate(node.input) if n and p not in fixed_inputs(node)]

    def _walk_forward(self) -> None:
        """Arithmetic between coordinates stays: a difference of two positions cancels their leading digits."""
        view = self.view
        exact: set[str] = set()
        for index, node in enumerate(view.nodes):
            inputs = view.float_inputs(node)
            if index in self.keep or node.op_type in WIDE.onnx or node.op_type == "Cast":
                is_exact = index in self.keep or node.op_type in WIDE.onnx or (not inputs and self._from_input(node))
            elif node.op_type in ELEMENTWISE or self._moves(node):
                is_exact = bool(inputs) and all(name in exact for name in inputs)
                if is_exact and not self._moves(node):
                    self.keep[index] = "arithmetic on coordinates or raw pixels"
            else:
                is_exact = False
            if is_exact:
                exact.update(node.output)

    def _from_input(self, node: onnx.NodeProto) -> bool:
        """A Cast of the pixels, the mask, or of anything that is no float."""
        return node.op_type == "Cast" and not self.view.float_inputs(node)


_DECIDED = "an index, an order, an angle or an output depends on every digit"


# Coordinates of detrt's plugin are FP32 beside values of any type.
_FIXED = {"Resize": (1, 2), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "MSDeformAttn": (2,)}


def fixed_inputs(node: onnx.NodeProto) -> tuple[int, ...]:
    """Positions whose element type ONNX fixes, whatever the node computes in."""
    return _FIXED.get(node.op_type, ())


def is_dot(view: GraphView, node: onnx.NodeProto) -> bool:
    """A product with one vector, such as the expected distance of D-FINE's box head: arithmetic, not a layer."""
    if node.op_type not in ("MatMul", "Gemm"):
        return False
    weight = view.constants.get(node.input[1])
    if weight is None or len(weight.dims) > 2:
        return False
    transposed = node.op_type == "Gemm" and attribute(node, "transB", 0)
    columns = 1 if len(weight.dims) == 1 else weight.dims[0 if transposed else 1]
    before = view.producer.get(node.input[0])
    while before is not None and before.op_type in (
        "Reshape",
        "Transpose",
        "Squeeze",
        "Unsqueeze",
        "Flatten",
    ):
        before = view.producer.get(before.input[0])
    return columns == 1 and before is not None and before.op_type == "Softmax"


def is_bias(view: GraphView, node: onnx.NodeProto) -> bool:
    """An Add of one constant a channel right behind a product: part of it."""
    if node.op_type != "Add":
        return False
    for data, other in (node.input, reversed(node.input)):
        before = view.producer.get(data)
        if other in view.constants and before is not None and before.op_type in GEMM.onnx:
            return sum(side > 1 for side in view.constants[other].dims) <= 1 and len(view.readers[data]) == 1
    return False


def _takes_bf16(node: onnx.NodeProto, opset: int) -> bool:
    """Whether the operator's main input may be BF16 at an opset."""
    if node.op_type in PLUGIN_NODES:
        return True
    schema = onnx.defs.get_schema(node.op_type, opset)
    if not schema.inputs:
        return True
    kind = schema.inputs[0].type_str
    for constraint in schema.type_constraints:
        if constraint.type_param_str == kind:
            allowed = constraint.allowed_type_strs
            return "tensor(bfloat16)" in allowed or "tensor(float)" not in allowed
    return True
