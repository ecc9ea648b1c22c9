"""Run by test_selection.py with TRITON_INTERPRET=1: the kernel against a stable sort."""

import torch

from detrt.backends.gpu.top_k import portable
from detrt.backends.gpu.top_k_triton import rank_scores

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
print("equal")
