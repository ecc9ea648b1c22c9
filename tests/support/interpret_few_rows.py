"""Run by test_few_rows.py with TRITON_INTERPRET=1: each sequence that benchmarks/measure_few_rows.py times against FP64."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from measure_few_rows import CASES, NEXT, Ways, difference, drawn_inputs, drawn_weights

ways, like, count = Ways(None), torch.empty(0), 0
for case in CASES:
    weights = drawn_weights(case, like)
    # The norm in the next layer's kernel has another tile for many rows; those of detrt's own kernels have tests of their own.
    for rows in (21, 520) if NEXT in case.kernels else (21,):
        inputs = drawn_inputs(case, rows, like)
        copied = inputs._replace(data=ways.copy(inputs.data))
        for name, call in {"cuBLAS": case.cublas, **case.kernels}.items():
            found = difference(call, case, ways, copied, weights)
            assert found < 1e-5, (name, rows, found)
            count += 1
print("equal to FP64:", count)
