"""ExportConfig, the spec of the exported graph, and its inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ExportError, check_one_of, check_range
from ..spec import (
    BOXES,
    DTYPES,
    LABELS,
    LARGEST_SIDE,
    LOGITS,
    NUM_DETECTIONS,
    PIXEL_MASK,
    PIXEL_VALUES,
    PRED_BOXES,
    SCORES,
    TARGET_SIZES,
    ModelSpec,
    TensorInfo,
    text_inputs,
)
from ..text.tensors import AXES, CLASS_FEATURES, FEATURES_AXIS, TEXT_ENCODER_INPUTS
from .source import Source


def exported_spec(source: Source, config: ExportConfig) -> ModelSpec:
    """The ModelSpec of the exported graph.

    Raises:
        ExportError: a size that the family does not take, or more boxes than it has.
    """
    spec, family = source.spec, source.family
    spec = _with_graphs(spec, family.title, config)
    changes: dict[str, object] = {
        "normalize_in_graph": config.normalize,
        "dtype": config.input_dtype if spec.input.antialias else "float32",
    }
    if config.height is not None and config.width is not None:
        multiple = spec.input.multiple_of
        for side, value in (("height", config.height), ("width", config.width)):
            if value % multiple:
                lower, upper = value // multiple * multiple, -(-value // multiple) * multiple
                near = " or ".join(str(v) for v in dict.fromkeys((lower, upper)) if v)
                raise ExportError(f"{family.title} takes a {side} that is a multiple of {multiple}; got {value}, try {near}")
        # Without a mask the model attends to the whole tensor, so the image fills it.
        drops_mask = spec.input.mask and not config.mask
        spec = replace(spec, input=spec.input.fixed((config.height, config.width), stretch=drops_mask))
    if not config.mask:
        changes["mask"] = False
    spec = replace(spec, input=replace(spec.input, **changes))  # type: ignore[arg-type]
    spec = _with_nms(spec, config)
    if config.decode == "graph":
        from ..tasks import tasks_of  # with numpy, which help does without

        if later := [task.title for task in tasks_of(spec) if task.after_graph]:
            raise ExportError(f"`decode=graph`: {family.title} gives {', '.join(later)}, computed after the graph; leave it out")
        keep = config.max_detections or spec.decode.max_detections
        if config.max_detections is None and spec.decode.nms != "none" and not config.nms.startswith("graph"):
            # NMS in post-processing needs the same candidates as without decoding in the graph.
            keep = spec.decode.num_queries
        _check_detections(spec, keep)
        spec = spec.with_decode(
            in_graph=True,
            max_detections=keep,
            nms_in_graph=config.nms.startswith("graph"),
            score_threshold=float(config.score_threshold),
        )
    elif config.max_detections is not None:
        _check_detections(spec, config.max_detections)
        spec = spec.with_decode(max_detections=config.max_detections)
    return spec


def contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a graph by its spec."""
    from ..tasks import tasks_of  # with numpy, which help does without

    height, width = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    inputs: list[TensorInfo] = [TensorInfo(PIXEL_VALUES, spec.input.dtype, ("batch", 3, height, width))]
    if spec.input.mask:
        inputs.append(TensorInfo(PIXEL_MASK, "int64", ("batch", height, width)))
    inputs += [_text_input(name, spec) for name in text_inputs(spec)]
    rule = spec.decode
    if not rule.in_graph:
        columns: tuple[int | str, ...] = (rule.num_classes + (rule.activation == "softmax"),)
        rows: tuple[int | str, ...] = ("batch", rule.num_queries)
        if spec.text is not None:
            rows, columns = spec.text.prompt_kind.logit_axes(rule.num_queries)
        outputs: Sequence[TensorInfo] = (
            TensorInfo(LOGITS, "float32", (*rows, *columns)),
            TensorInfo(PRED_BOXES, "float32", (*rows, 4)),
        )
    else:
        rows = ("batch", rule.max_detections)
        inputs.append(TensorInfo(TARGET_SIZES, "int64", ("batch", 2)))
        outputs = (
            TensorInfo(BOXES, "float32", ("batch", rule.max_detections, 4)),
            TensorInfo(SCORES, "float32", ("batch", rule.max_detections)),
            TensorInfo(LABELS, "int64", ("batch", rule.max_detections)),
            TensorInfo(NUM_DETECTIONS, "int64", ("batch",)),
        )
    for task in tasks_of(spec):
        sides = task.map_sides(spec, (height, width))
        more = task.outputs(spec).items()
        outputs = (*outputs, *(TensorInfo(name, "float32", (*rows[:-1], *shape, *sides)) for name, shape in more))
    return tuple(inputs), tuple(outputs)


