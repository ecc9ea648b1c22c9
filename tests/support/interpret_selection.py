"""Run by test_top_k.py with TRITON_INTERPRET=1: the kernels against a stable sort and PyTorch operators."""

import torch

from detrt.backends.gpu.top_k import pack, portable
from detrt.backends.gpu.top_k_triton import pack_candidates, rank_scores

generator = torch.Generator().manual_seed(0)
for rows, n, k, part in ((2, 1300, 7, 1300), (1, 64, 64, 64), (3, 1250, 20, 417), (1, 5, 2, 5)):
    scores = torch.randint(-9, 9, (rows, n), generator=generator) / 3.0  # many are equal
    scores[0, 1], scores[0, 2], scores[0, 3], scores[-1, 4] = float("nan"), float("inf"), float("-inf"), -0.0
    scores[-1, -1], scores[-1, 0] = 3.4e38, -1e-45  # the largest, and the smallest below zero
    values, indices = rank_scores(scores, None, k, part)
    if part < n:
        values, indices = rank_scores(values, indices, k, values.shape[1])
    want = portable(scores, k)
    assert torch.equal(indices, want[1]), (n, k, part)
    assert torch.equal(values.nan_to_num(99.0), want[0].nan_to_num(99.0)), (n, k, part)

infinite = float("inf")
for classes, background, k, bad in ((3, 0, 30, None), (5, 1, 17, float("nan")), (2, 0, 40, infinite), (2, 1, 5, -infinite)):
    logits, boxes = torch.randn(2, 40, classes + background, generator=generator), torch.rand(2, 40, 4, generator=generator)
    if bad is not None:
        logits[1, 3, 1] = boxes[0, 39, 3] = bad
    values, flat = portable(logits[..., :classes].flatten(1), k)
    got = pack_candidates(values, flat, logits, boxes, classes, 6, block=64)
    assert torch.equal(got.nan_to_num(99.0), pack(values, flat, logits, boxes, classes).nan_to_num(99.0)), (classes, bad)
print("equal")
