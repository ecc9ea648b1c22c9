"""Figures about a graph: nodes, operators, parameters, inputs and outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """nodes, operator -> count, weight elements and bytes, and name -> (dtype, shape) of inputs and outputs."""

    nodes: int
    operators: Mapping[str, int]
    weight_elements: int
    weight_bytes: int
    opset: int
    inputs: Mapping[str, tuple[str, tuple[int | str, ...]]]
    outputs: Mapping[str, tuple[str, tuple[int | str, ...]]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(model: onnx.ModelProto) -> GraphSummary:
    """Count what a graph holds."""
    from onnx import helper

    elements = size = 0
    for tensor in model.graph.initializer:
        count = 1
        for side in tensor.dims:
            count *= side
        elements += count
        size += count * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    operators = Counter(
        f"{node.domain}.{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type for node in model.graph.node
    )
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return GraphSummary(
        len(model.graph.node),
        dict(operators.most_common()),
        elements,
        size,
        opset,
        {value.name: tensor_type(value) for value in model.graph.input},
        {value.name: tensor_type(value) for value in model.graph.output},
    )


def tensor_type(value: onnx.ValueInfoProto) -> tuple[str, tuple[int | str, ...]]:
    """NumPy dtype name and shape; a symbolic axis is its name."""
    from onnx import helper

    tensor = value.type.tensor_type
    shape = tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape
