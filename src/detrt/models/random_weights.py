"""Seeded weights through which a picture comes; see `random_models`."""

from __future__ import annotations

import torch

SEED = 20260101


def keep_variance(module: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw the weights of convolutions and linear layers, in place: sqrt(2 / fan in), He et al., arXiv:1502.01852.

    Linear layers have no ReLU on both sides, so theirs is sqrt(1 / fan in).
    """
    for child in module.modules():
        if isinstance(child, (torch.nn.Conv2d, torch.nn.Linear)):
            gain = 2.0 if isinstance(child, torch.nn.Conv2d) else 1.0
            child.weight.data.normal_(0, (gain / child.weight[0].numel()) ** 0.5, generator=generator)


def spread_variances(module: torch.nn.Module, generator: torch.Generator) -> None:
    """Move the variances of normalisations off 1, in place."""
    for name, buffer in module.named_buffers():
        if name.endswith("running_var"):
            buffer.data *= torch.empty_like(buffer).uniform_(0.6, 1.6, generator=generator)
