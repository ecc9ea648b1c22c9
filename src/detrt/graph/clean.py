"""Clean-up of a traced graph: folded, no dead or duplicate constants, readable names, shapes inferred."""

from __future__ import annotations

import contextlib
import io
import logging
import re

import onnx
from onnx import helper

from ..errors import GraphError, MissingPackageError

# TorchScript repeats a module's path for each nested attribute it goes through: "/model/model/encoder".
_REPEATED = re.compile(r"/(?:model/)+")


def simplify(model: onnx.ModelProto) -> onnx.ModelProto:
    """Fold constants, merge equal nodes and initialisers, drop dead ones, infer shapes (onnxslim).

    Raises:
        GraphError: the simplifier or the checker refuses the graph.
    """
    try:
        import onnxslim
    except ImportError:
        raise MissingPackageError("onnxslim", "export", "simplifying a graph") from None
    noise = io.StringIO()
    level = logging.getLogger("onnxslim").level
    try:
        with contextlib.redirect_stdout(noise):
            slim = onnxslim.slim(model, skip_fusion_patterns=["FusionGelu"])
        onnx.checker.check_model(slim)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise GraphError(f"the traced graph does not simplify: {error}") from error
    finally:
        logging.getLogger("onnxslim").setLevel(level)
    return slim


def readable_names(model: onnx.ModelProto) -> None:
    """Shorten node names to the module path and make them unique, in place; tensor names stay."""
    seen: dict[str, int] = {}
    for index, node in enumerate(model.graph.node):
        name = _REPEATED.sub("/", node.name) if node.name else f"/{node.op_type}_{index}"
        count = seen.get(name, 0)
        seen[name] = count + 1
        node.name = f"{name}.{count}" if count else name


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Turn Constant nodes into initialisers, in place, so that passes look in one place."""
    graph = model.graph
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensor = node.attribute[0].t
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def topk_outputs(model: onnx.ModelProto) -> list[str]:
    """Names of the index outputs of all TopK nodes, in graph order."""
    return [node.output[1] for node in model.graph.node if node.op_type == "TopK" and len(node.output) > 1]


def with_outputs(model: onnx.ModelProto, names: list[str], dtype: int = onnx.TensorProto.INT64) -> onnx.ModelProto:
    """A copy of the graph with more outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    present = {value.name for value in copy.graph.output}
    for name in names:
        if name not in present:
            copy.graph.output.append(helper.make_tensor_value_info(name, dtype, None))
    return copy