def text_encoder_contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of a text encoder's graph."""
    assert spec.text is not None
    inputs = tuple(_text_input(name, spec) for name in TEXT_ENCODER_INPUTS)
    # One row per name: no axis of classes yet.
    names = TensorInfo(CLASS_FEATURES, "float32", ("batch", spec.text.features))
    outputs = (names if name == CLASS_FEATURES else _text_input(name, spec) for name in spec.text.prompt_kind.encoder_outputs)
    return inputs, tuple(outputs)


def query_encoder_contract(spec: ModelSpec) -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    """Inputs and outputs of the graph of an encoder of query images."""
    assert spec.text is not None
    return contract(spec)[0][:1], (TensorInfo(CLASS_FEATURES, "float32", ("batch", spec.text.features)),)


def _text_input(name: str, spec: ModelSpec) -> TensorInfo:
    assert spec.text is not None
    shape = tuple(spec.text.features if axis == FEATURES_AXIS else axis for axis in AXES[name])
    return TensorInfo(name, "float32" if FEATURES_AXIS in AXES[name] else "int64", shape)


def _with_graphs(spec: ModelSpec, title: str, config: ExportConfig) -> ModelSpec:
    if config.image_queries:
        if spec.text is None or not spec.text.prompt_kind.takes_images:
            raise ExportError(f"`image_queries` is for OWL-ViT and OWLv2; {title} finds nothing by an image; leave it out")
        spec = replace(spec, text=replace(spec.text, query_encoder=QUERY_ENCODER))
    if not config.single_graph:
        return spec
    if spec.text is None:
        raise ExportError(f"`single_graph` is for models that take a prompt; {title} has one graph anyway")
    if not spec.text.prompt_kind.reads_ids:
        raise ExportError(
            f"`single_graph`: {title} runs its text encoder over {spec.text.prompt_kind.encodes}, so the two are graphs "
            "of different batches; leave `single_graph` out"
        )
    return replace(spec, text=replace(spec.text, encoder=""))


def _check_detections(spec: ModelSpec, count: int) -> None:
    """Raise ExportError for more detections than the model has."""
    rule = spec.decode
    # The number of classes of a prompted model is unknown before its prompt, but at least one.
    many = rule.select == "topk" and spec.text is None
    limit = rule.num_queries * (rule.num_classes if many else 1)
    if count > limit:
        raise ExportError(f"`max_detections` must be at most {limit} for this model; got {count}")


def _with_nms(spec: ModelSpec, config: ExportConfig) -> ModelSpec:
    rule = spec.decode.nms
    if config.nms == "graph" and rule != "nms":
        what = "soft-NMS, which ONNX has no operator for" if rule == "soft_nms" else "no NMS"
        raise ExportError(
            f"`nms=graph`: the checkpoint asks for {what}; use `nms=graph-hard` for hard NMS in the graph, or "
            "`nms=checkpoint` for its own rule outside"
        )
    changed = {"none": "none", "hard": "nms", "graph-hard": "nms"}.get(config.nms, rule)
    return spec if changed == rule else spec.with_decode(nms=changed)


def trace_size(spec: ModelSpec, stride: int = 8) -> tuple[int, int]:
    """(height, width) to trace at: the fixed size, or a small non-square one if the size is symbolic.

    stride: pixels between positions of the finest map, each of which is a query at most: more queries need a larger image.
    """
    return _with_room(spec, 256, 320, stride)


def other_size(spec: ModelSpec, stride: int = 8) -> tuple[int, int]:
    """A size that was not traced, or the fixed one; stride as of `trace_size`."""
    return _with_room(spec, 352, 224, stride)


def finest_stride(source: Source) -> int:
    """Pixels between positions of a model's finest map, as far as its configuration tells."""
    config: Any = source.module.config
    return int(min(getattr(config, "feat_strides", None) or (8,)))


def _with_room(spec: ModelSpec, height: int, width: int, stride: int) -> tuple[int, int]:
    if not spec.input.dynamic:
        return spec.input.size_hw
    scale = max(1.0, math.sqrt(spec.decode.num_queries * stride**2 / (height * width)))
    rounded = math.ceil if scale > 1 else round
    step = spec.input.multiple_of
    first, second = (max(step * 2, rounded(side * scale / step) * step) for side in (height, width))
    return first, second


