"""Which inputs show the difference, which graphs can be compared, and the search over them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Backend, Feeds, Session
from ..backends.prompted import detector_of, with_text
from ..backends.tensorrt import EngineConfig, TensorRTSession, build_engine
from ..bundle import EngineFacts
from ..data.preprocess import group_by_size, preprocess
from ..errors import DetrtError, GraphError
from ..spec import PIXEL_VALUES, ModelSpec, Precision
from ..system import CountProgress
from .batching import slot_feeds
from .divergence import Divergence, LayerError, TensorError, _error, comparable, onnx_fetch, search
from .models import Side, reference_view, run_view, view_of
from .tensors import with_selections

if TYPE_CHECKING:
    from ..graph.view import GraphView
    from .report import VerifyReport


# With fewer tensors of a common name the two graphs come from different exporters.
_ENOUGH_NAMES = 0.3


def with_divergence(
    report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]], say: Callable[[str], None]
) -> VerifyReport:
    """The report with the place where the two graphs part, or a note why it is not known."""
    say("searching the first divergence")
    feeds = with_text(cand.session, failing_feeds(report, ref, cand, images))
    ref, cand = (replace(side, session=detector_of(side.session), owned=False) for side in (ref, cand))
    try:
        found, notes = _search(report, ref, cand, feeds, say)
    except DetrtError as error:
        found, notes = None, [f"the divergence search stopped: {error}"]
    if found is not None and found.first is None and report.facts:
        notes.append("the graphs agree; the difference is in the facts of the spec, named above")
    return replace(report, divergence=found, notes=(*report.notes, *notes))


def failing_feeds(report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]]) -> Feeds:
    """One batch that shows a failure: of a slot, else of a tensor, else of the first images."""
    spec = ref.session.spec
    for row in report.slots:
        if not row["passed"] and row["batch"] > 1:
            return slot_feeds(cand.session, images, row["batch"], (row["height"], row["width"]))
    for row in report.tensors:
        if not row["error"] <= report.gate.tensor and spec.input.dynamic:
            return preprocess(images[: row["batch"]], spec, size_hw=(row["height"], row["width"])).feeds
    group = group_by_size([image.shape[:2] for image in images], spec)[0]
    return preprocess([images[i] for i in group], spec).feeds


def _search(
    report: VerifyReport, ref: Side, cand: Side, feeds: Feeds, say: Callable[[str], None]
) -> tuple[Divergence | None, list[str]]:
    notes: list[str] = []
    if cand.source is not None:
        if ref.source is None:
            return None, ["no divergence search: it needs a graph, or two checkpoints; swap the two sides"]

        return search_torch(ref.session, cand.session, feeds), notes
    if cand.graph is None:
        return None, ["no divergence search: the graph that the engine was built from is not beside it"]
    spec = cand.session.spec
    view = run_view(cand)
    reference, against = reference_view(ref, cand, say)
    precision = report.precision
    share = len(comparable(view, reference)) / max(1, len(view.tensors()))
    if share < _ENOUGH_NAMES:
        if ref.source is None or cand.session.info.backend is not Backend.ONNXRUNTIME:
            return None, [f"no divergence search: only {share:.0%} of the tensors have a name that the reference has"]

        return search_modules(view, cand.session, ref.session, spec, feeds, precision=precision), notes
    found = search(view, reference, spec, feeds, precision=precision, against=against, original=view_of(cand.graph))
    if cand.session.info.backend is Backend.ONNXRUNTIME:
        return found, notes
    if found.first is not None and found.first.error > report.gate.tensor:
        return found, ["found in the graph that the engine was built from, so TensorRT is not the cause"]
    say("building probe engines")
    return _search_engine(report, cand, view, reference, feeds, against)


def _search_engine(
    report: VerifyReport, cand: Side, view: GraphView, reference: GraphView, feeds: Feeds, against: str
) -> tuple[Divergence, list[str]]:

    session = cand.session
    fetch = engine_fetch(
        view,
        session.spec,
        feeds,
        session.info.facts,  # type: ignore[arg-type]  # an engine has them
        compute_capability=session.info.compute_capability,
    )
    found = search(view, reference, session.spec, feeds, precision=report.precision, fetch=fetch, against=against)
    return found, ["the graph agrees with the reference, so the engine itself differs", CAVEAT]


# Divergence by module, against PyTorch: for graphs whose tensors have other names than a fresh export.
_CHUNK = 32  # modules whose outputs are in memory at one time
_WRAPPER = "/model"


def search_modules(
    candidate: GraphView,
    cand: Session,
    reference: Any,
    spec: ModelSpec,
    feeds: Feeds,
    *,
    precision: str = "fp32",
    progress: CountProgress | None = None,
) -> Divergence:
    """Compare what PyTorch's modules return with what leaves the same scopes of a graph.

    reference: a TorchSession; it gets the candidate's selections. A module is compared where a tensor of
    its shape leaves its scope, with the nearest one; the first module to return a diverged tensor is the
    answer.

    Raises:
        GraphError: no module can be compared. SessionError: a side does not run.
    """
    from ..models.hooks import module_paths, run_modules

    _, chosen = with_selections(cand, feeds)
    leaving = scope_outputs(candidate)
    paths = [path for path in module_paths(reference) if path in leaving]
    fetch = onnx_fetch(candidate, spec, feeds)
    metric = "max" if precision == "fp32" else "rms"
    found: dict[str, tuple[float, str, str]] = {}
    for start in range(0, len(paths), _CHUNK):
        chunk = paths[start : start + _CHUNK]
        wanted = run_modules(reference, feeds, chosen, chunk)
        tensors = fetch(sorted({name for path, _ in wanted for name in leaving.get(path, ())}))
        for path, array in wanted:
            if nearest := _nearest(array, leaving.get(path, ()), tensors, metric):
                found[path] = max(found.get(path, (0.0, "", "")), nearest, key=lambda row: row[0])
        if progress:
            progress(start + len(chunk), len(paths))
    if not found:
        raise GraphError("no module of the checkpoint has an output that leaves its scope in the graph")
    return _result(candidate, found, metric, Precision(precision).layer_tolerance)


def scope_outputs(view: GraphView) -> dict[str, list[str]]:
    """Module path -> float tensors that are made inside its scope and used outside.

    The scope is read from the tensor's name, because a fold keeps the name of the last module's output.
    """
    from ..graph.view import FLOATS

    outputs = {value.name for value in view.model.graph.output}
    scope = {name: _scope(view, name) for name in view.tensors()}
    found: dict[str, list[str]] = {}
    for name, path in scope.items():
        if not path or view.types.get(name) not in FLOATS:
            continue
        users = [scope.get(out, "") for node in view.consumers(name) for out in node.output]
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            outer = ".".join(parts[:length])
            if name in outputs or any(not (user == outer or user.startswith(outer + ".")) for user in users):
                found.setdefault(outer, []).append(name)
    return found


def search_torch(reference: Any, candidate: Any, feeds: Feeds) -> Divergence:
    """Compare two checkpoints of one architecture, module by module.

    Raises:
        GraphError: they have no module in common.
    """
    from ..models.hooks import module_paths, run_modules

    _, chosen = with_selections(candidate, feeds)
    other = set(module_paths(candidate))
    paths = [path for path in module_paths(reference) if path in other]
    found: dict[str, tuple[float, str, str]] = {}
    for start in range(0, len(paths), _CHUNK):
        chunk = paths[start : start + _CHUNK]
        want, got = run_modules(reference, feeds, chosen, chunk), run_modules(candidate, feeds, chosen, chunk)
        for (path, a), (_, b) in zip(want, got, strict=False):
            row = (*_error(a, b, "max"), path)
            found[path] = max(found.get(path, (0.0, "", "")), row, key=lambda r: r[0])
    if not found:
        raise GraphError("the two checkpoints have no module in common")
    order = {path: i for i, (path, _) in enumerate(run_modules(candidate, feeds, chosen, list(found)))}
    found = dict(sorted(found.items(), key=lambda item: order.get(item[0], 0)))
    return _result(None, found, "max", Precision.FP32.layer_tolerance)


def _nearest(array: NDArray, names: Sequence[str], tensors: Any, metric: str) -> tuple[float, str, str] | None:
    same = [(*_error(array, tensors[name], metric), name) for name in names if tensors[name].shape == array.shape]
    return min(same, key=lambda row: row[0]) if same else None


def _scope(view: GraphView, name: str) -> str:
    from ..graph.names import module_path

    if name.startswith("/") and "/" in name[1:]:
        return module_path(name.removeprefix(_WRAPPER) if name.startswith(_WRAPPER + "/") else name)
    return view.module_of(view.producer[name])


def _result(view: GraphView | None, found: dict[str, tuple[float, str, str]], metric: str, limit: float) -> Divergence:
    order = {path: i + 1 for i, path in enumerate(found)}
    if view is not None:
        order = {path: view.depth.get(name, 0) for path, (_, _, name) in found.items()}
    layers = tuple(sorted((LayerError(p, e, e, order[p], 1) for p, (e, _, _) in found.items()), key=lambda row: row.depth))
    # Of modules that end at one depth the innermost is meant: its parent returns the same tensor.
    bad = sorted((path for path, (error, _, _) in found.items() if not error <= limit), key=lambda p: (order[p], -p.count(".")))
    while not bad and limit > 2e-6 and metric == "max":
        limit /= 10
        bad = sorted((p for p, (e, _, _) in found.items() if not e <= limit), key=lambda p: (order[p], -p.count(".")))
    roots = []
    for path in bad[:1]:
        error, text, tensor = found[path]
        before = max((e for p, (e, _, _) in found.items() if order[p] < order[path]), default=0.0)
        node = view.producer.get(tensor) if view is not None else None
        kind, name = (node.op_type, node.name) if node is not None else ("module", path)
        roots.append(TensorError(tensor, name, kind, path, float(np.float64(error)), before, order[path], text))
    notes = ("compared by the outputs of modules, not of single operators",)
    return Divergence("PyTorch", len(found), metric, limit, roots[0] if roots else None, tuple(roots), layers, notes)


# Intermediate tensors of an engine: build it again with more outputs, on the GPU that runs it.
# What an engine with more outputs cannot show: TensorRT fuses across tensors that nobody asks for.
CAVEAT = "read from engines built again with more outputs; a fault that needs a fusion may not show in them"


def engine_fetch(
    view: GraphView,
    spec: ModelSpec,
    feeds: Feeds,
    facts: EngineFacts,
    *,
    compute_capability: int | None = None,
    build: Callable[..., Any] = build_engine,
    open_engine: Callable[[Path], Any] = TensorRTSession,
) -> Callable[[Sequence[str]], Mapping[str, NDArray]]:
    """A reader of intermediate tensors for `verify_divergence.search`; each call builds one engine.

    view: the graph that the engine was built from. build, open_engine: replace the library, for tests.

    Raises (when called):
        EngineError: TensorRT does not build it, or there is no GPU.
    """
    from .. import graph
    from ..graph.probe import probe

    batch, _, height, width = feeds[PIXEL_VALUES].shape
    config = EngineConfig(
        target=facts.target,
        sms=(compute_capability,) if compute_capability and facts.target == "tensorrt-rtx" else (),
        batch=(batch,) * 3,
        height=(height,) * 3 if spec.input.dynamic else None,
        width=(width,) * 3 if spec.input.dynamic else None,
        tf32=bool(facts.options.get("tf32")),
    )

    def fetch(names: Sequence[str]) -> dict[str, NDArray]:
        model, shown = probe(view, names)
        with tempfile.TemporaryDirectory(prefix="detrt-probe-") as folder:
            onnx_path, engine_path = Path(folder) / "probe.onnx", Path(folder) / "probe.engine"
            graph.save(model, onnx_path)
            build(onnx_path, engine_path, config, spec)
            session = open_engine(engine_path)
            try:
                outputs = session.run(feeds)
            finally:
                session.close()
        return {name: outputs[output] for name, output in shown.items()}

    return fetch
