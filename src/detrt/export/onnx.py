"""Tracing, clean-up, and the check that nothing was baked in."""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import graph
from ..errors import ExportError, GateError
from ..evaluation.matching import relative_error
from ..graph.clean import constants_to_initializers, declare_outputs, readable_names, simplify, topk_outputs, with_outputs
from ..graph.lower_msda import lower_msda
from ..graph.msda_plugin import cut, emit, rejoin
from ..graph.summary import GraphSummary, summarise
from ..models import nms_op as nms
from ..models.config import ExportConfig
from ..models.contract import contract, exported_spec, other_size, trace_size
from ..models.example_inputs import example_feeds
from ..models.load import Source
from ..models.rewrites import rewrites
from ..models.wrapper import ExportModule
from ..spec import PIXEL_VALUES, ModelSpec
from . import symbolic as msda

# FP32 kernels of two runtimes differ by rounding only. It grows with depth: the worst family measured
# (docs/benchmarks.md) stays below a third of this, relative to the largest value of the tensor.
CHECK_TOLERANCE = 1e-3

Progress = Callable[[str], None]
Axes = dict[str, dict[int, str]]  # tensor -> symbolic axis -> its name


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export gave: where, its spec, figures of the graph, seconds, and the check's errors.

    errors: one row a check, {"batch", "height", "width", "error", "output"}; error is the largest
    absolute difference to PyTorch over the largest absolute value, with PyTorch's selections forced.
    """

    path: Path
    spec: ModelSpec
    summary: GraphSummary
    seconds: float
    errors: tuple[dict[str, Any], ...] = ()

    @property
    def worst(self) -> float:
        return max((row["error"] for row in self.errors), default=0.0)


def export_onnx(
    source: Source,
    path: Path | str,
    config: ExportConfig = ExportConfig(),  # noqa: B008 - frozen
    *,
    progress: Progress | None = None,
) -> ExportReport:
    """Export a source to one ONNX graph with its spec inside, and check it.

    Of a prompted model also its text tower and its tokenizer, beside it under the names in the spec.

    Raises:
        ExportError: a choice that the family cannot take, or a model that does not trace.
        GateError: the graph differs from PyTorch at a batch or size that was not traced; the file is
            not written. OutputError: the path cannot be written.
    """
    say = progress or (lambda text: None)
    path = Path(path)
    start = time.perf_counter()
    spec = exported_spec(source, config)
    if config.plugin and (spec.text is not None or not source.family.deformable):
        what = "takes a prompt, for which plugin nodes are not done yet" if spec.text else "has no deformable attention"
        raise ExportError(f"--msda {config.msda}: {source.family.title} {what}; leave --msda out")
    if spec.text is not None:
        from .prompted import export_text

        return export_text(source, path, spec, config, say)
    module = ExportModule(source.module, spec).eval()
    say("tracing")
    model = trace(module, source.family.rewrites, spec, config.opset)
    say("simplifying")
    model = finish(model, source, spec, config, {info.name: info.shape for info in contract(spec)[1]})
    seconds = time.perf_counter() - start
    errors: tuple[dict[str, Any], ...] = ()
    if config.check:
        say("checking against PyTorch")
        errors = tuple(check_export(module, source, _runnable(model) if config.plugin else model, spec))
        require_equal(errors)
    if config.plugin:
        emit(model, config.msda)
    graph.save(model, path)
    return ExportReport(path, spec, summarise(model), seconds, errors)


def finish(model: Any, source: Source, spec: ModelSpec, config: ExportConfig, outputs: Mapping[str, Sequence[int | str]]) -> Any:
    """A traced graph lowered, cleaned, with readable names and the spec inside. outputs: their shapes.

    For a plugin, deformable attention is still `detrt.MSDeformAttn`; see `detrt.graph.msda_plugin`.
    """
    constants_to_initializers(model)
    kept = cut(model) if config.plugin else []
    lowered = len(kept) or lower_msda(model, config.lowering)
    if source.family.deformable and not lowered and PIXEL_VALUES in {value.name for value in model.graph.input}:
        raise ExportError(f"{source.family.title}: no deformable attention was found in the traced graph")
    model = simplify(model)
    rejoin(model, kept)
    readable_names(model)
    declare_outputs(model, outputs)
    model.producer_name, model.producer_version = "detrt", _version()
    model.graph.name = spec.name or spec.family
    return graph.with_spec(model, spec)


def _runnable(model: Any) -> Any:
    """A copy that ONNX Runtime takes: plugin nodes lowered to standard operators."""
    copy = type(model)()
    copy.CopyFrom(model)
    lower_msda(copy, "gather")
    return copy


def require_equal(errors: Sequence[Mapping[str, Any]]) -> None:
    """Raises:
    GateError: a row of a check is above `CHECK_TOLERANCE`.
    """
    bad = [row for row in errors if not row["error"] <= CHECK_TOLERANCE]
    if bad:
        worst = max(bad, key=lambda row: row["error"] if np.isfinite(row["error"]) else np.inf)
        raise GateError(
            f"the exported graph differs from PyTorch by {worst['error']:.2g} (relative, allowed {CHECK_TOLERANCE}) "
            f"in '{worst['output']}' at batch {worst['batch']}, size {worst['height']}x{worst['width']}; "
            "no file was written"
        )


def trace(module: ExportModule, names: Sequence[str], spec: ModelSpec, opset: int) -> Any:
    """TorchScript trace to an ONNX ModelProto in which deformable attention is still one node.

    Raises:
        ExportError: PyTorch cannot trace or translate the model.
    """
    feeds = example_feeds(spec, batch=2, size_hw=trace_size(spec))
    inputs = tuple(torch.from_numpy(feeds[name]) for name in module.input_names)
    sizes = {0: "batch", 2: "height", 3: "width"} if spec.input.dynamic else {0: "batch"}
    axes: dict[str, dict[int, str]] = {PIXEL_VALUES: sizes}
    for name in module.input_names[1:]:
        axes[name] = {0: "batch"}
        if spec.input.dynamic and name == "pixel_mask":
            axes[name] = {0: "batch", 1: "height", 2: "width"}
    axes |= {name: {0: "batch"} for name in module.output_names}
    return trace_tensors(module, inputs, axes, module.model, names, opset)


def trace_tensors(
    module: Any, inputs: tuple[Tensor, ...], axes: Axes, library: torch.nn.Module, names: Sequence[str], opset: int
) -> Any:
    """See `trace`. module: has `input_names`, `output_names` and `spec`. library: the model that the rewrites are for."""
    import onnx

    buffer = io.BytesIO()
    try:
        with _quiet_trace(), torch.no_grad(), rewrites(library, names):
            module(*inputs)  # fills the tables that some rewrites compute before the trace
            torch.onnx.export(
                module,
                inputs,
                buffer,
                dynamo=False,
                opset_version=opset,
                input_names=module.input_names,
                output_names=module.output_names,
                dynamic_axes=axes,
                custom_opsets={msda.ONNX_DOMAIN: 1} if "msda" in names else None,
            )
    except (RuntimeError, ValueError, TypeError, IndexError, torch.onnx.errors.OnnxExporterError) as error:
        text = " ".join(str(error).split())[:500]
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


@contextlib.contextmanager
def forced_topk(indices: Sequence[torch.Tensor]) -> Iterator[None]:
    """Make the calls of `torch.topk` in the block return the values at the given indices, in call order.

    Two runtimes order ties, and near-ties within rounding, differently; everything after the selection
    then belongs to other queries. Forcing one's selection on the other makes their tensors comparable.

    Raises:
        ExportError: more calls than indices, or a selection of another shape.
    """
    remaining = list(indices)
    original, original_method = torch.topk, torch.Tensor.topk

    def forced(values: torch.Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> Any:
        if not remaining:
            raise ExportError("the graph has fewer top-k selections than the PyTorch model")
        index = remaining.pop(0)
        expected = original(values, k, dim, *args, **kwargs)
        if index.shape != expected.indices.shape:
            raise ExportError(f"a top-k selection has shape {tuple(index.shape)}, PyTorch's {tuple(expected.indices.shape)}")
        return torch.return_types.topk((values.gather(dim, index), index))

    torch.topk = torch.Tensor.topk = forced  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.topk, torch.Tensor.topk = original, original_method  # type: ignore[method-assign]
    if remaining:
        raise ExportError("the graph has more top-k selections than the PyTorch model")


def check_export(module: ExportModule, source: Source, model: Any, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Run graph and PyTorch side by side at batches and a size that were not traced.

    Yields one row a case and output: batch, height, width, output, error (relative to the largest value).
    """
    from ..backends.onnxruntime.session import OnnxSession

    selections = topk_outputs(model)
    session = OnnxSession(with_outputs(model, selections).SerializeToString(), spec)
    try:
        for batch, size in ((1, trace_size(spec)), (3, other_size(spec))):
            feeds = example_feeds(spec, batch, size, seed=batch)
            got = session.run(feeds)
            forced = [torch.from_numpy(got[name]) for name in selections]
            # The plain model, without rewrites: what is checked includes the rewrites.
            names = [name for name in source.family.rewrites if name == "frozen_positions"]
            with torch.no_grad(), rewrites(source.module, names), forced_topk(forced):
                want = module(*(torch.from_numpy(feeds[name]) for name in module.input_names))
            for name, tensor in zip(module.output_names, want, strict=True):
                expected, actual = tensor.numpy(), got[name]
                if expected.shape != actual.shape:
                    raise ExportError(f"output '{name}' has shape {actual.shape}, PyTorch gives {expected.shape}")
                yield {
                    "batch": batch,
                    "height": size[0],
                    "width": size[1],
                    "output": name,
                    "error": relative_error(expected, actual),
                }
    finally:
        session.close()


def options_of(config: ExportConfig) -> dict[str, Any]:
    """The choices as JSON-ready values, for provenance."""
    return {**asdict(config), "msda": config.lowering}


def _version() -> str:
    from .. import __version__

    return str(__version__)
