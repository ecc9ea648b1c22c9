"""Builders without strong typing (TensorRT 8): types as builder flags and layer constraints, read back from the engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ....errors import EngineError
from ..bindings import Messages, Trt
from ..diagnose import HUNG_EXIT_CODE, NO_KERNEL
from ..rewrite import Rewritten
from .rewrite import FP32_MARK

# Layers that take no precision: they hold weights or shapes, are parts of a loop, or move values, which keep the type of the
# layer before. TensorRT 8.5 finds "no supported formats" for constraints on those.
_UNTYPED = frozenset(
    ("CONSTANT", "SHAPE", "TRIP_LIMIT", "RECURRENCE", "LOOP_OUTPUT", "ITERATOR", "CONDITION", "CONDITIONAL_INPUT",
     "CONDITIONAL_OUTPUT", "ASSERTION", "SHUFFLE", "SLICE", "CONCATENATION",
     "GATHER", "SELECT", "IDENTITY", "SCATTER", "TOPK", "NMS", "NON_ZERO", "ONE_HOT")
)  # fmt: skip
# cuDNN is large, often absent, and NVIDIA's later versions do without it.
_NO_TACTICS = ("CUDNN",)
# Healthy builds log every second until the first kernel is timed. After that one node of Myelin may take minutes.
SILENT_S = 300.0
_SYMBOLIC_FEATURE = "FASTER_DYNAMIC_SHAPES_0805"
# Words of the engine inspector -> TensorRT type.
_FORMATS = (
    ("FP16", "HALF"),
    ("Half", "HALF"),
    ("FP32", "FLOAT"),
    ("Float", "FLOAT"),
    ("Int32", "INT32"),
    ("Bool", "BOOL"),
)


def configure(trt: Trt, builder_config: Any, network: Any, source: Rewritten, symbolic: bool) -> None:
    """Tell the builder what the typed graph says: FP16 where it has it, FP32 for every marked node.

    symbolic: whether an axis of the profile has a range.

    Raises:
        EngineError: a parser that keeps no names, or a symbolic axis where the version would compute it wrongly.
    """
    module = trt.module
    flags = module.BuilderFlag
    if symbolic:
        # Without it TensorRT 8.5 is wrong at other sizes or prompt lengths than the usual one (docs/results/tensorrt.md).
        feature = getattr(getattr(module, "PreviewFeature", None), _SYMBOLIC_FEATURE, None)
        if feature is None:
            raise EngineError(
                f"TensorRT {trt.version} has no preview feature {_SYMBOLIC_FEATURE}, without which engines of symbolic shapes are "
                "wrong; use TensorRT 8.5.1 or newer, or one batch size and one image size"
            )
        builder_config.set_preview_feature(feature, True)
    if source.low:
        builder_config.set_flag(flags.FP16)
        builder_config.set_flag(flags.PREFER_PRECISION_CONSTRAINTS)
    if source.low and not constrain(trt, network):
        raise EngineError(
            f"TensorRT {trt.version} kept no node name of the graph, so that it cannot be told what must stay FP32; build with "
            "`precision=fp32`"
        )
    sources = module.TacticSource.__members__
    builder_config.set_tactic_sources(sum(1 << int(source) for name, source in sources.items() if name not in _NO_TACTICS))
    builder_config.profiling_verbosity = module.ProfilingVerbosity.DETAILED  # for `inspect`


def constrain(trt: Trt, network: Any) -> int:
    """Keep the layers of marked nodes in FP32; returns how many."""
    wide = trt.module.DataType.FLOAT
    floats = ("FLOAT", "HALF")
    count = 0
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    # TensorRT 8.5 fuses Softmax and TopK, and finds "no supported formats" for the two under a constraint.
    selected = {layer.get_input(0).name for layer in layers if layer.type.name == "TOPK"}
    for layer in layers:
        if FP32_MARK not in layer.name or layer.type.name in _UNTYPED:
            continue
        inputs = [layer.get_input(position) for position in range(layer.num_inputs)]
        outputs = [layer.get_output(position) for position in range(layer.num_outputs)]
        if layer.type.name == "SOFTMAX" and outputs[0].name in selected:
            continue
        if not any(tensor is not None and tensor.dtype.name in floats for tensor in (*inputs, *outputs)):
            continue
        # A plugin finds "no supported formats" under a precision of its own, and runs in FP16 then; its outputs can be told.
        if layer.type.name != "PLUGIN_V2":
            layer.precision = wide
        for position, tensor in enumerate(outputs):
            if tensor is not None and tensor.dtype.name in floats:
                layer.set_output_type(position, wide)
        count += 1
    return count


def serialize(
    trt: Trt, builder: Any, network: Any, builder_config: Any, messages: Messages, *, symbolic: bool
) -> tuple[Any, list[str]]:
    """(engine, or None where the builder failed; warnings), for what `configure` prepared.

    With the feature for symbolic shapes TensorRT 8.5.3 has no kernel for RT-DETRv2 and D-FINE of symbolic height and width. Without it
    their engines were right at every shape that was compared, which other models' are not.

    The process ends with `HUNG_EXIT_CODE` where the builder says nothing for `SILENT_S` before it times a kernel.
    """
    with _watched(trt):
        return _serialize(trt, builder, network, builder_config, messages, symbolic)


def _serialize(
    trt: Trt, builder: Any, network: Any, builder_config: Any, messages: Messages, symbolic: bool
) -> tuple[Any, list[str]]:
    engine = builder.build_serialized_network(network, builder_config)
    if engine is not None or not symbolic or not re.search(NO_KERNEL, " ".join(messages.errors)):
        return engine, []
    builder_config.set_preview_feature(getattr(trt.module.PreviewFeature, _SYMBOLIC_FEATURE), False)
    return builder.build_serialized_network(network, builder_config), [
        f"TensorRT {trt.version} has no kernel for this graph with its preview feature {_SYMBOLIC_FEATURE}, and the engine was built "
        "without: it may be wrong at shapes that were not compared. One batch size and one image size have no such risk"
    ]


@contextlib.contextmanager
def _watched(trt: Trt) -> Iterator[None]:
    """End the process where the builder hangs inside the block: its call cannot be interrupted."""
    done = threading.Event()
    trt.heard_s, trt.timed = time.monotonic(), False

    def watch() -> None:
        while not (trt.timed or done.wait(min(1.0, SILENT_S / 4))):
            if time.monotonic() - trt.heard_s > SILENT_S:
                sys.stderr.flush()
                os._exit(HUNG_EXIT_CODE)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def inspect(trt: Trt, engine: bytes) -> str:
    """What the engine inspector says of a built engine, JSON: it alone knows which types and kernels the builder chose.

    Raises:
        EngineError: the engine does not open.
    """
    runtime = trt.create_runtime()
    native = runtime.deserialize_cuda_engine(engine)
    if native is None:
        raise EngineError(f"TensorRT {trt.version} does not open the engine that it has just built; build it again")
    return native.create_engine_inspector().get_engine_information(trt.module.LayerInformationFormat.JSON)


def count_types(inspected: str) -> dict[str, int]:
    """TensorRT type -> number of layer outputs."""
    counts = Counter(_type(output) for layer in _layers(inspected) for output in layer.get("Outputs", ()))
    del counts[""]
    return dict(counts.most_common())


def plugins_in_fp16(inspected: str) -> list[str]:
    """Names of plugin layers that read or give FP16 though a mark asks for FP32."""
    return [
        layer["Name"]
        for layer in _layers(inspected)
        if FP32_MARK in layer.get("Name", "")
        and str(layer.get("LayerType", "")).startswith("Plugin")
        and "HALF" in map(_type, (*layer.get("Inputs", ()), *layer.get("Outputs", ())))
    ]


def _layers(inspected: str) -> list[dict[str, Any]]:
    """Layers with their details: engines of symbolic shapes, and those built without `configure`, have names alone."""
    return [layer for layer in json.loads(inspected).get("Layers", ()) if isinstance(layer, dict)]


def _type(tensor: dict[str, Any]) -> str:
    text = str(tensor.get("Format/Datatype", ""))
    return next((kind for word, kind in _FORMATS if word in text), "")
