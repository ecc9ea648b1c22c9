"""First-divergence search: the first node where a candidate and a reference graph differ.

Both graphs return their intermediate tensors, a few at a time, and tensors of the same name are compared. The selections (top-k)
and discontinuous results (floor, comparisons) of the candidate are forced in the reference, so that a tie neither hides nor causes
an error; each of them is judged against what the reference computes itself. A tensor has diverged if its error exceeds the
tolerance; it is a root if none of the tensors that it is computed from has. The first root is the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..backends.base import Feeds
from ..backends.compare import difference
from ..errors import GraphError, SessionError, number_of
from ..spec import ModelSpec, Precision
from ..system import CountProgress

if TYPE_CHECKING:
    from ..graph.view import GraphView

# fetch(names) -> their values, for one set of feeds
Fetch = Callable[[Sequence[str]], Mapping[str, NDArray]]
_CHUNK_BYTES = 256 << 20
_FIRST_CHUNK = 32
_ORT_NODE = re.compile(r"running \w+ node\. Name:\s*'([^']+)'")
_MAX_WRONG_STEPS = 0.02  # fraction of the values of a discontinuous node that rounding may change; 0 if both are FP32


@dataclass(frozen=True, slots=True)
class TensorError:
    """One compared tensor. error: relative to the reference. before: largest error of the tensors that it is computed from. depth:
    number of nodes from the image. text: explanation, if a number is not enough."""

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
    """One module: its largest error, and error and depth of its deepest tensor."""

    module: str
    error: float
    last: float
    depth: int
    tensors: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """Result of the search. metric: "max" or "rms". first: the first diverged tensor, or None."""

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
            return f"no divergence above {self.tolerance:g} in {number_of(self.compared, 'tensor')}"
        first = self.first
        where = f"module '{first.module}'" if first.module else "outside of the model"
        error = first.text or f"error {first.error:.2g}, before it {first.before:.2g}"
        return f"first divergence: {where}, {first.op} '{first.node}' ({error})"


def onnx_fetch(
    view: GraphView, spec: ModelSpec, feeds: Feeds, forced: Mapping[str, NDArray] | None = None, *, without_outputs: bool = False
) -> Fetch:
    """Read tensors of a graph with ONNX Runtime; `forced` and `without_outputs` as in `graph.probe.probe`."""
    from ..backends.onnxruntime.session import OnnxSession
    from ..graph.probe import probe

    def fetch(names: Sequence[str]) -> dict[str, NDArray]:
        model, output_names = probe(view, names, forced, without_outputs=without_outputs)
        with OnnxSession(model.SerializeToString(), spec) as session:
            outputs = session.run(feeds)
        return {name: outputs[output] for name, output in output_names.items()}

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
    original: the graph of the candidate for node names, if `candidate` is a rewritten copy of it.
    tolerance: of the relative error; None takes that of `precision`, and lowers it step by step if
        nothing exceeds it, because errors that are small in early layers may matter at the end.

    Raises:
        SessionError: a graph does not run. GraphError: a graph cannot be probed, or there is no common tensor name.
    """
    read = fetch or onnx_fetch(candidate, spec, feeds)
    names = comparable(candidate, reference)
    if fetch is not None:  # an engine: only float tensors can be its outputs
        from ..graph.view import FLOATS

        names = [name for name in names if candidate.types.get(name) in FLOATS]
    if not names:
        raise GraphError("the two graphs have no tensor name in common; export both with the same version of detrt")
    metric = "max" if precision == "fp32" else "rms"
    limit = Precision(precision).layer_tolerance if tolerance is None else tolerance
    steps = {n.output[-1] if n.op_type == "TopK" else n.output[0]: n for n in candidate.discontinuities()}
    reference_steps = {name for node in reference.discontinuities() for name in node.output}
    steps = {name: node for name, node in steps.items() if name in reference_steps}
    errors: dict[str, tuple[float, str]] = {}
    failed_node = None
    try:
        forced = dict(read(list(steps) or names[:1]))
    except SessionError as error:
        failed_node = _failed_node(candidate, str(error))
        if failed_node is None or fetch is not None:
            raise
        # Tensors that do not depend on the failed node can still be compared.
        non_finite = candidate.dependents(failed_node)
        errors[failed_node.output[0]] = float("inf"), "it failed to run: " + str(error).rsplit(": ", 1)[-1][:200]
        names = [name for name in names if name not in non_finite]
        steps = {name: node for name, node in steps.items() if name not in non_finite}
        read = onnx_fetch(candidate, spec, feeds, without_outputs=True)
        forced = dict(read(list(steps))) if steps else {}
    forced = {name: value for name, value in forced.items() if name in steps}
    if fetch is None:  # other outputs change fusions and rounding, so its own steps are forced as well
        read = onnx_fetch(candidate, spec, feeds, forced, without_outputs=failed_node is not None)
    if forced:
        computed = onnx_fetch(reference, spec, feeds, forced)
        errors.update(_step_errors(forced, steps, computed, precision))
    names = [name for name in names if name not in forced]
    read_reference = onnx_fetch(reference, spec, feeds, forced)
    for chunk, a, b in _chunks(names, read_reference, read):
        for name in chunk:
            errors[name] = difference(a[name], b[name], metric=metric)
        if progress:
            progress(len(errors), max(len(errors), len(names) + len(forced)))
    notes: list[str] = []
    roots = _roots(candidate, errors, limit, original or candidate)
    while not roots and tolerance is None and metric == "max" and limit > 2e-6:
        limit /= 10
        roots = _roots(candidate, errors, limit, original or candidate)
    if limit < Precision(precision).layer_tolerance and tolerance is None and roots:
        notes.append(f"nothing exceeds {Precision(precision).layer_tolerance:g}; the search continued down to {limit:g}")
    return Divergence(
        against, len(errors), metric, limit, roots[0] if roots else None, tuple(roots[:10]),
        tuple(layer_errors(candidate, errors, original or candidate)), tuple(notes),
    )  # fmt: skip


