"""ONNX files of other exporters: which layout their inputs and outputs have, and the same graph in detrt's own contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ..errors import GraphError, check_one_of
from ..spec import (
    BOXES,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TARGET_SIZES,
    ModelSpec,
)
from .clean import drop_dead
from .io import tensor_type
from .nodes import GraphBuilder, default_opset, rename_values, replace_nodes

_CONTRACT = (PIXEL_VALUES, PIXEL_MASK, TARGET_SIZES, LOGITS, PRED_BOXES, BOXES, SCORES, LABELS, NUM_DETECTIONS)
_IMAGES = 4  # axes of an image batch


@dataclass(frozen=True, slots=True)
class GraphLayout:
    """Inputs and outputs of one exporter's files.

    pixels, sizes, mask: names of inputs; "" where it has none; the mask is optional. outputs: their names.
    exporters: whose files have it. about: what its tensors mean.
    """

    name: str
    exporters: str
    pixels: str
    outputs: tuple[str, ...]
    sizes: str = ""
    mask: str = ""
    about: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """The inputs that every such file has."""
        return tuple(name for name in (self.pixels, self.sizes) if name)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.inputs)} -> {', '.join(self.outputs)})"


LAYOUTS = {
    layout.name: layout
    for layout in (
        GraphLayout(
            "transformers",
            "transformers, optimum",
            PIXEL_VALUES,
            (LOGITS, PRED_BOXES),
            mask=PIXEL_MASK,
            about="normalised pixels; logits, and boxes as cxcywh relative to the image",
        ),
        GraphLayout(
            "rt-detr",
            "the repositories of RT-DETR, D-FINE, DEIM and DEIMv2",
            "images",
            (LABELS, BOXES, SCORES),
            sizes="orig_target_sizes",
            about="pixels / 255 and (width, height) of each original image; decoded boxes as xyxy in its pixels",
        ),
        GraphLayout(
            "rf-detr",
            "rfdetr",
            "input",
            ("dets", LABELS),
            about="normalised pixels; boxes as cxcywh relative to the image, and logits under the name labels",
        ),
        GraphLayout(
            "ultralytics",
            "RT-DETR of ultralytics",
            "images",
            ("output0",),
            about="pixels / 255; for each query cxcywh relative to the image, then the scores of the classes",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ForeignGraph:
    """A graph of another exporter and what it says itself.

    names: name of a tensor in the layout -> in the file. pixels: its shape. mask: whether it takes a padding mask.
    queries: detections or queries of an image. classes: columns of the logits; of both 0 where nothing says it.
    metadata: of the file.
    """

    model: onnx.ModelProto
    layout: GraphLayout
    names: Mapping[str, str]
    pixels: tuple[int | str, ...]
    mask: bool
    queries: int
    classes: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def counted(self) -> str:
        """The output whose axis 1 is the queries, by its name in the layout."""
        return {"rt-detr": SCORES, "rf-detr": LABELS, "ultralytics": "output0"}.get(self.layout.name, LOGITS)

    def feeds(self, size_hw: tuple[int, int]) -> dict[str, NDArray]:
        """Inputs for a run that shows shapes: images of zeros at a size, where the graph has none."""
        height, width = self.size_hw or size_hw
        batch = self.batch or 1
        shapes = {
            self.layout.pixels: (batch, 3, height, width),
            self.layout.sizes: (batch, 2),
            self.layout.mask: (batch, height, width),
        }
        dtypes = {name: dtype for name, (dtype, _) in _tensors(_inputs(self.model)).items()}
        return {name: np.ones(shapes[key], dtypes[name]) for key, name in self.names.items() if key in shapes and name in dtypes}

    def with_shapes(self, outputs: Mapping[str, NDArray], name: str) -> ForeignGraph:
        """With the numbers of queries and classes that a run shows. Raises GraphError where they are not of the layout."""
        shape = np.shape(outputs[self.names[self.counted]])
        if len(shape) != (2 if self.layout.name == "rt-detr" else 3):
            raise GraphError(
                f"'{name}' returns '{self.names[self.counted]}' of shape {shape}, which is not of the layout {self.layout}"
            )
        columns = 0 if len(shape) < 3 else shape[2] - 4 * (self.layout.name == "ultralytics")
        return replace(self, queries=shape[1], classes=columns or self.classes)

    @property
    def size_hw(self) -> tuple[int, int] | None:
        """Height and width of the input; None where they are symbolic."""
        height, width = self.pixels[2:]
        return (height, width) if isinstance(height, int) and isinstance(width, int) else None

    @property
    def batch(self) -> int | None:
        """The only batch size; None where it is symbolic."""
        return self.pixels[0] if isinstance(self.pixels[0], int) else None


def recognise(
    model: onnx.ModelProto, name: str, layout: str | None = None, tensors: Mapping[str, str] | None = None
) -> ForeignGraph:
    """Tell the layout of a graph by the names and shapes of its inputs and outputs.

    Args:
        name: of the file, for messages.
        layout: one of LAYOUTS, where it is known.
        tensors: names in the layout -> names in the file, where they differ; needs `layout`.

    Raises:
        GraphError: none or several layouts fit, or the one that was named does not.
    """
    if layout is not None:
        check_one_of("`layout`", layout, LAYOUTS, GraphError)
    given = [LAYOUTS[layout]] if layout else list(LAYOUTS.values())
    fitting, reasons = [], []
    for candidate in given:
        names = {key: (tensors or {}).get(key, key) for key in (*candidate.inputs, *candidate.outputs, candidate.mask) if key}
        why = _misfit(model, candidate, names)
        if why:
            reasons.append(why)
        else:
            fitting.append((candidate, names))
    if len(fitting) == 1:
        return _read(model, name, *fitting[0])
    shapes = [
        ", ".join(f"{key} {'x'.join(map(str, shape))}" for key, (_, shape) in _tensors(side).items())
        for side in (_inputs(model), model.graph.output)
    ]
    has = f"'{name}' has the inputs {shapes[0]} and the outputs {shapes[1]}"
    if layout:
        raise GraphError(f"{has}; that is not the layout {LAYOUTS[layout]}: {reasons[0]}")
    known = "; ".join(str(one) for one in (LAYOUTS.values() if not fitting else (one for one, _ in fitting)))
    if fitting:
        raise GraphError(f"{has}, which several layouts fit; say which with `layout`: {known}")
    raise GraphError(
        f"{has}, which fit no layout that detrt knows: {known}. Where only the names differ, give `layout` and the names in a "
        "sidecar (docs/guide/onnx-files.md). A graph of detrt without its spec: put the spec beside it as FILE.onnx.json, or give "
        "it to detect with `spec=FILE`"
    )


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Inputs without the weights, which files of old exporters list too."""
    weights = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in weights]


