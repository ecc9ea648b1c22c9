"""The process that writes an OpenVINO model: `python -m detrt.backends.openvino.worker FD`.

The request: {"onnx", "xml", "spec", "config", "timed", "fused"}. The model is written, opened again, compared with ONNX Runtime on
drawn scenes, and timed beside it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ... import files, graph
from ...bundle import EngineFacts
from ...errors import EngineError
from ...graph.emulate_low_precision import needs_emulation
from ...graph.raise_msda import sample_grids
from ...graph.unsigned import drop_result_pairs, unsigned_activations
from ...graph.view import GraphView, graph_precision
from ...spec import ModelSpec, Precision
from ...system import Progress, peak_memory_mib
from ..child_process import answer_parent
from ..compare import compare_opened, drawn_batches
from ..onnxruntime.session import OnnxSession
from .config import TARGET, OpenVinoConfig
from .runtime import core, package, short, version
from .session import OpenVinoSession
from .speed import measure_speed

# One image and two: a graph that kept the batch of one is found out.
BATCHES = (1, 2)


def build(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Write the model at request["xml"] and return {"facts", "size", "errors"}.

    Raises:
        EngineError: OpenVINO cannot read the graph.
    """
    source, target = Path(request["onnx"]), Path(request["xml"])
    config = OpenVinoConfig.from_dict(request["config"])
    spec, start = ModelSpec.from_dict(request["spec"]), time.monotonic()
    openvino = package("`targets=openvino`")
    progress(0.0, "reading the graph")
    loaded = graph.load(source)
    summary = graph.summarise(loaded)
    precision, emulated = graph_precision(GraphView(loaded)), needs_emulation(loaded)
    try:
        model = core().read_model(str(_readable(loaded, source, target)))
        openvino.save_model(model, str(target), compress_to_fp16=config.compress_weights)
        operations = model.get_ordered_ops()
        types = Counter(op.get_output_element_type(0).to_string() for op in operations if op.get_output_size())
        layers = len(operations)
        del model, operations, loaded
    except Exception as error:  # what OpenVINO raises shares no base class
        raise EngineError(f"OpenVINO {version()} cannot read '{source.name}': {short(error)}") from None
    weights = target.with_suffix(".bin")
    facts = EngineFacts(
        target=TARGET,
        runtime_version=version(),
        compute_capabilities=(),
        precision=str(precision),
        profile={},
        onnx_sha256=files.sha256_of(source),
        layers=layers,
        options={"opset": summary.opset, **config.to_dict(), "weights_sha256": files.sha256_of(weights)},
        inputs=summary.described("inputs"),
        outputs=summary.described("outputs"),
        layer_types=dict(types.most_common()),
    )
    progress(0.4, "comparing with ONNX Runtime")
    errors = _compare(source, target, spec, facts, emulated)
    if request["timed"] and not emulated:
        progress(0.8, "timing it beside ONNX Runtime")
        fused = None if request["fused"] is None else Path(request["fused"])
        facts = replace(facts, cpu_speed=measure_speed(source, fused, target, spec, facts))
    seconds, memory = round(time.monotonic() - start, 3), round(peak_memory_mib())
    facts = replace(facts, build_seconds=seconds, peak_memory_mib=memory)
    return {"facts": asdict(facts), "size": target.stat().st_size + weights.stat().st_size, "errors": errors}


def _readable(model: Any, source: Path, target: Path) -> Path:
    """The ONNX file as OpenVINO needs it: itself, or one beside the target with another form of INT8 or of deformable attention."""
    if not drop_result_pairs(model) + unsigned_activations(model) + sample_grids(model):
        return source
    graph.save(model, target.with_suffix(".onnx"))
    return target.with_suffix(".onnx")


def _compare(source: Path, target: Path, spec: ModelSpec, facts: EngineFacts, emulated: bool) -> dict[str, float]:
    """Output -> largest difference to ONNX Runtime, relative to the largest value; {} for a model that takes a prompt, which is
    only opened.

    emulated: the graph has types that ONNX Runtime does not run on a CPU.
    """
    if spec.text is not None:
        OpenVinoSession(target, spec, facts).close()
        return {}
    precision = Precision(facts.precision)
    return compare_opened(
        lambda: OnnxSession(source, spec, emulate_low_precision=emulated),
        lambda: OpenVinoSession(target, spec, facts, graph=source),
        lambda session: drawn_batches(session, BATCHES),
        precision.output_tolerance,
        exact=precision.bits == 32,
    )


def main(arguments: list[str]) -> int:
    answer_parent(int(arguments[0]), build)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
