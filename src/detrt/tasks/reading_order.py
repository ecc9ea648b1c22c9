"""Reading order of the detections of a document: from pairwise logits of queries to ranks.

The rules are those of transformers' processors of PP-DocLayout:

    vote         of query j: the sum over all other queries i of the sigmoid of order_logits[i, j]; few votes are read first
    votes        (v2, v3) the rank of a detection is that of its query by votes among all queries of the model
    successors   (v4) the returned queries alone take part. Each successor logit above 0 is an edge. An edge is left out where it is
                 the weakest of a cycle. The components of the remaining graph follow each other by their mean vote; inside one, a
                 query comes after its predecessors, and of several that may come next the one that is read before most of the others

Detections of one query under several labels have one rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..spec import ORDER_LOGITS, SUCCESSOR_LOGITS
from .base import PublishedTask, SizeHW, Window

if TYPE_CHECKING:
    from ..spec import ModelSpec

RANKS = 1  # by which two orders may differ: two queries with equal votes but for rounding change places

# How far beside the integer of another runtime a number may lie: rounding moves a coordinate of a thousandth by a thousandth of it.
CUT_TOLERANCE = 0.01


def near_cuts(values: Any, given: Any) -> Any:
    """Where rounding alone may cut a number to the given integer: arrays or tensors of one shape -> booleans."""
    return (values >= given - CUT_TOLERANCE) & (values < given + 1 + CUT_TOLERANCE)


def reading_order(outputs: Mapping[str, NDArray], queries: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n,) ranks of the detections of one image, from 0, lower ones are read first.

    Args:
        outputs: `order_logits` and of a model of "successors" `successor_logits`, (queries, queries) each.
        queries: (n,) the query of each detection.
    """
    logits = outputs[ORDER_LOGITS].astype(np.float32)
    if SUCCESSOR_LOGITS not in outputs:
        return _ranks(np.argsort(_votes(_before(logits)), kind="stable"))[queries]
    present, which = np.unique(queries, return_inverse=True)
    rows = np.ix_(present, present)
    return _by_successors(_before(logits[rows]), outputs[SUCCESSOR_LOGITS][rows].astype(np.float32))[which]


def _before(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Probability that i is read before j, (n, n); 0 on the diagonal."""
    small = np.exp(-np.abs(logits))
    scores = np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    np.fill_diagonal(scores, 0)
    return scores


def _votes(before: NDArray[np.float32]) -> NDArray[np.float32]:
    return before.sum(0)


def _ranks(order: NDArray[np.int64]) -> NDArray[np.int64]:
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks


def _by_successors(before: NDArray[np.float32], successor: NDArray[np.float32]) -> NDArray[np.int64]:
    count = len(before)
    edges = _without_cycles(successor)
    votes = _votes(before)
    joined = _widest((edges | edges.T).astype(np.int64)) > 0
    np.fill_diagonal(joined, True)
    components = [np.flatnonzero(row) for i, row in enumerate(joined) if row.argmax() == i]  # of their first query
    components = [nodes[_sorted(edges[np.ix_(nodes, nodes)], before[np.ix_(nodes, nodes)])] for nodes in components]
    components.sort(key=lambda nodes: float(votes[nodes].mean()))
    return _ranks(np.concatenate([np.zeros(0, np.int64), *components])) if count else np.zeros(0, np.int64)


def _without_cycles(successor: NDArray[np.float32]) -> NDArray[np.bool_]:
    """The edges that remain, (n, n). Taking out the weakest edge of every cycle, until there is none, leaves out those edges from
    whose end a path of stronger ones leads back to their start. Of equal edges the first by row and column counts as the weakest."""
    edges = successor > 0
    np.fill_diagonal(edges, False)
    strength = np.zeros(successor.shape, np.int64)
    order = np.argsort(successor[edges], kind="stable")
    strength[edges] = _ranks(order) + 1
    return edges & (strength > _widest(strength).T)


def _widest(strength: NDArray[np.int64]) -> NDArray[np.int64]:
    """(n, n) of the path from i to j whose weakest edge is the strongest, the strength of that edge; 0 where there is no path."""
    best = strength.copy()
    for middle in range(len(best)):
        np.maximum(best, np.minimum(best[:, middle, None], best[middle]), out=best)
    return best


def _sorted(edges: NDArray[np.bool_], before: NDArray[np.float32]) -> list[int]:
    """Topological order of a graph without cycles; of several nodes that may come next the one with the highest probability to be
    read before the others of them, the first of equal ones."""
    predecessors = edges.sum(0)
    free = np.flatnonzero(predecessors == 0).tolist()
    order: list[int] = []
    while free:
        # Added one by one in the order of `free`, as transformers does: rounding may decide between almost equal ones.
        scores = {node: sum(before[node, other] for other in free if other != node) for node in free}
        best = min(free, key=lambda node: (-scores[node], node))
        free.remove(best)
        order.append(best)
        predecessors[edges[best]] -= 1
        free += np.flatnonzero(edges[best] & (predecessors == 0)).tolist()
    return order


class ReadingOrder(PublishedTask):
    """Ranks of the detections of a document; lower ones are read first. They are returned by rank, equal ranks by score."""

    field = "reading_order"
    title = "reading order and its ranks"
    key = "reading_order"
    published = "order_seq"
    dtype = "int64"
    sorts = pairwise = after_graph = table = True

    def outputs(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        rule, pairs = spec.decode, (spec.decode.num_queries,) * 2
        names = {"none": (), "votes": (ORDER_LOGITS,)}.get(rule.reading_order, (ORDER_LOGITS, SUCCESSOR_LOGITS))
        return dict.fromkeys(names, pairs)

    def decode(
        self, outputs: Mapping[str, NDArray], queries: NDArray[np.int64], size_hw: SizeHW, covered_hw: tuple[float, float] | None
    ) -> NDArray[np.int64]:
        return reading_order(outputs, queries)

    def of_windows(
        self, parts: Sequence[tuple[Window, Any]], kept: Sequence[int], members: Mapping[int, list[int]], size_hw: SizeHW
    ) -> None:
        """A page is read as a whole."""

    def difference(self, ours: Any, theirs: Any, tolerance_px: float) -> str:
        ranks = np.abs(ours - theirs).max(initial=0)
        return "" if ranks <= RANKS else f"the reading order by {ranks} ranks (allowed {RANKS})"


def cuts_coordinates(spec: ModelSpec) -> bool:
    """Whether the model cuts coordinates to integers for its order, which rounding may change."""
    return spec.decode.reading_order == "votes"
