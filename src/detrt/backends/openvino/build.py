"""ONNX -> OpenVINO model and its sidecar, in a child process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import bundle, files
from ...bundle import EngineFacts
from ...errors import EngineError, MissingPackageError, number_of
from ...graph.operators import check_model_file, plugin_operators
from ...spec import ModelSpec, Precision
from ...system import Progress
from ..child_process import run_child
from ..compare import require_near
from ..worker_process import module_command
from .config import OpenVinoConfig

WORKER_COMMAND: tuple[str, ...] = module_command("detrt.backends.openvino.worker")


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A written model. size: bytes of both files; errors: output -> largest relative difference to ONNX Runtime."""

    path: Path
    facts: EngineFacts
    size: int
    errors: dict[str, float]

    @property
    def weights(self) -> Path:
        return self.path.with_suffix(".bin")

    @property
    def verdict(self) -> str:
        judged = "opened"
        if self.errors:
            exact = Precision(self.facts.precision).bits == 32
            judged = f"{max(self.errors.values()):.1e} from ONNX Runtime" if exact else "finite; compare with: detrt verify"
        speed = self.facts.cpu_speed
        timed = "" if speed is None else f", {speed.openvino_ms:.4g} ms (ONNX Runtime {speed.onnxruntime_ms:.4g} ms)"
        return f"{self.facts.precision}, {number_of(self.facts.layers, 'operation')}, {judged}{timed}"


def check_installed() -> None:
    """Raise MissingPackageError where the package is missing."""
    if find_spec("openvino") is None:
        raise MissingPackageError("openvino", "openvino", "`targets=openvino`")


def build_openvino(
    model_onnx: Path | str,
    output: Path | str,
    config: OpenVinoConfig,
    spec: ModelSpec,
    *,
    judged: bool = True,
    timed: bool = False,
    fused: Path | None = None,
    progress: Progress | None = None,
) -> BuiltModel:
    """Write `output` (.xml), the weights beside it (.bin) and the sidecar `<output>.json` from an ONNX file.

    judged: refuse an FP32 model whose outputs are not those of ONNX Runtime; without it only one whose values are not finite.
    timed: run a detector beside its ONNX file on this CPU, see `measure_speed`. fused: what ONNX Runtime runs instead of it.

    Raises:
        EngineError: the file is not a model, holds plugin nodes, or OpenVINO refused it, crashed or took too long.
        GateError: the outputs are not those of ONNX Runtime. MissingPackageError: openvino is not installed.
    """
    check_installed()
    model_onnx, output = Path(model_onnx), Path(output)
    check_model_file(model_onnx)
    if held := plugin_operators(model_onnx):
        raise EngineError(
            f"'{model_onnx}' holds plugin nodes ({', '.join(held)}), which only TensorRT runs; export with `msda=gather` for OpenVINO"
        )
    with files.temporary_folder(output.parent, output.name) as folder:
        # OpenVINO finds the weights by the name of the model.
        model = folder / output.with_suffix(".xml").name
        request = {
            "onnx": str(model_onnx.resolve()),
            "xml": str(model.resolve()),
            "spec": spec.to_dict(),
            "config": config.to_dict(),
            "timed": timed and config.performance != "throughput",  # several batches at a time, which ONNX Runtime does not run
            "fused": None if fused is None else str(fused.resolve()),
        }
        answer: dict[str, Any] = run_child(
            WORKER_COMMAND, request, what="OpenVINO", timeout_seconds=config.timeout_seconds, progress=progress
        )
        facts = EngineFacts.from_dict(answer["facts"])
        _require_equal(answer["errors"], facts, spec, judged)
        files.move(model.with_suffix(".bin"), output.with_suffix(".bin"))
        files.move(model, output)
    bundle.write_sidecar(output, spec, facts)
    if progress:
        progress(1.0, "done")
    return BuiltModel(output, facts, answer["size"], answer["errors"])


def _require_equal(errors: dict[str, float], facts: EngineFacts, spec: ModelSpec, judged: bool) -> None:
    """Raise GateError where OpenVINO gives something else than ONNX Runtime."""
    precision = Precision(facts.precision)
    # 16 bits may select other queries, and boxes that the graph decodes are ranked: detrt verify judges those by detections.
    exact = judged and precision.bits == 32 and not facts.options["compress_weights"] and not spec.decode.in_graph
    limit = precision.output_tolerance if exact else math.inf
    found = [(f"'{name}'", error, "") for name, error in errors.items()]
    advice = ". Try another version of openvino, or use `targets=onnx`"
    require_near(found, limit, "the OpenVINO model differs from ONNX Runtime", advice)
