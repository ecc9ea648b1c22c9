"""A bundle as a model repository of Triton Inference Server.

`config.pbtxt` is written as protobuf text; its schema is `model_config.proto` of triton-inference-server/common.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import files
from ..backends.onnxruntime.session import OnnxSession
from ..backends.tensorrt.build import plugin_operators
from ..bundle import Bundle, BundleFile, EngineFacts
from ..errors import EngineError, OutputError, SpecError
from ..spec import (
    BOXES,
    LABELS,
    NUM_DETECTIONS,
    PIXEL_MASK,
    PIXEL_VALUES,
    SCORES,
    TARGET_SIZES,
    ModelSpec,
    TensorInfo,
    extra_outputs,
)
from .triton_config import MODEL_NAME, TritonConfig

_DTYPES = {
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bool": "TYPE_BOOL",
    "bytes": "TYPE_STRING",
}


class Word(str):
    """The name of an enum value, written without quotes."""


Message = Mapping[str, object]


def render(message: Message, indent: int = 0) -> str:
    """Protobuf text of nested mappings; lists of mappings repeat their field."""
    pad = "  " * indent
    lines = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{name} {{\n{render(value, indent + 1)}{pad}}}\n")
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
            parts = ",\n".join(f"{pad}  {{\n{render(one, indent + 2)}{pad}  }}" for one in value)
            lines.append(f"{pad}{name} [\n{parts}\n{pad}]\n")
        elif isinstance(value, (list, tuple)):
            lines.append(f"{pad}{name}: [ {', '.join(map(_scalar, value))} ]\n")
        else:
            lines.append(f"{pad}{name}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (Word, int)):
        return str(value)
    return json.dumps(str(value), ensure_ascii=True)


def tensor(info: TensorInfo, *, name: str | None = None) -> Message:
    """An input or output of a model with batches: its first axis is omitted, a symbolic one is -1.

    A tensor of one number per image has the shape [1], because Triton needs a dimension.

    Raises:
        SpecError: a type that Triton does not support, or no batch axis.
    """
    if info.dtype not in _DTYPES:
        raise SpecError(f"tensor '{info.name}' has the type {info.dtype}, which Triton does not have")
    if not info.shape:
        raise SpecError(f"tensor '{info.name}' has no axis for the batch")
    dims = [axis if isinstance(axis, int) and axis >= 0 else -1 for axis in info.shape[1:]]
    found: dict[str, object] = {"name": name or info.name, "data_type": Word(_DTYPES[info.dtype]), "dims": dims or [1]}
    return found if dims else {**found, "reshape": {"shape": []}}


def _instances(config: TritonConfig) -> Message:
    """Where the model runs, and how often."""
    if config.on_cpu:
        return {"count": config.instances, "kind": Word("KIND_CPU")}
    if not config.gpus:
        return {"count": config.instances, "kind": Word("KIND_AUTO")}
    return {"count": config.instances, "kind": Word("KIND_GPU"), "gpus": config.gpus}


def _batching(config: TritonConfig) -> Message:
    """Triton's dynamic batching."""
    message: dict[str, object] = {}
    if config.preferred_batch:
        message["preferred_batch_size"] = list(config.preferred_batch)
    message["max_queue_delay_microseconds"] = round(config.max_delay_ms * 1000)
    if config.queue:
        message["default_queue_policy"] = {"max_queue_size": config.queue}
    return message


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One `config.pbtxt`. head: fields before inputs and outputs, such as name and backend; body: fields after them."""

    name: str
    head: Message
    max_batch: int
    inputs: Sequence[Message]
    outputs: Sequence[Message]
    body: Message = field(default_factory=dict)
    comment: tuple[str, ...] = ()

    def to_text(self) -> str:
        comment = "".join(f"# {line}\n" for line in self.comment)
        message = {
            "name": self.name,
            **self.head,
            "max_batch_size": self.max_batch,
            "input": list(self.inputs),
            "output": list(self.outputs),
            **self.body,
        }
        return comment + render(message)


# Tensor names of a Triton repository and its Python models.
IMAGE = "image"  # (n, 1) bytes of an encoded image
ORIGINAL_SIZE = "original_size"  # (n, 2) int64, (height, width)
NAMES = "names"  # (n, max_detections) bytes, class names


def input_name(tensor: str) -> str:
    """Name of an output of the detector as an input; tensors of one Triton model must have different names."""
    return f"model_{tensor}"


_MODEL, _BEFORE, _AFTER = "_model", "_preprocess", "_postprocess"
TRITON_PLUGIN = "libdetrt_plugin_triton.so"  # registers detrt's plugin when it is opened
_SYMBOLIC_MAX = 16  # for a graph with a symbolic batch


@dataclass(frozen=True, slots=True)
class TritonRepo:
    """The written repository. models: folders. command: starts Triton. notes: for people."""

    folder: Path
    models: tuple[str, ...]
    command: str
    max_batch: int
    backend: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Core:
    """The detector: its tensors, its files in the version folder, and their fields of the configuration.

    plugins: libraries of the engines.
    """

    inputs: Sequence[TensorInfo]
    outputs: Sequence[TensorInfo]
    max_batch: int | None
    contents: dict[str, Path]
    head: Message
    backend: str
    plugins: tuple[str, ...] = ()


def write_triton_repo(bundle_folder: Path | str, output: Path | str, config: TritonConfig | None = None) -> TritonRepo:
    """Write NAME_model (the detector), and NAME_preprocess, NAME_postprocess and the ensemble NAME around it.

    Raises:
        SpecError: not a bundle, a model that takes a prompt, a fixed batch, or unsuitable choices.
        EngineError: no engine that Triton can run. OutputError: a model of that name exists already.
    """
    config = config or TritonConfig()
    bundle = Bundle.open(bundle_folder)
    spec = bundle.spec
    if extra_outputs(spec):
        what = "masks" if spec.has_masks else "a reading order"
        raise SpecError(
            f"'{bundle_folder}' is a model with {what}, which a Triton repository cannot return yet; serve it with: detrt serve "
            f"{bundle_folder}"
        )
    if spec.text is not None:
        raise SpecError(
            f"'{bundle_folder}' takes a prompt: its tokenizer and its text encoder are not models of Triton; serve it with: "
            f"detrt serve {bundle_folder}"
        )
    name = config.name or re.sub(r"[^A-Za-z0-9_.-]", "_", Path(os.path.abspath(bundle_folder)).name)
    if not MODEL_NAME.fullmatch(name):
        raise SpecError(f"'{bundle_folder}' gives no name for a model; give one with --name")
    core, notes = _core(bundle, config)
    max_batch = _max_batch(core, config)
    if core.plugins and config.plugin is None:
        raise SpecError(
            f"the engine was built with the plugin library {', '.join(core.plugins)}, which Triton must load as well; give its "
            f"path on Triton's machine, for detrt's own that of {TRITON_PLUGIN}: --plugin PATH.so"
        )
    if config.plugin is not None and Path(config.plugin).name == "libdetrt_plugin.so":
        raise SpecError(
            f"--plugin '{config.plugin}' registers its plugins on TensorRT's request only, and Triton only opens it; give "
            f"{TRITON_PLUGIN}, which cpp/plugin builds beside it"
        )
    command = _command(Path(output), config.plugin)
    models = {name + _MODEL: (_core_config(name, core, max_batch, config, spec, command), core.contents)}
    if config.ensemble:
        models |= _ensemble_models(name, core, max_batch, config, spec)
    _write(Path(output), models, spec)
    return TritonRepo(Path(output), tuple(models), command, max_batch, core.backend, tuple(notes))


def _core(bundle: Bundle, config: TritonConfig) -> tuple[_Core, list[str]]:
    notes: list[str] = []
    engines = [entry for entry in bundle.of_kind("engine") if entry.engine is not None]
    usable = [entry for entry in engines if entry.engine and entry.engine.target == "tensorrt"]
    others = sorted({entry.engine.target for entry in engines if entry.engine} - {"tensorrt"})
    if others:
        notes.append(f"engines of the target {', '.join(others)} are left out: Triton's backend is TensorRT")
    wants_engine = config.backend == "tensorrt" or (config.backend == "auto" and usable and not config.on_cpu)
    if not wants_engine:
        return _onnx_core(bundle), notes
    if not usable:
        what = f"engines of the target {', '.join(others)} only" if others else "no engine"
        raise EngineError(
            f"'{bundle.folder}' has {what}, which Triton cannot run; build one on the GPU that Triton will use, with its "
            "TensorRT version: detrt build MODEL -o OUT --target tensorrt; or use --backend onnxruntime"
        )
    core = _engine_core(bundle, usable)
    versions = sorted({entry.engine.runtime_version for entry in usable if entry.engine})
    notes.append(f"Triton must have TensorRT {', '.join(versions)}, which built the engine")
    return core, notes


def _onnx_core(bundle: Bundle) -> _Core:
    entries = bundle.of_kind("onnx")
    if not entries:
        raise SpecError(f"the bundle '{bundle.folder}' has no ONNX file; build it again with detrt build")
    path = bundle.checked_path(entries[0])
    if operators := plugin_operators(path):
        raise SpecError(
            f"'{path}' has nodes of a TensorRT plugin ({', '.join(operators)}), which Triton's ONNX Runtime does not know; build it "
            "with --msda auto"
        )
    session = OnnxSession(path, bundle.spec, threads=1)
    session.close()
    first = session.inputs[0].shape[0] if session.inputs[0].shape else 1
    if isinstance(first, int):
        raise SpecError(
            f"'{path}' has the fixed batch {first}, so Triton could not put requests together; detrt export leaves it symbolic"
        )
    data = {one.name: one for one in path.parent.glob(path.name + ".data")}
    head = {"backend": "onnxruntime", "default_model_filename": "model.onnx"}
    return _Core(session.inputs, session.outputs, None, {"model.onnx": path, **data}, head, "onnxruntime")


def _engine_core(bundle: Bundle, entries: Sequence[BundleFile]) -> _Core:
    """Engines of several GPUs are one model; Triton selects the file by compute capability."""
    facts = [entry.engine for entry in entries if entry.engine is not None]
    contents, by_sm = {}, []
    for entry, one in zip(entries, facts, strict=True):
        file = "model.plan" if not contents else f"model.sm{'-'.join(map(str, one.compute_capabilities))}.plan"
        contents[file] = bundle.checked_path(entry)
        by_sm += [{"key": f"{sm // 10}.{sm % 10}", "value": file} for sm in one.compute_capabilities]
    head = {"backend": "tensorrt", "default_model_filename": "model.plan"}
    if len(entries) > 1:
        head |= {"cc_model_filenames": by_sm}
    inputs, outputs = _engine_tensors(facts[0])
    profiles = [profile for one in facts for profile in one.profile.values()]
    smallest, largest = max(profile["min"][0] for profile in profiles), min(profile["max"][0] for profile in profiles)
    if smallest > 1:
        raise SpecError(
            f"an engine in '{bundle.folder}' takes batches of {smallest} and more, and Triton also sends single images; build one "
            f"with --batch 1,{largest},{largest}"
        )
    plugins = dict.fromkeys(library for one in facts for library in one.options.get("plugins") or ())
    return _Core(inputs, outputs, largest, contents, head, "tensorrt", tuple(plugins))


def _engine_tensors(facts: EngineFacts) -> tuple[list[TensorInfo], list[TensorInfo]]:
    sides = []
    for tensors in (facts.inputs, facts.outputs):
        sides.append([TensorInfo(one["name"], one["dtype"], tuple(one["shape"])) for one in tensors])
    if not sides[0] or not sides[1]:
        raise EngineError("the engine's record does not name its tensors; build it again with: detrt build --target tensorrt")
    return sides[0], sides[1]


def _max_batch(core: _Core, config: TritonConfig) -> int:
    limit = core.max_batch
    if config.max_batch is not None and limit is not None and config.max_batch > limit:
        raise SpecError(f"--max-batch {config.max_batch}: the engine takes at most {limit}; build one with a larger --batch")
    largest = limit or _SYMBOLIC_MAX if config.max_batch is None else config.max_batch
    config.check_preferred(largest)
    return largest


def _core_config(name: str, core: _Core, max_batch: int, config: TritonConfig, spec: ModelSpec, command: str) -> ModelConfig:
    body: dict[str, object] = {"instance_group": [_instances(config)], "dynamic_batching": _batching(config)}
    # With masks of zeros attention would return NaN, so that models with a mask have no warm-up.
    if config.warmup and not spec.input.mask:
        body["model_warmup"] = [_warmup(core.inputs, spec, batch) for batch in sorted({1, max_batch})]
    return ModelConfig(
        name + _MODEL,
        core.head,
        max_batch,
        [tensor(info) for info in core.inputs],
        [tensor(info) for info in core.outputs],
        body,
        (f"{spec.family}: {spec.name or name}, {spec.decode.num_classes} classes", f"start with: {command}"),
    )


def _warmup(inputs: Sequence[TensorInfo], spec: ModelSpec, batch: int) -> Message:
    """A request of zeros, so that kernels are selected before the first real one."""
    height, width = spec.input.size_hw
    values = []
    for info in inputs:
        described = tensor(info)
        dims = [3, height, width] if info.name == PIXEL_VALUES else [max(1, d) for d in described["dims"]]  # type: ignore[attr-defined]
        value = {"data_type": described["data_type"], "dims": dims, "zero_data": True}
        values.append({"key": info.name, "value": value})
    return {"name": f"batch {batch}", "batch_size": batch, "inputs": values}


def _ensemble_models(name: str, core: _Core, max_batch: int, config: TritonConfig, spec: ModelSpec) -> dict[str, tuple]:
    """The models before and after the detector, and the ensemble of all three."""
    most = spec.decode.max_detections
    image = {"name": IMAGE, "data_type": Word("TYPE_STRING"), "dims": [1]}
    size = {"name": ORIGINAL_SIZE, "data_type": Word("TYPE_INT64"), "dims": [2]}
    results = [
        {"name": BOXES, "data_type": Word("TYPE_FP32"), "dims": [most, 4]},
        {"name": SCORES, "data_type": Word("TYPE_FP32"), "dims": [most]},
        {"name": LABELS, "data_type": Word("TYPE_INT64"), "dims": [most]},
        {"name": NAMES, "data_type": Word("TYPE_STRING"), "dims": [most]},
        {"name": NUM_DETECTIONS, "data_type": Word("TYPE_INT64"), "dims": [1]},
    ]
    images = [info for info in core.inputs if info.name in (PIXEL_VALUES, PIXEL_MASK)]
    wanted = (BOXES, SCORES, LABELS, NUM_DETECTIONS) if spec.decode.in_graph else ("logits", "pred_boxes")
    found = [info for info in core.outputs if info.name in wanted]
    on_cpu = {"instance_group": [{"count": config.instances, "kind": Word("KIND_CPU")}]}
    python = {"backend": "python"}
    before = ModelConfig(name + _BEFORE, python, max_batch, [image], [*(tensor(info) for info in images), size], on_cpu)
    after = ModelConfig(
        name + _AFTER,
        python,
        max_batch,
        [*(_python_tensor(info, input_name(info.name)) for info in found), size],
        results,
        {**on_cpu, "parameters": [{"key": "threshold", "value": {"string_value": f"{config.threshold:g}"}}]},
    )
    maps = {info.name: ORIGINAL_SIZE if info.name == TARGET_SIZES else info.name for info in core.inputs}
    steps = [
        _step(name + _BEFORE, {IMAGE: IMAGE}, {one["name"]: one["name"] for one in before.outputs}),
        _step(name + _MODEL, maps, {info.name: input_name(info.name) for info in found}),
        _step(
            name + _AFTER,
            {one["name"]: one["name"] for one in after.inputs},
            {one["name"]: one["name"] for one in results},
        ),
    ]
    whole = ModelConfig(name, {"platform": "ensemble"}, max_batch, [image], results, {"ensemble_scheduling": {"step": steps}})
    scripts = {
        side: f"from detrt.serve.triton_models.{side} import TritonPythonModel  # noqa: F401\n"
        for side in ("preprocess", "postprocess")
    }
    return {
        before.name: (before, {"model.py": scripts["preprocess"], "spec.json": None}),
        after.name: (after, {"model.py": scripts["postprocess"], "spec.json": None}),
        name: (whole, {}),
    }


def _python_tensor(info: TensorInfo, name: str) -> Message:
    """A tensor of a Python model, as in the configuration of the detector, with one number per image as a list."""
    return {key: value for key, value in tensor(info, name=name).items() if key != "reshape"}


def _step(model: str, inputs: dict, outputs: dict) -> Message:
    return {
        "model_name": model,
        "model_version": -1,
        "input_map": [{"key": key, "value": value} for key, value in inputs.items()],
        "output_map": [{"key": key, "value": value} for key, value in outputs.items()],
    }


def _command(output: Path, plugin: str | None) -> str:
    option = f" --backend-config=tensorrt,plugins={plugin}" if plugin else ""
    return f"tritonserver --model-repository={output}{option}"


def _write(output: Path, models: dict[str, tuple], spec: ModelSpec) -> None:
    """Write the model folders atomically."""
    there = [name for name in models if (output / name).exists()]
    if there:
        raise OutputError(f"'{output / there[0]}' is there already; delete it, or give another --name")
    files.check_place(output / next(iter(models)))
    staging = output / f".{uuid.uuid4().hex[:8]}.tmp"
    placed: list[Path] = []
    try:
        with files.making_parents(staging / "x"):
            for name, (config, contents) in models.items():
                version = staging / name / "1"
                version.mkdir(parents=True)
                (staging / name / "config.pbtxt").write_text(config.to_text(), "utf-8")
                for file, content in contents.items():
                    if isinstance(content, Path):
                        shutil.copyfile(content, version / file)
                    else:
                        (version / file).write_text(content if content is not None else spec.to_json() + "\n", "utf-8")
            for name in models:
                os.replace(staging / name, output / name)
                placed.append(output / name)
    except OSError as error:
        for path in placed:
            files.remove(path)
        raise files.output_error(output, error) from error
    finally:
        files.remove(staging)
