"""Small calls of the deformable attention kernel, for a memory checker, which runs them a hundred times slower:

compute-sanitizer --tool memcheck python tests/gpu/sanitize_msda.py
compute-sanitizer --tool racecheck python tests/gpu/sanitize_msda.py plain
"""

from __future__ import annotations

import sys

import torch

from detrt.models.ops import ms_deform_attn, ms_deform_attn_fused
from detrt.models.ops.msda_launch import launch_msda
from detrt.models.ops.msda_tiles import Tile

LEVELS = ((6, 9), (3, 5), (2, 3))
# points of each level, heads, channels of a head: vectors of 16 bytes, masked reads, one point at a time
CASES = {"plain": ((4, 4, 4), 2, 32), "d-fine": ((3, 6, 1), 3, 5), "masked": ((2, 4, 1), 2, 14), "many": ((20, 20, 21), 1, 16)}


def main() -> None:
    names = sys.argv[1:] or CASES
    shapes = torch.tensor(LEVELS, device="cuda")
    tokens, queries = sum(h * w for h, w in LEVELS), 7
    for name in names:
        points, heads, dim = CASES[name]
        for dtype in (torch.float16, torch.float32):
            value = torch.ones(2, tokens, heads, dim, dtype=dtype, device="cuda")
            total = sum(points)
            # Made on the host: every kernel of PyTorch that runs under the checker costs a second.
            locations = torch.linspace(-2, 3, 2 * queries * heads * total * 2).view(2, queries, heads, total, 2)
            locations[0, 0], locations[0, 1] = float("nan"), 1e30
            weights = torch.full((2, queries, heads, total), 1 / total)
            locations, weights = locations.cuda(), weights.cuda()
            references = torch.full((2, queries, 1, 4), 0.5).cuda()
            ms_deform_attn(value, shapes, locations, weights, points)
            ms_deform_attn(value, shapes, locations, weights, points, True)
            ms_deform_attn_fused(value, shapes, references, locations, weights, points)
            if dim & (dim - 1) == 0:  # the kernel for many queries, which hands numbers over through shared memory
                tile = Tile(8, 4, 4, heads_per_program=2 - heads % 2)
                launch_msda(value, shapes, None, locations, weights, points, tile=tile)
                launch_msda(value, shapes, references, locations, weights, points, tile=tile)
        print(name, flush=True)
    torch.cuda.synchronize()
    print("ran")


if __name__ == "__main__":
    main()
