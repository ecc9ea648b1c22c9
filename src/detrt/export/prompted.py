"""Export of a prompted model: detector, text encoder, tokenizer, and the check of both graphs together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import files, graph
from ..backends.base import BaseSession, Choices, Feeds, Outputs, SessionInfo
from ..backends.compare import difference, forced_differences
from ..errors import ExportError, SourceError
from ..graph.io import summarise
from ..graph.msda_plugin import runnable
from ..models.contract import ExportConfig, contract, other_size, query_encoder_contract, text_encoder_contract, trace_size
from ..models.example_inputs import example_ids, image_feeds, text_feeds, torch_text_encoder
from ..models.hooks import forced_choices
from ..models.published import ProcessingCheck, check_processing
from ..models.source import Source
from ..models.wrapper import QueryEncoderModule, StockQueryEncoder, StockTextModule, TextEncoderModule, TextExportModule
from ..spec import PIXEL_MASK, PIXEL_VALUES, ModelSpec
from ..system import CPU
from ..text.kinds import token_feeds
from ..text.tensors import CLASS_FEATURES
from .trace import ExportReport, Form, finish, require_equal, rows_of, trace, written_form

# (rows, longest prompt) while tracing; the checks use other numbers.
TRACED_ROWS, TRACED_TOKENS = 2, 9

# (batch, whether the size is another than the traced one, tokens of the longest prompt)
CHECKS = ((1, False, 6), (3, True, 17))


def export_text(
    source: Source,
    path: Path,
    spec: ModelSpec,
    config: ExportConfig,
    say: Callable[[str], None],
    form: Form | None = None,
    converted: bool = False,
) -> ExportReport:
    """`export_onnx` for a source with a text part; `spec` is that of the graph. The encoders are not converted.

    Raises:
        SourceError: the source has no tokenizer. Otherwise see `export_onnx`.
    """
    text = spec.text
    assert text is not None
    if source.tokenizer is None:
        raise SourceError(f"'{source.provenance.source}' has no tokenizer; give one with `tokenizer=FILE`")
    if path.name in text.parts.values():
        raise ExportError(f"'{path.name}' is the name of another file beside the model; give another")
    processing = check_processing(source, say) if config.check else ProcessingCheck()
    start = time.perf_counter()
    text_encoder = None
    if text.encoder:
        say("tracing the text encoder")
        text_encoder = _traced_text_encoder(source, spec, config)
    say("tracing")
    module = TextExportModule(source, spec).eval()
    model = _traced_detector(module, source, spec, config)
    query_encoder = None
    if text.query_encoder:
        say("tracing the encoder of query images")
        query_encoder = _traced_query_encoder(source, spec, config)
    written_form(model, config, None if converted else form)
    for encoder in (text_encoder, query_encoder) if form is not None else ():
        if encoder is not None:
            form(encoder)
    seconds = time.perf_counter() - start
    errors: tuple[dict[str, Any], ...] = ()
    if config.check:
        say("checking against PyTorch")
        errors = tuple(check_text_export(module, source, runnable(model), text_encoder, spec))
        if query_encoder is not None:
            errors += tuple(_check_query_encoder(source, query_encoder, spec))
        require_equal(errors)
    if text_encoder is not None:
        graph.save(text_encoder, path.with_name(text.encoder))
    if query_encoder is not None:
        graph.save(query_encoder, path.with_name(text.query_encoder))
    del text_encoder, query_encoder
    graph.save(model, path)
    with files.writing(path.with_name(text.tokenizer)) as temporary:
        temporary.write_bytes(source.tokenizer)
    return ExportReport(path, spec, summarise(model), seconds, errors, processing)


def _traced_text_encoder(source: Source, spec: ModelSpec, config: ExportConfig) -> Any:
    inputs, outputs = infos = text_encoder_contract(spec)
    ids = example_ids(source, TRACED_ROWS, TRACED_TOKENS)
    feeds = {info.name: array for info, array in zip(inputs, ids, strict=True)}
    wanted = {name: places for name, places in source.family.rewrites.items() if name != "msda"}
    traced = trace(TextEncoderModule(source, spec).eval(), feeds, infos, source.module, wanted, config.opset)
    return finish(traced, source, spec, config, outputs)


def _traced_query_encoder(source: Source, spec: ModelSpec, config: ExportConfig) -> Any:
    infos = query_encoder_contract(spec)
    feeds = image_feeds(spec, TRACED_ROWS, trace_size(spec))
    traced = trace(QueryEncoderModule(source, spec).eval(), feeds, infos, source.module, source.family.rewrites, config.opset)
    return finish(traced, source, spec, config, infos[1])


def _check_query_encoder(source: Source, model: Any, spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """As `check_text_export`, of the encoder of query images beside the library's functions."""
    from ..backends.onnxruntime.session import OnnxSession

    stock = StockQueryEncoder(source, spec).eval()
    with OnnxSession(graph.to_bytes(model), spec) as session:
        for batch, _, _ in CHECKS:
            size = trace_size(spec)
            pixels = image_feeds(spec, batch, size, seed=batch)[PIXEL_VALUES]
            with torch.no_grad():
                want = stock(torch.from_numpy(pixels))[0].numpy()
            found = session.run({PIXEL_VALUES: pixels})[CLASS_FEATURES]
            row = {"batch": batch, "height": size[0], "width": size[1], "tokens": 0}
            yield from rows_of(row, [(CLASS_FEATURES, *difference(want, found, CLASS_FEATURES))])


