"""Tracing, clean-up, and the check that nothing was baked in."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import graph
from ..backends.base import Choices, Feeds, Outputs
from ..backends.compare import difference, forced_differences
from ..backends.torch.session import TorchSession
from ..data.arguments import refuse
from ..errors import ExportError
from ..graph.io import summarise
from ..graph.msda_plugin import runnable
from ..models.contract import ExportConfig, contract, exported_spec, finest_stride, other_size, trace_size
from ..models.example_inputs import example_feeds
from ..models.published import ProcessingCheck, check_processing
from ..models.rewrites import patched
from ..models.source import Source
from ..models.wrapper import ExportModule
from ..spec import ModelSpec, Precision
from .trace import ExportReport, Form, Progress, finish, require_check, require_equal, rows_of, trace, written_form


def export_onnx(
    source: Source,
    path: Path | str,
    config: ExportConfig = ExportConfig(),  # noqa: B008 - frozen
    *,
    progress: Progress | None = None,
    form: Form | None = None,
    converted: bool = False,
) -> ExportReport:
    """Export a source to one ONNX graph with its spec inside, and check it.

    Of a prompted model also its text encoder and its tokenizer, beside it under the names in the spec.

    Args:
        form: changes a graph in place before it is compared, such as `graph.dialect.for_typed_parser`.
        converted: the graph of the detector is converted to another precision next and gets its form after that.

    Raises:
        ExportError: a choice that the family cannot take, or a model that does not trace.
        GateError: the graph differs from PyTorch at a batch or size that was not traced; the file is
            not written. OutputError: the path cannot be written.
    """
    say = progress or (lambda text: None)
    if not isinstance(source, Source):
        raise refuse("source", "what load_source gives: export_onnx(load_source('embedded:shapes'), 'model.onnx')", source)
    path = Path(path)
    spec = exported_spec(source, config)
    require_check(config)
    if config.plugin and not source.family.deformable:
        raise ExportError(f"`msda={config.msda}`: {source.family.title} has no deformable attention; leave `msda` out")
    if spec.text is not None:
        from .prompted import export_text

        return export_text(source, path, spec, config, say, form, converted)
    processing = check_processing(source, say) if config.check else ProcessingCheck()
    start = time.perf_counter()
    module = ExportModule(source.module, spec).eval()
    say("tracing")
    infos = contract(spec)
    feeds = example_feeds(spec, batch=2, size_hw=trace_size(spec, finest_stride(source)))
    model = trace(module, feeds, infos, source.module, source.family.rewrites, config.opset)
    say("simplifying")
    model = finish(model, source, spec, config, infos[1])
    written_form(model, config, None if converted else form)
    seconds = time.perf_counter() - start
    errors: tuple[dict[str, Any], ...] = ()
    if config.check:
        say("checking against PyTorch")
        errors = tuple(check_export(source, runnable(model), spec))
        require_equal(errors)
    graph.save(model, path)
    return ExportReport(path, spec, summarise(model), seconds, errors, processing)


def check_export(source: Source, model: Any, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Run graph and PyTorch side by side at batches and a size that were not traced, with the selections of the graph.

    Yields one row a case and output: batch, height, width, output, error (relative to the largest value).

    Raises:
        ExportError: PyTorch does not select as often, or as many.
    """
    from ..backends.onnxruntime.session import OnnxSession

    # The plain model, without rewrites: what is checked includes the rewrites.
    wanted = {name: places for name, places in source.family.rewrites.items() if name == "frozen_positions"}
    with OnnxSession.telling(model, spec) as session, TorchSession(source, spec=spec) as plain:
        stride = finest_stride(source)
        for batch, size in ((1, trace_size(spec, stride)), (3, other_size(spec, stride))):
            feeds = example_feeds(spec, batch, size, seed=batch)
            with patched(source.module, wanted):
                outputs, choices = session.selections(feeds)
                found = forced_differences(plain, outputs, choices, feeds)
                if any(not error <= Precision.FP32.output_tolerance for _, error, _ in found):
                    found = _against_double(plain, outputs, choices, feeds)
            yield from rows_of({"batch": batch, "height": size[0], "width": size[1]}, found)


def _against_double(plain: TorchSession, got: Outputs, choices: Choices, feeds: Feeds) -> list[tuple[str, float, str]]:
    """`forced_differences` from PyTorch in FP64, where two runs in FP32 are too far apart: a badly conditioned model multiplies the
    rounding of both.
    """
    want, exact = plain.run(feeds, choices), plain.in_double(feeds, choices)
    found = []
    for name in want:
        error, text = difference(exact[name], got[name], name)
        if not error <= Precision.FP32.output_tolerance:
            text = text or f"PyTorch in FP32 is {difference(exact[name], want[name], name)[0]:.2g} from FP64 itself"
        found.append((name, error, text))
    return found
