"""Conversion of the FP32 tensors of a graph to their types, with casts only between different types."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError
from ..graph.clean import drop_dead
from ..graph.nodes import replace_nodes
from ..graph.operators import FILL_LIMIT, FILL_VALUE
from ..graph.opset import set_opset
from ..graph.view import BF16, ELEMENT_TYPE, FLOAT, HALF, GraphView
from ..spec import Precision
from .rules import BF16_OPSET, Rules, fixed_inputs


@dataclass(slots=True)
class Typing:
    """Result of `retype`. low: names of nodes in the low type. fp32_reasons: node -> why it stays FP32. casts, fills: number of
    casts added, and of fills clamped."""

    low: set[str] = field(default_factory=set)
    fp32_reasons: dict[str, str] = field(default_factory=dict)
    casts: int = 0
    fills: int = 0


def retype(model: onnx.ModelProto, rules: Rules, precision: Precision) -> Typing:
    """Convert the graph in place to FP16 or BF16, except for the nodes that `rules` keep.

    Inputs and outputs of the graph keep their types. Weights are stored in the type of their readers.

    Raises:
        GraphError: a constant that the type cannot hold.
    """
    return _Retyper(model, rules, precision).run()


class _Retyper:
    def __init__(self, model: onnx.ModelProto, rules: Rules, precision: Precision) -> None:
        self.model, self.rules, self.precision = model, rules, Precision(precision)
        self.view: GraphView = rules.view
        self.low = ELEMENT_TYPE[self.precision]
        self.typing = Typing()
        self.copies: dict[tuple[str, int], str] = {}  # (tensor, type) -> its name in that type
        self.before: list[onnx.NodeProto] = []  # casts of graph inputs
        self.after: dict[int, list[onnx.NodeProto]] = {}  # node -> casts of its outputs

    def run(self) -> Typing:
        view, graph = self.view, self.model.graph
        self.fp32_nodes = self._resolve()
        for index, node in enumerate(view.nodes):
            self._clamp_fills(index, node)
        for index, node in enumerate(view.nodes):
            self._type_node(index, node)
        self._outputs()
        nodes = list(self.before)
        for index, node in enumerate(view.nodes):
            nodes.append(node)
            nodes.extend(self.after.get(index, ()))
        replace_nodes(self.model, nodes)
        del graph.value_info[:]
        drop_dead(self.model)
        if self.low == BF16:
            set_opset(self.model, BF16_OPSET)
        return self.typing

    def _resolve(self) -> set[int]:
        """Indices of the nodes that compute in FP32, movement included.

        A value that is produced and read in FP32 is moved in FP32; all other movement is in the low type, with half the bytes.
        """
        view, rules = self.view, self.rules
        fp32_nodes = {i for i, node in enumerate(view.nodes) if i in rules.keep}
        fp32_tensors = {name for name in view.outputs if view.is_float(name)}
        for index in reversed(range(len(view.nodes))):
            node = view.nodes[index]
            if index in fp32_nodes or (index in rules.free and fp32_tensors.intersection(node.output)):
                fp32_tensors.update(n for p, n in enumerate(node.input) if n and p not in fixed_inputs(node))
            fp32_tensors.update(node.input[p] for p in fixed_inputs(node) if p < len(node.input))
        exact: set[str] = {name for name in view.inputs if view.is_float(name)}
        for index, node in enumerate(view.nodes):
            if index in fp32_nodes:
                exact.update(node.output)
            elif index in rules.free and fp32_tensors.intersection(node.output):
                inputs = view.float_inputs(node)
                # Without a float input (a Cast of the mask, a fill) the node produces the type that its readers need.
                if any(name in exact for name in inputs) or not inputs:
                    fp32_nodes.add(index)
                    exact.update(node.output)
        return fp32_nodes

    def _type_node(self, index: int, node: onnx.NodeProto) -> None:
        view = self.view
        floats_out = [name for name in node.output if name and view.is_float(name)]
        floats_in = [(p, n) for p, n in enumerate(node.input) if n and view.is_float(n)]
        if not floats_out and not floats_in:
            return
        kind = FLOAT if index in self.fp32_nodes else self.low
        if kind == self.low:
            self.typing.low.add(node.name)
        elif index in self.rules.keep:
            self.typing.fp32_reasons[node.name] = self.rules.keep[index]
        for position, name in floats_in:
            node.input[position] = self._in_type(name, FLOAT if position in fixed_inputs(node) else kind)
        if kind == self.low and floats_out:
            _set_output_type(node, kind)

    def _kind_of(self, name: str) -> int:
        index = self.view.index.get(name)
        return FLOAT if index is None or index in self.fp32_nodes else self.low

    def _in_type(self, name: str, kind: int) -> str:
        """The name of a tensor in a type; adds the cast or the constant on first use."""
        view = self.view
        if name in view.constants:
            return self._constant(name, kind)
        if self._kind_of(name) == kind:
            return name
        if (name, kind) not in self.copies:
            copy = f"{name}/{'fp32' if kind == FLOAT else self.precision}"
            self.copies[name, kind] = copy
            index = view.index.get(name)
            producer = view.nodes[index] if index is not None else None
            source = name
            if producer is not None and producer.op_type == "Cast" and not view.float_inputs(producer):
                source = producer.input[0]  # directly from the integer, not through another float type
            label = f"{producer.name if producer is not None else '/' + name}/Cast_{'fp32' if kind == FLOAT else self.precision}"
            cast = helper.make_node("Cast", [source], [copy], name=label, to=kind)
            (self.before if index is None else self.after.setdefault(index, [])).append(cast)
            self.typing.casts += 1
        return self.copies[name, kind]

    def _constant(self, name: str, kind: int) -> str:
        if kind == FLOAT:
            return name
        if (name, kind) not in self.copies:
            copy = f"{name}/{self.precision}"
            self.copies[name, kind] = copy
            array = self.view.array(name)
            self.model.graph.initializer.append(to_tensor(array, copy, self.precision))
        return self.copies[name, kind]

    def _clamp_fills(self, index: int, node: onnx.NodeProto) -> None:
        """Clamp fills: finfo.min of FP32 is -inf in 16 bits, and a softmax over a row of -inf is NaN."""
        if index in self.rules.coordinates:
            return
        for position, name in enumerate(node.input):
            array = self.view.array(name) if name in self.view.constants and self.view.is_float(name) else None
            if array is None or not _is_fill(array) or position in fixed_inputs(node):
                continue
            clamped = f"{name}/fill"
            if clamped not in self.view.constants:
                tensor = numpy_helper.from_array(_clamp(array), clamped)
                self.model.graph.initializer.append(tensor)
                self.view.constants[clamped] = self.model.graph.initializer[-1]
                self.view.types[clamped] = FLOAT
                self.typing.fills += 1
            node.input[position] = clamped
        if node.op_type == "ConstantOfShape":
            for entry in node.attribute:
                if entry.name == "value" and entry.t.data_type == FLOAT and _is_fill(numpy_helper.to_array(entry.t)):
                    entry.t.CopyFrom(numpy_helper.from_array(_clamp(numpy_helper.to_array(entry.t))))
                    self.typing.fills += 1

    def _outputs(self) -> None:
        """Cast graph outputs in the low type back to FP32, under their names."""
        for name in sorted(self.view.outputs):
            if not self.view.is_float(name) or self._kind_of(name) == FLOAT:
                continue
            index = self.view.index[name]
            inner = f"{name}/{self.precision}"
            label = f"{self.view.nodes[index].name}/Cast_fp32"
            cast = helper.make_node("Cast", [inner], [name], name=label, to=FLOAT)
            casts = self.after.setdefault(index, [])
            # Nodes that read the value in FP32 have a cast of it already, and the output takes its place.
            wide = self.copies.get((name, FLOAT))
            casts[:] = [other for other in casts if wide not in other.output]
            renamed = {name: inner} | ({wide: name} if wide else {})
            for node in (*self.view.nodes, *(other for others in self.after.values() for other in others)):
                for position, name_read in enumerate(node.input):
                    node.input[position] = renamed.get(name_read, name_read)
            outputs = self.view.nodes[index].output
            outputs[list(outputs).index(name)] = inner
            casts.append(cast)
            if not wide:
                self.typing.casts += 1


def _is_fill(array: np.ndarray) -> bool:
    return bool(array.size) and bool((np.isfinite(array) & (np.abs(array) >= FILL_LIMIT)).any())


def _clamp(array: np.ndarray) -> np.ndarray:
    fill = np.isfinite(array) & (np.abs(array) >= FILL_LIMIT)
    return np.where(fill, np.sign(array) * FILL_VALUE, array).astype(np.float32)


def to_tensor(array: np.ndarray, name: str, precision: Precision) -> TensorProto:
    """A constant in a 16-bit type, rounded to nearest; finite values stay finite.

    Raises:
        GraphError: a weight that the type cannot hold; the scan keeps such layers in FP32.
    """
    limit = precision.max_value
    finite = np.isfinite(array)
    if precision == Precision.FP16 and (np.abs(array[finite]) > limit).any():
        raise GraphError(f"constant '{name}' holds values beyond {limit:g}, which FP16 cannot; keep its layer in FP32")
    if precision == Precision.FP16:
        return numpy_helper.from_array(np.ascontiguousarray(array.astype(np.float16)), name)
    return helper.make_tensor(name, BF16, array.shape, bf16_bits(array).tobytes(), raw=True)


def bf16_bits(array: np.ndarray) -> np.ndarray:
    """uint16 bit patterns of FP32 values rounded to BF16, ties to even; same shape."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isfinite(array), rounded, bits >> 16).astype(np.uint16)


def _set_output_type(node: onnx.NodeProto, kind: int) -> None:
    """Set the type attribute of nodes that produce a float without a float input."""
    for entry in node.attribute:
        if node.op_type == "Cast" and entry.name == "to":
            entry.i = kind
        elif node.op_type == "ConstantOfShape" and entry.name == "value":
            array = numpy_helper.to_array(entry.t)
            precision = Precision.FP16 if kind == HALF else Precision.BF16
            entry.t.CopyFrom(to_tensor(array, entry.t.name, precision))