def _traced_detector(module: TextExportModule, source: Source, spec: ModelSpec, config: ExportConfig) -> Any:
    infos = contract(spec)
    feeds = image_feeds(spec, TRACED_ROWS, trace_size(spec))
    ids = example_ids(source, TRACED_ROWS, TRACED_TOKENS)
    feeds |= text_feeds(source, spec, ids, torch_text_encoder(source, spec))
    traced = trace(module, feeds, infos, source.module, source.family.rewrites, config.opset)
    return finish(traced, source, spec, config, infos[1])


def check_text_export(
    module: TextExportModule, source: Source, model: Any, text_encoder: Any, spec: ModelSpec
) -> Iterator[dict[str, Any]]:
    """Run both graphs and the library's own model side by side at what was not traced.

    The detector gets the features of the exported text encoder, so the rows hold the errors of both. Yields one
    row a case and output: batch, height, width, tokens, output, error.
    """
    from ..backends.onnxruntime.session import OnnxSession

    inputs = [info.name for info in text_encoder_contract(spec)[0]]
    cases = []
    # One session after the other: with SAM 3 each takes gigabytes.
    with contextlib.ExitStack() as stack:
        encoder_session = None if text_encoder is None else stack.enter_context(OnnxSession(graph.to_bytes(text_encoder), spec))

        def encode(*arrays: NDArray) -> Mapping[str, NDArray]:
            assert encoder_session is not None
            return encoder_session.run(dict(zip(inputs, arrays, strict=True)))

        for batch, another, tokens in CHECKS:
            size = other_size(spec) if another else trace_size(spec)
            ids = example_ids(source, batch, tokens, seed=batch)
            feeds = image_feeds(spec, batch, size, seed=batch) | text_feeds(source, spec, ids, encode)
            cases.append((ids, feeds, {"batch": batch, "height": size[0], "width": size[1], "tokens": tokens}))
    stock = _StockSession(StockTextModule(source, spec).eval(), module)
    with OnnxSession.telling(model, spec) as session:
        for ids, feeds, row in cases:
            plain = {**feeds, **token_feeds(ids, spec)} if PIXEL_MASK in stock.input_names else feeds
            yield from rows_of(row, forced_differences(stock, *session.selections(feeds), plain, padding=feeds))


class _StockSession(BaseSession):
    """The library's own model, image by image where it has no batches. stock: the model; module: what was exported."""

    takes_selections = True

    def __init__(self, stock: Any, module: TextExportModule) -> None:
        self.spec, self.input_names = module.spec, stock.input_names
        self._stock, self._module = stock, module
        inputs, outputs = contract(module.spec)
        self._info = SessionInfo("torch", "torch-cpu", CPU, tuple(inputs), tuple(outputs))

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        batch = len(feeds[PIXEL_VALUES])
        rows = [slice(None)] if self._stock.reads_ids else [slice(i, i + 1) for i in range(batch)]
        parts: list[list[NDArray]] = []
        for part in rows:
            tensors = {name: torch.from_numpy(np.ascontiguousarray(array[part])) for name, array in feeds.items()}
            chosen = None if force is None else [torch.from_numpy(array[part]) for array in force.selections]
            with torch.no_grad(), contextlib.nullcontext() if chosen is None else forced_choices(chosen):
                found = self._stock(*(tensors[name] for name in self.input_names))
                if self.spec.decode.in_graph:
                    found = self._module.decoded(found, tensors)
            parts.append([tensor.numpy() for tensor in found])
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        return dict(zip(self._module.output_names, columns, strict=True))

    def close(self) -> None: ...
