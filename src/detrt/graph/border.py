"""Positions on the border of proposals, which every runtime must find outside.

A proposal is allowed between 0.01 and 0.99 of the image. The first cell of 50 has its centre at 0.5 / 50, which PyTorch's division rounds
to the same number as 0.01; a runtime that multiplies by 1 / 50 finds it inside, and selects other queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

BORDER = 0.01  # of an image's side
# Centres of cells are either on the border itself or 1 / (100 cells) away from it; divisions round to 1e-7.
_BESIDE = 1e-6
# Operator of a comparison -> the number on the border, and what to compare with in its place.
STEADY = {"Greater": (BORDER, BORDER + _BESIDE), "Less": (1 - BORDER, 1 - BORDER - _BESIDE)}


def compare_beside_border(model: onnx.ModelProto) -> int:
    """Compare positions with numbers beside the border, in place; returns how many comparisons changed."""
    from onnx import numpy_helper

    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    changed = 0
    for node in model.graph.node:
        if node.op_type not in STEADY or (tensor := constants.get(node.input[1])) is None:
            continue
        on_border, beside = STEADY[node.op_type]
        array = numpy_helper.to_array(tensor)
        if array.dtype.kind != "f" or array.size != 1 or array.ravel()[0] != array.dtype.type(on_border):
            continue
        own = numpy_helper.from_array(np.full(array.shape, beside, array.dtype), f"{node.name or node.output[0]}/beside_border")
        model.graph.initializer.append(own)
        node.input[1] = own.name
        changed += 1
    return changed