def _tensors(values: Sequence[onnx.ValueInfoProto]) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    return {value.name: tensor_type(value) for value in values}


def _misfit(model: onnx.ModelProto, layout: GraphLayout, names: Mapping[str, str]) -> str:
    """Why a graph does not have a layout; "" where it does."""
    inputs, outputs = _tensors(_inputs(model)), _tensors(model.graph.output)
    for key, side, what in (*((k, inputs, "input") for k in layout.inputs), *((k, outputs, "output") for k in layout.outputs)):
        if names[key] not in side:
            return f"it has no {what} '{names[key]}'"
    more = sorted(set(inputs) - {names[key] for key in (*layout.inputs, layout.mask) if key})
    if more:
        return f"it also takes {', '.join(more)}"
    pixels = inputs[names[layout.pixels]]
    if len(pixels[1]) != _IMAGES or (isinstance(pixels[1][1], int) and pixels[1][1] != 3):
        return f"'{names[layout.pixels]}' is {pixels[0]} {pixels[1]}, not a batch of images (batch, 3, height, width)"
    if not pixels[0].startswith("float"):
        return f"'{names[layout.pixels]}' is {pixels[0]}, not float"
    if layout.name == "ultralytics":
        shape = outputs[names["output0"]][1]
        wide = len(shape) == 3 and isinstance(shape[1], int) and isinstance(shape[2], int) and shape[1] < shape[2]
        if len(shape) != 3 or wide or (isinstance(shape[2], int) and shape[2] < 5) or _is_end_to_end(model):
            return f"'output0' {shape} is not (batch, queries, 4 + classes) of RT-DETR; YOLO models are not supported"
    return ""


