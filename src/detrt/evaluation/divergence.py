"""First-divergence search: where in the graph do a candidate and a reference part?

Both graphs return their intermediate tensors, a few at a time; tensors of one name are compared. What
the candidate selected (top-k) or rounded (floor, comparisons) is given to the reference, so that a tie
on a step neither hides nor invents an error; whether the candidate's step itself is right is judged by
what the reference would have done. A tensor has diverged when its error exceeds the tolerance; it is a
root when nothing that it is computed from has. The first root is the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds
from ..errors import GraphError, SessionError
from ..spec import ModelSpec, Precision
from ..system import CountProgress

if TYPE_CHECKING:
    from ..graph.view import GraphView

# fetch(names) -> their values, for one set of feeds
Fetch = Callable[[Sequence[str]], Mapping[str, NDArray]]
_CHUNK_BYTES = 256 << 20
_FIRST_CHUNK = 32
_ORT_NODE = re.compile(r"running \w+ node\. Name:\s*'([^']+)'")
_MASKED = 1e30  # a fill value such as finfo.min; a narrower type has another one
_WRONG_STEPS = 0.02  # share of a step's values that rounding may move; 0 where both are FP32


@dataclass(frozen=True, slots=True)
class TensorError:
    """One compared tensor. error: relative to the reference; before: the largest error of what it is
    computed from; depth: nodes from the picture; text: what a number cannot say."""

    tensor: str
    node: str
    op: str
    module: str
    error: float
    before: float
    depth: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class LayerError:
    """One module: its largest error, that of its deepest tensor, and how deep that lies."""

    module: str
    error: float
    last: float
    depth: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Result of the search. metric: "max" or "rms"; first: None where nothing parts."""

    against: str
    compared: int
    metric: str
    tolerance: float
    first: TensorError | None
    roots: tuple[TensorError, ...] = ()
    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """One line for people."""
        if self.first is None:
            return f"no divergence above {self.tolerance:g} in {self.compared} tensors"
        first = self.first
        where = f"module '{first.module}'" if first.module else "the part outside the model"
        error = first.text or f"error {first.error:.2g}, before it {first.before:.2g}"
        return f"first divergence: {where}, {first.op} '{first.node}' ({error})"


def onnx_fetch(
    view: GraphView, spec: ModelSpec, feeds: Feeds, given: Mapping[str, NDArray] | None = None, *, cut: bool = False
) -> Fetch:
    """Read tensors of a graph with ONNX Runtime; `given` and `cut` as in `graph.probe.probe`."""
    from ..backends.onnxruntime.session import OnnxSession
    from ..graph.probe import probe

    def fetch(names: Sequence[str]) -> dict[str, NDArray]:
        model, shown = probe(view, names, given, without_outputs=cut)
        with OnnxSession(model.SerializeToString(), spec) as session:
            outputs = session.run(feeds)
        return {name: outputs[output] for name, output in shown.items()}

    return fetch


