"""OpenVINO models as a part of `build`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ...errors import EngineError, ExportError, MissingPackageError
from ...spec import Precision
from ..building import MODEL, Builder, BuildPlan, Work
from ..shared import SharedOptions
from .build import build_openvino, check_installed
from .config import OpenVinoConfig, model_name


class OpenVinoBuilder(Builder):
    """Builds the OpenVINO model of the detector, and the one of its text encoder."""

    def configs_for(self, asked: SharedOptions, make: Callable[..., OpenVinoConfig]) -> list[OpenVinoConfig]:
        return [make(timeout_seconds=asked.timeout_seconds)]

    def check(self, configs: Sequence[OpenVinoConfig], plan: BuildPlan) -> None:
        if len(configs) > 1:
            raise EngineError("a bundle has one OpenVINO model, which takes every size; give one config")
        if plan.export.plugin:
            raise ExportError(
                f"`msda={plan.export.msda}` makes plugin nodes, which only TensorRT runs; choose `msda=gather` for OpenVINO"
            )

    def missing(self, configs: Sequence[OpenVinoConfig]) -> list[MissingPackageError]:
        try:
            check_installed()
        except MissingPackageError as error:
            return [error]
        return []

    def build(self, configs: Sequence[OpenVinoConfig], plan: BuildPlan, work: Work) -> None:
        (config,) = configs
        text = work.spec.text
        parts = [(MODEL, "model", work.graph_precision or Precision.FP32, "openvino")]
        if text is not None and text.encoder:
            parts.append((text.encoder, "text", Precision.FP32, "text-openvino"))  # the encoder stays FP32
        for graph, part, precision, kind in parts:
            start, title = time.perf_counter(), kind.replace("-", " ")
            built = build_openvino(
                work.graphs / graph,
                work.folder / model_name(precision, part),
                config,
                work.spec,
                judged=not work.provenance.has_random_weights,
                timed=part == "model",
                fused=next((work.graphs / entry.path for entry in work.entries if entry.kind == "onnx-fused"), None),
                progress=lambda fraction, message, title=title: work.say(title, fraction, message),  # type: ignore[misc]
            )
            work.add(built.path.name, kind, built.facts)
            work.add(built.weights.name, "openvino-weights")
            work.done(title, start, built.size, built.verdict)


BUILDER = OpenVinoBuilder()
