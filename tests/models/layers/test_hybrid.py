"""The position embedding of the hybrid encoder, as the authors compute it and as transformers does."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import torch

from detrt.models.layers.hybrid import AuthorsPositions, take_authors_positions
from detrt.models.load import load_source

WIDTH = 32


def positions(height: int, width: int) -> torch.Tensor:
    """By the authors' definition: cells numbered column by column, x before y; (height * width, WIDTH)."""
    cells = torch.tensor([(x, y) for x in range(width) for y in range(height)], dtype=torch.float64)
    omega = 10000.0 ** (-torch.arange(WIDTH // 4, dtype=torch.float64) / (WIDTH // 4))
    x, y = cells[:, :1] * omega, cells[:, 1:] * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1).float()


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (5, 3), (1, 7), (7, 1), (10, 40)], ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("family", ("rt_detr", "rt_detr_v2", "d_fine", "deimv2"))
def test_tokens_have_the_positions_that_the_authors_train_with(family, size):
    module = load_source(f"random:{family}/tiny").module
    take_authors_positions(module)
    found = [part for part in module.modules() if isinstance(part, AuthorsPositions)]
    assert found
    found[0].inner.embed_dim = WIDTH
    got = found[0](width=size[1], height=size[0], device=torch.device("cpu"), dtype=torch.float32)
    torch.testing.assert_close(got[0], positions(*size), atol=1e-6, rtol=0)
    plain = found[0].inner(width=size[1], height=size[0], device=torch.device("cpu"), dtype=torch.float32)
    assert torch.equal(got, plain) == (size[0] == size[1])