def search(
    candidate: GraphView,
    reference: GraphView,
    spec: ModelSpec,
    feeds: Feeds,
    *,
    precision: str = "fp32",
    fetch: Fetch | None = None,
    original: GraphView | None = None,
    tolerance: float | None = None,
    against: str = "the FP32 graph",
    progress: CountProgress | None = None,
) -> Divergence:
    """Compare two graphs tensor by tensor on one batch.

    fetch: reads the candidate's tensors; the default runs its graph with ONNX Runtime.
    original: the candidate as its author knows it, for names, where `candidate` is a rewritten copy of it.
    tolerance: of the relative error; None takes that of `precision`, and lowers it step by step where
        nothing exceeds it, because errors too small to be seen early may still matter at the end.

    Raises:
        SessionError: a graph does not run. GraphError: it cannot be probed, or no tensor has a common name.
    """
    read = fetch or onnx_fetch(candidate, spec, feeds)
    names = comparable(candidate, reference)
    if fetch is not None:  # an engine: shapes are not its business, and not all types can be its outputs
        from ..graph.view import FLOATS

        names = [name for name in names if candidate.types.get(name) in FLOATS]
    if not names:
        raise GraphError("the two graphs have no tensor name in common; export both with the same version of detrt")
    metric = "max" if precision == "fp32" else "rms"
    limit = Precision(precision).layer_tolerance if tolerance is None else tolerance
    steps = {n.output[-1] if n.op_type == "TopK" else n.output[0]: n for n in candidate.jumps()}
    known = {name for node in reference.jumps() for name in node.output}
    steps = {name: node for name, node in steps.items() if name in known}
    errors: dict[str, tuple[float, str]] = {}
    stop = None
    try:
        given = dict(read(list(steps) or names[:1]))
    except SessionError as error:
        stop = _stopped_at(candidate, str(error))
        if stop is None or fetch is not None:
            raise
        # What does not depend on the node that stopped can still be compared.
        lost = candidate.behind(stop)
        errors[stop.output[0]] = float("inf"), "it does not run: " + str(error).rsplit(": ", 1)[-1][:200]
        names = [name for name in names if name not in lost]
        steps = {name: node for name, node in steps.items() if name not in lost}
        read = onnx_fetch(candidate, spec, feeds, cut=True)
        given = dict(read(list(steps))) if steps else {}
    given = {name: value for name, value in given.items() if name in steps}
    if fetch is None:  # other outputs, other fusions, other rounding: its own steps are fixed for it as well
        read = onnx_fetch(candidate, spec, feeds, given, cut=stop is not None)
    if given:
        own = onnx_fetch(reference, spec, feeds, given)
        errors.update(_step_errors(given, steps, own, precision))
    names = [name for name in names if name not in given]
    reading = onnx_fetch(reference, spec, feeds, given)
    for chunk, a, b in _chunks(names, reading, read):
        for name in chunk:
            errors[name] = _error(a[name], b[name], metric)
        if progress:
            progress(len(errors), max(len(errors), len(names) + len(given)))
    notes: list[str] = []
    roots = _roots(candidate, errors, limit, original or candidate)
    while not roots and tolerance is None and metric == "max" and limit > 2e-6:
        limit /= 10
        roots = _roots(candidate, errors, limit, original or candidate)
    if limit < Precision(precision).layer_tolerance and tolerance is None and roots:
        notes.append(f"nothing exceeds {Precision(precision).layer_tolerance:g}; the search went on down to {limit:g}")
    return Divergence(
        against, len(errors), metric, limit, roots[0] if roots else None, tuple(roots[:10]),
        tuple(layer_errors(candidate, errors, original or candidate)), tuple(notes),
    )  # fmt: skip


def _stopped_at(view: GraphView, error: str) -> Any:
    """The node that ONNX Runtime's message names, or None."""
    match = _ORT_NODE.search(error)
    return next((node for node in view.model.graph.node if match and node.name == match[1]), None)


def comparable(candidate: GraphView, reference: GraphView) -> list[str]:
    """Names that mean the same tensor in both graphs: floats, and integers made of shapes only.

    Integers that depend on the picture come from steps, which are compared in another way.
    """
    from ..graph.view import FLOATS

    numbered = _numbered_alike(candidate, reference)
    names = []
    for name in candidate.tensors():
        other = reference.producer.get(name)
        if other is None or ("::" in name and not (numbered and other.op_type == candidate.producer[name].op_type)):
            continue
        kinds = candidate.types.get(name), reference.types.get(name)
        whole = not (candidate.depth.get(name) or reference.depth.get(name))
        if (all(kind in FLOATS for kind in kinds)) or (whole and None not in kinds and kinds[0] == kinds[1]):
            names.append(name)
    return names


def _numbered_alike(candidate: GraphView, reference: GraphView) -> bool:
    """Whether names such as "onnx::Add_12", which only count, count the same in both graphs."""
    a, b = ({n for n in view.tensors() if "::" in n} for view in (candidate, reference))
    return bool(a) and len(a & b) >= 0.95 * max(len(a), len(b))


