"""INT8 as CPUs run it fast: unsigned activations, and pairs around the results of convolutions for ONNX Runtime alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from .dequantize import remove_pairs
from .operators import GEMM
from .view import GraphView

SHIFT = 128
RESULT = "/Result"  # ends the name of the pair around the result of a layer


def drop_result_pairs(model: onnx.ModelProto) -> int:
    """Remove the pairs around results of convolutions that no quantized layer reads, in place; returns how many.

    ONNX Runtime needs them for its integer convolutions. OpenVINO fuses what follows a convolution, and computes the pairs for nothing:
    RT-DETRv2-R50 took half as long again with them.
    """

    def chosen(view: GraphView, node: onnx.NodeProto) -> bool:
        readers = view.consumers(node.output[0])
        return node.name.endswith(f"{RESULT}/Dequantize") and not any(reader.op_type in GEMM.onnx for reader in readers)

    return remove_pairs(model, chosen)


def unsigned_activations(model: onnx.ModelProto) -> int:
    """Give each pair of QuantizeLinear and DequantizeLinear of signed INT8 around an activation the zero point 128 of UINT8, in place.

    q + 128 stands for what q stood for, so the function is the same. OpenVINO 2026.4 needs it: where a signed pair follows a
    Concat, it moves the pair into the branches and computes something else (docs/results/cpu.md).

    Returns:
        The number of pairs.
    """
    view, changed = GraphView(model), 0
    for node in view.nodes:
        source = view.producer.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if source is None or source.op_type != "QuantizeLinear" or view.only_reader(source.output[0]) is None:
            continue
        zeros = [view.constants.get(one.input[2]) if len(one.input) > 2 else None for one in (source, node)]
        if any(zero is None or zero.data_type != TensorProto.INT8 or numpy_helper.to_array(zero).any() for zero in zeros):
            continue
        name = f"{source.input[2]}/unsigned"
        if name not in {tensor.name for tensor in model.graph.initializer}:
            shape = tuple(zeros[0].dims) if zeros[0] is not None else ()
            model.graph.initializer.append(numpy_helper.from_array(np.full(shape, SHIFT, np.uint8), name))
        source.input[2] = node.input[2] = name
        changed += 1
    if changed:
        del model.graph.value_info[:]  # the types between the pairs
    return changed
