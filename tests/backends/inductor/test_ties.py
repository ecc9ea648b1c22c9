"""A package that selects neighbours, whose scores tie, in another order than PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from torch.fx.experimental.proxy_tensor import make_fx

from detrt.backends.compare import output_differences
from detrt.backends.inductor.ties import run_with_ties

QUERIES, LIMIT = 4, 1e-3
EMBEDDING = torch.linspace(-1, 1, QUERIES * 5).reshape(QUERIES, 5)
NAMES = ("logits", "pred_boxes")


def select(memory, chosen=None):
    """The best rows by their first value, each with an embedding of its rank, and what attention spreads."""
    chosen = memory[..., 0].topk(QUERIES)[1] if chosen is None else chosen
    queries = memory.gather(1, chosen[..., None].expand(-1, -1, memory.shape[-1])) * (1 + EMBEDDING)
    queries = queries + 1e-5 * queries.softmax(1).mean(1, keepdim=True)
    return queries, queries[..., :4].sigmoid()


def captured(memory):
    return make_fx(lambda memory: select(memory))(memory)


def memory_of(scores):
    memory = torch.randn(2, len(scores), 5, generator=torch.Generator().manual_seed(0))
    memory[..., 0] = torch.tensor(scores)
    return memory


def worst(want, got):
    sides = ({name: t.numpy() for name, t in zip(NAMES, side, strict=True)} for side in (want, got))
    return max(output_differences(*sides, LIMIT).values())


@pytest.mark.parametrize(
    ("scores", "chosen", "ties"),
    [
        ([0.9, 0.7, 0.7 - 1e-6, 0.5, 0.3, 0.1], [[0, 2, 1, 3], [0, 1, 2, 3]], True),
        ([0.9, 0.7, 0.6, 0.5, 0.5 - 1e-6, 0.1], [[0, 1, 2, 4], [0, 1, 2, 4]], True),
        ([0.9, 0.7, 0.69, 0.5, 0.3, 0.1], [[0, 2, 1, 3], [0, 1, 2, 3]], False),
        ([0.9, 0.7, 0.6, 0.5, 0.49, 0.1], [[0, 1, 2, 4], [0, 1, 2, 3]], False),
    ],
    ids=["neighbours", "last and next", "neighbours that do not tie", "last and next that do not tie"],
)
def test_what_ties_is_exchanged_and_nothing_else(scores, chosen, ties):
    memory = memory_of(scores)
    graph = captured(memory)
    expected, package = graph(memory), select(memory, torch.tensor(chosen))
    assert worst(expected, package) > 0.1
    found = run_with_ties(graph, (memory,), expected, package, LIMIT)
    assert (worst(found, package) <= 1e-6) == ties


def test_queries_that_are_sorted_after_the_selection_are_exchanged_by_their_rank():
    """PP-DocLayoutV2 returns what counts first."""

    class Ordered(torch.nn.Module):
        def forward(self, memory, chosen=None):
            logits, boxes = select(memory, chosen)
            order = torch.argsort((memory[:, :QUERIES, 1] > 0) * QUERIES - torch.arange(QUERIES), dim=1, descending=True)[
                ..., None
            ]
            return logits.gather(1, order.expand_as(logits)), boxes.gather(1, order.expand_as(boxes))

    memory = memory_of([0.9, 0.7, 0.7 - 1e-6, 0.5, 0.3, 0.1])
    memory[0, :QUERIES, 1] = torch.tensor([-1.0, 1, -1, 1])  # returned: ranks 1, 3, 0, 2
    graph = torch.export.export(Ordered(), (memory,), strict=False).module()
    expected, package = graph(memory), Ordered()(memory, torch.tensor([[0, 2, 1, 3], [0, 1, 2, 3]]))
    assert worst(expected, package) > 0.1
    assert worst(run_with_ties(graph, (memory,), expected, package, LIMIT), package) <= 1e-6


def test_another_fault_is_not_explained_by_a_tie():
    memory = memory_of([0.9, 0.7, 0.7 - 1e-6, 0.5, 0.3, 0.1])
    graph = captured(memory)
    package = select(memory, torch.tensor([[0, 2, 1, 3], [0, 1, 2, 3]]))
    package[0][1, 1] += 0.5
    assert worst(run_with_ties(graph, (memory,), graph(memory), package, LIMIT), package) > 0.1
