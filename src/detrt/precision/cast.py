"""Give every FP32 tensor of a graph its type: casts where two types meet, and none anywhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError
from ..graph.clean import drop_dead, replace_nodes, set_opset
from ..graph.operators import FILL_LIMIT, FILL_VALUE
from ..graph.view import BF16, ELEMENT_TYPE, FLOAT, HALF, GraphView
from ..spec import Precision
from .rules import Rules, fixed_inputs


@dataclass(slots=True)
class Typing:
    """What `retype` did. low: names of nodes in the low type. kept: node -> why it stays FP32. casts: added."""

    low: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)
    casts: int = 0
    fills: int = 0


def retype(model: onnx.ModelProto, rules: Rules, precision: Precision) -> Typing:
    """Change the graph in place to FP16 or BF16, except for what `rules` keep.

    Inputs and outputs of the graph keep their types. Weights are stored in the type that reads them.

    Raises:
        GraphError: the graph that comes out is not valid; a fault of the rules.
    """
    return _Retyper(model, rules, precision).run()


class _Retyper:
    def __init__(self, model: onnx.ModelProto, rules: Rules, precision: Precision) -> None:
        self.model, self.rules, self.precision = model, rules, Precision(precision)
        self.view: GraphView = rules.view
        self.low = ELEMENT_TYPE[self.precision]
        self.done = Typing()
        self.copies: dict[tuple[str, int], str] = {}  # (tensor, type) -> its name in that type
        self.before: list[onnx.NodeProto] = []  # casts of graph inputs
        self.after: dict[int, list[onnx.NodeProto]] = {}  # node -> casts of its outputs

    def run(self) -> Typing:
        view, graph = self.view, self.model.graph
        self.wide = self._resolve()
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
            set_opset(self.model, 22)
        return self.done

    def _resolve(self) -> set[int]:
        """Indices of the nodes that compute in FP32, movement included.

        A value that comes in FP32 and is wanted in FP32 stays so on its way; any other movement is done in
        the low type, with half the bytes.
        """
        view, rules = self.view, self.rules
        wide = {i for i, node in enumerate(view.nodes) if i in rules.keep}
        wanted = {name for name in view.outputs if view.is_float(name)}
        for index in reversed(range(len(view.nodes))):
            node = view.nodes[index]
            if index in wide or (index in rules.free and wanted.intersection(node.output)):
                wanted.update(n for p, n in enumerate(node.input) if n and p not in fixed_inputs(node))
            wanted.update(node.input[p] for p in fixed_inputs(node) if p < len(node.input))
        exact: set[str] = {name for name in view.inputs if view.is_float(name)}
        for index, node in enumerate(view.nodes):
            if index in wide:
                exact.update(node.output)
            elif index in rules.free and wanted.intersection(node.output):
                inputs = view.float_inputs(node)
                # Without a computed input (a Cast of the mask, a fill) the value is made here, in what is wanted.
                if any(name in exact for name in inputs) or not inputs:
                    wide.add(index)
                    exact.update(node.output)
        return wide

    def _type_node(self, index: int, node: onnx.NodeProto) -> None:
        view = self.view
        floats_out = [name for name in node.output if name and view.is_float(name)]
        floats_in = [(p, n) for p, n in enumerate(node.input) if n and view.is_float(n)]
        if not floats_out and not floats_in:
            return
        kind = FLOAT if index in self.wide else self.low
        if kind == self.low:
            self.done.low.add(node.name)
        elif index in self.rules.keep:
            self.done.kept[node.name] = self.rules.keep[index]
        for position, name in floats_in:
            node.input[position] = self._in_type(name, FLOAT if position in fixed_inputs(node) else kind)
        if kind == self.low and floats_out:
            _set_made_type(node, kind)

    def _kind_of(self, name: str) -> int:
        index = self.view.index.get(name)
        return FLOAT if index is None or index in self.wide else self.low

    def _in_type(self, name: str, kind: int) -> str:
        """The name under which a tensor can be read in a type; makes the cast or the constant on first use."""
        view = self.view
        if name in view.constants:
            return self._constant(name, kind)
        if self._kind_of(name) == kind:
            return name
        if (name, kind) not in self.copies:
            copy = f"{name}/{'fp32' if kind == FLOAT else self.precision}"
            self.copies[name, kind] = copy
            index = view.index.get(name)
            maker = view.nodes[index] if index is not None else None
            source = name
            if maker is not None and maker.op_type == "Cast" and not view.float_inputs(maker):
                source = maker.input[0]  # straight from the integer, not through another float
            label = f"{maker.name if maker is not None else '/' + name}/Cast_{'fp32' if kind == FLOAT else self.precision}"
            cast = helper.make_node("Cast", [source], [copy], name=label, to=kind)
            (self.before if index is None else self.after.setdefault(index, [])).append(cast)
            self.done.casts += 1
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
        """finfo.min of FP32 is -inf in 16 bits, and a row of nothing but -inf is NaN after a softmax."""
        if index in self.rules.coordinates:
            return
        for position, name in enumerate(node.input):
            array = self.view.array(name) if name in self.view.constants and self.view.is_float(name) else None
            if array is None or not _is_fill(array) or position in fixed_inputs(node):
                continue
            clamped = f"{name}/fill"
            if clamped not in self.view.constants:
                tensor = numpy_helper.from_array(_clamped(array), clamped)
                self.model.graph.initializer.append(tensor)
                self.view.constants[clamped] = self.model.graph.initializer[-1]
                self.view.types[clamped] = FLOAT
                self.done.fills += 1
            node.input[position] = clamped
        if node.op_type == "ConstantOfShape":
            for entry in node.attribute:
                if entry.name == "value" and entry.t.data_type == FLOAT and _is_fill(numpy_helper.to_array(entry.t)):
                    entry.t.CopyFrom(numpy_helper.from_array(_clamped(numpy_helper.to_array(entry.t))))
                    self.done.fills += 1

    def _outputs(self) -> None:
        """A graph output that is now in the low type keeps its name and its FP32."""
        for name in sorted(self.view.outputs):
            if not self.view.is_float(name) or self._kind_of(name) == FLOAT:
                continue
            index = self.view.index[name]
            inner = f"{name}/{self.precision}"
            cast = helper.make_node("Cast", [inner], [name], name=f"{self.view.nodes[index].name}/Cast_fp32", to=FLOAT)
            for node in self.view.nodes:
                for position, read in enumerate(node.input):
                    if read == name:
                        node.input[position] = inner
            for casts in self.after.values():
                for other in casts:
                    for position, read in enumerate(other.input):
                        if read == name:
                            other.input[position] = inner
            made = self.view.nodes[index].output
            made[list(made).index(name)] = inner
            self.after.setdefault(index, []).append(cast)
            self.done.casts += 1


def _is_fill(array: np.ndarray) -> bool:
    return bool(array.size) and bool((np.isfinite(array) & (np.abs(array) >= FILL_LIMIT)).any())


def _clamped(array: np.ndarray) -> np.ndarray:
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


def _set_made_type(node: onnx.NodeProto, kind: int) -> None:
    """Nodes that make a float from none name its type in an attribute."""
    for entry in node.attribute:
        if node.op_type == "Cast" and entry.name == "to":
            entry.i = kind
        elif node.op_type == "ConstantOfShape" and entry.name == "value":
            array = numpy_helper.to_array(entry.t)
            precision = Precision.FP16 if kind == HALF else Precision.BF16
            entry.t.CopyFrom(to_tensor(array, entry.t.name, precision))
