"""The choice of the best queries on an NVIDIA GPU: `pytest -m gpu tests/gpu/test_selection_cuda.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from detrt.backends.gpu.top_k import pack, portable, select, top_k
from detrt.spec import DecodeSpec, InputSpec, ModelSpec

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


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("activation", "choice"), [("sigmoid", "topk"), ("softmax", "query")])
def test_candidates_are_packed_as_by_pytorch(activation, choice, bad):
    rule = DecodeSpec(activation, choice, 300, 80, 300)
    spec = ModelSpec("test", InputSpec("stretch", 64, 64), rule, {})
    generator = torch.Generator().manual_seed(0)
    logits, boxes = (
        torch.randn(3, 300, 80 + (activation == "softmax"), generator=generator),
        torch.rand(3, 300, 4, generator=generator),
    )
    if bad is not None:
        logits[1, 7, 3] = boxes[2, 299, 3] = bad
    rows = select(logits.cuda(), boxes.cuda(), spec).cpu()
    flat = rows[:, :-1, 1].long()
    assert rows.shape == (3, 301, 6) and all(len(set(row.tolist())) == 300 for row in flat)
    want = pack(rows[:, :-1, 0], flat, logits, boxes, 80)
    assert torch.equal(rows.nan_to_num(99.0), want.nan_to_num(99.0))
    if activation == "sigmoid":
        assert torch.equal(flat, portable(logits.flatten(1), 300)[1])
