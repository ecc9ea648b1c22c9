"""How near two runs of one model are, where queries are selected by rank."""

from __future__ import annotations

import torch
from torch import fx

from detrt.backends.gpu.top_k import top_k

aten = torch.ops.aten


def relative(a, b):
    """Norm of the difference over the norm: top-k orders of random weights make single queries differ wholly."""
    good = a.isfinite() & (a.abs() < 1e4)
    return float(((a - b)[good].norm() / a[good].norm()).item())


def matched(want, got):
    """Share of the 100 best queries of each image that have a twin: corners within 1 % of the image, score within 0.02."""
    if want[0].ndim < want[1].ndim:  # one logit for each query, of each phrase
        want, got = ([side[0].flatten(1).unsqueeze(-1), side[1].flatten(1, -2)] for side in (want, got))
    shares = []
    for logits, boxes, other_logits, other_boxes in zip(want[0], want[1], got[0], got[1], strict=True):
        scores, found = logits.sigmoid().amax(-1), other_logits.sigmoid().amax(-1)
        best = scores.topk(min(100, len(scores))).indices
        near = torch.cdist(boxes[best], other_boxes, p=float("inf")) < 0.01
        alike = (scores[best][:, None] - found[None]).abs() < 0.02
        shares.append(float((near & alike).any(1).float().mean()))
    return round(sum(shares) / len(shares), 4)


class Forced(fx.Interpreter):
    """Runs a graph; records the inputs and indices of its selections, or takes the indices from an earlier run."""

    def __init__(self, graph, indices=None):
        super().__init__(graph)
        self.scores, self.indices, self.given = [], [], list(indices or [])

    def run_node(self, n):
        result = super().run_node(n)
        if n.op == "call_function" and n.target in (aten.topk.default, top_k):
            scores = self.env[n.args[0]]
            self.scores.append(scores.float())
            index = result[1]
            if self.given:
                index = self.given.pop(0)
                result = (scores.gather(n.args[2] if len(n.args) > 2 else -1, index), index)
            self.indices.append(index)
        return result


def run_forced(graph, inputs, indices=None):
    """(outputs in FP32, the interpreter with its scores and indices)."""
    runner = Forced(graph, indices)
    return [t.float() for t in runner.run(*inputs)], runner
