"""From a source and the caller's choices to the spec of the graph that will be exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..backends.base import TOWER_INPUTS, TOWER_OUTPUTS, TensorInfo, text_inputs
from ..errors import ExportError
from ..spec import (
    ATTENTION_MASK,
    BOXES,
    CLASS_FEATURES,
    CLASS_MASK,
    INPUT_IDS,
    LABELS,
    LOGITS,
    NUM_DETECTIONS,
    PHRASE_MASK,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TARGET_SIZES,
    TASK_FEATURES,
    TASK_MASK,
    TEXT_FEATURES,
    TEXT_POSITION_IDS,
    TEXT_SELF_MASK,
    ModelSpec,
)
from .config import ExportConfig
from .load import Source


def exported_spec(source: Source, config: ExportConfig) -> ModelSpec:
    """The ModelSpec of the exported graph.

    Raises:
        ExportError: a size that the family cannot take, or more boxes than it can give.
    """
    spec, family = source.spec, source.family
    spec = _with_graphs(spec, family.title, config)
    changes: dict[str, object] = {"normalize_in_graph": config.normalize, "dtype": config.input_dtype}
    if config.height is not None and config.width is not None:
        multiple = spec.input.multiple_of
        for side, value in (("height", config.height), ("width", config.width)):
            if value % multiple:
                lower, upper = value // multiple * multiple, -(-value // multiple) * multiple
                near = " or ".join(str(v) for v in dict.fromkeys((lower, upper)) if v)
                raise ExportError(f"{family.title} takes a {side} that is a multiple of {multiple}; got {value}, try {near}")
        # A padding mask keeps the aspect ratio exact inside a fixed size; without one the image is stretched.
        keeps_aspect = spec.input.resize == "shortest_edge" and spec.input.mask and config.mask
        changes |= {
            "height": config.height,
            "width": config.width,
            "dynamic": False,
            "resize": "fit" if keeps_aspect else "stretch",
            "shortest_edge": None,
            "longest_edge": None,
        }
    if not config.mask:
        changes["mask"] = False
    spec = replace(spec, input=replace(spec.input, **changes))  # type: ignore[arg-type]
    spec = _with_nms(spec, config)
    if config.decode == "graph":
        keep = config.max_detections or spec.decode.max_detections
        if config.max_detections is None and spec.decode.nms != "none" and not config.nms.startswith("graph"):
            # NMS outside must see every candidate that it sees without decoding in the graph.
            keep = spec.decode.num_queries
        limit = _most_detections(spec)
        if keep > limit:
            raise ExportError(f"--max-detections must be at most {limit} for this model; got {keep}")
        spec = spec.with_decode(
            in_graph=True,
            max_detections=keep,
            nms_in_graph=config.nms.startswith("graph"),
            score_threshold=float(config.score_threshold),
        )
    elif config.max_detections is not None:
        limit = _most_detections(spec)
        if config.max_detections > limit:
            raise ExportError(f"--max-detections must be at most {limit} for this model; got {config.max_detections}")
        spec = spec.with_decode(max_detections=config.max_detections)
    return spec


def contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a graph by its spec."""
    height, width = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    inputs: list[TensorInfo] = [TensorInfo(PIXEL_VALUES, spec.input.dtype, ("batch", 3, height, width))]
    if spec.input.mask:
        inputs.append(TensorInfo(PIXEL_MASK, "int64", ("batch", height, width)))
    inputs += [_text_input(name, spec) for name in text_inputs(spec)]
    rule = spec.decode
    if not rule.in_graph:
        columns: int | str = rule.num_classes + (rule.activation == "softmax")
        if spec.text is not None:
            columns = "tokens" if spec.text.kind == "tokens" else "classes"
        outputs: Sequence[TensorInfo] = (
            TensorInfo(LOGITS, "float32", ("batch", rule.num_queries, columns)),
            TensorInfo(PRED_BOXES, "float32", ("batch", rule.num_queries, 4)),
        )
    else:
        inputs.append(TensorInfo(TARGET_SIZES, "int64", ("batch", 2)))
        outputs = (
            TensorInfo(BOXES, "float32", ("batch", rule.max_detections, 4)),
            TensorInfo(SCORES, "float32", ("batch", rule.max_detections)),
            TensorInfo(LABELS, "int64", ("batch", rule.max_detections)),
            TensorInfo(NUM_DETECTIONS, "int64", ("batch",)),
        )
    return tuple(inputs), tuple(outputs)


