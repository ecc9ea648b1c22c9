"""The model of text_cases as ONNX files, with onnx.helper: model.onnx, text.onnx and tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from text_cases import (
    COLOURS,
    WIDTH,
    detector_tensors,
    embedding,
    model_spec,
    tensors,
    text_encoder_outputs,
    tokenizer_json,
    word_id,
)

from detrt import files
from detrt.bundle import Bundle, BundleFile, Provenance
from detrt.spec import ModelSpec, TensorInfo

_TYPES = {"uint8": TensorProto.UINT8, "int64": TensorProto.INT64, "float32": TensorProto.FLOAT}


def write_text_model(folder: Path, spec: ModelSpec | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Write the three files and return the path of model.onnx. extra: more words of the tokenizer."""
    spec = spec or model_spec()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(list(extra)))
    if spec.text.encoder:
        (folder / "text.onnx").write_bytes(_text_encoder(spec))
    path = folder / "model.onnx"
    path.write_bytes(_detector(spec))
    return path


def write_text_bundle(folder: Path, spec: ModelSpec | None = None, without: str = "") -> Path:
    """The same files as a bundle; without: a kind that its manifest leaves out."""
    spec = spec or model_spec()
    write_text_model(folder, spec)
    kinds = {"onnx": "model.onnx", "text": "text.onnx", "tokenizer": "tokenizer.json"}
    rows = [
        BundleFile(kind, name, files.sha256_of(folder / name), (folder / name).stat().st_size)
        for kind, name in kinds.items()
        if kind != without and (folder / name).is_file()
    ]
    Bundle(folder, spec, Provenance("random:test"), tuple(rows)).save()
    return folder


def _text_encoder(spec: ModelSpec) -> bytes:
    """Features as in text_cases; the masks, which the detector here does not use, allow everything."""
    table = np.zeros((2100, WIDTH), np.float32)
    table[1000:] = embedding(np.arange(1000, 2100))
    constants = {"table": table, "last": np.array([2], np.int64), "middle": np.array([1], np.int64)}
    constants["zero"] = np.array(0, np.int64)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["text_features"]),
        helper.make_node("Unsqueeze", ["attention_mask", "last"], ["column"]),
        helper.make_node("Unsqueeze", ["attention_mask", "middle"], ["row"]),
        helper.make_node("Mul", ["column", "row"], ["text_self_mask"]),
        helper.make_node("Mul", ["input_ids", "zero"], ["text_position_ids"]),
    ]
    return _model(nodes, constants, tensors("input_ids", "attention_mask"), text_encoder_outputs("tokens"), spec)


def _detector(spec: ModelSpec) -> bytes:
    inputs, outputs = detector_tensors(spec)
    boxes = np.array([[[(q + 0.5) / 3, 0.5, 1 / 3, 1.0] for q in range(3)]], np.float32)
    height, width = spec.input.size_hw
    constants = {
        "thirds": np.array([0, 3, height, 3, width // 3], np.int64),
        "inside": np.array([2, 4], np.int64),
        "colours": embedding(np.array([word_id(name) for name in COLOURS])) / 255,
        "six": np.array(6, np.float32),
        "two": np.array(2, np.float32),
        "low": np.array(-1e4, np.float32),
        "middle": np.array([1], np.int64),
        "zero": np.array([0], np.int64),
        "boxes": boxes,
        "tail": np.array([3, 4], np.int64),
    }
    nodes = [
        helper.make_node("Cast", ["pixel_values"], ["pixels"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["pixels", "thirds"], ["parts"]),
        helper.make_node("ReduceMean", ["parts", "inside"], ["means"], keepdims=0),
        helper.make_node("Transpose", ["means"], ["rows"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["rows", "colours"], ["seen"]),
        helper.make_node("Transpose", ["text_features"], ["text"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["seen", "text"], ["similar"]),
        helper.make_node("Mul", ["similar", "six"], ["scaled"]),
        helper.make_node("Sub", ["scaled", "two"], ["raw"]),
        helper.make_node("Unsqueeze", ["attention_mask", "middle"], ["mask"]),
        helper.make_node("Cast", ["mask"], ["real"], to=TensorProto.BOOL),
        helper.make_node("Where", ["real", "raw", "low"], ["logits"]),
        helper.make_node("Shape", ["pixel_values"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "tail"], ["box_shape"], axis=0),
        helper.make_node("Expand", ["boxes", "box_shape"], ["pred_boxes"]),
    ]
    return _model(nodes, constants, inputs, outputs, spec)


def _model(nodes, constants, inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...], spec: ModelSpec) -> bytes:
    def values(infos):
        return [helper.make_tensor_value_info(i.name, _TYPES[i.dtype], list(i.shape)) for i in infos]

    initial = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "test", values(inputs), values(outputs), initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    helper.set_model_props(model, {"detrt.spec": spec.to_json()})
    return model.SerializeToString()
