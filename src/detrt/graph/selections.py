"""What a graph selects by score or cuts to integers: its discontinuities, which two runtimes may decide in two ways.

`return_selections` makes the indices of top-k selections outputs of an engine; `take_selections` makes what a graph chooses an input of
it, so that both compute with the same queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ..spec import BEST_SCORES, GIVEN_SCORES, SELECTION, ModelSpec
from ..tasks.reading_order import cuts_coordinates
from .nodes import rename_values
from .probe import COMPUTED, probe
from .view import GraphView, element_types, inferred


def topk_outputs(model: onnx.ModelProto) -> list[str]:
    """Names of the index outputs of all TopK nodes, in graph order."""
    return [node.output[1] for node in model.graph.node if node.op_type == "TopK" and len(node.output) > 1]


def cut_outputs(model: onnx.ModelProto, spec: ModelSpec) -> dict[str, str] | None:
    """Of a model whose reading order cuts coordinates (PP-DocLayoutV2), else None: integers that floats are cut to and that choose rows of a
    constant table -> those floats, by name and in graph order."""
    if not cuts_coordinates(spec):
        return None
    types = element_types(model)
    tables = {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 2}
    producers = {name: node for node in model.graph.node for name in node.output}
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables:
            continue
        name = node.input[1]
        while (producer := producers.get(name)) is not None and producer.op_type in ("Gather", "Slice", "Squeeze", "Clip", "Sub"):
            name = producer.input[0]
        if producer is not None and producer.op_type == "Cast" and types.get(producer.input[0]) == TensorProto.FLOAT:
            found[name] = producer.input[0]
    return found


def return_selections(model: onnx.ModelProto) -> list[str]:
    """Add the indices of all top-k selections to the outputs, in place; their names are SELECTION and a number in graph order."""
    names = _name_selections(model)
    known = {value.name: value for value in model.graph.value_info}
    model.graph.output.extend(known[name] for name in names)
    return names


def take_selections(
    model: onnx.ModelProto, given: Mapping[str, NDArray], returned: Sequence[str] = ()
) -> tuple[onnx.ModelProto, dict[str, str], dict[str, str]]:
    """A copy of a graph that takes what it chooses as inputs: SELECTION and a number, in the order of `given`.

    Of top-k selections it also returns their scores (GIVEN_SCORES) and the best ones (BEST_SCORES), behind the name of the input.

    Args:
        model: the graph; types and names of `given` and of their scores change in it.
        given: tensor to take -> an example, of its type and rank.
        returned: further tensors to return.

    Returns:
        The copy, given tensor -> input, and returned tensor -> output.

    Raises:
        GraphError: a graph of 2 GB or more.
    """
    inputs = {name: f"{SELECTION}{number}" for number, name in enumerate(given)}
    known = {value.name: value for value in model.graph.value_info}
    for name, array in given.items():
        axes = [f"{inputs[name]}/{axis}" for axis in range(array.ndim)]
        info = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), axes)
        if name in known:
            known[name].CopyFrom(info)
        else:
            model.graph.value_info.append(info)
    scores = {}
    for node in model.graph.node:
        if node.op_type == "TopK" and len(node.output) > 1 and node.output[1] in given:
            node.output[0] = node.output[0] or f"{node.output[1]}/scores"
            scores[node.output[1]] = node.output[0]
    ends = {score: inputs[name] + GIVEN_SCORES for name, score in scores.items()}
    ends |= {COMPUTED + score: inputs[name] + BEST_SCORES for name, score in scores.items()}
    copy, outputs = probe(GraphView(model), [*ends, *returned], dict.fromkeys(given))
    own = {value.name for value in model.graph.output}
    for score, end in ends.items():
        if (name := outputs[score]) in own:  # an output of the model keeps its name
            copy.graph.node.append(helper.make_node("Identity", [name], [end], name=end))
            copy.graph.output.append(helper.make_tensor_value_info(end, TensorProto.FLOAT, None))
        else:
            rename_values(copy.graph, {name: end})
    rename_values(copy.graph, inputs)
    return copy, inputs, {name: outputs[name] for name in returned}


def _name_selections(model: onnx.ModelProto) -> list[str]:
    """Give the indices of each TopK their name, and its scores one if they have none; the type of the indices is in the graph then."""
    names = {index: f"{SELECTION}{number}" for number, index in enumerate(topk_outputs(model))}
    for node in model.graph.node:
        if len(node.output) > 1 and node.output[1] in names and not node.output[0]:
            node.output[0] = f"{names[node.output[1]]}/scores"
    unknown = set(names) - {value.name for value in model.graph.value_info}
    if unknown:
        # A change of precision leaves no shapes behind; a session wants the axes of its inputs.
        found = {value.name: value for value in inferred(model).value_info if value.name in unknown}
        model.graph.value_info.extend(
            found.get(name) or helper.make_tensor_value_info(name, TensorProto.INT64, None) for name in names if name in unknown
        )
    rename_values(model.graph, names)
    return list(names.values())