QUERY_ENCODER = "query.onnx"
OPSETS = (17, 18, 19, 20)
LOWERINGS = ("auto", "gather", "gridsample", "plugin", "nvidia-plugin")
DECODES = ("raw", "graph")
NMS = ("checkpoint", "none", "hard", "graph", "graph-hard")


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Choices for one export.

    opset: ONNX opset, 17 to 20 (16 and below decompose LayerNormalization, which breaks FP16 later).
    msda: how deformable attention is lowered; "auto" is "gather" (see docs/guide/export.md for figures); "plugin" and
        "nvidia-plugin" keep one node that only TensorRT with that plugin runs (docs/guide/plugin.md).
    height, width: fix the input size; None keeps it symbolic where the family allows it.
    decode: "raw" gives logits and pred_boxes; "graph" gives finished boxes, scores, labels.
    max_detections: boxes per image with decode "graph"; None takes the checkpoint's rule.
    score_threshold: with decode "graph", `num_detections` counts the scores at or above it.
    nms: "checkpoint" keeps the checkpoint's rule, outside the graph; "none" drops it; "hard" makes it hard
        NMS, outside; "graph" puts the checkpoint's own rule into the graph of decode "graph"; "graph-hard"
        puts hard NMS there, whatever the checkpoint's rule.
    normalize: whether rescale and normalisation are part of the graph.
    input_dtype: "uint8" or "float32" raw pixels (only float32 when normalize is False).
    mask: keep the padding mask input of families that have one; False needs a fixed size.
    image_queries: of OWL-ViT and OWLv2, also the graph that encodes an image of what to find; it has the weights of the image encoder too.
    single_graph: of a prompted model, one graph that takes token ids, instead of a detector and a text encoder.
    check: run the result at a batch and a size that were not traced and compare with PyTorch.
    """

    opset: int = field(
        default=17,
        metadata={"help": "ONNX opset, 17 to 20."},
    )
    msda: str = field(
        default="auto",
        metadata={"help": "Lowering of deformable attention: auto, gather, gridsample, plugin, nvidia-plugin."},
    )
    height: int | None = None
    width: int | None = None
    decode: str = field(
        default="raw",
        metadata={"help": "raw: logits and pred_boxes; graph: decoded boxes, scores and labels."},
    )
    max_detections: int | None = field(
        default=None,
        metadata={"help": "Boxes per image; default: the checkpoint's rule."},
    )
    score_threshold: float = field(
        default=0.0,
        metadata={"help": "Lowest score that num_detections counts, with `decode=graph`."},
    )
    nms: str = field(
        default="checkpoint",
        metadata={"help": "NMS: checkpoint (its own rule), none, hard; in the graph: graph, graph-hard."},
    )
    normalize: bool = field(
        default=True,
        metadata={"help": "Rescale and normalize inside the graph.", "flag": "normalize/no-normalize", "panel": "Advanced"},
    )
    input_dtype: str = field(
        default="uint8",
        metadata={"help": "Type of the raw pixels: uint8 or float32.", "panel": "Advanced"},
    )
    mask: bool = field(
        default=True,
        metadata={
            "help": "Keep the padding mask input; `mask=False` needs a fixed size.",
            "flag": "mask/no-mask",
            "panel": "Advanced",
        },
    )
    check: bool = field(
        default=True,
        metadata={
            "help": "Compare the graph with PyTorch at shapes that were not traced, and a TensorRT engine with its graph.",
            "flag": "check/no-check",
            "panel": "Advanced",
        },
    )
    single_graph: bool = field(
        default=False,
        metadata={"help": "One graph that takes token ids, for a prompted model.", "panel": "Prompt"},
    )

    image_queries: bool = field(
        default=False,
        metadata={"help": "Also the encoder of query images (OWL-ViT, OWLv2).", "panel": "Prompt"},
    )

    def __post_init__(self) -> None:
        check_one_of("`opset`", self.opset, OPSETS, ExportError)
        check_one_of("`msda`", self.msda, LOWERINGS, ExportError)
        check_one_of("`decode`", self.decode, DECODES, ExportError)
        check_one_of("`nms`", self.nms, NMS, ExportError)
        if self.nms.startswith("graph") and self.decode != "graph":
            raise ExportError(f"`nms={self.nms}` needs `decode=graph`: NMS works on finished boxes")
        check_one_of("`input_dtype`", self.input_dtype, DTYPES, ExportError)
        if (self.height is None) != (self.width is None):
            raise ExportError("give both `height` and `width` (or `size` for a square), or neither")
        for name, value in (("`height`", self.height), ("`width`", self.width)):
            if value is not None:
                check_range(name, value, 1, LARGEST_SIDE, ExportError, integer=True, more=" pixels")
        if self.max_detections is not None and self.max_detections < 1:
            raise ExportError(f"`max_detections` must be at least 1; got {self.max_detections}")
        check_range("`score_threshold`", self.score_threshold, 0, 1, ExportError)
        if self.score_threshold and self.decode != "graph":
            raise ExportError(
                f"`score_threshold={self.score_threshold:g}` is for a graph that decodes: add `decode=graph`, or leave "
                "it out and give `threshold` to detrt detect"
            )
        if not self.normalize and self.input_dtype == "uint8":
            object.__setattr__(self, "input_dtype", "float32")
        if not self.mask and self.height is None:
            raise ExportError("a model without its padding mask needs a fixed size; add `height` and `width`")

    @property
    def lowering(self) -> str:
        return "gather" if self.msda == "auto" else self.msda

    @property
    def plugin(self) -> bool:
        """Whether deformable attention stays one node, for a TensorRT plugin."""
        return self.msda in ("plugin", "nvidia-plugin")
