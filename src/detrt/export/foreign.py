"""An ONNX file of another exporter in detrt's own contract, checked against the file as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from .. import files, graph
from ..backends.compare import apart, difference, relative_error
from ..backends.onnxruntime.session import run_graph
from ..data.postprocess import sigmoid
from ..data.preprocess import preprocess
from ..data.scenes.scene import draw_scene
from ..errors import SessionError
from ..models.foreign import ForeignModel
from ..spec import BOXES, LABELS, LOGITS, PIXEL_MASK, PIXEL_VALUES, PRED_BOXES, SCORES, TARGET_SIZES, Precision
from .trace import ExportReport, Form, require_equal, rows_of

_BATCH = 2  # of the second check
_TOLERANCE = Precision.FP32.output_tolerance
_GAP = 1e-5  # scores nearer than that may change places between two runs
Arrays = Mapping[str, NDArray]


def export_foreign(
    foreign: ForeignModel,
    path: Path | str,
    *,
    check: bool = True,
    say: Callable[[str], None] | None = None,
    form: Form | None = None,
) -> tuple[ExportReport, tuple[str, ...]]:
    """Write the graph with detrt's inputs and outputs and its spec; the report, and notes on the batch.

    check: run both graphs on drawn images and compare, at batch 1 and, where the batch is symbolic, at batch 2. A graph whose
    images do not give the same alone and in a batch gets the fixed batch 1. form: changes the graph in place before that.

    Raises:
        SessionError: ONNX Runtime does not run the file. GateError: the two differ. OutputError: `path` cannot be written.
    """
    start, path, say = time.perf_counter(), Path(path), say or (lambda text: None)
    notes: list[str] = []
    errors: list[dict[str, Any]] = []

    def written(batch: int | None = None) -> Any:
        model = foreign.contract(batch=batch)
        if form is not None:
            form(model)
        return model

    model = written()
    if check:
        say("comparing with the original")
        batches = (1, _BATCH) if foreign.graph.batch is None else (foreign.graph.batch,)
        if len(batches) > 1 and not _takes_batches(foreign, model):
            notes.append("the graph is right at batch 1 only, although its batch axis is symbolic; detrt's has batch 1")
            batches, model = (1,), written(1)
        for batch in batches:
            errors += _compare(foreign, model, batch)
    graph.save(model, path)
    report = ExportReport(path, foreign.spec, graph.summarise(model), time.perf_counter() - start, tuple(errors))
    return report, tuple(notes)


def _takes_batches(foreign: ForeignModel, model: Any) -> bool:
    """Whether images give the same alone and in a batch: exporters declare axes symbolic that tracing has fixed."""
    images = _images(foreign, _BATCH, grow=0)
    try:
        alone = [_ours(foreign, model, [image]) for image in images]
        together = run_graph(foreign.path, _their_feeds(foreign, images))
        joined = {name: np.concatenate([single[name] for single in alone]) for name in alone[0]}
        return all(relative_error(*pair, name) <= _TOLERANCE for name, pair in _pairs(foreign, together, joined).items())
    except (SessionError, ValueError, IndexError):  # it does not run, or returns another number of rows
        return False


def _ours(foreign: ForeignModel, model: Any, images: list[NDArray[np.uint8]]) -> Arrays:
    with files.scratch() as folder:
        graph.save(model, folder / "model.onnx")
        return run_graph(folder / "model.onnx", preprocess(images, foreign.spec).feeds)


def _compare(foreign: ForeignModel, model: Any, batch: int) -> list[dict[str, Any]]:
    """Rows of a check: largest difference of each output, relative to its largest value.

    Raises:
        GateError: one is above the tolerance of FP32.
    """
    images = _images(foreign, batch)
    ours, theirs = _ours(foreign, model, images), run_graph(foreign.path, _their_feeds(foreign, images))
    height, width = foreign.spec.input.size_hw
    found = [(name, *difference(*pair, name)) for name, pair in _pairs(foreign, theirs, ours).items()]
    rows = list(rows_of({"batch": batch, "height": height, "width": width}, found))
    require_equal(rows, f"the graph in detrt's contract differs from '{foreign.path}'", "; check `layout`")
    return rows


def _images(foreign: ForeignModel, batch: int, grow: int = 32) -> list[NDArray[np.uint8]]:
    """Drawn images, each `grow` pixels wider than the one before."""
    height, width = (max(64, side) for side in foreign.spec.input.size_hw)
    return [draw_scene(seed, size_hw=(height, width + grow * seed)).image for seed in range(batch)]


def _their_feeds(foreign: ForeignModel, images: list[NDArray[np.uint8]]) -> dict[str, NDArray]:
    """What the file takes, prepared by the host: normalised pixels, and (width, height) of the original images."""
    found, layout = foreign.graph, foreign.graph.layout
    spec = foreign.spec.with_input(normalize_in_graph=False, dtype="float32")
    ours = preprocess(images, spec).feeds
    feeds = {found.names[layout.pixels]: ours[PIXEL_VALUES]}
    if found.mask:
        feeds[found.names[layout.mask]] = ours[PIXEL_MASK]
    if layout.sizes:
        feeds[found.names[layout.sizes]] = ours[TARGET_SIZES][:, ::-1]
    types = {value.name: helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in found.model.graph.input}
    return {name: np.ascontiguousarray(array.astype(types[name])) for name, array in feeds.items()}


def _pairs(foreign: ForeignModel, theirs: Arrays, ours: Arrays) -> dict[str, tuple[NDArray, NDArray]]:
    """Name -> (their values, ours), in a form in which equal models have equal values."""
    names, layout = foreign.graph.names, foreign.graph.layout.name
    if layout == "ultralytics":
        rows = theirs[names["output0"]].astype(np.float32)
        return {PRED_BOXES: (rows[..., :4], ours[PRED_BOXES]), "scores": (rows[..., 4:], sigmoid(ours[LOGITS]))}
    if layout != "rt-detr":
        logits, boxes = (LOGITS, PRED_BOXES) if layout == "transformers" else (LABELS, "dets")
        return {LOGITS: (theirs[names[logits]], ours[LOGITS]), PRED_BOXES: (theirs[names[boxes]], ours[PRED_BOXES])}
    order = np.argsort(-theirs[names[SCORES]], axis=1, kind="stable")
    sorted_of = {
        name: np.stack([a[i] for a, i in zip(theirs[names[name]], order, strict=True)]) for name in (BOXES, SCORES, LABELS)
    }
    clear = apart(sorted_of[SCORES], _GAP)
    found = {name: (sorted_of[name][clear], ours[name][clear]) for name in (BOXES, LABELS)}
    return {SCORES: (sorted_of[SCORES], ours[SCORES]), **found}