def _chunks(
    names: list[str], first: Fetch, second: Fetch
) -> Iterator[tuple[list[str], Mapping[str, NDArray], Mapping[str, NDArray]]]:
    """Read both sides, as many tensors at a time as fit into the memory that is set aside."""
    start, size = 0, _FIRST_CHUNK
    while start < len(names):
        chunk = names[start : start + size]
        a, b = first(chunk), second(chunk)
        yield chunk, a, b
        each = max(1, max(sum(v.nbytes for v in side.values()) for side in (a, b)) // len(chunk))
        start += size
        # Deeper tensors are usually smaller; half of the memory covers those that are not.
        size = int(np.clip(_CHUNK_BYTES // 2 // each, 4, 512))


def _error(reference: NDArray, candidate: NDArray, metric: str) -> tuple[float, str]:
    if reference.shape != candidate.shape:
        return float("inf"), f"shape {candidate.shape}, the reference has {reference.shape}"
    a, b = reference.astype(np.float64), candidate.astype(np.float64)
    if reference.dtype.kind in "iub":
        wrong = int((a != b).sum())
        return (1.0, f"{wrong} of {a.size} integers differ") if wrong else (0.0, "")
    with np.errstate(invalid="ignore", over="ignore"):
        masked = (np.abs(a) >= _MASKED) & (np.sign(a) == np.sign(b)) & (np.abs(b) >= 1e4)
    a, b = a[~masked], b[~masked]
    lost = np.isfinite(a) & ~np.isfinite(b)
    if lost.any():
        kind = "NaN" if np.isnan(b[lost]).all() else "infinite"
        largest = float(np.abs(a[np.isfinite(a)]).max())
        return float("inf"), f"{int(lost.sum())} of {a.size} values are {kind}; the reference reaches {largest:.3g}"
    both = np.isfinite(a) & np.isfinite(b)
    if not np.array_equal(np.isfinite(a), both):
        return float("inf"), "the reference has infinite values or NaN where the candidate has none"
    a, b = a[both], b[both]
    if not a.size:
        return 0.0, ""
    difference = b - a
    if metric == "rms":
        return float(np.sqrt((difference**2).mean()) / max(np.sqrt((a**2).mean()), 1e-6)), ""
    return float(np.abs(difference).max() / max(np.abs(a).max(), 1e-6)), ""


def _step_errors(
    given: Mapping[str, NDArray], steps: Mapping[str, Any], own: Fetch, precision: str
) -> Iterator[tuple[str, tuple[float, str]]]:
    """Is each step of the candidate one that the reference could have taken?"""
    from ..graph.probe import COMPUTED

    wanted: dict[str, list[str]] = {}
    for name, node in steps.items():
        if node.op_type == "TopK" and node.output[0]:
            wanted[name] = [COMPUTED + node.output[0], node.output[0]]
        else:
            wanted[name] = [COMPUTED + name]
    values = own([n for names in wanted.values() for n in names])
    allowed = 0.0 if precision == "fp32" else _WRONG_STEPS
    for name, tensors in wanted.items():
        if len(tensors) == 2:  # the selected values, best first, may differ by rounding only
            best, taken = (np.sort(values[n], axis=None) for n in tensors)
            yield name, _error(best, taken, "max" if precision == "fp32" else "rms")
            continue
        mine, theirs = given[name], values[tensors[0]]
        if mine.shape != theirs.shape:
            yield name, (float("inf"), f"shape {mine.shape}, the reference has {theirs.shape}")
            continue
        wrong = float((mine != theirs).mean()) if mine.size else 0.0
        text = f"{wrong:.1%} of the values fall on another side of the step"
        yield name, (1.0, text) if wrong > allowed else (0.0, "")


def _roots(view: GraphView, errors: Mapping[str, tuple[float, str]], limit: float, named: GraphView) -> list[TensorError]:
    """Diverged tensors that are computed from none; lost values first, then by depth."""

    def before(name: str) -> float:
        worst, seen = 0.0, set()
        todo = list(view.producer[name].input)
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            if current in errors:
                worst = max(worst, errors[current][0])
            elif current in view.producer:
                todo.extend(view.producer[current].input)
        return worst

    roots = []
    for name, (error, text) in errors.items():
        if error > limit and (earlier := before(name)) <= limit:
            node = named.producer.get(name) or view.producer[name]
            module, depth = named.module_of(node), view.depth.get(name, 0)
            roots.append(TensorError(name, node.name, node.op_type, module, error, earlier, depth, text))
    # An overflow hides behind harmless rounding that happens earlier, so it comes first.
    return sorted(roots, key=lambda root: (np.isfinite(root.error), root.depth))


def layer_errors(view: GraphView, errors: Mapping[str, tuple[float, str]], named: GraphView | None = None) -> list[LayerError]:
    """Errors by module path, in the order of the deepest tensor."""
    modules: dict[str, list[tuple[int, float]]] = {}
    for name, (error, _) in errors.items():
        if depth := view.depth.get(name):
            node = (named or view).producer.get(name) or view.producer[name]
            modules.setdefault((named or view).module_of(node), []).append((depth, error))
    rows = []
    for module, found in modules.items():
        deepest = max(found)[0]
        last = max(error for depth, error in found if depth == deepest)
        rows.append(LayerError(module, max(e for _, e in found), last, deepest, len(found)))
    return sorted(rows, key=lambda row: row.depth)