# Shapes of text inputs, and of the outputs of a tower; d is the width of the text features.
_TEXT_SHAPES: dict[str, tuple[str, ...]] = {
    INPUT_IDS: ("batch", "tokens"),
    ATTENTION_MASK: ("batch", "tokens"),
    TEXT_FEATURES: ("batch", "tokens", "d"),
    TEXT_SELF_MASK: ("batch", "tokens", "tokens"),
    TEXT_POSITION_IDS: ("batch", "tokens"),
    PHRASE_MASK: ("batch", "phrases", "tokens"),
    CLASS_FEATURES: ("batch", "classes", "d"),
    CLASS_MASK: ("batch", "classes"),
    TASK_FEATURES: ("batch", "tokens", "d"),
    TASK_MASK: ("batch", "tokens"),
}


def tower_contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a text tower's graph."""
    assert spec.text is not None
    inputs = tuple(_text_input(name, spec) for name in TOWER_INPUTS)
    outputs = [_text_input(name, spec) for name in TOWER_OUTPUTS[spec.text.kind]]
    if spec.text.kind == "classes":  # one row a name: there is no axis of classes yet
        outputs[1] = TensorInfo(CLASS_FEATURES, "float32", ("batch", spec.text.features))
    return inputs, tuple(outputs)


def _text_input(name: str, spec: ModelSpec) -> TensorInfo:
    assert spec.text is not None
    shape = tuple(spec.text.features if axis == "d" else axis for axis in _TEXT_SHAPES[name])
    return TensorInfo(name, "float32" if "d" in _TEXT_SHAPES[name] else "int64", shape)


def _with_graphs(spec: ModelSpec, title: str, config: ExportConfig) -> ModelSpec:
    if not config.single_graph:
        return spec
    if spec.text is None:
        raise ExportError(f"--single-graph is for models that take a prompt; {title} has one graph anyway")
    if spec.text.kind == "classes":
        raise ExportError(
            f"--single-graph: {title} runs its text tower over every name and once for the task, so the two are graphs "
            "of different batches; leave --single-graph out"
        )
    return replace(spec, text=replace(spec.text, tower=""))


def _most_detections(spec: ModelSpec) -> int:
    rule = spec.decode
    # How many classes a prompted model has is not known before its prompt, but there is one.
    many = rule.select == "topk" and spec.text is None
    return rule.num_queries * (rule.num_classes if many else 1)


def _with_nms(spec: ModelSpec, config: ExportConfig) -> ModelSpec:
    rule = spec.decode.nms
    if config.nms == "graph" and rule != "nms":
        what = "soft-NMS, which ONNX has no operator for" if rule == "soft_nms" else "no NMS"
        raise ExportError(
            f"--nms graph: the checkpoint asks for {what}; use --nms graph-hard for hard NMS in the graph, or "
            "--nms checkpoint for its own rule outside"
        )
    changed = {"none": "none", "hard": "nms", "graph-hard": "nms"}.get(config.nms, rule)
    return spec if changed == rule else spec.with_decode(nms=changed)


def trace_size(spec: ModelSpec) -> tuple[int, int]:
    """(height, width) to trace at: the fixed size, or a small uneven one where the size is symbolic."""
    if not spec.input.dynamic:
        return spec.input.size_hw
    return _multiple(256, spec), _multiple(320, spec)


def other_size(spec: ModelSpec) -> tuple[int, int]:
    """A size that was not traced, or the fixed one."""
    if not spec.input.dynamic:
        return spec.input.size_hw
    return _multiple(352, spec), _multiple(224, spec)


def _multiple(value: int, spec: ModelSpec) -> int:
    step = spec.input.multiple_of
    return max(step * 2, round(value / step) * step)
