"""The choice of the best queries: the op, its definition, the pass, and the kernel where Triton is installed."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from interpreted import run_interpreted

from detrt.backends.gpu.top_k import chunk_length, is_faster, top_k
from detrt.backends.inductor.capture import module_of
from detrt.backends.inductor.fusing import fuse_top_k
from detrt.backends.inductor.nodes import finish


def test_equal_scores_stay_in_order():
    infinite = float("inf")
    scores = torch.tensor([[1.0, 3.0, 3.0, infinite, float("nan"), infinite], [0.0, -0.0, 0.0, -1.0, -infinite, 0.0]])
    values, indices = top_k(scores, 4)
    assert indices.tolist() == [[3, 4, 5, 1], [0, 1, 2, 5]]
    assert values[0, [0, 2, 3]].tolist() == [infinite, infinite, 3.0] and values[0, 1].isnan()
    torch.library.opcheck(top_k, (torch.randn(2, 9), 3), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("scores", "k"), [(torch.zeros(4), 1), (torch.zeros(1, 4).half(), 1), (torch.zeros(1, 4), 5), (torch.zeros(1, 4), 0)]
)
def test_bad_scores_are_refused(scores, k):
    with pytest.raises(ValueError, match="float32 with n from k"):
        top_k(scores, k)


@pytest.mark.parametrize(
    ("n", "k"), [(300, 300), (1600, 300), (8400, 300), (22_223, 300), (19_952, 900), (73_656, 900), (8193, 8192)]
)
def test_every_part_holds_as_many_as_are_chosen(n, k):
    chunk = chunk_length(n, k)
    sizes = [min(chunk, n - begin) for begin in range(0, n, chunk)]
    assert sum(sizes) == n and min(sizes) >= k
    assert len(sizes) == 1 or n * chunk + (len(sizes) * k) ** 2 < n * n


def test_large_batches_are_left_to_pytorch():
    assert is_faster(1, 8400, 300) and is_faster(8, 8400, 300) and is_faster(1, 22_223, 900)
    assert not is_faster(16, 8400, 300) and not is_faster(1, 73_656, 900) and not is_faster(1, 300, 301)


class Chosen(torch.nn.Module):
    def __init__(self, largest: bool) -> None:
        super().__init__()
        self.largest = largest

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = logits.max(-1).values.topk(5, dim=1, largest=self.largest)
        return values, logits.gather(1, indices[..., None].expand(-1, -1, logits.shape[2]))


@pytest.mark.parametrize("largest", [True, False])
def test_selections_become_the_op(largest):
    logits = torch.randn(2, 40, 3)
    graph = module_of(torch.export.export(Chosen(largest), (logits,)).run_decompositions({}))
    assert fuse_top_k(graph) == int(largest), "the smallest are left alone"
    finish(graph)
    assert any(node.target == top_k for node in graph.graph.nodes) == largest
    for found, want in zip(graph(logits), Chosen(largest)(logits), strict=True):
        assert torch.equal(found, want)


def test_a_program_with_the_op_is_exported_and_compiled():
    class Picked(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return top_k(scores, 3)[1]

    scores = torch.tensor([[1.0, 2.0, 2.0, 5.0]])
    program = torch.export.export(Picked(), (scores,))
    assert [n.target for n in program.graph.nodes if n.target == top_k] == [top_k]
    assert program.module()(scores).tolist() == [[3, 1, 2]]
    assert torch.compile(Picked(), backend="aot_eager", fullgraph=True)(scores).tolist() == [[3, 1, 2]]


def test_the_kernel_under_the_interpreter():
    assert run_interpreted("interpret_selection.py") == "equal"
