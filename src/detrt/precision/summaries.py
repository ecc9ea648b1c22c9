"""The largest and smallest value of tensors, and a sample of their values, computed inside the graph.

A scan reads every tensor of a graph, for EoMT-L at 640x640 22 GiB an image. As outputs of the graph they fit into memory a part at a time,
and the whole graph runs once for each part: 425 s an image on two cores. Summaries of them are outputs of one run: 27 s with the opening.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..graph.io import to_bytes, without_weights
from ..graph.operators import FILL_LIMIT

SAMPLE = 1 << 15  # values of a large tensor, at least
_LARGEST, _SMALLEST, _COUNT, _SAMPLE = "/summary/max", "/summary/min", "/summary/count", "/summary/sample"
_TYPES = {_LARGEST: TensorProto.FLOAT, _SMALLEST: TensorProto.FLOAT, _COUNT: TensorProto.INT64, _SAMPLE: TensorProto.FLOAT}
# Inputs of the nodes below, each a tensor of one int64.
_CONSTANTS = {"/summary/flat": -1, "/summary/first": 0, "/summary/last": 1 << 62, "/summary/least": SAMPLE, "/summary/one": 1}


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one FP32 tensor in one run: largest and smallest value, number of values, and every n-th of them, a vector."""

    largest: float
    smallest: float
    count: int
    sample: NDArray[np.float32]

    @property
    def ordinary(self) -> bool:
        """Whether the tensor holds values alone: no fills (finfo.min), infinity or NaN, which hide the largest of the others."""
        return bool(max(self.largest, -self.smallest) < FILL_LIMIT)

    @classmethod
    def of(cls, name: str, outputs: Mapping[str, np.ndarray]) -> Summary:
        """From the outputs of a graph that `serialized_with_summaries` wrote."""
        largest, smallest, count = (outputs[name + end].item() for end in (_LARGEST, _SMALLEST, _COUNT))
        return cls(largest, smallest, count, outputs[name + _SAMPLE])


def serialized_with_summaries(model: onnx.ModelProto, names: Collection[str]) -> bytes:
    """The bytes of a graph whose outputs are joined by summaries of FP32 tensors; their nodes stand behind the node that gives the tensor.

    Only a session that runs nodes in the order of the graph frees a tensor as soon as it is summarised.
    """
    graph = without_weights(model)
    nodes = list(graph.node)
    del graph.node[:]
    for key, value in _CONSTANTS.items():
        graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), key))
    for node in nodes:
        graph.node.append(node)
        for name in node.output:
            if name in names:
                graph.node.extend(_summary_nodes(name))
                graph.output.extend(helper.make_tensor_value_info(name + end, kind, None) for end, kind in _TYPES.items())
    return to_bytes(model, graph)


def _summary_nodes(name: str) -> list[onnx.NodeProto]:
    flat, first, last, least, one = _CONSTANTS
    values, ratio, step = (f"{name}/summary/{word}" for word in ("values", "ratio", "step"))
    rows = [
        ("ReduceMax", [name], name + _LARGEST, {"keepdims": 0}),
        ("ReduceMin", [name], name + _SMALLEST, {"keepdims": 0}),
        ("Reshape", [name, flat], values, {}),
        ("Shape", [values], name + _COUNT, {}),
        ("Div", [name + _COUNT, least], ratio, {}),
        ("Max", [ratio, one], step, {}),
        ("Slice", [values, first, last, first, step], name + _SAMPLE, {}),
    ]
    return [helper.make_node(kind, inputs, [output], name=output, **facts) for kind, inputs, output, facts in rows]
