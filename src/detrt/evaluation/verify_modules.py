"""Divergence by module, against PyTorch: for graphs whose tensors have other names than a fresh export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds, Session
from ..errors import GraphError
from ..spec import ModelSpec
from .divergence import TOLERANCES, Divergence, LayerError, TensorError, _error, onnx_fetch
from .tensors import with_selections

if TYPE_CHECKING:
    from ..graph.view import GraphView

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
    progress: Callable[[int, int], None] | None = None,
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
    return _result(candidate, found, metric, TOLERANCES[precision])


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
        users = [scope.get(out, "") for node in view.consumers.get(name, []) for out in node.output]
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
    return _result(None, found, "max", TOLERANCES["fp32"])


def _nearest(array: NDArray, names: Sequence[str], tensors: Any, metric: str) -> tuple[float, str, str] | None:
    same = [(*_error(array, tensors[name], metric), name) for name in names if tensors[name].shape == array.shape]
    return min(same, key=lambda row: row[0]) if same else None


def _scope(view: GraphView, name: str) -> str:
    from ..graph.view import module_path

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
