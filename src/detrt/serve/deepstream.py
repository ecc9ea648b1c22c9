"""A bundle as a model of NVIDIA DeepStream: graph, configuration of Gst-nvinfer, labels.

Keys, the formula of the pixels and the scaling filters are those of NVIDIA's manual of Gst-nvinfer
(https://docs.nvidia.com/metropolis/deepstream/dev-guide/text/DS_plugin_gst-nvinfer.html); boxes are read by the parser of DeepStream-Yolo
(https://github.com/marcoslucianops/DeepStream-Yolo), boxes with masks by that of DeepStream-Yolo-Seg
(https://github.com/marcoslucianops/DeepStream-Yolo-Seg).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import files
from ..bundle import Bundle, check_outside
from ..data.interpolate import interpolate
from ..data.postprocess import count_candidates
from ..data.preprocess import BatchPlan, SizeHW, check_size, plan_batch, preprocessing_words
from ..data.resample import BITS, axis_table, down_first
from ..errors import SpecError, number_of
from ..graph import io
from ..graph.deepstream import FrameResize, Letterbox, for_deepstream, mask_side
from ..graph.operators import plugin_operators
from ..graph.view import GraphView, graph_precision
from ..spec import InputSpec, ModelSpec, Precision
from ..tasks import tasks_of
from .deepstream_config import FULL_HD, DeepStreamConfig

MODEL, LABELS_FILE, CONFIG, APP_CONFIG = "model.onnx", "labels.txt", "config_infer_primary.txt", "deepstream_app_config.txt"
_FILTERS = {"nearest": 0, "bilinear": 1, "bicubic": 2, "lanczos": 4}  # NvBufSurfTransform_Inter on a GPU
_NETWORK_MODES = {Precision.FP32: 0, Precision.FP16: 2}  # INT8 (1) needs a calibration table instead of Q/DQ
_SCALE_TOLERANCE = 0.03  # by which nvinfer's letterbox may be larger or smaller than the model's own
_PARSER = {
    "parse-bbox-func-name": "NvDsInferParseYolo",
    "custom-lib-path": "nvdsinfer_custom_impl_Yolo/libnvdsinfer_custom_impl_Yolo.so",
    "engine-create-func-name": "NvDsInferYoloCudaEngineGet",
}
_SEG_PARSER = {
    "parse-bbox-instance-mask-func-name": "NvDsInferParseYoloSeg",
    "custom-lib-path": "nvdsinfer_custom_impl_Yolo_seg/libnvdsinfer_custom_impl_Yolo_seg.so",
    "output-instance-mask": 1,
    "segmentation-threshold": 0.5,
}


@dataclass(frozen=True, slots=True)
class DeepStreamApp:
    """What was written. notes: differences from `detrt detect`."""

    folder: Path
    files: tuple[str, ...]
    box: Letterbox
    notes: tuple[str, ...]


def write_deepstream(model: Path | str, output: Path | str, config: DeepStreamConfig | None = None) -> DeepStreamApp:
    """Write what DeepStream needs to run a bundle or an ONNX file.

    Raises:
        SpecError: what nvinfer cannot do, by its name, or a bundle without a graph.
        GraphError: a graph that cannot be read. OutputError: files that cannot be written, or that are a bundle's.
    """
    config, output = config or DeepStreamConfig(), Path(output)
    check_outside(output / MODEL)
    path, spec = _graph_of(Path(model))
    _check(path, spec, config.resize)
    masks = spec.has_masks and not config.no_masks
    notes = [f"{task.title} are left out" for task in tasks_of(spec) if not (masks and task.nvinfer)]
    box = letterbox(spec.input, config, notes)
    rows = spec.decode.max_detections if spec.decode.in_graph else count_candidates(spec)
    if masks:
        notes.append(_mask_note(path, box, rows))
    detector = io.load(path)
    graph = for_deepstream(detector, spec, box, rows, masks=masks)
    batch = graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value or config.batch
    precision = _precision(path, detector)
    if precision == Precision.FP16:
        notes.append(
            f"let nvinfer read the engine '{_engine(batch, precision)}' that detrt's types are kept in, or it lets TensorRT choose them: "
            f"trtexec --onnx={MODEL} --stronglyTyped --saveEngine={_engine(batch, precision)}, on the device, with shapes of batch size {batch}"
        )
    texts = {
        LABELS_FILE: "".join(f"{_one_line(spec.label(i))}\n" for i in range(spec.decode.num_classes)),
        APP_CONFIG: _app_config(config),
        CONFIG: _infer_config(spec, box, config, batch, precision, masks),
    }
    io.save(graph, output / MODEL)
    for name, text in texts.items():
        files.write_text(output / name, text)
    return DeepStreamApp(output, (MODEL, *texts), box, tuple(notes))


def _precision(path: Path, model: Any) -> Precision:
    """What a graph computes in. Raises SpecError for types that nvinfer has no mode for."""
    precision = graph_precision(GraphView(model))
    if precision not in _NETWORK_MODES:
        raise SpecError(
            f"'{path}' computes in {precision}, which nvinfer cannot build (network-mode has FP32, INT8 with a calibration table, FP16); "
            "build the bundle in fp32 or fp16 for DeepStream"
        )
    return precision


def _engine(batch: int, precision: Precision) -> str:
    """The name under which nvinfer looks for the engine."""
    return f"model_b{batch}_gpu0_{precision}.engine"


def _mask_note(path: Path, box: Letterbox, rows: int) -> str:
    """What masks cost. Raises SpecError for frames without room for one."""
    tall, wide = mask_side(box)
    if not tall * wide:
        raise SpecError(
            f"the masks of '{path}' need frames of at least 4x4 pixels; add `no_masks`, or give larger ones with `frame_hw`"
        )
    megabytes = 4e-6 * rows * tall * wide
    return (
        f"masks are {_words((tall, wide))} for each of {number_of(rows, 'row')}, {megabytes:.3g} MB a frame, which `resize=nvinfer` makes smaller and "
        "`no_masks` leaves out"
    )


def _graph_of(model: Path) -> tuple[Path, ModelSpec]:
    if not model.is_dir():
        return model, io.read_spec(model)
    bundle = Bundle.open(model)
    entries = bundle.of_kind("onnx")
    if not entries:
        raise SpecError(f"the bundle '{model}' has no ONNX file; build it again with detrt build")
    return bundle.checked_path(entries[0]), bundle.spec


def _check(path: Path, spec: ModelSpec, resize: str) -> None:
    """Raise SpecError for what nvinfer or the parser cannot do."""
    given, rule = spec.input, spec.decode
    if spec.text is not None:
        raise SpecError(f"'{path}' takes a prompt, which nvinfer cannot give it; only models of fixed classes run in DeepStream")
    if operators := plugin_operators(path):
        raise SpecError(f"'{path}' has nodes of a TensorRT plugin ({', '.join(operators)}); build it with `msda=auto`")
    if rule.nms == "soft_nms":
        raise SpecError(
            f"'{path}' needs soft-NMS, and nvinfer has none (cluster-mode); it cannot run in DeepStream as it was trained"
        )
    if given.resample not in _FILTERS and resize == "nvinfer":
        raise SpecError(
            f"'{path}' resizes by '{given.resample}'; nvinfer's scaling-filter has {', '.join(_FILTERS)}: add `resize=graph`"
        )


def letterbox(given: InputSpec, config: DeepStreamConfig, notes: list[str]) -> Letterbox:
    """The network's size, and the part of it that a frame covers in nvinfer; appends to `notes`.

    Raises:
        SpecError: a model that keeps the aspect ratio, without the size of the frames, or one that pads as nvinfer does not.
    """
    check_size(given, config.size)
    stretches = given.resize == "stretch"
    if stretches and config.resize == "nvinfer":
        size = config.size or given.size_hw
        return Letterbox(size, size, size)
    frame = config.frame_hw or (FULL_HD if stretches else None)
    if frame is None:
        raise SpecError(
            f"this model keeps the aspect ratio ({preprocessing_words(given)}), so its graph depends on the size of the frames: give "
            "`frame_hw=HEIGHTxWIDTH`, the height and width of nvstreammux, e.g. `frame_hw=1080x1920`"
        )
    plan = plan_batch([frame], given, config.size)
    wanted = plan.resized_hw[0]
    if config.resize == "graph":
        resize = None if wanted == frame == plan.tensor_hw else _resize(frame, plan, given)
        return Letterbox(frame, wanted, plan.tensor_hw, resize)
    if plan.tensor_hw == wanted:
        return Letterbox(wanted, wanted, wanted)
    content = _content(frame, plan.tensor_hw)
    scale = max(abs(ours / theirs - 1) for ours, theirs in zip(content, wanted, strict=True))
    if scale > _SCALE_TOLERANCE:
        raise SpecError(
            f"this model resizes a frame of {_words(frame)} to {_words(wanted)} and pads to {_words(plan.tensor_hw)}; nvinfer "
            f"(maintain-aspect-ratio) would fill it with {_words(content)}: add `resize=graph`"
        )
    if content != wanted:
        notes.append(f"a frame is resized to {_words(content)} (height x width), where detrt resizes to {_words(wanted)}")
    return Letterbox(plan.tensor_hw, content, plan.tensor_hw)


def _resize(frame_hw: SizeHW, plan: BatchPlan, given: InputSpec) -> FrameResize:
    """The resize and the padding of `preprocess` as two matrices."""
    if not given.antialias and given.resample != "bilinear":
        raise SpecError(
            f"this model resizes by {given.resample} interpolation without antialiasing, which the graph for DeepStream does not do; add "
            "`resize=nvinfer`"
        )
    inside = plan.resized_hw[0]
    matrices = []
    for length, result, side in zip(frame_hw, inside, plan.tensor_hw, strict=True):
        matrix = np.zeros((side, length), np.float32)
        if given.antialias:
            table = axis_table(length, result, given.resample)
            rows = np.arange(result)
            for tap in range(table.taps):
                np.add.at(matrix, (rows, np.minimum(table.first + tap, length - 1)), table.weights[tap] / (1 << BITS))
        else:
            matrix[:result] = interpolate(np.eye(length, dtype=np.uint8)[..., None], (result, length), given)[..., 0]
        matrices.append(matrix)
    return FrameResize(matrices[0], matrices[1], not given.antialias or down_first(frame_hw, inside), given.antialias)


def _content(frame_hw: SizeHW, network_hw: SizeHW) -> SizeHW:
    """The size of a frame in nvinfer's letterbox: an even source, and truncation."""
    height, width = (side - side % 2 for side in frame_hw)
    tall, wide = network_hw[1] * height / width, network_hw[0] * width / height
    return (int(tall), network_hw[1]) if tall <= network_hw[0] else (network_hw[0], int(wide))


