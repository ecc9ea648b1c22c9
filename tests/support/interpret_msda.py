"""Runs the Triton kernel on the CPU, under Triton's interpreter, next to FP64; `test_kernels.py` starts it."""

from __future__ import annotations

import itertools

import torch
from relative_norm import relative

from detrt.backends.inductor.kernels import portable as windows_portable
from detrt.backends.inductor.windows_triton import launch_windows
from detrt.models.ops import ms_deform_attn_fused
from detrt.models.ops import msda as portable
from detrt.models.ops.msda_launch import launch_msda
from detrt.models.ops.msda_tiles import Tile

LEVELS, POINTS = ((6, 9), (3, 5)), [3, 2]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes, count = torch.tensor(LEVELS), 0
    for (dtype, dim, allowed), tile in itertools.product(
        ((torch.float32, 8, 1e-6), (torch.float16, 16, 1e-3), (torch.float32, 5, 1e-6)), (Tile(4, 2, 1), Tile(1, 0, 1, True))
    ):
        value = torch.randn(2, 69, 2, dim, generator=generator).to(dtype)
        locations = 0.5 + 1.6 * (torch.rand(2, 5, 2, 5, 2, generator=generator) - 0.5)
        # What is not a number is for tests/gpu: the interpreter's maximum of it and a number is not the number.
        locations[0, 0, 0, 0, 0], locations[0, 1, 0, 1, 1] = -1e30, float("inf")
        weights = torch.rand(2, 5, 2, 5, generator=generator)
        for discrete in (False, True):
            expected = portable.reference(value.double(), shapes, locations.double(), weights.double(), POINTS, discrete)
            found = launch_msda(value, shapes.int(), None, locations, weights, POINTS, discrete=discrete, tile=tile)
            assert relative(found, expected) < allowed, (dtype, tile, discrete)
        sides, levels = (2, 2) if dim == 8 else (4, 1)
        references = torch.rand(1, 5, levels, sides, generator=generator)
        offsets = (2 * torch.randn(2, 5, 2, 5, 2, generator=generator)).to(dtype)
        logits = (3 * torch.randn(2, 5, 2, 5, generator=generator)).to(dtype)
        args = (shapes, references.double(), offsets.double(), logits.double(), POINTS)
        expected = ms_deform_attn_fused(value.double(), *args)
        found = launch_msda(value, shapes, references, offsets, logits, POINTS, tile=tile)
        assert relative(found, expected) < allowed, (dtype, tile, sides)
        # a slice that does not lie in pairs, and sizes that do not fit the value
        shifted = torch.cat([torch.zeros(1), locations.flatten()])[1:].view(locations.shape)
        again = launch_msda(value, shapes, None, shifted, weights, POINTS, tile=tile)
        assert relative(again, portable.reference(value.double(), shapes, locations.double(), weights.double(), POINTS)) < allowed
        assert launch_msda(value, shapes * 2, None, locations, weights, POINTS, tile=tile).isnan().all()
        count += 2
    print(count + many_queries() + inside_windows(), "cases")


def many_queries() -> int:
    """The kernel for many queries: 1, 2 and 4 points at a time, levels of one row, one column and one cell, odd points."""
    generator = torch.Generator().manual_seed(2)
    levels, points = ((6, 9), (1, 4), (3, 1), (1, 1)), [3, 4, 1, 2]
    shapes, tokens = torch.tensor(levels), sum(h * w for h, w in levels)
    cases = ((torch.float16, 32, 2, 2), (torch.bfloat16, 16, 4, 4), (torch.float32, 8, 1, 1))
    for dtype, dim, heads_per_program, at_once in cases:
        allowed = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-6}[dtype]
        tile = Tile(8, at_once, 1, heads_per_program=heads_per_program)
        value = torch.randn(2, tokens, 4, dim, generator=generator).to(dtype)
        locations = 0.5 + 1.6 * (torch.rand(2, 7, 4, 10, 2, generator=generator) - 0.5)
        locations[0, 0, 0, 0, 0], locations[0, 1, 0, 1, 1] = -1e30, float("inf")
        weights = torch.rand(2, 7, 4, 10, generator=generator)
        expected = portable.reference(value.double(), shapes, locations.double(), weights.double(), points)
        for given in (locations, torch.cat([torch.zeros(1), locations.flatten()])[1:].view(locations.shape)):
            assert relative(launch_msda(value, shapes, None, given, weights, points, tile=tile), expected) < allowed, (
                dtype,
                tile,
            )
        assert launch_msda(value, shapes + 1, None, locations, weights, points, tile=tile).isnan().all()
        for sides, own in ((2, 4), (4, 1)):
            references = torch.rand(1, 7, own, sides, generator=generator)
            offsets = (2 * torch.randn(2, 7, 4, 10, 2, generator=generator)).to(dtype)
            logits = (3 * torch.randn(2, 7, 4, 10, generator=generator)).to(dtype)
            args = (shapes, references.double(), offsets.double(), logits.double(), points)
            found = launch_msda(value, shapes, references, offsets, logits, points, tile=tile)
            assert relative(found, ms_deform_attn_fused(value.double(), *args)) < allowed, (dtype, tile, sides)
    return 2 * len(cases)


def inside_windows() -> int:
    """Attention inside windows: one block and several, with and without a mask that changes with the window."""
    generator = torch.Generator().manual_seed(1)
    cases = ((4, 40, 2, 32, 2), (2, 9, 1, 16, 0))
    for windows, tokens, heads, dim, masks in cases:
        qkv = torch.randn(windows, tokens, 3 * heads * dim, generator=generator)
        bias = torch.randn(heads, tokens, tokens, generator=generator)
        mask = -100.0 * (torch.rand(masks, tokens, tokens, generator=generator) < 0.3) if masks else None
        expected = windows_portable(*(None if t is None else t.double() for t in (qkv, bias, mask)), heads, 0.2)
        for blocks in ((16, 16), (64, 32)):
            assert relative(launch_windows(qkv, bias, mask, heads, 0.2, None, *blocks), expected) < 1e-6, (tokens, blocks)
    return len(cases)


if __name__ == "__main__":
    main()
