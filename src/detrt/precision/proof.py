"""MACs of a graph by type; a silent downgrade or upgrade is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx

from ..backends.base import Feeds
from ..errors import GateError
from ..graph.operators import GEMM
from ..graph.view import attribute, element_types, type_name
from ..spec import Precision
from .calibrate import run_shapes
from .config import PrecisionConfig


@dataclass(frozen=True, slots=True)
class MacFractions:
    """Fractions of the MatMul and Conv MACs by the type that they are computed in, at one input size.

    by_type: type -> 0..1, the largest first. total: MACs. largest: the largest layers of every type, (type, node, fraction).
    """

    by_type: Mapping[str, float]
    total: int
    largest: tuple[tuple[str, str, float], ...] = field(default_factory=tuple)

    def to_dict(self) -> dict[str, Any]:
        """The keys of `detrt.json`."""
        return {"shares": dict(self.by_type), "total": self.total, "largest": self.largest}

    def of(self, precision: str) -> float:
        return self.by_type.get(precision, 0.0)


def count_macs(model: onnx.ModelProto, feeds: Feeds) -> dict[str, int]:
    """Node name -> MACs, for the matmuls and convolutions of a graph at the shapes of these inputs."""
    layers = {node.name: node for node in model.graph.node if node.op_type in GEMM.onnx}
    return {
        name: _count(layers[name], inputs, outputs[0])
        for name, (inputs, outputs) in run_shapes(model, feeds).items()
        if name in layers
    }


def mac_fractions(model: onnx.ModelProto, counts: Mapping[str, int]) -> MacFractions:
    """Fraction of each type in the matmuls and convolutions of a typed graph.

    A layer is "int8" or "fp8" if all its operands come from DequantizeLinear. counts: of `count_macs`, on this graph or on the
    FP32 graph that it was converted from.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    kinds = element_types(model)
    sums: dict[str, int] = {}
    rows: list[tuple[str, str, int]] = []
    for node in model.graph.node:
        if node.op_type not in GEMM.onnx or node.name not in counts:
            continue
        kind = _layer_type(node, producers, kinds)
        sums[kind] = sums.get(kind, 0) + counts[node.name]
        rows.append((kind, node.name, counts[node.name]))
    total = sum(sums.values())
    fractions = {k: v / total for k, v in sorted(sums.items(), key=lambda item: -item[1])} if total else {}
    largest: list[tuple[str, str, float]] = []
    for kind in fractions:
        own = sorted((row for row in rows if row[0] == kind), key=lambda row: -row[2])[:5]
        largest += [(kind, name, count / total) for _, name, count in own]
    return MacFractions(fractions, total, tuple(largest))


def check_fraction(fractions: MacFractions, config: PrecisionConfig) -> None:
    """Raises:
    GateError: less of the graph is in the low type than required.
    """
    target = config.target
    if target == Precision.FP32:
        other = {k: v for k, v in fractions.by_type.items() if k not in ("fp32", "fp64")}
        if other:
            raise GateError(f"`precision={config.precision}` was requested, but the graph also computes in {_text(other)}")
        return
    fraction = fractions.of(target)
    if fraction < config.required_fraction:
        others = sorted((row for row in fractions.largest if row[0] != target), key=lambda row: -row[2])
        largest = ", ".join(f"{name} ({kind}) {value:.1%}" for kind, name, value in others[:3])
        placement = "; `qdq_placement=cpu` takes more layers, for OpenVINO and ONNX Runtime" if config.fuses else ""
        raise GateError(
            f"only {fraction:.1%} of the MatMul and Conv operations are in {target} ({config.required_fraction:.0%} required): "
            f"{_text(fractions.by_type)}; the largest others: {largest}. Choose another `precision`, fewer `keep_fp32`, or "
            f"lower the requirement with `min_fraction`{placement}"
        )


def _layer_type(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto], kinds: Mapping[str, int]) -> str:
    operands = node.input[:2] if node.op_type != "Einsum" else node.input
    sources = [producers.get(name) for name in operands]
    if all(source is not None and source.op_type == "DequantizeLinear" for source in sources):
        stored = [source.input[0] for source in sources if source is not None]
        quantized = {onnx.TensorProto.INT8 if kinds.get(name) == onnx.TensorProto.UINT8 else kinds.get(name) for name in stored}
        if len(quantized) == 1:
            return type_name(quantized.pop() or 0)
    return type_name(kinds.get(node.output[0], 0))


def _count(node: onnx.NodeProto, inputs: list[list[int]], output: list[int]) -> int:
    size = math.prod(output)
    if node.op_type == "Conv":
        return size * math.prod(inputs[1][1:])
    if node.op_type == "ConvTranspose":
        return math.prod(inputs[0]) * math.prod(inputs[1][1:])
    if node.op_type == "Gemm":
        return size * inputs[0][0 if attribute(node, "transA", 0) else 1]
    if node.op_type == "Einsum":
        return max(size, *(math.prod(shape) for shape in inputs))
    return size * inputs[0][-1]


def _text(fractions: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {fraction:.1%}" for kind, fraction in fractions.items())