def _words(size: SizeHW) -> str:
    return f"{size[0]}x{size[1]}"


def _one_line(label: str) -> str:
    return " ".join(label.split()) or "-"


def _infer_config(
    spec: ModelSpec, box: Letterbox, config: DeepStreamConfig, batch: int, precision: Precision, masks: bool
) -> str:
    """config_infer_primary.txt, in the order of DeepStream-Yolo's own."""
    rule = spec.decode
    nms = rule.nms == "nms" and not rule.nms_in_graph
    keys = {
        "gpu-id": 0,
        # y = net-scale-factor * (x - offsets): the graph does the rest, for each channel by itself.
        "net-scale-factor": 1.0,
        "model-color-format": 0,
        "onnx-file": MODEL,
        "model-engine-file": _engine(batch, precision),
        "labelfile-path": LABELS_FILE,
        "batch-size": batch,
        "network-mode": _NETWORK_MODES[precision],
        "num-detected-classes": rule.num_classes,
        "interval": 0,
        "gie-unique-id": 1,
        "process-mode": 1,
        "network-type": 3 if masks else 0,
        "cluster-mode": 2 if nms else 4,
        "maintain-aspect-ratio": int(box.padded and box.resize is None),
        "symmetric-padding": 0,
        "scaling-filter": _FILTERS.get(spec.input.resample, 1),
        "scaling-compute-hw": 1,
        **(_SEG_PARSER if masks else _PARSER),
    }
    lines = [f"# {spec.family}: {_one_line(spec.name) or 'unnamed'}; {preprocessing_words(spec.input)}"]
    if spec.input.resize != "stretch" or box.resize is not None:
        lines.append(f"# for frames of {_words(config.frame_hw or FULL_HD)} (height x width) only")
    lines += ["", "[property]", *(f"{key}={value}" for key, value in keys.items()), "", "[class-attrs-all]"]
    if nms:
        lines.append(f"nms-iou-threshold={rule.nms_iou:g}")
    # nvinfer takes the best of each class; the graph gives no more than so many rows for all classes together.
    lines += [f"pre-cluster-threshold={config.threshold:g}", f"topk={rule.max_detections}"]
    for class_id, score in sorted(spec.class_thresholds(config.class_thresholds).items()):
        lines += ["", f"[class-attrs-{class_id}]", *([f"nms-iou-threshold={rule.nms_iou:g}"] if nms else [])]
        lines += [f"pre-cluster-threshold={score:g}", f"topk={rule.max_detections}"]
    return "\n".join(lines) + "\n"


def _app_config(config: DeepStreamConfig) -> str:
    """deepstream_app_config.txt: one sample video, and no screen."""
    height, width = config.frame_hw or FULL_HD
    groups = {
        "application": {"enable-perf-measurement": 1, "perf-measurement-interval-sec": 5},
        "tiled-display": {"enable": 0},
        "source0": {
            "enable": 1,
            "type": 3,
            "uri": "file:///opt/nvidia/deepstream/deepstream/samples/streams/sample_1080p_h264.mp4",
            "num-sources": 1,
            "gpu-id": 0,
        },
        "sink0": {"enable": 1, "type": 1, "sync": 0, "gpu-id": 0},
        "streammux": {
            "gpu-id": 0,
            "live-source": 0,
            "batch-size": config.batch,
            "batched-push-timeout": 40000,
            "width": width,
            "height": height,
            "enable-padding": 0,
        },
        "primary-gie": {"enable": 1, "gpu-id": 0, "gie-unique-id": 1, "config-file": CONFIG},
    }
    return "\n".join(
        "\n".join([f"[{name}]", *(f"{key}={value}" for key, value in keys.items()), ""]) for name, keys in groups.items()
    )
