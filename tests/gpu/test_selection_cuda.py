"""The choice of the best queries on an NVIDIA GPU: `pytest -m gpu tests/gpu/test_selection_cuda.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from detrt.backends.gpu.top_k import portable, top_k

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 8400, 300), (3, 1600, 300), (2, 22_223, 900), (1, 32_768, 1024), (1, 300, 300), (2, 70_000, 5)]
)
def test_equal_to_a_stable_sort(rows, n, k):
    generator = torch.Generator().manual_seed(n)
    scores = torch.randint(-2000, 2000, (rows, n), generator=generator) / 7.0  # many are equal
    scores[0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0])
    want = portable(scores, k)
    values, indices = top_k(scores.cuda(), k)
    assert torch.equal(indices.cpu(), want[1])
    assert torch.equal(values.cpu().nan_to_num(7e30), want[0].nan_to_num(7e30))


def test_compiled_and_captured():
    scores = torch.randn(2, 8400, device="cuda")
    step = torch.compile(lambda x: top_k(x * 2, 300)[1] + 1, fullgraph=True)
    want = portable(scores.cpu() * 2, 300)[1] + 1
    assert torch.equal(step(scores).cpu(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(scores)
    scores.copy_(scores.flip(1))
    graph.replay()
    assert torch.equal(found.cpu(), portable(scores.cpu() * 2, 300)[1] + 1)
