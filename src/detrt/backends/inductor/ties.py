"""PyTorch with the selections of a package, where both differ by ties alone.

A package neither tells nor takes selections. Where scores tie within rounding, it may select neighbours in another order than PyTorch.
Pairing queries by their outputs does not help models whose queries have an embedding of the rank (RF-DETR), that return logits of pairs of
queries (PP-DocLayout), or that have equal queries (D-FINE, at positions outside of the image).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

# Scores closer than this, relative to the largest of all, tie; a hundredth of the difference that outputs may have. Rounding to FP32
# changed those of PP-DocLayoutV2 by 8e-6.
_TIE = 1e-5


def run_with_ties(
    graph: fx.GraphModule, inputs: Sequence[Tensor], expected: Sequence[Tensor], outputs: Sequence[Tensor], limit: float
) -> list[Tensor]:
    """The outputs of `graph` with each pair of neighbours exchanged that ties and whose queries both differ.

    Args:
        graph: of a `CapturedGraph`.
        inputs: its inputs.
        expected: its outputs, as it selects.
        outputs: those of the package.
        limit: a query differs where an output is further apart, relative to the largest value.
    """
    rows = [
        _apart(want, got, limit)
        for want, got in zip(expected, outputs, strict=True)
        if want.ndim == 3 and want.shape[1] != want.shape[2]  # logits of pairs of queries differ wherever one of both does
    ]
    if not rows or any(row.shape != rows[0].shape for row in rows):
        return list(expected)
    differ = torch.stack(rows).any(0)
    if any(node.target is torch.ops.aten.argsort.default for node in graph.graph.nodes):
        sorting = _Exchanging(graph, torch.zeros_like(differ))
        sorting.run(*inputs)
        differ = torch.zeros_like(differ).scatter(1, sorting.order, differ)
    return [t.float().cpu() for t in _Exchanging(graph, differ).run(*inputs)]


def _apart(want: Tensor, got: Tensor, limit: float) -> Tensor:
    """(batch, queries, n) twice -> (batch, queries) bool. Infinite values are equal or apart."""
    return ((want != got) & ~((want - got).abs() <= limit * _scale(want))).any(-1)


def _scale(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0).abs().amax()


class _Exchanging(fx.Interpreter):
    """differ: (batch, queries) bool, by rank in the selection. order: ranks in the order of the outputs (PP-DocLayoutV2 sorts its queries)."""

    def __init__(self, graph: fx.GraphModule, differ: Tensor) -> None:
        super().__init__(graph)
        self.differ = differ
        self.order = torch.arange(differ.shape[1]).expand_as(differ)

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        if node.target is torch.ops.aten.argsort.default and found.shape == self.differ.shape:
            self.order = found.cpu()
        if node.target is not torch.ops.aten.topk.default or found[1].shape != self.differ.shape:
            return found
        scores, count = self.fetch_args_kwargs_from_env(node)[0][0], found[1].shape[-1]
        values, ranked = torch.topk(scores, min(count + 1, scores.shape[-1]))
        ties = (values[:, :-1] - values[:, 1:] <= _TIE * _scale(scores)).cpu()
        for image, first in (ties & self.differ[:, : ties.shape[1]]).nonzero().tolist():
            second = first + 1
            # What is behind the last rank is no query.
            if self.differ[image, first] and (second == count or self.differ[image, second]):
                ranked[image, [first, second]] = ranked[image, [second, first]]
                self.differ[image, first : second + 1] = False
        chosen = ranked[:, :count].contiguous()
        return scores.gather(-1, chosen), chosen
