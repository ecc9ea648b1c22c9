"""Tracing a module to ONNX, finishing the graph, and the report of an export."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from .. import graph
from ..backends.compare import require_near
from ..backends.onnxruntime.session import optimize_basic
from ..bundle import PROVENANCE_KEY
from ..errors import ExportError, one_line
from ..graph.clean import constants_to_initializers, declare_outputs, readable_names
from ..graph.io import SPEC_KEY, GraphSummary
from ..graph.lower_msda import lower_msda
from ..graph.msda_plugin import cut, emit, rejoin
from ..graph.operators import MSDA_DOMAIN
from ..graph.slim import simplify
from ..models import nms_op as nms
from ..models.contract import ExportConfig
from ..models.families import TESTED
from ..models.published import ProcessingCheck
from ..models.rewrites import Wanted, rewrites
from ..models.source import Source, transformers_version
from ..spec import PIXEL_VALUES, ModelSpec, Precision, TensorInfo
from ..system import package_version
from . import symbolic as msda

Progress = Callable[[str], None]
Form = Callable[[Any], object]  # changes an ONNX ModelProto in place


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export gave: where, its spec, figures of the graph, seconds, and the check's errors.

    errors: one row a check, {"batch", "height", "width", "error", "output"}; error is the largest
    absolute difference to PyTorch over the largest absolute value, with PyTorch's selections forced.
    processing: preprocessing and post-processing beside transformers' own.
    """

    path: Path
    spec: ModelSpec
    summary: GraphSummary
    seconds: float
    errors: tuple[dict[str, Any], ...] = ()
    processing: ProcessingCheck = field(default_factory=ProcessingCheck)

    @property
    def worst(self) -> float:
        return max((row["error"] for row in self.errors), default=0.0)


def finish(model: Any, source: Source, spec: ModelSpec, config: ExportConfig, outputs: Sequence[TensorInfo]) -> Any:
    """A traced graph lowered, cleaned, with readable names and the spec inside. outputs: with their shapes.

    For a plugin, deformable attention is still `detrt.MSDeformAttn`; see `detrt.graph.msda_plugin`.
    """
    constants_to_initializers(model)
    kept = cut(model) if config.plugin else []
    lowered = len(kept) if config.plugin else lower_msda(model, config.lowering)
    if source.family.deformable and not lowered and PIXEL_VALUES in {value.name for value in model.graph.input}:
        raise ExportError(f"{source.family.title}: no deformable attention was found in the traced graph")
    model = simplify(model, optimize_basic)
    if kept:
        rejoin(model, kept)
    readable_names(model)
    declare_outputs(model, {info.name: info.shape for info in outputs})
    model.producer_name, model.producer_version = "detrt", package_version()
    model.graph.name = spec.name or spec.family
    options = {**source.provenance.options, "export": options_of(config)}
    provenance = replace(source.provenance, options=options, created="")  # equal exports are equal files
    return graph.with_metadata(model, {PROVENANCE_KEY: provenance.to_json(), SPEC_KEY: spec.to_json()})


def written_form(model: Any, config: ExportConfig, form: Form | None) -> None:
    """The last rewrites of a graph, in place and before it is compared, so that what is compared is what is written."""
    if config.plugin:
        emit(model, config.msda)
    if form is not None:
        form(model)


def require_check(config: ExportConfig) -> None:
    """Raises:
    ExportError: no comparison with PyTorch, with a version of transformers that was not tested.
    """
    version = transformers_version()
    if not config.check and version is not None and version not in TESTED:
        raise ExportError(f"detrt was not tested with transformers {version}, so the comparison decides; leave `check=False` out")


def rows_of(where: Mapping[str, Any], found: Iterable[tuple[str, float, str]]) -> Iterator[dict[str, Any]]:
    """Rows of a check, from (output, error, explanation); `where`: their batch, height and width."""
    for output, error, text in found:
        yield {**where, "output": output, "error": error, **({"text": text} if text else {})}


def require_equal(
    errors: Sequence[Mapping[str, Any]], differs: str = "the exported graph differs from PyTorch", advice: str = ""
) -> None:
    """Raise GateError where a row of a check is above the tolerance of FP32; differs, advice: see `require_near`."""
    found = [
        (f"'{row['output']}' at batch {row['batch']}, size {row['height']}x{row['width']}", row["error"], row.get("text", ""))
        for row in errors
    ]
    require_near(found, Precision.FP32.output_tolerance, differs, advice)


def trace(
    module: Any,
    feeds: Mapping[str, NDArray],
    infos: tuple[Sequence[TensorInfo], Sequence[TensorInfo]],
    library: torch.nn.Module,
    wanted: Wanted,
    opset: int,
) -> Any:
    """TorchScript trace to an ONNX ModelProto in which deformable attention is still one node.

    Args:
        module: takes the inputs and returns the outputs of `infos`; has a `spec`.
        feeds: input -> array that it is traced with.
        infos: inputs and outputs; sides with a name stay symbolic.
        library: the model that the rewrites `wanted` are for.

    Raises:
        ExportError: PyTorch cannot trace or translate the model.
    """
    import onnx

    inputs, outputs = infos
    tensors = tuple(torch.from_numpy(feeds[info.name]) for info in inputs)
    buffer = io.BytesIO()
    try:
        with _quiet_trace(), torch.no_grad(), rewrites(library, wanted):
            if "frozen_positions" in wanted:
                module(*tensors)  # fills its tables; a second run of a large model, whose trace is a run as well
            torch.onnx.export(
                module,
                tensors,
                buffer,
                dynamo=False,
                opset_version=opset,
                input_names=[info.name for info in inputs],
                output_names=[info.name for info in outputs],
                dynamic_axes={
                    info.name: {axis: side for axis, side in enumerate(info.shape) if isinstance(side, str)}
                    for info in (*inputs, *outputs)
                },
                custom_opsets={MSDA_DOMAIN: 1} if "msda" in wanted else None,
            )
    except (RuntimeError, ValueError, TypeError, IndexError, torch.onnx.errors.OnnxExporterError) as error:
        text = one_line(error, 500)
        raise ExportError(f"{module.spec.family} does not trace with torch {torch.__version__}: {text}") from error
    return onnx.load_from_string(buffer.getvalue())


@contextlib.contextmanager
def _quiet_trace() -> Iterator[None]:
    torch.onnx.register_custom_op_symbolic(msda.OP, msda.onnx_symbolic, 17)
    torch.onnx.register_custom_op_symbolic(nms.OP, nms.onnx_symbolic, 17)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            # TracerWarnings name Python branches on sizes; what they would bake in is found by the check.
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.onnx.unregister_custom_op_symbolic(msda.OP, 17)
        torch.onnx.unregister_custom_op_symbolic(nms.OP, 17)


def options_of(config: ExportConfig) -> dict[str, Any]:
    """The choices as JSON-ready values, for provenance."""
    return {**asdict(config), "msda": config.lowering}
