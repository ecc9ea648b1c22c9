"""How far tensors are from what is expected of them."""

from __future__ import annotations

from torch import Tensor


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, in FP64; of tensors of any device and type."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())
