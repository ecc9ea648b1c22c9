"""Localisation of a failed comparison: the input that shows it, and the search over graphs, modules or engines.

Graphs from the same exporter are compared by tensor names (`divergence.search`). Graphs with other tensor names are compared with
PyTorch by the outputs of modules. Intermediate tensors of an engine are read as its backend can (`Session.probed`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds, Session
from ..backends.compare import difference
from ..backends.prompted import detector_of, with_text
from ..data.preprocess import group_by_size, preprocess
from ..errors import DetrtError, GraphError
from ..spec import ModelSpec, Precision
from .batching import slot_feeds
from .divergence import Divergence, LayerError, TensorError, comparable, onnx_fetch, search
from .models import Side, reference_view, run_view, view_of

if TYPE_CHECKING:
    from ..graph.view import GraphView
    from .report import VerifyReport


# Graphs with a smaller fraction of common tensor names come from different exporters.
_MIN_COMMON_NAMES = 0.3


def with_divergence(
    report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]], say: Callable[[str], None]
) -> VerifyReport:
    """The report with the first node that differs, or with a note why it is unknown."""
    say("searching for the first divergence")
    feeds = with_text(cand.session, failing_feeds(report, ref, cand, images))
    ref, cand = (replace(side, session=detector_of(side.session), owned=False) for side in (ref, cand))
    try:
        result, notes = _search(report, ref, cand, feeds, say)
    except DetrtError as error:
        result, notes = None, [f"the divergence search stopped: {error}"]
    if result is not None and result.first is None and report.facts:
        notes.append("the graphs agree; the difference is in the fields of the spec that are listed above")
    return replace(report, divergence=result, notes=(*report.notes, *notes))


def failing_feeds(report: VerifyReport, ref: Side, cand: Side, images: Sequence[NDArray[np.uint8]]) -> Feeds:
    """A batch that shows a failure: of a slot, else of a tensor, else the first images."""
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
    if cand.source is not None:
        if ref.source is None:
            return None, ["no divergence search: it needs a graph, or two checkpoints; swap the two sides"]

        return search_torch(ref.session, cand.session, feeds), []
    if cand.graph is None:
        return None, [f"no divergence search: the ONNX graph that {cand.session.info.name} was built from is not beside it"]
    spec = cand.session.spec
    view = run_view(cand)
    reference, against = reference_view(ref, cand, say)
    precision = report.precision
    fraction = len(comparable(view, reference)) / max(1, len(view.tensors()))
    if fraction < _MIN_COMMON_NAMES:
        if ref.source is None or not cand.session.info.runs_graph:
            return None, [f"no divergence search: only {fraction:.0%} of the tensors have a name that the reference has"]

        return search_modules(view, cand.session, ref.session, spec, feeds, precision=precision), []
    result = search(view, reference, spec, feeds, precision=precision, against=against, original=view_of(cand.graph))
    if cand.session.info.runs_graph:
        return result, []
    if result.first is not None and result.first.error > report.gate.tensor:
        return result, [f"found in the graph, so what {cand.session.info.name} makes of it is not the cause"]
    fetch = cand.session.probed(view, feeds)
    if fetch is None:
        return result, [f"the graph agrees with the reference, so {cand.session.info.name} differs, whose tensors cannot be read"]
    say("building probe engines")
    result = search(view, reference, spec, feeds, precision=precision, fetch=fetch, against=against)
    return result, ["the graph agrees with the reference, so the engine differs", CAVEAT]


# Extra outputs prevent fusions across them.
CAVEAT = "read from engines built again with extra outputs; a fault that needs a fusion may not show in them"

_CHUNK = 32  # modules whose outputs are in memory at the same time
_WRAPPER = "/model"


def search_modules(
    candidate: GraphView,
    cand: Session,
    reference: Any,
    spec: ModelSpec,
    feeds: Feeds,
    *,
    precision: str = "fp32",
) -> Divergence:
    """Compare the outputs of PyTorch modules with the tensors that leave the same scopes of a graph.

    reference: a TorchSession; it gets the selections of the candidate. The output of a module is compared with the nearest tensor
    of its shape that leaves its scope; the first module with a diverged output is the result.

    Raises:
        GraphError: no module can be compared. SessionError: a side fails to run.
    """
    from ..models.hooks import module_paths, run_modules

    _, choices = cand.selections(feeds)
    scope_tensors = scope_outputs(candidate)
    paths = [path for path in module_paths(reference) if path in scope_tensors]
    fetch = onnx_fetch(candidate, spec, feeds)
    metric = "max" if precision == "fp32" else "rms"
    result: dict[str, tuple[float, str, str]] = {}
    for start in range(0, len(paths), _CHUNK):
        chunk = paths[start : start + _CHUNK]
        module_outputs = run_modules(reference, feeds, choices, chunk)
        tensors = fetch(sorted({name for path, _ in module_outputs for name in scope_tensors.get(path, ())}))
        for path, array in module_outputs:
            if nearest := _nearest(array, scope_tensors.get(path, ()), tensors, metric):
                result[path] = max(result.get(path, (0.0, "", "")), nearest, key=lambda row: row[0])
    if not result:
        raise GraphError("no module of the checkpoint has an output that leaves its scope in the graph")
    return _result(candidate, result, metric, Precision(precision).layer_tolerance)


def scope_outputs(view: GraphView) -> dict[str, list[str]]:
    """Module path -> float tensors that are computed in its scope and read outside.

    The scope is that of the tensor name, because folding keeps the name of the output of the last module. An output of the graph is
    of its innermost scope alone: of a module around it, it may be the last of a stack, and another output have its shape.
    """
    from ..graph.view import FLOATS

    scope = {name: _scope(view, name) for name in view.tensors()}
    result: dict[str, list[str]] = {}
    for name, path in scope.items():
        if not path or view.types.get(name) not in FLOATS:
            continue
        users = [scope.get(out, "") for node in view.consumers(name) for out in node.output]
        parts = path.split(".")
        for length in range(len(parts), 0, -1):
            outer = ".".join(parts[:length])
            innermost = length == len(parts)
            if (name in view.outputs and innermost) or any(not (user == outer or user.startswith(outer + ".")) for user in users):
                result.setdefault(outer, []).append(name)
    return result


def search_torch(reference: Any, candidate: Any, feeds: Feeds) -> Divergence:
    """Compare two checkpoints of one architecture, module by module.

    Raises:
        GraphError: they have no module in common.
    """
    from ..models.hooks import module_paths, run_modules

    _, choices = candidate.selections(feeds)
    candidate_paths = set(module_paths(candidate))
    paths = [path for path in module_paths(reference) if path in candidate_paths]
    result: dict[str, tuple[float, str, str]] = {}
    for start in range(0, len(paths), _CHUNK):
        chunk = paths[start : start + _CHUNK]
        want, got = run_modules(reference, feeds, choices, chunk), run_modules(candidate, feeds, choices, chunk)
        for (path, a), (_, b) in zip(want, got, strict=False):
            row = (*difference(a, b), path)
            result[path] = max(result.get(path, (0.0, "", "")), row, key=lambda r: r[0])
    if not result:
        raise GraphError("the two checkpoints have no module in common")
    order = {path: i for i, (path, _) in enumerate(run_modules(candidate, feeds, choices, list(result)))}
    result = dict(sorted(result.items(), key=lambda item: order.get(item[0], 0)))
    return _result(None, result, "max", Precision.FP32.layer_tolerance)


def _nearest(array: NDArray, names: Sequence[str], tensors: Any, metric: str) -> tuple[float, str, str] | None:
    same = [(*difference(array, tensors[name], metric=metric), name) for name in names if tensors[name].shape == array.shape]
    return min(same, key=lambda row: row[0]) if same else None


def _scope(view: GraphView, name: str) -> str:
    from ..graph.names import module_path

    if name.startswith("/") and "/" in name[1:]:
        return module_path(name.removeprefix(_WRAPPER) if name.startswith(_WRAPPER + "/") else name)
    return view.module_of(view.producer[name])


def _result(view: GraphView | None, result: dict[str, tuple[float, str, str]], metric: str, limit: float) -> Divergence:
    order = {path: i + 1 for i, path in enumerate(result)}
    if view is not None:
        order = {path: view.depth.get(name, 0) for path, (_, _, name) in result.items()}
    layers = tuple(sorted((LayerError(p, e, e, order[p], 1) for p, (e, _, _) in result.items()), key=lambda row: row.depth))
    # Of modules of the same depth the innermost is reported: its parent returns the same tensor.
    diverged = sorted(
        (path for path, (error, _, _) in result.items() if not error <= limit), key=lambda p: (order[p], -p.count("."))
    )
    while not diverged and limit > 2e-6 and metric == "max":
        limit /= 10
        diverged = sorted((p for p, (e, _, _) in result.items() if not e <= limit), key=lambda p: (order[p], -p.count(".")))
    roots = []
    for path in diverged[:1]:
        error, text, tensor = result[path]
        error_before = max((e for p, (e, _, _) in result.items() if order[p] < order[path]), default=0.0)
        node = view.producer.get(tensor) if view is not None else None
        kind, name = (node.op_type, node.name) if node is not None else ("module", path)
        roots.append(TensorError(tensor, name, kind, path, float(np.float64(error)), error_before, order[path], text))
    notes = ("compared by outputs of modules, not of operators",)
    return Divergence("PyTorch", len(result), metric, limit, roots[0] if roots else None, tuple(roots), layers, notes)