def _is_end_to_end(model: onnx.ModelProto) -> bool:
    """Whether ultralytics says that rows are (xyxy, score, class), as of YOLOv10."""
    return _metadata(model).get("end2end", "").lower() == "true"


def _metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def _read(model: onnx.ModelProto, name: str, layout: GraphLayout, names: Mapping[str, str]) -> ForeignGraph:
    inputs, outputs = _tensors(_inputs(model)), _tensors(_inferred(model, name).graph.output)
    pixels = inputs[names[layout.pixels]][1]
    found = ForeignGraph(model, layout, names, pixels, bool(layout.mask) and names[layout.mask] in inputs, 0, 0, _metadata(model))
    scores = outputs[names[found.counted]][1]
    queries = scores[1] if len(scores) > 1 else "?"
    classes: int | str = 0
    if layout.name == "rt-detr":
        top_k, classes = _decoded(model, names[SCORES], names[LABELS])
        queries = queries if isinstance(queries, int) else top_k
    elif isinstance(scores[2], int):
        classes = scores[2] - 4 * (layout.name == "ultralytics")
    queries, classes = (value if isinstance(value, int) else 0 for value in (queries, classes))
    return replace(found, queries=queries, classes=classes)


def _inferred(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    try:
        return onnx.shape_inference.infer_shapes(model)
    except Exception as error:  # onnx raises RuntimeError and its own, by version; without shapes, the declared ones stand
        if "2GB" in str(error) or "Protobuf" in str(error) or "serializ" in str(error).lower():
            return model
        raise GraphError(f"the shapes in '{name}' do not fit together: {str(error)[:200]}; export it again") from None


def _decoded(model: onnx.ModelProto, scores: str, labels: str) -> tuple[int, int]:
    """(detections, classes) of a graph that decodes: what its top-k selects, and what it divides its indices by; 0: not said."""
    makers = {output: node for node in model.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t

    def number(name: str) -> int:
        array = numpy_helper.to_array(constants[name]) if name in constants else np.zeros(0)
        return int(array.item()) if array.size == 1 else 0

    top_k = makers.get(scores)
    count = number(top_k.input[1]) if top_k is not None and top_k.op_type == "TopK" and len(top_k.input) > 1 else 0
    found, pending = set(), [labels]
    while pending and len(found) < 2:
        node = makers.get(pending.pop())
        if node is None or node.op_type in ("TopK", "ArgMax", "Gather", "GatherND", "GatherElements"):
            continue
        if node.op_type in ("Div", "Mod"):
            found |= {value for value in map(number, node.input[1:]) if value > 1}
        pending += node.input
    return count, found.pop() if len(found) == 1 else 0


def in_contract(foreign: ForeignGraph, spec: ModelSpec, *, batch: int | None = None) -> onnx.ModelProto:
    """The graph with the inputs and outputs that `spec` promises: raw RGB in, and detrt's own names out.

    batch: the only batch size, where the graph runs at no other.

    Raises:
        GraphError: an operator set that is too old.
    """
    model = onnx.ModelProto()
    model.CopyFrom(foreign.model)
    graph = model.graph
    opset = default_opset(model)
    if opset < 11:
        raise GraphError(f"the graph has ONNX opset {opset}; detrt takes 11 and newer; export it again with a newer one")
    values = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    values |= {name for node in graph.node for name in (*node.input, *node.output)}
    taken = {name: _fresh(name, values) for name in _CONTRACT if name in values}
    rename_values(graph, taken)
    of = {key: taken.get(name, name) for key, name in foreign.names.items()}
    before, after = GraphBuilder("detrt"), GraphBuilder("detrt/after")
    dtypes = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    _prologue(before, foreign, spec, of, dtypes, opset)
    _epilogue(after, model, foreign, of, dtypes)
    replace_nodes(model, [*before.nodes, *graph.node, *after.nodes])
    graph.initializer.extend([*before.initializers, *after.initializers])
    del graph.value_info[:], graph.input[:], graph.output[:]
    side: int | str = batch or foreign.batch or "batch"
    graph.input.extend(_input_infos(spec, side))  # weights need not be listed
    graph.output.extend(_output_infos(foreign, spec, side))
    drop_dead(model)
    return model


def _input_infos(spec: ModelSpec, batch: int | str) -> list[onnx.ValueInfoProto]:
    height, width = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    infos = [helper.make_tensor_value_info(PIXEL_VALUES, TensorProto.UINT8, [batch, 3, height, width])]
    if spec.input.mask:
        infos.append(helper.make_tensor_value_info(PIXEL_MASK, TensorProto.INT64, [batch, height, width]))
    if spec.decode.in_graph:
        infos.append(helper.make_tensor_value_info(TARGET_SIZES, TensorProto.INT64, [batch, 2]))
    return infos


def _output_infos(foreign: ForeignGraph, spec: ModelSpec, batch: int | str) -> list[onnx.ValueInfoProto]:
    count, rule = foreign.queries, spec.decode
    if rule.in_graph:
        rows = ((BOXES, TensorProto.FLOAT, [batch, count, 4]), (SCORES, TensorProto.FLOAT, [batch, count]))
        more = ((LABELS, TensorProto.INT64, [batch, count]), (NUM_DETECTIONS, TensorProto.INT64, [batch]))
        return [helper.make_tensor_value_info(*row) for row in (*rows, *more)]
    columns = rule.num_classes + (rule.activation == "softmax")
    return [
        helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, [batch, count, columns]),
        helper.make_tensor_value_info(PRED_BOXES, TensorProto.FLOAT, [batch, count, 4]),
    ]


def _prologue(
    b: GraphBuilder, foreign: ForeignGraph, spec: ModelSpec, of: Mapping[str, str], dtypes: Mapping[str, int], opset: int
) -> None:
    """From raw RGB, the mask and (height, width) to what the graph takes."""
    layout, given = foreign.layout, spec.input
    # (pixels * rescale - mean) / std in this order, as hosts do it, so that the numbers are theirs to the bit.
    pixels = b.op("Mul", b.op("Cast", PIXEL_VALUES, to=TensorProto.FLOAT), b.const(given.rescale, np.float32))
    for op, three, neutral in (("Sub", given.mean, 0.0), ("Div", given.std, 1.0)):
        if set(three) != {neutral}:
            pixels = b.op(op, pixels, b.const(np.reshape(three, (1, 3, 1, 1)), np.float32))
    if foreign.mask:
        _cast(b, PIXEL_MASK, TensorProto.INT64, of[layout.mask], dtypes[of[layout.mask]])
        wide = b.op("Unsqueeze", PIXEL_MASK, b.ints(1)) if opset >= 13 else b.op("Unsqueeze", PIXEL_MASK, axes=[1])
        # Padding is zero in normalised numbers.
        pixels = b.op("Mul", pixels, b.op("Cast", wide, to=TensorProto.FLOAT))
    _cast(b, pixels, TensorProto.FLOAT, of[layout.pixels], dtypes[of[layout.pixels]])
    if layout.sizes:
        swapped = b.op("Gather", TARGET_SIZES, b.ints(1, 0), axis=1)  # (width, height)
        _cast(b, swapped, TensorProto.INT64, of[layout.sizes], dtypes[of[layout.sizes]])


def _epilogue(
    b: GraphBuilder, model: onnx.ModelProto, foreign: ForeignGraph, of: Mapping[str, str], dtypes: Mapping[str, int]
) -> None:
    """From what the graph returns to detrt's outputs."""
    layout = foreign.layout.name
    if layout == "rt-detr":
        _sorted_outputs(b, model, foreign.queries, of, dtypes)
        return
    if layout == "ultralytics":
        boxes, logits, *kinds = _split(b, model, of["output0"], foreign.classes, dtypes)
    else:
        boxes, logits = (of[PRED_BOXES], of[LOGITS]) if layout == "transformers" else (of["dets"], of[LABELS])
        kinds = [dtypes[boxes], dtypes[logits]]
    _cast(b, logits, kinds[1], LOGITS, TensorProto.FLOAT)
    _cast(b, boxes, kinds[0], PRED_BOXES, TensorProto.FLOAT)


def _sorted_outputs(
    b: GraphBuilder, model: onnx.ModelProto, queries: int, of: Mapping[str, str], dtypes: Mapping[str, int]
) -> None:
    """Boxes, scores and labels in descending order of the scores, and their number."""
    kinds = {SCORES: TensorProto.FLOAT, BOXES: TensorProto.FLOAT, LABELS: TensorProto.INT64}
    in_order = _is_sorted(model, of[SCORES])
    values = {name: name if in_order else f"{b.prefix}/{name}" for name in kinds}
    for name, kind in kinds.items():
        _cast(b, of[name], dtypes[of[name]], values[name], kind)
    count = b.ints(queries)
    if not in_order:
        best, order = b.op("TopK", values[SCORES], count, outputs=2, axis=1)
        b.op("Identity", best, output=SCORES)
        b.op("GatherElements", values[LABELS], order, output=LABELS, axis=1)
        # GatherElements takes an index for each side of a box.
        wide = b.op("Concat", *[b.reshape(order, 0, queries, 1)] * 4, axis=2)
        b.op("GatherElements", values[BOXES], wide, output=BOXES, axis=1)
    batch = b.op("Gather", b.op("Shape", TARGET_SIZES), b.ints(0), axis=0)
    b.op("Expand", count, batch, output=NUM_DETECTIONS)


def _cast(b: GraphBuilder, value: str, of: int, output: str, to: int) -> None:
    """A value of type `of` under another name in type `to`; without a cast that does nothing, over which ONNX Runtime 1.31 stumbles."""
    if of == to:
        b.op("Identity", value, output=output)
    else:
        b.op("Cast", value, output=output, to=to)


def _split(
    b: GraphBuilder, model: onnx.ModelProto, output: str, classes: int, dtypes: Mapping[str, int]
) -> tuple[str, str, int, int]:
    """Boxes, logits and their types of (batch, queries, 4 + classes): in front of the sigmoid where it is found, else its inverse."""
    makers = {name: node for node in model.graph.node for name in node.output}
    joined = makers.get(output)
    while joined is not None and joined.op_type == "Identity":
        joined = makers.get(joined.input[0])
    if joined is not None and joined.op_type == "Concat" and len(joined.input) == 2:
        scores = makers.get(joined.input[1])
        if scores is not None and scores.op_type == "Sigmoid":
            kind = dtypes[output]  # both have the type of what they are joined to
            return joined.input[0], scores.input[0], kind, kind
    whole = b.op("Cast", output, to=TensorProto.FLOAT)
    boxes, scores_of = (b.slice(whole, b.ints(start), b.ints(end), 2) for start, end in ((0, 4), (4, 4 + classes)))
    low, high, one = (b.const(value, np.float32) for value in (0.0, np.nextafter(np.float32(1), np.float32(0)), 1.0))
    inside = b.op("Clip", scores_of, low, high)
    logits = b.op("Sub", b.op("Log", inside), b.op("Log", b.op("Sub", one, inside)))
    return boxes, logits, TensorProto.FLOAT, TensorProto.FLOAT


def _is_sorted(model: onnx.ModelProto, scores: str) -> bool:
    """Whether scores come from a sorted top-k as they are."""
    maker = next((node for node in model.graph.node if scores in node.output), None)
    while maker is not None and maker.op_type in ("Cast", "Identity"):
        name = maker.input[0]
        maker = next((node for node in model.graph.node if name in node.output), None)
        scores = name
    if maker is None or maker.op_type != "TopK" or scores != maker.output[0]:
        return False
    flags = {entry.name: entry.i for entry in maker.attribute}
    return bool(flags.get("sorted", 1) and flags.get("largest", 1))


def _fresh(name: str, values: set[str]) -> str:
    new = f"{name}.source"
    while new in values:
        new += "_"
    values.add(new)
    return new