def _failed_node(view: GraphView, error: str) -> Any:
    """The node that ONNX Runtime's message names, or None."""
    match = _ORT_NODE.search(error)
    return next((node for node in view.model.graph.node if match and node.name == match[1]), None)


def comparable(candidate: GraphView, reference: GraphView) -> list[str]:
    """Names of tensors that are the same in both graphs: floats, and integers that depend on shapes only.

    Integers that depend on the image come from discontinuous nodes, which are compared separately.
    """
    from ..graph.view import FLOATS

    same_numbering = _same_numbering(candidate, reference)
    names = []
    for name in candidate.tensors():
        other = reference.producer.get(name)
        if other is None or ("::" in name and not (same_numbering and other.op_type == candidate.producer[name].op_type)):
            continue
        kinds = candidate.types.get(name), reference.types.get(name)
        from_shapes = not (candidate.depth.get(name) or reference.depth.get(name))
        if (all(kind in FLOATS for kind in kinds)) or (from_shapes and None not in kinds and kinds[0] == kinds[1]):
            names.append(name)
    return names


def _same_numbering(candidate: GraphView, reference: GraphView) -> bool:
    """Whether numbered names, such as "onnx::Add_12", are the same in both graphs."""
    a, b = ({n for n in view.tensors() if "::" in n} for view in (candidate, reference))
    return bool(a) and len(a & b) >= 0.95 * max(len(a), len(b))


def _chunks(
    names: list[str], first: Fetch, second: Fetch
) -> Iterator[tuple[list[str], Mapping[str, NDArray], Mapping[str, NDArray]]]:
    """Read tensors of both sides, in chunks of bounded memory."""
    start, size = 0, _FIRST_CHUNK
    while start < len(names):
        chunk = names[start : start + size]
        a, b = first(chunk), second(chunk)
        yield chunk, a, b
        bytes_per_tensor = max(1, max(sum(v.nbytes for v in side.values()) for side in (a, b)) // len(chunk))
        start += size
        # Deeper tensors are usually smaller; half of the budget covers exceptions.
        size = int(np.clip(_CHUNK_BYTES // 2 // bytes_per_tensor, 4, 512))


def _step_errors(
    forced: Mapping[str, NDArray], steps: Mapping[str, Any], computed: Fetch, precision: str
) -> Iterator[tuple[str, tuple[float, str]]]:
    """Errors of the discontinuous nodes of the candidate, against what the reference computes itself."""
    from ..graph.probe import COMPUTED

    names_by_step: dict[str, list[str]] = {}
    for name, node in steps.items():
        if node.op_type == "TopK" and node.output[0]:
            names_by_step[name] = [COMPUTED + node.output[0], node.output[0]]
        else:
            names_by_step[name] = [COMPUTED + name]
    values = computed([n for names in names_by_step.values() for n in names])
    allowed = 0.0 if precision == "fp32" else _MAX_WRONG_STEPS
    for name, tensors in names_by_step.items():
        if len(tensors) == 2:  # the selected values, sorted, may differ by rounding only
            expected, selected = (np.sort(values[n], axis=None) for n in tensors)
            yield name, difference(expected, selected, metric="max" if precision == "fp32" else "rms")
            continue
        own_values, computed_values = forced[name], values[tensors[0]]
        if own_values.shape != computed_values.shape:
            yield name, (float("inf"), f"shape {own_values.shape}, the reference has {computed_values.shape}")
            continue
        wrong = float((own_values != computed_values).mean()) if own_values.size else 0.0
        text = f"{wrong:.1%} of the values are on another side of the step"
        yield name, (1.0, text) if wrong > allowed else (0.0, "")


def _roots(view: GraphView, errors: Mapping[str, tuple[float, str]], limit: float, original: GraphView) -> list[TensorError]:
    """Diverged tensors whose inputs have not diverged; non-finite ones first, then by depth."""

    def before(name: str) -> float:
        worst, visited = 0.0, set()
        todo = list(view.producer[name].input)
        while todo:
            current = todo.pop()
            if current in visited:
                continue
            visited.add(current)
            if current in errors:
                worst = max(worst, errors[current][0])
            elif current in view.producer:
                todo.extend(view.producer[current].input)
        return worst

    roots = []
    for name, (error, text) in errors.items():
        if error > limit and (earlier := before(name)) <= limit:
            node = original.producer.get(name) or view.producer[name]
            module, depth = original.module_of(node), view.depth.get(name, 0)
            roots.append(TensorError(name, node.name, node.op_type, module, error, earlier, depth, text))
    # Non-finite values come first, because harmless rounding may precede an overflow.
    return sorted(roots, key=lambda root: (np.isfinite(root.error), root.depth))


def layer_errors(view: GraphView, errors: Mapping[str, tuple[float, str]], original: GraphView | None = None) -> list[LayerError]:
    """Errors by module path, in the order of the deepest tensor."""
    modules: dict[str, list[tuple[int, float]]] = {}
    for name, (error, _) in errors.items():
        if depth := view.depth.get(name):
            node = (original or view).producer.get(name) or view.producer[name]
            modules.setdefault((original or view).module_of(node), []).append((depth, error))
    rows = []
    for module, rows_of in modules.items():
        deepest = max(rows_of)[0]
        last = max(error for depth, error in rows_of if depth == deepest)
        rows.append(LayerError(module, max(e for _, e in rows_of), last, deepest, len(rows_of)))
    return sorted(rows, key=lambda row: row.depth)
